"""TTFT in closed form where the fabric limits, next to saturation, and on a lopsided link."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.scenario import Scenario, load_scenario
from harness.simulator import simulate
from harness.throughput import deployment_model
from harness.ttft import TtftModel, predict_ttft
from harness.workload import build_schedule

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


@pytest.mark.parametrize("name", ["prfaas_pd", "homogeneous_pd"])
@pytest.mark.parametrize("fabric", ["1gbit", "550mbit"])
def test_where_the_fabric_is_what_limits(name: str, fabric: str) -> None:
    """Each local instance has a path of its own, and the wait for it is in both."""
    keys = [f"fabric.rate='{fabric}'", "scheduling.admission_deadline='1000000s'"]
    base = load_scenario(PAPER, keys)
    deployment = base.deployments[name]
    model = deployment_model(base, deployment)
    assert model.bottleneck == "fabric"
    most = model.lambda_max_exact_req_per_s

    for load, tolerance in ((0.6, 0.1), (0.8, 0.15)):
        run = [f"load.rate_req_per_s={load * most}", "load.num_requests=6000"]
        scenario = load_scenario(PAPER, keys + run)
        rows = simulate(scenario, name, build_schedule(scenario.workload, scenario.load)).requests
        found = predict_ttft(base, deployment, load * most)
        assert found.ttft_mean_s == pytest.approx(
            float(np.mean([row.ttft_s for row in rows])), rel=tolerance
        )
        stage, busiest = found.utilisation.busiest()
        assert stage == "fabric"
        assert busiest == pytest.approx(load, rel=1e-3)
        assert found.accuracy.promised is None


def test_a_saturated_fabric_carries_lambda_max() -> None:
    keys = ["fabric.rate='700mbit'", "scheduling.admission_deadline='1000000s'"]
    scenario = load_scenario(PAPER, [*keys, "load.rate_req_per_s=4", "load.num_requests=3000"])
    model = deployment_model(scenario, scenario.deployments["homogeneous_pd"])
    schedule = build_schedule(scenario.workload, scenario.load)
    rows = simulate(scenario, "homogeneous_pd", schedule).requests
    landed = sorted(row.planned_s + (row.ttft_s or 0.0) for row in rows)
    carried = 2400 / (landed[2700] - landed[300])
    assert carried == pytest.approx(model.lambda_max_exact_req_per_s, rel=0.03)


def test_next_to_saturation_there_is_no_ttft(paper: Scenario) -> None:
    """The closed form is heavy traffic's 1 / (1 - load) as long as a float tells them apart."""
    for deployment in paper.deployments.values():
        most = deployment_model(paper, deployment).lambda_max_exact_req_per_s
        model = TtftModel(paper, deployment)
        near, nearer = (model.mean_s((1 - left) * most) for left in (1e-3, 1e-4))
        assert near is not None
        assert nearer is not None
        assert nearer / near == pytest.approx(10, rel=0.1)
        touching = model.predict((1 - 1e-8) * most)
        assert touching.ttft_mean_s is None
        assert touching.unstable_stage is not None
        assert touching.accuracy.note is not None


def test_each_way_of_a_lopsided_link_has_its_own_delay(paper: Scenario) -> None:
    out = replace(paper.link.near_to_far, delay_s=0.3)
    lopsided = replace(paper, link=replace(paper.link, near_to_far=out))
    deployment = paper.deployments["naive_heterogeneous"]
    near, far = (predict_ttft(one, deployment, 0.01) for one in (paper, lopsided))
    assert near.ttft_mean_s is not None
    assert far.ttft_mean_s == pytest.approx(near.ttft_mean_s + 0.3 - 0.0004, rel=1e-6)


@pytest.mark.parametrize("sigma", [1.0, 1.5, 3.0])
def test_no_quantile_lies_below_that_of_service_alone(sigma: float) -> None:
    """At a rate at which nobody waits they are the same, however heavy the tail."""
    scenario = load_scenario(PAPER, ["workload.mu=7", f"workload.sigma={sigma}"])
    found = predict_ttft(scenario, scenario.deployments["homogeneous_pd"], 1e-3)
    for loaded_s, alone_s in (
        (found.ttft_p50_s, found.service_ttft_p50_s),
        (found.ttft_p90_s, found.service_ttft_p90_s),
        (found.ttft_p99_s, found.service_ttft_p99_s),
    ):
        assert loaded_s is not None
        assert loaded_s == pytest.approx(alone_s, rel=0.002, abs=0.01)
