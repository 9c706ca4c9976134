"""Searches by simulation: brackets of known roots, queues of known Lambda_max."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.capacity_search import PAPER, constant, md1_lambda_max
from harness.core import ScenarioError
from harness.cores import Cores
from harness.saturation.bracket import MOST_LOADS, bracket
from harness.saturation.judging import Judgement, Outcome, Replicate, compared, judge
from harness.saturation.lambda_max import Effort, LambdaMax, LoadTried, crossing, lambda_max
from harness.saturation.optimum import PlanTried, answer_of, optimum
from harness.saturation.refining import minimise
from harness.saturation.trial import Trial, run_trial
from harness.scenario import load_scenario
from harness.statistics import Interval
from harness.throughput import deployment_model


def noiseless(root: float) -> Callable[[float], Outcome]:
    return lambda load: "meets" if load <= root else "misses"


@given(start=st.floats(0.01, 1e4), times=st.floats(0.02, 60.0), tolerance=st.floats(0.005, 0.5))
def test_a_bracket_holds_the_root_and_is_as_narrow_as_was_asked(
    start: float, times: float, tolerance: float
) -> None:
    root = start * times
    found = bracket(noiseless(root), start, tolerance)
    assert found.ended == "decided"
    assert found.low is not None
    assert found.high is not None
    assert found.low <= root < found.high <= found.low * (1 + tolerance) * (1 + 1e-12)


@given(times=st.floats(0.1, 10.0), blind=st.floats(0.001, 0.3), tolerance=st.floats(0.005, 0.1))
def test_a_bracket_with_a_blind_zone_holds_it_and_says_so(
    times: float, blind: float, tolerance: float
) -> None:
    """Within ``blind`` of the root no verdict can be had."""

    def ask(load: float) -> Outcome:
        if abs(math.log(load / times)) < blind:
            return "undecided"
        return "meets" if load < times else "misses"

    found = bracket(ask, 1.0, tolerance)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= times * math.exp(-blind) * (1 + 1e-12)
    assert found.high >= times * math.exp(blind) * (1 - 1e-12)
    assert all(found.low < one < found.high for one in found.undecided)
    if found.ended == "decided":
        assert found.high <= found.low * (1 + tolerance)
    elif found.ended == "undecided":
        # No nearer could be told: a known load lies within the tolerance of the zone.
        assert found.undecided
        assert found.undecided[0] <= found.low * (1 + tolerance)
        assert found.high <= found.undecided[-1] * (1 + tolerance)


def test_what_cannot_be_bracketed_is_said() -> None:
    assert bracket(lambda _load: "misses", 1.0, 0.02).ended == "unattainable"
    endless = bracket(lambda _load: "meets", 1.0, 0.02)
    assert (endless.ended, endless.high) == ("unbounded", None)
    assert endless.low is not None
    assert endless.low >= 32.0
    nothing = bracket(lambda _load: "undecided", 1.0, 0.02)
    assert (nothing.low, nothing.high, nothing.ended) == (None, None, "unbounded")


@given(allowed=st.integers(0, MOST_LOADS), root=st.floats(0.05, 20.0))
def test_a_budget_ends_a_search_and_leaves_a_bracket_that_holds(allowed: int, root: float) -> None:
    left = allowed

    def ask(load: float) -> Outcome | None:
        nonlocal left
        if not left:
            return None
        left -= 1
        return noiseless(root)(load)

    found = bracket(ask, 1.0, 1e-9)
    assert found.ended == "budget"
    assert found.low is None or found.low <= root
    assert found.high is None or found.high > root


def replicates(*p90s: float, missed: float = 0.0) -> list[Replicate]:
    return [Replicate(one, missed, 100) for one in p90s]


def test_a_load_is_judged_by_ttft_tpot_and_what_failed() -> None:
    below = replicates(4.0, 4.1, 3.9)
    assert judge(below, 5.0, 0.01).outcome == "meets"
    assert judge(below, 3.0, 0.01).outcome == "misses"
    assert judge(below, 4.02, 0.01).outcome == "undecided"
    slow = replicates(4.0, 4.1, 3.9, missed=0.011)
    assert judge(slow, 5.0, 0.01).outcome == "misses"
    assert judge(replicates(4.0, 4.1, 3.9, missed=0.01), 5.0, 0.01).outcome == "meets"
    assert judge(replicates(math.inf, math.inf), 5.0, 0.01).outcome == "misses"
    assert judge(replicates(math.inf, 1.0), 5.0, 0.01).outcome == "undecided"


def test_a_verdict_is_wrong_no_more_often_than_it_may_be() -> None:
    """At the bound itself any verdict but undecided is wrong, half of them either way."""
    rng = np.random.default_rng(1)
    answers = [compared(rng.normal(0.0, 1.0, 6).tolist(), 0.0, 0.05) for _ in range(4000)]
    for wrong in ("within", "above"):
        assert answers.count(wrong) / 4000 == pytest.approx(0.05, abs=0.015)


@given(root=st.floats(0.3, 3.0), seed=st.integers(0, 1000))
def test_a_noisy_response_is_not_bracketed_where_the_root_is_not(root: float, seed: int) -> None:
    """P90 / bound = (load / root)^8 times log-normal noise of a seed."""
    rng = np.random.default_rng(seed)

    def ask(load: float) -> Outcome:
        noise = np.exp(rng.normal(0.0, 0.2, 6))
        found = [Replicate(float((load / root) ** 8 * one), 0.0, 1) for one in noise]
        return judge(found, 1.0, 0.05 / MOST_LOADS).outcome

    found = bracket(ask, 1.0, 0.02)
    assert found.low is not None
    assert found.high is not None
    # 500 brackets: a share of them may be wrong, and then by little.
    assert found.low <= root * 1.05
    assert found.high >= root / 1.05


def test_the_estimate_lies_where_the_ratio_is_one() -> None:
    def tried(load: float, missed: float = 0.0) -> LoadTried:
        return LoadTried(load, Judgement("undecided", 6, (load / 1.7) ** 5, missed))

    loads = [tried(2.0), tried(1.0), tried(1.5)]
    assert crossing(loads) == pytest.approx(1.7)
    assert crossing(loads[:1]) is None
    assert crossing([tried(2.0, 0.5), tried(1.5, 0.5)]) is None


@given(low=st.floats(0.0, 1.0), high=st.floats(0.0, 1.0))
def test_the_least_of_valleys_is_found(low: float, high: float) -> None:
    least = (low, high)
    asked = 0

    def score(points: list[tuple[int, float]]) -> list[float]:
        nonlocal asked
        asked += 1
        return [abs(where - least[which]) for which, where in points]

    found = minimise(score, 2)  # type: ignore[arg-type]  # a list is a sequence
    assert asked == 3
    # The rounds leave gaps of 1/10, 1/25 and 2/125; the ends of [0, 1] are not points.
    for (where, _), wanted in zip(found, least, strict=True):
        assert abs(where - wanted) <= 0.02


QUICK = Effort(tolerance=0.1, budget_requests=250_000, least_requests=2000)


def test_of_m_d_1_the_load_is_that_of_theory() -> None:
    with Cores() as cores:
        found = lambda_max(constant(), "queue", 4.0, QUICK, cores, transfer=False)
    expected = md1_lambda_max(4.0)
    low, high = found.bracket.low, found.bracket.high
    assert low is not None
    assert high is not None
    assert low <= expected <= high
    assert high / low < 1.25
    assert found.estimate_req_per_s == pytest.approx(expected, rel=0.03)
    assert found.saturated_req_per_s == pytest.approx(1.0, rel=0.001)
    assert found.lambda_max_exact_req_per_s == pytest.approx(1.0, rel=1e-6)


def test_below_the_service_time_no_load_meets() -> None:
    with Cores(1) as cores:
        effort = Effort(least_requests=500)
        found = lambda_max(constant(), "queue", 0.9, effort, cores, transfer=False)
    assert found.bracket.ended == "unattainable"
    assert found.bracket.low is None
    assert found.estimate_req_per_s is None


def erlang_c(servers: int, offered: float) -> float:
    """Probability of waiting in M/M/c."""
    terms = [offered**k / math.factorial(k) for k in range(servers)]
    last = offered**servers / math.factorial(servers) / (1 - offered / servers)
    return last / (sum(terms) + last)


@pytest.mark.slow
def test_tpot_alone_can_be_what_ends_a_load() -> None:
    """First tokens leave at the end of prefill, so that who waits for one of 20 slots, each held
    for a second, misses TPOT: the load is where a hundredth of the requests waits."""
    given = constant(service_s=0.001, output_tokens=41)
    scheduling = replace(given.scheduling, ttft_source="prefill", bandwidth_aware=False)
    given = replace(
        given,
        scheduling=scheduling,
        deployments={"queue": replace(given.deployments["queue"], num_decode=1)},
    )
    effort = Effort(tolerance=0.1, budget_requests=400_000, least_requests=4000)
    with Cores() as cores:
        found = lambda_max(given, "queue", 1.0, effort, cores, transfer=False)
    low, high = found.bracket.low, found.bracket.high
    assert low is not None
    assert high is not None
    assert high / low < 1.25
    # Erlang's C is of exponential holding times, a constant one makes somewhat fewer wait.
    assert 0.003 < erlang_c(20, low) < 0.02
    assert 0.005 < erlang_c(20, high) < 0.04
    assert found.estimate_req_per_s is None
    assert max(one.judgement.ttft_ratio for one in found.loads if one.rate_req_per_s <= low) < 0.2


def test_any_number_of_workers_finds_the_same() -> None:
    effort = Effort(tolerance=0.3, budget_requests=25_000, least_requests=300)

    def found(workers: int) -> LambdaMax:
        with Cores(workers) as cores:
            return lambda_max(constant(), "queue", 4.0, effort, cores, transfer=False)

    assert found(1) == found(2)


def test_requests_that_are_refused_miss() -> None:
    """A queue of 3: TTFT is short for whoever gets in."""
    given = constant()
    scheduling = replace(given.scheduling, max_queue_requests=3, bandwidth_aware=False)
    refused = run_trial(
        Trial(replace(given, scheduling=scheduling), "queue", 2.0, 1, 4000, transfer=False)
    )
    assert refused.ttft_p90_s == math.inf
    assert refused.tpot_missed == pytest.approx(0.5, abs=0.05)


def test_a_closed_loop_and_a_trace_are_refused() -> None:
    given = constant()
    closed = replace(given, load=replace(given.load, concurrency=4))
    with Cores(1) as cores, pytest.raises(ScenarioError, match="closed loop"):
        lambda_max(closed, "queue", 4.0, Effort(), cores)


@pytest.mark.slow
def test_at_a_very_loose_slo_the_case_study_comes_near_to_eq_6() -> None:
    """One deployment; ``benchmarks.capacity_search`` has all three, and narrower."""
    name = "homogeneous_pd"
    scenario = load_scenario(PAPER, ["scheduling.bandwidth_aware=false"])
    exact = deployment_model(scenario, scenario.deployments[name]).lambda_max_exact_req_per_s
    with Cores() as cores:
        effort = Effort(tolerance=0.1, budget_requests=400_000)
        found = lambda_max(scenario, name, 50.0, effort, cores, transfer=False)
    low, high = found.bracket.low, found.bracket.high
    assert low is not None
    assert high is not None
    assert 0.8 * exact < low < high < 1.25 * exact
    assert found.estimate_req_per_s == pytest.approx(exact, rel=0.05)
    assert found.saturated_req_per_s == pytest.approx(exact, rel=0.02)


def test_where_the_formula_is_best_no_other_plan_is_claimed() -> None:
    """One decode instance more or less: decode cannot carry it, or prefill cannot."""
    scenario = load_scenario(PAPER, ["load.rate_req_per_s=1.8"])
    with Cores(1) as cores:
        found = optimum(scenario, "homogeneous_pd", cores, num_requests=1500, transfer=False)
    assert found.answer == "same_plan"
    assert (found.ratio, found.interval.low) == (1.0, None)
    assert found.best == (None, 9)
    assert {one.num_prefill for one in found.tried} == {8, 9, 10}
    with Cores(1) as cores:
        nothing = optimum(scenario, "naive_heterogeneous", cores)
    assert nothing.answer == "nothing_to_choose"


@pytest.mark.slow
def test_with_decode_to_spare_the_simulation_moves_an_instance_to_prefill() -> None:
    """Eq. 6 at its maximum keeps five decode instances; at 1.8 req/s four are enough."""
    scenario = load_scenario(PAPER, ["load.rate_req_per_s=1.8", "workload.cv=2"])
    with Cores() as cores:
        found = optimum(scenario, "prfaas_pd", cores, num_requests=2500, transfer=False)
    assert found.answer == "better"
    assert found.formula[1] == 3
    assert found.best[1] == 4
    assert found.interval.high is not None
    assert found.interval.high < 0.95


def test_a_plan_is_better_only_where_its_whole_interval_is() -> None:
    tried = [PlanTried(1000, 3, 4.0)]
    answers = {
        (0.8, 0.9): "better",
        (0.8, 1.0): "no_difference_proven",
        (0.9, 1.1): "no_difference_proven",
        (1.01, 1.1): "worse",
        (None, None): "no_difference_proven",
    }
    for (low, high), answer in answers.items():
        assert answer_of(tried, False, Interval(low, high, 0.95, None)) == answer
    assert answer_of(tried, True, Interval(0.8, 0.9, 0.95, None)) == "same_plan"
    assert answer_of([], False, Interval(0.8, 0.9, 0.95, None)) == "nothing_to_choose"
