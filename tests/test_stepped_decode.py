"""Requests that step together: planned steps by batch and context, refusals, slots conserved."""

import asyncio
import time
from pathlib import Path

import pytest

from harness.core import ScenarioError
from harness.engine.noise import Noise
from harness.engine.stepped import SteppedDecode
from harness.engine.timeline import Alarm
from harness.profile import Profile
from harness.profile_file import load_profile
from tests.test_profiler import known_profile

TIME_SCALE = 20.0


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return load_profile(known_profile(tmp_path / "known.json"))


def decoded(
    profile: Profile, requests: list[tuple[int, int]], noise: Noise | None = None
) -> tuple[list[object], SteppedDecode, list[list[int]]]:
    """Decode requests of (context, output tokens) that are granted at once; gives results, the
    engine and the totals that each was told."""
    told: list[list[int]] = [[] for _ in requests]

    async def run() -> tuple[list[object], SteppedDecode]:
        with Alarm() as alarm:
            engine = SteppedDecode(alarm, profile, 4, TIME_SCALE, 1, noise or Noise())
            loop = asyncio.create_task(engine.serve())

            async def one(index: int, context: int, output: int) -> float:
                async def emit(total: int) -> None:
                    told[index].append(total)

                granted_ns = await engine.slots.grant(time.monotonic_ns())
                return await engine.decode(granted_ns, output, emit, context)

            ends: list[object] = await asyncio.gather(
                *(one(i, context, output) for i, (context, output) in enumerate(requests)),
                return_exceptions=True,
            )
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            return ends, engine

    ends, engine = asyncio.run(run())
    return ends, engine, told


def test_a_request_alone_takes_the_profiles_steps(profile: Profile) -> None:
    ends, engine, told = decoded(profile, [(512, 11)])
    expected_s = sum(profile.decode_step_s(1, 512 + total) for total in range(1, 11)) / TIME_SCALE
    assert engine.busy_s == pytest.approx(expected_s, rel=1e-9)
    assert told == [list(range(1, 12))]
    assert isinstance(ends[0], float)
    assert engine.slots.running == 0


def test_requests_that_begin_together_step_together(profile: Profile) -> None:
    _, engine, told = decoded(profile, [(512, 6), (2048, 6)])
    steps = [profile.decode_step_s(2, (512 + 2048) / 2 + total) for total in range(1, 6)]
    assert engine.busy_s == pytest.approx(2 * sum(steps) / TIME_SCALE, rel=1e-9)
    assert told == [[1, 2, 3, 4, 5, 6]] * 2


def test_one_token_takes_no_step(profile: Profile) -> None:
    _, engine, told = decoded(profile, [(512, 1)])
    assert told == [[1]]
    assert engine.busy_s == 0.0
    assert engine.slots.running == 0


def test_a_batch_without_a_cost_is_refused_and_gives_its_slots_back(profile: Profile) -> None:
    ends, engine, _ = decoded(profile, [(300_000, 5), (300_000, 5)])
    assert all(isinstance(one, ScenarioError) for one in ends)
    assert engine.slots.running == 0


def test_noise_spreads_steps_and_keeps_their_mean(profile: Profile) -> None:
    _, engine, _ = decoded(profile, [(512, 101)], Noise(0.2, 1))
    plain_s = sum(profile.decode_step_s(1, 512 + total) for total in range(1, 101)) / TIME_SCALE
    assert engine.busy_s != pytest.approx(plain_s, rel=1e-6)
    assert engine.busy_s == pytest.approx(plain_s, rel=0.08)  # 4 standard errors
