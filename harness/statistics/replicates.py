"""Intervals over seeds: runs of different seeds are independent, whatever happens inside each.

    mean +- t_(k-1, (1 + level) / 2) s / sqrt(k)        k seeds, s their standard deviation

A ratio is paired by seed, both deployments having met the same arrivals, and taken on logarithms.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from harness.statistics.intervals import Interval

#: Two seeds have an interval, thirteen standard errors wide; below there is none.
MIN_SEEDS = 2


def seed_interval(
    values: Sequence[float | None], level: float, replicates: str = "seeds"
) -> Interval:
    """Student's t interval of the mean over seeds, one value each; None where a seed has none."""
    reason = _why_not(values, replicates)
    if reason is not None:
        return Interval(None, None, level, reason)
    series = np.asarray(values, dtype=np.float64)
    t = float(stdtrit(len(series) - 1.0, (1.0 + level) / 2.0))
    half = t * float(series.std(ddof=1)) / math.sqrt(len(series))
    return Interval(float(series.mean()) - half, float(series.mean()) + half, level)


def seed_ratio_interval(
    above: Sequence[float | None], below: Sequence[float | None], level: float
) -> Interval:
    """Interval of the geometric mean, over seeds, of above / below."""
    reason = _why_not(above, "seeds") or _why_not(below, "seeds")
    if reason is None and min(*map(float, above), *map(float, below)) <= 0.0:  # type: ignore[arg-type]  # _why_not leaves no None
        reason = "a ratio takes positive values"
    if reason is not None:
        return Interval(None, None, level, reason)
    logs = np.log(np.asarray(above, np.float64)) - np.log(np.asarray(below, np.float64))
    inside = seed_interval([float(value) for value in logs], level)
    assert inside.low is not None
    assert inside.high is not None
    return Interval(math.exp(inside.low), math.exp(inside.high), level)


def _why_not(values: Sequence[float | None], replicates: str) -> str | None:
    if len(values) < MIN_SEEDS:
        return f"{len(values)} of {replicates}; an interval over {replicates} takes {MIN_SEEDS}"
    missing = sum(value is None or not math.isfinite(value) for value in values)
    return f"{missing} of {len(values)} {replicates} have no finite value" if missing else None
