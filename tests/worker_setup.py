"""Workers in this process, their HTTP servers on loopback, and both halves of a request by hand."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from harness.architecture import load_architecture
from harness.engine.config import EngineConfig, InstanceConfig
from harness.engine.worker import Worker
from harness.profile_file import ProfileSource
from harness.settings import PrefixCache
from harness.surface.generate import GenerateChunk, decode_chunk
from harness.surface.sse import SseParser

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "profiles/models/prfaas-1t.json"
ARCHITECTURE = load_architecture(MODEL)
BLOCK_TOKENS, CHECKPOINT_TOKENS = 256, 512
KEY, SECRET = "key", "00" * 32
BYTE_SCALE = 1e4


def engine_config(cluster: str, instances: str, root: Path, **changes: Any) -> EngineConfig:
    """A worker with ``instances`` such as "p0 p1 d0", at time scale 50 and with a prefix cache."""
    config = EngineConfig(
        cluster=cluster,
        address="127.0.0.1",
        own_network=False,
        instances=[
            InstanceConfig(f"{cluster}-{name}", "prefill" if name[0] == "p" else "decode", "h200")
            for name in instances.split()
        ],
        profiles={"h200": ProfileSource(str(ROOT / "profiles/prfaas-1t-8xh200.json"), "end_slope")},
        architecture=str(MODEL),
        kv_dtype="bf16",
        time_scale=50.0,
        byte_scale=BYTE_SCALE,
        seed=1,
        admission="push_then_admit",
        admission_deadline_s=500.0,
        stream_interval_tokens=64,
        connections=1,
        io_threads=1,
        layerwise=True,
        checksum=True,
        chunk_bytes=65536,
        striping="chunked",
        congestion_control=None,
        pacing_bytes_per_s=None,
        bdp_bytes=65536,
        fabric_bytes_per_s=5e10,
        prefix_cache=PrefixCache(True, BLOCK_TOKENS, CHECKPOINT_TOKENS, 2**37),
        convertible=False,
        decode_step_s=0.01,
        decode_max_batch=4,
        transfer_deadline_wall_s=20.0,
        sample_period_wall_s=0.05,
        max_connections=1024,
        max_buffer_bytes=2**30,
        secret_hex=SECRET,
        api_key=KEY,
        engines_spool=str(root / f"{cluster}-engines.jsonl"),
        link_spool=str(root / f"{cluster}-link.jsonl"),
    )
    return msgspec.structs.replace(config, **changes)


@dataclass
class Served:
    """What both halves of a request ended with."""

    prefill: GenerateChunk
    decode: GenerateChunk

    @property
    def spans(self) -> tuple[Any, Any]:
        assert self.prefill.meta_info.prfaas is not None
        assert self.decode.meta_info.prfaas is not None
        return self.prefill.meta_info.prfaas.prefill, self.decode.meta_info.prfaas.decode


class Peer:
    """A client of workers that run in this process."""

    def __init__(self, workers: dict[str, Worker], session: aiohttp.ClientSession) -> None:
        self.workers = workers
        self.session = session

    def address(self, instance: str) -> str:
        worker = self.workers[instance.partition("-")[0]]
        return f"127.0.0.1:{worker.ports[instance]}"

    def instance(self, name: str) -> Any:
        """The live instance, as its process knows it."""
        worker = self.workers[name.partition("-")[0]]
        return next(one for one in worker._instances if one.name == name)

    def body(self, ids: list[int], prefill: str, output_tokens: int) -> dict[str, Any]:
        host, _, port = self.address(prefill).partition(":")
        return {
            "input_ids": ids,
            "stream": True,
            "sampling_params": {"max_new_tokens": output_tokens},
            "bootstrap_host": host,
            "bootstrap_port": int(port),
            "bootstrap_room": secrets.randbits(60),
        }

    async def serve(
        self, ids: list[int], prefill: str, decode: str, output_tokens: int = 2
    ) -> Served:
        body = self.body(ids, prefill, output_tokens)
        async with asyncio.TaskGroup() as both:
            first = both.create_task(self.half(prefill, body))
            second = both.create_task(self.half(decode, body))
        return Served(first.result(), second.result())

    async def half(self, instance: str, body: dict[str, Any]) -> GenerateChunk:
        """The last chunk of one half; AssertionError with what the worker said of a failure."""
        last = None
        async for chunk in self.chunks(instance, body):
            last = chunk
        assert last is not None
        return last

    async def chunks(self, instance: str, body: dict[str, Any]) -> AsyncIterator[GenerateChunk]:
        async with self.session.post(self.url(instance, "/generate"), json=body) as answer:
            assert answer.status == 200, await answer.text()
            parser = SseParser()
            async for piece in answer.content.iter_any():
                for event in parser.feed(piece):
                    if event.data != "[DONE]":
                        chunk = decode_chunk(event.data)
                        assert chunk.error is None, chunk.error
                        yield chunk

    def url(self, instance: str, path: str) -> str:
        return f"http://{self.address(instance)}{path}"

    async def ask(self, method: str, instance: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.request(method, self.url(instance, path), json=body) as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, msgspec.json.decode(text) if is_json else text


@asynccontextmanager
async def workers(*configs: EngineConfig) -> AsyncIterator[Peer]:
    """Workers of these configurations; each instance is reached at its own address."""
    opened: dict[str, Worker] = {}
    async with (
        AsyncExitStack() as stack,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
    ):
        for config in configs:
            opened[config.cluster] = await stack.enter_async_context(Worker(config))
        yield Peer(opened, session)
