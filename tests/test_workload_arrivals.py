"""Arrivals against known truth: gaps, states, shapes and closed loops, and what burstiness says."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.burstiness import OnOff
from harness.core import ScenarioError
from harness.scenario import Scenario, load_scenario, to_manifest
from harness.schedule import Schedule
from harness.settings import RateShape
from harness.ttft.arrivals import workload_stream
from harness.utilisation import window_s
from harness.workload import (
    arrival_cv,
    build_schedule,
    burstiness,
    index_of_dispersion,
    intended_dispersion,
    schedule_notes,
)
from harness.workload.arrivals import weibull_shape
from harness.workload.rate import RatePath, constant_path, shape_mean, shaped

PAPER = Path(__file__).parents[1] / "scenarios" / "paper-case-study.toml"
RATE = 1.27
STATES = (
    "workload.arrivals=mmpp",
    'workload.states=[{rate_multiple=0.2,mean_duration="60s"},'
    '{rate_multiple=1,mean_duration="30s"},{rate_multiple=5,mean_duration="10s"}]',
)
ON_OFF = (
    "workload.arrivals=on_off",
    "workload.on_duration=20s",
    "workload.off_duration=40s",
    "workload.on_rate_multiple=2.5",
)
STEPS = 'workload.shape.steps=[{at="0s",multiple=1},{at="100s",multiple=3}]'


def loaded(*overrides: str) -> tuple[Scenario, Schedule]:
    scenario = load_scenario(PAPER, overrides)
    return scenario, build_schedule(scenario.workload, scenario.load)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_weibull_gaps_have_their_law(cv: float) -> None:
    _, rows = loaded("workload.arrivals=weibull", f"workload.cv={cv}", "load.num_requests=60000")
    assert len(rows) / rows.planned_s[-1] == pytest.approx(RATE, rel=0.05)
    assert arrival_cv(rows) == pytest.approx(cv, rel=0.15 if cv > 2 else 0.06)
    shape = weibull_shape(cv)
    scale = 1 / RATE / math.gamma(1 + 1 / shape)
    gaps = np.diff(rows.planned_s)
    # Nanoseconds make the shortest gaps of a heavy law equal, which the test would see.
    law, least = stats.weibull_min(shape, scale=scale), 1e-6
    beyond = gaps[gaps > least]
    share = (law.cdf(beyond) - law.cdf(least)) / law.sf(least)
    assert stats.kstest(share, "uniform").pvalue > 1e-3


@given(st.floats(1e-5, 20))
def test_a_weibull_shape_has_the_coefficient_of_variation_asked_for(cv: float) -> None:
    shape = weibull_shape(cv)
    log_ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
    # For large shapes the difference cancels; there cv k = pi / sqrt 6 to first order.
    tolerance = 1e-6 if cv > 1e-2 else 0.02
    if cv > 1e-3:
        assert math.sqrt(math.expm1(log_ratio)) == pytest.approx(cv, rel=tolerance)
    else:
        assert shape * cv == pytest.approx(math.pi / math.sqrt(6), rel=1e-3)


def test_poisson_is_weibull_and_gamma_of_cv_1() -> None:
    assert weibull_shape(1.0) == pytest.approx(1)
    _, rows = loaded("workload.arrivals=weibull", "load.num_requests=20000")
    assert stats.kstest(np.diff(rows.planned_s), "expon", args=(0, 1 / RATE)).pvalue > 0.01


def test_states_keep_the_mean_rate_and_have_the_dispersion_of_their_process() -> None:
    scenario = load_scenario(PAPER, [*STATES, "load.duration=24h"])
    found = []
    for seed in range(24):
        load = replace(scenario.load, seed=seed)
        rows = build_schedule(scenario.workload, load)
        found.append(burstiness(scenario.workload, load, rows))
    # A day's rate has a standard deviation of sqrt(I r / T) = 2.9 %.
    assert np.mean([one.rate_req_per_s or 0.0 for one in found]) == pytest.approx(RATE, rel=0.018)
    assert [one.window_s for one in found[0].dispersion] == [1, 10, 60]
    for place, one in enumerate(found[0].dispersion):
        achieved = [day.dispersion[place].achieved or math.nan for day in found]
        assert np.mean(achieved) == pytest.approx(one.intended, rel=0.04)
    assert found[0].intended_cv is None, "gaps of a changing rate have no cv that was asked for"


@pytest.mark.parametrize("window_s", [0.1, 1.0, 10.0, 300.0])
def test_two_states_agree_with_the_closed_form_of_the_queueing_model(window_s: float) -> None:
    scenario = load_scenario(PAPER, ON_OFF)
    model = OnOff(RATE, 1.0, 20.0, 40.0, 2.5)
    found = intended_dispersion(scenario.workload, scenario.load, window_s, 1e4)
    assert found == pytest.approx(model.dispersion(window_s), rel=1e-9)


def test_equal_states_are_no_states() -> None:
    even = (
        'workload.states=[{rate_multiple=3,mean_duration="9s"},'
        '{rate_multiple=3,mean_duration="2s"}]'
    )
    scenario, rows = loaded(STATES[0], even, "load.num_requests=40000")
    assert intended_dispersion(scenario.workload, scenario.load, 10.0, 1e4) == pytest.approx(1)
    _, plain = loaded("load.num_requests=40000")
    assert rows.planned_s == pytest.approx(plain.planned_s, rel=1e-9)


@pytest.mark.parametrize(
    "shape",
    [
        (STEPS, "workload.shape.repeat=200s"),
        ('workload.shape.ramps=[{at="0s",multiple=0},{at="600s",multiple=2}]',),
        (
            'workload.shape.spikes=[{at="30s",lasts="5s",multiple=20}]',
            "workload.shape.repeat=60s",
        ),
        ('workload.shape.diurnal={period="20min",peak_at="5min",swing="80%"}',),
    ],
    ids=["steps", "ramps", "spikes", "diurnal"],
)
@pytest.mark.parametrize("states", [(), STATES], ids=["renewal", "mmpp"])
def test_shapes_keep_the_mean_rate_and_add_their_dispersion(
    shape: tuple[str, ...], states: tuple[str, ...]
) -> None:
    scenario, rows = loaded(*shape, *states, "load.duration=24h")
    tolerance = 0.12 if states else 0.02
    assert len(rows) / 86_400 == pytest.approx(RATE, rel=tolerance)
    for one in burstiness(scenario.workload, scenario.load, rows).dispersion:
        if states:
            assert one.intended is None
        else:
            assert one.achieved == pytest.approx(one.intended, rel=0.12)


def test_arrivals_follow_steps_ramps_and_the_sine_in_time() -> None:
    _, rows = loaded(STEPS, "workload.shape.repeat=200s", "load.duration=24h")
    inside = rows.planned_s % 200
    assert (inside >= 100).sum() / (inside < 100).sum() == pytest.approx(3, rel=0.03)
    _, rows = loaded(
        'workload.shape.ramps=[{at="0s",multiple=0},{at="24h",multiple=2}]', "load.duration=24h"
    )
    # Rate 2 r t / T: the arrivals' squares are uniform.
    assert stats.kstest((rows.planned_s / 86_400) ** 2, "uniform").pvalue > 1e-3
    _, rows = loaded(
        'workload.shape.diurnal={period="2h",peak_at="30min",swing="100%"}', "load.duration=24h"
    )
    turn = 2 * np.pi * (rows.planned_s / 7200 - 0.25)
    # E[cos] under a density 1 + cos is 1/2.
    assert np.cos(turn).mean() == pytest.approx(0.5, abs=0.01)
    assert np.sin(turn).mean() == pytest.approx(0, abs=0.01)


def test_nothing_arrives_where_a_shape_is_zero() -> None:
    hole = 'workload.shape.steps=[{at="0s",multiple=1},{at="50s",multiple=0},{at="80s",multiple=2}]'
    _, rows = loaded(hole, "workload.shape.repeat=100s", "load.num_requests=5000")
    inside = rows.planned_s % 100
    assert not ((inside > 50 + 1e-6) & (inside < 80 - 1e-6)).any()


def test_a_run_bounded_by_number_has_its_mean_rate_over_its_expected_length() -> None:
    ramp = 'workload.shape.ramps=[{at="0s",multiple=1},{at="2000s",multiple=5}]'
    _, rows = loaded(ramp, "load.num_requests=20000")
    assert len(rows) == 20_000
    assert len(rows) / rows.planned_s[-1] == pytest.approx(RATE, rel=0.02)


multiples = st.lists(st.floats(0, 50), min_size=1, max_size=6).filter(lambda m: max(m) > 0.01)


@given(
    multiples,
    st.lists(st.floats(0.5, 300), min_size=6, max_size=6),
    st.booleans(),
    st.booleans(),
    st.floats(0.1, 40),
)
def test_a_shaped_rate_integrates_to_the_mean_and_back(
    heights: list[float], gaps_s: list[float], linear: bool, repeats: bool, rate: float
) -> None:
    at_s = (np.cumsum(gaps_s)[: len(heights)] - gaps_s[0]).tolist()
    period_s = at_s[-1] + 7.0 if repeats else None
    shape = RateShape(tuple(at_s), tuple(heights), linear, period_s)
    run_s = at_s[-1] + 50.0
    try:
        mean = shape_mean(shape, run_s)
    except ScenarioError:
        return
    if mean < 1e-6:
        return
    path = shaped(constant_path(rate, 0.0, run_s), shape, run_s)
    assert path.ticks[-1] == pytest.approx(rate * run_s, rel=1e-9)
    assert (np.diff(path.ticks) >= 0).all()
    # Against a plain sum of the rate, on a grid.
    grid = np.linspace(0, run_s, 20_001)
    middle = (grid[1:] + grid[:-1]) / 2
    folded = middle if period_s is None else middle % period_s
    held = np.array(heights)[np.maximum(np.searchsorted(at_s, folded, side="right") - 1, 0)]
    value = np.interp(folded, at_s, heights) if linear else held
    summed = (value * np.diff(grid)).sum() * rate / mean
    assert summed == pytest.approx(rate * run_s, rel=0.02)
    ticks = np.linspace(0, 1, 57)[1:-1] * path.ticks[-1]
    times = path.time_at(ticks)
    assert (np.diff(times) >= 0).all()
    assert ((times >= 0) & (times <= run_s)).all()
    assert path.ticks_at(times) == pytest.approx(ticks, rel=1e-6, abs=1e-6 * rate)


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=30), st.data())
def test_a_path_of_constant_pieces_is_linear_interpolation(
    steps: list[float], data: st.DataObject
) -> None:
    time_s = np.cumsum([0.0, *steps])
    rates = data.draw(st.lists(st.floats(0.01, 9), min_size=len(steps), max_size=len(steps)))
    ticks = np.cumsum([0.0, *(np.array(steps) * np.array(rates))])
    path = RatePath(time_s, ticks)
    asked = np.linspace(0, ticks[-1], 50)
    assert path.time_at(asked) == pytest.approx(np.interp(asked, ticks, time_s))
    at_s = np.linspace(0, time_s[-1], 50)
    assert path.ticks_at(at_s) == pytest.approx(np.interp(at_s, time_s, ticks))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["gamma", "weibull"]),
    st.floats(0, 20),
    st.integers(0, 2**40),
    st.sampled_from([(), (STEPS,), (STEPS, "workload.shape.repeat=300s"), STATES[1:]]),
    st.integers(1, 400),
)
def test_any_arrivals_ascend_and_are_as_many_as_asked_for(
    law: str, cv: float, seed: int, more: tuple[str, ...], count: int
) -> None:
    named = "mmpp" if more == STATES[1:] else law
    _, rows = loaded(
        f"workload.arrivals={named}", f"workload.cv={cv}", *more,
        f"load.seed={seed}", f"load.num_requests={count}",
    )  # fmt: skip
    assert len(rows) == count
    assert (np.diff(rows.planned_s) >= 0).all()
    assert np.isfinite(rows.planned_s).all()
    assert rows.planned_s[0] >= 0


def test_a_longer_run_begins_like_a_shorter_one_where_no_shape_is_scaled() -> None:
    for overrides in (STATES, ("workload.arrivals=weibull", "workload.cv=3")):
        _, longer = loaded(*overrides, "load.num_requests=2000")
        _, bounded = loaded(*overrides, "load.duration=400s")
        assert bounded == [r for r in longer if r.planned_s < 400]


def test_a_closed_loop_has_order_and_content_but_no_times() -> None:
    scenario, rows = loaded("load.concurrency=8", "load.think_time=2s")
    assert (scenario.load.concurrency, scenario.load.think_time_s) == (8, 2.0)
    assert math.isinf(scenario.load.rate_req_per_s)
    assert to_manifest(scenario)["load"]["rate_req_per_s"] is None
    _, open_rows = loaded()
    assert not rows.planned_s.any()
    assert rows.input_tokens.tolist() == open_rows.input_tokens.tolist()
    assert burstiness(scenario.workload, scenario.load, rows).dispersion == ()
    for ask in (lambda: workload_stream(scenario), lambda: window_s(scenario, rows)):
        with pytest.raises(ScenarioError, match=r"load\.concurrency"):
            ask()


def test_what_a_shape_means_is_said() -> None:
    scenario, _ = loaded(STEPS, "load.duration=200s")
    assert schedule_notes(scenario.workload, scenario.load) == (
        "workload.shape: its multiple 1 is 0.635 req/s, so that the mean over 200 s is 1.27 req/s",
    )
    scenario, _ = loaded()
    assert schedule_notes(scenario.workload, scenario.load) == ()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("load.think_time=1s",), ["'load.think_time'", "load.concurrency"]),
        (("load.concurrency=4", "load.rate_req_per_s=2"), ["'load.rate_req_per_s'", "no effect"]),
        (("load.concurrency=4", "workload.cv=2"), ["'workload.cv'", "completions decide"]),
        (("load.concurrency=4", "load.duration=9s"), ["'load.duration'", "num_requests"]),
        (("load.concurrency=0",), ["'load.concurrency'"]),
        (STATES[1:], ["'workload.states'", "mmpp"]),
        (STATES[:1], ["'workload.states' is missing"]),
        ((STATES[0], STATES[1].replace("0.2", "0").replace("=1,", "=0,").replace("=5,", "=0,")),
         ["no state has a rate"]),
        (("workload.shape.repeat=9s",), ["'workload.shape'", "it has none"]),
        ((STEPS, 'workload.shape.diurnal={period="1h",peak_at="0s",swing="1%"}'),
         ["'workload.shape'", "steps and diurnal"]),
        ((STEPS, "workload.shape.repeat=50s"), ["'workload.shape.repeat'", "100 s"]),
        (('workload.shape.steps=[{at="9s",multiple=1},{at="9s",multiple=2}]',),
         ["'workload.shape.steps'", "does not come after"]),
        (('workload.shape.steps=[{at="0s",multiple=0}]',), ["no point has a rate"]),
        (('workload.shape.steps=[{at="0s",multiple=0},{at="1h",multiple=1}]',
          "load.duration=10min"), ["workload.shape", "without a rate"]),
        (('workload.shape.steps=[{at="0s",multiple=1},{at="1s",multiple=0}]',),
         ["workload.shape", "too little rate"]),
        (('workload.shape.stpes=[]',), ["'workload.shape.stpes'", "did you mean 'steps'"]),
        (('workload.shape.diurnal={period="1h",peak_at="0s",swing="1%"}',
          "workload.shape.repeat=2h"), ["'workload.shape.repeat'", "period of its own"]),
    ],
)  # fmt: skip
def test_loops_states_and_shapes_that_cannot_be_are_refused(
    overrides: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(ScenarioError) as caught:
        loaded(*overrides)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_dispersion_counts_whole_windows_of_a_plain_sequence_too() -> None:
    _, rows = loaded("load.num_requests=4000")
    assert index_of_dispersion(tuple(rows), 10.0) == index_of_dispersion(rows, 10.0)
    scenario = load_scenario(PAPER)
    few = tuple(replace(row, planned_s=1.0) for row in rows[:5])
    assert burstiness(scenario.workload, scenario.load, few).achieved_cv is None
