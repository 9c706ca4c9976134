"""Planned time for emulated engines: wake-ups at absolute CLOCK_MONOTONIC instants.

An event loop oversleeps by about a millisecond, since its timers are rounded to one. A thread that
waits on a condition variable oversleeps by about 0.1 ms, so one such thread serves a whole worker
process and hands due instants to the event loop in one call. A late wake-up never accumulates:
instants are planned from the previous planned instant, not from when the process woke.
"""

import asyncio
import heapq
import threading
import time
from types import TracebackType
from typing import Self

#: Instants this close to the one that woke the thread leave with it.
TOGETHER_NS = 100_000


class Alarm:
    """Context manager around the waiting thread; ``until`` is called from its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._due: list[tuple[int, int, asyncio.Future[None]]] = []
        self._sequence = 0
        self._closed = False
        self._thread = threading.Thread(target=self._wait, name="alarm", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    async def until(self, mono_ns: int) -> int:
        """Return at ``mono_ns``, or at once when it has passed; gives the time of waking in ns."""
        now_ns = time.monotonic_ns()
        if mono_ns <= now_ns:
            # A planned instant may lie in the past after a late wake-up; others still get a turn.
            await asyncio.sleep(0)
            return time.monotonic_ns()
        future: asyncio.Future[None] = self._loop.create_future()
        with self._condition:
            first = self._due[0][0] if self._due else None
            self._sequence += 1
            heapq.heappush(self._due, (mono_ns, self._sequence, future))
            if first is None or mono_ns < first:
                self._condition.notify()
        await future
        return time.monotonic_ns()

    def _wait(self) -> None:
        with self._condition:
            while not self._closed:
                if not self._due:
                    self._condition.wait()
                    continue
                now_ns = time.monotonic_ns()
                if self._due[0][0] > now_ns:
                    self._condition.wait((self._due[0][0] - now_ns) / 1e9)
                    continue
                ready = []
                while self._due and self._due[0][0] <= now_ns + TOGETHER_NS:
                    ready.append(heapq.heappop(self._due)[2])
                self._loop.call_soon_threadsafe(_resolve, ready)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # the waiter may have been cancelled
            future.set_result(None)
