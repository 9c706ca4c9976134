"""The throughput model beyond the paper's case: several clusters, cached prefixes, its grid."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.core import ScenarioError
from harness.deployment import Deployment, PdCluster, PrfaasCluster
from harness.preparation import prepare
from harness.scenario import Scenario, load_scenario
from harness.throughput import capacity_grid, deployment_model, solve
from harness.workload import length_distribution

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
GBIT = 1e9 / 8


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


@pytest.fixture(scope="module")
def prfaas(paper: Scenario) -> Deployment:
    return paper.deployments["prfaas_pd"]


def test_the_papers_plan_is_found_by_its_equations(paper: Scenario, prfaas: Deployment) -> None:
    found = solve(paper, replace(prfaas, threshold_tokens=1, num_prefill=1, num_decode=7), "paper")
    assert (found.num_prfaas, found.num_prefill, found.num_decode) == (4, 3, 5)
    assert found.threshold_tokens == pytest.approx(19_400, abs=500)
    homogeneous = paper.deployments["homogeneous_pd"]
    even = replace(homogeneous, num_prefill=6, num_decode=6)
    assert solve(paper, even, "paper").num_prefill == 9


def test_the_refined_threshold_beats_every_length_around_it(
    paper: Scenario, prfaas: Deployment
) -> None:
    found = solve(paper, prfaas, "paper")
    assert found.threshold_tokens is not None
    best = deployment_model(paper, found).lambda_max_req_per_s
    for t in range(found.threshold_tokens - 40, found.threshold_tokens + 41):
        near = deployment_model(paper, replace(found, threshold_tokens=t))
        assert near.lambda_max_req_per_s <= best * (1 + 1e-9)


def test_residuals_are_those_of_equations_7_and_8(paper: Scenario, prfaas: Deployment) -> None:
    model = deployment_model(paper, prfaas)
    p = model.offload_fraction
    assert p is not None
    assert model.theta_prfaas_req_per_s is not None
    assert model.theta_pd_prefill_req_per_s is not None
    seventh = model.theta_prfaas_req_per_s / p - model.theta_pd_prefill_req_per_s / (1 - p)
    eighth = (
        model.theta_prfaas_req_per_s
        + model.theta_pd_prefill_req_per_s
        - model.theta_pd_decode_req_per_s
    )
    assert model.eq7_residual == pytest.approx(seventh / model.lambda_max_req_per_s)
    assert model.eq8_residual == pytest.approx(eighth / model.lambda_max_req_per_s)
    # Whole instances: 3.25 of prefill against 3.91 of decode.
    assert eighth == pytest.approx(3.25 - 3.91, abs=0.02)
    assert deployment_model(paper, paper.deployments["homogeneous_pd"]).eq7_residual is None


def twice(paper: Scenario, deployment: Deployment) -> Deployment:
    link = paper.link.rate_bytes_per_s
    assert deployment.prfaas_hardware is not None
    return replace(
        deployment,
        more_prfaas=(PrfaasCluster(deployment.prfaas_hardware, deployment.num_prfaas, link),),
        more_pd=(
            PdCluster(deployment.pd_hardware, deployment.num_prefill, deployment.num_decode, link),
        ),
    )


def test_two_of_everything_carry_twice_as_much(paper: Scenario, prfaas: Deployment) -> None:
    one = deployment_model(paper, prfaas)
    two = deployment_model(paper, twice(paper, prfaas))
    assert two.lambda_max_req_per_s == pytest.approx(2 * one.lambda_max_req_per_s)
    assert two.lambda_max_exact_req_per_s == pytest.approx(2 * one.lambda_max_exact_req_per_s)
    assert two.egress_bytes_per_s == pytest.approx(2 * (one.egress_bytes_per_s or 0))
    found = solve(paper, twice(paper, prfaas), "paper")
    assert (found.num_prefill, found.more_pd[0].num_prefill) == (3, 3)
    assert found.threshold_tokens == pytest.approx(19_400, abs=500)


def test_clusters_of_different_size_against_every_combination(
    paper: Scenario, prfaas: Deployment
) -> None:
    small = PdCluster("h20", 2, 2, 2 * GBIT)
    base = replace(
        prfaas,
        more_prfaas=(PrfaasCluster("h20", 2, 3 * GBIT), PrfaasCluster("h200", 1, 0.5 * GBIT)),
        more_pd=(small,),
    )
    lengths = length_distribution(paper, strata=500)
    best = max(
        deployment_model(
            paper,
            replace(
                base,
                threshold_tokens=t,
                num_prefill=n,
                num_decode=8 - n,
                more_pd=(replace(small, num_prefill=m, num_decode=4 - m),),
            ),
            lengths,
        ).lambda_max_exact_req_per_s
        for t, n, m in itertools.product(
            lengths.lengths.astype(int)[100:480:4].tolist(), range(1, 8), range(1, 4)
        )
    )
    found = deployment_model(paper, solve(paper, base, "exact", lengths), lengths)
    assert found.lambda_max_exact_req_per_s >= best * (1 - 1e-9)
    assert found.lambda_max_exact_req_per_s == pytest.approx(best, rel=0.01)


def test_a_clusters_own_ingress_limits_it(paper: Scenario, prfaas: Deployment) -> None:
    starved = replace(prfaas, more_pd=(PdCluster("h20", 3, 5, 0.01 * GBIT),))
    free = replace(prfaas, more_pd=(PdCluster("h20", 3, 5, 100 * GBIT),), num_prfaas=8)
    alone = deployment_model(paper, replace(prfaas, num_prfaas=8))
    assert deployment_model(
        paper, replace(starved, num_prfaas=8)
    ).lambda_max_req_per_s == pytest.approx(alone.lambda_max_req_per_s, rel=0.01)
    assert deployment_model(paper, free).lambda_max_req_per_s == pytest.approx(
        2 * alone.lambda_max_req_per_s, rel=0.2
    )


def test_cached_prefixes_shorten_prefill_and_move_less(paper: Scenario) -> None:
    scenario = load_scenario(
        PAPER, ['prefix.model="share"', 'prefix.agent_share="100%"', 'prefix.cached_fraction="75%"']
    )
    lengths = length_distribution(scenario)
    total = length_distribution(paper)
    assert np.dot(lengths.lengths, lengths.weights) == pytest.approx(27_486 / 4, rel=0.01)
    assert np.dot(lengths.lengths + lengths.cached_tokens, lengths.weights) == pytest.approx(
        np.dot(total.lengths, total.weights)
    )
    naive = scenario.deployments["naive_heterogeneous"]
    cached, plain = deployment_model(scenario, naive), deployment_model(paper, naive)
    assert cached.lambda_max_req_per_s > 2 * plain.lambda_max_req_per_s
    # What crosses for the mean request: a quarter of the growing part and all of the state.
    architecture = paper.model.architecture
    moved = (cached.egress_bytes_per_s or 0) / cached.lambda_max_req_per_s
    state = architecture.kv_bytes(0)
    growing = architecture.kv_bytes(27_486) - state
    assert moved == pytest.approx(state + growing / 4, rel=0.01)


def test_half_agents_are_the_mean_of_both(paper: Scenario) -> None:
    half = load_scenario(PAPER, ['prefix.model="share"', 'prefix.agent_share="50%"'])
    lengths = length_distribution(half)
    plain = length_distribution(paper)
    mean = np.dot(plain.lengths, plain.weights)
    assert np.dot(lengths.lengths, lengths.weights) == pytest.approx(mean * (1 + 0.2) / 2, rel=0.01)
    assert lengths.weights.sum() == pytest.approx(1.0)


def test_an_unlimited_cache_over_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(1200, [1, 2, 3]), (1700, [1, 2, 9, 10]), (1024, [1, 2]), (600, [4, 5])]
    trace.write_text(
        "".join(
            f'{{"timestamp": {i * 1000}, "input_length": {n}, "output_length": 8, '
            f'"hash_ids": {hashes}}}\n'
            for i, (n, hashes) in enumerate(rows)
        )
    )
    scenario = load_scenario(
        PAPER,
        [f'workload={{trace="{trace}"}}', 'prefix.model="trace"', "load={seed=1}"],
    )
    lengths = length_distribution(scenario)
    found = set(zip(lengths.lengths.tolist(), lengths.cached_tokens.tolist(), strict=True))
    # The third prompt is cached whole, but its last token must be computed.
    assert found == {(1200.0, 0.0), (1700 - 1024.0, 1024.0), (1.0, 1023.0), (600.0, 0.0)}


def test_what_only_the_planner_knows_is_refused_elsewhere() -> None:
    with pytest.raises(ScenarioError, match=r"prefix\.model"):
        prepare(load_scenario(PAPER, ['prefix.model="share"']))
    with pytest.raises(ScenarioError, match="no trace"):
        length_distribution(load_scenario(PAPER, ['prefix.model="trace"']))


def test_the_grid_holds_the_optimum_and_agrees_with_the_model(
    paper: Scenario, prfaas: Deployment
) -> None:
    grid = capacity_grid(paper, prfaas, "exact", points=50)
    assert grid.num_prefill == tuple(range(1, 8))
    assert grid.lambda_max_req_per_s.shape == (7, len(grid.threshold_tokens))
    for s, t in itertools.product((0, 2, 6), (3, 25, 48)):
        plan = replace(
            prfaas,
            threshold_tokens=int(grid.threshold_tokens[t]),
            num_prefill=grid.num_prefill[s],
            num_decode=8 - grid.num_prefill[s],
        )
        model = deployment_model(paper, plan)
        assert grid.lambda_max_req_per_s[s, t] == pytest.approx(
            model.lambda_max_exact_req_per_s, rel=1e-3
        )
        assert grid.stage[s][t] == model.bottleneck
    best = deployment_model(paper, solve(paper, prfaas, "exact")).lambda_max_exact_req_per_s
    assert grid.lambda_max_req_per_s.max() <= best * (1 + 1e-9)
