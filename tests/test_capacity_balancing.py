"""The heterogeneous baseline that looks at no length: scenario, equations and simulation of it."""

from pathlib import Path

import pytest

from harness.core import ScenarioError
from harness.preparation import prepare
from harness.scenario import Scenario, load_scenario
from harness.simulator import simulate
from harness.throughput import deployment_model
from harness.throughput.search import solve
from harness.utilisation import predict_utilisation
from harness.workload import build_schedule

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
BY_CAPACITY = [
    f"deployments.by_capacity.{key}"
    for key in (
        "balancing=capacity",
        "num_prfaas=4",
        "num_prefill=3",
        "num_decode=5",
        "prfaas_hardware=h200",
        "pd_hardware=h20",
    )
]


def paper(*settings: str) -> Scenario:
    return load_scenario(PAPER, [*BY_CAPACITY, *settings])


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ("deployments.by_capacity.threshold_tokens=19400", "by_capacity.threshold_tokens.*length"),
        ("deployments.by_capacity.num_prefill=0", r"by_capacity.balancing.*two clusters"),
        ("deployments.homogeneous_pd.balancing=capacity", r"homogeneous_pd.balancing.*num_prfaas"),
        ("deployments.by_capacity.balancing=length", "by_capacity.balancing"),
    ],
)
def test_what_it_does_not_go_with_is_refused(setting: str, match: str) -> None:
    with pytest.raises(ScenarioError, match=match):
        paper(setting)


def test_both_sides_saturate_at_the_same_rate_and_below_the_threshold_s() -> None:
    scenario = paper()
    deployment = scenario.deployments["by_capacity"]
    model = deployment_model(scenario, deployment)
    rates = model.exact_rates
    assert rates.prfaas_prefill == pytest.approx(rates.pd_prefill)
    assert model.long_mean_tokens == pytest.approx(model.short_mean_tokens)
    by_length = deployment_model(scenario, scenario.deployments["prfaas_pd"])
    assert model.lambda_max_exact_req_per_s < by_length.lambda_max_exact_req_per_s
    # There is no threshold to search for.
    assert solve(scenario, deployment) == deployment


def test_a_loaded_simulation_uses_both_sides_and_the_faster_one_more() -> None:
    """Least completion sends more to the faster side than the equations, until that is full."""
    scenario = paper("load.rate_req_per_s=2.6", "load.num_requests=3000")
    schedule = build_schedule(scenario.workload, scenario.load)
    predicted = predict_utilisation(scenario, "by_capacity", schedule)
    assert predicted.prfaas_prefill == pytest.approx(predicted.pd_prefill)
    found = simulate(scenario, "by_capacity", schedule)
    assert found.num_completed == len(schedule)
    far, near = found.utilisation.prfaas_prefill, found.utilisation.pd_prefill
    assert near < predicted.pd_prefill < far < 1


def test_a_run_of_it_is_prepared_like_any_other() -> None:
    prepared = prepare(paper("load.num_requests=50"))
    assert prepared.models["by_capacity"].utilisation["link"] > 0
    assert prepared.simulations["by_capacity"].num_completed == 50
