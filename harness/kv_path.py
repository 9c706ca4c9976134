"""The path KV takes from a prefill instance: one server, first come first served, layer by layer.

Layer k of L is ready at start + T_prefill (k + 1) / L when transfer is layer-wise, every layer at
the end of prefill otherwise. A path of rate R sends ready layers in the order in which they became
ready, each for bytes / R; what is sent lands ``delay_s`` later. With ready times r and sizes b in
that order the departures d follow Lindley's recursion

    d_k = max(d_{k-1}, r_k) + b_k / R        that is        d_k = C_k + max_{j <= k} (r_j - C_{j-1})

where C is the running sum of b / R and the path's last departure counts as r_0: no event per layer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.architecture import Architecture

FloatArray = NDArray[np.float64]


class LayerSizes:
    """Bytes of each layer by length, for one architecture; kinds of layer are computed once."""

    def __init__(self, architecture: Architecture) -> None:
        self._kinds = tuple(dict.fromkeys(architecture.layers))
        order = {kind: index for index, kind in enumerate(self._kinds)}
        self._kind_of_layer = np.array([order[layer] for layer in architecture.layers])
        self.num_layers = len(architecture.layers)

    def __call__(self, tokens: int) -> FloatArray:
        """Bytes of each layer after ``tokens`` tokens, in layer order."""  # [layers]
        by_kind = np.array([kind.kv_bytes(tokens) for kind in self._kinds], dtype=np.float64)
        sizes: FloatArray = by_kind[self._kind_of_layer]
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


class KvPath:
    """A rate, a delay and the layers that wait for it. Times must not go back."""

    def __init__(self, rate_bytes_per_s: float, delay_s: float) -> None:
        assert rate_bytes_per_s > 0, "a path needs a rate"
        self.rate_bytes_per_s = rate_bytes_per_s
        self.delay_s = delay_s
        self.sent_bytes = 0.0
        self._departed_s = float("-inf")
        self._sending: dict[int, _Sending] = {}

    def offer(self, key: int, ready_s: FloatArray, sizes_bytes: FloatArray) -> None:
        """Announce a request's layers when its prefill starts. ``ready_s`` ascends."""
        self._sending[key] = _Sending(ready_s, sizes_bytes, 0, self._departed_s)

    def landed_s(self, key: int, now_s: float) -> float:
        """When the last layer of ``key`` lands. Call it when the last layer is ready, in time
        order: then every layer that leaves before it has been offered."""
        self._send_until(now_s)
        sending = self._sending.pop(key)
        assert sending.next_layer == len(sending.ready_s), "asked before the last layer was ready"
        return sending.departed_s + self.delay_s

    def _send_until(self, now_s: float) -> None:
        parts = []
        for sending in self._sending.values():
            upto = int(np.searchsorted(sending.ready_s, now_s, side="right"))
            if upto > sending.next_layer:
                parts.append((sending, slice(sending.next_layer, upto)))
        if not parts:
            return
        ready_s = np.concatenate([sending.ready_s[part] for sending, part in parts])
        sizes = np.concatenate([sending.sizes_bytes[part] for sending, part in parts])
        if len(parts) > 1:
            order = np.argsort(ready_s, kind="stable")  # ties: the earlier prefill first
            ready_s, sizes = ready_s[order], sizes[order]
        sending_s = sizes / self.rate_bytes_per_s
        total_s = np.cumsum(sending_s)
        start_s = np.maximum.accumulate(ready_s - (total_s - sending_s))
        departed_s = total_s + np.maximum(start_s, self._departed_s)
        self._departed_s = float(departed_s[-1])
        self.sent_bytes += float(sizes.sum())
        if len(parts) > 1:
            by_layer = np.empty_like(departed_s)
            by_layer[order] = departed_s
            departed_s = by_layer
        position = 0
        for sending, part in parts:
            position += part.stop - part.start
            sending.next_layer = part.stop
            sending.departed_s = float(departed_s[position - 1])
