"""A reference engine to profile: a worker process that computes, a prefill and a decode instance.

With ``ranks`` it is what one of so many tensor-parallel ranks holds: its heads, experts and slice
of the dense networks, and its KV. Times of a rank hold no communication, and a profile says so.

KV export is timed apart, without a model: a slot's layers go by the engine's own way (``outbox``)
to memory that a transport reads, one after another, and

    export rate = S_kv(tokens) / median time of all layers                              [bytes / s]
"""

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory

from harness.architecture import Architecture, architecture_text, load_architecture
from harness.core import EngineError
from harness.engine.config import EngineConfig, InstanceConfig
from harness.engine.reference.choice import chosen_model, rank_shapes
from harness.engine.reference.config import ModelConfig
from harness.engine_settings import Reference
from harness.profiler.probe import Probe, open_session
from harness.profiler.target import Pair
from harness.settings import PrefixCache
from harness.testbed.children import Children

LOOPBACK = "127.0.0.1"
CONNECTIONS, CHUNK_BYTES = 4, 1 << 20
BLOCK_TOKENS, CACHED_PROMPTS = 64, 6
_MAX_BUFFER_BYTES = 2**34
NO_COMMUNICATION = (
    "One of {ranks} tensor-parallel ranks on one device: what ranks say to each other is not in "
    "its times."
)


@dataclass(frozen=True, slots=True)
class Computing:
    """What is profiled: ``architecture`` is the whole model's, ``settings`` what computes it.
    ``keeps_prefixes``: with a cache, whose copies are then part of every prefill's time."""

    architecture: Architecture
    settings: Reference
    slots: int
    seed: int
    keeps_prefixes: bool = False

    @property
    def context_tokens(self) -> int:
        assert self.settings.context_tokens is not None, "a profile says how far it reaches"
        return self.settings.context_tokens


def rank_of(given: Computing, folder: Path) -> Computing:
    """The same with a rank's own architecture, whose file is written to ``folder``."""
    whole, ranks = given.architecture, given.settings.ranks
    if ranks == 1:
        return given
    name = f"{whole.name}-rank-of-{ranks}"
    path = folder / f"{name}.json"
    shapes = rank_shapes(given.settings, whole)
    path.write_text(
        architecture_text(
            replace(whole, attention=shapes), name, NO_COMMUNICATION.format(ranks=ranks)
        )
    )
    settings = replace(given.settings, whole=str(whole.path.absolute()))
    return replace(given, architecture=load_architecture(path, whole.kv_dtype), settings=settings)


def model_of(given: Computing) -> ModelConfig:
    """As its worker computes it."""
    return chosen_model(given.settings, given.architecture)


def export_note(given: Computing) -> str:
    """The export's rate, at the longest prompt."""
    from harness.engine.reference.export_rate import export_rate  # torch is no part of the base

    config, tokens = model_of(given), given.context_tokens
    rate = export_rate(config, given.architecture.kv_dtype, given.settings.device, tokens)
    how = (
        "by pinned memory"
        if given.settings.device == "cuda"
        else "growing KV is a view of the cache, windows and states are copied"
    )
    return (
        f"KV export of {tokens:,} tokens: {rate.nbytes:,} bytes in {1e3 * rate.median_s:.3g} ms "
        f"({rate.bytes_per_s / 1e9:.3g} GB/s, {1e3 * rate.least_s:.3g} to {1e3 * rate.most_s:.3g} "
        f"ms), {how}"
    )


@asynccontextmanager
async def reference_pair(given: Computing, timeout_s: float) -> AsyncIterator[Pair]:
    """A pair in a worker process of its own, gone at the end."""
    key = secrets.token_hex(16)
    with TemporaryDirectory(prefix="prfaas-profile-") as name, Children() as children:
        folder = Path(name)
        log = folder / "worker.log"
        worker = children.start("worker", Popen, ["-m", "harness.engine"], log, EngineError)
        worker.tell(_config(given, key, folder))
        patience_s = given.settings.ready_timeout_s
        ready = await asyncio.to_thread(children.wait_for, worker, "ready", patience_s)
        async with open_session({"Authorization": f"Bearer {key}"}) as session:
            prefill, decode = (
                Probe(session, f"http://{LOOPBACK}:{ready['ports'][one]}", "sglang", timeout_s)
                for one in ("prefill", "decode")
            )
            yield Pair(prefill, decode, max_running=given.slots)


def _config(given: Computing, key: str, folder: Path) -> EngineConfig:
    return EngineConfig(
        cluster="profiled",
        address=LOOPBACK,
        own_network=False,
        instances=[
            InstanceConfig("prefill", "prefill", "profiled"),
            InstanceConfig("decode", "decode", "profiled"),
        ],
        profiles={},  # nothing is planned
        architecture=str(given.architecture.path.absolute()),
        kv_dtype=given.architecture.kv_dtype,
        time_scale=1.0,
        byte_scale=1.0,
        seed=given.seed,
        admission="push_then_admit",
        admission_deadline_s=given.settings.ready_timeout_s,
        stream_interval_tokens=1,
        connections=CONNECTIONS,
        io_threads=1,
        layerwise=True,
        checksum=True,
        chunk_bytes=CHUNK_BYTES,
        striping="chunked",
        congestion_control=None,
        pacing_bytes_per_s=None,
        bdp_bytes=1 << 20,
        fabric_bytes_per_s=1e12,
        prefix_cache=_prefix_cache(given),
        convertible=False,
        decode_step_s=0.0,
        decode_max_batch=given.slots,
        transfer_deadline_wall_s=given.settings.ready_timeout_s,
        sample_period_wall_s=1.0,
        max_connections=1024,
        max_buffer_bytes=_MAX_BUFFER_BYTES,
        secret_hex=secrets.token_hex(32),
        api_key=key,
        engines_spool=str(folder / "engines.jsonl"),
        link_spool=str(folder / "link.jsonl"),
        report_layers=True,
        reference=given.settings,
        context_tokens=given.context_tokens,
    )


def _prefix_cache(given: Computing) -> PrefixCache:
    """States where chunks end anyway, in blocks that divide a chunk; room for a few prompts."""
    chunk_tokens = given.settings.chunk_tokens
    block_tokens = math.gcd(chunk_tokens, BLOCK_TOKENS)
    memory_bytes = CACHED_PROMPTS * given.architecture.kv_bytes(given.context_tokens)
    return PrefixCache(given.keeps_prefixes, block_tokens, chunk_tokens, memory_bytes)


def describe(given: Computing) -> dict[str, str | int | None]:
    """What samples that are put together have in common, besides what the worker tells."""
    settings = given.settings
    return {
        "compute": None if settings.compute is None else Path(settings.compute).name,
        "ranks": settings.ranks,
        "keeps_prefixes": given.keeps_prefixes,
        "layers": json.dumps([layer.kind for layer in given.architecture.layers]),
    }
