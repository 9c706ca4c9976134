"""Whoever waits for rooms: futures and deadlines, on the loop of the receiver's user.

What is decided in a lane reaches its future in a later turn of that loop.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from harness.transport.frames import TransferError
from harness.transport.rooms import Received


@dataclass(slots=True, eq=False)
class Expectation:
    """Somebody waits for the room until its timer rings."""

    room: int
    future: asyncio.Future[Received]
    timer: asyncio.TimerHandle | None = None


class Expectations:
    """At most one a room. ``waiting`` is under its owner's lock."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        expired: Callable[[Expectation], None],
        cancelled: Callable[[Expectation], None],
    ) -> None:
        self.waiting: dict[int, Expectation] = {}
        self._loop, self._expired, self._cancelled = loop, expired, cancelled

    def add(self, room: int, deadline_mono_s: float) -> asyncio.Future[Received]:
        """On the loop, where ``expired`` and ``cancelled`` will be called too."""
        assert room not in self.waiting
        made = self.waiting[room] = Expectation(room, self._loop.create_future())
        left_s = max(0.0, deadline_mono_s - time.monotonic())
        made.timer = self._loop.call_later(left_s, self._expired, made)
        made.future.add_done_callback(lambda done: done.cancelled() and self._cancelled(made))
        return made.future

    def fulfil(self, expectation: Expectation, received: Received) -> None:
        """It waits no more; from any thread."""
        self._loop.call_soon_threadsafe(_hand_over, expectation, received)

    def refuse(self, expectation: Expectation, error: TransferError) -> None:
        """It waits no more; from any thread."""
        self._loop.call_soon_threadsafe(_refuse, expectation, error)


def _hand_over(expectation: Expectation, received: Received) -> None:
    assert expectation.timer is not None
    expectation.timer.cancel()
    if expectation.future.done():
        received.release()  # cancelled a moment ago
    else:
        expectation.future.set_result(received)


def _refuse(expectation: Expectation, error: TransferError) -> None:
    assert expectation.timer is not None
    expectation.timer.cancel()
    if not expectation.future.done():
        expectation.future.set_exception(error)
