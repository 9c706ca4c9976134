"""A request in flight through the gateway, and how requests give way to each other in a burst."""

import asyncio
import contextlib
import time

from harness.core import Route
from harness.gateway.answer import Answer
from harness.surface.generate import DecodeSpan, PrefillSpan

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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._calm.wait(), GIVE_WAY_S)


class Flight:
    """One request in flight: its spans, and a way to abort it from outside its handler."""

    def __init__(self, rid: str, received_ns: int, urgent: "Urgent") -> None:
        self._urgent = urgent
        urgent.begin()
        self.rid = rid
        self.received_ns = received_ns
        self.dispatched_ns: int | None = None
        self.is_handed_over = asyncio.Event()
        self.route: Route | None = None
        self.threshold_tokens: int | None = None
        self.prefill: PrefillSpan | None = None
        self.decode: DecodeSpan | None = None
        self.outcome = "failed"
        self.failure_phase: str | None = None
        self.failure_message: str | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def handed_over(self) -> None:
        """The prefill instance has the request; or it never will."""
        if not self.is_handed_over.is_set():
            self.is_handed_over.set()
            self._urgent.end()

    def row(self, answer: Answer) -> dict[str, object]:
        """The request's line in the gateway's spool."""
        return {
            "rid": self.rid,
            "received_mono_ns": self.received_ns,
            "dispatched_mono_ns": self.dispatched_ns,
            "first_chunk_mono_ns": answer.first_chunk_mono_ns,
            "first_written_mono_ns": answer.first_written_mono_ns,
            "end_mono_ns": time.monotonic_ns(),
            "prefill_instance": self.route and self.route.prefill.name,
            "decode_instance": self.route and self.route.decode.name,
            "crosses": self.route and self.route.crosses,
            "outcome": self.outcome,
            "failure_phase": self.failure_phase,
            "failure_message": self.failure_message,
            "threshold_tokens": self.threshold_tokens,
            "prefill": self.prefill,
            "decode": self.decode,
        }
