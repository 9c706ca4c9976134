"""Whose gain it is: Shapley shares against their formula, coalitions against brute force."""

from dataclasses import replace
from itertools import chain, combinations
from math import factorial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.deployment import PdCluster, PrfaasCluster
from harness.planning.attribution import MEMBERS, Member, Shares, attribute, shapley
from harness.planning.random_split import RandomSplit
from harness.planning.variants import Variant
from harness.scenario import Scenario, load_scenario
from harness.throughput import Objective, deployment_model, solve
from harness.workload import LengthDistribution, length_distribution

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
GBIT = 1e9 / 8
OBJECTIVES: tuple[Objective, ...] = ("paper", "exact")


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


def shares_of(scenario: Scenario, objective: Objective, strata: int = 2000) -> Shares:
    found = attribute(scenario, scenario.deployments, length_distribution(scenario, strata))
    assert found is not None
    return found.paper if objective == "paper" else found.exact


def values_of(shares: Shares) -> dict[frozenset[Member], float]:
    return {frozenset(one.members): one.throughput_req_per_s for one in shares.coalitions}


def subsets(members: tuple[Member, ...]) -> list[frozenset[Member]]:
    sizes = range(len(members) + 1)
    return [frozenset(s) for s in chain.from_iterable(combinations(members, n) for n in sizes)]


@given(st.lists(st.floats(-10, 10), min_size=8, max_size=8))
def test_shapley_shares_are_those_of_the_formula(numbers: list[float]) -> None:
    value = dict(zip(subsets(MEMBERS), numbers, strict=True))
    shares = shapley(MEMBERS, value)
    n = len(MEMBERS)
    for member in MEMBERS:
        others = tuple(one for one in MEMBERS if one != member)
        expected = sum(
            factorial(len(s)) * factorial(n - len(s) - 1) / factorial(n)
            * (value[s | {member}] - value[s])
            for s in subsets(others)
        )  # fmt: skip
        assert shares[member] == pytest.approx(expected, abs=1e-9)
    total = value[frozenset(MEMBERS)] - value[frozenset()]
    assert sum(shares.values()) == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_none_is_the_homogeneous_deployment_and_all_is_the_solved_one(
    paper: Scenario, objective: Objective
) -> None:
    lengths = length_distribution(paper, 2000)
    shares = shares_of(paper, objective)
    value = values_of(shares)
    for name, members in (("homogeneous_pd", frozenset[Member]()), ("prfaas_pd", MEMBERS)):
        solved = solve(paper, paper.deployments[name], objective, lengths)
        model = deployment_model(paper, solved, lengths)
        expected = {
            "paper": model.lambda_max_req_per_s,
            "exact": model.lambda_max_exact_req_per_s,
        }[objective]
        assert value[frozenset(members)] == pytest.approx(expected, rel=1e-9)
    assert shares.gpus_req_per_s == pytest.approx(0, abs=1e-9)
    assert value[frozenset(MEMBERS)] / value[frozenset()] == pytest.approx(1.55, abs=0.03)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_on_the_papers_link_knowing_it_is_worth_nothing(
    paper: Scenario, objective: Objective
) -> None:
    """100 Gbit/s are eight times what crosses; on 8 Gbit/s it is another matter."""
    wide = {one.member: one.gain_req_per_s for one in shares_of(paper, objective).shapley}
    assert wide["bandwidth"] == pytest.approx(0, abs=1e-6)
    assert wide["chip"] > 1.0
    narrow_link = replace(paper, link=paper.link.both(rate_bytes_per_s=8 * GBIT))
    narrow = {one.member: one.gain_req_per_s for one in shares_of(narrow_link, objective).shapley}
    assert narrow["bandwidth"] > 0.1
    assert narrow["chip"] < wide["chip"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_both_chains_lead_from_none_to_all(paper: Scenario, objective: Objective) -> None:
    shares = shares_of(paper, objective)
    value = values_of(shares)
    for steps, order in ((shares.chain, MEMBERS), (shares.reverse_chain, MEMBERS[::-1])):
        assert [step.added for step in steps] == [None, *order]
        for i, step in enumerate(steps):
            assert step.throughput_req_per_s == value[frozenset(order[:i])]
        total = sum(step.gain_req_per_s for step in steps)
        assert total == pytest.approx(shares.gain_req_per_s, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    mu=st.floats(8.5, 11.0),
    sigma=st.floats(0.3, 1.5),
    output_tokens=st.integers(64, 4096),
    gbit=st.floats(0.5, 40),
    num_prfaas=st.integers(1, 6),
    num_pd=st.integers(2, 8),
    objective=st.sampled_from(OBJECTIVES),
)
def test_shares_add_up_and_knowing_the_link_never_hurts(
    paper: Scenario,
    mu: float,
    sigma: float,
    output_tokens: int,
    gbit: float,
    num_prfaas: int,
    num_pd: int,
    objective: Objective,
) -> None:
    workload = replace(
        paper.workload,
        mu=mu,
        sigma=sigma,
        output_tokens=output_tokens,
        output_min_tokens=output_tokens,
        output_max_tokens=output_tokens,
    )
    prfaas = replace(
        paper.deployments["prfaas_pd"],
        num_prfaas=num_prfaas,
        num_prefill=num_pd - 1,
        num_decode=1,
    )
    homogeneous = replace(
        paper.deployments["homogeneous_pd"], num_prefill=num_prfaas + num_pd - 1, num_decode=1
    )
    scenario = replace(
        paper,
        workload=workload,
        link=paper.link.both(rate_bytes_per_s=gbit * GBIT),
        deployments={"prfaas_pd": prfaas, "homogeneous_pd": homogeneous},
    )
    shares = shares_of(scenario, objective, strata=150)
    value = values_of(shares)
    gain = value[frozenset(MEMBERS)] - value[frozenset()]
    assert shares.gain_req_per_s == gain
    assert sum(one.gain_req_per_s for one in shares.shapley) == pytest.approx(gain, abs=1e-12)
    if gain:
        parts = [one.share_of_gain for one in shares.shapley]
        assert sum(part for part in parts if part is not None) == pytest.approx(1, abs=1e-6)
    assert shares.gpus_req_per_s == pytest.approx(0, abs=1e-9)
    for members, carried in value.items():
        assert value[members | {"bandwidth"}] >= carried * (1 - 1e-6)


def random_plan_rate(
    scenario: Scenario, lengths: LengthDistribution, objective: Objective, share: float, local: int
) -> float:
    """Lambda_max of the paper's deployment with a random split, written out."""
    prfaas = scenario.deployments["prfaas_pd"]
    far, near = (scenario.hardware[name].profile for name in ("h200", "h20"))
    mean = float(lengths.weights @ lengths.lengths)
    times = [
        one.mean_prefill_s(lengths.lengths, lengths.weights)
        if objective == "exact"
        else one.prefill_s(mean)
        for one in (far, near)
    ]
    steps = scenario.workload.output_tokens - (objective == "exact")
    decode = prfaas.num_prefill + prfaas.num_decode - local
    rates = [decode * 20 / (0.025 * steps), local / (times[1] * (1 - share))]
    if share:
        rates.append(prfaas.num_prfaas / (times[0] * share))
        whole = np.rint(lengths.lengths if objective == "exact" else np.array([mean]))
        weights = lengths.weights if objective == "exact" else np.ones(1)
        crossing = float(weights @ scenario.model.architecture.kv_bytes_array(whole))
        rates.append(scenario.link.rate_bytes_per_s / (crossing * share))
    return min(rates)


@pytest.mark.parametrize("gbit", [2.0, 8.0, 100.0])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_random_split_is_as_good_as_the_best_of_all_shares(
    paper: Scenario, objective: Objective, gbit: float
) -> None:
    scenario = replace(paper, link=paper.link.both(rate_bytes_per_s=gbit * GBIT))
    lengths = length_distribution(scenario, 500)
    variant = Variant(scenario, lengths, scenario.deployments["prfaas_pd"], None)
    split = RandomSplit(variant, objective)
    plan = split.plan()
    (cluster,) = plan.clusters
    carried = split.throughput_req_per_s(plan)
    assert carried == pytest.approx(
        random_plan_rate(
            scenario, lengths, objective, plan.offloaded_share, cluster.num_prefill
        )
    )  # fmt: skip
    best = max(
        random_plan_rate(scenario, lengths, objective, share, local)
        for share in np.linspace(0, 0.999, 1000).tolist()
        for local in range(1, 8)
    )
    assert best <= carried * (1 + 1e-6)
    assert carried == pytest.approx(best, rel=0.01)


def test_on_a_wide_link_the_random_share_is_the_share_of_prefill_capacity(paper: Scenario) -> None:
    lengths = length_distribution(paper, 2000)
    variant = Variant(paper, lengths, paper.deployments["prfaas_pd"], None)
    plan = RandomSplit(variant, "paper").plan()
    mean = float(lengths.weights @ lengths.lengths)
    far = 4 / paper.hardware["h200"].profile.prefill_s(mean)
    near = plan.clusters[0].num_prefill / paper.hardware["h20"].profile.prefill_s(mean)
    assert plan.offloaded_share == pytest.approx(far / (far + near), rel=1e-6)


def test_further_clusters_take_part(paper: Scenario) -> None:
    """All of it twice carries twice as much, or a little more where uneven splits fit better."""
    one = paper.deployments["prfaas_pd"]
    twice = replace(
        one,
        more_prfaas=(PrfaasCluster("h200", one.num_prfaas, 100 * GBIT),),
        more_pd=(PdCluster("h20", one.num_prefill, one.num_decode, 100 * GBIT),),
    )
    doubled = replace(paper, deployments={**paper.deployments, "prfaas_pd": twice})
    found = attribute(doubled, doubled.deployments, length_distribution(doubled, 500))
    assert found is not None
    assert found.replaced_instances == 8
    whole, both = values_of(shares_of(paper, "paper", 500)), values_of(found.paper)
    for members, carried in whole.items():
        assert 2 * carried * (1 - 1e-6) <= both[members] <= 2.2 * carried


def test_more_gpus_than_the_baseline_are_told_apart_from_the_members(paper: Scenario) -> None:
    smaller = replace(paper.deployments["homogeneous_pd"], num_prefill=6, num_decode=2)
    scenario = replace(paper, deployments={**paper.deployments, "homogeneous_pd": smaller})
    shares = shares_of(scenario, "paper")
    assert shares.coalitions == shares_of(paper, "paper").coalitions
    solved = solve(paper, smaller, "paper", length_distribution(paper, 2000))
    model = deployment_model(paper, solved, length_distribution(paper, 2000))
    none = values_of(shares)[frozenset()]
    assert shares.gpus_req_per_s == pytest.approx(none - model.lambda_max_req_per_s)
    assert shares.gpus_req_per_s > 0.5


def test_instances_of_other_sizes_are_replaced_gpu_by_gpu(paper: Scenario) -> None:
    h200 = paper.hardware["h200"]
    larger = replace(h200, profile=replace(h200.profile, gpus_per_instance=16))
    scenario = replace(paper, hardware={**paper.hardware, "h200": larger})
    found = attribute(scenario, scenario.deployments, length_distribution(scenario, 500))
    assert found is not None
    assert found.replaced_instances == 8


def test_what_cannot_be_balanced_is_not_attributed(paper: Scenario) -> None:
    lengths = length_distribution(paper, 100)
    given = paper.deployments
    naive = replace(given["naive_heterogeneous"], name="prfaas_pd")
    for deployments in (
        {"prfaas_pd": given["prfaas_pd"]},
        {"homogeneous_pd": given["homogeneous_pd"]},
        {"homogeneous_pd": given["homogeneous_pd"], "prfaas_pd": naive},
    ):
        assert attribute(paper, deployments, lengths) is None
