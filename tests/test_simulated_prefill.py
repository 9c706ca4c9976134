"""Prefill in steps: batches and chunks against a loop written apart, their limits, and their KV."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_reference import prefill_by_steps
from scenario_files import PAPER, ROOT, refusal

from harness.core import Request
from harness.profile import PrefillPoint
from harness.profile_file import load_profile
from harness.scenario import Fabric, Scenario, load_scenario
from harness.settings import Faults, InstanceFault
from harness.simulator import SimulatedRows, Simulation, simulate
from harness.simulator.prefill_steps import fixed_s
from harness.workload import build_schedule
from netem.link import symmetric

UNIT = 1_000
#: T(n) = F + a n + b n^2 at every multiple of UNIT.
F, A, B = 0.3, 2e-5, 4e-10
ROWS = st.lists(
    st.tuples(st.floats(0, 1_500, width=32).map(float), st.integers(1, 12)),
    min_size=1,
    max_size=20,
)
#: (gap in ms, prompt in units)
Rows = list[tuple[float, int]]


def alone_s(tokens: int) -> float:
    return F + A * tokens + B * tokens**2


def prefilling(batch: int | None = None, chunk: int | None = None) -> Scenario:
    """One prefill instance, and decode that never limits."""
    scenario = load_scenario(PAPER)
    h20 = scenario.hardware["h20"]
    points = tuple(
        PrefillPoint(n * UNIT, 0, alone_s(n * UNIT), "stand_in", "") for n in range(1, 141)
    )
    profile = replace(h20.profile, prefill_points=points)
    one = replace(scenario.deployments["homogeneous_pd"], name="one", num_prefill=1, num_decode=20)
    serving = replace(scenario.serving, prefill_batch_tokens=batch, chunk_tokens=chunk)
    return replace(
        scenario,
        hardware={**scenario.hardware, "h20": replace(h20, profile=profile)},
        deployments={"one": one},
        serving=serving,
    )


def ran(scenario: Scenario, rows: Rows, *, transfer: bool = False) -> SimulatedRows:
    at_s = np.cumsum([gap_ms / 1e3 for gap_ms, _ in rows]).tolist()
    schedule = [
        Request(f"{n:06d}", n, at, units * UNIT, 2)
        for n, (at, (_, units)) in enumerate(zip(at_s, rows, strict=True))
    ]
    found = simulate(scenario, "one", schedule, transfer=transfer)
    assert found.num_completed == len(rows)
    assert isinstance(found.requests, SimulatedRows)
    return found.requests


def same(one: SimulatedRows, other: SimulatedRows) -> bool:
    """All instants, to the last bit."""
    names = ("start_s", "end_s", "landed_s", "granted_s", "finish_s", "kv_bytes")
    return all((one.column(name) == other.column(name)).all() for name in names)


@settings(max_examples=120, deadline=None)
@given(
    rows=ROWS,
    batch=st.none() | st.integers(3, 15),
    chunk=st.none() | st.integers(1, 3),
)
def test_steps_are_those_of_a_loop_written_apart(
    rows: Rows, batch: int | None, chunk: int | None
) -> None:
    limits = [None if units is None else units * UNIT for units in (batch, chunk)]
    found = ran(prefilling(*limits), rows)
    at_s = found.column("planned_s").tolist()
    # The line through the points of 1,000 and 2,000 tokens.
    known_s = 2 * alone_s(UNIT) - alone_s(2 * UNIT)
    expected = prefill_by_steps(
        [(at, units * UNIT) for at, (_, units) in zip(at_s, rows, strict=True)],
        *limits,
        known_s,
        alone_s,
    )
    assert found.column("start_s") == pytest.approx([start for start, _ in expected], rel=1e-9)
    assert found.column("end_s") == pytest.approx([end for _, end in expected], rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_a_budget_for_one_or_a_chunk_for_all_changes_nothing(rows: Rows) -> None:
    plain = ran(prefilling(), rows, transfer=True)
    assert same(plain, ran(prefilling(batch=1), rows, transfer=True))
    assert same(plain, ran(prefilling(chunk=12 * UNIT), rows, transfer=True))


def test_chunks_cost_the_fixed_part_again_and_batches_save_it() -> None:
    known_s = 2 * alone_s(UNIT) - alone_s(2 * UNIT)
    (cut,) = ran(prefilling(chunk=2 * UNIT), [(0.0, 9)])
    assert cut.prefill_s == pytest.approx(alone_s(9 * UNIT) + 4 * known_s)
    # The first finds nobody and goes alone; the other three wait, and go together.
    rows = ran(prefilling(batch=100 * UNIT), [(0.0, 4), (1.0, 4), (1.0, 4), (1.0, 4)])
    ends = np.unique(rows.column("end_s"))
    assert ends == pytest.approx(
        [alone_s(4 * UNIT), 2 * alone_s(4 * UNIT) + 2 * (alone_s(4 * UNIT) - known_s)]
    )


def test_the_fixed_part_is_never_above_the_profiles_shortest_time() -> None:
    for path in sorted((ROOT / "profiles").glob("*8x*.json")):
        profile = load_profile(path)
        assert 0 <= fixed_s(profile) <= profile.prefill_s(profile.covered_tokens[0]), path.name
    flat = load_scenario(PAPER).hardware["h200"].profile
    assert fixed_s(flat) == 0.44  # as published up to 1,024 tokens
    assert fixed_s(prefilling().hardware["h20"].profile) == pytest.approx(F - 2 * B * UNIT**2)


def test_short_prompts_pass_a_long_one_between_its_chunks() -> None:
    rng = np.random.default_rng(3)
    lengths = np.where(rng.random(400) < 0.1, 60, 2)
    mean_s = float(np.mean([alone_s(int(n) * UNIT) for n in lengths]))
    gaps = rng.exponential(1e3 * mean_s / 0.6, 400)
    rows: Rows = [(float(gap), int(units)) for gap, units in zip(gaps, lengths, strict=True)]
    whole = ran(prefilling(), rows)
    cut = ran(prefilling(batch=8 * UNIT, chunk=6 * UNIT), rows)
    short = lengths == 2
    assert cut.column("ttft_s")[short].mean() < 0.8 * whole.column("ttft_s")[short].mean()
    late = [np.quantile(one.column("ttft_s")[short], 0.9) for one in (whole, cut)]
    assert late[1] < 0.7 * late[0]
    # Work is conserved but for the fixed parts, so the long ones pay.
    assert cut.column("ttft_s")[~short].mean() > whole.column("ttft_s")[~short].mean()


def test_an_instance_is_busy_while_it_steps() -> None:
    scenario = prefilling(batch=8 * UNIT, chunk=3 * UNIT)
    schedule = [Request(f"{n:06d}", n, n / 8, 7 * UNIT, 2) for n in range(40)]
    found = simulate(scenario, "one", schedule, transfer=False)
    assert isinstance(found.requests, SimulatedRows)
    busy_s = found.requests.column("end_s").max()  # it never waits
    assert found.utilisation.pd_prefill == pytest.approx(busy_s / found.window_s)


@pytest.mark.parametrize("rate", [1e8, 2e8, 2e9, 2e10])
@pytest.mark.parametrize("path", ["fabric", "layers", "fair"])
def test_each_chunk_leaves_at_its_end_and_the_last_one_by_layers(rate: float, path: str) -> None:
    """Whoever shares a link with nobody is done when the work is, however pieces take turns."""
    scenario = replace(prefilling(chunk=3 * UNIT), fabric=Fabric(rate))
    if path != "fabric":
        one = scenario.deployments["one"]
        far = replace(one, num_prefill=0, num_prfaas=1, prfaas_hardware="h20")
        link = symmetric("test", rate, 0.0)
        scenario = replace(scenario, deployments={"one": far}, link=link, link_sharing=path)
    (row,) = ran(scenario, [(0.0, 10)], transfer=True)
    sizes = scenario.model.architecture.layer_kv_bytes
    known_s = 2 * alone_s(UNIT) - alone_s(2 * UNIT)
    pieces: list[tuple[float, float]] = []
    now_s = left_s = 0.0
    for begin, end in ((0, 3), (3, 6), (6, 9), (9, 10)):
        before_s = alone_s(begin * UNIT) if begin else known_s
        step_s = known_s + alone_s(end * UNIT) - before_s
        layers = sizes(end * UNIT, begin * UNIT)
        if end == 10:
            ready = [now_s + step_s * (k + 1) / len(layers) for k in range(len(layers))]
            pieces += zip(ready, layers, strict=True)
        else:
            state = sum(sizes(end * UNIT, end * UNIT))
            pieces.append((now_s + step_s, sum(layers) - state))
        now_s += step_s
    for ready_s, nbytes in pieces:
        left_s = max(left_s, ready_s) + nbytes / rate
    assert row.prefill_s == pytest.approx(now_s)
    assert row.transfer_s == pytest.approx(left_s - now_s, abs=1e-9)
    assert sum(nbytes for _, nbytes in pieces) == row.kv_bytes


def served(**changes: object) -> Simulation:
    """Sessions over all of the case study, with prefix caches and steps of every kind."""
    options = [
        "load.rate_req_per_s=1.6",
        "load.num_requests=1500",
        "workload.sessions.turns=6.0",
        "workload.sessions.think_time='20s'",
        "workload.sessions.increment_tokens=3000",
        "prefix_cache.enabled=true",
        "serving.prefill_batch_tokens=16384",
        "serving.chunk_tokens=8192",
        "serving.decode_steps='by_batch'",
        "serving.decode_memory='120GiB'",
        *(f"{key.replace('__', '.')}={value}" for key, value in changes.items()),
    ]
    scenario = load_scenario(PAPER, options)
    schedule = build_schedule(scenario.workload, scenario.load)
    return simulate(scenario, "prfaas_pd", schedule)


@pytest.mark.parametrize("admission", ["push_then_admit", "reserve_first"])
@pytest.mark.parametrize("sharing", ["layers", "fair"])
def test_nothing_is_lost_with_all_of_it_together(admission: str, sharing: str) -> None:
    """Little's law, conservation and whole pools are asserted in the run, in which prefills wait
    for room in the pools."""
    found = served(
        scheduling__admission=f"'{admission}'",
        link__sharing=f"'{sharing}'",
        prefix_cache__memory="'10GiB'",
    )
    assert found.num_completed + sum(found.failures.values()) == 1500
    assert found.num_completed > 1400
    assert isinstance(found.requests, SimulatedRows)
    assert found.requests.whole("cached_tokens").sum() > 0
    rows = found.requests
    done = ~rows.failed
    terms = ("prefill_queue_s", "prefill_s", "transfer_s", "decode_admission_s")
    total = np.sum([rows.column(name)[done] for name in terms], axis=0)
    assert total == pytest.approx(rows.column("ttft_s")[done], abs=1e-6)


def test_instances_that_die_in_the_middle_of_a_step_lose_nobody_else() -> None:
    scenario = load_scenario(
        PAPER,
        [
            "load.rate_req_per_s=1.5",
            "load.num_requests=1200",
            "serving.prefill_batch_tokens=32768",
            "serving.chunk_tokens=8192",
            "serving.decode_steps='by_batch'",
            "serving.decode_memory='80GiB'",
        ],
    )
    names = ("prfaas-p0", "pd-p0", "pd-d0", "pd-d1")
    faults = tuple(
        InstanceFault(name, "kill", 40.0 + 37 * n, 25.0, None, None)
        for n, name in enumerate(names * 4)
    )
    slow = InstanceFault("prfaas-p1", "slow", 100.0, 200.0, 3.0, None)
    scenario = replace(scenario, faults=Faults((*faults, slow)))
    schedule = build_schedule(scenario.workload, scenario.load)
    for sharing in ("layers", "fair"):
        found = simulate(replace(scenario, link_sharing=sharing), "prfaas_pd", schedule)
        assert found.num_completed + sum(found.failures.values()) == 1200
        assert found.num_completed > 1100
        assert isinstance(found.requests, SimulatedRows)
        assert found.requests.whole("retries").sum() > 20  # they did lose some


def test_limits_that_contradict_each_other_are_refused() -> None:
    words = refusal(PAPER, "serving.chunk_tokens=4096", "serving.prefill_batch_tokens=2048")
    assert "'serving.chunk_tokens'" in words
