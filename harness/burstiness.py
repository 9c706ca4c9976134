"""Streams whose rate varies: what a coefficient of variation of the gaps cannot tell.

``OnOff``: gamma gaps of squared coefficient of variation (scv) C_a^2 in operational time, whose
rate alternates between two states of exponential length (``harness.workload``). With rates r_1 and
r_2, stationary share a of state 1, mean rate r and theta = 1 / on + 1 / off, the number that
arrives in t has the index of dispersion

    I(t) = C_a^2 + 2 a (1 - a) (r_1 - r_2)^2 / (theta r) (1 - (1 - exp(-theta t)) / (theta t))

and p I(t) + 1 - p when a share p is kept. No single t of it gives the wait: once a burst exceeds
the servers its length matters, and a variance does not hold that. So the queue is solved with its
states: phase-type gaps in two states are a Markovian arrival process, exact for exponential service
and for Erlang service of two stages (``harness.map_queue``), and P(W > 0) and E[W] are on the line
through the two. Beyond 24 servers the second is left out, and service adds what it adds to gamma
gaps without states (``harness.queueing``). Gamma gaps are taken as phase-type ones: of the same
three moments for scv 1 and above; below, of the same two, with at most 8 phases and so no scv below
1/8.

``Recorded``: the arrivals of a trace, scaled to a rate. No law is fitted to them, since real rates
drift for minutes and a gamma law or an index of dispersion misses by factors: the requests go
through the queue one after another, which for some ten thousand takes some ten milliseconds.
"""

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.map_queue import map_e2_c, map_m_c
from harness.queueing import (
    NO_WAIT,
    Renewal,
    Service,
    Wait,
    check_stable,
    constant_service_wait,
    corrected,
    exponential_service_wait,
)

FloatArray = npt.NDArray[np.float64]

_MAX_PHASES = 8
#: Servers up to which Erlang service is solved with the states; it takes servers^4.
_MOST_SOLVED = 24
#: Windows that an index of dispersion of recorded arrivals needs; a longer window is cut.
_LEAST_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class OnOff:
    """Two states; the rate is ``on_rate_multiple`` times the mean in the on state, and in the off
    state what keeps the mean. Each request is kept with probability ``kept``; ``rate_req_per_s`` is
    that of the kept ones."""

    rate_req_per_s: float
    gap_scv: float
    on_duration_s: float
    off_duration_s: float
    on_rate_multiple: float
    kept: float = 1.0

    def at_rate(self, rate_req_per_s: float) -> "OnOff":
        """The states keep their lengths."""
        return replace(self, rate_req_per_s=rate_req_per_s)

    def part(self, low: float, high: float) -> "OnOff":
        share = high - low
        return replace(self, rate_req_per_s=self.rate_req_per_s * share, kept=self.kept * share)

    def wait(self, service: Service, servers: int) -> Wait:
        check_stable(self.rate_req_per_s, service, servers)
        if service.mean_s == 0:
            return NO_WAIT
        process = self.process()
        exponential = map_m_c(*process, service.mean_s, servers)
        if servers <= _MOST_SOLVED:
            erlang = map_e2_c(*process, service.mean_s, servers)
            return corrected(exponential, erlang, exponential, 2 * (service.scv - 1))
        steady = Renewal(self.rate_req_per_s, self.gap_scv, self.kept)
        return corrected(
            exponential,
            constant_service_wait(steady, service.mean_s, servers),
            exponential_service_wait(steady, service.mean_s, servers),
            service.scv - 1,
        )

    def dispersion(self, window_s: float, /) -> float:
        base = self.rate_req_per_s / self.kept
        on, off = (base * multiple for multiple in self._multiples())
        share = self._on_share
        theta = 1 / self.on_duration_s + 1 / self.off_duration_s
        limit = 2 * share * (1 - share) * (on - off) ** 2 / (theta * base)
        reached = 1 + math.expm1(-theta * window_s) / (theta * window_s)
        return self.kept * (self.gap_scv + limit * reached) + 1 - self.kept

    def process(self) -> tuple[FloatArray, FloatArray]:
        """D_0 and D_1 of the kept stream. # (states * phases, states * phases)"""
        start, inner = phase_type_gaps(self.gap_scv)
        out = np.outer(-inner.sum(axis=1), start)
        switch = np.array(
            [
                [-1 / self.on_duration_s, 1 / self.on_duration_s],
                [1 / self.off_duration_s, -1 / self.off_duration_s],
            ]
        )
        rates = np.diag(self._multiples()) * (self.rate_req_per_s / self.kept)
        arriving = np.kron(rates, out)
        silent = np.kron(switch, np.eye(len(start))) + np.kron(rates, inner)
        return np.asarray(silent + (1 - self.kept) * arriving), np.asarray(self.kept * arriving)

    @property
    def _on_share(self) -> float:
        return self.on_duration_s / (self.on_duration_s + self.off_duration_s)

    def _multiples(self) -> tuple[float, float]:
        share = self._on_share
        off = max(0.0, (1 - share * self.on_rate_multiple) / (1 - share))
        return self.on_rate_multiple, off


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Arrival times, ascending, each with a mark in [0, 1). # (arrivals,)"""

    times_s: FloatArray
    marks: FloatArray
    rate_req_per_s: float

    @staticmethod
    def of(times_s: FloatArray, marks: FloatArray) -> "Recorded":
        """n arrivals span n - 1 gaps; a rate needs two of them at different times."""
        span_s = float(times_s[-1] - times_s[0]) if len(times_s) else 0.0
        rate = (len(times_s) - 1) / span_s if span_s > 0 else 0.0
        return Recorded(times_s, marks, rate)

    def at_rate(self, rate_req_per_s: float) -> "Recorded":
        """The same pattern, faster or slower."""
        times_s = self.times_s * (self.rate_req_per_s / rate_req_per_s)
        return Recorded(times_s, self.marks, rate_req_per_s)

    def part(self, low: float, high: float) -> "Recorded":
        inside = (self.marks >= low) & (self.marks < high)
        marks = (self.marks[inside] - low) / (high - low)
        return Recorded(self.times_s[inside], marks, self.rate_req_per_s * (high - low))

    def wait(self, service: Service, servers: int) -> Wait:
        """The low marks take longest. Without quantiles every request takes the mean."""
        check_stable(self.rate_req_per_s, service, servers)
        lasts_s = np.full(len(self.times_s), service.mean_s)
        if service.quantiles_s is not None:
            count = len(service.quantiles_s)
            place = ((1 - self.marks) * count).astype(np.int64)
            lasts_s = service.quantiles_s[np.clip(place, 0, count - 1)]
        free_s = [-math.inf] * servers
        waits_s = []
        for at_s, for_s in zip(self.times_s.tolist(), lasts_s.tolist(), strict=True):
            start_s = max(at_s, free_s[0])
            heapq.heapreplace(free_s, start_s + for_s)
            waits_s.append(start_s - at_s)
        return Wait.among(np.array(waits_s))

    def dispersion(self, window_s: float, /) -> float:
        span_s = float(self.times_s[-1] - self.times_s[0]) if len(self.times_s) else 0.0
        if span_s <= 0:
            return 1.0
        window_s = min(window_s, span_s / _LEAST_WINDOWS)
        windows = int(span_s / window_s + 1e-9)
        place = ((self.times_s - self.times_s[0]) / window_s).astype(np.int64)
        # Slow arrivals over short windows: far more windows than arrivals, most of them empty.
        _, counts = np.unique(place[place < windows], return_counts=True)
        mean = float(counts.sum()) / windows
        variance = (float((counts**2).sum()) - windows * mean**2) / (windows - 1)
        return variance / mean if mean > 0 else 1.0


def phase_type_gaps(scv: float) -> tuple[FloatArray, FloatArray]:
    """Start vector and generator of a gap of mean 1 in place of a gamma one of that scv."""
    if scv >= 1:
        # t_1, t_2 solve t^2 - 2 (1 + scv) t / 3 + (1 + scv) / 6 = 0.
        root = math.sqrt(((1 + scv) / 3) ** 2 - (1 + scv) / 6)
        slow_s, fast_s = (1 + scv) / 3 + root, (1 + scv) / 3 - root
        slow = (1 - fast_s) / (slow_s - fast_s)
        return np.array([slow, 1 - slow]), -np.diag([1 / slow_s, 1 / fast_s])
    scv = max(scv, 1 / _MAX_PHASES)
    phases = math.ceil(1 / scv - 1e-9)
    shorter = (phases * scv - math.sqrt(phases * (1 + scv) - phases**2 * scv)) / (1 + scv)
    start = np.zeros(phases)
    start[0], start[1] = 1 - shorter, shorter
    return start, (phases - shorter) * (np.eye(phases, k=1) - np.eye(phases))
