"""Jitter distributions as tables: the quantiles of a law of mean 0 and deviation 1.

tc-netem draws an entry and multiplies it by the jitter (``NETEM_DIST_SCALE``: 8192 is one
deviation). Entries are 16 bits wide, so no draw is more than 4 deviations from the mean; the laws
are cut there and scaled to deviation 1 as they are then. "uniform" is the exception: it spans
+-1 jitter, as netem without a table does. "normal" is Gauss' law, "pareto" has the shape 3, and
"paretonormal" is, quantile by quantile, a quarter of the former and three quarters of the latter.
"""

import math
import statistics
from array import array
from functools import cache

from netem.link import JitterDistribution

SCALE = 8192
ENTRIES = 4096
_MOST_DEVIATIONS = (2**15 - 1) / SCALE
_PARETO_SHAPE = 3.0
_PARETO_SHARE = 0.75


@cache
def delay_table(distribution: JitterDistribution) -> bytes:
    """The table as the kernel takes it: int16 in host order, ascending, 8192 a deviation."""
    levels = [(index + 0.5) / ENTRIES for index in range(ENTRIES)]
    match distribution:
        case "uniform":
            values = [2 * level - 1 for level in levels]
        case "normal":
            values = _normal(levels)
        case "pareto":
            values = _pareto(levels)
        case "paretonormal":
            pairs = zip(_normal(levels), _pareto(levels), strict=True)
            values = _cut([(1 - _PARETO_SHARE) * one + _PARETO_SHARE * two for one, two in pairs])
    return array("h", [round(value * SCALE) for value in values]).tobytes()


def _normal(levels: list[float]) -> list[float]:
    quantile = statistics.NormalDist().inv_cdf
    return _cut([quantile(level) for level in levels])


def _pareto(levels: list[float]) -> list[float]:
    return _cut([(1 - level) ** (-1 / _PARETO_SHAPE) for level in levels])


def _cut(values: list[float]) -> list[float]:
    """Values cut at 4 deviations and brought to mean 0 and deviation 1."""
    while True:
        mean = statistics.fmean(values)
        deviation = math.sqrt(statistics.fmean((value - mean) ** 2 for value in values))
        values = [(value - mean) / deviation for value in values]
        if max(map(abs, values)) <= _MOST_DEVIATIONS * (1 + 1e-9):
            return values
        values = [min(max(value, -_MOST_DEVIATIONS), _MOST_DEVIATIONS) for value in values]
