"""A worker process: one cluster's instances, each an HTTP server that speaks SGLang's PD protocol.

A request reaches a prefill and a decode instance with the same ``bootstrap_room``. The decode
instance tells the prefill instance where it takes KV (``PUT /kv/{room}`` at
``bootstrap_host:bootstrap_port``); the prefill instance pushes each layer there as it becomes
final. A decode instance generates nothing before every byte of the room has arrived: it cannot
prefill again silently. Everything that may cross clusters carries the run's key.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from harness import __version__
from harness.architecture import load_architecture
from harness.child import Spool
from harness.core import EngineError, PrfaasError, TransportError
from harness.engine.config import EngineConfig, InstanceConfig
from harness.engine.emulated import EmulatedDecode, EmulatedPrefill, KvBytes
from harness.engine.handoff import DecodeEnd, PrefillEnd
from harness.engine.metrics import EngineMetrics
from harness.engine.timeline import Alarm
from harness.server import arrival_mono_ns, bearer, read_body, running, serve_http
from harness.surface.generate import (
    MAX_BODY_BYTES,
    SSE_DONE,
    SSE_HEADERS,
    GenerateBody,
    GenerateChunk,
    Prompt,
    Registration,
    encode,
    prompt_of,
)
from harness.surface.openai import (
    Call,
    parse_generate,
    parse_openai,
    render_chunk,
    render_error,
    render_usage,
    render_whole,
)
from harness.transport.lane import Lanes
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender
from harness.transport.socket_options import SocketOptions
from harness.transport.tcp_info import TcpSample

End = PrefillEnd | DecodeEnd
#: Wall time between two lines of ``/link_samples``.
LINK_SAMPLES_PERIOD_S = 0.1
TCP_COLUMNS = tuple(field.name for field in fields(TcpSample))


class Front:
    """The HTTP surface of one instance."""

    def __init__(self, config: InstanceConfig, end: End, metrics: EngineMetrics, key: str) -> None:
        self._config = config
        self._end = end
        self._metrics = metrics
        self._key = key

    def application(self) -> web.Application:
        authorized = bearer(self._key, _unauthorized)
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[authorized, _say_what_is_wrong]
        )
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_server_info", self._server_info)
        app.router.add_route("*", "/flush_cache", self._flush_cache)
        app.router.add_get("/metrics", self._scrape)
        if isinstance(self._end, PrefillEnd):
            app.router.add_put("/kv/{room:[0-9]{1,20}}", self._register)
            app.router.add_get("/link_samples", self._link_samples)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        received_ns = await arrival_mono_ns()
        return await self._serve(
            request, parse_generate(await read_body(request, MAX_BODY_BYTES)), received_ns
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        received_ns = await arrival_mono_ns()
        call = parse_openai(await read_body(request, MAX_BODY_BYTES), "completions")
        return await self._serve(request, call, received_ns)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        received_ns = await arrival_mono_ns()
        return await self._serve(
            request, parse_openai(await read_body(request, MAX_BODY_BYTES), "chat"), received_ns
        )

    async def _serve(
        self, request: web.Request, call: Call, received_ns: int
    ) -> web.StreamResponse:
        body = call.body
        prompt = prompt_of(body)
        if body.bootstrap_room is None:
            raise EngineError(
                f"{self._config.name} is one half of a disaggregated pair: the request needs "
                "bootstrap_host, bootstrap_port and bootstrap_room"
            )
        if not body.stream:
            return await self._whole(call, body, prompt, received_ns)
        response = web.StreamResponse(headers=SSE_HEADERS)
        last: GenerateChunk | None = None

        async def send(chunk: GenerateChunk) -> None:
            nonlocal last
            if last is None:
                await response.prepare(request)
            last = chunk
            await response.write(render_chunk(call, chunk))

        try:
            await self._end.serve(body, prompt, received_ns, send)
        except ConnectionResetError:
            return response  # the gateway went away: nobody reads what is left
        except PrfaasError as error:
            if last is None:
                return _refuse(500, str(error), phase_of(error))
            failure = render_error(str(error), "engine_error", phase_of(error))
            await response.write(b"data: " + failure + b"\n\n")
            await response.write_eof()
            return response
        assert last is not None, "a served request has at least one chunk"
        await response.write(render_usage(call, last) + SSE_DONE)
        await response.write_eof()
        return response

    async def _whole(
        self, call: Call, body: GenerateBody, prompt: Prompt, received_ns: int
    ) -> web.Response:
        chunks: list[GenerateChunk] = []

        async def collect(chunk: GenerateChunk) -> None:
            chunks.append(chunk)

        try:
            await self._end.serve(body, prompt, received_ns, collect)
        except PrfaasError as error:
            return _refuse(500, str(error), phase_of(error))
        answer = GenerateChunk(
            text="".join(chunk.text for chunk in chunks),
            output_ids=[token for chunk in chunks for token in chunk.output_ids],
            meta_info=chunks[-1].meta_info,
        )
        return web.Response(body=render_whole(call, answer), content_type="application/json")

    async def _register(self, request: web.Request) -> web.Response:
        assert isinstance(self._end, PrefillEnd)
        try:
            where = msgspec.json.decode(await read_body(request, MAX_BODY_BYTES), type=Registration)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the registration is not valid: {error}") from error
        self._end.register(int(request.match_info["room"]), where)
        return web.Response()

    async def _link_samples(self, request: web.Request) -> web.StreamResponse:
        """TCP_INFO of this instance's KV connections, a JSON line a period, until nobody reads."""
        assert isinstance(self._end, PrefillEnd)
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        await response.prepare(request)
        while True:
            await response.write(encode(self._end.samples()) + b"\n")
            await asyncio.sleep(LINK_SAMPLES_PERIOD_S)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": __version__,
                "engine": "emulated",
                "instance": self._config.name,
                "disaggregation_mode": self._config.role,
                "incremental_streaming_output": True,
                "hardware": self._config.hardware,
            }
        )

    async def _flush_cache(self, _request: web.Request) -> web.Response:
        if self._end.queued or self._end.running:
            return web.Response(status=400, text="requests are running: nothing was flushed")
        return web.Response(text="Cache flushed.")

    async def _scrape(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), content_type="text/plain")


def phase_of(error: PrfaasError) -> str:
    """Where a request failed at a worker."""
    if isinstance(error, TransportError):
        return "transfer"
    return "decode_admission" if "decode_admission" in str(error) else "engine"


@web.middleware
async def _say_what_is_wrong(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineError as error:
        return _refuse(400, str(error), "invalid_request_error")


def _unauthorized() -> web.Response:
    return _refuse(401, "this worker wants the run's key as a bearer token", "auth")


def _refuse(status: int, message: str, kind: str) -> web.Response:
    return web.Response(
        status=status,
        body=render_error(message, kind, kind),
        content_type="application/json",
    )


class Worker:
    """Async context manager: the servers of one cluster's instances, their KV ends and samples."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._ends: dict[str, End] = {}
        self.ports: dict[str, int] = {}
        self.kv_port = 0
        #: Where a prefill instance ("host:port" of its bootstrap) reaches this worker's receiver.
        self.kv_routes: dict[str, tuple[str, int]] = {}

    async def __aenter__(self) -> "Worker":
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open(self, stack: AsyncExitStack) -> None:
        config = self._config
        alarm = stack.enter_context(Alarm())
        engines = stack.enter_context(Spool(config.engines_spool))
        link = stack.enter_context(Spool(config.link_spool))
        metrics = EngineMetrics()
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector, headers={"Authorization": f"Bearer {config.api_key}"}
            )
        )
        lanes = stack.enter_context(Lanes(config.io_threads))
        receiver = await self._open_receiver(stack, lanes)
        profiles = {name: source.load() for name, source in config.profiles.items()}
        kv = KvBytes(
            load_architecture(Path(config.architecture), config.kv_dtype),
            config.byte_scale,
            config.seed,
        )
        senders: list[KvSender] = []
        for instance in config.instances:
            end: End
            if instance.role == "prefill":
                sender = self._open_sender(stack, lanes)
                senders.append(sender)
                engine = EmulatedPrefill(
                    alarm, profiles[instance.hardware], config.time_scale, config.layerwise
                )
                end = PrefillEnd(engine, kv, sender, config)
                await stack.enter_async_context(running(engine.serve()))
            else:
                assert receiver is not None
                decode = EmulatedDecode(
                    alarm,
                    config.decode_max_batch,
                    config.decode_step_s / config.time_scale,
                    config.stream_interval_tokens,
                )
                end = DecodeEnd(decode, kv, receiver, session, config, self._route)
            self._ends[instance.name] = end
            front = Front(instance, end, metrics, config.api_key)
            self.ports[instance.name] = await serve_http(
                stack, front.application(), config.address, instance.port, EngineError
            )
        await stack.enter_async_context(running(self._sample(metrics, senders, engines, link)))

    async def _open_receiver(self, stack: AsyncExitStack, lanes: Lanes) -> KvReceiver | None:
        """Where KV lands, if an instance decodes."""
        config = self._config
        if all(instance.role != "decode" for instance in config.instances):
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

    def _open_sender(self, stack: AsyncExitStack, lanes: Lanes) -> KvSender:
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
        stack.push_async_callback(sender.close)
        return sender

    def _route(self, bootstrap: str) -> tuple[str, int]:
        return self.kv_routes.get(bootstrap, (self._config.address, self.kv_port))

    async def _sample(
        self, metrics: EngineMetrics, senders: list[KvSender], engines: Spool, link: Spool
    ) -> None:
        while True:
            now_ns = time.monotonic_ns()
            rows = []
            for instance in self._config.instances:
                end = self._ends[instance.name]
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
                metrics.observe(instance.name, end.queued, end.running, end.busy_s)
            engines.write_all(rows)
            link.write_all(
                {"kind": "tcp", "cluster": self._config.cluster}
                | {name: getattr(sample, name) for name in TCP_COLUMNS}
                for sender in senders
                for sample in sender.samples()
            )
            await asyncio.sleep(self._config.sample_period_wall_s)
