"""Exact quantiles: the ceil(q n)-th smallest of n samples, a request that failed being +inf."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

#: Fewer effective samples than this leave less than ten beyond the 99th percentile.
P99_MIN_EFFECTIVE = 1000


def rank_of(q: float, total: int) -> int:
    """The rank, from 1, of quantile q among ``total`` samples."""
    assert 0.0 < q <= 1.0, "a quantile lies in (0, 1]"
    # The product of two doubles may land just above a whole number: 0.07 * 100 = 7.000000000000001.
    return max(1, math.ceil(round(q * total, 9)))


def nearest_rank(values: Sequence[float] | Floats, q: float, failures: int = 0) -> float | None:
    """The ceil(q n)-th smallest of the values and ``failures`` infinities; None without any."""
    series = np.asarray(values, dtype=np.float64)
    total = len(series) + failures
    rank = rank_of(q, total)
    if total == 0:
        return None
    return float(np.partition(series, rank - 1)[rank - 1]) if rank <= len(series) else math.inf
