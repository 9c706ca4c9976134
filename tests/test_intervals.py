"""Intervals of quantiles and over seeds: against brute force, and their coverage of known truth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter
from scipy.special import ndtri
from scipy.stats import t as student

from harness.statistics import (
    Blocks,
    Floats,
    Interval,
    mean_interval,
    moving_blocks,
    nearest_rank,
    quantile_interval,
    quantile_ratio_interval,
    resampled_quantiles,
    seed_interval,
    seed_ratio_interval,
)
from harness.statistics.intervals import widened_tail
from harness.summary.frames import interval_of

EXPERIMENTS = 100
RHO = 0.6


def autoregressive(n: int, rho: float, seed: int) -> Floats:
    """Stationary AR(1) of unit innovations: normal, mean 0, variance 1 / (1 - rho^2)."""
    noise = np.random.default_rng(seed).normal(size=n)
    noise[0] /= math.sqrt(1 - rho * rho)
    return np.asarray(lfilter([1.0], [1.0, -rho], noise), np.float64)


def holds(interval: Interval, truth: float) -> bool:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= truth <= interval.high


def gathered(values: Floats, blocks: Blocks, row: int) -> Floats:
    """The values of one resample, put together by hand, [repeats, n] as one row."""
    assert blocks.starts is not None
    indices = np.concatenate(
        [np.arange(start, start + blocks.length) for start in blocks.starts[row]]
    )[: blocks.n]
    return np.atleast_2d(values)[:, indices].ravel()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.floats(0, 9).map(round), st.just(math.inf)), min_size=8, max_size=40),
    st.integers(0, 3),
    st.integers(1, 2),
)
def test_quantiles_of_a_resample_are_those_of_its_values(
    values: list[float], busy: int, repeats: int
) -> None:
    # Repeats of a request are drawn with it; the second one is twice as slow.
    table = np.stack([np.asarray(values, np.float64) * (1 + repeat) for repeat in range(repeats)])
    blocks = moving_blocks(len(values), busy, resamples=12)
    drawn = resampled_quantiles(table, blocks, (0.5, 0.9, 1.0))
    if blocks.starts is None:
        assert drawn is None
        return
    assert drawn is not None
    for row in range(12):
        sample = gathered(table, blocks, row)
        for column, q in enumerate((0.5, 0.9, 1.0)):
            assert drawn[row, column] == nearest_rank(sample, q)


def test_intervals_cover_a_known_truth_in_95_of_100_experiments() -> None:
    """AR(1) with rho 0.6, tau 4: mean 0 and quantiles of a normal, blocks of 51 in 2,000."""
    spread, covered = 1 / math.sqrt(1 - RHO * RHO), dict.fromkeys(("mean", 0.5, 0.9), 0)
    for seed in range(EXPERIMENTS):
        series = autoregressive(2000, RHO, seed)
        blocks = moving_blocks(2000, 50, 400, seed)
        covered["mean"] += holds(mean_interval(series, blocks, 0.95), 0.0)
        drawn = resampled_quantiles(series, blocks, (0.5, 0.9))
        assert drawn is not None
        for q, column in zip((0.5, 0.9), drawn.T, strict=True):
            truth = spread * float(ndtri(q))
            covered[q] += holds(quantile_interval(column, blocks, 0.95), truth)
    assert all(90 <= count <= 99 for count in covered.values()), covered


def test_few_blocks_cover_as_well() -> None:
    """Six blocks: a plain percentile interval covers in 84 of 100."""
    covered = sum(
        holds(mean_interval(autoregressive(300, 0.7, s), moving_blocks(300, 49, 800, s), 0.95), 0.0)
        for s in range(EXPERIMENTS)
    )
    assert 89 <= covered <= 99


def test_independent_samples_treated_as_such_would_not_cover() -> None:
    """What law 10 is about: blocks of a few requests take correlated samples for independent."""
    covered = 0
    for seed in range(EXPERIMENTS):
        series = autoregressive(2000, 0.9, seed)
        assert moving_blocks(2000, 0).length == 13
        short = Blocks(
            np.random.default_rng(seed).integers(0, 2000, (400, 2000), np.int32), 2000, 1
        )
        covered += holds(mean_interval(series, short, 0.95), 0.0)
    assert covered < 60


def test_tails_widen_as_students_t_does() -> None:
    assert widened_tail(0.95, 1e6) == pytest.approx(0.025, rel=1e-3)
    wide = -math.sqrt(5 / 4) * student.ppf(0.975, 4)
    assert ndtri(widened_tail(0.95, 5)) == pytest.approx(wide)


def test_failures_reach_the_upper_end_before_the_quantile() -> None:
    values = np.arange(400.0) % 10.0
    values[np.arange(0, 400, 11)] = np.inf  # 9.25 % fail: the P90 is finite, if barely
    blocks = moving_blocks(400, 0)
    drawn = resampled_quantiles(values, blocks, (0.5, 0.9, 0.95))
    assert drawn is not None
    assert math.isfinite(nearest_rank(values, 0.9) or math.inf)
    middle, high, higher = (quantile_interval(column, blocks, 0.95) for column in drawn.T)
    assert interval_of(middle)["reason"] is None
    assert high.high == math.inf
    shown = interval_of(high)
    assert shown["high"] is None
    assert shown["low"] is not None
    assert "no upper end" in str(shown["reason"])
    assert "infinite" in str(interval_of(higher)["reason"])


def test_ratios_of_quantiles_keep_the_pairing_and_refuse_an_infinite_base() -> None:
    below = 5.0 + np.abs(autoregressive(400, 0.6, 2))
    blocks = moving_blocks(400, 20)

    def p90(values: Floats) -> Floats:
        drawn = resampled_quantiles(values, blocks, (0.9,))
        assert drawn is not None
        return drawn[:, 0]

    paired = quantile_ratio_interval(p90(2 * below), p90(below), blocks, 0.95)
    assert (paired.low, paired.high) == pytest.approx((2.0, 2.0))
    failing = below.copy()
    failing[::5] = np.inf
    assert quantile_ratio_interval(p90(failing), p90(below), blocks, 0.95).high == math.inf
    refused = quantile_ratio_interval(p90(below), p90(failing), blocks, 0.95)
    assert refused.low is None
    assert "failures" in (refused.reason or "")
    none = quantile_ratio_interval(None, None, moving_blocks(10, 9), 0.95)
    assert none.low is None
    assert "busy period" in (none.reason or "")


def test_an_interval_over_seeds_is_students() -> None:
    values = [4.0, 5.5, 4.7]
    found = seed_interval(values, 0.9)
    low, high = student.interval(0.9, 2, np.mean(values), np.std(values, ddof=1) / math.sqrt(3))
    assert (found.low, found.high) == pytest.approx((low, high))
    covered = 0
    for seed in range(EXPERIMENTS):
        means = [float(autoregressive(200, 0.9, 1000 * seed + one).mean()) for one in range(4)]
        covered += holds(seed_interval(means, 0.95), 0.0)
    assert 90 <= covered <= 99


def test_seeds_without_a_value_or_alone_have_no_interval() -> None:
    assert "1 of seeds" in (seed_interval([1.0], 0.95).reason or "")
    assert "1 of 2 seeds" in (seed_interval([1.0, None], 0.95).reason or "")
    assert "1 of 2 repeats" in (seed_interval([1.0, math.inf], 0.95, "repeats").reason or "")
    ratio = seed_ratio_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], 0.95)
    assert (ratio.low, ratio.high) == pytest.approx((2.0, 2.0))
    assert seed_ratio_interval([0.0, 1.0], [1.0, 1.0], 0.95).low is None
    assert seed_ratio_interval([None, 1.0], [1.0, 1.0], 0.95).low is None
