"""Quantiles, effective samples and intervals against known truth and second implementations."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, stdtrit
from synthetic_run import SHAPES, TIME_SCALE, Options, build

from harness.record.tables import compact, read_table
from harness.statistics import (
    Floats,
    autocorrelation_time,
    effective_samples,
    mean_interval,
    moving_blocks,
    nearest_rank,
    ratio_interval,
    saturated_requests,
)
from harness.summary import instance_busy_s
from harness.verdict import judge

values_of = st.lists(st.floats(0, 1e6), max_size=60)


def autoregressive(n: int, rho: float, seed: int) -> Floats:
    """AR(1): tau = (1 + rho) / (1 - rho)."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=n)
    series = np.empty(n)
    series[0] = noise[0] / math.sqrt(1 - rho * rho)
    for index in range(1, n):
        series[index] = rho * series[index - 1] + noise[index]
    return series


def batch_means_tau(series: Floats, batch: int) -> float:
    """tau by another road: batch x var(batch means) / var(samples)."""
    batches = len(series) // batch
    means = series[: batches * batch].reshape(batches, batch).mean(axis=1)
    return float(batch * means.var(ddof=1) / series.var(ddof=1))


@given(values_of, st.integers(0, 20), st.integers(1, 1000))
def test_nearest_rank_is_the_rank_by_counting(
    values: list[float], failures: int, permille: int
) -> None:
    q = permille / 1000
    everyone = sorted([*values, *[math.inf] * failures])
    found = nearest_rank(values, q, failures)
    if not everyone:
        assert found is None
        return
    # The smallest value that at least q of all do not exceed, counted in whole numbers.
    by_count = next(
        value
        for rank, value in enumerate(everyone, start=1)
        if rank * 1000 >= permille * len(everyone)
    )
    assert found == by_count


def test_failures_are_infinite() -> None:
    assert nearest_rank([1.0] * 90, 0.9, failures=10) == 1.0
    assert nearest_rank([1.0] * 89, 0.9, failures=11) == math.inf
    assert nearest_rank([1.0] * 89, 0.9) == 1.0
    assert nearest_rank([], 0.5, failures=3) == math.inf
    assert nearest_rank([], 0.5) is None


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_autocorrelation_time_of_a_known_process(rho: float) -> None:
    truth = (1 + rho) / (1 - rho)
    found = [autocorrelation_time(autoregressive(20_000, rho, seed)) for seed in range(5)]
    assert np.median(found) == pytest.approx(truth, rel=0.15)
    batches = [batch_means_tau(autoregressive(20_000, rho, seed), 400) for seed in range(5)]
    assert np.median(found) == pytest.approx(np.median(batches), rel=0.35)


def test_effective_samples_of_short_and_constant_series() -> None:
    assert effective_samples([]) == 0.0
    assert effective_samples([1.0]) == 1.0
    assert effective_samples([2.5] * 50) == 50.0
    trend = effective_samples(np.arange(100.0))
    assert 1.0 <= trend < 10.0


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=80))
def test_effective_samples_stay_between_one_and_n(values: list[float]) -> None:
    assert 1.0 <= effective_samples(values) <= len(values) + 1e-9


def test_saturated_requests_counts_arrivals_while_all_are_busy() -> None:
    # Two servers; both busy in [1, 4) and, back to back, in [4, 6); then again in [10, 11).
    starts, ends = [0.0, 1.0, 4.0, 4.0, 10.0, 10.0], [4.0, 4.0, 6.0, 7.0, 11.0, 12.0]
    arrivals = [0.0, 1.0, 2.0, 3.0, 5.5, 8.0, 10.0, 10.5]
    assert saturated_requests(starts, ends, 2, arrivals) == 4
    assert saturated_requests(starts, ends, 3, arrivals) == 0
    assert saturated_requests(starts, ends, 1, arrivals) == 5


def test_a_small_gap_between_services_does_not_end_a_busy_period() -> None:
    starts, ends, arrivals = [0.0, 2.001], [2.0, 4.0], [0.0, 1.0, 2.5, 3.0]
    assert saturated_requests(starts, ends, 1, arrivals) == 2
    assert saturated_requests(starts, ends, 1, arrivals, gap_s=0.01) == 4


@given(st.integers(1, 400), st.integers(0, 50))
def test_blocks_are_longer_than_a_busy_period_or_refused(n: int, busy: int) -> None:
    blocks = moving_blocks(n, busy, resamples=20)
    assert blocks.length > busy
    if blocks.starts is None:
        assert n < 4 * blocks.length
        assert blocks.reason is not None
    else:
        assert blocks.starts.min() >= 0
        assert blocks.starts.max() + blocks.length <= n


def test_block_means_are_the_means_of_the_gathered_blocks() -> None:
    series = autoregressive(97, 0.5, seed=1)
    blocks = moving_blocks(97, 9, resamples=50, seed=4)
    assert blocks.starts is not None
    by_hand = [
        np.concatenate([series[start : start + blocks.length] for start in row])[:97].mean()
        for row in blocks.starts
    ]
    interval = mean_interval(series, blocks, 0.9)
    tail = float(ndtr(-math.sqrt(9.7 / 8.7) * stdtrit(8.7, 0.95)))  # 97 requests, blocks of 10
    low, high = np.quantile(by_hand, [tail, 1.0 - tail], method="inverted_cdf")
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_intervals_cover_the_mean_of_a_correlated_process() -> None:
    covered = 0
    for seed in range(200):
        series = autoregressive(600, 0.7, seed)
        interval = mean_interval(series, moving_blocks(600, 29, 400, seed), 0.9)
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 0.0 <= interval.high
    assert 160 <= covered <= 194  # 180 is nominal; blocks of finite length undercover a little


def test_the_ratio_keeps_the_pairing() -> None:
    below = 5.0 + autoregressive(400, 0.6, seed=2)
    blocks = moving_blocks(400, 20)
    paired = ratio_interval(2.0 * below, below, blocks, 0.95)
    assert (paired.low, paired.high) == pytest.approx((2.0, 2.0))
    other = ratio_interval(2.0 * (5.0 + autoregressive(400, 0.6, seed=3)), below, blocks, 0.95)
    assert other.low is not None
    assert other.high is not None
    assert other.high - other.low > 0.01


def test_no_interval_with_failures_or_too_few_blocks() -> None:
    series = np.ones(100)
    series[7] = np.nan
    failed = mean_interval(series, moving_blocks(100, 5), 0.95)
    assert failed.low is None
    assert "failed" in (failed.reason or "")
    short = mean_interval(np.ones(100), moving_blocks(100, 60), 0.95)
    assert short.low is None
    assert "busy period being 60" in (short.reason or "")


def test_no_instance_is_busy_for_longer_than_the_window(tmp_path: Path) -> None:
    # Ten times the load that nine instances can serve: each is busy for all of the window.
    crowded = Options(num_requests=120, rate_req_per_s=40.0, deployments=("homogeneous_pd",))
    built = build(tmp_path, crowded)
    gateways = built.gateways("homogeneous_pd")
    for number, row in enumerate(gateways):
        assert row.prefill is not None
        # Services that overlap, as those of a batching engine do.
        longer_s = 2 * (row.prefill.service_wall_s or 0.0)
        gateways[number] = replace(row, prefill=replace(row.prefill, service_wall_s=longer_s))
    built.rewrite("homogeneous_pd", "gateway", gateways)
    compact(built.run)
    summary = judge(built.run).deployments["homogeneous_pd"]
    window_s = built.requests[-1].planned_s
    busy_s = instance_busy_s(read_table(built.run, "requests"), window_s, TIME_SCALE)
    assert len(busy_s) == SHAPES["homogeneous_pd"]["pd"]
    assert 0.8 * window_s < busy_s.min()
    assert busy_s.max() <= window_s * (1 + 1e-12)
    expected = busy_s.sum() / (len(busy_s) * window_s)
    assert summary["prefill_utilisation"] == pytest.approx(expected)
    assert summary["prefill_utilisation"] <= 1.0
