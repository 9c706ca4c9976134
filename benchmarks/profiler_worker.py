"""A worker with known costs and several instance pairs, for ``benchmarks.profiler_coverage``."""

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from harness.engine.config import EngineConfig, InstanceConfig
from harness.engine.worker import Worker
from harness.profile import Profile
from harness.profile_file import ProfileSource, load_profile
from harness.profiler.probe import Probe
from harness.profiler.target import Pair
from harness.settings import PrefixCache

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "profiles/models/prfaas-1t.json"
BYTE_SCALE = 1e6


def write_known_profile(path: Path) -> Profile:
    """Costs that bend with length, batch and context; a prefill takes 50 to 150 ms."""
    known = {"provenance": "measured", "source": "set"}
    file = json.loads((ROOT / "profiles/prfaas-1t-8xh20.json").read_text())
    file["name"] = "known"
    file["prefill"]["points"] = [
        known | {"new_tokens": new, "prefill_s": 0.05 + new / 80_000 + (new / 30_000) ** 2}
        for new in (1, 128, 1024, 8192, 131_072)
    ]
    file["decode"]["max_batch"] = 8
    file["decode"]["points"] = [
        known
        | {
            "batch": batch,
            "context_tokens": context,
            "step_s": 0.02 + 0.001 * batch + 1e-7 * batch * context,
        }
        for batch in (1, 2, 4, 8)
        for context in (1, 4096, 200_000)
    ]
    path.write_text(json.dumps(file))
    return load_profile(path)


def _config(folder: Path, profile: Path, pairs: int, noise_cv: float, seed: int) -> EngineConfig:
    return EngineConfig(
        cluster="known",
        address="127.0.0.1",
        own_network=False,
        instances=[
            InstanceConfig(f"{role}-{i}", role, "known")
            for i in range(pairs)
            for role in ("prefill", "decode")
        ],
        profiles={"known": ProfileSource(str(profile), None)},
        architecture=str(MODEL),
        kv_dtype="bf16",
        time_scale=1.0,
        byte_scale=BYTE_SCALE,
        seed=seed,
        admission="push_then_admit",
        admission_deadline_s=60.0,
        stream_interval_tokens=1,
        connections=1,
        io_threads=1,
        layerwise=True,
        checksum=False,
        chunk_bytes=65_536,
        striping="chunked",
        congestion_control=None,
        pacing_bytes_per_s=None,
        bdp_bytes=65_536,
        fabric_bytes_per_s=5e10,
        prefix_cache=PrefixCache(False, 256, 512, 2**30),
        convertible=False,
        decode_step_s=0.0,
        decode_max_batch=8,
        transfer_deadline_wall_s=60.0,
        sample_period_wall_s=1.0,
        max_connections=1024,
        max_buffer_bytes=2**30,
        secret_hex=secrets.token_hex(32),
        api_key="known",
        engines_spool=str(folder / "engines.jsonl"),
        link_spool=str(folder / "link.jsonl"),
        noise_cv=noise_cv,
        decode_steps="by_batch",
    )


@asynccontextmanager
async def known_pairs(
    folder: Path, profile: Path, pairs: int, noise_cv: float, seed: int
) -> AsyncIterator[list[Pair]]:
    """Pairs of one worker, served in this process."""
    headers = {"Authorization": "Bearer known"}
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        Worker(_config(folder, profile, pairs, noise_cv, seed)) as worker,
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
    ):

        def probe(name: str) -> Probe:
            return Probe(session, f"http://127.0.0.1:{worker.ports[name]}", "sglang", 120.0)

        yield [
            Pair(probe(f"prefill-{i}"), probe(f"decode-{i}"), None, 1.0, BYTE_SCALE, 8)
            for i in range(pairs)
        ]
