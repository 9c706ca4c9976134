"""The HTTP surface of one instance: SGLang's PD protocol, and what the harness asks besides.

A request that does not fit the instance's role, or a role that it cannot take now, is refused with
what to do. A role that changes leaves port and address as they are.
"""

import asyncio
from collections.abc import Mapping

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from harness import __version__
from harness.core import EngineError, PrfaasError, Role, TransportError
from harness.engine.cache_routes import CacheRoutes
from harness.engine.config import LINK_SAMPLES_PERIOD_S
from harness.engine.instance import BusyError, LiveInstance
from harness.engine.metrics import EngineMetrics
from harness.engine.prefill_end import PrefillEnd
from harness.server import arrival_mono_ns, bearer, read_body
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


class Conversion(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /convert``."""

    role: Role


class Front:
    """The HTTP surface of one instance."""

    def __init__(
        self,
        instance: LiveInstance,
        cache: CacheRoutes | None,
        metrics: EngineMetrics,
        key: str,
        about: Mapping[str, str | int],
    ) -> None:
        self._instance = instance
        self._cache = cache
        self._metrics = metrics
        self._key = key
        self._about = about

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
        app.router.add_put("/kv/{room:[0-9]{1,20}}", self._register)
        app.router.add_get("/link_samples", self._link_samples)
        app.router.add_post("/convert", self._convert)
        if self._cache is not None:
            self._cache.add_to(app)
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
                f"{self._instance.name} is one half of a disaggregated pair: the request needs "
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
            await self._instance.end.serve(body, prompt, received_ns, send)
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
            await self._instance.end.serve(body, prompt, received_ns, collect)
        except PrfaasError as error:
            return _refuse(500, str(error), phase_of(error))
        answer = GenerateChunk(
            text="".join(chunk.text for chunk in chunks),
            output_ids=[token for chunk in chunks for token in chunk.output_ids],
            meta_info=chunks[-1].meta_info,
        )
        return web.Response(body=render_whole(call, answer), content_type="application/json")

    async def _register(self, request: web.Request) -> web.Response:
        end = self._prefill_end()
        try:
            where = msgspec.json.decode(await read_body(request, MAX_BODY_BYTES), type=Registration)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the registration is not valid: {error}") from error
        end.register(int(request.match_info["room"]), where)
        return web.Response()

    async def _link_samples(self, request: web.Request) -> web.StreamResponse:
        """TCP_INFO of this instance's KV connections, a JSON line a period, until nobody reads."""
        end = self._prefill_end()
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        await response.prepare(request)
        while True:
            await response.write(encode(end.samples()) + b"\n")
            await asyncio.sleep(LINK_SAMPLES_PERIOD_S)

    def _prefill_end(self) -> PrefillEnd:
        end = self._instance.end
        if not isinstance(end, PrefillEnd):
            raise EngineError(f"{self._instance.name} decodes: ask an instance that prefills")
        return end

    async def _convert(self, request: web.Request) -> web.Response:
        """Take the other role; 409 while a request is open, which whoever asks waits for."""
        try:
            wanted = msgspec.json.decode(await read_body(request, MAX_BODY_BYTES), type=Conversion)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the conversion is not valid: {error}") from error
        try:
            await self._instance.convert(wanted.role)
        except BusyError as error:
            return _refuse(409, str(error), "busy")
        return web.json_response({"role": self._instance.role})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": __version__,
                **self._about,
                "instance": self._instance.name,
                "disaggregation_mode": self._instance.role,
                "incremental_streaming_output": True,
                "hardware": self._instance.hardware,
                "prefix_cache": None if self._cache is None else self._cache.settings(),
            }
        )

    async def _flush_cache(self, _request: web.Request) -> web.Response:
        end, memory = self._instance.end, self._instance.memory
        if end.queued or end.running or (memory is not None and memory.pool.busy):
            return web.Response(status=400, text="requests are running: nothing was flushed")
        if memory is not None:
            memory.pool.clear()
        return web.Response(text="Cache flushed.")

    async def _scrape(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), content_type="text/plain")


def phase_of(error: PrfaasError) -> str:
    """Where a request failed at a worker."""
    if isinstance(error, TransportError):
        return "transfer"
    phase = str(error).partition(":")[0]
    return phase if phase in ("decode_admission", "memory") else "engine"


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
