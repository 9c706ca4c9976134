"""What a plan says of itself: kept or searched, by which equations, of equal clusters or not."""

from pathlib import Path
from typing import Any

import pytest

from harness.planning.comparability import unequal_costs, unequal_sizes
from harness.planning.plan import plan
from harness.scenario import load_scenario
from harness.throughput import deployment_model
from harness.ttft import predict_ttft

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
#: Of the PD cluster more decodes than suits it: the search would change it.
GIVEN = [
    "deployments.prfaas_pd.num_prefill=2",
    "deployments.prfaas_pd.num_decode=6",
    "deployments.prfaas_pd.threshold_tokens=30000",
]


def test_a_kept_plan_is_the_scenarios_own() -> None:
    scenario = load_scenario(PAPER, GIVEN)
    given = scenario.deployments["prfaas_pd"]
    kept = plan(scenario, keep=True).document()
    one = kept["deployments"]["prfaas_pd"]
    assert kept["kept"]
    assert (one["threshold_tokens"], one["num_prefill"], one["num_decode"]) == (30000, 2, 6)
    model = deployment_model(scenario, given)
    assert one["throughput_req_per_s"] == model.lambda_max_req_per_s
    ttft = predict_ttft(scenario, given, scenario.load.rate_req_per_s)
    assert one["ttft"]["ttft_mean_s"] == ttft.ttft_mean_s
    assert one["as_planned"]["ttft"]["ttft_mean_s"] == ttft.ttft_mean_s
    assert not any("prefers" in note for note in kept["notes"])


@pytest.mark.parametrize("objective", ["paper", "exact"])
def test_bottleneck_ratio_and_egress_are_by_the_objective(objective: Any) -> None:
    """At a threshold where mean lengths and mean times name different stages."""
    scenario = load_scenario(PAPER, ["deployments.prfaas_pd.threshold_tokens=19300"])
    document = plan(scenario, objective, keep=True).document()
    one, base = (document["deployments"][name] for name in ("prfaas_pd", "homogeneous_pd"))
    model = deployment_model(scenario, scenario.deployments["prfaas_pd"])
    key = "throughput_exact_req_per_s" if objective == "exact" else "throughput_req_per_s"
    rates = model.exact_rates if objective == "exact" else model.paper_rates
    assert one["bottleneck"] == rates.bottleneck()[0]
    assert one["ratio"] == one[key] / base[key]
    assert rates.link is not None
    link = scenario.link.rate_bytes_per_s
    assert one["egress_bytes_per_s"] == pytest.approx(one[key] / rates.link * link, rel=1e-3)
    other = model.paper_rates if objective == "exact" else model.exact_rates
    assert other.bottleneck()[0] != rates.bottleneck()[0]


def _one(price_per_hour: float | None, **gpus: int) -> dict[str, Any]:
    return {"price_per_hour": price_per_hour, "gpus": gpus}


def test_clusters_of_other_sizes_and_costs_are_said_to_be() -> None:
    equal = {"prfaas_pd": _one(96.0, h200=32, h20=64), "homogeneous_pd": _one(96.0, h20=96)}
    assert [*unequal_sizes(equal), *unequal_costs(equal)] == []
    larger = equal | {"prfaas_pd": _one(112.0, h200=40, h20=64)}
    assert list(unequal_sizes(larger)) == [
        "prfaas_pd has 104 GPUs and homogeneous_pd 96: their ratio compares clusters of different "
        "sizes."
    ]
    (cost,) = unequal_costs(larger)
    assert cost.startswith("prfaas_pd at 112 an hour against homogeneous_pd at 96: ")
    unpriced = {"prfaas_pd": _one(None, h200=32, h20=64), "homogeneous_pd": _one(None, h20=96)}
    (cost,) = unequal_costs(unpriced)
    assert "not at equal cost" in cost
    assert list(unequal_costs({"prfaas_pd": equal["prfaas_pd"]})) == []


def test_a_link_that_no_testbed_can_emulate_is_still_planned() -> None:
    document = plan(load_scenario(PAPER, ["link.rate=1kbit"]), keep=True).document()
    one = document["deployments"]["prfaas_pd"]
    assert one["bottleneck"] == "link"
    assert one["ttft"]["unstable_stage"] == "link"
