"""Planned time for emulated engines: wake-ups at absolute CLOCK_MONOTONIC instants.

An event loop rounds its timers to a millisecond. On Linux one timerfd serves the whole process: the
kernel ends the loop's poll when the first instant is due, about 0.1 ms late, with no thread to
switch to. Elsewhere the loop's own timer is used, a millisecond late. A late wake-up never
accumulates: instants are planned from the previous planned instant, not from when the process woke.
"""

import asyncio
import heapq
import time
from types import TracebackType
from typing import Self

from harness import timerfd


class Alarm:
    """Context manager around the timer; used from the event loop that it is opened in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[int, int, asyncio.Future[None]]] = []
        self._sequence = 0
        self._timer: timerfd.TimerFd | None = None

    def __enter__(self) -> Self:
        if timerfd.AVAILABLE:
            self._timer = timerfd.TimerFd()
            self._loop.add_reader(self._timer.fileno(), self._ring)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._loop.remove_reader(self._timer.fileno())
            self._timer.close()

    def now_ns(self) -> int:
        """The clock that instants are of."""
        return time.monotonic_ns()

    async def until(self, mono_ns: int) -> int:
        """Return at ``mono_ns``, or at once when it has passed; gives the time of waking in ns."""
        if mono_ns <= time.monotonic_ns():
            # A planned instant may lie in the past after a late wake-up; others still get a turn.
            await asyncio.sleep(0)
            return time.monotonic_ns()
        future: asyncio.Future[None] = self._loop.create_future()
        self._sequence += 1
        heapq.heappush(self._due, (mono_ns, self._sequence, future))
        if self._due[0][2] is future:
            self._arm(mono_ns)
        await future
        return time.monotonic_ns()

    def _ring(self) -> None:
        """Wake whoever is due, all of them together, and set the timer for the next."""
        now_ns = time.monotonic_ns()
        while self._due and self._due[0][0] <= now_ns:
            future = heapq.heappop(self._due)[2]
            if not future.done():  # the waiter may have been cancelled
                future.set_result(None)
        # Setting the timer also clears the expiry that made the descriptor readable.
        self._arm(self._due[0][0] if self._due else 0)

    def _arm(self, mono_ns: int) -> None:
        """Ring at ``mono_ns``; 0 stops the timer."""
        if self._timer is not None:
            self._timer.arm(mono_ns)
        elif mono_ns:
            left_s = (mono_ns - time.monotonic_ns()) / 1e9
            self._loop.call_later(max(0.0, left_s), self._ring)
