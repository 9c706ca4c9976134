"""The profiler against live engines: our worker with known costs, and servers that say it wrong."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harness.cli import main
from harness.core import EngineError, ScenarioError
from harness.profile_file import load_profile, read_profile_file
from harness.profiler.asked import Settings
from harness.profiler.campaign import Progress
from harness.profiler.display import write_page
from harness.profiler.emulation import Emulation, emulated_pair
from harness.profiler.estimate import PILOT
from harness.profiler.plan import Cell
from harness.profiler.probe import Probe, SurfaceName
from harness.profiler.session import Measured, measure
from harness.profiler.target import Single
from harness.scenario import Scenario, load_scenario
from tests.profiler_server import LIMIT_TOKENS, KnownServer, serving
from tests.worker_setup import ARCHITECTURE, ROOT

CASE_STUDY = ROOT / "scenarios/paper-case-study.toml"


def known_profile(path: Path) -> Path:
    """Costs that bend with length, prefix, batch and context."""
    profile = json.loads((ROOT / "profiles/prfaas-1t-8xh20.json").read_text())
    known = {"provenance": "measured", "source": "set"}
    profile["prefill"]["points"] = [
        known
        | {
            "new_tokens": new,
            "cached_tokens": cached,
            "prefill_s": 0.2 + new / 20_000 * (1 + cached / 40_000),
        }
        for cached in (0, 8192)
        for new in (1, 512, 2048, 131_072)
    ]
    profile["decode"] |= {"max_batch": 4}
    profile["decode"]["points"] = [
        known
        | {
            "batch": batch,
            "context_tokens": context,
            "step_s": 0.02 + 0.001 * batch + 1e-7 * batch * context,
        }
        for batch in (1, 2, 4)
        for context in (1, 4096, 200_000)
    ]
    path.write_text(json.dumps(profile))
    return path


def known_scenario(tmp_path: Path, *more: str) -> Scenario:
    path = known_profile(tmp_path / "known.json")
    return load_scenario(CASE_STUDY, [f'hardware.h20.profile="{path}"', "scale.time=20", *more])


def settings(out: Path, **changes: Any) -> Settings:
    asked = Settings(
        out=out,
        architecture=ARCHITECTURE,
        hardware="8xH20",
        gpus=8,
        bound=0.02,
        budget_s=60.0,
        seed=1,
        lengths=(512, 2048),
        batches=(1, 4),
        contexts=(512, 4096),
        limit_tokens=65_536,
        noise_cv=0.0,
        is_emulated=True,
    )
    return replace(asked, **changes)


def silent(_cell: Cell | None, _done: int, _left: int) -> None:
    """Nobody watches."""


def measured_emulated(scenario: Scenario, asked: Settings, noise_cv: float = 0.0) -> Measured:
    given = Emulation(scenario, "h20", noise_cv, asked.seed, report_layers=asked.wants_capture)

    async def run() -> Measured:
        async with emulated_pair(given, 60.0) as pair:
            return await measure(pair, asked, silent)

    return asyncio.run(run())


@pytest.mark.slow
def test_an_emulated_engine_without_noise_is_read_back(tmp_path: Path) -> None:
    scenario = known_scenario(tmp_path, "prefix_cache.enabled=true", 'prefix_cache.memory="64GiB"')
    truth = scenario.hardware["h20"].profile
    asked = settings(tmp_path, cached=(8192,), wants_capture=True, budget_s=20.0)
    got = measured_emulated(scenario, asked)
    profile = load_profile(got.path)
    assert {(p.new_tokens, p.cached_tokens) for p in profile.prefill_points} == {
        (new, cached) for new in (512, 2048) for cached in (0, 8192)
    }
    for point in profile.prefill_points:
        expected_s = truth.prefill_s(point.new_tokens, point.cached_tokens)
        assert point.prefill_s == pytest.approx(expected_s, rel=1e-6)
    # A stalled machine shows in what the client sees of decode; means of many steps stay near.
    for step in profile.decode_points:
        expected_s = truth.decode_step_s(step.batch, step.context_tokens)
        assert step.step_s == pytest.approx(expected_s, rel=0.25)
    check_measurement(got)
    check_release(got)
    assert write_page(got.file, got.path.with_suffix(".html")).stat().st_size > 1000


def check_measurement(got: Measured) -> None:
    measurement = got.file.measurement
    assert measurement is not None
    assert measurement.prefill_from == "inside"
    for row in measurement.overhead:
        assert row.outside_s - row.inside_s == pytest.approx(sum(row.parts_s.values()), abs=1e-9)
        assert row.outside_s > row.inside_s
    # Nothing moved otherwise than the geometry has it, resident prefixes considered.
    assert not [note for note in measurement.notes if "KV bytes moved" in note]
    moved = {row.tokens: row for row in measurement.kv}
    assert moved[2048].moved_bytes == pytest.approx(moved[2048].geometry_bytes, rel=1e-3)
    assert moved[2048].phi_bytes_per_s > 0
    assert measurement.gpu is None
    assert measurement.gpu_absent == "the engine is emulated"


def check_release(got: Measured) -> None:
    """Our engine releases layers evenly: the time share of a layer is its place."""
    layers = len(ARCHITECTURE.layers)
    assert got.file.release
    for curve in got.file.release:
        assert len(curve.time_shares) == layers
        assert curve.time_shares[layers // 2] == pytest.approx(0.5, abs=0.25)


class StoppedError(Exception):
    """Somebody stops the session in the middle."""


def test_an_interrupt_keeps_the_samples_and_the_same_command_goes_on(tmp_path: Path) -> None:
    asked = served(tmp_path)

    def stop(_cell: Cell | None, done: int, _left: int) -> None:
        if done == 7:
            raise StoppedError

    with pytest.raises(StoppedError):
        measured_server(KnownServer(), asked, progress=stop)
    # No time at all: what is there is written, and what is lacking is said.
    early, server = measured_server(KnownServer(), replace(asked, budget_s=0.0))
    assert server.requests == 1  # whether the engine tells its times
    assert not early.is_whole
    assert early.file.measurement is not None
    reasons = [row.reason for row in early.file.measurement.missing]
    assert all("the budget ended after" in reason for reason in reasons)
    assert sum(p.samples or 0 for p in early.file.prefill.points) == 7
    whole, _ = measured_server(KnownServer(), replace(asked, bound=0.9))
    assert whole.is_whole
    assert whole.file.measurement is not None
    assert whole.file.measurement.sessions == 2
    assert [p.samples for p in whole.file.prefill.points] == [PILOT, PILOT]
    with pytest.raises(ScenarioError, match=r"version was '0\.5\.23' and is '0\.5\.24'"):
        measured_server(KnownServer(version="0.5.24"), asked)


def measured_server(
    server: KnownServer,
    asked: Settings,
    kind: SurfaceName = "sglang",
    progress: Progress = silent,
) -> tuple[Measured, KnownServer]:
    async def run() -> Measured:
        async with serving(server) as url, aiohttp.ClientSession() as session:
            return await measure(Single(Probe(session, url, kind, 60.0), kind), asked, progress)

    return asyncio.run(run()), server


def served(out: Path, **changes: Any) -> Settings:
    """Prefill alone, so loosely that the pilot is enough on any machine."""
    own: dict[str, Any] = {"is_emulated": False, "limit_tokens": None, "noise_cv": None}
    own |= {"lengths": (256, 1024), "wants_decode": False, "budget_s": 300.0, "bound": 0.9}
    return settings(out, **own | changes)


def test_a_batch_is_measured_while_all_of_it_runs(tmp_path: Path) -> None:
    """Four requests that are prefilled one after another, 2 ms a step."""
    asked = served(tmp_path, wants_decode=True, batches=(1, 4), contexts=(128, 256))
    got, _ = measured_server(KnownServer(), asked)
    assert got.file.decode is not None
    assert got.file.decode.max_batch == 4
    for point in got.file.decode.points:
        assert point.step_s > 0.0019
        assert point.step_quantiles_s is not None
        assert point.step_quantiles_s.p5 <= point.step_quantiles_s.p99
    assert got.file.measurement is not None
    assert [row.max_batch for row in got.file.measurement.slo_batches] == []


def test_a_server_of_sglangs_surface_is_measured_from_inside(tmp_path: Path) -> None:
    got, _ = measured_server(KnownServer(), served(tmp_path))
    assert got.path.name == "8xh20-prfaas-1t-sglang.json"
    file = read_profile_file(got.path)
    assert (file.engine.name, file.engine.version) == ("sglang", "0.5.23")
    measurement = file.measurement
    assert measurement is not None
    assert measurement.prefill_from == "inside"
    assert measurement.engine_flags["context_length"] == LIMIT_TOKENS
    assert "random_seed" not in measurement.engine_flags
    assert set(measurement.overhead[0].parts_s) == {"queue", "server", "http"}
    for row in measurement.overhead:
        assert row.inside_s >= KnownServer().prefill_s(row.new_tokens)
    assert [row.moved_bytes for row in measurement.kv] == [None, None]


def test_a_server_that_tells_no_times_is_measured_from_outside(tmp_path: Path) -> None:
    got, _ = measured_server(KnownServer(timed=False), served(tmp_path))
    assert got.file.measurement is not None
    assert got.file.measurement.prefill_from == "outside"
    assert got.file.measurement.overhead == []


def test_an_openai_server_is_measured_from_outside(tmp_path: Path) -> None:
    got, _ = measured_server(KnownServer(), served(tmp_path), "openai")
    assert got.file.engine.name == "openai-compatible"
    assert got.file.measurement is not None
    assert got.file.measurement.prefill_from == "outside"
    assert got.file.prefill.points[0].prefill_s >= KnownServer().prefill_s(256)


def test_a_fresh_prompt_that_hit_a_cache_is_not_used(tmp_path: Path) -> None:
    server = KnownServer(told_cached=lambda tokens: 64 if tokens == 1024 else 0)
    with pytest.raises(EngineError, match="64 cached tokens instead of 0"):
        measured_server(server, served(tmp_path))


def test_a_prompt_of_another_length_is_not_used(tmp_path: Path) -> None:
    server = KnownServer(told_prompt=lambda tokens: tokens + 1)
    with pytest.raises(EngineError, match="257 prompt tokens instead of 256"):
        measured_server(server, served(tmp_path))


def test_a_length_that_the_engine_refuses_is_given_up_with_its_words(tmp_path: Path) -> None:
    asked = replace(served(tmp_path), lengths=(256, 1024, 2048))
    got, _ = measured_server(KnownServer(fails_above=1500), asked)
    assert {p.new_tokens for p in got.file.prefill.points} == {256, 1024}
    assert got.file.measurement is not None
    reasons = {row.point: row.reason for row in got.file.measurement.missing}
    assert "answered 400" in reasons["prefill 2,048"]


def test_a_profile_without_its_samples_is_not_replaced(tmp_path: Path) -> None:
    got, _ = measured_server(KnownServer(), served(tmp_path))
    got.path.with_name("8xh20-prfaas-1t-sglang.samples.parquet").unlink()
    with pytest.raises(ScenarioError, match="its samples are not beside it"):
        measured_server(KnownServer(), served(tmp_path))


def prfaas(*arguments: str) -> int:
    return main(["profile", *arguments])


def test_the_command_prints_one_document_and_writes_profile_samples_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = known_profile(tmp_path / "known.json")
    status = prfaas(
        "--engine", "emulated", "--scenario", str(CASE_STUDY), "--hardware", "h20",
        "--set", f'hardware.h20.profile="{path}"', "--set", "scale.time=20", "--out", str(tmp_path),
        "--lengths", "512,2048", "--no-decode", "--budget", "5min", "--json",
    )  # fmt: skip
    said = capsys.readouterr()
    assert status == 0, said.err
    document = json.loads(said.out)
    assert document["is_whole"] is True
    assert document["measurement"]["noise_cv"] == 0.0
    assert document["measurement"]["interference"][0]["ratio"] == pytest.approx(1.0, rel=1e-6)
    written = {one.name for one in tmp_path.iterdir()}
    stem = "8xh20-prfaas-1t-emulated"
    assert {f"{stem}.json", f"{stem}.html", f"{stem}.samples.parquet"} <= written
    assert "beside KV traffic" in said.err
    assert prfaas("show", str(tmp_path / f"{stem}.json"), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["prefill"]["points_by_provenance"] == {"measured": 2}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "Say what is to be measured"),
        (("--url", "http://127.0.0.1:1", "--engine", "emulated"), "Say what is to be measured"),
        (("--engine", "emulated"), "needs --scenario"),
        (("--decode-url", "http://127.0.0.1:1"), "--prefill-url and --decode-url"),
        (("--url", "http://127.0.0.1:1"), "--model-architecture is needed"),
        (("--engine", "emulated", "--scenario", "S", "--interval", "0%"), "between 0 and 100%"),
        (("--engine", "emulated", "--scenario", "S", "--budget", "20"), "--budget"),
        (("--engine", "emulated", "--scenario", "S", "--hardware", "b200"), "hardware is h200"),
    ],
)
def test_wrong_usage_is_named(
    arguments: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(CASE_STUDY) if one == "S" else one for one in arguments]
    assert prfaas(*given, "--out", str(tmp_path)) == 2
    assert why in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = prfaas(
        "--url", "http://127.0.0.1:9", "--model-architecture",
        str(ROOT / "profiles/models/prfaas-1t.json"), "--hardware", "x", "--gpus", "1",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert status == 3
    assert "http://127.0.0.1:9 is not reachable" in capsys.readouterr().err
