"""Requests at once, and the steady window, against brute force and known shapes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.statistics import (
    Floats,
    in_system,
    mean_levels,
    mser_start,
    occupancy,
    steady_window,
)

#: Whole numbers, so that instants meet and sums are exact.
spans_of = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=25)


def columns(spans: list[tuple[int, int]]) -> tuple[Floats, Floats]:
    begins = np.array([begin for begin, _ in spans], np.float64)
    return begins, begins + np.array([length for _, length in spans], np.float64)


@given(spans_of, st.integers(-3, 35), st.integers(0, 20))
def test_occupancy_is_the_count_in_every_unit_of_time(
    spans: list[tuple[int, int]], from_s: int, length_s: int
) -> None:
    found = occupancy(*columns(spans), float(from_s), float(from_s + length_s))
    levels = [
        sum(begin <= at < begin + length for begin, length in spans)
        for at in range(from_s, from_s + length_s)
    ]
    if not levels:
        assert found is None
        return
    assert found is not None
    assert found.mean == pytest.approx(sum(levels) / len(levels))
    assert found.most == max(levels)
    edges = np.arange(from_s, from_s + length_s + 1, dtype=np.float64)
    np.testing.assert_allclose(mean_levels(*columns(spans), edges), levels, atol=1e-9)


@given(spans_of, st.integers(0, 45))
def test_in_system_is_the_count_at_an_instant(spans: list[tuple[int, int]], at: int) -> None:
    found = in_system(*columns(spans), np.array([at], np.float64))
    # Who comes at that instant does not find itself; who leaves then is gone.
    assert found[0] == sum(begin < at < begin + length for begin, length in spans)


def test_unknown_spans_are_left_out() -> None:
    begins, ends = np.array([0.0, 1.0, math.nan]), np.array([4.0, math.nan, 5.0])
    found = occupancy(begins, ends, 0.0, 8.0)
    assert found is not None
    assert (found.mean, found.most) == (0.5, 1)
    assert in_system(begins, ends, np.array([2.0])).tolist() == [1]
    assert mean_levels(begins, ends, np.array([0.0, 8.0])).tolist() == [0.5]


@given(spans_of.filter(bool))
def test_littles_law(spans: list[tuple[int, int]]) -> None:
    """L = lambda W over a window that holds all spans, whatever the distributions."""
    begins, ends = columns(spans)
    window_s = float(ends.max()) + 1.0
    found = occupancy(begins, ends, 0.0, window_s)
    assert found is not None
    assert found.mean == pytest.approx(len(spans) / window_s * (ends - begins).mean())


def queue(n: int, load: float, servers: int, seed: int) -> tuple[Floats, Floats]:
    """M/M/c, first come first served: arrivals and departures, mean service 1."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1.0 / (load * servers), n))
    free = np.zeros(servers)
    ends = np.empty(n)
    for index, (at, service) in enumerate(
        zip(arrivals, generator.exponential(1.0, n), strict=True)
    ):
        chosen = int(np.argmin(free))
        ends[index] = free[chosen] = max(at, free[chosen]) + service
    return arrivals, ends


def test_mser_finds_the_end_of_a_known_ramp() -> None:
    """A level that climbs linearly over 400 of 2,000 samples, then stays."""
    starts = []
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(size=2000)
        level = np.minimum(np.arange(2000) / 400, 1.0) * 20.0
        start = mser_start(level + noise)
        assert start is not None
        starts.append(start)
    # What little of the ramp is left is within the noise.
    assert min(starts) >= 320
    assert max(starts) <= 600


def test_mser_is_the_least_error_by_definition() -> None:
    series = np.random.default_rng(3).normal(size=200) + 5.0 * np.exp(-np.arange(200) / 20.0)
    means = series.reshape(40, 5).mean(axis=1)
    errors = [means[d:].var() / (40 - d) for d in range(21)]
    assert mser_start(series) == 5 * int(np.argmin(errors))
    assert mser_start(np.ones(200)) == 0
    assert mser_start(series[:49]) is None


def test_a_queue_that_starts_empty_is_cut_and_one_that_grows_has_no_window() -> None:
    arrivals, ends = queue(4000, 0.8, 4, 1)
    window = steady_window(arrivals, in_system(arrivals, ends, arrivals).astype(np.float64))
    assert window.reason is None
    assert window.start_s is not None
    assert 0.0 <= window.start_s < arrivals[2000]
    assert window.end_s == arrivals[-1]
    whole, steady = (
        occupancy(arrivals, ends, start, float(arrivals[-1])) for start in (0.0, window.start_s)
    )
    assert whole is not None
    assert steady is not None
    # M/M/4 at 0.8: Lq = 2.386, L = 5.586; the run's own mean strays by a fifth.
    assert steady.mean == pytest.approx(5.586, rel=0.25)

    arrivals, ends = queue(4000, 1.3, 4, 1)
    window = steady_window(arrivals, in_system(arrivals, ends, arrivals).astype(np.float64))
    assert window.start_s is None
    assert "has not settled" in (window.reason or "")


def test_windows_of_too_little() -> None:
    few = steady_window(np.arange(49.0), np.zeros(49))
    assert few.start_s is None
    assert few.reason == "49 requests; a window takes 50"
    assert steady_window(np.zeros(60), np.zeros(60)).reason == "the arrivals span no time"
    assert steady_window(np.arange(60.0), np.zeros(60)).start_s == 0.0
