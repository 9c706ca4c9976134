"""Decode instances in simulation: steps by batch, and memory, against loops written apart."""

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from decode_reference import admit_by_memory, decode_by_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from scenario_files import PAPER, refusal

from harness.core import Request, ScenarioError
from harness.engine.emulated import Slots
from harness.engine.noise import Noise
from harness.engine.stepped import SteppedDecode
from harness.engine.timeline import Alarm
from harness.kv_blocks import KvBlocks
from harness.profile import DecodePoint, PrefillPoint, Profile
from harness.scenario import Scenario, check_emulation, load_scenario
from harness.settings import Serving
from harness.simulator import SimulatedRows, simulate

#: (gap to the one before in ms, prompt tokens, output tokens)
Rows = list[tuple[float, int, int]]
ROWS = st.lists(
    st.tuples(st.floats(0, 400, width=32).map(float), st.integers(1, 60_000), st.integers(1, 60)),
    min_size=1,
    max_size=25,
)
#: Prefill of anything; what is decoded afterwards comes in the order of arrival.
PREFILL_S = 1e-6


def decoding(slots: int, **serving: object) -> Scenario:
    """One decode instance whose steps cost by batch and context, behind prefill that costs
    nothing."""
    scenario = load_scenario(PAPER)
    h20 = scenario.hardware["h20"]
    points = tuple(
        DecodePoint(batch, context, 0.01 + 0.002 * batch + context * batch * 1e-8, "stand_in", "")
        for batch in (1, 3, 20)
        for context in (1, 1000, 30_000, 262_144)
    )
    profile = replace(
        h20.profile,
        prefill_points=tuple(PrefillPoint(n, 0, PREFILL_S, "stand_in", "") for n in (1, 1_000_000)),
        decode_points=points,
        decode_max_batch=slots,
    )
    one = replace(scenario.deployments["homogeneous_pd"], name="one", num_prefill=1, num_decode=1)
    return replace(
        scenario,
        hardware={**scenario.hardware, "h20": replace(h20, profile=profile)},
        deployments={"one": one},
        slo=replace(scenario.slo, tpot_s=1.0),
        serving=replace(scenario.serving, **serving),
        scheduling=replace(scenario.scheduling, admission_deadline_s=1e6),
    )


def schedule_of(rows: Rows) -> tuple[Request, ...]:
    at_s = np.cumsum([gap_ms / 1e3 for gap_ms, _, _ in rows]).tolist()
    return tuple(
        Request(f"{n:06d}", n, at, tokens, output)
        for n, (at, (_, tokens, output)) in enumerate(zip(at_s, rows, strict=True))
    )


def simulated(scenario: Scenario, rows: Rows) -> SimulatedRows:
    found = simulate(scenario, "one", schedule_of(rows), transfer=False)
    assert found.num_completed == len(rows)
    assert isinstance(found.requests, SimulatedRows)
    return found.requests


def enough(scenario: Scenario, rows: Rows) -> float:
    """Bytes that hold the largest request, whole blocks of it."""
    architecture = scenario.model.architecture
    largest = max(architecture.kv_bytes(tokens + output) for _, tokens, output in rows)
    blocks = KvBlocks.of(architecture, scenario.prefix_cache, 0.0)
    return float(largest + blocks.geometry.block_bytes)


def profile_of(scenario: Scenario) -> Profile:
    return scenario.hardware["h20"].profile


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, slots=st.integers(1, 5))
def test_steps_are_those_of_a_loop_over_every_step(rows: Rows, slots: int) -> None:
    scenario = decoding(slots, decode_steps="by_batch")
    found = simulated(scenario, rows)
    landed = found.column("landed_s").tolist()
    lengths = [(tokens, output) for _, tokens, output in rows]
    alone = decode_by_steps(
        [(at, *one) for at, one in zip(landed, lengths, strict=True)],
        slots,
        profile_of(scenario).decode_step_s,
    )
    assert found.column("granted_s").tolist() == [one.granted_s for one in alone]
    assert found.column("finish_s").tolist() == [one.finish_s for one in alone]
    second_s = found.column("second_s").tolist()
    for told_s, one in zip(second_s, alone, strict=True):
        assert told_s == one.second_s if one.output > 1 else np.isnan(told_s)


class VirtualAlarm(Alarm):
    """An alarm of a clock that moves to the next instant somebody waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.at_ns = 0
        self._waiting: list[tuple[int, int, asyncio.Event]] = []

    def now_ns(self) -> int:
        return self.at_ns

    async def until(self, mono_ns: int) -> int:
        if mono_ns > self.at_ns:
            woken = asyncio.Event()
            heapq.heappush(self._waiting, (mono_ns, len(self._waiting), woken))
            await woken.wait()
        return self.at_ns

    async def run(self) -> None:
        """Until nobody waits any more."""
        while True:
            for _ in range(50):  # all that this instant causes
                await asyncio.sleep(0)
            if not self._waiting:
                return
            self.at_ns = self._waiting[0][0]
            while self._waiting and self._waiting[0][0] == self.at_ns:
                heapq.heappop(self._waiting)[2].set()


async def on_the_engine(
    profile: Profile, landed: list[int], rows: Rows, slots: int, blocks: KvBlocks | None
) -> list[list[int]]:
    """(granted, second or last token, last token) of each in ns, on the live engine's class."""
    alarm = VirtualAlarm()
    engine = SteppedDecode(alarm, profile, slots, 1.0, 1, Noise(), blocks)
    told: list[list[int]] = [[] for _ in rows]

    def emitting(index: int) -> Callable[[int], Awaitable[None]]:
        async def emit(_total: int) -> None:
            told[index].append(alarm.now_ns())

        return emit

    async def one(index: int) -> int:
        await alarm.until(landed[index])
        _, tokens, output = rows[index]
        granted_ns = await engine.slots.grant(landed[index], tokens + output)
        await engine.decode(granted_ns, output, emitting(index), tokens)
        return granted_ns

    serving = asyncio.create_task(engine.serve())
    requests = [asyncio.create_task(one(index)) for index in range(len(rows))]
    await alarm.run()
    granted = await asyncio.gather(*requests)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return [[at, ends[:2][-1], ends[-1]] for at, ends in zip(granted, told, strict=True)]


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, slots=st.integers(1, 5), share=st.none() | st.floats(1.0, 4.0))
def test_steps_are_those_that_the_live_engine_plans(
    rows: Rows, slots: int, share: float | None
) -> None:
    """Up to the nanosecond to which the engine rounds each step, with memory for ``share`` of the
    largest request or without a bound."""
    scenario, blocks = decoding(slots, decode_steps="by_batch"), None
    if share is not None:
        memory = share * enough(scenario, rows)
        blocks = KvBlocks.of(scenario.model.architecture, scenario.prefix_cache, memory)
        scenario = decoding(slots, decode_steps="by_batch", decode_memory_bytes=memory)
    found = simulated(scenario, rows)
    landed = [round(at * 1e9) for at in found.column("landed_s").tolist()]
    live = asyncio.run(on_the_engine(profile_of(scenario), landed, rows, slots, blocks))
    granted, finish = found.column("granted_s") * 1e9, found.column("finish_s") * 1e9
    second = np.where(np.isnan(found.column("second_s")), granted / 1e9, found.column("second_s"))
    here = np.stack([granted, second * 1e9, finish], axis=1)
    assert np.abs(here - np.array(live)).max() < sum(output for _, _, output in rows) + 2


def test_steps_of_one_cost_are_those_of_a_full_batch() -> None:
    """Where one slot decodes at a cost that does not follow the context nobody waits for a step."""
    rows: Rows = [(100.0, 5_000, 40), (10.0, 200, 30), (2_000.0, 900, 1), (1.0, 70, 2)]
    scenario = decoding(1)
    profile = profile_of(scenario)
    flat = tuple(replace(point, step_s=0.02) for point in profile.decode_points)
    h20 = replace(scenario.hardware["h20"], profile=replace(profile, decode_points=flat))
    scenario = replace(scenario, hardware={**scenario.hardware, "h20": h20})
    by_batch = replace(scenario, serving=replace(scenario.serving, decode_steps="by_batch"))
    for name in ("granted_s", "second_s", "finish_s"):
        one, other = simulated(scenario, rows).column(name), simulated(by_batch, rows).column(name)
        assert one == pytest.approx(other, rel=1e-12, nan_ok=True)


@settings(max_examples=100)
@given(
    batch=st.floats(1, 20),
    first=st.floats(1, 200_000),
    steps=st.lists(st.floats(0, 600), max_size=100),
)
def test_step_times_of_many_contexts_are_those_of_each(
    batch: float, first: float, steps: list[float]
) -> None:
    profile = profile_of(decoding(20))
    contexts = first + np.cumsum([0.0, *steps])
    one_by_one = [profile.decode_step_s(batch, context) for context in contexts.tolist()]
    assert profile.decode_step_s_array(batch, contexts).tolist() == one_by_one


def test_an_emptier_batch_steps_faster() -> None:
    scenario = decoding(8, decode_steps="by_batch")
    few = simulated(scenario, [(1_000.0, 4_000, 100)] * 8)
    many = simulated(scenario, [(1_000.0 if n % 8 == 0 else 0.0, 4_000, 100) for n in range(8)])
    assert few.column("e2e_s").max() < many.column("e2e_s").min()


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, slots=st.integers(1, 6), share=st.floats(1.0, 4.0))
def test_memory_admits_as_a_queue_computed_apart(rows: Rows, slots: int, share: float) -> None:
    """First come first served, each when slots and blocks allow; the first holds up the rest."""
    plain = decoding(slots)
    architecture, pools = plain.model.architecture, plain.prefix_cache
    memory = share * enough(plain, rows)
    scenario = decoding(slots, decode_memory_bytes=memory)
    found = simulated(scenario, rows)
    blocks = KvBlocks.of(architecture, pools, memory)
    ends = found.column("granted_s"), found.column("finish_s")
    holds = (ends[1] - ends[0]).tolist()
    needed = [
        -(-architecture.kv_bytes(tokens + output) // blocks.geometry.block_bytes)
        for _, tokens, output in rows
    ]
    landed = found.column("landed_s").tolist()
    capacity = int(memory // blocks.geometry.block_bytes)
    alone = admit_by_memory(list(zip(landed, holds, needed, strict=True)), slots, capacity)
    assert found.column("granted_s") == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("steps", ["full_batch", "by_batch"])
def test_memory_without_end_changes_nothing(steps: str) -> None:
    rng = np.random.default_rng(5)
    rows: Rows = [
        (float(gap), int(tokens), int(output))
        for gap, tokens, output in zip(
            rng.exponential(200, 300), rng.integers(1, 60_000, 300), rng.integers(1, 90, 300),
            strict=True,
        )
    ]  # fmt: skip
    plain, roomy = (
        decoding(4, decode_steps=steps),
        decoding(4, decode_steps=steps, decode_memory_bytes=1e15),
    )
    assert simulated(plain, rows) == simulated(roomy, rows)


def test_memory_of_so_many_requests_is_so_many_slots() -> None:
    rows: Rows = [(30.0, 8_000, 50)] * 40
    blocks = KvBlocks.of(decoding(1).model.architecture, decoding(1).prefix_cache, 1e15)
    one = blocks.taken(8_050) * blocks.geometry.block_bytes
    bound = simulated(decoding(9, decode_memory_bytes=3.5 * one), rows)
    slots = simulated(decoding(3), rows)
    # The step time is that of the full batch of each.
    for column in ("granted_s", "finish_s"):
        assert len(np.unique(bound.column(column))) == len(np.unique(slots.column(column)))
    busy = bound.column("granted_s")[:, None], bound.column("finish_s")[None, :]
    running = ((bound.column("granted_s")[None, :] <= busy[0]) & (busy[0] < busy[1])).sum(axis=1)
    assert running.max() == 3


def test_who_gives_up_waiting_for_memory_makes_way() -> None:
    scenario = decoding(3)
    blocks = KvBlocks.of(scenario.model.architecture, scenario.prefix_cache, 1e15)
    memory = 1.5 * blocks.taken(40_400) * blocks.geometry.block_bytes
    scenario = replace(
        scenario,
        serving=replace(scenario.serving, decode_memory_bytes=memory),
        scheduling=replace(scenario.scheduling, admission_deadline_s=1.0),
    )
    rows: Rows = [(0.0, 40_000, 400), (100.0, 40_000, 400), (400.0, 500, 20)]
    found = simulate(scenario, "one", schedule_of(rows), transfer=False)
    assert found.failures == {"decode_admission": 1}
    first, second, third = found.requests
    assert second.failure_phase == "decode_admission"
    assert (first.decode_admission_s, third.decode_admission_s) == pytest.approx((0.0, 0.6))


def test_who_stops_waiting_for_memory_on_the_live_engine_makes_way() -> None:
    scenario = decoding(3)
    whole = KvBlocks.of(scenario.model.architecture, scenario.prefix_cache, 1e15)
    memory = 1.5 * whole.taken(40_000) * whole.geometry.block_bytes
    blocks = KvBlocks.of(scenario.model.architecture, scenario.prefix_cache, memory)

    async def run() -> None:
        slots = Slots(3, blocks)
        assert await slots.grant(100, 40_000) == 100
        second = asyncio.create_task(slots.grant(200, 40_000))
        third = asyncio.create_task(slots.grant(2**62, 500))
        await asyncio.sleep(0)
        assert (slots.running, slots.queued) == (1, 2)
        second.cancel()
        assert await third == 2**62  # when it is ready
        slots.release(400, 40_000)
        assert await slots.grant(500, 40_000) == 500
        assert (slots.running, slots.queued) == (2, 0)

    asyncio.run(run())


def test_reserved_memory_is_held_from_dispatch_to_end() -> None:
    rows: Rows = [(20.0, 20_000, 40)] * 30
    scenario = decoding(8)
    scenario = replace(scenario, scheduling=replace(scenario.scheduling, admission="reserve_first"))
    blocks = KvBlocks.of(scenario.model.architecture, scenario.prefix_cache, 1e15)
    memory = 2.5 * blocks.taken(20_040) * blocks.geometry.block_bytes
    serving = replace(scenario.serving, decode_memory_bytes=memory)
    found = simulated(replace(scenario, serving=serving), rows)
    # A prefill starts only when its request has its memory, which two at a time have.
    starts, ends = np.sort(found.column("start_s")), np.sort(found.column("finish_s"))
    assert (starts[2:] >= ends[:-2]).all()
    assert starts[2:] == pytest.approx(ends[:-2])


def test_a_request_that_never_fits_is_refused() -> None:
    words = refusal(PAPER, "serving.decode_memory='64MiB'")
    assert "'serving.decode_memory'" in words
    assert "would wait for ever" in words
    assert load_scenario(PAPER, ["serving.decode_memory='64GiB'"]).serving == Serving(
        "full_batch", 2**36, None, None
    )
    assert "decode_memory" in refusal(PAPER, "serving.decode_memroy='64GiB'")


@pytest.mark.parametrize("setting", ["prefill_batch_tokens=8192", "chunk_tokens=2048"])
def test_a_live_run_refuses_what_only_simulated_instances_do(setting: str) -> None:
    scenario = load_scenario(PAPER, [f"serving.{setting}"])
    with pytest.raises(ScenarioError, match=f"serving.{setting.partition('=')[0]}"):
        check_emulation(scenario)
