"""Both halves of one attempt at a request: the prefill instance's stream and the decode instance's.

What the workers report becomes ``PrefillStarted``, ``PrefillDone``, ``TransferDone`` and
``DecodeAdmitted``. Each phase has a limit of its own, where one is set; the first failure of either
half ends the other, by closing its connection, on which the worker cancels the request and gives
its slots and blocks back.
"""

import asyncio
import time
from contextlib import aclosing
from types import TracebackType
from typing import Self

from harness.core import EngineError
from harness.gateway.answer import Answer
from harness.gateway.driver import Driver
from harness.gateway.flight import Attempt, Flight, Urgent
from harness.gateway.upstream import Upstream
from harness.scheduling import events as ev
from harness.settings import Timeouts
from harness.surface.generate import GenerateChunk


class PhaseTimeoutError(EngineError):
    """A phase lasted longer than it may."""

    def __init__(self, phase: str, instance: str, limit_s: float) -> None:
        super().__init__(f"{instance}: phase {phase} took longer than {limit_s:g} s")
        self.phase = phase


class _Limit:
    """Async context manager: a limit that moves on with the phases of one half."""

    def __init__(self, driver: Driver, instance: str) -> None:
        self._driver = driver
        self._instance = instance
        self._phase, self._limit_s = "", 0.0
        self._timeout = asyncio.timeout(None)
        self._is_open = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise PhaseTimeoutError(self._phase, self._instance, self._limit_s) from late

    def begin(self, phase: str, limit_s: float | None) -> None:
        """``phase`` begins and may last ``limit_s`` of scenario time; None: without a limit."""
        if not self._is_open or self._timeout.expired():
            return
        when_s = None
        if limit_s is not None:
            self._phase, self._limit_s = phase, limit_s
            when_s = asyncio.get_running_loop().time() + self._driver.wall_s(limit_s)
        self._timeout.reschedule(when_s)


class Handover:
    """Drives attempts; one a gateway."""

    def __init__(
        self,
        upstream: Upstream,
        driver: Driver,
        urgent: Urgent,
        timeouts: Timeouts,
        byte_scale: float,
        *,
        prefill_answers: bool,
    ) -> None:
        self._upstream = upstream
        self._driver = driver
        self._urgent = urgent
        self._timeouts = timeouts
        self._byte_scale = byte_scale
        #: Whether the first token goes to the client as soon as prefill has computed it.
        self._prefill_answers = prefill_answers

    async def run(self, flight: Flight, attempt: Attempt, body: bytes, answer: Answer) -> None:
        """Until the last token was sent; raises the first failure of either half."""
        decoding = _Limit(self._driver, attempt.route.decode.name)
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(_raise_when(attempt.lost))
                prefill = group.create_task(self._prefill(flight, attempt, body, answer, decoding))
                await attempt.is_handed_over.wait()
                await self._urgent.none()
                await self._decode(flight, attempt, body, answer, decoding)
                await prefill
                watching.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def _prefill(
        self, flight: Flight, attempt: Attempt, body: bytes, answer: Answer, decoding: _Limit
    ) -> None:
        limits, instance = self._timeouts, attempt.route.prefill.name
        limit = _Limit(self._driver, instance)

        def handed_over() -> None:
            attempt.dispatched_ns = time.monotonic_ns()
            attempt.handed_over()
            limit.begin("prefill_queue", limits.prefill_queue_s)

        async with (
            limit,
            aclosing(self._upstream.prefill(instance, body, handed_over)) as chunks,
        ):
            async for chunk in chunks:
                spans = chunk.meta_info.prfaas
                event = spans.event if spans else ""
                if spans is not None:
                    attempt.prefill = spans.prefill or attempt.prefill
                    attempt.prefill_times = spans.prefill_times or attempt.prefill_times
                if event == "prefill_started":
                    attempt.prefill_began_ns = time.monotonic_ns()
                    limit.begin("prefill", limits.prefill_s)
                    self._driver.tell(ev.PrefillStarted(flight.rid))
                elif event == "prefill_done":
                    attempt.is_prefilled = True
                    limit.begin("transfer", limits.transfer_s)
                    self._driver.tell(ev.PrefillDone(flight.rid))
                    if self._prefill_answers:
                        await answer.send(_without_finish(chunk))
                elif event == "transfer_done":
                    attempt.has_kv_landed = attempt.knows_kv_landed
                    limit.begin("", None)
                    if attempt.decode_began_ns is None:
                        decoding.begin("decode_admission", limits.decode_admission_s)
                    self._driver.tell(ev.TransferDone(flight.rid, self._kv_bytes(attempt)))
        if not attempt.has_kv_landed:
            raise EngineError(f"{instance} ended without saying that the KV had arrived")

    def _kv_bytes(self, attempt: Attempt) -> int | None:
        """In scenario units; SGLang says it of no single request."""
        if attempt.prefill is None:
            return None
        return round(attempt.prefill.kv_wire_bytes_sent * self._byte_scale)

    async def _decode(
        self, flight: Flight, attempt: Attempt, body: bytes, answer: Answer, limit: _Limit
    ) -> None:
        instance = attempt.route.decode.name
        async with limit, aclosing(self._upstream.decode(instance, body)) as chunks:
            async for chunk in chunks:
                if attempt.decode_began_ns is None:
                    attempt.decode_began_ns = time.monotonic_ns()
                    self._driver.tell(ev.DecodeAdmitted(flight.rid))
                spans = chunk.meta_info.prfaas
                if spans is not None and (spans.decode or spans.decode_times):
                    attempt.decode, attempt.decode_times = spans.decode, spans.decode_times
                    # The worker's spans are for the record, not for the client.
                    chunk.meta_info.prfaas = None
                limit.begin("between_tokens", None)  # a slow client is not a slow worker
                await answer.send(chunk)
                limit.begin("between_tokens", self._timeouts.between_tokens_s)
        if attempt.decode is None and attempt.decode_times is None:
            raise EngineError(f"{instance} ended without saying what KV it decoded from")


def _without_finish(chunk: GenerateChunk) -> GenerateChunk:
    chunk.meta_info.finish_reason = None
    chunk.meta_info.prfaas = None
    return chunk


async def _raise_when(lost: "asyncio.Future[None]") -> None:
    await lost
