"""Intervals of a series in order of arrival, by a moving-block bootstrap (Kuensch 1989).

A resample strings blocks of consecutive requests together until it has n of them. The interval is
the percentile interval of the resampled statistic, its tails widened for few blocks as Student's t
is for few samples (Hesterberg 2015, "expanded percentile interval", with the m = n / length blocks
in place of the n samples): each tail is Phi(-sqrt(m / (m - 1)) t_(m-1)). A failure is +inf, so that
a quantile has an interval also with failures, its upper end infinite where they reach so far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, stdtrit

from harness.statistics.quantiles import Floats, rank_of

#: A bootstrap with fewer blocks than this says nothing about their spread.
MIN_BLOCKS = 4
#: A quantile is drawn anew in each resample: so many values in all, and so many resamples at least.
_QUANTILE_VALUES, _QUANTILE_RESAMPLES = 20_000_000, 400


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval at ``level``; ``reason`` says why there is none.

    ``high`` may be infinite: so many requests failed that a resample's quantile is.
    """

    low: float | None
    high: float | None
    level: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Resamples of a series of n: where each block of ``length`` starts, [resamples, blocks]."""

    starts: npt.NDArray[np.int32] | None
    n: int
    length: int
    reason: str | None = None


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
    shape = (resamples, math.ceil(n / length))
    return Blocks(generator.integers(0, n - length + 1, size=shape, dtype=np.int32), n, length)


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


def quantile_interval(drawn: Floats | None, blocks: Blocks, level: float) -> Interval:
    """Interval of a quantile, from its resamples [resamples]."""
    return _interval(drawn, blocks, level)


def quantile_ratio_interval(
    above: Floats | None, below: Floats | None, blocks: Blocks, level: float
) -> Interval:
    """Interval of the ratio of two quantiles that were resampled by the same blocks."""
    if above is None or below is None:
        return Interval(None, None, level, blocks.reason)
    if not np.isfinite(below).all():
        reason = "failures reach the quantile that is divided by"
        return Interval(None, None, level, reason)
    return _interval(above / below, blocks, level)


def resampled_quantiles(values: Floats, blocks: Blocks, qs: Sequence[float]) -> Floats | None:
    """Quantiles of ``values`` [n] or [repeats, n] in each resample: [resamples, qs], or None.

    A failure is +inf. The repeats of a request are drawn together: they add no arrivals. Of long
    series fewer resamples are taken, at least 400: the first ones of the blocks.
    """
    if blocks.starts is None:
        return None
    table = np.atleast_2d(np.asarray(values, dtype=np.float64))  # [repeats, n]
    assert table.shape[1] == blocks.n, "blocks are of another series"
    assert not np.isnan(table).any(), "a request without a value is infinite"
    flat = table.ravel()
    order = np.argsort(flat, kind="stable")
    ordered, indices = flat[order], order % blocks.n
    starts = blocks.starts[: max(_QUANTILE_RESAMPLES, _QUANTILE_VALUES // len(flat))]
    lengths, ranks = _lengths(blocks), [rank_of(q, len(flat)) for q in qs]
    drawn = np.empty((len(starts), len(qs)))
    for row, begins in enumerate(starts):
        edges = np.bincount(begins, minlength=blocks.n + 1)
        edges -= np.bincount(begins + lengths, minlength=blocks.n + 1)
        # How often the resample holds each request; then how many values it has up to each one.
        reached = np.cumsum(np.cumsum(edges)[indices])
        drawn[row] = ordered[np.searchsorted(reached, ranks)]
    return drawn


def _lengths(blocks: Blocks) -> npt.NDArray[np.int32]:
    assert blocks.starts is not None
    lengths = np.full(blocks.starts.shape[1], blocks.length, np.int32)
    lengths[-1] = blocks.n - blocks.length * (len(lengths) - 1)  # the last block is cut to fit
    return lengths


def _resampled_means(values: Sequence[float] | Floats, blocks: Blocks) -> Floats | None:
    if blocks.starts is None:
        return None
    series = np.asarray(values, dtype=np.float64)
    assert len(series) == blocks.n, "blocks are of another series"
    if np.isnan(series).any():
        return None
    sums = np.concatenate([[0.0], np.cumsum(series)])
    totals = (sums[blocks.starts + _lengths(blocks)] - sums[blocks.starts]).sum(axis=1)
    means: Floats = totals / blocks.n
    return means


def widened_tail(level: float, blocks: float) -> float:
    """The share beyond each end of a percentile interval of so many blocks."""
    t = float(stdtrit(blocks - 1.0, (1.0 + level) / 2.0))
    return float(ndtr(-math.sqrt(blocks / (blocks - 1.0)) * t))


def _interval(resampled: Floats | None, blocks: Blocks, level: float) -> Interval:
    if resampled is None:
        reason = blocks.reason or "some requests failed; with failures means are not compared"
        return Interval(None, None, level, reason)
    tail = widened_tail(level, blocks.n / blocks.length)
    # Order statistics: between a finite value and an infinite one there is nothing to interpolate.
    low, high = np.quantile(resampled, [tail, 1.0 - tail], method="inverted_cdf")
    return Interval(float(low), float(high), level)
