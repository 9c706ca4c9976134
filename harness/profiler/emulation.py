"""An emulated engine to profile: a worker process with one prefill and one decode instance.

Its costs are those of a scenario's hardware, its noise is stated, so what the profiler should find
is known. The decode instance steps by batch (``engine.stepped``), as a real engine does.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

from harness.core import EngineError
from harness.engine.config import EngineConfig, InstanceConfig
from harness.profile_file import ProfileSource
from harness.profiler.probe import Probe, open_session
from harness.profiler.target import Pair
from harness.scenario import Scenario
from harness.testbed.children import Children

READY_TIMEOUT_S = 30.0
LOOPBACK = "127.0.0.1"
_MAX_BUFFER_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Emulation:
    """What is emulated: a hardware of a scenario, and how noisy its compute is."""

    scenario: Scenario
    hardware: str
    noise_cv: float
    seed: int
    report_layers: bool = False


@asynccontextmanager
async def emulated_pair(given: Emulation, timeout_wall_s: float) -> AsyncIterator[Pair]:
    """A pair in a worker process of its own, gone at the end."""
    scale, key = given.scenario.scale, secrets.token_hex(16)
    with TemporaryDirectory(prefix="prfaas-profile-") as folder, Children() as children:
        log = Path(folder) / "worker.log"
        worker = children.start("worker", Popen, ["-m", "harness.engine"], log, EngineError, 2)
        worker.tell(_config(given, key, Path(folder)))
        ready = await asyncio.to_thread(children.wait_for, worker, "ready", READY_TIMEOUT_S)
        async with open_session({"Authorization": f"Bearer {key}"}) as session:
            prefill, decode = (
                Probe(
                    session, f"http://{LOOPBACK}:{ready['ports'][name]}", "sglang", timeout_wall_s
                )
                for name in ("prefill", "decode")
            )
            slots = given.scenario.hardware[given.hardware].profile.decode_max_batch
            yield Pair(prefill, decode, None, scale.time, scale.bytes, slots)


def _config(given: Emulation, key: str, folder: Path) -> EngineConfig:
    scenario, scale = given.scenario, given.scenario.scale
    hardware = scenario.hardware[given.hardware]
    profile = hardware.profile
    to_wire = scale.time / scale.bytes
    return EngineConfig(
        cluster="profiled",
        address=LOOPBACK,
        own_network=False,
        instances=[
            InstanceConfig("prefill", "prefill", given.hardware),
            InstanceConfig("decode", "decode", given.hardware),
        ],
        profiles={
            given.hardware: ProfileSource(str(profile.path.absolute()), hardware.extrapolate)
        },
        architecture=str(scenario.model.architecture.path.absolute()),
        kv_dtype=scenario.model.architecture.kv_dtype,
        time_scale=scale.time,
        byte_scale=scale.bytes,
        seed=given.seed,
        admission=scenario.scheduling.admission,
        admission_deadline_s=scenario.scheduling.admission_deadline_s,
        stream_interval_tokens=1,
        **_transport(scenario),
        pacing_bytes_per_s=scenario.fabric.rate_bytes_per_s * to_wire,
        bdp_bytes=1 << 20,
        fabric_bytes_per_s=scenario.fabric.rate_bytes_per_s,
        prefix_cache=scenario.prefix_cache,
        convertible=False,
        decode_step_s=0.0,  # steps are by batch
        decode_max_batch=profile.decode_max_batch or 1,
        transfer_deadline_wall_s=60.0,
        sample_period_wall_s=1.0,
        max_connections=1024,
        max_buffer_bytes=_MAX_BUFFER_BYTES,
        secret_hex=secrets.token_hex(32),
        api_key=key,
        engines_spool=str(folder / "engines.jsonl"),
        link_spool=str(folder / "link.jsonl"),
        noise_cv=given.noise_cv,
        decode_steps="by_batch",
        report_layers=given.report_layers,
    )


def _transport(scenario: Scenario) -> dict[str, Any]:
    """How KV is sent, as the scenario has it."""
    transport = scenario.transport
    names = ("connections", "io_threads", "layerwise", "checksum", "chunk_bytes", "striping")
    return {name: getattr(transport, name) for name in (*names, "congestion_control")}
