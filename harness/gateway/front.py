"""The gateway's HTTP surface: a real clock and real sockets around the pure scheduler.

Each request becomes ``Arrived``; the scheduler's ``Dispatch`` says which pair serves it; what the
workers report becomes ``PrefillStarted``, ``PrefillDone``, ``TransferDone``, ``Finished`` or
``Failed``. ``now_s`` is scenario time since the run's start.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from aiohttp import web

from harness.child import Spool
from harness.core import EngineError, PrfaasError, Route, ScenarioError
from harness.gateway.answer import Answer
from harness.gateway.config import GatewayConfig
from harness.gateway.flight import Flight, Urgent
from harness.gateway.link_watch import LinkWatch
from harness.gateway.metrics import GatewayMetrics
from harness.gateway.upstream import InstanceUnreachableError, Upstream
from harness.scheduling import events as ev
from harness.scheduling.scheduler import Scheduler
from harness.server import arrival_mono_ns, bearer, read_body
from harness.surface.generate import (
    MAX_BODY_BYTES,
    GenerateChunk,
    encode,
    prompt_of,
)
from harness.surface.openai import Call, parse_generate, parse_openai, render_error


class Front:
    """Routes of the gateway and the flights in progress."""

    def __init__(
        self,
        config: GatewayConfig,
        scheduler: Scheduler,
        upstream: Upstream,
        requests: Spool,
        decisions: Spool,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._upstream = upstream
        self._requests = requests
        self._decisions = decisions
        self._metrics = GatewayMetrics()
        self._flights: dict[str, Flight] = {}
        self._urgent = Urgent()
        #: One prompt is parsed in a turn of the event loop, so that what arrives meanwhile is seen.
        self._turn = asyncio.Lock()
        self.start_mono_ns = time.monotonic_ns()
        #: Set by whoever follows the link.
        self.watch: LinkWatch | None = None

    def application(self) -> web.Application:
        authorized = bearer(self._config.api_key, _unauthorized)
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[authorized])
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
        try:
            raw = await read_body(request, MAX_BODY_BYTES)
            async with self._turn:
                await asyncio.sleep(0)
                call = parse(raw)
                body = call.body
                prompt = prompt_of(body)
        except EngineError as error:
            return _refuse(400, str(error), "invalid_request_error")
        if body.rid is None:
            body.rid = uuid.uuid4().hex
        if body.rid in self._flights:
            return _refuse(400, f"rid {body.rid} is in flight already", "invalid_request_error")
        if len(self._flights) >= self._config.max_in_flight:
            return _refuse(429, "the gateway is full", "overloaded", {"Retry-After": "1"})
        flight = Flight(body.rid, received_ns, self._urgent)
        self._flights[flight.rid] = flight
        try:
            return await self._fly(request, call, flight, prompt.tokens)
        finally:
            flight.handed_over()
            del self._flights[flight.rid]

    async def _fly(
        self, request: web.Request, call: Call, flight: Flight, tokens: int
    ) -> web.StreamResponse:
        answer = Answer(request, call, flight.rid)
        try:
            dispatch = self._place(flight, tokens, call.output_tokens)
            if isinstance(dispatch, ev.Reject):
                flight.failure_phase, flight.failure_message = "gateway", dispatch.reason
                retry_s = max(1, round(dispatch.retry_after_s / self._config.time_scale))
                return _refuse(429, dispatch.reason, "rejected", {"Retry-After": str(retry_s)})
            body = self._upstream.body(call.body, dispatch.route)
            async with asyncio.timeout(self._config.request_timeout_wall_s):
                await self._both(flight, dispatch.route, body, answer)
            response = await answer.finish()
            flight.outcome = "completed"
            return response
        except asyncio.CancelledError:
            flight.failure_phase, flight.failure_message = "cancelled", "the client went away"
            raise
        except ConnectionResetError:
            # Writing found out before the loop did; upstream's own resets are EngineErrors.
            flight.failure_phase, flight.failure_message = "cancelled", "the client went away"
            return web.Response(status=499)
        except (PrfaasError, TimeoutError) as error:
            message = str(error) or (
                f"no answer within {self._config.request_timeout_wall_s:g} s of wall time"
            )
            flight.failure_phase = flight.failure_phase or _phase(flight)
            flight.failure_message = message
            # A length that the profile does not cover is the client's; the rest is upstream's.
            status = 400 if isinstance(error, ScenarioError) else 502
            return await answer.fail(
                status, render_error(message, "engine_error", flight.failure_phase)
            )
        finally:
            self._close(flight)
            self._requests.write(flight.row(answer))
            self._metrics.count(flight.outcome)

    def _place(self, flight: Flight, tokens: int, output_tokens: int) -> ev.Dispatch | ev.Reject:
        now_s = self.now_s()
        arrived = ev.Arrived(flight.rid, tokens, output_tokens)
        (action,) = self._scheduler.handle(arrived, now_s)
        assert isinstance(action, ev.Dispatch | ev.Reject)
        row: dict[str, object] = {
            "mono_ns": time.monotonic_ns(),
            "rid": flight.rid,
            "now_s": now_s,
            "action": "dispatch" if isinstance(action, ev.Dispatch) else "reject",
            "input_tokens": tokens,
        }
        if isinstance(action, ev.Dispatch):
            flight.route = action.route
            flight.threshold_tokens = action.threshold_tokens
            row |= {
                "cached_tokens": action.cached_tokens,
                "threshold_tokens": action.threshold_tokens,
                "prefill_instance": action.route.prefill.name,
                "decode_instance": action.route.decode.name,
                "expected_prefill_start_s": action.expected_prefill_start_s,
                "expected_decode_slot_s": action.expected_decode_slot_s,
            }
        self._decisions.write(row)
        return action

    async def _both(self, flight: Flight, route: Route, body: bytes, answer: Answer) -> None:
        """Drive both halves; the first failure ends the other."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(_raise_when(flight.lost))
                prefill = group.create_task(self._prefill(flight, route, body, answer))
                await flight.is_handed_over.wait()
                await self._urgent.none()
                await self._decode(flight, route, body, answer)
                await prefill
                watching.cancel()
        except BaseExceptionGroup as failures:
            error = failures.exceptions[0]
            if isinstance(error, InstanceUnreachableError):
                self._lose(error.instance)
            raise error from failures

    async def _prefill(self, flight: Flight, route: Route, body: bytes, answer: Answer) -> None:
        def handed_over() -> None:
            flight.dispatched_ns = time.monotonic_ns()
            flight.handed_over()

        async with aclosing(self._upstream.stream(route.prefill.name, body, handed_over)) as chunks:
            async for chunk in chunks:
                spans = chunk.meta_info.prfaas
                event = spans.event if spans else ""
                if spans is not None and spans.prefill is not None:
                    flight.prefill = spans.prefill
                if event == "prefill_started":
                    self._tell(ev.PrefillStarted(flight.rid))
                elif event == "prefill_done":
                    self._tell(ev.PrefillDone(flight.rid))
                    if self._config.ttft_source == "prefill":
                        await answer.send(_without_finish(chunk))
                elif event == "transfer_done" and flight.prefill is not None:
                    kv_bytes = flight.prefill.kv_wire_bytes_sent * self._config.byte_scale
                    self._tell(ev.TransferDone(flight.rid, round(kv_bytes)))
        if flight.prefill is None or flight.prefill.kv_acked_mono_ns is None:
            raise EngineError(f"{route.prefill.name} ended without saying that the KV had arrived")

    async def _decode(self, flight: Flight, route: Route, body: bytes, answer: Answer) -> None:
        first = True
        async with aclosing(self._upstream.stream(route.decode.name, body)) as chunks:
            async for chunk in chunks:
                if first:
                    first = False
                    self._tell(ev.DecodeAdmitted(flight.rid))
                spans = chunk.meta_info.prfaas
                if spans is not None and spans.decode is not None:
                    flight.decode = spans.decode
                    # The worker's spans are for the record, not for the client.
                    chunk.meta_info.prfaas = None
                await answer.send(chunk)
        if flight.decode is None:
            raise EngineError(f"{route.decode.name} ended without saying what KV it decoded from")

    def _tell(self, event: ev.Event) -> None:
        for action in self._scheduler.handle(event, self.now_s()):
            assert isinstance(action, ev.Cancel)
            other = self._flights.get(action.rid)
            if other is not None and not other.lost.done():
                other.failure_phase = "instance_down"
                other.lost.set_exception(EngineError(action.reason))

    def _lose(self, instance: str) -> None:
        self._tell(ev.InstanceDown(instance))

    def _close(self, flight: Flight) -> None:
        if not flight.lost.done():
            flight.lost.cancel()
        if flight.outcome == "completed":
            self._tell(ev.Finished(flight.rid))
        elif flight.failure_phase == "cancelled":
            self._tell(ev.Cancelled(flight.rid))
        else:
            self._tell(ev.Failed(flight.rid, flight.failure_phase or "gateway"))

    def now_s(self) -> float:
        """Scenario time since the run's start."""
        return (time.monotonic_ns() - self.start_mono_ns) / 1e9 * self._config.time_scale

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": self._config.model, "object": "model", "owned_by": "prfaas-bench"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _scrape(self, _request: web.Request) -> web.Response:
        self._metrics.in_flight(len(self._flights))
        if self.watch is not None:
            self._metrics.link(self.watch.state())
        return web.Response(body=self._metrics.render(), content_type="text/plain")

    async def _state(self, _request: web.Request) -> web.Response:
        state = {
            "now_s": self.now_s(),
            "in_flight": len(self._flights),
            "threshold_tokens": self._scheduler.threshold_tokens,
            "queue_lengths": self._scheduler.queue_lengths(),
            "link": None if self.watch is None else self.watch.state(),
        }
        return web.Response(body=encode(state), content_type="application/json")


def _phase(flight: Flight) -> str:
    """The phase that a request had reached when it failed."""
    if flight.dispatched_ns is None:
        return "gateway"
    if flight.prefill is None:
        return "prefill"
    return "transfer" if flight.prefill.kv_acked_mono_ns is None else "decode"


def _without_finish(chunk: GenerateChunk) -> GenerateChunk:
    chunk.meta_info.finish_reason = None
    chunk.meta_info.prfaas = None
    return chunk


async def _raise_when(lost: Awaitable[None]) -> None:
    await lost


def _unauthorized() -> web.Response:
    return _refuse(401, "this gateway wants the run's key as a bearer token", "auth")


def _refuse(
    status: int, message: str, kind: str, headers: dict[str, str] | None = None
) -> web.Response:
    body = render_error(message, kind)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
