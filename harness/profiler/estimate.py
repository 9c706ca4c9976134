"""When a point has been measured well enough, and how well: pure functions of samples in order.

A profile's times go into mean rates and utilisations, so a point's value is the mean. A sample is
one visit to the point: the mean of the requests, or of the steps, that were measured in it. Visits
are minutes apart and in random order, so what drifts between them is in their spread; what is
correlated inside a visit is not counted as independent.

The number of visits is decided in two stages (Stein 1945). A pilot of n0 visits gives their
standard deviation s0 and mean m0; with t = t(0.975, n0 - 1) and a bound r on the relative half
width

    n = max(n0, ceil((t s0 / (r m0))^2)),    interval = mean of n  +-  t s0 / sqrt(n)

Whether to go on is decided once, from s0 alone, which for normal samples is independent of their
mean: the interval covers the true mean with 95 % exactly, however many visits follow. Looking after
every sample whether the interval is narrow enough stops more often where the spread happens to look
small, and covers less (0.92 with four samples to begin with; ``tests/test_profiler_estimate.py``).
Two stages cost about a fifth more samples at n0 = 12.

Warm-up: in the first visit of a session requests are thrown away until the medians of two
successive threes agree within ``WARM_WITHIN``, at most ``WARM_MOST``. What warms up (kernels that
are compiled, graphs, caches) is a multiple of the time, not a hundredth. Later visits throw away
their first request, since the one before it was of another length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median, stdev

from scipy import stats

LEVEL = 0.95
#: Visits before the spread is judged.
PILOT = 12
WARM_GROUP = 3
WARM_WITHIN = 0.1
WARM_MOST = 15
QUANTILES = (5, 50, 90, 99)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval, None where two samples are lacking. ``is_tight``: the pilot
    was whole and so many visits followed as it asked for."""

    mean: float
    low: float | None
    high: float | None
    samples: int
    needed: int
    is_tight: bool

    @property
    def half_width(self) -> float | None:
        """Relative to the mean."""
        return None if self.high is None else (self.high - self.mean) / self.mean


def needed_samples(samples: Sequence[float], bound: float) -> int:
    """How many samples there shall be, by those that there are: the pilot's size until it is
    whole, and what its spread asks for afterwards."""
    if len(samples) < PILOT:
        return PILOT
    pilot = samples[:PILOT]
    return max(PILOT, math.ceil((_t(PILOT) * stdev(pilot) / (bound * fmean(pilot))) ** 2))


def estimate(samples: Sequence[float], bound: float) -> Estimate:
    """The point's value by its samples, in the order in which they were taken; at least one."""
    count, mean = len(samples), fmean(samples)
    needed = needed_samples(samples, bound)
    if count < 2:
        return Estimate(mean, None, None, count, needed, False)
    pilot = samples[:PILOT]
    half = _t(len(pilot)) * stdev(pilot) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count, needed, count >= needed)


def ratio(above: Estimate, below: Estimate) -> tuple[float, float | None, float | None]:
    """above / below and its interval, the two being independent: relative half widths add in
    squares."""
    value = above.mean / below.mean
    if above.half_width is None or below.half_width is None:
        return value, None, None
    half = value * math.hypot(above.half_width, below.half_width)
    return value, value - half, value + half


def is_warm(values: Sequence[float], group: int = WARM_GROUP) -> bool:
    """Whether the requests so far end the warm-up; all of them are thrown away. ``group`` is how
    many make a median: 1 where a value is a mean already."""
    if len(values) >= WARM_MOST:
        return True
    if len(values) < 2 * group or len(values) % group:
        return False
    before, after = values[-2 * group : -group], values[-group:]
    return abs(median(after) / median(before) - 1) <= WARM_WITHIN


def never_falling(means: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest curve that never falls, in weighted least squares: neighbours that noise has put
    the wrong way round become their mean (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for mean, weight in zip(means, weights, strict=True):
        pools.append((mean, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (m2, w2, n2), (m1, w1, n1) = pools.pop(), pools.pop()
            pools.append(((m1 * w1 + m2 * w2) / (w1 + w2), w1 + w2, n1 + n2))
    return [mean for mean, _, count in pools for _ in range(count)]


@cache
def _t(samples: int) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, samples - 1))
