"""The gateway's HTTP surface: requests in, answers out, and what it tells of itself.

A request is read, counted and bounded here; the scheduler says which pair serves it, or that none
does. Where an instance is lost before the first token, nothing was answered yet and nobody works
on it any more: the request is placed again, as a new one, ``max_retries`` times at the most.
"""

import asyncio
import math
import uuid
from collections.abc import Callable
from typing import Literal

from aiohttp import web

from harness.block_keys import block_keys_of_text
from harness.child import Spool
from harness.core import EngineError, PrfaasError, ScenarioError
from harness.gateway.answer import Answer
from harness.gateway.config import GatewayConfig
from harness.gateway.copying import copy_prefix
from harness.gateway.driver import Driver, InstanceDownError
from harness.gateway.flight import Attempt, Flight, Urgent
from harness.gateway.handover import Handover, PhaseTimeoutError
from harness.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from harness.gateway.prompts import Prompts, ids_text
from harness.gateway.upstream import (
    InstanceLostError,
    InstanceUnreachableError,
    TransferFailedError,
    Upstream,
)
from harness.scheduling import events as ev
from harness.server import arrival_mono_ns, bearer, read_body
from harness.surface.generate import encode
from harness.surface.openai import Call, parse_generate, parse_openai, render_error

#: Requests whose bodies are being read while as many as may be are in flight already.
MAX_READING = 256


class Front:
    """Routes of the gateway and the flights in progress."""

    def __init__(
        self,
        config: GatewayConfig,
        driver: Driver,
        upstream: Upstream,
        prompts: Prompts,
        requests: Spool,
        metrics: GatewayMetrics,
    ) -> None:
        self._config = config
        self._driver = driver
        self._upstream = upstream
        self._prompts = prompts
        self._requests = requests
        self._metrics = metrics
        self._flights: dict[str, Flight] = {}
        self._open = 0
        self._urgent = Urgent()
        self._handover = Handover(
            upstream,
            driver,
            self._urgent,
            config.timeouts,
            config.byte_scale,
            prefill_answers=config.policy.scheduling.ttft_source == "prefill",
        )
        #: One prompt is parsed in a turn of the event loop, so that what arrives meanwhile is seen.
        self._turn = asyncio.Lock()

    def application(self) -> web.Application:
        key = self._config.api_key
        guards = [] if key is None else [bearer(key, _unauthorized)]
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=guards)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._scrape)
        app.router.add_get("/state", self._state)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._take(request, lambda raw: parse_openai(raw, "completions"))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._take(request, lambda raw: parse_openai(raw, "chat"))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._take(request, parse_generate)

    async def _take(
        self, request: web.Request, parse: Callable[[bytes], Call]
    ) -> web.StreamResponse:
        received_ns = await arrival_mono_ns()
        most = self._config.policy.scheduling.max_queue_requests
        if self._open >= most + MAX_READING:
            return self._reject(429, f"{self._open} requests are open already", 1.0)
        self._open += 1
        try:
            return await self._read(request, parse, received_ns)
        finally:
            self._open -= 1

    async def _read(
        self, request: web.Request, parse: Callable[[bytes], Call], received_ns: int
    ) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._config.request_timeout_wall_s):
                raw = await read_body(request, self._config.max_body_bytes)
            async with self._turn:
                await asyncio.sleep(0)
                call = parse(raw)
                tokens = self._prompts.count(call)
                keys = self._keys(call)
        except EngineError as error:
            return _refuse(400, str(error), "invalid_request_error")
        except TimeoutError:
            return _refuse(408, "the body did not come in time", "invalid_request_error")
        rid = call.body.rid
        if rid is None:
            rid = call.body.rid = uuid.uuid4().hex
        if rid in self._flights:
            return _refuse(400, f"rid {rid} is in flight already", "invalid_request_error")
        flight = Flight(rid, received_ns)
        self._flights[rid] = flight
        try:
            return await self._fly(request, call, flight, tokens, keys)
        finally:
            del self._flights[rid]

    def _keys(self, call: Call) -> tuple[int, ...]:
        cache = self._config.policy.prefix_cache
        return block_keys_of_text(ids_text(call), cache.block_tokens) if cache.enabled else ()

    async def _fly(
        self, request: web.Request, call: Call, flight: Flight, tokens: int, keys: tuple[int, ...]
    ) -> web.StreamResponse:
        answer = Answer(request, call, flight.rid, flight.received_ns, self._metrics)
        try:
            async with asyncio.timeout(self._config.request_timeout_wall_s):
                refusal = await self._serve(call, flight, tokens, keys, answer)
                if refusal is None:
                    response = await answer.finish()
                    flight.outcome = "completed"
                    return response
            flight.fail("rejected", refusal.reason)
            retry_s = self._driver.wall_s(refusal.retry_after_s)
            return self._reject(503 if refusal.unavailable else 429, refusal.reason, retry_s)
        except asyncio.CancelledError:
            flight.fail("cancelled", "the client went away")
            raise
        except ConnectionResetError:
            # Writing found out before the loop did; upstream's own resets are EngineErrors.
            flight.fail("cancelled", "the client went away")
            return web.Response(status=499)
        except (PrfaasError, TimeoutError) as error:
            flight.fail(_phase(flight, error), str(error) or self._too_long())
            # A length that the profile does not cover is the client's; the rest is upstream's.
            status = 400 if isinstance(error, ScenarioError) else 502
            message = render_error(
                flight.failure_message or "", "engine_error", flight.failure_phase
            )
            return await answer.fail(status, message)
        finally:
            self._driver.end(_ending(flight))
            self._requests.write(flight.row(answer))
            self._metrics.requests.labels(flight.outcome, flight.failure_phase or "").inc()

    async def _serve(
        self, call: Call, flight: Flight, tokens: int, keys: tuple[int, ...], answer: Answer
    ) -> ev.Reject | None:
        """Place the request and see it through, as often as may be; a refusal ends it too."""
        while True:
            placed = self._driver.place(
                flight.rid, len(flight.attempts), tokens, call.output_tokens, keys
            )
            if isinstance(placed, ev.Reject):
                return placed
            attempt = Attempt(placed, self._urgent, opaque=self._config.engine == "sglang")
            flight.attempts.append(attempt)
            self._driver.depends(flight.rid, attempt)
            try:
                if placed.copy is not None:
                    copied = self._copied(keys, placed.copy)
                    await attempt.unless_lost(copy_prefix(self._upstream, placed.copy, copied))
                body = self._upstream.body(call.body, attempt.route, flight.retries)
                await self._handover.run(flight, attempt, body, answer)
                return None
            except (InstanceLostError, InstanceDownError) as error:
                if isinstance(error, InstanceUnreachableError):
                    self._driver.lose(error.instance)
                if answer.has_begun or flight.retries >= self._config.max_retries:
                    raise
                self._driver.end(ev.Failed(flight.rid, attempt.phase))
                route = attempt.route
                await self._driver.examine({route.prefill.cluster, route.decode.cluster})
                self._metrics.retries.inc()
            finally:
                attempt.close()

    def _copied(self, keys: tuple[int, ...], copy: ev.CopyPrefix) -> tuple[int, ...]:
        return keys[: copy.tokens // self._config.policy.prefix_cache.block_tokens]

    def _too_long(self) -> str:
        return f"no answer within {self._config.request_timeout_wall_s:g} s of wall time"

    def _reject(self, status: Literal[429, 503], reason: str, retry_s: float) -> web.Response:
        self._metrics.rejects.labels(str(status)).inc()
        kind = "rejected" if status == 429 else "unavailable"
        return _refuse(status, reason, kind, {"Retry-After": str(max(1, math.ceil(retry_s)))})

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": self._config.model, "object": "model", "owned_by": "prfaas-bench"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _scrape(self, _request: web.Request) -> web.Response:
        driver = self._driver
        text = self._metrics.render(driver.scheduler, len(self._flights), len(driver.down))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _state(self, _request: web.Request) -> web.Response:
        routes = {rid: flight.state() for rid, flight in self._flights.items()}
        state = {"in_flight": len(self._flights), "routes": routes} | self._driver.state()
        return web.Response(body=encode(state), content_type="application/json")


def _phase(flight: Flight, error: BaseException) -> str:
    """The phase that a request had reached when it failed."""
    if isinstance(error, PhaseTimeoutError):
        return error.phase
    if isinstance(error, InstanceDownError):
        return "instance_down"
    if isinstance(error, TransferFailedError):
        return "transfer"
    return flight.attempts[-1].phase if flight.attempts else "gateway"


def _ending(flight: Flight) -> ev.Finished | ev.Failed | ev.Cancelled:
    if flight.outcome == "completed":
        return ev.Finished(flight.rid)
    if flight.failure_phase == "cancelled":
        return ev.Cancelled(flight.rid)
    return ev.Failed(flight.rid, flight.failure_phase or "gateway")


def _unauthorized() -> web.Response:
    return _refuse(401, "this gateway wants the run's key as a bearer token", "auth")


def _refuse(
    status: int, message: str, kind: str, headers: dict[str, str] | None = None
) -> web.Response:
    body = render_error(message, kind)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
