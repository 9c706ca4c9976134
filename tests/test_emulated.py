"""Emulated compute: planned time, FCFS prefill, slots conserved, tokens of the prompt."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.compute import Piece, PrefillJob
from harness.engine.emulated import (
    EmulatedDecode,
    EmulatedPrefill,
    Slots,
    chunk_ends,
    token_at,
)
from harness.engine.timeline import Alarm
from harness.profile_file import load_profile
from harness.surface.generate import prompt_of_ids

ROOT = Path(__file__).parent.parent
PROFILE = load_profile(ROOT / "profiles/prfaas-1t-8xh200.json")
#: Fast enough for a test: 1K tokens take 4.4 ms.
TIME_SCALE = 100.0


def prefill_all(
    lengths: list[int], *, layers: int = 4, layerwise: bool = True, cancel: int | None = None
) -> tuple[list[object], list[tuple[int, int]], EmulatedPrefill]:
    """Serve ``lengths`` that all arrive at once; gives spans (or errors) and emitted layers."""
    emitted: list[tuple[int, int]] = []

    async def run() -> tuple[list[object], EmulatedPrefill]:
        with Alarm() as alarm:
            engine = EmulatedPrefill(alarm, PROFILE, TIME_SCALE, layerwise)
            loop = asyncio.create_task(engine.serve())
            now_ns = time.monotonic_ns()
            tasks = []
            for index, tokens in enumerate(lengths):

                def emit(piece: Piece, index: int = index) -> None:
                    emitted.append((index, piece.layer))

                job = PrefillJob(tokens, now_ns, now_ns, layers, emit, lambda: None)
                tasks.append(asyncio.create_task(engine.prefill(job)))
            await asyncio.sleep(0)
            if cancel is not None:
                tasks[cancel].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            return results, engine

    results, engine = asyncio.run(run())
    return results, emitted, engine


def test_prefill_is_first_come_first_served_on_planned_time() -> None:
    lengths = [1024, 8192, 1024, 32000]
    spans, emitted, engine = prefill_all(lengths)
    starts = [span.start_mono_ns for span in spans]  # type: ignore[attr-defined]
    for index in range(1, len(lengths)):
        service_ns = round(PROFILE.prefill_s(lengths[index - 1]) / TIME_SCALE * 1e9)
        # Planned, so exact: the previous one's lateness is not in it.
        assert starts[index] - starts[index - 1] == service_ns
    assert emitted == [(index, layer) for index in range(len(lengths)) for layer in range(4)]
    assert engine.busy_s == pytest.approx(sum(PROFILE.prefill_s(n) for n in lengths) / TIME_SCALE)


@pytest.mark.quiet
def test_measured_prefill_time_is_the_profiles() -> None:
    spans, _, _ = prefill_all([8192] * 9)
    measured = [(s.end_mono_ns - s.start_mono_ns) / 1e9 for s in spans]  # type: ignore[attr-defined]
    assert statistics.median(measured) == pytest.approx(
        PROFILE.prefill_s(8192) / TIME_SCALE, abs=1e-3
    )
    assert min(measured) >= PROFILE.prefill_s(8192) / TIME_SCALE


def test_without_layerwise_every_layer_leaves_at_the_end() -> None:
    times: list[int] = []

    async def run() -> int:
        with Alarm() as alarm:
            engine = EmulatedPrefill(alarm, PROFILE, TIME_SCALE, layerwise=False)
            loop = asyncio.create_task(engine.serve())
            now_ns = time.monotonic_ns()
            job = PrefillJob(
                8192, now_ns, now_ns, 5, lambda _: times.append(time.monotonic_ns()), lambda: None
            )
            span = await engine.prefill(job)
            loop.cancel()
            return span.start_mono_ns + round(span.service_wall_s * 1e9)

    planned_end_ns = asyncio.run(run())
    assert len(times) == 5
    assert min(times) >= planned_end_ns


def test_a_cancelled_request_leaves_its_turn_to_the_next() -> None:
    results, emitted, _ = prefill_all([8192, 32000, 1024], cancel=1)
    assert isinstance(results[1], asyncio.CancelledError)
    assert {index for index, _ in emitted} == {0, 2}
    gap_ns = results[2].start_mono_ns - results[0].start_mono_ns  # type: ignore[attr-defined]
    assert gap_ns == round(PROFILE.prefill_s(8192) / TIME_SCALE * 1e9)


@given(
    count=st.integers(1, 4),
    actions=st.lists(st.sampled_from(["grant", "release", "cancel"]), max_size=60),
)
def test_slots_are_conserved_and_granted_in_order(count: int, actions: list[str]) -> None:
    async def run() -> None:
        slots = Slots(count)
        order: list[int] = []
        waiting: list[asyncio.Task[None]] = []
        held = 0
        cancelled: set[int] = set()

        async def take(number: int) -> None:
            await slots.grant(number)
            order.append(number)

        for number, action in enumerate(actions):
            if action == "grant":
                waiting.append(asyncio.create_task(take(number)))
            elif action == "cancel" and waiting and not waiting[-1].done():
                waiting[-1].cancel()
                cancelled.add(number)
            elif action == "release" and held < len(order):
                held += 1
                slots.release(number)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert slots.running == min(count, len(order) - held)
            assert slots.running <= count
            if slots.queued:
                assert slots.running == count
        assert order == sorted(order)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())


def test_a_waiting_request_is_granted_at_the_planned_end() -> None:
    async def run() -> list[int]:
        slots = Slots(1)
        first = await slots.grant(100)
        second = asyncio.create_task(slots.grant(150))
        third = asyncio.create_task(slots.grant(9_000))
        await asyncio.sleep(0)
        slots.release(500)
        granted = [first, await second]
        slots.release(600)
        return [*granted, await third]

    # The third was ready after the place became free: it starts when it is ready.
    assert asyncio.run(run()) == [100, 500, 9_000]


@given(output_tokens=st.integers(1, 5000), interval=st.integers(1, 200))
def test_chunks_cover_every_token_once_and_hold_back_neither_of_the_first_two(
    output_tokens: int, interval: int
) -> None:
    ends = chunk_ends(output_tokens, interval)
    assert ends == sorted(set(ends))
    assert ends[-1] == output_tokens
    assert ends[:2] == list(range(1, min(output_tokens, 2) + 1))
    assert all(b - a <= interval for a, b in pairwise(ends[1:]))


@pytest.mark.quiet
def test_decode_keeps_its_steps_and_gives_its_slot_back() -> None:
    step_s, tokens = 0.002, 30

    async def run() -> tuple[list[tuple[int, int]], Slots]:
        got: list[tuple[int, int]] = []
        with Alarm() as alarm:
            engine = EmulatedDecode(alarm, max_batch=2, step_wall_s=step_s, interval_tokens=8)

            async def emit(total: int) -> None:
                got.append((total, time.monotonic_ns()))

            granted_ns = await engine.slots.grant(time.monotonic_ns())
            await engine.decode(granted_ns, tokens, emit)
            return [(total, at_ns - granted_ns) for total, at_ns in got], engine.slots

    got, slots = asyncio.run(run())
    assert [total for total, _ in got] == [1, 2, 10, 18, 26, 30]
    late_s = [at_ns / 1e9 - (total - 1) * step_s for total, at_ns in got]
    assert min(late_s) >= 0
    assert statistics.median(late_s) < 1e-3
    assert slots.running == 0


@pytest.mark.parametrize("fault", [RuntimeError("the client went away"), asyncio.CancelledError()])
def test_a_client_that_goes_away_frees_its_slot(fault: BaseException) -> None:
    async def run() -> int:
        with Alarm() as alarm:
            engine = EmulatedDecode(alarm, max_batch=1, step_wall_s=0.001, interval_tokens=8)

            async def emit(total: int) -> None:
                if total == 2:
                    raise fault

            with pytest.raises(type(fault)):
                await engine.decode(await engine.slots.grant(time.monotonic_ns()), 1000, emit)
            return engine.slots.running

    assert asyncio.run(run()) == 0


def test_tokens_depend_on_the_prompt_and_the_position_alone() -> None:
    one, other = prompt_of_ids(b"[1,2,3]").digest, prompt_of_ids(b"[1,2,4]").digest
    assert [token_at(one, i) for i in range(8)] == [token_at(one, i) for i in range(8)]
    assert [token_at(one, i) for i in range(8)] != [token_at(other, i) for i in range(8)]
    assert all(10_000 <= token_at(one, i) <= 99_999 for i in range(1000))


@pytest.mark.quiet
def test_the_alarm_wakes_in_order_and_never_early() -> None:
    async def run(until: Callable[[Alarm, int], Awaitable[int]]) -> list[tuple[int, int]]:
        with Alarm() as alarm:
            now_ns = time.monotonic_ns()
            dues = [now_ns + ms * 1_000_000 for ms in (30, 10, 20, 10, 5)]
            woke = await asyncio.gather(*(until(alarm, due) for due in dues))
            return list(zip(dues, woke, strict=True))

    pairs = asyncio.run(run(lambda alarm, due: alarm.until(due)))
    assert all(woke_ns >= due_ns for due_ns, woke_ns in pairs)
    assert statistics.median((woke_ns - due_ns) / 1e9 for due_ns, woke_ns in pairs) < 2e-3
