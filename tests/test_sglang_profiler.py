"""The profiler on a real SGLang server without a GPU: outside and inside, and what lies between."""

import asyncio
import subprocess
from pathlib import Path

import aiohttp
import pytest
from sglang_cpu.models import write_model

from harness.architecture import load_architecture
from harness.core import EngineError
from harness.engine.sglang.config import LauncherConfig, ServerConfig
from harness.profiler.asked import Settings
from harness.profiler.plan import Cell
from harness.profiler.probe import Probe
from harness.profiler.session import Measured, measure
from harness.profiler.target import Single
from harness.testbed.children import Children

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
DENSE = ROOT / "profiles/tiny/sglang-tiny-dense.json"
READY_S, KEY = 900.0, "key-of-the-test"
LENGTHS = (128, 1024)


def silent(_cell: Cell | None, _done: int, _left: int) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("profiled")
    config = LauncherConfig(
        cluster="test",
        address="127.0.0.1",
        log_directory=str(folder),
        api_key=KEY,
        ready_timeout_s=READY_S,
        servers=[
            ServerConfig(
                "alone",
                "both",
                extra_flags=["--disable-radix-cache", "--max-running-requests", "2"],
            )
        ],
        model_path=str(write_model("dense", folder)),
        device="cpu",
        load_format="dummy",
        mem_fraction=0.3,
        max_total_tokens=20_000,
    )
    asked = Settings(
        out=folder,
        architecture=load_architecture(DENSE),
        hardware="cpu",
        gpus=1,
        bound=0.9,  # the pilot is enough: how noisy this machine is, is not what is tested
        budget_s=600.0,
        seed=1,
        lengths=LENGTHS,
        batches=(1, 2),
        contexts=(128, 512),
    )

    async def run(port: int) -> Measured:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            probe = Probe(session, f"http://127.0.0.1:{port}", "sglang", 120.0)
            return await measure(Single(probe, "sglang"), asked, silent)

    with Children() as children:
        child = children.start(
            "alone", subprocess.Popen, ["-m", "harness.engine.sglang"], folder / "alone.log",
            EngineError,
        )  # fmt: skip
        child.tell(config)
        port = children.wait_for(child, "ready", READY_S)["ports"]["alone"]
        return asyncio.run(run(port))


def test_outside_and_inside_differ_by_what_the_server_explains(measured: Measured) -> None:
    measurement = measured.file.measurement
    assert measurement is not None
    assert measurement.prefill_from == "inside"
    assert {row.new_tokens for row in measurement.overhead} == set(LENGTHS)
    for row in measurement.overhead:
        assert row.outside_s > row.inside_s > 0
        assert set(row.parts_s) == {"queue", "server", "http"}
        assert sum(row.parts_s.values()) == pytest.approx(row.outside_s - row.inside_s, abs=1e-9)
        # The parts are durations by two clocks; none is negative but for their rounding.
        assert min(row.parts_s.values()) > -1e-3


def test_every_point_was_measured_and_no_prompt_came_from_a_cache(measured: Measured) -> None:
    assert measured.is_whole, measured.file.measurement
    used = [one for one in measured.findings.samples if one.kind == "prefill"]
    assert used
    assert all(one.told_cached_tokens == 0 for one in used)
    assert measured.file.decode is not None
    assert len(measured.file.decode.points) == 4


def test_the_provenance_names_engine_flags_and_model(measured: Measured) -> None:
    file, measurement = measured.file, measured.file.measurement
    assert measurement is not None
    assert file.engine.name == "sglang"
    assert file.engine.version[0].isdigit()
    assert measurement.engine_flags["disable_radix_cache"] is True
    assert measurement.config_sha256 is not None
    assert measurement.gpu is None
    assert measurement.gpu_absent
