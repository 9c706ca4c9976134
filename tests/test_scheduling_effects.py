"""What the mechanisms of scheduling do, in simulation, each against the same load without it."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from harness.scenario import Scenario, load_scenario
from harness.simulator import SimulatedRequest, Simulation, simulate
from harness.workload import build_schedule

SCENARIOS = Path(__file__).parent.parent / "scenarios"
OFF = "scheduling.bandwidth_aware=false"
CUT_S, OUT_S, BACK_S = 200.0, 600.0, 1200.0


def simulated(name: str, *settings: str, deployment: str = "prfaas_pd") -> Simulation:
    scenario = load_scenario(SCENARIOS / f"{name}.toml", settings)
    return simulate(scenario, deployment, build_schedule(scenario.workload, scenario.load))


def ttfts(rows: tuple[SimulatedRequest, ...] | list[SimulatedRequest]) -> np.ndarray:
    """Seconds; a request that failed has waited for ever. # (requests,)"""
    return np.array([np.inf if row.ttft_s is None else row.ttft_s for row in rows])


def crossing(rows: list[SimulatedRequest]) -> float:
    """Share of the requests that PrfaaS prefilled."""
    return float(np.mean([row.route is not None and row.route.crosses for row in rows]))


def between(result: Simulation, start_s: float, end_s: float) -> list[SimulatedRequest]:
    return [row for row in result.requests if start_s <= row.planned_s < end_s]


def rate_of_first_tokens(result: Simulation, start_s: float, end_s: float) -> float:
    """Goodput, requests a second."""
    tokens_s = [r.planned_s + r.ttft_s for r in result.requests if r.ttft_s is not None]
    return sum(start_s <= at_s < end_s for at_s in tokens_s) / (end_s - start_s)


@pytest.fixture(scope="module")
def cut() -> Simulation:
    return simulated("link-cut")


def test_a_link_cut_to_5_gbit_raises_the_threshold_and_bounds_ttft(cut: Simulation) -> None:
    """The cut is found out from what waits. p99 of the naive deployment is its whole backlog."""
    raised = [one for one in cut.thresholds if one.at_s > CUT_S + 240]
    assert np.median([one.threshold_tokens for one in raised]) == pytest.approx(32_000, rel=0.15)
    assert all(one.at_s > CUT_S for one in cut.thresholds)
    late = between(cut, 1500, 1e9)
    assert float(np.quantile(ttfts(late), 0.99)) < 20
    assert cut.num_completed == len(cut.requests)


def test_without_a_threshold_the_queue_for_the_cut_link_grows_without_end(cut: Simulation) -> None:
    naive = simulated("link-cut", deployment="naive_heterogeneous")
    thirds = [np.mean(ttfts(between(naive, a, a + 400))) for a in (300, 1000, 1700)]
    assert thirds[1] > thirds[0] + 100
    assert thirds[2] > thirds[1] + 100
    assert max(ttfts(cut.requests)) < thirds[0]


def test_with_a_fixed_threshold_the_cut_link_has_no_room_to_spare(cut: Simulation) -> None:
    fixed = simulated("link-cut", OFF)
    assert fixed.thresholds == ()
    p99_s, fixed_p99_s = (
        float(np.quantile(ttfts(between(one, 1000, 1e9)), 0.99)) for one in (cut, fixed)
    )
    assert fixed_p99_s > 2 * p99_s


@pytest.fixture(scope="module")
def outage() -> Simulation:
    return simulated("link-outage")


def test_an_outage_is_local_within_a_control_period_and_refuses_the_rest_early(
    outage: Simulation,
) -> None:
    (first, *rest) = outage.thresholds
    period_s, staleness_s = 1.0, 0.1
    assert OUT_S < first.at_s <= OUT_S + period_s + staleness_s
    assert (first.threshold_tokens, first.reason) == (131_073, "outage")
    during = between(outage, first.at_s, BACK_S)
    assert crossing(during) == 0
    # Local prefill alone carries 0.70 req/s of the case study by the law of its lengths, and is at
    # work all the time.
    assert rate_of_first_tokens(outage, 650, BACK_S) == pytest.approx(0.70, rel=0.1)
    work_s = sum(row.prefill_s for row in during if row.prefill_s is not None)
    assert work_s > 0.97 * 3 * (BACK_S - OUT_S)
    assert Counter(row.failure_phase for row in during)["rejected"] > 0.3 * len(during)
    served = [row.prefill_queue_s for row in during if row.prefill_queue_s is not None]
    assert max(served) < 20 + 1e-6  # max_wait: nobody waits for what will not come
    # A tenth off each period until the plan holds again.
    tokens = [one.threshold_tokens for one in rest]
    assert {one.reason for one in rest} == {"recovery"}
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[-1] == 19_400
    assert BACK_S <= rest[0].at_s < BACK_S + period_s + staleness_s
    assert rest[-1].at_s < BACK_S + 25
    back = between(outage, BACK_S + 60, 1e9)
    assert crossing(back) == pytest.approx(0.5, abs=0.06)
    assert rate_of_first_tokens(outage, 1300, 1800) == pytest.approx(1.27, rel=0.12)


def test_without_feedback_an_outage_holds_up_half_of_what_arrives() -> None:
    blind = simulated("link-outage", OFF, "scheduling.max_wait='600s'")
    stuck = [row for row in between(blind, OUT_S, BACK_S) if row.route and row.route.crosses]
    assert len(stuck) > 100
    assert min(row.planned_s + row.ttft_s for row in stuck if row.ttft_s is not None) > BACK_S


def test_roles_convert_in_a_long_outage_and_carry_more(outage: Simulation) -> None:
    converting = simulated("link-outage", "scheduling.role_conversion=true")
    assert {one.role for one in converting.roles} == {"prefill"}
    first = converting.roles[0]
    # Three role periods on end, then drain, then 10 s.
    assert first.at_s > OUT_S + 150
    assert first.at_s - first.left_s == pytest.approx(10)
    more, fewer = (rate_of_first_tokens(one, 1000, BACK_S) for one in (converting, outage))
    assert more > 1.2 * fewer


def test_bursts_move_neither_roles_nor_the_threshold_by_much() -> None:
    bursty = simulated("bursts")
    assert bursty.roles == ()
    assert len(bursty.thresholds) <= 10
    assert max((one.threshold_tokens for one in bursty.thresholds), default=0) < 1.25 * 19_400


def test_results_are_those_of_a_fixed_threshold_where_the_link_has_room() -> None:
    """To the last bit: what the scheduler is told changes nothing it does not have to."""
    scenario = load_scenario(SCENARIOS / "paper-case-study.toml", ["load.num_requests=1500"])
    schedule = build_schedule(scenario.workload, scenario.load)
    fixed = load_scenario(SCENARIOS / "paper-case-study.toml", ["load.num_requests=1500", OFF])
    assert simulate(scenario, "prfaas_pd", schedule) == simulate(fixed, "prfaas_pd", schedule)


def test_what_waits_for_a_link_that_stays_down_fails_at_the_request_timeout(
    tmp_path: Path,
) -> None:
    schedule = tmp_path / "dead.toml"
    schedule.write_text('[[change]]\nat = "60s"\nloss = "99.99999999999999%"\n')
    scenario: Scenario = load_scenario(
        SCENARIOS / "paper-case-study.toml",
        [f"link.schedule='{schedule}'", "load.num_requests=200", OFF],
    )
    result = simulate(scenario, "prfaas_pd", build_schedule(scenario.workload, scenario.load))
    phases = Counter(row.failure_phase for row in result.requests)
    assert set(phases) == {None, "transfer", "prefill_queue"}
    for row in result.requests:
        assert row.route is not None
        late = row.planned_s > 60 and row.route.crosses
        assert (row.outcome == "failed") == late or 50 < row.planned_s <= 60
    assert result.end_s >= max(r.planned_s for r in result.requests if r.failure_phase) + 600
