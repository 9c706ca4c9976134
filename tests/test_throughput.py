"""The throughput model against the paper's Table 6, brute force and a saturated simulation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core import Request, ScenarioError
from harness.deployment import Deployment
from harness.scenario import Fabric, Scenario, load_scenario
from harness.simulator import simulate
from harness.throughput import (
    DeploymentModel,
    Objective,
    StageRates,
    deployment_model,
    solve,
)
from harness.utilisation import Utilisation, predict_utilisation, window_s
from harness.workload import LengthDistribution, build_schedule, length_distribution
from netem.link import symmetric

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
GBIT = 1e9 / 8


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


@pytest.fixture(scope="module")
def models(paper: Scenario) -> dict[str, DeploymentModel]:
    return {name: deployment_model(paper, one) for name, one in paper.deployments.items()}


def test_table_6(models: dict[str, DeploymentModel]) -> None:
    prfaas = models["prfaas_pd"]
    assert prfaas.theta_prfaas_req_per_s == pytest.approx(1.61, rel=0.01)
    assert prfaas.theta_pd_prefill_req_per_s == pytest.approx(1.64, rel=0.01)
    assert prfaas.theta_pd_decode_req_per_s == pytest.approx(3.91, rel=0.01)
    assert prfaas.lambda_max_req_per_s == pytest.approx(3.24, rel=0.01)
    assert prfaas.offload_fraction == pytest.approx(0.496, abs=0.005)
    assert prfaas.long_mean_tokens == pytest.approx(45_046, rel=0.01)
    assert prfaas.short_mean_tokens == pytest.approx(10_224, rel=0.01)
    assert prfaas.egress_bytes_per_s is not None
    assert 12 * GBIT < prfaas.egress_bytes_per_s < 13.5 * GBIT
    homogeneous = models["homogeneous_pd"]
    assert homogeneous.theta_pd_prefill_req_per_s == pytest.approx(2.11, rel=0.01)
    assert homogeneous.theta_pd_decode_req_per_s == pytest.approx(2.35, rel=0.01)
    assert homogeneous.lambda_max_req_per_s == pytest.approx(2.11, rel=0.01)
    naive = models["naive_heterogeneous"]
    assert naive.theta_prfaas_req_per_s == pytest.approx(2.45, rel=0.01)
    assert naive.theta_pd_decode_req_per_s == pytest.approx(6.25, rel=0.01)
    assert naive.lambda_max_req_per_s == pytest.approx(2.45, rel=0.01)


def test_exact_expectations_show_what_mean_lengths_hide(models: dict[str, DeploymentModel]) -> None:
    """Jensen: 2.33 to 2.39 for the naive deployment, by the notes on the paper."""
    assert 2.33 <= models["naive_heterogeneous"].lambda_max_exact_req_per_s <= 2.39
    for model in models.values():
        assert model.lambda_max_exact_req_per_s < model.lambda_max_req_per_s


def test_what_does_not_apply_is_none(models: dict[str, DeploymentModel]) -> None:
    homogeneous, naive = models["homogeneous_pd"], models["naive_heterogeneous"]
    assert homogeneous.threshold_tokens is None
    assert homogeneous.num_prfaas is None
    assert homogeneous.theta_prfaas_req_per_s is None
    assert homogeneous.offload_fraction is None
    assert homogeneous.egress_bytes_per_s is None
    assert homogeneous.utilisation(1.0).link is None
    assert naive.num_prefill is None
    assert naive.theta_pd_prefill_req_per_s is None
    assert naive.short_mean_tokens is None
    assert naive.offload_fraction == 1.0
    assert naive.utilisation(1.0).pd_prefill is None


def test_the_search_finds_the_papers_plan(paper: Scenario) -> None:
    spoilt = replace(
        paper.deployments["prfaas_pd"], threshold_tokens=1000, num_prefill=1, num_decode=7
    )
    found = solve(paper, spoilt, "paper")
    assert (found.num_prfaas, found.num_prefill, found.num_decode) == (4, 3, 5)
    assert found.threshold_tokens == pytest.approx(19_400, abs=500)
    spoilt = replace(paper.deployments["homogeneous_pd"], num_prefill=2, num_decode=10)
    for objective in ("paper", "exact"):
        found = solve(paper, spoilt, objective)
        assert (found.num_prefill, found.num_decode) == (9, 3)
        assert found.threshold_tokens is None
    naive = paper.deployments["naive_heterogeneous"]
    assert solve(paper, naive) == naive


@pytest.mark.parametrize("objective", ["paper", "exact"])
def test_the_solved_plan_is_at_least_as_good_as_the_given_one(
    paper: Scenario, objective: Objective
) -> None:
    def value(deployment: Deployment) -> float:
        model = deployment_model(scenario, deployment)
        exact = objective == "exact"
        return model.lambda_max_exact_req_per_s if exact else model.lambda_max_req_per_s

    for overrides in (["workload.mu=9.0"], ["workload.sigma=1.4"], ["workload.output_tokens=300"]):
        scenario = load_scenario(paper.path, overrides)
        for given_plan in scenario.deployments.values():
            best = value(solve(scenario, given_plan, objective))
            assert best >= value(given_plan) * (1 - 1e-6)


def plain_rates(
    scenario: Scenario,
    deployment: Deployment,
    lengths: list[int],
    weights: list[float],
    objective: Objective,
) -> float:
    """Lambda_max of one plan, by sums over the lengths one at a time."""
    assert deployment.prfaas_hardware is not None
    remote = scenario.hardware[deployment.prfaas_hardware].profile
    local = scenario.hardware[deployment.pd_hardware].profile
    kv_bytes = scenario.model.architecture.kv_bytes
    total = sum(weights)
    pairs = [(length, weight / total) for length, weight in zip(lengths, weights, strict=True)]
    long = [(n, w) for n, w in pairs if n > (deployment.threshold_tokens or 0)]
    short = [(n, w) for n, w in pairs if n <= (deployment.threshold_tokens or 0)]
    output = scenario.workload.output_tokens - (objective == "exact")
    fabric = scenario.fabric.rate_bytes_per_s
    rates = [deployment.num_decode * local.decode_max_batch / (0.025 * output)]
    for side, profile, count in (
        (long, remote, deployment.num_prfaas),
        (short, local, deployment.num_prefill),
    ):
        p = sum(w for _, w in side)
        if not side:
            continue
        mean = min(sum(w * n for n, w in side) / p, max(lengths))  # as it is but for rounding
        points = side if objective == "exact" else [(mean, p)]
        rates.append(count / sum(w * profile.prefill_s(n) for n, w in points))
        if side is short:
            rates.append(count * fabric / sum(w * kv_bytes(round(n)) for n, w in points))
    if long:
        crossing = sum(w * kv_bytes(n) for n, w in long)
        rates.append(scenario.link.rate_bytes_per_s / crossing)
    return min(rates)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(128, 131_072), st.integers(1, 20)), min_size=1, max_size=8),
    st.sampled_from(["paper", "exact"]),
    st.sampled_from([1 * GBIT, 8 * GBIT, 100 * GBIT]),
    st.sampled_from([0.5 * GBIT, 2 * GBIT, 400 * GBIT]),
    st.sampled_from([64, 1024, 4096]),
    st.integers(0, 131_072),
)
def test_the_search_equals_brute_force_and_is_no_worse_than_the_plan(
    paper: Scenario,
    drawn: list[tuple[int, int]],
    objective: Objective,
    rate: float,
    fabric: float,
    output_tokens: int,
    threshold: int,
) -> None:
    """Every threshold and every split, N_p = 0 with threshold 0 among them."""
    scenario = replace(
        paper,
        link=symmetric("test", rate, 0.001),
        fabric=Fabric(fabric),
        workload=replace(paper.workload, output_tokens=output_tokens),
    )
    lengths = [length for length, _ in drawn]
    weights = [float(weight) for _, weight in drawn]
    given_lengths = LengthDistribution(
        np.array(lengths, dtype=np.float64),
        np.array(weights) / sum(weights),
        float(output_tokens),
        np.zeros(len(lengths)),
    )
    base = replace(scenario.deployments["prfaas_pd"], threshold_tokens=threshold)
    total = base.num_prefill + base.num_decode
    best = max(
        plain_rates(
            scenario,
            replace(base, threshold_tokens=t, num_prefill=n, num_decode=total - n),
            lengths,
            weights,
            objective,
        )
        for t in (0, *lengths)
        for n in range(t > 0, total)
    )
    as_planned = plain_rates(scenario, base, lengths, weights, objective)
    found = solve(scenario, base, objective, given_lengths)
    value = plain_rates(scenario, found, lengths, weights, objective)
    assert value == pytest.approx(best, rel=1e-4)
    assert value >= as_planned * (1 - 1e-9)
    model = deployment_model(scenario, found, given_lengths)
    told = model.lambda_max_exact_req_per_s if objective == "exact" else model.lambda_max_req_per_s
    assert told == pytest.approx(value, rel=1e-4)


def test_a_thin_link_limits_and_is_named(paper: Scenario) -> None:
    thin = replace(paper, link=symmetric("thin", 5 * GBIT, 0.001))
    model = deployment_model(thin, paper.deployments["naive_heterogeneous"])
    kv_bytes = paper.model.architecture.kv_bytes(27_486)
    assert model.bottleneck == "link"
    assert model.theta_prfaas_req_per_s == pytest.approx(5 * GBIT / kv_bytes, rel=1e-3)
    assert model.egress_bytes_per_s == pytest.approx(5 * GBIT)
    # Less crosses once the search may choose.
    solved = solve(thin, paper.deployments["prfaas_pd"])
    assert solved.threshold_tokens is not None
    assert solved.threshold_tokens > 25_000


def test_equal_lambdas_are_told_apart_by_prefill_capacity(paper: Scenario) -> None:
    """Decode limits a whole range of t when outputs are long; take the middle of it."""
    scenario = load_scenario(paper.path, ["workload.output_tokens=2250"])
    found = solve(scenario, scenario.deployments["prfaas_pd"], "exact")
    assert found.num_prefill == 1
    model = deployment_model(scenario, found)
    rates = model.exact_rates
    assert model.bottleneck == "pd_decode"
    assert rates.prfaas_prefill == pytest.approx(rates.pd_prefill, rel=0.01)


def test_utilisation_and_the_load_that_fits(models: dict[str, DeploymentModel]) -> None:
    model = models["prfaas_pd"]
    at_max = model.utilisation(model.lambda_max_exact_req_per_s)
    stage, busiest = at_max.busiest()
    assert stage == model.bottleneck
    assert busiest == pytest.approx(1.0)
    scale = model.load_scale_for(0.95, 2 * model.lambda_max_exact_req_per_s)
    assert scale == pytest.approx(0.475)
    rates = StageRates(prfaas_prefill=None, pd_prefill=2.0, pd_decode=4.0, link=None)
    assert rates.bottleneck() == ("pd_prefill", 2.0)
    assert rates.utilisation(1.0) == Utilisation(None, 0.5, 0.25, None)


def test_predicted_utilisation_of_a_schedule_by_hand(paper: Scenario) -> None:
    schedule = tuple(
        Request(str(n), n, float(n), tokens, 101) for n, tokens in enumerate((1024, 1024, 45_046))
    )
    assert window_s(paper, schedule) == 3.0
    found = predict_utilisation(paper, "prfaas_pd", schedule)
    assert found.pd_prefill == pytest.approx(2 * 0.72 / (3 * 3.0))
    assert found.prfaas_prefill == pytest.approx((4 / 1.61) / (4 * 3.0), rel=1e-6)
    assert found.pd_decode == pytest.approx(3 * 100 * 0.025 / (5 * 20 * 3.0))
    kv_bytes = paper.model.architecture.kv_bytes(45_046)
    assert found.link == pytest.approx(kv_bytes / (paper.link.rate_bytes_per_s * 3.0))


def test_the_window_of_a_schedule_that_spans_nothing(paper: Scenario) -> None:
    one = (Request("0", 0, 7.0, 1024, 2),)
    assert window_s(paper, one) == pytest.approx(1 / paper.load.rate_req_per_s)
    timed = replace(paper, load=replace(paper.load, duration_s=60.0))
    assert window_s(timed, one) == 60.0
    with pytest.raises(ScenarioError, match="no request"):
        window_s(paper, ())


def test_predicted_utilisation_agrees_with_the_model(paper: Scenario) -> None:
    scenario = load_scenario(paper.path, ["load.num_requests=20000", "load.seed=5"])
    schedule = build_schedule(scenario.workload, scenario.load)
    for name, deployment in scenario.deployments.items():
        model = deployment_model(scenario, deployment)
        expected = model.utilisation(scenario.load.rate_req_per_s).by_stage()
        found = predict_utilisation(scenario, name, schedule).by_stage()
        assert found == pytest.approx(expected, rel=0.03)
        assert ("fabric" in found) == (deployment.num_prefill > 0)


def test_throughput_at_saturation_is_the_exact_lambda_max(paper: Scenario) -> None:
    """Twice what the deployment carries: it completes Lambda_max, of T(l) and not of T(E[l])."""
    scenario = load_scenario(
        paper.path, ["load.num_requests=4000", "load.rate_req_per_s=8", "load.seed=2"]
    )
    schedule = build_schedule(scenario.workload, scenario.load)
    for name in ("homogeneous_pd", "naive_heterogeneous"):
        model = deployment_model(scenario, scenario.deployments[name])
        patient = replace(
            scenario, scheduling=replace(scenario.scheduling, admission_deadline_s=1e6)
        )
        result = simulate(patient, name, schedule, transfer=False)
        throughput = len(schedule) / result.end_s
        assert throughput == pytest.approx(model.lambda_max_exact_req_per_s, rel=0.03)


def test_the_length_distribution_is_the_papers(paper: Scenario) -> None:
    given_lengths = length_distribution(paper)
    lengths, weights = np.asarray(given_lengths.lengths), np.asarray(given_lengths.weights)
    assert weights.sum() == pytest.approx(1.0)
    assert np.dot(lengths, weights) == pytest.approx(27_486, rel=0.002)
    assert weights[lengths > 19_400].sum() == pytest.approx(0.4957, abs=0.001)
