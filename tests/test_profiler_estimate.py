"""When a point is known well enough: intervals that cover, by simulation; the warm-up rule."""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from harness.engine.noise import Noise
from harness.profiler.estimate import (
    PILOT,
    WARM_MOST,
    Estimate,
    estimate,
    is_warm,
    needed_samples,
    never_falling,
    ratio,
)

TRUTH_S = 0.44


def measured(draw: Callable[[], float], bound: float) -> Estimate:
    """As the campaign does it: visit until no more samples are asked for."""
    samples: list[float] = []
    while (lacking := needed_samples(samples, bound) - len(samples)) > 0:
        samples += [draw() for _ in range(lacking)]
    return estimate(samples, bound)


def repeated(cv: float, bound: float, seed: int, repetitions: int) -> list[Estimate]:
    found = []
    for repetition in range(repetitions):
        noise = Noise(cv, (seed, repetition))

        def draw(noise: Noise = noise) -> float:
            return TRUTH_S * noise.factor()

        found.append(measured(draw, bound))
    return found


def covers(one: Estimate) -> bool:
    assert one.low is not None
    assert one.high is not None
    return one.low <= TRUTH_S <= one.high


@pytest.mark.parametrize(("cv", "bound"), [(0.02, 0.01), (0.05, 0.02), (0.1, 0.03), (0.3, 0.1)])
def test_intervals_cover_the_truth_in_90_to_99_of_100_repetitions(cv: float, bound: float) -> None:
    """At a true 95 % one set of 100 in 56 lies outside: 10 sets, of which one may."""
    found = [repeated(cv, bound, seed, 100) for seed in range(1, 11)]
    counts = [sum(map(covers, one)) for one in found]
    assert sum(90 <= count <= 99 for count in counts) >= 9, counts
    assert all(one.is_tight for repetitions in found for one in repetitions)


def test_every_point_comes_within_a_hundredth_at_half_a_hundredth_of_interval() -> None:
    found = repeated(0.05, 0.005, 4, 100)
    assert max(abs(one.mean / TRUTH_S - 1) for one in found) < 0.01
    assert fmean(one.half_width or math.inf for one in found) < 0.0051


@pytest.mark.parametrize(("cv", "bound"), [(0.02, 0.01), (0.05, 0.02)])
def test_two_stages_cover_95_percent_in_the_long_run(cv: float, bound: float) -> None:
    """Three standard deviations of a share of 0.95 in 2,000 are 0.0146."""
    share = fmean(covers(one) for one in repeated(cv, bound, 5, 2000))
    assert abs(share - 0.95) < 0.0146


def test_looking_after_every_sample_covers_less() -> None:
    """The reason for two stages: with four samples to begin with, stopping as soon as the interval
    is narrow enough misses 95 % by more than three standard deviations."""
    repetitions, most, bound = 4000, 400, 0.02
    samples = np.random.default_rng(6).normal(1.0, 0.05, (repetitions, most))
    count = np.arange(1, most + 1)
    mean = np.cumsum(samples, 1) / count  # (repetitions, most)
    spread = np.cumsum(samples**2, 1) / count - mean**2
    spread *= count / np.maximum(count - 1, 1)
    half = stats.t.ppf(0.975, np.maximum(count - 1, 1)) * np.sqrt(np.maximum(spread, 0) / count)
    stops = (half <= bound * mean) & (count >= 4)
    assert stops.any(1).all()
    at = stops.argmax(1)
    rows = np.arange(repetitions)
    share = (np.abs(mean[rows, at] - 1.0) <= half[rows, at]).mean()
    assert share < 0.95 - 3 * math.sqrt(0.95 * 0.05 / repetitions)


def test_an_interval_is_not_tight_before_what_the_pilot_asked_for() -> None:
    random = np.random.default_rng(7)
    samples = random.normal(1.0, 0.1, PILOT).tolist()
    needed = needed_samples(samples, 0.01)
    assert needed > PILOT
    assert not estimate(samples, 0.01).is_tight
    samples += random.normal(1.0, 0.1, needed - PILOT).tolist()
    found = estimate(samples, 0.01)
    assert found.is_tight
    assert (found.half_width or 1) <= 0.0101
    # Later samples do not change what was asked for.
    assert needed_samples([*samples, 5.0, 9.0], 0.01) == needed


def test_one_sample_has_a_mean_and_no_interval() -> None:
    found = estimate([2.0], 0.02)
    assert (found.mean, found.low, found.high, found.is_tight) == (2.0, None, None, False)
    assert found.half_width is None


def test_a_ratio_of_independent_estimates_covers_its_truth() -> None:
    hits = 0
    for above, below in zip(
        repeated(0.05, 0.01, 8, 400), repeated(0.05, 0.01, 9, 400), strict=True
    ):
        value, low, high = ratio(above, below)
        assert low is not None
        assert high is not None
        assert low < value < high
        hits += low <= 1.0 <= high
    assert abs(hits / 400 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 400)


def test_warm_up_ends_when_two_medians_agree() -> None:
    falling = [9.0, 5.0, 3.0, 1.0, 1.2, 0.9]
    assert not is_warm(falling)
    assert not is_warm([*falling, 1.0])
    assert is_warm([*falling, 1.0, 1.1, 1.05])
    assert is_warm([2.0 / (1 + n % 3) for n in range(WARM_MOST)])
    assert is_warm([1.0, 1.05], group=1)
    assert not is_warm([1.0, 1.2], group=1)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_a_curve_that_never_falls_keeps_the_weighted_mean(means: list[float]) -> None:
    weights = [1.0 + i % 3 for i in range(len(means))]
    even = never_falling(means, weights)
    assert all(b >= a - 1e-12 for a, b in pairwise(even))
    assert np.dot(even, weights) == pytest.approx(np.dot(means, weights))
    if means == sorted(means):
        assert even == means


def test_noise_has_mean_one_and_the_spread_that_was_asked_for() -> None:
    factors = Noise(0.1, 3).factors(200_000)
    assert factors.mean() == pytest.approx(1.0, abs=1e-3)
    assert factors.std() == pytest.approx(0.1, rel=0.02)
    assert median(factors) < 1.0
    assert Noise(0.1, 3).factor() == factors[0]
    assert Noise().factor() == 1.0
    assert (Noise().factors(3) == 1.0).all()
