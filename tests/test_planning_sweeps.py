"""Sensitivity and sweeps: against scenarios loaded with the same change, and laws they keep."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.deployment import Deployment, PdCluster, PrfaasCluster
from harness.planning.bandwidth import hard_limit_bytes_per_s
from harness.planning.round_trips import HANDSHAKES, rtt_limit, rtt_points
from harness.planning.sensitivity import tornado
from harness.planning.sweeps import Sweeps, sweep
from harness.planning.variants import (
    Variant,
    base_variant,
    optimum,
    unchanged,
    with_agent_share,
    with_chip_speed,
    with_link_rate,
    with_output_length,
)
from harness.scenario import Scenario, load_scenario
from harness.scenario_change import with_trace
from harness.throughput import Objective, deployment_model, solve
from harness.workload import length_distribution

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
GBIT = 1e9 / 8
OBJECTIVES: tuple[Objective, ...] = ("paper", "exact")


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


@pytest.fixture(scope="module")
def solved(paper: Scenario) -> dict[str, Deployment]:
    return {name: solve(paper, one, "paper") for name, one in paper.deployments.items()}


@pytest.fixture(scope="module")
def sweeps(paper: Scenario, solved: dict[str, Deployment]) -> Sweeps:
    found = sweep(paper, solved)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def base(paper: Scenario, solved: dict[str, Deployment]) -> Variant:
    found = base_variant(paper, solved)
    assert found is not None
    return found


def loaded(*overrides: str, objective: Objective = "paper") -> tuple[float, float]:
    """(prfaas_pd, homogeneous_pd) of the paper's scenario, loaded with overrides and solved."""
    scenario = load_scenario(PAPER, overrides)
    lengths = length_distribution(scenario)
    carried = []
    for name in ("prfaas_pd", "homogeneous_pd"):
        model = deployment_model(
            scenario, solve(scenario, scenario.deployments[name], objective, lengths), lengths
        )
        exact = objective == "exact"
        carried.append(model.lambda_max_exact_req_per_s if exact else model.lambda_max_req_per_s)
    return carried[0], carried[1]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_bar_is_what_the_scenario_says_with_that_value(
    paper: Scenario, solved: dict[str, Deployment], objective: Objective
) -> None:
    found = tornado(paper, solved, objective)
    assert found is not None
    assert found.base_req_per_s == pytest.approx(loaded(objective=objective)[0], rel=1e-3)
    text = {
        "workload.mu": "workload.mu={}",
        "workload.sigma": "workload.sigma={}",
        "workload.output_tokens": "workload.output_tokens={:.0f}",
        "link.rate": "link.rate={}",
        "slo.tpot": "slo.tpot={}s",
        "prefix.agent_share": "prefix.agent_share={}",
    }
    bars = {bar.input: bar for bar in found.bars}
    assert set(bars) == {*text, "hardware.h200.prefill"}
    for key, form in text.items():
        bar = bars[key]
        for value, carried, ratio in (
            (bar.low, bar.low_req_per_s, bar.low_ratio),
            (bar.high, bar.high_req_per_s, bar.high_ratio),
        ):
            assert value is not None
            if carried is None:
                continue
            shown = value
            if key == "link.rate":
                override = f"link.rate={value * 8:.0f}bit"
            elif key == "prefix.agent_share":
                override = f"prefix.agent_share={shown:.0%}"
            else:
                override = form.format(shown)
            prfaas, homogeneous = loaded(
                override, *(["prefix.model=share"] if "prefix" in key else []), objective=objective
            )
            assert carried == pytest.approx(prfaas, rel=1e-3), override
            assert ratio == pytest.approx(prfaas / homogeneous, rel=1e-3), override


def test_an_impossible_slo_is_null_with_its_reason(
    paper: Scenario, solved: dict[str, Deployment]
) -> None:
    found = tornado(paper, solved)
    assert found is not None
    (bar,) = (one for one in found.bars if one.input == "slo.tpot")
    assert bar.low == 0.02
    assert bar.low_req_per_s is None
    assert bar.low_ratio is None
    assert bar.reason is not None
    assert "slo.tpot" in bar.reason
    assert bar.high_req_per_s == found.base_req_per_s
    assert bar == found.bars[-1]
    widths = [
        abs(one.high_req_per_s - one.low_req_per_s)
        for one in found.bars
        if one.high_req_per_s is not None and one.low_req_per_s is not None
    ]
    assert widths == sorted(widths, reverse=True)


def test_the_agent_sweep_runs_from_no_cached_prefix_to_all(sweeps: Sweeps) -> None:
    points = sweeps.agent_share
    assert [one.agent_share for one in points] == pytest.approx(np.linspace(0, 1, 11).tolist())
    assert sweeps.cached_fraction == 0.8
    assert points[0].threshold_tokens == pytest.approx(19_400, abs=500)
    assert points[0].ratio == pytest.approx(1.54, rel=0.01)
    for share in (3, 10):
        prfaas, homogeneous = loaded("prefix.model=share", f"prefix.agent_share={10 * share}%")
        assert points[share].throughput_req_per_s == pytest.approx(prfaas, rel=1e-3)
        assert points[share].homogeneous_req_per_s == pytest.approx(homogeneous, rel=1e-3)
    carried = [one.throughput_req_per_s for one in points]
    assert all(b >= a for a, b in pairwise(carried) if a and b)


def test_a_share_replaces_what_the_scenario_says_of_prefixes(paper: Scenario) -> None:
    sixty = load_scenario(PAPER, ["prefix.model=share", "prefix.agent_share=60%"])
    found = [
        optimum(start, partial(with_agent_share, agent_share=0.2), "exact")
        for scenario in (paper, sixty)
        if (start := base_variant(scenario, scenario.deployments)) is not None
    ]
    assert len(found) == 2
    assert found[1].throughput_req_per_s == pytest.approx(found[0].throughput_req_per_s)
    assert found[1].threshold_tokens == found[0].threshold_tokens


def test_sweeps_meet_the_plan_at_the_scenarios_own_values(
    sweeps: Sweeps, base: Variant, solved: dict[str, Deployment]
) -> None:
    """One search of one grid: a sweep's middle is the plan, to the token."""
    middle, plan = optimum(base, unchanged, "paper"), solved["prfaas_pd"]
    own = [
        *(one for one in sweeps.output_tokens if one.output_tokens == 1024),
        *(one for one in sweeps.chip_speed if one.chip_speed == 1),
        *(one for one in sweeps.bandwidth.points if one.link_bytes_per_s == 100 * GBIT),
    ]
    assert len(own) == 3
    for one in own:
        assert one.throughput_req_per_s == middle.throughput_req_per_s
        assert (one.threshold_tokens, one.num_prefill, one.num_decode) == (
            plan.threshold_tokens,
            plan.num_prefill,
            plan.num_decode,
        )
        assert one.ratio == middle.ratio


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0.3, 100), min_size=2, max_size=5),
    st.lists(st.floats(0.2, 10), min_size=2, max_size=5),
    st.sampled_from(OBJECTIVES),
)
def test_more_bandwidth_and_a_faster_chip_never_lower_the_throughput(
    base: Variant, gbits: list[float], speeds: list[float], objective: Objective
) -> None:
    for values, change in (
        (gbits, lambda value: partial(with_link_rate, rate_bytes_per_s=value * GBIT)),
        (speeds, lambda value: partial(with_chip_speed, speed=value)),
    ):
        carried = [
            optimum(base, change(value), objective, 1.0).throughput_req_per_s
            for value in sorted(values)
        ]
        rates = [rate for rate in carried if rate is not None]
        assert len(rates) == len(values)
        assert all(b >= a * (1 - 1e-9) for a, b in pairwise(rates))


def test_a_faster_chip_is_a_profile_of_shorter_times_for_prfaas_alone(base: Variant) -> None:
    same = replace(base, offloading=replace(base.offloading, prfaas_hardware="h20"))
    faster = with_chip_speed(same, 2.0)
    name = faster.offloading.prfaas_hardware
    assert name is not None
    assert faster.offloading.pd_hardware == "h20"
    before, after = (v.scenario.hardware for v in (same, faster))
    assert after["h20"] == before["h20"]
    for tokens in (500, 5000, 50_000):
        assert after[name].profile.prefill_s(tokens) == pytest.approx(
            before["h20"].profile.prefill_s(tokens) / 2
        )
    assert {point.provenance for point in after[name].profile.prefill_points} == {"modelled"}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "change",
    [unchanged, partial(with_output_length, output_tokens=8192), partial(with_chip_speed, speed=3)],
    ids=["paper", "decode-bound", "fast-chip"],
)
def test_the_hard_limit_is_where_more_bandwidth_begins_to_help(
    base: Variant, objective: Objective, change: partial[Variant]
) -> None:
    variant = change(base)
    limit = hard_limit_bytes_per_s(variant, objective)
    assert limit is not None

    def at(rate: float) -> float:
        found = optimum(
            variant, partial(with_link_rate, rate_bytes_per_s=rate), objective, 1.0
        ).throughput_req_per_s
        assert found is not None
        return found

    assert at(limit * (1 + 1e-6)) == pytest.approx(at(1e4 * limit), rel=1e-6)
    assert at(limit * 0.97) < at(limit) * (1 - 1e-3)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_where_slots_are_held_through_the_transfer_there_is_no_hard_limit(
    base: Variant, objective: Objective
) -> None:
    """Where decode binds: more of the link shortens what a slot is held for, at any rate."""
    scheduling = replace(base.scenario.scheduling, admission="reserve_first")
    held = replace(base, scenario=replace(base.scenario, scheduling=scheduling))

    def at(variant: Variant, rate: float) -> float:
        change = partial(with_link_rate, rate_bytes_per_s=rate)
        return optimum(variant, change, objective, 1.0).throughput_req_per_s or 0.0

    slow = with_output_length(held, 8192)
    assert hard_limit_bytes_per_s(slow, objective) is None
    found = [at(slow, 100 * GBIT * 4**step) for step in range(4)]
    assert found == sorted(set(found))
    # Prefill binds: the limit is where it was found to be.
    limit = hard_limit_bytes_per_s(held, objective)
    assert limit is not None
    assert at(held, limit) == pytest.approx(at(held, 1e4 * limit), rel=1e-6)
    assert at(held, 0.97 * limit) < at(held, limit) * (1 - 1e-3)


def test_the_papers_hard_limit_is_its_egress(sweeps: Sweeps) -> None:
    limit = sweeps.bandwidth.hard_limit_bytes_per_s
    assert limit is not None
    assert 12 * GBIT < limit < 13 * GBIT
    points = sweeps.bandwidth.points
    assert limit in [one.link_bytes_per_s for one in points]
    above = {one.throughput_req_per_s for one in points if one.link_bytes_per_s > limit}
    assert len(above) == 1
    (most,) = above
    assert most is not None
    assert all(
        one.throughput_req_per_s is not None and one.throughput_req_per_s < most
        for one in points
        if one.link_bytes_per_s < limit
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_hard_limit_counts_what_further_clusters_carry(
    base: Variant, objective: Objective
) -> None:
    grown = replace(
        base.offloading,
        more_prfaas=(PrfaasCluster("h200", 2, 4 * GBIT),),
        more_pd=(PdCluster("h20", 2, 2, 6 * GBIT),),
    )
    variant = replace(base, offloading=grown)
    limit = hard_limit_bytes_per_s(variant, objective)
    assert limit is not None

    def at(rate: float) -> float:
        found = optimum(
            variant, partial(with_link_rate, rate_bytes_per_s=rate), objective, 1.0
        ).throughput_req_per_s
        assert found is not None
        return found

    assert at(limit * (1 + 1e-6)) == pytest.approx(at(1e4 * limit), rel=1e-6)
    assert at(limit * 0.95) < at(limit) * (1 - 1e-3)


def test_round_trips_are_added_to_offloaded_requests_alone(paper: Scenario, base: Variant) -> None:
    """Against the same law at 25 times as many points."""
    at_150 = rtt_points(base, [0.15])[0]
    none = rtt_points(base, [0.0])[0]
    lengths = length_distribution(paper, 50_000).lengths
    threshold = base.offloading.threshold_tokens
    assert threshold is not None
    far = lengths > threshold
    seconds = np.where(
        far,
        paper.hardware["h200"].profile.prefill_s_array(lengths),
        paper.hardware["h20"].profile.prefill_s_array(lengths),
    )
    assert none.ttft_mean_s == pytest.approx(2.26, abs=0.01)
    assert none.ttft_p90_s == pytest.approx(3.47, abs=0.01)
    assert at_150.ttft_mean_s == pytest.approx(np.mean(seconds + 0.15 * far), rel=1e-3)
    assert at_150.ttft_p90_s == pytest.approx(np.quantile(seconds + 0.15 * far, 0.9), rel=2e-3)
    assert at_150.added_mean_s == pytest.approx(0.15 * 0.4957, rel=1e-2)
    many = (1 + HANDSHAKES) * 0.15
    assert at_150.handshake_ttft_mean_s == pytest.approx(np.mean(seconds + many * far), rel=1e-3)
    assert at_150.handshake_ttft_p90_s == pytest.approx(
        np.quantile(seconds + many * far, 0.9), rel=2e-3
    )
    # 12.5 MB per millisecond at 100 Gbit/s, over four connections.
    assert at_150.bdp_bytes_per_connection == pytest.approx(150 * 12.5e6 / 4)


def test_the_rtt_limit_is_where_the_gain_in_ttft_is_gone(base: Variant) -> None:
    limit = rtt_limit(base)
    assert limit.homogeneous_mean_s == pytest.approx(4.51, abs=0.02)
    assert limit.homogeneous_p90_s == pytest.approx(9.73, abs=0.03)
    assert limit.mean_rtt_s is not None
    assert limit.p90_rtt_s is not None
    at_mean, at_p90 = rtt_points(base, [limit.mean_rtt_s, limit.p90_rtt_s])
    assert at_mean.ttft_mean_s == pytest.approx(limit.homogeneous_mean_s)
    assert at_p90.ttft_p90_s == pytest.approx(limit.homogeneous_p90_s)
    beyond = rtt_points(base, [limit.p90_rtt_s * 1.01])[0]
    assert limit.homogeneous_p90_s is not None
    assert beyond.ttft_p90_s > limit.homogeneous_p90_s
    assert limit.handshake_mean_rtt_s == pytest.approx(limit.mean_rtt_s / 3)
    assert limit.handshake_p90_rtt_s == pytest.approx(limit.p90_rtt_s / 3)


def test_limits_that_no_distance_or_any_distance_reaches(base: Variant) -> None:
    rare = replace(base, offloading=replace(base.offloading, threshold_tokens=120_000))
    assert rtt_limit(rare).p90_rtt_s is None
    slow = with_chip_speed(base, 0.1)
    assert rtt_limit(slow).mean_rtt_s == 0
    assert rtt_limit(slow).p90_rtt_s == 0
    alone = rtt_limit(replace(base, baseline=None))
    assert alone.homogeneous_mean_s is None
    assert alone.mean_rtt_s is None
    assert alone.near_mean_s == rtt_limit(base).near_mean_s


def test_a_second_cluster_of_the_same_chips_leaves_service_times(base: Variant) -> None:
    doubled = replace(
        base.offloading,
        more_prfaas=(PrfaasCluster("h200", 2, GBIT),),
        more_pd=(PdCluster("h20", 2, 2, GBIT),),
    )
    (one,), (two,) = (rtt_points(v, [0.01]) for v in (base, replace(base, offloading=doubled)))
    assert two.ttft_mean_s == pytest.approx(one.ttft_mean_s)
    assert two.ttft_p90_s == pytest.approx(one.ttft_p90_s)


def test_a_trace_has_no_law_but_every_other_input(paper: Scenario, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = [
        json.dumps(
            {
                "timestamp": 3000 * i,
                "input_length": int(n),
                "output_length": int(o),
                "hash_ids": [i],
            }
        )
        for i, (n, o) in enumerate(
            zip(rng.integers(500, 100_000, 200), rng.integers(10, 900, 200), strict=True)
        )
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(rows) + "\n")
    scenario = with_trace(paper, path)
    bars = tornado(scenario, scenario.deployments)
    assert bars is not None
    by_key = {bar.input: bar for bar in bars.bars}
    for key in ("workload.mu", "workload.sigma"):
        assert by_key[key].reason == "a trace has lengths, not a law"
        assert by_key[key].low is None
        assert by_key[key].high_req_per_s is None
    assert by_key["prefix.agent_share"].reason is None
    hits = replace(scenario, prefix=replace(scenario.prefix, model="trace"))
    by_trace = tornado(hits, hits.deployments)
    assert by_trace is not None
    (agents,) = (bar for bar in by_trace.bars if bar.input == "prefix.agent_share")
    assert agents.reason == "the trace says which prefixes are cached"
    assert (agents.low, agents.high_req_per_s) == (None, None)
    speed = by_key["hardware.h200.prefill"]
    assert speed.low_req_per_s is not None
    assert speed.high_req_per_s is not None
    assert bars.base_req_per_s is not None
    assert speed.low_req_per_s < bars.base_req_per_s < speed.high_req_per_s
    swept = sweep(scenario, scenario.deployments)
    assert swept is not None
    halved, base_point = swept.output_tokens[2], swept.output_tokens[3]
    assert base_point.throughput_req_per_s == bars.base_req_per_s
    start = base_variant(scenario, scenario.deployments)
    assert start is not None
    changed = with_output_length(start, halved.output_tokens)
    assert changed.lengths.mean_output_tokens == pytest.approx(
        start.lengths.mean_output_tokens / 2, rel=0.01
    )
    assert swept.agent_share[0].throughput_req_per_s == pytest.approx(bars.base_req_per_s)


def test_a_law_of_outputs_is_stretched_with_its_bounds(solved: dict[str, Deployment]) -> None:
    overrides = [
        "workload.output_sigma=0.6",
        "workload.output_min_tokens=100",
        "workload.output_max_tokens=4000",
    ]
    scenario = load_scenario(PAPER, overrides)
    start = base_variant(scenario, solved)
    assert start is not None
    doubled = with_output_length(start, 2048)
    redrawn = length_distribution(doubled.scenario, 2000)
    assert doubled.lengths.mean_output_tokens == pytest.approx(redrawn.mean_output_tokens, rel=1e-3)
    assert doubled.scenario.workload.output_max_tokens == 8000


def test_without_a_prfaas_cluster_there_is_nothing_to_sweep(paper: Scenario) -> None:
    alone = {"homogeneous_pd": paper.deployments["homogeneous_pd"]}
    assert tornado(paper, alone) is None
    assert sweep(paper, alone) is None


def test_without_a_baseline_there_is_no_ratio(paper: Scenario) -> None:
    found = sweep(paper, {"prfaas_pd": paper.deployments["prfaas_pd"]})
    assert found is not None
    assert {one.ratio for one in found.agent_share} == {None}
    assert all(one.throughput_req_per_s for one in found.agent_share)
    assert found.rtt_limit.mean_rtt_s is None
