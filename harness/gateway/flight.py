"""A request in flight through the gateway, and how requests give way to each other in a burst."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine

from harness.core import EngineError, Route
from harness.gateway.answer import Answer
from harness.scheduling.events import Dispatch
from harness.surface.generate import DecodeSpan, DecodeTimes, PrefillSpan, PrefillTimes

#: Far below the shortest prefill, far above what one request takes to be handed over.
GIVE_WAY_S = 0.01


class Urgent:
    """Requests on their way to a prefill instance: what every first token waits for.

    The decode half of a request is needed by the end of its prefill only, so in a burst it gives
    way to the prefill halves of the others, for ``GIVE_WAY_S`` of wall time at the most.
    """

    def __init__(self) -> None:
        self._count = 0
        self._calm = asyncio.Event()

    def begin(self) -> None:
        self._count += 1
        self._calm.clear()

    def end(self) -> None:
        self._count -= 1
        assert self._count >= 0
        if self._count == 0:
            self._calm.set()

    async def none(self) -> None:
        """Wait until nothing is urgent, but not for long."""
        if self._count:
            # Not wait_for, which in Python 3.11 drops a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GIVE_WAY_S):
                    await self._calm.wait()


class Attempt:
    """One placement of a request: its two halves, and a way to abort it from outside."""

    def __init__(self, dispatch: Dispatch, urgent: Urgent, *, opaque: bool = False) -> None:
        self._urgent = urgent
        #: An engine that says nothing of a prefill before its KV has gone.
        self._opaque = opaque
        urgent.begin()
        self.dispatch = dispatch
        self.dispatched_ns: int | None = None
        self.prefill_began_ns: int | None = None
        self.is_handed_over = asyncio.Event()
        self.prefill: PrefillSpan | None = None
        self.decode: DecodeSpan | None = None
        self.prefill_times: PrefillTimes | None = None
        self.decode_times: DecodeTimes | None = None
        self.is_prefilled = False
        self.has_kv_landed = False
        self.decode_began_ns: int | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def route(self) -> Route:
        return self.dispatch.route

    @property
    def knows_kv_landed(self) -> bool:
        """Whether its prefill instance has said so; a real one says it by its last word."""
        if self.prefill is None:
            return self.prefill_times is not None
        return self.prefill.kv_acked_mono_ns is not None

    def handed_over(self) -> None:
        """The prefill instance has the request; or it never will."""
        if not self.is_handed_over.is_set():
            self.is_handed_over.set()
            self._urgent.end()

    def lose(self, error: EngineError) -> None:
        """End it with ``error``, if it has not ended yet."""
        if not self.lost.done():
            self.lost.set_exception(error)

    async def unless_lost(self, work: Coroutine[object, object, object]) -> None:
        """Do ``work`` to its end; when the attempt is lost first, raise why and leave it."""
        working = asyncio.create_task(work)
        either: set[asyncio.Future[object]] = {working, self.lost}  # type: ignore[arg-type]  # invariant
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        if self.lost.done():
            self.lost.result()
        working.result()

    def close(self) -> None:
        self.handed_over()
        if not self.lost.done():
            self.lost.cancel()
        elif not self.lost.cancelled():
            self.lost.exception()  # it may have ended by itself first

    @property
    def phase(self) -> str:
        """How far it has come: the phase that a failure now belongs to."""
        if self.decode_began_ns is not None:
            return "decode"  # its first token may be here before prefill has heard of the KV
        if self.dispatched_ns is None:
            return "gateway"
        if self.prefill_began_ns is None and not (self._opaque or self.is_prefilled):
            return "prefill_queue"
        if not self.is_prefilled:
            return "prefill"
        return "decode_admission" if self.has_kv_landed else "transfer"


class Flight:
    """One request and its attempts, of which the last one counts."""

    def __init__(self, rid: str, received_ns: int) -> None:
        self.rid = rid
        self.received_ns = received_ns
        self.attempts: list[Attempt] = []
        self.outcome = "failed"
        self.failure_phase: str | None = None
        self.failure_message: str | None = None

    @property
    def retries(self) -> int:
        return max(0, len(self.attempts) - 1)

    def fail(self, phase: str, message: str) -> None:
        self.failure_phase, self.failure_message = phase, message

    def state(self) -> dict[str, object]:
        """Where it is, for ``/state``."""
        if not self.attempts:
            return {"phase": "gateway"}
        last = self.attempts[-1]
        return {
            "phase": last.phase,
            "prefill": last.route.prefill.name,
            "decode": last.route.decode.name,
            "retries": self.retries,
        }

    def row(self, answer: Answer) -> dict[str, object]:
        """The request's line in the gateway's spool."""
        last = self.attempts[-1] if self.attempts else None
        return {
            "rid": self.rid,
            "received_mono_ns": self.received_ns,
            "dispatched_mono_ns": last and last.dispatched_ns,
            "first_chunk_mono_ns": answer.first_chunk_mono_ns,
            "first_written_mono_ns": answer.first_written_mono_ns,
            "end_mono_ns": time.monotonic_ns(),
            "prefill_instance": last and last.route.prefill.name,
            "decode_instance": last and last.route.decode.name,
            "crosses": last and last.route.crosses,
            "outcome": self.outcome,
            "failure_phase": self.failure_phase,
            "failure_message": self.failure_message,
            "threshold_tokens": last and last.dispatch.threshold_tokens,
            "retries": self.retries,
            "prefill": last and last.prefill,
            "decode": last and last.decode,
            "prefill_times": last and last.prefill_times,
            "decode_times": last and last.decode_times,
            "output_digest": answer.output_digest,
        }
