"""Equal cost: the paper's +15 %, break-evens put back as prices, budgets in whole instances."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.deployment import PdCluster, PrfaasCluster
from harness.planning.economics import Comparison, EqualCost, equal_cost, gpus, prices
from harness.scenario import Scenario, load_scenario
from harness.throughput import Objective, deployment_model, solve
from harness.workload import length_distribution

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
GBIT = 1e9 / 8


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


def compared(
    scenario: Scenario, objective: Objective = "paper"
) -> tuple[EqualCost, dict[str, Comparison]]:
    lengths = length_distribution(scenario, 2000)
    solved = {n: solve(scenario, d, objective, lengths) for n, d in scenario.deployments.items()}
    models = {name: deployment_model(scenario, one, lengths) for name, one in solved.items()}
    found = equal_cost(scenario, solved, models, objective, lengths)
    assert found is not None
    return found, {one.deployment: one for one in found.comparisons}


def priced(scenario: Scenario, **relative: float) -> Scenario:
    hardware = {
        name: replace(one, relative_price=relative.get(name, one.relative_price))
        for name, one in scenario.hardware.items()
    }
    return replace(scenario, hardware=hardware)


def test_the_papers_gain_at_equal_cost_and_its_price_ratio(paper: Scenario) -> None:
    found, by_name = compared(paper)
    prfaas, naive = by_name["prfaas_pd"], by_name["naive_heterogeneous"]
    assert found.currency == "relative"
    assert prfaas.price_ratio == 2.0
    assert (found.homogeneous_cost_per_hour, prfaas.cost_per_hour) == (96, 128)
    assert prfaas.gpus == {"h200": 32, "h20": 64}
    assert prfaas.throughput_req_per_s / found.homogeneous_req_per_s == pytest.approx(1.54, 0.01)
    assert naive.throughput_req_per_s / found.homogeneous_req_per_s == pytest.approx(1.16, 0.01)
    assert prfaas.gain_at_equal_cost == pytest.approx(0.15, abs=0.01)
    assert naive.gain_at_equal_cost < 0
    at_15 = {one.gain: one.price_ratio for one in prfaas.break_even}[0.15]
    assert at_15 is not None
    assert 1.9 < at_15 < 2.1


@pytest.mark.parametrize("objective", ["paper", "exact"])
@pytest.mark.parametrize("deployment", ["prfaas_pd", "naive_heterogeneous"])
def test_a_break_even_price_ratio_gives_its_gain_when_it_is_the_price(
    paper: Scenario, objective: Objective, deployment: str
) -> None:
    with_link = replace(paper, cost=replace(paper.cost, link_price_per_gb=0.002))
    _, before = compared(with_link, objective)
    for one in before[deployment].break_even:
        assert one.price_ratio is not None
        assert one.price_ratio_with_link is not None
        assert one.price_ratio_with_link < one.price_ratio
        _, without = compared(priced(with_link, h200=one.price_ratio), objective)
        assert without[deployment].gain_at_equal_cost == pytest.approx(one.gain, abs=1e-9)
        _, paid = compared(priced(with_link, h200=one.price_ratio_with_link), objective)
        assert paid[deployment].link.gain == pytest.approx(one.gain, abs=1e-9)


def test_a_break_even_link_price_leaves_no_gain(paper: Scenario) -> None:
    _, free = compared(paper)
    link = free["prfaas_pd"].link
    assert link.cost_per_hour == 0
    assert link.gain == free["prfaas_pd"].gain_at_equal_cost
    per_gb, per_gbps = link.break_even_price_per_gb, link.break_even_price_per_gbps_month
    assert per_gb is not None
    assert per_gbps is not None
    for cost in (
        replace(paper.cost, link_price_per_gb=per_gb),
        replace(paper.cost, link_price_per_gbps_month=per_gbps),
    ):
        _, by_name = compared(replace(paper, cost=cost))
        assert by_name["prfaas_pd"].link.gain == pytest.approx(0, abs=1e-9)
        assert by_name["prfaas_pd"].gain_at_equal_cost == pytest.approx(link.gain)
    # The naive deployment has nothing to spend on a link at this price ratio.
    assert free["naive_heterogeneous"].link.break_even_price_per_gb is None
    assert free["naive_heterogeneous"].link.break_even_price_per_gbps_month is None


def test_egress_a_month_and_what_both_kinds_of_price_charge_for_it(paper: Scenario) -> None:
    cost = replace(paper.cost, link_price_per_gb=0.01, link_price_per_gbps_month=50.0)
    _, by_name = compared(replace(paper, cost=cost))
    link, carried = by_name["prfaas_pd"].link, by_name["prfaas_pd"].throughput_req_per_s
    model = deployment_model(paper, solve(paper, paper.deployments["prfaas_pd"], "paper"))
    assert model.egress_bytes_per_s is not None
    month_s = link.egress_bytes_per_month / model.egress_bytes_per_s
    assert 13 * GBIT * month_s == pytest.approx(4.3e15, rel=0.01)
    assert link.egress_bytes_per_month == pytest.approx(4.06e15, rel=0.01)
    offered_share = paper.load.rate_req_per_s / carried
    assert link.offered_egress_bytes_per_month == pytest.approx(
        offered_share * link.egress_bytes_per_month
    )
    gb_per_hour = link.egress_bytes_per_month / 730 / 1e9
    assert link.rate_bytes_per_s == 100 * GBIT
    assert link.cost_per_hour == pytest.approx(0.01 * gb_per_hour + 50 * 100 / 730)
    assert link.offered_cost_per_hour == pytest.approx(
        0.01 * offered_share * gb_per_hour + 50 * 100 / 730
    )


def test_the_budget_in_whole_instances_is_the_best_of_all_their_splits(paper: Scenario) -> None:
    _, by_name = compared(priced(paper, h200=2.1))
    whole = by_name["prfaas_pd"].whole_instances
    assert whole is not None
    assert whole.num_instances == 16  # 131.2 buys 16 instances of 8
    assert whole.unspent_per_hour == pytest.approx(3.2)
    best = max(
        deployment_model(
            paper,
            replace(paper.deployments["homogeneous_pd"], num_prefill=n, num_decode=16 - n),
        ).lambda_max_req_per_s
        for n in range(1, 16)
    )
    assert whole.throughput_req_per_s == pytest.approx(best, rel=1e-6)
    assert whole.gain == pytest.approx(by_name["prfaas_pd"].throughput_req_per_s / best - 1)


def test_the_links_price_is_in_the_budget_of_whole_instances(paper: Scenario) -> None:
    """16 an hour for the link: two instances more of 8 GPUs at 1 an hour."""
    cost = replace(paper.cost, link_price_per_gbps_month=16 * 730 / 100)
    _, by_name = compared(replace(paper, cost=cost))
    prfaas = by_name["prfaas_pd"]
    assert prfaas.whole_instances is not None
    assert prfaas.whole_instances.num_instances == 18
    assert prfaas.link.gain < prfaas.gain_at_equal_cost


def test_a_budget_below_two_instances_buys_no_homogeneous_deployment(paper: Scenario) -> None:
    _, by_name = compared(priced(paper, h200=0.01, h20=10.0))
    assert by_name["prfaas_pd"].whole_instances is not None
    small = replace(
        paper.deployments["naive_heterogeneous"], name="small", num_prfaas=1, num_decode=1
    )
    _, by_name = compared(
        priced(
            replace(paper, deployments={**paper.deployments, "small": small}), h200=0.01, h20=10.0
        )
    )
    assert by_name["small"].whole_instances is None


def test_prices_have_one_unit_or_there_is_no_comparison(paper: Scenario) -> None:
    both = list(paper.deployments.values())
    assert prices(paper, both) == ("relative", {"h200": 2.0, "h20": 1.0})

    def usd(h200: float | None, h20: float | None) -> Scenario:
        given = {"h200": h200, "h20": h20}
        hardware = {
            name: replace(one, price_usd_per_gpu_hour=given[name], relative_price=None)
            for name, one in paper.hardware.items()
        }
        return replace(paper, hardware=hardware)

    found, by_name = compared(usd(3.0, 1.2))
    assert found.currency == "USD"
    assert by_name["prfaas_pd"].price_ratio == pytest.approx(2.5)
    mixed = usd(3.0, None)
    assert prices(mixed, both) is None
    models = {name: deployment_model(paper, one) for name, one in paper.deployments.items()}
    assert equal_cost(mixed, paper.deployments, models) is None


def test_without_a_baseline_or_without_prfaas_there_is_nothing_to_compare(paper: Scenario) -> None:
    models = {name: deployment_model(paper, one) for name, one in paper.deployments.items()}
    for name in ("prfaas_pd", "homogeneous_pd"):
        assert equal_cost(paper, {name: paper.deployments[name]}, models) is None


def test_further_clusters_are_paid_for_with_their_links(paper: Scenario) -> None:
    grown = replace(
        paper.deployments["prfaas_pd"],
        more_prfaas=(PrfaasCluster("h20", 2, 3 * GBIT),),
        more_pd=(PdCluster("h20", 1, 1, 5 * GBIT),),
    )
    assert gpus(paper, grown) == {"h200": 32, "h20": 64 + 16 + 16}
    _, by_name = compared(replace(paper, deployments={**paper.deployments, "prfaas_pd": grown}))
    assert by_name["prfaas_pd"].cost_per_hour == 2 * 32 + 96
    assert by_name["prfaas_pd"].link.rate_bytes_per_s == pytest.approx(103 * GBIT)


def test_chips_of_one_kind_have_no_price_ratio_to_break_even_at(paper: Scenario) -> None:
    same = replace(paper.deployments["prfaas_pd"], prfaas_hardware="h20")
    _, by_name = compared(replace(paper, deployments={**paper.deployments, "prfaas_pd": same}))
    assert by_name["prfaas_pd"].price_ratio == 1
    assert [one.price_ratio for one in by_name["prfaas_pd"].break_even] == [None, None]


def test_a_budget_of_millions_of_instances_is_not_searched_one_by_one(paper: Scenario) -> None:
    _, by_name = compared(priced(paper, h200=1e6, h20=1.0))
    assert by_name["prfaas_pd"].whole_instances is None
    assert by_name["prfaas_pd"].gain_at_equal_cost < -0.99
