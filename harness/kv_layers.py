"""What a prefill sends, layer by layer: sizes by length, and when each layer may leave.

Layer k of L is ready at start + T_prefill (k + 1) / L when transfer is layer-wise, every layer at
the end of prefill otherwise. A ``Sending`` says so in a few numbers; arrays of its layers are made
only where they are needed.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from harness.architecture import Architecture

FloatArray = NDArray[np.float64]


class LayerSizes:
    """Bytes of each layer by length, for one architecture, as whole numbers in floats."""

    def __init__(self, architecture: Architecture) -> None:
        layers = architecture.layers
        self.num_layers = len(layers)
        # (layers,) each
        self.growing = np.array([one.growing_bytes_per_token for one in layers], dtype=np.float64)
        self.fixed = np.array([one.fixed_bytes for one in layers], dtype=np.float64)
        self.windows = np.array([one.window_tokens for one in layers])
        self.window = np.array([one.window_bytes_per_token for one in layers], dtype=np.float64)
        self.has_windows = bool(self.window.any())
        self._by_layer = [
            (float(g), float(f), float(w), int(n))
            for g, f, w, n in zip(self.growing, self.fixed, self.window, self.windows, strict=True)
        ]
        self._most = tuple(float(a.max()) for a in (self.growing, self.fixed, self.window))
        self._most_window = int(self.windows.max())
        self._sum = (float(self.growing.sum()), float(self.fixed.sum()))
        spans = np.unique(self.windows[self.window > 0])
        self._by_window = [(float(self.window[self.windows == n].sum()), int(n)) for n in spans]

    def __call__(self, tokens: int, resident_tokens: int = 0) -> FloatArray:
        """Bytes of each layer after ``tokens`` tokens, in layer order; of the growing KV only what
        comes after ``resident_tokens`` (``Architecture.moved_bytes``)."""  # [layers]
        sizes: FloatArray = self.growing * (tokens - resident_tokens) + self.fixed
        if self.has_windows:
            sizes += self.window * np.minimum(tokens, self.windows)
        return sizes

    def total(self, tokens: int, resident_tokens: int = 0) -> float:
        """Bytes of all layers."""
        growing, fixed = self._sum
        size = growing * (tokens - resident_tokens) + fixed
        for window, longest in self._by_window:
            size += window * min(tokens, longest)
        return size

    def of_layer(self, layer: int, tokens: int, resident_tokens: int = 0) -> float:
        """Bytes of one layer, counted from 0."""
        growing, fixed, window, longest = self._by_layer[layer]
        size = growing * (tokens - resident_tokens) + fixed
        return size + window * min(tokens, longest) if window else size

    def most(self, tokens: int, resident_tokens: int = 0) -> float:
        """No layer has more bytes."""
        growing, fixed, window = self._most
        size = growing * (tokens - resident_tokens) + fixed
        return size + window * min(tokens, self._most_window) if window else size


def ready_times(start_s: float, end_s: float, num_layers: int, *, layerwise: bool) -> FloatArray:
    """When each layer's KV may leave, in layer order; the last one exactly at ``end_s``."""
    if not layerwise:
        return np.full(num_layers, end_s, dtype=np.float64)
    ready_s = start_s + (end_s - start_s) / num_layers * np.arange(1.0, num_layers + 1)
    ready_s[-1] = end_s
    return ready_s


class Sending(Struct, gc=False):
    """``count`` pieces at equal steps from ``start_s`` to ``end_s``: the layers, or all in one.

    ``order`` counts what was offered; ``place`` is in a ``SendingTable``, -1 without one;
    ``most_s`` is the longest time that the path takes for a piece, ``departed`` when the last one
    left, in the path's own time, once that is known.
    """

    order: int
    start_s: float
    end_s: float
    step_s: float
    count: int
    tokens: int
    resident_tokens: int
    total_bytes: float
    most_s: float
    place: int = -1
    departed: float | None = None

    def ready_by(self, now_s: float) -> tuple[int, float]:
        """How many pieces are ready, and since when the last of them is."""
        if now_s >= self.end_s:
            return self.count, self.end_s
        start_s, step_s = self.start_s, self.step_s
        done = int((now_s - start_s) / step_s) if now_s > start_s else 0
        if done >= self.count:
            done = self.count - 1
        if done and start_s + step_s * done > now_s:
            done -= 1
        elif done + 1 < self.count and start_s + step_s * (done + 1) <= now_s:
            done += 1
        return done, start_s + step_s * done


class SendingTable:
    """The pieces of one path's sendings in rows, so that many of them are looked at together: when
    each is ready and for how long the path is busy with it, at a rate in bytes per second."""

    def __init__(self, sizes: LayerSizes, count: int, rate_bytes_per_s: float) -> None:
        self._sizes = sizes
        self._count = count
        self._rate = rate_bytes_per_s
        self._steps = np.arange(1.0, count + 1)  # [pieces]
        self._free: list[int] = []
        self._owners: list[Sending | None] = []
        self._until_s = -math.inf
        # Behind the last piece there is one that is never ready.  # [places, pieces + 1]
        self._ready = np.empty((0, count + 1))
        self._busy = np.empty((0, count + 1))
        self._order = np.empty(0, np.int64)  # [places]
        #: The next piece of each and when it is ready; none where nobody is.  # [places]
        self._done = np.empty(0, np.int64)
        self._next = np.empty(0)

    def put_all(self, sendings: Iterable[Sending]) -> None:
        """Give each a place."""
        for one in sendings:
            self._put(one)

    def _put(self, one: Sending) -> None:
        if not self._free:
            self._grow()
        one.place = place = self._free.pop()
        self._owners[place] = one
        count, ready, moving = self._count, self._ready[place], one.tokens - one.resident_tokens
        np.multiply(self._steps, one.step_s, out=ready[:count])
        ready[:count] += one.start_s
        if ready[count - 1] > one.end_s:
            np.minimum(ready[:count], one.end_s, out=ready[:count])
        ready[count - 1], ready[count] = one.end_s, np.inf
        if count == 1:
            size: FloatArray | float = one.total_bytes
        else:
            size = self._sizes.growing * moving + self._sizes.fixed
            if self._sizes.has_windows:
                size += self._sizes.window * np.minimum(one.tokens, self._sizes.windows)
        np.divide(size, self._rate, out=self._busy[place, :count])
        self._order[place] = one.order
        done = int(ready.searchsorted(self._until_s, side="right"))
        self._done[place], self._next[place] = done, ready[done]

    def _grow(self) -> None:
        places = len(self._owners)
        more = max(16, places)
        self._free = list(range(places + more - 1, places - 1, -1))
        self._owners += [None] * more
        width = self._count + 1
        self._ready = np.concatenate([self._ready, np.full((more, width), np.inf)])
        self._busy = np.concatenate([self._busy, np.zeros((more, width))])
        self._order = np.concatenate([self._order, np.zeros(more, np.int64)])
        self._done = np.concatenate([self._done, np.zeros(more, np.int64)])
        self._next = np.concatenate([self._next, np.full(more, np.inf)])

    def drop(self, one: Sending) -> None:
        """Take its place away."""
        self._owners[one.place] = None
        self._next[one.place] = np.inf
        self._ready[one.place] = np.inf
        self._free.append(one.place)

    def pass_over(self, until_s: float) -> None:
        """What was ready by then has been accounted for."""
        if until_s != self._until_s:
            self._until_s = until_s
            self._done = np.add.reduce(self._ready <= until_s, axis=1)
            self._next = self._ready[np.arange(len(self._done)), self._done]

    def ready_until(
        self, until_s: float
    ) -> tuple[FloatArray, FloatArray, Callable[[FloatArray], None]] | None:
        """The pieces that have become ready since the last look in the order in which they did,
        earlier sendings first: when, for how long the path is busy with each, and where to say when
        each departed. None where there is none."""
        self._until_s = until_s
        # Methods, for their functions take as long again on arrays as short as these.
        who = (self._next <= until_s).nonzero()[0]  # [sendings]
        if not len(who):
            return None
        low = self._done[who]
        at = who * (self._count + 1) + low  # in the flat table
        high, ends = low + 1, None
        ready, ahead, order = self._next[who], self._ready.take(at + 1), self._order[who]
        if np.minimum.reduce(ahead) <= until_s:  # several pieces of one
            high = np.add.reduce(self._ready[who] <= until_s, axis=1)
            more = high - low
            ends = more.cumsum()
            ahead = self._ready.take(at + more)
            at = np.arange(ends[-1]) + (at - ends + more).repeat(more)  # [pieces]
            ready, order = self._ready.take(at), order.repeat(more)
        self._done[who], self._next[who] = high, ahead
        by_time = np.lexsort((order, ready))
        ended = (high == self._count).nonzero()[0].tolist()
        last = [n if ends is None else int(ends[n]) - 1 for n in ended]
        owners = [self._owners[who[n]] for n in ended]

        def tell(departed: FloatArray) -> None:
            for owner, piece in zip(owners, last, strict=True):
                assert owner is not None, "a piece of nobody"
                owner.departed = float(departed[(by_time == piece).nonzero()[0][0]])

        return ready[by_time], self._busy.take(at[by_time]), tell
