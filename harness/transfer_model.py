"""How long a transfer shows after prefill, with and without layer-wise pipelining.

A prefill of T_prefill seconds releases pieces of KV in the order (chunk, layer). A chunk's layers
take equal parts of it, and layer j of L gives its piece at the end of its part. A piece is what the
chunk's tokens add to the layer's growing KV and to the window that the prompt will end with; the
recurrent state is final, and moves, in the layer's last chunk only. With pieces k released at r_k
after prefill began, of b_k bytes, a path that sends x bytes in W(x) (``harness.transfer_rate``) and
is free from f on has sent the last byte at

    F = max(f + W(B), max_k (r_k + W(B) - W(b_1 + ... + b_{k-1}))),    B = b_1 + ... + b_K

which is the solution of the recursion in ``harness.kv_path``; W(x) = x / rate of a warm path gives
r_k + sum_{j >= k} b_j / rate. Without layer-wise pipelining every r_k is T_prefill. Then

    exposed = F - T_prefill + one_way

counts to the last byte's arrival, with one more one-way delay to the sender's receipt. In slow
start gaps between pieces are taken to let no round trip pass, so that up to ``SlowStart.rounds``
round trips too many may be counted for layer-wise pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.architecture import Architecture
from harness.transfer_rate import SlowStart, sending_s

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
#: (new tokens, cached tokens) -> T_prefill, elementwise, as ``Profile.prefill_s_array``.
PrefillCost = Callable[[FloatArray, FloatArray], FloatArray]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What prefills release; [...] are requests, which may have one number of pieces all the same:
    those with fewer chunks end with pieces of no bytes, released at the end."""

    release_s: FloatArray  # [..., chunks, layers], from the prefill's start
    sizes_bytes: FloatArray  # [..., chunks, layers]
    prefill_s: FloatArray  # [...]

    def in_order(self) -> tuple[FloatArray, FloatArray]:
        """Release times and sizes in the order of sending. # [..., chunks * layers] each"""
        shape = (*self.prefill_s.shape, -1)
        return self.release_s.reshape(shape), self.sizes_bytes.reshape(shape)


@dataclass(frozen=True, slots=True)
class Exposure:
    """Of each request: exposed transfer, W of all its bytes, and the piece k that decides.

    ``critical`` counts pieces in the order of sending; without layer-wise pipelining, and where the
    path is free too late for any piece to matter, it is 0: every byte is waited for.
    """

    exposed_s: FloatArray  # [...]
    sending_s: FloatArray  # [...]
    critical: IntArray  # [...]


def prefill_pieces(
    architecture: Architecture,
    new_tokens: npt.ArrayLike,
    prefill_s: PrefillCost,
    cached_tokens: npt.ArrayLike = 0.0,
    chunk_tokens: float | None = None,
) -> Pieces:
    """The pieces of prompts whose first ``cached_tokens`` lie at both ends already. # [...]

    A chunk of ``chunk_tokens`` (None: the whole prompt) ends when a prefill of the tokens up to
    there would. Sizes sum to ``Architecture.moved_bytes``; fractions of a token count as such.
    """
    new, cached = np.broadcast_arrays(
        np.asarray(new_tokens, dtype=np.float64), np.asarray(cached_tokens, dtype=np.float64)
    )
    if new.size == 0 or np.any(new <= 0) or np.any(cached < 0):
        raise ValueError("a prefill needs new tokens, and no fewer than 0 cached")
    if chunk_tokens is not None and not chunk_tokens > 0:
        raise ValueError(f"chunks of {chunk_tokens} tokens; give more than 0")
    size = float(new.max()) if chunk_tokens is None else chunk_tokens
    chunks = int(np.ceil(new.max() / size))
    upto = np.minimum(size * np.arange(1.0, chunks + 1), new[..., np.newaxis])  # [..., chunks]
    ends_s = np.asarray(prefill_s(upto, np.broadcast_to(cached[..., np.newaxis], upto.shape)))
    ends_s = np.minimum(np.maximum.accumulate(ends_s, axis=-1), ends_s[..., -1:])
    return Pieces(
        _release_s(ends_s, len(architecture.layers)),
        _sizes_bytes(architecture, upto, cached),
        ends_s[..., -1],
    )


def exposure(
    pieces: Pieces,
    rate_bytes_per_s: npt.ArrayLike,
    *,
    layerwise: bool = True,
    one_way_s: npt.ArrayLike = 0.0,
    slow_start: SlowStart | None = None,
    free_s: npt.ArrayLike = 0.0,
) -> Exposure:
    """Rates, delays and when the path is free (after the prefill's start) broadcast to requests."""
    release_s, sizes_bytes = pieces.in_order()
    prefill_s, rate = pieces.prefill_s, np.asarray(rate_bytes_per_s, dtype=np.float64)
    through_bytes = np.cumsum(sizes_bytes, axis=-1)
    all_s = sending_s(through_bytes[..., -1], rate, slow_start)
    if layerwise:
        before_bytes = np.concatenate(
            [np.zeros_like(through_bytes[..., :1]), through_bytes[..., :-1]], axis=-1
        )
        before_s = sending_s(before_bytes, rate[..., np.newaxis], slow_start)
        sent_s = release_s + (all_s[..., np.newaxis] - before_s)
    else:
        sent_s = (prefill_s + all_s)[..., np.newaxis]
    last_s = np.maximum(sent_s.max(axis=-1), np.asarray(free_s) + all_s)
    waits = last_s > sent_s.max(axis=-1)
    return Exposure(
        exposed_s=last_s - prefill_s + np.asarray(one_way_s),
        sending_s=all_s,
        critical=np.where(waits, 0, sent_s.argmax(axis=-1)),
    )


def _release_s(ends_s: FloatArray, layers: int) -> FloatArray:
    """# [..., chunks] -> [..., chunks, layers]"""
    starts_s = np.concatenate([np.zeros_like(ends_s[..., :1]), ends_s[..., :-1]], axis=-1)
    parts = np.arange(1.0, layers + 1) / layers
    release_s = starts_s[..., np.newaxis] + (ends_s - starts_s)[..., np.newaxis] * parts
    release_s[..., -1] = ends_s  # exactly
    return np.asarray(release_s)


def _sizes_bytes(architecture: Architecture, upto: FloatArray, cached: FloatArray) -> FloatArray:
    """``upto``: new tokens that are computed after each chunk. # [..., chunks, layers]"""
    layers = architecture.layers
    growing, window, window_bytes, fixed = (
        np.array([getattr(layer, name) for layer in layers], dtype=np.float64)
        for name in (
            "growing_bytes_per_token", "window_tokens", "window_bytes_per_token", "fixed_bytes",
        )
    )  # fmt: skip
    new = upto[..., -1:]
    first = np.zeros_like(new)
    tokens = np.diff(upto, axis=-1, prepend=first)  # [..., chunks]
    sizes = tokens[..., np.newaxis] * growing
    if window_bytes.any():
        # A chunk's tokens among the last of the prompt; cached ones of them go with the first.
        total = (cached[..., np.newaxis] + new)[..., np.newaxis]
        ends = (cached[..., np.newaxis] + upto)[..., np.newaxis]
        seen = np.minimum(np.maximum(ends - np.maximum(total - window, 0.0), 0.0), window)
        sizes += np.diff(seen, axis=-2, prepend=np.zeros_like(seen[..., :1, :])) * window_bytes
    # The last chunk is the first one that reaches the prompt's end.
    is_last = (upto >= new) & (tokens > 0)
    return np.asarray(sizes + is_last[..., np.newaxis] * fixed)
