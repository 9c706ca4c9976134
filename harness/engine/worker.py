"""A worker process: one cluster's instances, each an HTTP server that speaks SGLang's PD protocol.

A request reaches a prefill and a decode instance with the same ``bootstrap_room``. The decode
instance tells the prefill instance where it takes KV (``PUT /kv/{room}`` at
``bootstrap_host:bootstrap_port``); the prefill instance pushes each layer there as it becomes
final. A decode instance generates nothing before every byte of the room has arrived: it cannot
prefill again silently. Everything that may cross clusters carries the run's key.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from harness.architecture import Architecture, load_architecture
from harness.child import Spool
from harness.core import EngineError, Role
from harness.engine.cache_routes import CacheRoutes
from harness.engine.compute import DecodeBackend, PrefillBackend
from harness.engine.config import EngineConfig, InstanceConfig
from harness.engine.decode_end import DecodeEnd
from harness.engine.emulated import EmulatedDecode, EmulatedPrefill, KvBytes
from harness.engine.front import Front
from harness.engine.instance import LiveInstance, MakeEnd
from harness.engine.memory import Memory
from harness.engine.metrics import EngineMetrics
from harness.engine.noise import Noise
from harness.engine.prefill_end import PrefillEnd
from harness.engine.prefixes import Cache, Prefixes
from harness.engine.reference import require_device
from harness.engine.stepped import SteppedDecode
from harness.engine.timeline import Alarm
from harness.kv_blocks import KvBlocks
from harness.prefix_pool import PoolGeometry
from harness.profile import Profile
from harness.server import running, serve_http
from harness.transport.lane import Lanes
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender
from harness.transport.socket_options import SocketOptions
from harness.transport.tcp_info import TcpSample

if TYPE_CHECKING:
    from harness.engine.reference.engine import ReferenceEngine

TCP_COLUMNS = tuple(field.name for field in fields(TcpSample))


class Worker:
    """Async context manager: the servers of one cluster's instances, their KV ends and samples."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._instances: list[LiveInstance] = []
        self._profiles: dict[str, Profile] = {}
        self._receiver: KvReceiver | None = None
        self.ports: dict[str, int] = {}
        self.kv_port = 0
        #: Where a prefill instance ("host:port" of its bootstrap) reaches this worker's receiver.
        self.kv_routes: dict[str, tuple[str, int]] = {}

    async def __aenter__(self) -> "Worker":
        try:
            await self._open(self._stack)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open(self, stack: AsyncExitStack) -> None:
        config = self._config
        self._alarm = stack.enter_context(Alarm())
        engines = stack.enter_context(Spool(config.engines_spool))
        link = stack.enter_context(Spool(config.link_spool))
        metrics = EngineMetrics()
        connector = aiohttp.TCPConnector(limit=0)
        self._session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector, headers={"Authorization": f"Bearer {config.api_key}"}
            )
        )
        lanes = stack.enter_context(Lanes(config.io_threads))
        self._receiver = await self._open_receiver(stack, lanes)
        self._profiles = {name: source.load() for name, source in config.profiles.items()}
        architecture = load_architecture(Path(config.architecture), config.kv_dtype)
        self._kv = KvBytes(architecture, config.byte_scale, config.seed)
        self._blocks: KvBlocks | None = None
        if config.decode_memory_bytes is not None:
            pools, memory_bytes = config.prefix_cache, config.decode_memory_bytes
            self._blocks = KvBlocks.of(architecture, pools, memory_bytes)
        memories: dict[str, Memory] = {}
        if config.prefix_cache.enabled:
            geometry = PoolGeometry.of(architecture, config.prefix_cache)
            memories = {
                one.name: Memory(one.name, geometry, config.prefix_cache.memory_bytes)
                for one in config.instances
            }
        self._reference = self._load_reference(architecture)
        self._prefixes = Prefixes(memories, architecture, config.fabric_bytes_per_s)
        tasks = await stack.enter_async_context(_background())
        for one in config.instances:
            self._instances.append(await self._open_instance(one, lanes, metrics, tasks))
        await stack.enter_async_context(running(self._sample(metrics, engines, link)))

    async def _open_instance(
        self,
        config: InstanceConfig,
        lanes: Lanes,
        metrics: EngineMetrics,
        tasks: set[asyncio.Task[None]],
    ) -> LiveInstance:
        make: dict[Role, MakeEnd] = {"prefill": self._prefill_end, "decode": self._decode_end}
        instance = LiveInstance(
            config,
            self._open_sender(lanes),
            self._prefixes.memories.get(config.name),
            make,
            convertible=self._config.convertible,
        )
        await instance.open()
        cache, routes = self._cache(instance), None
        if cache is not None:
            assert self._receiver is not None
            routes = CacheRoutes(
                cache,
                self._kv,
                instance.sender,
                self._receiver,
                self._route,
                tasks,
                self._config.transfer_deadline_wall_s,
                copies=self._reference is None,
            )
        about: dict[str, str | int] = {"engine": "emulated"}
        if self._reference is not None:
            about = {"engine": "reference", **self._reference.told()}
        front = Front(instance, routes, metrics, self._config.api_key, about)
        self.ports[config.name] = await serve_http(
            self._stack, front.application(), self._config.address, config.port, EngineError
        )
        return instance

    def _cache(self, instance: LiveInstance) -> Cache | None:
        return None if instance.memory is None else Cache(instance.memory, self._prefixes)

    def _load_reference(self, architecture: Architecture) -> "ReferenceEngine | None":
        """The model, where this process computes one; it takes its time before anything is served.
        EngineError without torch."""
        if self._config.reference is None:
            return None
        require_device(self._config.reference.device, "engine.device")
        from harness.engine.reference.engine import load_engine  # torch is no part of the base

        config = self._config
        names = [one.name for one in config.instances]
        return load_engine(
            self._config.reference, architecture, config.context_tokens, config.prefix_cache, names
        )

    async def _prefill_end(self, instance: LiveInstance) -> PrefillEnd:
        config = self._config
        engine = await self._prefill_engine(instance)
        return PrefillEnd(engine, self._kv, instance.sender, config, self._cache(instance))

    async def _prefill_engine(self, instance: LiveInstance) -> PrefillBackend:
        config = self._config
        if self._reference is not None:
            profile = self._profiles.get(instance.hardware)
            computing = self._reference.prefill(
                instance.name,
                layerwise=config.layerwise,
                prefill_s=None if profile is None else profile.prefill_s,
            )
            self._stack.callback(computing.close)
            await self._stack.enter_async_context(running(computing.serve()))
            return computing
        engine = EmulatedPrefill(
            self._alarm,
            self._profiles[instance.hardware],
            config.time_scale,
            config.layerwise,
            self._noise(instance, "prefill"),
        )
        await self._stack.enter_async_context(running(engine.serve()))
        return engine

    async def _decode_end(self, instance: LiveInstance) -> DecodeEnd:
        config = self._config
        engine = await self._decode_engine(instance)
        assert self._receiver is not None
        return DecodeEnd(
            engine,
            self._kv,
            self._receiver,
            self._session,
            config,
            self._route,
            self._cache(instance),
        )

    async def _decode_engine(self, instance: LiveInstance) -> DecodeBackend:
        config, noise = self._config, self._noise(instance, "decode")
        if self._reference is not None:
            computing = self._reference.decode(
                instance.name,
                config.decode_max_batch,
                config.stream_interval_tokens,
                self._blocks,
            )
            self._stack.callback(computing.close)
            await self._stack.enter_async_context(running(computing.serve()))
            return computing
        if config.decode_steps == "full_batch":
            return EmulatedDecode(
                self._alarm,
                config.decode_max_batch,
                config.decode_step_s / config.time_scale,
                config.stream_interval_tokens,
                noise,
                self._blocks,
            )
        engine = SteppedDecode(
            self._alarm,
            self._profiles[instance.hardware],
            config.decode_max_batch,
            config.time_scale,
            config.stream_interval_tokens,
            noise,
            self._blocks,
        )
        await self._stack.enter_async_context(running(engine.serve()))
        return engine

    def _noise(self, instance: LiveInstance, role: Role) -> Noise:
        """Each role of each instance draws its own."""
        config = self._config
        seed = (config.seed, *instance.name.encode(), len(role))
        return Noise(config.noise_cv, seed)

    async def _open_receiver(self, stack: AsyncExitStack, lanes: Lanes) -> KvReceiver | None:
        """Where KV lands, if an instance decodes, may come to, or takes copies of prefixes."""
        config = self._config
        decodes = any(instance.role == "decode" for instance in config.instances)
        if not (decodes or config.convertible or config.prefix_cache.enabled):
            return None
        limits = ReceiverLimits(
            max_buffer_bytes=config.max_buffer_bytes,
            max_connections=config.max_connections,
            max_pending_connections=config.max_connections,
        )
        options = SocketOptions(
            congestion_control=config.congestion_control, bdp_bytes=config.bdp_bytes
        )
        secret = bytes.fromhex(config.secret_hex)
        receiver = KvReceiver(secret, limits, options=options, lanes=lanes)
        stack.push_async_callback(receiver.close)
        self.kv_port = await receiver.start(config.address, 0)
        return receiver

    def _open_sender(self, lanes: Lanes) -> KvSender:
        config = self._config
        sender = KvSender(
            bytes.fromhex(config.secret_hex),
            connections=config.connections,
            checksum=config.checksum,
            chunk_bytes=config.chunk_bytes,
            pacing_bytes_per_s=config.pacing_bytes_per_s,
            ack_timeout_s=config.transfer_deadline_wall_s,
            striping=config.striping,
            congestion_control=config.congestion_control,
            bdp_bytes=config.bdp_bytes,
            lanes=lanes,
        )
        self._stack.push_async_callback(sender.close)
        return sender

    def _route(self, bootstrap: str) -> tuple[str, int]:
        return self.kv_routes.get(bootstrap, (self._config.address, self.kv_port))

    async def _sample(self, metrics: EngineMetrics, engines: Spool, link: Spool) -> None:
        while True:
            now_ns = time.monotonic_ns()
            rows = []
            for instance in self._instances:
                end = instance.end
                rows.append(
                    {
                        "mono_ns": now_ns,
                        "instance": instance.name,
                        "role": instance.role,
                        "queued": end.queued,
                        "running": end.running,
                        "busy_s_total": end.busy_s,
                    }
                )
                metrics.observe(instance.name, instance.role, end.queued, end.running, end.busy_s)
                if instance.memory is not None:
                    metrics.observe_pool(instance.name, instance.memory)
            engines.write_all(rows)
            link.write_all(
                {"kind": "tcp", "cluster": self._config.cluster}
                | {name: getattr(sample, name) for name in TCP_COLUMNS}
                for instance in self._instances
                for sample in instance.sender.samples()
            )
            await asyncio.sleep(self._config.sample_period_wall_s)


@asynccontextmanager
async def _background() -> AsyncIterator[set[asyncio.Task[None]]]:
    """Tasks that outlive the request which began them; cancelled at the end."""
    tasks: set[asyncio.Task[None]] = set()
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
