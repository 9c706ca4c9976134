"""What a prefill sends, layer by layer: sizes by length, and when each layer may leave.

Layer k of L is ready at start + T_prefill (k + 1) / L when transfer is layer-wise, every layer at
the end of prefill otherwise. A ``Sending`` says so in a few numbers; arrays of its layers are made
only where they are needed.
"""

from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from harness.architecture import Architecture

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


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
        if start_s + step_s * done > now_s:
            done -= 1
        elif done + 1 < self.count and start_s + step_s * (done + 1) <= now_s:
            done += 1
        return done, start_s + step_s * done


class SendingTable:
    """The sendings of one path as columns, so that many of them are looked at together."""

    def __init__(self, sizes: LayerSizes, count: int) -> None:
        self._sizes = sizes
        self._count = count
        self._free = list(range(15, -1, -1))
        self._owners: list[Sending | None] = [None] * 16
        # start, end, step, tokens that move, tokens, total bytes, order  # [7, places]
        self._columns = np.full((7, 16), np.inf)

    def put_all(self, sendings: Iterable[Sending]) -> None:
        """Give each a place."""
        for one in sendings:
            self._put(one)

    def _put(self, one: Sending) -> None:
        if not self._free:
            places = len(self._owners)
            self._free = list(range(2 * places - 1, places - 1, -1))
            self._owners += [None] * places
            more = np.full_like(self._columns, np.inf)
            self._columns = np.concatenate([self._columns, more], axis=1)
        one.place = self._free.pop()
        self._owners[one.place] = one
        self._columns[:, one.place] = (
            one.start_s,
            one.end_s,
            one.step_s,
            one.tokens - one.resident_tokens,
            one.tokens,
            one.total_bytes,
            one.order,
        )

    def drop(self, one: Sending) -> None:
        """Take its place away."""
        self._owners[one.place] = None
        self._columns[:2, one.place] = np.inf
        self._free.append(one.place)

    def ready_between(
        self, after_s: float, until_s: float
    ) -> tuple[FloatArray, FloatArray, Callable[[FloatArray], None]]:
        """Pieces that become ready in (``after_s``, ``until_s``] in the order in which they do,
        earlier sendings first: when, their bytes, and where to say when each departed."""
        start, end, step, moving, tokens, total, order = self._columns
        low = self._ready_by(after_s)
        more = self._ready_by(until_s) - low  # [places]
        who = np.repeat(np.arange(len(more)), more)  # [pieces]
        firsts = np.cumsum(more) - more
        piece = np.arange(len(who)) - firsts[who] + low[who]
        is_last = piece == self._count - 1
        ready = np.where(is_last, end[who], start[who] + step[who] * (piece + 1.0))
        if self._count == 1:
            sizes = total[who]
        else:
            sizes = self._sizes.growing[piece] * moving[who] + self._sizes.fixed[piece]
            if self._sizes.has_windows:
                least = np.minimum(tokens[who], self._sizes.windows[piece])
                sizes = sizes + self._sizes.window[piece] * least
        sorted_ = np.lexsort((order[who], ready))
        ends = np.flatnonzero(is_last[sorted_])
        owners = [self._owners[place] for place in who[sorted_][ends].tolist()]

        def tell(departed: FloatArray) -> None:
            for owner, at in zip(owners, departed[ends].tolist(), strict=True):
                assert owner is not None, "a piece of nobody"
                owner.departed = at

        return ready[sorted_], sizes[sorted_], tell

    def _ready_by(self, now_s: float) -> IntArray:
        """``Sending.ready_by`` of each place, 0 where there is none."""  # [places]
        start, end, step = self._columns[:3]
        with np.errstate(invalid="ignore"):
            done = np.clip(np.floor((now_s - start) / step), 0, self._count - 1)
            done -= (start + step * done > now_s) & (done > 0)
            done += (start + step * (done + 1) <= now_s) & (done + 1 < self._count)
        done = np.where(end <= now_s, self._count, np.where(start < now_s, done, 0))
        return done.astype(np.int64)
