"""The path KV takes from a prefill instance: one server, first come first served, layer by layer.

Layer k of L is ready at start + T_prefill (k + 1) / L when transfer is layer-wise, every layer at
the end of prefill otherwise. A path of rate R sends ready layers in the order in which they became
ready, each for bytes / R; what is sent lands ``delay_s`` later. With ready times r and sizes b in
that order the departures d follow Lindley's recursion

    d_k = max(d_{k-1}, r_k) + b_k / R        that is        d_k = C_k + max_{j <= k} (r_j - C_{j-1})

where C is the running sum of b / R and the path's last departure counts as r_0: no event per layer.

The rate may change, to 0 too, at instants that are known. In the path's own time

    u(t) = integral of R(t') / R over t' < t,    R the rate at the start

it is a path of the constant rate R, and the recursion holds as it stands: ready times go through u,
departures come back through its inverse (the earliest t where u stands still). What leaves just
before a change lands after the same delay. With a constant rate u(t) = t.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.architecture import Architecture

FloatArray = NDArray[np.float64]


class LayerSizes:
    """Bytes of each layer by length, for one architecture, as whole numbers in floats."""

    def __init__(self, architecture: Architecture) -> None:
        layers = architecture.layers
        self.num_layers = len(layers)
        # (layers,) each
        self._growing = np.array([one.growing_bytes_per_token for one in layers], dtype=np.float64)
        self._fixed = np.array([one.fixed_bytes for one in layers], dtype=np.float64)
        self._windows = np.array([one.window_tokens for one in layers])
        self._window = np.array([one.window_bytes_per_token for one in layers], dtype=np.float64)
        self._has_windows = bool(self._window.any())

    def __call__(self, tokens: int, resident_tokens: int = 0) -> FloatArray:
        """Bytes of each layer after ``tokens`` tokens, in layer order; of the growing KV only what
        comes after ``resident_tokens`` (``Architecture.moved_bytes``)."""  # [layers]
        sizes: FloatArray = self._growing * (tokens - resident_tokens) + self._fixed
        if self._has_windows:
            sizes += self._window * np.minimum(tokens, self._windows)
        return sizes


def ready_times(start_s: float, end_s: float, num_layers: int, *, layerwise: bool) -> FloatArray:
    """When each layer's KV may leave, in layer order; the last one exactly at ``end_s``."""
    if not layerwise:
        return np.full(num_layers, end_s, dtype=np.float64)
    ready_s = start_s + (end_s - start_s) / num_layers * np.arange(1.0, num_layers + 1)
    ready_s[-1] = end_s
    return ready_s


@dataclass(slots=True)
class _Sending:
    ready_s: FloatArray  # [layers]
    sizes_bytes: FloatArray  # [layers]
    next_layer: int
    departed_s: float


#: Key of what is sent at once; requests' are not negative.
_PIECE = -1


class RateChange(NamedTuple):
    """From ``at_s`` on the rate is another."""

    at_s: float
    rate_bytes_per_s: float


class Carried(NamedTuple):
    """What a path has done by an instant: bytes that left, and ready ones that have not."""

    acked_bytes: float
    waiting_bytes: float


class KvPath:
    """A rate, a delay and the layers that wait for it. Times must not go back.

    ``changes`` ascend in time, from 0 on.
    """

    def __init__(
        self, rate_bytes_per_s: float, delay_s: float, changes: Sequence[RateChange] = ()
    ) -> None:
        assert rate_bytes_per_s > 0, "a path needs a rate"
        self.rate_bytes_per_s = rate_bytes_per_s
        self.delay_s = delay_s
        self.sent_bytes = 0.0
        #: The last departure, in the path's own time.
        self._departed = -math.inf
        self._sending: dict[int, _Sending] = {}
        self._clock = _OwnTime(rate_bytes_per_s, changes) if changes else None

    def offer(self, key: int, ready_s: FloatArray, sizes_bytes: FloatArray) -> None:
        """Announce a request's layers when its prefill starts. ``ready_s`` ascends."""
        self._sending[key] = _Sending(ready_s, sizes_bytes, 0, -math.inf)

    def landed_s(self, key: int, now_s: float) -> float:
        """When the last layer of ``key`` lands. Call it when the last layer is ready, in time
        order: then every layer that leaves before it has been offered. Infinite where the rate
        stays 0."""
        self._send_until(now_s)
        sending = self._sending.pop(key)
        assert sending.next_layer == len(sending.ready_s), "asked before the last layer was ready"
        return sending.departed_s + self.delay_s

    def send(self, now_s: float, nbytes: float) -> float:
        """Send one piece that is ready now; when it lands."""
        assert _PIECE not in self._sending
        self.offer(_PIECE, np.array([now_s]), np.array([nbytes], dtype=np.float64))
        return self.landed_s(_PIECE, now_s)

    def carried(self, now_s: float) -> Carried:
        """What left and what waits, without a change to the path."""
        departed, sent_bytes = self._departed, self.sent_bytes
        parts = self._ready_parts(now_s)
        if parts:
            _, sizes, departures = self._departures(parts)
            departed, sent_bytes = float(departures[-1]), sent_bytes + float(sizes.sum())
        own = now_s if self._clock is None else float(self._clock.own(now_s))
        waiting = max(0.0, departed - own) * self.rate_bytes_per_s
        return Carried(sent_bytes - waiting, waiting)

    def rate_at(self, now_s: float) -> float:
        """The rate at an instant."""
        return self.rate_bytes_per_s if self._clock is None else self._clock.rate_at(now_s)

    def next_change_s(self, now_s: float) -> float:
        """When the rate changes next; infinite when it does no more."""
        return math.inf if self._clock is None else self._clock.next_change_s(now_s)

    def open_s(self, now_s: float) -> float:
        """When the path carries something again: now, unless its rate is 0."""
        at_s = now_s
        while self.rate_at(at_s) == 0 and at_s < math.inf:
            at_s = self.next_change_s(at_s)
        return at_s

    def mean_rate_bytes_per_s(self, start_s: float, end_s: float) -> float:
        """Between two instants."""
        if self._clock is None:
            return self.rate_bytes_per_s
        own_s = float(self._clock.own(end_s)) - float(self._clock.own(start_s))
        return self.rate_bytes_per_s * own_s / (end_s - start_s)

    def _ready_parts(self, now_s: float) -> list[tuple[_Sending, slice]]:
        parts = []
        for sending in self._sending.values():
            upto = int(np.searchsorted(sending.ready_s, now_s, side="right"))
            if upto > sending.next_layer:
                parts.append((sending, slice(sending.next_layer, upto)))
        return parts

    def _departures(
        self, parts: list[tuple[_Sending, slice]]
    ) -> tuple[NDArray[np.intp] | None, FloatArray, FloatArray]:
        """Order in which the parts' layers leave (None: as they are), their sizes and departures
        in that order. # (layers,) each"""
        ready = np.concatenate([sending.ready_s[part] for sending, part in parts])
        sizes = np.concatenate([sending.sizes_bytes[part] for sending, part in parts])
        order = None
        if len(parts) > 1:
            order = np.argsort(ready, kind="stable")  # ties: the earlier prefill first
            ready, sizes = ready[order], sizes[order]
        if self._clock is not None:
            ready = self._clock.own(ready)
        sending_s = sizes / self.rate_bytes_per_s
        total_s = np.cumsum(sending_s)
        start_s = np.maximum.accumulate(ready - (total_s - sending_s))
        return order, sizes, total_s + np.maximum(start_s, self._departed)

    def _send_until(self, now_s: float) -> None:
        parts = self._ready_parts(now_s)
        if not parts:
            return
        order, sizes, departed = self._departures(parts)
        self._departed = float(departed[-1])
        self.sent_bytes += float(sizes.sum())
        departed_s = departed if self._clock is None else self._clock.wall(departed)
        if order is not None:
            by_layer = np.empty_like(departed_s)
            by_layer[order] = departed_s
            departed_s = by_layer
        position = 0
        for sending, part in parts:
            position += part.stop - part.start
            sending.next_layer = part.stop
            sending.departed_s = float(departed_s[position - 1])


class _OwnTime:
    """u(t) and its inverse for a rate that is constant between changes. # arrays (changes + 1,)"""

    def __init__(self, rate_bytes_per_s: float, changes: Sequence[RateChange]) -> None:
        assert all(b.at_s > a.at_s for a, b in pairwise(changes)), "changes ascend"
        assert changes[0].at_s >= 0
        steps = list(changes)
        if steps[0].at_s > 0:
            steps.insert(0, RateChange(0.0, rate_bytes_per_s))
        self._at_s = np.array([step.at_s for step in steps])
        self._rates = np.array([step.rate_bytes_per_s for step in steps])
        self._slopes = self._rates / rate_bytes_per_s
        passed = np.diff(self._at_s) * self._slopes[:-1]
        self._own = np.concatenate(([0.0], np.cumsum(passed)))

    def own(self, time_s: FloatArray | float) -> FloatArray:
        at = np.maximum(np.searchsorted(self._at_s, time_s, side="right") - 1, 0)
        own: FloatArray = self._own[at] + (time_s - self._at_s[at]) * self._slopes[at]
        return own

    def wall(self, own: FloatArray) -> FloatArray:
        """The earliest time at which u is ``own``."""
        at = np.maximum(np.searchsorted(self._own, own, side="left") - 1, 0)
        passed, slopes = own - self._own[at], self._slopes[at]
        with np.errstate(divide="ignore", invalid="ignore"):
            since_s = np.where(passed > 0, passed / slopes, 0.0)
        time_s: FloatArray = self._at_s[at] + since_s
        return time_s

    def rate_at(self, time_s: float) -> float:
        at = max(int(np.searchsorted(self._at_s, time_s, side="right")) - 1, 0)
        return float(self._rates[at])

    def next_change_s(self, time_s: float) -> float:
        at = int(np.searchsorted(self._at_s, time_s, side="right"))
        return float(self._at_s[at]) if at < len(self._at_s) else math.inf
