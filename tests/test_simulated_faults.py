"""Instances that die, come back and are slow in simulation: what is lost, retried and conserved."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core import Request, ScenarioError
from harness.deployment import Deployment
from harness.kv_layers import LayerSizes
from harness.kv_path import KvPath
from harness.scenario import Scenario, check_emulation, load_scenario
from harness.settings import Faults, InstanceFault
from harness.simulator import SimulatedRequest, Simulation, simulate
from harness.workload import build_schedule

SCENARIOS = Path(__file__).parent.parent / "scenarios"
PAPER = SCENARIOS / "paper-case-study.toml"
TALK = "workload.sessions={turns=6,think_time='20s',increment_tokens=2000,shared_tokens=4096}"
TERMS = ("gateway_s", "prefill_queue_s", "prefill_s", "transfer_s", "decode_admission_s")


def kill(instance: str, at_s: float, lasts_s: float | None = None) -> InstanceFault:
    return InstanceFault(instance, "kill", at_s, lasts_s, None, None)


def slow(instance: str, at_s: float, lasts_s: float | None, factor: float) -> InstanceFault:
    return InstanceFault(instance, "slow", at_s, lasts_s, factor, None)


def faulty(scenario: Scenario, *faults: InstanceFault) -> Scenario:
    return replace(scenario, faults=Faults(faults))


def requests(*rows: tuple[float, int, int]) -> tuple[Request, ...]:
    return tuple(
        Request(f"{n:06d}", n, at_s, size, out) for n, (at_s, size, out) in enumerate(rows)
    )


def outcomes(found: Simulation) -> list[tuple[str, str | None, int]]:
    return [(one.outcome, one.failure_phase, one.retries) for one in found.requests]


def check(found: Simulation, count: int, max_retries: int, source: str = "decode") -> None:
    """Beside what every run asserts of itself: counts and Little's law."""
    rows = list(found.requests)
    assert len(rows) == count == found.num_requests
    assert found.num_completed + sum(found.failures.values()) == count
    for row in rows:
        assert (row.outcome == "completed") == (row.failure_phase is None)
        assert 0 <= row.retries <= max_retries + (row.failure_phase == "rejected")
        if row.outcome == "completed":
            assert row.ttft_s is not None
            terms = [value for term in TERMS if (value := getattr(row, term)) is not None]
            assert len(terms) == len(TERMS)
            assert min(terms) >= -1e-9
            if source == "decode":
                assert sum(terms) == pytest.approx(row.ttft_s, abs=1e-6)


SERVING = (
    (),
    ("serving.decode_steps='by_batch'",),
    ("serving.prefill_batch_tokens=16384",),
    ("serving.chunk_tokens=4096", "serving.decode_steps='by_batch'"),
    ("serving.decode_memory='60GB'", "serving.chunk_tokens=8192", "link.sharing='fair'"),
)
INSTANCES = ("prfaas-p0", "prfaas-p1", "prfaas-p3", "pd-p0", "pd-p2", "pd-d0", "pd-d1", "pd-d4")


@st.composite
def planned_faults(draw: st.DrawFn) -> tuple[InstanceFault, ...]:
    """Some that do not overlap, of several instances."""
    found = []
    for instance in draw(st.lists(st.sampled_from(INSTANCES), max_size=6, unique=True)):
        at_s = 0.0
        for gap_s, lasts_s in draw(
            st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60)), min_size=1, max_size=4)
        ):
            at_s += gap_s + 0.5
            if draw(st.booleans()):
                found.append(kill(instance, at_s, float(lasts_s)))
            else:
                found.append(slow(instance, at_s, float(lasts_s), 1.0 + lasts_s / 8))
            at_s += lasts_s
    return tuple(found)


@given(
    faults=planned_faults(),
    admission=st.sampled_from(["push_then_admit", "reserve_first"]),
    source=st.sampled_from(["decode", "prefill"]),
    serving=st.sampled_from(SERVING),
    retries=st.integers(0, 2),
    rate=st.sampled_from([1.0, 3.5]),
)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_whatever_dies(
    faults: tuple[InstanceFault, ...],
    admission: str,
    source: str,
    serving: tuple[str, ...],
    retries: int,
    rate: float,
) -> None:
    scenario = load_scenario(
        PAPER,
        [
            "load.num_requests=250",
            f"load.rate_req_per_s={rate}",
            f"scheduling.admission='{admission}'",
            f"scheduling.ttft_source='{source}'",
            *serving,
            f"gateway.max_retries={retries}",
        ],
    )
    schedule = build_schedule(scenario.workload, scenario.load)
    scenario = faulty(scenario, *faults)
    found = simulate(scenario, "prfaas_pd", schedule)
    check(found, 250, retries, source)
    assert simulate(scenario, "prfaas_pd", schedule) == found


@given(faults=planned_faults(), copy=st.booleans())
@settings(max_examples=25, deadline=None)
def test_pools_are_whole_whatever_dies(faults: tuple[InstanceFault, ...], copy: bool) -> None:
    scenario = load_scenario(
        SCENARIOS / "prefix-cache.toml",
        [TALK, "load.num_requests=250", f"scheduling.cache_copy={str(copy).lower()}",
         "prefix_cache.memory='24GiB'", "load.rate_req_per_s=3", "workload.min_tokens=4200"],
    )  # fmt: skip
    schedule = build_schedule(scenario.workload, scenario.load)
    check(simulate(faulty(scenario, *faults), "prfaas_pd", schedule), 250, 2)


@pytest.mark.parametrize("sharing", ["layers", "fair"])
def test_links_stay_whole_where_they_are_full(sharing: str) -> None:
    scenario = load_scenario(
        PAPER,
        ["load.num_requests=300", "link.rate='8gbit'", f"link.sharing='{sharing}'"],
    )
    schedule = build_schedule(scenario.workload, scenario.load)
    faults = [kill(f"prfaas-p{n % 4}", 20.0 + 13 * n, 11.0) for n in range(12)]
    check(simulate(faulty(scenario, *faults), "prfaas_pd", schedule), 300, 2)
    faults = [kill(f"pd-d{n % 5}", 20.0 + 13 * n, 11.0) for n in range(12)]
    check(simulate(faulty(scenario, *faults), "prfaas_pd", schedule), 300, 2)


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER, ["load.num_requests=300"])


def test_a_fault_in_an_idle_time_changes_nothing(paper: Scenario) -> None:
    early = [(0.5 * n, 3_000 + 1000 * n, 40) for n in range(40)]
    late = [(1000 + 0.5 * n, 50_000 - 900 * n, 40) for n in range(40)]
    schedule = requests(*early, *late)
    plain = simulate(paper, "prfaas_pd", schedule)
    assert max(one.planned_s + (one.e2e_s or 0) for one in plain.requests[:40]) < 500
    faults = [kill(name, 500.0 + n, 100.0) for n, name in enumerate(INSTANCES)]
    faults += [slow("pd-p1", 700.0, 50.0, 9.0), kill("pd-d3", 2000.0)]
    assert simulate(faulty(paper, *faults), "prfaas_pd", schedule) == plain


@pytest.mark.parametrize("which", ["pd-p0", "pd-p1"])
def test_with_one_of_two_dead_it_is_the_system_of_one(paper: Scenario, which: str) -> None:
    """Throughput at saturation too: all arrive at once, so nothing but prefill limits."""
    base = replace(paper.deployments["homogeneous_pd"], num_decode=9)
    two, one = replace(base, num_prefill=2), replace(base, num_prefill=1)
    schedule = requests(*((0.01 * n, 4_000 + 61 * n, 2) for n in range(120)))

    def run(deployment: Deployment, *faults: InstanceFault) -> Simulation:
        changed = replace(paper, deployments={"homogeneous_pd": deployment})
        return simulate(faulty(changed, *faults), "homogeneous_pd", schedule, transfer=False)

    alone, halved = run(one), run(two, kill(which, 0.0))
    assert halved.ttft_s.tolist() == alone.ttft_s.tolist()
    assert halved.throughput_req_per_s == alone.throughput_req_per_s
    assert run(two).throughput_req_per_s > 1.8 * alone.throughput_req_per_s


def test_what_an_instance_did_is_lost_and_done_again(paper: Scenario) -> None:
    """Two instances, one dies in mid-prefill: its request and the one behind it begin anew."""
    deployment = replace(paper.deployments["homogeneous_pd"], num_prefill=2)
    scenario = replace(paper, deployments={"homogeneous_pd": deployment})
    profile = scenario.hardware["h20"].profile
    long_s, short_s = profile.prefill_s(60_000), profile.prefill_s(8_000)
    schedule = requests((0.0, 60_000, 2), (0.1, 8_000, 2), (0.2, 60_000, 2))
    plain = simulate(scenario, "homogeneous_pd", schedule, transfer=False)
    assert [one.route.prefill.name for one in plain.requests if one.route] == [
        "pd-p0", "pd-p1", "pd-p1",
    ]  # fmt: skip
    found = simulate(
        faulty(scenario, kill("pd-p0", 3.0)), "homogeneous_pd", schedule, transfer=False
    )
    first, second, third = found.requests
    assert second.ttft_s == pytest.approx(short_s)
    # The third was there before the first came back.
    assert third.ttft_s == pytest.approx(0.1 + short_s + long_s - 0.2)
    assert (first.retries, first.gateway_s) == (1, 3.0)
    assert first.ttft_s == pytest.approx(0.1 + short_s + 2 * long_s)
    assert outcomes(found) == [
        ("completed", None, 1),
        ("completed", None, 0),
        ("completed", None, 0),
    ]


def test_without_retries_what_is_lost_fails(paper: Scenario) -> None:
    scenario = replace(paper, gateway=replace(paper.gateway, max_retries=0))
    schedule = requests((0.0, 8_000, 2), (50.0, 8_000, 2))
    found = simulate(faulty(scenario, kill("pd-p0", 0.5)), "homogeneous_pd", schedule)
    assert outcomes(found) == [("failed", "instance_down", 0), ("completed", None, 0)]
    assert found.requests[0].prefill_s is None


def test_a_death_at_decode_fails_what_has_begun_and_brings_the_rest_again(paper: Scenario) -> None:
    deployment = replace(paper.deployments["homogeneous_pd"], num_decode=2)
    scenario = replace(paper, deployments={"homogeneous_pd": deployment})
    # The first decodes when its instance dies, the third, on the same one, is still prefilled.
    schedule = requests((0.0, 2_000, 1024), (0.1, 2_000, 1024), (4.0, 60_000, 1024))
    plain = simulate(scenario, "homogeneous_pd", schedule)
    first, _, third = (one.route.decode.name for one in plain.requests if one.route)
    assert first == third
    found = simulate(faulty(scenario, kill(first, 5.0)), "homogeneous_pd", schedule)
    assert outcomes(found) == [
        ("failed", "instance_down", 0), ("completed", None, 0), ("completed", None, 1),
    ]  # fmt: skip
    route = found.requests[2].route
    assert route is not None
    assert route.decode.name != first
    # The prefill, whose KV had nowhere to go, was broken off and begun anew.
    before, after = plain.requests[2].ttft_s, found.requests[2].ttft_s
    assert before is not None
    assert after == pytest.approx(before + 1.0, abs=1e-6)


def test_when_the_first_token_is_out_at_prefill_nothing_comes_again(paper: Scenario) -> None:
    """With ttft_source = prefill the answer has begun while the KV is on its way."""
    slow_fabric = replace(
        paper,
        fabric=replace(paper.fabric, rate_bytes_per_s=2e7),
        scheduling=replace(paper.scheduling, ttft_source="prefill"),
    )
    schedule = requests((0.0, 8_000, 4))
    (plain,) = simulate(slow_fabric, "homogeneous_pd", schedule).requests
    assert plain.prefill_s is not None
    assert plain.route is not None
    at_s = plain.prefill_s + 0.1
    fault = kill(plain.route.prefill.name, at_s)
    found = simulate(faulty(slow_fabric, fault), "homogeneous_pd", schedule)
    assert outcomes(found) == [("failed", "instance_down", 0)]
    ttft_decode = replace(
        slow_fabric, scheduling=replace(slow_fabric.scheduling, ttft_source="decode")
    )
    found = simulate(faulty(ttft_decode, fault), "homogeneous_pd", schedule)
    assert outcomes(found) == [("completed", None, 1)]


def test_where_nobody_is_left_requests_are_refused(paper: Scenario) -> None:
    faults = [kill(f"pd-p{n}", 1.0) for n in range(9)]
    schedule = requests((0.0, 60_000, 2), (5.0, 8_000, 2))
    found = simulate(faulty(paper, *faults), "homogeneous_pd", schedule)
    assert [(one.outcome, one.failure_phase) for one in found.requests] == [
        ("failed", "rejected"), ("failed", "rejected"),
    ]  # fmt: skip
    assert found.requests[0].planned_s == 0.0
    assert found.failures == {"rejected": 2}


@pytest.mark.parametrize("factor", [1.5, 4.0])
def test_a_slow_instance_takes_so_many_times_its_service(paper: Scenario, factor: float) -> None:
    deployment = replace(paper.deployments["homogeneous_pd"], num_prefill=1)
    scenario = replace(paper, deployments={"homogeneous_pd": deployment})
    schedule = requests(*((40.0 * n, 8_000 + 100 * n, 5) for n in range(30)))
    plain = simulate(scenario, "homogeneous_pd", schedule).requests
    found = simulate(
        faulty(scenario, slow("pd-p0", 400.0, 400.0, factor), slow("pd-d0", 400.0, 400.0, factor)),
        "homogeneous_pd",
        schedule,
    ).requests
    for before, after in zip(plain, found, strict=True):
        inside = 400.0 <= before.planned_s < 800.0
        assert before.prefill_s is not None
        assert after.prefill_s == (before.prefill_s * factor if inside else before.prefill_s)
        at_d0 = before.route is not None and before.route.decode.name == "pd-d0"
        steps = (factor if inside and at_d0 else 1.0) * _decode_s(before)
        assert _decode_s(after) == pytest.approx(steps, rel=1e-9)


def _decode_s(one: SimulatedRequest) -> float:
    assert one.e2e_s is not None
    assert one.ttft_s is not None
    return one.e2e_s - one.ttft_s


def test_a_pool_is_empty_when_its_instance_comes_back() -> None:
    scenario = load_scenario(SCENARIOS / "prefix-cache.toml")
    deployment = replace(
        scenario.deployments["prfaas_pd"], num_prfaas=0, num_prefill=1, num_decode=1,
        threshold_tokens=None, prfaas_hardware=None,
    )  # fmt: skip
    scenario = replace(scenario, deployments={"prfaas_pd": deployment})
    blocks = tuple(range(1, 21))
    schedule = tuple(Request(f"{n:06d}", n, 100.0 * n, 20 * 512 + 1, 4, blocks) for n in range(4))
    plain = simulate(scenario, "prfaas_pd", schedule)
    assert [one.cached_tokens for one in plain.requests] == [0, 10_240, 10_240, 10_240]
    fault = faulty(scenario, kill("pd-p0", 150.0, 10.0), kill("pd-d0", 150.0, 10.0))
    found = simulate(fault, "prfaas_pd", schedule)
    assert [one.cached_tokens for one in found.requests] == [0, 10_240, 0, 10_240]
    assert [one.resident_tokens > 0 for one in found.requests] == [False, True, False, True]


def test_roles_and_deaths_together() -> None:
    sets = ["workload.mu=8.5", "load.rate_req_per_s=6", "load.num_requests=4000"]
    scenario = load_scenario(SCENARIOS / "role-shift.toml", sets)
    schedule = build_schedule(scenario.workload, scenario.load)
    name = next(iter(scenario.deployments))
    plain = simulate(scenario, name, schedule)
    assert plain.roles
    moved = plain.roles[0]
    for at_s in (moved.left_s - 1.0, (moved.left_s + moved.at_s) / 2, moved.at_s + 1.0):
        found = simulate(faulty(scenario, kill(moved.instance, at_s, 30.0)), name, schedule)
        check(found, 4000, 2)


def test_only_layers_that_were_ready_take_their_turn() -> None:
    """Ten equal pieces over ten seconds, of which the prefill ends after four and a half."""
    architecture = load_scenario(PAPER).model.architecture
    sizes = LayerSizes(architecture)
    tokens, rate = 60_000, 4e8
    per_layer = np.asarray(sizes(tokens, 0), float)
    count = len(per_layer)
    path = KvPath(rate, 0.0, (), sizes)
    path.offer(1, 0.0, 10.0, tokens)
    path.withdraw(1, 4.5)
    ready_s = 10.0 * np.arange(1, count + 1) / count
    departed_s = 0.0
    for at_s, size in zip(ready_s, per_layer, strict=True):
        if at_s <= 4.5:
            departed_s = max(departed_s, float(at_s)) + size / rate
    assert path.send(4.5, 1e6) == pytest.approx(max(departed_s, 4.5) + 1e6 / rate)
    assert path.sent_bytes == pytest.approx(per_layer[ready_s <= 4.5].sum() + 1e6)
    path.withdraw(1, 4.6)
    path.offer(1, 5.0, 6.0, tokens)
    assert path.landed_s(1, 6.0) > 6.0


def instance_faults(*lines: str) -> Sequence[str]:
    return [f"faults.instances=[{','.join('{' + line + '}' for line in lines)}]"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('instance="pd-p33",at="1s"', r"no instance 'pd-p33' \(did you mean 'pd-p3'\?\)"),
        (
            'instance="pd-p8",at="1s",deployments=["prfaas_pd"]',
            r"in prfaas_pd there is no instance",
        ),
        ('instance="pd-p0",at="1s",deployments=["prfas_pd"]', r"did you mean 'prfaas_pd'"),
        ('instance="pd-p0",at="1s",kind="slow"', r"faults\.instances\.0\.factor' is missing"),
        ('instance="pd-p0",at="1s",factor=2.0', r"no effect with kind"),
        ('instance="pd-p0",at="-1s"', r"faults\.instances"),
        ('instance="pd-p0",at="1s",last="3s"', r"lasts"),
        ('instance="pd-p0",at="1s"},{instance="pd-p0",at="9s"', r"overlap on pd-p0 in prfaas_pd"),
    ],
)
def test_a_wrong_fault_is_named(line: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        load_scenario(PAPER, instance_faults(line))


def test_faults_are_of_the_deployments_that_have_the_instance() -> None:
    scenario = load_scenario(
        PAPER,
        [*instance_faults('instance="pd-p8",at="0s"'), "load.num_requests=100"],
    )
    schedule = build_schedule(scenario.workload, scenario.load)
    plain = faulty(scenario)
    for name, differs in (("prfaas_pd", False), ("homogeneous_pd", True)):
        with_fault, without = (simulate(one, name, schedule) for one in (scenario, plain))
        assert (with_fault != without) == differs


def test_a_live_run_refuses_them() -> None:
    scenario = load_scenario(PAPER, instance_faults('instance="pd-p0",at="1s"'))
    with pytest.raises(ScenarioError, match=r"faults\.instances.*simulated only"):
        check_emulation(scenario)
