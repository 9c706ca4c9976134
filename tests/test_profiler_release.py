"""When KV is released: captured from layers, kept in a profile, replayed by the emulated engine."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness.core import ScenarioError
from harness.engine.compute import PrefillJob
from harness.engine.emulated import EmulatedPrefill
from harness.engine.timeline import Alarm
from harness.profile import ReleaseCurve
from harness.profile_file import load_profile
from harness.profiler.capture import release_curve
from tests.worker_setup import ROOT

PROFILE = ROOT / "profiles/prfaas-1t-8xh200.json"


def with_release(path: Path, *curves: dict[str, Any]) -> Path:
    file = json.loads(PROFILE.read_text())
    file["release"] = list(curves)
    path.write_text(json.dumps(file))
    return path


def curve(tokens: int, byte_shares: list[float], time_shares: list[float]) -> dict[str, Any]:
    return {
        "new_tokens": tokens,
        "byte_shares": byte_shares,
        "time_shares": time_shares,
        "samples": 5,
        "source": "set",
    }


def test_a_curve_is_of_cumulative_bytes_and_median_times() -> None:
    found = release_curve([100, 300, 600], [(0.2, 0.1, 1.2), (0.2, 0.3, 1.0), (0.4, 0.5, 1.0)], 512)
    assert found.byte_shares == [0.1, 0.4, 1.0]
    assert found.time_shares == [0.2, 0.3, 1.0]  # what woke up late is not beyond the end


def test_bytes_are_final_with_the_step_that_holds_them() -> None:
    two_chunks = ReleaseCurve(8192, (0.5, 1.0), (0.4, 1.0))
    assert [two_chunks.at(share) for share in (0.1, 0.5, 0.51, 1.0)] == [0.4, 0.4, 1.0, 1.0]


def test_a_profile_gives_the_shares_of_the_nearest_length(tmp_path: Path) -> None:
    path = with_release(
        tmp_path / "p.json",
        curve(1024, [0.5, 1.0], [0.9, 1.0]),
        curve(16384, [0.25, 1.0], [0.1, 1.0]),
    )
    profile = load_profile(path)
    layers = [10, 10, 10, 10]
    assert profile.release_shares(1500, layers) == (0.9, 0.9, 1.0, 1.0)
    assert profile.release_shares(10_000, layers) == (0.1, 1.0, 1.0, 1.0)
    assert load_profile(PROFILE).release_shares(1500, layers) == ()


@pytest.mark.parametrize(
    ("bytes_", "times", "why"),
    [
        ([0.5, 0.4, 1.0], [0.1, 0.2, 1.0], "do not ascend"),
        ([0.5, 1.0], [0.1, 0.9, 1.0], "not as many"),
        ([0.5, 1.0], [0.1, 0.9], "end at 0.9"),
    ],
)
def test_a_wrong_release_is_refused(
    tmp_path: Path, bytes_: list[float], times: list[float], why: str
) -> None:
    with pytest.raises(ScenarioError, match=why):
        load_profile(with_release(tmp_path / "p.json", curve(1024, bytes_, times)))


def test_the_emulated_engine_replays_a_release(tmp_path: Path) -> None:
    """Two chunks: the first half of the layers is final at 0.9 of the prefill, and not before."""
    path = with_release(tmp_path / "p.json", curve(1024, [0.5, 1.0], [0.9, 1.0]))
    emitted: list[tuple[int, int]] = []

    async def run() -> Any:
        with Alarm() as alarm:
            engine = EmulatedPrefill(alarm, load_profile(path), 10.0, layerwise=True)
            loop = asyncio.create_task(engine.serve())
            now_ns = time.monotonic_ns()
            job = PrefillJob(
                1024, now_ns, now_ns, 4,
                lambda piece: emitted.append((piece.layer, time.monotonic_ns())),
                lambda: None,
                shares=engine.release_shares(1024, [10] * 4),
            )  # fmt: skip
            span = await engine.prefill(job)
            loop.cancel()
            return span

    span = asyncio.run(run())
    first_ns = span.start_mono_ns + 0.9 * span.service_wall_s * 1e9
    assert [layer for layer, _ in emitted] == [0, 1, 2, 3]
    assert all(at >= first_ns for _, at in emitted)
    assert emitted[2][1] >= span.start_mono_ns + round(span.service_wall_s * 1e9)
    assert len(span.layer_final_mono_ns) == 4
