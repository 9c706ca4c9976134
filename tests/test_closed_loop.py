"""A closed loop in simulation: the machine-repair queue, Little's law, the order of requests."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core import Request
from harness.preparation import prepare
from harness.profile import PrefillPoint
from harness.scenario import Scenario, load_scenario
from harness.simulator import Simulation, simulate
from harness.workload import build_schedule

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
#: Prefill of one token; a service of a second is so many.
TOKEN_S = 1e-3


def queue(servers: int, slots: int, think_s: float) -> Scenario:
    """Prefill of a millisecond a token, decode that never limits, no hops."""
    scenario = load_scenario(PAPER)
    h20 = scenario.hardware["h20"]
    points = tuple(
        PrefillPoint(tokens, 0, TOKEN_S * tokens, "stand_in", "") for tokens in (1, 1_000_000)
    )
    deployment = replace(scenario.deployments["homogeneous_pd"], num_prefill=servers)
    return replace(
        scenario,
        hardware={
            **scenario.hardware,
            "h20": replace(h20, profile=replace(h20.profile, prefill_points=points)),
        },
        deployments={"queue": replace(deployment, name="queue", num_decode=20)},
        load=replace(
            scenario.load, rate_req_per_s=math.inf, concurrency=slots, think_time_s=think_s
        ),
    )


def run(scenario: Scenario, services_s: list[float], output_tokens: int = 1) -> Simulation:
    requests = [
        Request(f"{n:06d}", n, 0.0, max(1, round(one / TOKEN_S)), output_tokens)
        for n, one in enumerate(services_s)
    ]
    return simulate(scenario, "queue", requests, transfer=False)


def machine_repair(servers: int, slots: int, service_s: float, think_s: float) -> float:
    """Throughput of M/M/c//N: of n at the servers p(n) ~ prod (N - i) / Z over min(i, c) / S. With
    any law of the time to think of that mean: the terminals are no queue."""
    weights = [1.0]
    for n in range(1, slots + 1):
        weights.append(weights[-1] * (slots - n + 1) / think_s / (min(n, servers) / service_s))
    total = sum(weights)
    return sum(w * min(n, servers) / service_s for n, w in enumerate(weights)) / total


@pytest.mark.parametrize(
    ("servers", "slots", "think_s"), [(1, 4, 3.0), (2, 12, 3.0), (3, 30, 20.0), (5, 8, 0.5)]
)
def test_throughput_is_that_of_the_machine_repair_queue(
    servers: int, slots: int, think_s: float
) -> None:
    services_s = np.random.default_rng(3).exponential(1.0, 60_000)
    found = run(queue(servers, slots, think_s), services_s.tolist())
    mean_s = float(np.maximum(1, np.rint(services_s / TOKEN_S)).mean() * TOKEN_S)
    expected = machine_repair(servers, slots, mean_s, think_s)
    assert found.throughput_req_per_s == pytest.approx(expected, rel=0.02)
    # N = X (R + Z), over the whole run but for its end.
    cycle_s = float(found.ttft_s.mean()) + think_s
    assert found.throughput_req_per_s * cycle_s == pytest.approx(slots, rel=0.005)


def test_without_a_queue_each_slot_goes_round_by_itself() -> None:
    """As many servers as slots, constant services: X = N / (S + Z), to the last request."""
    found = run(queue(4, 4, 2.0), [1.0] * 40)
    assert [one.planned_s for one in found.requests] == [3.0 * (n // 4) for n in range(40)]
    assert found.ttft_s == pytest.approx([1.0] * 40)


@given(
    services_s=st.lists(st.sampled_from([0.5, 1.0, 2.5, 7.0]), min_size=1, max_size=60),
    slots=st.integers(1, 9),
    servers=st.integers(1, 3),
    think_s=st.sampled_from([0.0, 0.3, 4.0]),
)
@settings(max_examples=60, deadline=None)
def test_requests_are_conserved_and_never_more_than_the_slots(
    services_s: list[float], slots: int, servers: int, think_s: float
) -> None:
    found = run(queue(servers, slots, think_s), services_s, output_tokens=3)
    rows = found.requests
    assert len(rows) == len(services_s) == found.num_completed
    spans = [(one.planned_s, one.planned_s + (one.e2e_s or 0.0)) for one in rows]
    assert [begin for begin, _ in spans] == sorted(begin for begin, _ in spans)
    ends = sorted(end for _, end in spans)
    for number, (begin, _) in enumerate(spans):
        if number < slots:
            assert begin == 0.0
        else:  # the slot that has become free for it
            assert begin == pytest.approx(ends[number - slots] + think_s, abs=1e-9)
        assert sum(b <= begin < e for b, e in spans) <= slots


def test_refused_requests_free_their_slots() -> None:
    scenario = queue(1, 8, 1.0)
    scenario = replace(scenario, scheduling=replace(scenario.scheduling, max_wait_s=2.0))
    found = run(scenario, [1.0] * 50)
    assert found.failures["rejected"] == 50 - found.num_completed > 0
    # A refusal takes no time: its slot comes again after a second.
    assert {one.planned_s for one in found.requests} == {float(n) for n in range(10)}


def test_prepare_simulates_a_closed_loop_and_promises_no_load() -> None:
    scenario = load_scenario(
        PAPER, ["load.concurrency=30", "load.num_requests=400", "load.think_time=1s"]
    )
    prepared = prepare(scenario)
    assert set(prepared.simulations) == set(scenario.deployments)
    for name, one in prepared.simulations.items():
        assert one.num_completed == 400
        assert prepared.models[name].utilisation == {}
    again = simulate(scenario, "prfaas_pd", build_schedule(scenario.workload, scenario.load))
    assert again == prepared.simulations["prfaas_pd"]
