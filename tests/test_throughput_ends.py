"""The ends of the search, where everything crosses or nothing does, and what it cannot count."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.core import ScenarioError
from harness.deployment import Deployment
from harness.planning.plan import plan
from harness.planning.variants import Variant, optimum, with_output_length
from harness.preparation import replan
from harness.scenario import Scenario, load_scenario
from harness.scenario_change import with_plan, with_trace
from harness.simulator import simulate
from harness.throughput import (
    OBJECTIVES,
    Objective,
    capacity_grid,
    deployment_model,
    left_out,
    solve,
)
from harness.transfer_model import exposure, prefill_pieces
from harness.utilisation import predict_utilisation
from harness.workload import LengthDistribution, build_schedule, length_distribution

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


def prfaas(scenario: Scenario) -> Deployment:
    return scenario.deployments["prfaas_pd"]


def counts(deployment: Deployment) -> tuple[int | None, int, int, int]:
    return (
        deployment.threshold_tokens,
        deployment.num_prfaas,
        deployment.num_prefill,
        deployment.num_decode,
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "settings",
    [
        ["workload.sigma=0"],
        ["workload.min_tokens=20000", "workload.max_tokens=20000"],
        ["workload.output_tokens=4096"],
    ],
)
def test_all_of_pd_decodes_where_that_carries_most(
    objective: Objective, settings: list[str]
) -> None:
    """Equal lengths leave no length to part at; long outputs want every PD instance to decode."""
    scenario = load_scenario(PAPER, settings)
    found = solve(scenario, prfaas(scenario), objective)
    assert counts(found) == (0, 4, 0, 8)
    naive = deployment_model(scenario, scenario.deployments["naive_heterogeneous"])
    model = deployment_model(scenario, found)
    assert model.lambda_max_req_per_s == naive.lambda_max_req_per_s
    assert model.lambda_max_exact_req_per_s == naive.lambda_max_exact_req_per_s
    assert model.theta_pd_prefill_req_per_s is None
    assert solve(scenario, found, objective) == found


def test_the_simulator_runs_such_a_plan_like_the_naive_one() -> None:
    scenario = load_scenario(PAPER, ["workload.output_tokens=4096", "load.num_requests=200"])
    found = solve(scenario, prfaas(scenario))
    planned = with_plan(scenario, {"prfaas_pd": (found.threshold_tokens, 0, found.num_decode)})
    schedule = build_schedule(planned.workload, planned.load)
    one, other = (simulate(planned, n, schedule) for n in ("prfaas_pd", "naive_heterogeneous"))
    assert [r.ttft_s for r in one.requests] == [r.ttft_s for r in other.requests]
    assert predict_utilisation(planned, "prfaas_pd", schedule) == predict_utilisation(
        planned, "naive_heterogeneous", schedule
    )


def test_a_plan_without_local_prefill_is_searched_again_when_inputs_change() -> None:
    long = load_scenario(PAPER, ["workload.output_tokens=4096"])
    found = solve(long, prfaas(long))
    base = Variant(long, length_distribution(long), found, None)
    again = optimum(base, lambda one: with_output_length(one, 1024), "paper")
    assert (again.num_prefill, again.num_decode) == (3, 5)
    assert again.throughput_req_per_s == pytest.approx(3.24, rel=0.01)


def test_a_document_without_local_prefill_says_what_it_leaves_out() -> None:
    document = plan(load_scenario(PAPER, ["workload.output_tokens=4096"])).document()
    one = document["deployments"]["prfaas_pd"]
    assert (one["threshold_tokens"], one["num_prefill"], one["num_decode"]) == (0, None, 8)
    assert one["theta_pd_prefill_req_per_s"] is None
    assert document["curve"] is None
    assert document["grid"] is None
    assert any("N_p = 0" in note for note in document["notes"])
    assert document["attribution"] is not None
    # The scenario's own plan is beside it, with its TTFT.
    planned = one["as_planned"]
    assert (planned["num_prefill"], planned["num_decode"]) == (3, 5)
    assert planned["ttft"]["unstable_stage"] == "pd_decode"


def test_where_nothing_should_cross_the_threshold_is_the_longest_prompt(paper: Scenario) -> None:
    thin = replace(paper, link=paper.link.both(rate_bytes_per_s=125.0))
    for objective in OBJECTIVES:
        found = solve(thin, prfaas(thin), objective)
        assert found.threshold_tokens == 131_072
        assert deployment_model(thin, found).offload_fraction == 0
    curve = capacity_grid(paper, prfaas(paper), "paper", points=20)
    assert curve.threshold_tokens[-1] == 131_072


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_map_of_splits_has_the_searchs_own_thresholds(
    paper: Scenario, objective: Objective
) -> None:
    found = solve(paper, prfaas(paper), objective)
    grid = capacity_grid(paper, found, objective, points=12)
    row = grid.num_prefill.index(found.num_prefill)
    assert grid.best_threshold_tokens[row] == found.threshold_tokens
    for number, threshold in enumerate(grid.best_threshold_tokens):
        rates = grid.lambda_max_req_per_s[number]
        at = grid.threshold_tokens.tolist().index(threshold)
        assert rates[at] == pytest.approx(rates.max(), rel=1e-8)


def test_a_map_over_t_above_0_has_no_best_at_0() -> None:
    """A slot held through prefill favours the fast chip: some N_p carry most with t = 0, where N_p
    has nothing to do; the map's best is then the best t above it."""
    reserved = load_scenario(PAPER, ["scheduling.admission=reserve_first"])
    for objective in OBJECTIVES:
        grid = capacity_grid(reserved, prfaas(reserved), objective, points=12)
        assert grid.best_threshold_tokens.min() > 0
        assert set(grid.best_threshold_tokens) <= set(grid.threshold_tokens)


def test_a_map_of_many_splits_is_bounded_and_has_the_plans_own(paper: Scenario) -> None:
    large = replace(prfaas(paper), num_prefill=123, num_decode=877)
    grid = capacity_grid(paper, large, "paper", points=12)
    assert len(grid.num_prefill) in (64, 65)
    assert {1, 123, 999} <= set(grid.num_prefill)
    assert len(grid.threshold_tokens) < 200


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_hardware_may_have_any_name(paper: Scenario, objective: Objective) -> None:
    """Also that of another cost: seconds of prefill are not to be taken for bytes."""
    renamed = replace(prfaas(paper), prfaas_hardware="bytes", pd_hardware="landed")
    hardware = {"bytes": paper.hardware["h200"], "landed": paper.hardware["h20"]}
    other = replace(paper, hardware=hardware)
    found, expected = solve(other, renamed, objective), solve(paper, prfaas(paper), objective)
    assert counts(found) == counts(expected)
    assert deployment_model(other, found) == deployment_model(paper, expected)


def test_the_plan_given_is_never_better_than_the_one_found_among_many_lengths(
    paper: Scenario,
) -> None:
    """More distinct lengths than are tried: what was given is among them all the same."""
    rng = np.random.default_rng(3)
    lengths = np.sort(rng.choice(np.arange(128, 131_072), 30_000, replace=False)).astype(float)
    weights = rng.pareto(0.6, len(lengths)) + 1e-3  # a few lengths outweigh all others
    given = LengthDistribution(lengths, weights / weights.sum(), 1024.0, np.zeros(len(lengths)))
    for threshold in (0, 5_001, 30_011, 131_072):
        one = replace(prfaas(paper), threshold_tokens=threshold)
        found = deployment_model(paper, solve(paper, one, "exact", given), given)
        as_given = deployment_model(paper, one, given)
        assert found.lambda_max_exact_req_per_s >= as_given.lambda_max_exact_req_per_s


def test_plan_and_simulate_solve_a_trace_alike(paper: Scenario, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    rows = "".join(
        f'{{"timestamp": {700 * n}, "input_length": {length}, "output_length": 900}}\n'
        for n, length in enumerate(rng.integers(500, 120_000, 400).tolist())
    )
    path = tmp_path / "trace.jsonl"
    path.write_text(rows)
    scenario = with_trace(paper, path)
    replanned, notes = replan(scenario)
    for name, solved in plan(scenario).solved.items():
        assert counts(replanned.deployments[name]) == counts(solved.deployment)
    assert all("by the paper equations" in note for note in notes)


def test_what_is_left_out_is_said() -> None:
    assert left_out(load_scenario(PAPER)) == ()
    assert left_out(load_scenario(PAPER, ['transport.pacing="1tbit"'])) == ()
    (paced,) = left_out(load_scenario(PAPER, ['transport.pacing="2gbit"']))
    assert paced.startswith("transport.pacing is not in Lambda_max or TTFT")
    assert paced.endswith("at most 2 Gbit/s.")
    capped = left_out(load_scenario(PAPER, ['link.per_flow_cap="2gbit"', 'link.loss="0.1%"']))
    assert "link.per_flow_cap" in capped[0]
    assert "at most 8 Gbit/s" in capped[0]
    assert capped[1].startswith("link.loss: not in")
    reserved = load_scenario(PAPER, ['scheduling.admission="reserve_first"'])
    (bound,) = left_out(reserved)
    assert "upper bound" in bound
    assert "60 s" in bound


def test_reserved_slots_are_held_through_prefill_and_transfer() -> None:
    """Decode limits; saturated simulation is the truth, and Lambda_max is just above it."""
    settings = [
        'scheduling.admission="reserve_first"',
        'scheduling.admission_deadline="1000000s"',
        "load.num_requests=2500",
        "load.rate_req_per_s=8",
        "deployments.homogeneous_pd.num_prefill=10",
        "deployments.homogeneous_pd.num_decode=2",
        "deployments.prfaas_pd.num_prefill=5",
        "deployments.prfaas_pd.num_decode=3",
    ]
    scenario = load_scenario(PAPER, settings)
    schedule = build_schedule(scenario.workload, scenario.load)
    for name in ("prfaas_pd", "homogeneous_pd"):
        model = deployment_model(scenario, scenario.deployments[name])
        pushed = replace(
            scenario, scheduling=replace(scenario.scheduling, admission="push_then_admit")
        )
        assert model.bottleneck == "pd_decode"
        unheld = deployment_model(pushed, scenario.deployments[name])
        assert model.lambda_max_exact_req_per_s < 0.95 * unheld.lambda_max_exact_req_per_s
        requests = simulate(scenario, name, schedule).requests
        ends = sorted(one.planned_s + one.e2e_s for one in requests if one.e2e_s is not None)
        tenth = len(ends) // 10
        carried = 8 * tenth / (ends[9 * tenth] - ends[tenth])
        assert carried == pytest.approx(model.lambda_max_exact_req_per_s, rel=0.05)
        offered = predict_utilisation(scenario, name, schedule).pd_decode
        assert offered == pytest.approx(8 / model.exact_rates.pd_decode, rel=0.05)


@pytest.mark.parametrize("rate", ['"100gbit"', '"1gbit"'])
def test_a_reserved_slot_waits_for_the_transfer_that_the_transfer_model_has(rate: str) -> None:
    """The slot-seconds beyond decoding, against ``harness.transfer_model`` at every length."""
    settings = ['scheduling.admission="reserve_first"', f"link.rate={rate}", f"fabric.rate={rate}"]
    settings += ['prefix.model="share"', 'prefix.agent_share="40%"', 'link.rtt="20ms"']
    scenario = load_scenario(PAPER, settings)
    deployment, lengths = prfaas(scenario), length_distribution(scenario)
    new, cached = np.rint(lengths.lengths), np.rint(lengths.cached_tokens)
    far = new > 19_400
    held_s = np.empty(len(new))
    for side, name, delay_s in ((far, "h200", 0.02), (~far, "h20", 0.0)):
        cost = scenario.hardware[name].profile.prefill_s_array
        pieces = prefill_pieces(scenario.model.architecture, new[side], cost, cached[side])
        path = scenario.link.rate_bytes_per_s  # the fabric's too
        held_s[side] = pieces.prefill_s + exposure(pieces, path).exposed_s + delay_s
    expected = (1023 * 0.025 + lengths.weights @ held_s) / 20  # slots
    rates = deployment_model(scenario, deployment, lengths).exact_rates
    # Whole tokens there, and a law's points here.
    assert deployment.num_decode / rates.pd_decode == pytest.approx(expected, rel=1e-6)


def test_prefixes_that_nothing_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"'prefix\.agent_share'.*no effect"):
        load_scenario(PAPER, ['prefix.agent_share="30%"'])
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,900,40\n")
    traced = with_trace(load_scenario(PAPER, ['prefix.model="trace"']), path)
    with pytest.raises(ScenarioError, match=r"'prefix\.model'.*hash ids.*azure\.csv"):
        length_distribution(traced)


def test_agents_alone_with_all_of_their_prompts_cached() -> None:
    overrides = ['prefix.model="share"', 'prefix.agent_share="100%"']
    overrides += [f'hardware.{name}.extrapolate="end_slope"' for name in ("h20", "h200")]
    scenario = load_scenario(PAPER, [*overrides, 'prefix.cached_fraction="100%"'])
    lengths = length_distribution(scenario)
    assert lengths.lengths.max() == 1.0  # one token is always new
    assert lengths.weights.min() > 0
    document = plan(scenario).document()
    assert document["sweeps"]["rtt_limit"]["near_mean_s"] > 0
