"""Statistics of queues (law 10 of the design).

Samples in a queue are correlated: a request that waits stands behind one that waited. Therefore
- quantiles are nearest-rank over all requests that should have been served, a failure being +inf,
  and stand beside the figure over successes alone;
- the effective sample size is n / tau, tau = 1 + 2 sum rho_k the integrated autocorrelation time,
  summed up to the first lag M >= 5 tau(M) (Sokal's window);
- intervals come from a moving-block bootstrap (Kuensch 1989) whose blocks are longer than the
  longest busy period, since only what lies in different busy periods is independent, and are the
  same for every deployment, so that ratios between deployments keep the pairing of their arrivals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

#: Fewer effective samples than this leave less than ten beyond the 99th percentile.
P99_MIN_EFFECTIVE = 1000
_WINDOW = 5.0
#: A bootstrap with fewer blocks than this says nothing about their spread.
MIN_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval at ``level``; ``reason`` says why there is none."""

    low: float | None
    high: float | None
    level: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Resamples of a series of n: where each block of ``length`` starts, [resamples, blocks]."""

    starts: Indices | None
    n: int
    length: int
    reason: str | None = None


def nearest_rank(values: Sequence[float] | Floats, q: float, failures: int = 0) -> float | None:
    """The ceil(q n)-th smallest of the values and ``failures`` infinities; None without any."""
    assert 0.0 < q <= 1.0, "a quantile lies in (0, 1]"
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    total = len(ordered) + failures
    if total == 0:
        return None
    # The product of two doubles may land just above a whole number: 0.07 * 100 = 7.000000000000001.
    rank = max(1, math.ceil(round(q * total, 9)))
    return float(ordered[rank - 1]) if rank <= len(ordered) else math.inf


def autocorrelation_time(values: Sequence[float] | Floats) -> float:
    """tau >= 1 of a stationary series in order; 1 for a constant or a very short one."""
    series = np.asarray(values, dtype=np.float64)
    n = len(series)
    if n < 4:
        return 1.0
    centred = series - series.mean()
    spectrum = np.fft.rfft(centred, 2 * n)
    covariance = np.fft.irfft(spectrum * np.conj(spectrum), 2 * n)[:n]
    if covariance[0] <= 1e-24 * max(1.0, float(np.abs(series).max()) ** 2) * n:
        return 1.0
    tau = 2.0 * np.cumsum(covariance / covariance[0]) - 1.0
    inside = np.arange(n) >= _WINDOW * tau
    window = int(np.argmax(inside)) if inside.any() else n - 1
    return float(min(n, max(1.0, tau[window])))


def effective_samples(values: Sequence[float] | Floats) -> float:
    """n / tau: how many independent samples say as much about the mean."""
    return len(values) / autocorrelation_time(values) if len(values) else 0.0


def saturated_requests(
    starts_s: Sequence[float] | Floats,
    ends_s: Sequence[float] | Floats,
    servers: int,
    arrivals_s: Sequence[float] | Floats,
    gap_s: float = 0.0,
) -> int:
    """Arrivals inside the longest period in which every server was busy, so that requests waited.

    ``starts_s`` and ``ends_s`` are the service spans of one group of ``servers``; an instance that
    goes on to the next request within ``gap_s`` was busy between. A request that arrives outside
    such a period does not wait, and so does not inherit what came before.
    """
    assert servers > 0, "a group has servers"
    # At equal times a start comes before an end: back-to-back services are one period.
    edges = sorted([(at_s, 0, 1) for at_s in starts_s] + [(at_s + gap_s, 1, -1) for at_s in ends_s])
    arrivals = np.sort(np.asarray(arrivals_s, dtype=np.float64))
    busy, most = 0, 0
    since_s: float | None = None
    for at_s, _, step in edges:
        busy += step
        if busy >= servers and since_s is None:
            since_s = at_s
        elif busy < servers and since_s is not None:
            inside = np.searchsorted(arrivals, [since_s, at_s])
            most = max(most, int(inside[1] - inside[0]))
            since_s = None
    return most


def moving_blocks(n: int, longest_busy: int, resamples: int = 2000, seed: int = 0) -> Blocks:
    """Blocks of a bootstrap of n requests in order of arrival.

    A block is longer than the longest busy period (in requests) and at least n^(1/3). Where fewer
    than four blocks fit there are no resamples, and the reason says so.
    """
    length = max(longest_busy + 1, math.ceil(round(n ** (1 / 3), 9)), 1)
    if n < MIN_BLOCKS * length:
        reason = (
            f"{n} requests hold fewer than {MIN_BLOCKS} blocks of {length}, "
            f"the longest busy period being {longest_busy} requests"
        )
        return Blocks(None, n, length, reason)
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, n - length + 1, size=(resamples, math.ceil(n / length)))
    return Blocks(starts, n, length)


def mean_interval(values: Sequence[float] | Floats, blocks: Blocks, level: float) -> Interval:
    """Interval of the mean of a series in order of arrival; NaN marks a request without a value."""
    means = _resampled_means(values, blocks)
    return _interval(means, blocks, level)


def ratio_interval(
    above: Sequence[float] | Floats, below: Sequence[float] | Floats, blocks: Blocks, level: float
) -> Interval:
    """Interval of mean(above) / mean(below), both resampled by the same blocks."""
    upper, lower = _resampled_means(above, blocks), _resampled_means(below, blocks)
    ratios = None if upper is None or lower is None else upper / lower
    return _interval(ratios, blocks, level)


def _resampled_means(values: Sequence[float] | Floats, blocks: Blocks) -> Floats | None:
    if blocks.starts is None:
        return None
    series = np.asarray(values, dtype=np.float64)
    assert len(series) == blocks.n, "blocks are of another series"
    if np.isnan(series).any():
        return None
    sums = np.concatenate([[0.0], np.cumsum(series)])
    lengths = np.full(blocks.starts.shape[1], blocks.length)
    lengths[-1] = blocks.n - blocks.length * (len(lengths) - 1)  # the last block is cut to fit
    totals = (sums[blocks.starts + lengths] - sums[blocks.starts]).sum(axis=1)
    means: Floats = totals / blocks.n
    return means


def _interval(resampled: Floats | None, blocks: Blocks, level: float) -> Interval:
    if resampled is None:
        reason = blocks.reason or "some requests failed; with failures means are not compared"
        return Interval(None, None, level, reason)
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return Interval(float(low), float(high), level)
