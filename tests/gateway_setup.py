"""A gateway before workers, all in this process: requests, and what became of them."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from live import ROOT, flat_profile, scenario
from worker_setup import ARCHITECTURE, KEY, MODEL, engine_config

from harness.core import EngineError
from harness.engine.config import EngineConfig
from harness.engine.worker import Worker
from harness.gateway.config import GatewayConfig, WorkerAddress
from harness.gateway.driver import Driver
from harness.gateway.gateway import Gateway
from harness.profile_file import ProfileSource
from harness.scheduling.config import policy_of
from harness.settings import PrefixCache
from harness.testbed.children import Child, Children

TIME_SCALE = 10.0
#: Costs by length, by which a cached prefix is worth something.
REAL_COSTS = {
    "profiles": {"h200": ProfileSource(str(ROOT / "profiles/prfaas-1t-8xh200.json"), "end_slope")}
}
#: Scenario seconds.
PREFILL_S, STEP_S = 4.0, 0.1
CACHE = PrefixCache(True, 256, 512, 2**37)
OFF = replace(CACHE, enabled=False)


@dataclass
class Setup:
    """An open gateway and its workers by cluster."""

    gateway: Gateway
    workers: dict[str, Worker]
    processes: dict[str, Child]
    session: aiohttp.ClientSession
    root: Path

    @property
    def driver(self) -> Driver:
        return self.gateway.driver

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.gateway.port}{path}"

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any, Any]:
        """Status, the answer and its headers."""
        async with self.session.request(method, self.url(path), json=body) as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(text) if is_json else text, answer.headers

    async def generate(self, ids: list[int], output_tokens: int = 2, rid: str | None = None) -> Any:
        """Status, answer and headers of a whole answer."""
        return await self.ask("POST", "/generate", body_of(ids, output_tokens, rid))

    async def kill(self, cluster: str) -> None:
        """No farewell."""
        process = self.processes[cluster].process
        process.kill()
        await asyncio.to_thread(process.wait)

    async def state(self) -> Any:
        return (await self.ask("GET", "/state"))[1]

    async def until(self, condition: Callable[[Any], bool], timeout_s: float = 10.0) -> Any:
        """Wait until ``/state`` is so."""
        async with asyncio.timeout(timeout_s):
            while not condition(state := await self.state()):
                await asyncio.sleep(0.005)
        return state

    async def idle(self) -> None:
        """Wait until nothing is left anywhere of any request: queues, slots and blocks."""
        await self.until(lambda state: not state["in_flight"])
        assert not any(self.driver.scheduler.queue_lengths().values())
        for worker in self.workers.values():
            for one in worker._instances:
                async with asyncio.timeout(10):
                    while one.end.open_requests or one.end.queued or one.end.running:
                        await asyncio.sleep(0.005)
                    while one.memory is not None and one.memory.pool.busy:
                        await asyncio.sleep(0.005)

    def rows(self, spool: str) -> list[dict[str, Any]]:
        lines = (self.root / f"{spool}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def row(self, rid: str) -> dict[str, Any]:
        return next(row for row in self.rows("gateway") if row["rid"] == rid)


def body_of(ids: list[int], output_tokens: int, rid: str | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"max_new_tokens": output_tokens}}
    return body if rid is None else body | {"rid": rid}


def worker_configs(
    root: Path, cache: PrefixCache, clusters: dict[str, str], **changes: Any
) -> list[EngineConfig]:
    """A worker a cluster, such as ``{"pd": "p0 d0"}``, with flat costs
    unless ``profiles`` are among ``changes``."""
    profile = flat_profile(root / "flat.json", PREFILL_S, STEP_S, 4)
    flat = {
        "profiles": {"h200": ProfileSource(str(profile), None)},
        "decode_step_s": STEP_S,
    }
    return [
        engine_config(
            cluster,
            instances,
            root,
            **(flat | {"time_scale": TIME_SCALE, "prefix_cache": cache} | changes),
        )
        for cluster, instances in clusters.items()
    ]


def gateway_config(
    root: Path,
    configs: list[EngineConfig],
    ports: dict[str, int],
    overrides: tuple[str, ...],
    changes: dict[str, Any],
) -> GatewayConfig:
    addresses = [
        WorkerAddress(
            one.name,
            config.cluster,
            one.role,
            one.hardware,
            "127.0.0.1",
            ports[one.name],
        )
        for config in configs
        for one in config.instances
    ]
    given = scenario(*overrides)
    policy = replace(
        policy_of(given, given.deployments["prfaas_pd"]),
        instances=tuple(address.instance() for address in addresses),
        decode_step_s=STEP_S,
        decode_max_batch=4,
        prefix_cache=configs[0].prefix_cache,
        link_silence_s=1.5 * TIME_SCALE,
    )
    config = GatewayConfig(
        host="127.0.0.1",
        port=0,
        model="m",
        workers=addresses,
        profiles=configs[0].profiles,
        architecture=str(MODEL),
        kv_dtype=ARCHITECTURE.kv_dtype,
        policy=policy,
        time_scale=TIME_SCALE,
        byte_scale=configs[0].byte_scale,
        request_timeout_wall_s=20.0,
        api_key=None,
        worker_key=KEY,
        gateway_spool=str(root / "gateway.jsonl"),
        decisions_spool=str(root / "decisions.jsonl"),
        link_spool=str(root / "link.jsonl"),
        timeouts=given.gateway.timeouts,
        max_retries=given.gateway.max_retries,
        max_body_bytes=given.gateway.max_body_bytes,
        tokenizer=str(given.gateway.tokenizer) if given.gateway.tokenizer else None,
    )
    return msgspec.structs.replace(config, **changes)


def start_process(children: Children, config: EngineConfig, root: Path) -> tuple[Child, Any]:
    """A worker in a process of its own, which can be killed; it and the ports of its instances."""
    log = root / f"{config.cluster}.log"
    child = children.start(
        config.cluster, subprocess.Popen, ["-m", "harness.engine"], log, EngineError
    )
    child.tell(config)
    ports = children.wait_for(child, "ready", 30.0)["ports"]
    child.tell({"kv_routes": {}})
    children.wait_for(child, "routed", 30.0)
    return child, ports


@asynccontextmanager
async def gateway_over(
    root: Path,
    clusters: dict[str, str],
    *overrides: str,
    cache: PrefixCache = OFF,
    engine: dict[str, Any] | None = None,
    mortal: str | None = None,
    **changes: Any,
) -> AsyncIterator[Setup]:
    """A gateway over ``clusters``; ``overrides`` are of the scenario, ``changes`` of its own
    configuration, ``engine`` of the workers'. The ``mortal`` cluster's worker is a process."""
    configs = worker_configs(root, cache, clusters, **(engine or {}))
    opened: dict[str, Worker] = {}
    processes: dict[str, Child] = {}
    ports: dict[str, int] = {}
    async with AsyncExitStack() as stack:
        children = stack.enter_context(Children())
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        for config in configs:
            if config.cluster == mortal:
                child, found = start_process(children, config, root)
                processes[config.cluster] = child
                ports |= found
            else:
                worker = await stack.enter_async_context(Worker(config))
                opened[config.cluster] = worker
                ports |= worker.ports
        config = gateway_config(root, configs, ports, overrides, changes)
        gateway = await stack.enter_async_context(Gateway(config))
        yield Setup(gateway, opened, processes, session, root)
