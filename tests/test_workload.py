"""Schedules: laws of lengths and arrivals against known truth; bursts; reproducibility."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.core import Request, ScenarioError
from harness.lognormal import TruncatedLogNormal
from harness.scenario import load_scenario
from harness.schedule import Schedule
from harness.workload import (
    arrival_cv,
    build_schedule,
    index_of_dispersion,
    length_distribution,
)

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "scenarios" / "paper-case-study.toml"


def scheduled(*overrides: str) -> Schedule:
    scenario = load_scenario(PAPER, overrides)
    return build_schedule(scenario.workload, scenario.load)


def lengths(schedule: Sequence[Request]) -> list[int]:
    return [request.input_tokens for request in schedule]


def test_the_papers_length_distribution() -> None:
    found = length_distribution(load_scenario(PAPER))
    long = found.lengths > 19_400
    assert found.weights.sum() == pytest.approx(1)
    assert found.weights[long].sum() == pytest.approx(0.4957, rel=1e-3)
    assert found.lengths[long].mean() == pytest.approx(45_046, rel=1e-3)
    assert found.lengths[~long].mean() == pytest.approx(10_224, rel=1e-3)
    assert found.lengths.mean() == pytest.approx(27_486, rel=1e-3)
    assert np.quantile(found.lengths, 0.9) == pytest.approx(62_410, rel=1e-3)
    assert found.mean_output_tokens == 1024


def test_the_schedule_of_a_seed_is_pinned() -> None:
    """A change here changes every published run: it needs a note in the changelog."""
    rows = [(r.rid, r.planned_s, r.input_tokens, r.output_tokens) for r in scheduled()]
    assert len(rows) == 360
    assert rows[0] == ("000000", 0.209787623, 31_655, 1024)
    assert rows[1] == ("000001", 0.269342839, 7_650, 1024)
    digest = hashlib.sha256(json.dumps([row[2] for row in rows]).encode()).hexdigest()
    assert digest == "23ef374da3b8abc9f4715e344b2080b7e8da502f4aa47fc6d4708dc2e132ab0c"


def test_planned_times_ascend_and_indexes_count() -> None:
    for overrides in ((), ("workload.cv=8",), ("workload.cv=0",)):
        rows = scheduled(*overrides)
        assert [r.index for r in rows] == list(range(360))
        planned = [r.planned_s for r in rows]
        assert planned == sorted(planned)
        assert planned[0] >= 0


def test_changing_one_law_keeps_the_draws_of_the_others() -> None:
    base = scheduled()
    assert lengths(scheduled("workload.cv=2")) == lengths(base)
    assert lengths(scheduled("load.rate_req_per_s=3")) == lengths(base)
    longer = scheduled("load.num_requests=1000")
    assert longer[:360] == base
    moved = scheduled("workload.mu=9.0")
    assert [r.planned_s for r in moved] == [r.planned_s for r in base]
    assert lengths(scheduled("load.seed=2")) != lengths(base)


def test_a_duration_bounds_the_same_schedule() -> None:
    longer = scheduled("load.num_requests=1000")
    bounded = scheduled("load.duration=300s")
    assert bounded == tuple(r for r in longer if r.planned_s < 300)
    assert 1.27 * 300 * 0.8 < len(bounded) < 1.27 * 300 * 1.2


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma_arrivals_have_their_rate_and_cv(cv: float) -> None:
    rows = scheduled(f"workload.cv={cv}", "load.num_requests=40000")
    assert arrival_cv(rows) == pytest.approx(cv, rel=0.05)
    assert len(rows) / rows[-1].planned_s == pytest.approx(1.27, rel=0.03)
    # A renewal process' index of dispersion tends to cv^2.
    assert index_of_dispersion(rows, 100.0) == pytest.approx(cv**2, rel=0.25)


def test_poisson_gaps_are_exponential() -> None:
    planned = [r.planned_s for r in scheduled("load.num_requests=20000")]
    gaps = np.diff(planned)
    assert stats.kstest(gaps, "expon", args=(0, 1 / 1.27)).pvalue > 0.01


def test_even_arrivals_have_no_variation() -> None:
    rows = scheduled("workload.cv=0")
    assert arrival_cv(rows) == pytest.approx(0, abs=1e-6)


ON_OFF = (
    "workload.arrivals=on_off",
    "workload.on_duration=20s",
    "workload.off_duration=40s",
    "workload.on_rate_multiple=2.5",
)


def test_bursts_keep_the_mean_rate_and_have_the_dispersion_of_their_process() -> None:
    rows = scheduled(*ON_OFF, "load.num_requests=60000")
    rate = len(rows) / rows[-1].planned_s
    assert rate == pytest.approx(1.27, rel=0.04)
    # Two-state MMPP: I = 1 + 2 a b (r1 - r2)^2 / ((a + b)^3 rate), a and b the rates of change.
    a, b = 1 / 20, 1 / 40
    on, off = 2.5 * 1.27, 1.27 * (1 - 2.5 / 3) / (2 / 3)
    limit = 1 + 2 * a * b * (on - off) ** 2 / ((a + b) ** 3 * 1.27)
    assert index_of_dispersion(rows, 600.0) == pytest.approx(limit, rel=0.35)


def test_bursts_bounded_by_time_are_the_beginning_of_those_bounded_by_number() -> None:
    longer = scheduled(*ON_OFF, "load.num_requests=2000")
    bounded = scheduled(*ON_OFF, "load.duration=400s")
    assert bounded == tuple(r for r in longer if r.planned_s < 400)


def test_nothing_arrives_in_an_off_state_without_rate() -> None:
    silent = [o.replace("2.5", "3") for o in ON_OFF]
    gaps = np.diff([r.planned_s for r in scheduled(*silent, "load.num_requests=5000")])
    # Off states of 40 s on average; without them a gap of 15 s has odds of e^-57.
    assert (gaps > 15).sum() > 30


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (ON_OFF[:3], ["'workload.on_rate_multiple' is missing"]),
        ((*ON_OFF[:3], "workload.on_rate_multiple=3.1"), ["at most 3 times"]),
        (("workload.on_duration=20s",), ["'workload.on_duration'", "on_off"]),
        ((*ON_OFF, "workload.on_duration=2ms", "workload.off_duration=2ms",
          "workload.on_rate_multiple=1", "load.duration=12h"), ["change state"]),
        (("load.duration=0.001s",), ["No request arrives"]),
    ],
)  # fmt: skip
def test_bursts_and_bounds_that_cannot_be_are_refused(
    overrides: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(ScenarioError) as caught:
        scheduled(*overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_quantiles_are_the_law_of_redrawing() -> None:
    law = TruncatedLogNormal(9.9, 1.0, 128, 131_072)
    rng = np.random.default_rng(5)
    redrawn = rng.lognormal(9.9, 1.0, 60_000)
    redrawn = redrawn[(redrawn >= 128) & (redrawn <= 131_072)]
    assert stats.ks_2samp(redrawn, law.quantile(rng.random(50_000))).pvalue > 0.01
    assert law.mass == pytest.approx(len(redrawn) / 60_000, abs=0.005)


@given(
    st.floats(0, 12),
    st.floats(0, 3),
    st.integers(1, 2**17),
    st.integers(0, 2**17),
    st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
def test_quantiles_stay_inside_and_ascend(
    mu: float, sigma: float, low: int, more: int, shares: list[float]
) -> None:
    law = TruncatedLogNormal(mu, sigma, low, low + more)
    if law.mass < 1e-6:
        return
    found = law.quantile(np.sort(shares))
    tolerance = 1e-9 * found.max()
    assert (found >= low - tolerance).all()
    assert (found <= low + more + tolerance).all()
    assert (np.diff(found) >= -tolerance).all()


def test_equal_bounds_give_one_length() -> None:
    rows = scheduled("workload.min_tokens=5000", "workload.max_tokens=5000")
    assert set(lengths(rows)) == {5000}


def test_outputs_follow_their_law() -> None:
    overrides = (
        "workload.output_sigma=0.5",
        "workload.output_min_tokens=2",
        "workload.output_max_tokens=8192",
    )
    rows = scheduled(*overrides, "load.num_requests=20000")
    outputs = [r.output_tokens for r in rows]
    assert np.mean(outputs) == pytest.approx(1024, rel=0.02)
    assert np.std(np.log(outputs)) == pytest.approx(0.5, rel=0.03)
    assert min(outputs) >= 2
    assert max(outputs) <= 8192
    assert lengths(rows[:360]) == lengths(scheduled())
    found = length_distribution(load_scenario(PAPER, overrides))
    assert found.mean_output_tokens == pytest.approx(1024, rel=0.01)


@settings(max_examples=30)
@given(
    st.integers(0, 2**40),
    st.floats(0, 20),
    st.floats(0.01, 1000),
    st.integers(1, 300),
    st.integers(1, 131_072),
    st.integers(0, 131_071),
)
def test_any_workload_gives_a_sound_schedule(
    seed: int, cv: float, rate: float, count: int, low: int, more: int
) -> None:
    scenario = load_scenario(PAPER)
    workload = replace(
        scenario.workload, cv=cv, min_tokens=low, max_tokens=min(low + more, 131_072)
    )
    load = replace(scenario.load, seed=seed, rate_req_per_s=rate, num_requests=count)
    rows = build_schedule(workload, load)
    assert rows == build_schedule(workload, load)
    assert len(rows) == count
    assert len({r.rid for r in rows}) == count
    assert all(workload.min_tokens <= n <= workload.max_tokens for n in lengths(rows))
    planned = [r.planned_s for r in rows]
    assert planned == sorted(planned)
    assert all(math.isfinite(p) and p >= 0 for p in planned)


def test_rate_scale_multiplies_a_synthetic_rate() -> None:
    scenario = load_scenario(PAPER, ["workload.rate_scale=2"])
    assert scenario.load.rate_req_per_s == pytest.approx(2.54)


def test_statistics_of_too_little_are_missing_not_zero() -> None:
    rows = scheduled("load.num_requests=2")
    assert arrival_cv(rows) is None
    assert index_of_dispersion(rows, 1e6) is None
    assert arrival_cv([replace(r, planned_s=1.0) for r in scheduled()]) is None
    with pytest.raises(ValueError, match="positive"):
        index_of_dispersion(rows, 0.0)
