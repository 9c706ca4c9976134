"""The arrivals of the last minutes by length: what a threshold would offload, and what is left.

Lengths are uncached tokens, counted in bins of 2^(1/32), 2.2 %, of which one ends at the anchor
(the planned threshold), so that what lies above it is counted exactly:

    bin of l = ceil(32 log2(l / anchor)),    longest length of bin b = floor(anchor 2^(b / 32))

Each bin sums requests, KV bytes that would cross, and seconds of a prefill instance of either side.
A request counts for ``window_s`` after its arrival. Work is O(1) an arrival, O(bins) a question.
"""

import math
from collections import deque
from collections.abc import Callable

from msgspec import Struct

_BINS_PER_OCTAVE = 32
#: A window that has only begun counts as this share of it at least: the first arrivals would else
#: be a rate of nothing but chance.
_LEAST_SHARE = 0.25

#: (uncached_tokens, cached_tokens) -> seconds of a prefill instance.
PrefillSeconds = Callable[[int, int], float]


class _Arrival(Struct, gc=False):
    at_s: float
    bin: int
    tokens: int
    kv_bytes: int
    remote_s: float
    local_s: float
    decode_s: float


class Demand:
    """Arrivals by length over a sliding window. # lists: (bins,)"""

    def __init__(self, anchor_tokens: int, longest_tokens: int, window_s: float) -> None:
        assert window_s > 0
        self.window_s = window_s
        self._longest_tokens = max(longest_tokens, anchor_tokens, 1)
        self._arrivals: deque[_Arrival] = deque()
        self._since_s: float | None = None
        self._anchor(max(anchor_tokens, 1))

    def _anchor(self, anchor_tokens: int) -> None:
        self.anchor_tokens = anchor_tokens
        self._log_anchor = math.log2(anchor_tokens)
        #: Place of the bin that ends at the anchor.
        self.anchor_bin = math.floor(_BINS_PER_OCTAVE * self._log_anchor) + 1
        bins = self._bin(self._longest_tokens) + 1
        self.counts = [0] * bins
        self.kv_bytes = [0] * bins
        self.remote_s = [0.0] * bins
        self.local_s = [0.0] * bins
        self.decode_s = 0.0
        self.total_local_s = 0.0

    def __len__(self) -> int:
        return len(self._arrivals)

    def _bin(self, tokens: int) -> int:
        place = math.ceil(_BINS_PER_OCTAVE * (math.log2(tokens) - self._log_anchor))
        return max(0, place + self.anchor_bin)

    def upper_tokens(self, place: int) -> int:
        """Longest length in a bin: as a threshold it keeps this bin and all below local."""
        step = (place - self.anchor_bin) / _BINS_PER_OCTAVE
        return min(math.floor(self.anchor_tokens * 2**step), self._longest_tokens)

    def anchor_at(self, anchor_tokens: int) -> None:
        """Move the bins so that one ends at another threshold; what has been counted stays."""
        self._anchor(max(anchor_tokens, 1))
        for one in self._arrivals:
            one.bin = self.place(one.tokens)
            self._count(one)

    def place(self, tokens: int) -> int:
        # A length beyond the workload's longest counts as the longest.
        return min(self._bin(tokens), len(self.counts) - 1)

    def add(
        self,
        tokens: int,
        kv_bytes: int,
        remote_s: float,
        local_s: float,
        decode_s: float,
        now_s: float,
    ) -> None:
        """Count an arrival: its uncached tokens, the bytes it would send across, its prefill on
        either side and its time in a decode slot."""
        if self._since_s is None:
            self._since_s = now_s
        place = self.place(tokens)
        arrival = _Arrival(now_s, place, tokens, kv_bytes, remote_s, local_s, decode_s)
        self._arrivals.append(arrival)
        self._count(arrival)

    def _count(self, one: _Arrival) -> None:
        place = one.bin
        self.counts[place] += 1
        self.kv_bytes[place] += one.kv_bytes
        self.remote_s[place] += one.remote_s
        self.local_s[place] += one.local_s
        self.total_local_s += one.local_s
        self.decode_s += one.decode_s

    def expire(self, now_s: float) -> None:
        """Forget what is older than the window."""
        horizon_s, arrivals = now_s - self.window_s, self._arrivals
        while arrivals and arrivals[0].at_s <= horizon_s:
            one = arrivals.popleft()
            place = one.bin
            self.counts[place] -= 1
            self.kv_bytes[place] -= one.kv_bytes
            self.total_local_s -= one.local_s
            self.decode_s -= one.decode_s
            # To 0 where a bin is empty, so that rounding does not build up.
            some = self.counts[place] > 0
            self.remote_s[place] = self.remote_s[place] - one.remote_s if some else 0.0
            self.local_s[place] = self.local_s[place] - one.local_s if some else 0.0
        if not arrivals:
            self.total_local_s = self.decode_s = 0.0

    def span_s(self, now_s: float) -> float:
        """Over how long the counted arrivals came."""
        begun_s = now_s if self._since_s is None else self._since_s
        return min(self.window_s, max(now_s - begun_s, _LEAST_SHARE * self.window_s))
