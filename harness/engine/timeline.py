"""Planned time for emulated engines: wake-ups at absolute CLOCK_MONOTONIC instants.

An event loop rounds its timers to a millisecond. On Linux one timerfd serves the whole process: the
kernel ends the loop's poll when the first instant is due, about 0.1 ms late, with no thread to
switch to. Elsewhere the loop's own timer is used, a millisecond late. A late wake-up never
accumulates: instants are planned from the previous planned instant, not from when the process woke.
"""

import asyncio
import ctypes
import heapq
import os
import sys
import time
from types import TracebackType
from typing import Self

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: interval, then the instant; seconds and nanoseconds each."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Context manager around the timer; used from the event loop that it is opened in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[int, int, asyncio.Future[None]]] = []
        self._sequence = 0
        self._timer_fd: int | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> Self:
        if sys.platform == "linux":
            # os.timerfd_create came with Python 3.13.
            fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
            self._timer_fd = fd
            self._loop.add_reader(fd, self._ring)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer_fd is not None:
            self._loop.remove_reader(self._timer_fd)
            os.close(self._timer_fd)

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
        if self._timer_fd is None:
            if mono_ns:
                self._loop.call_at(self._loop.time() + self._left_s(mono_ns), self._ring)
            return
        spec = _TimerSpec(0, 0, *divmod(mono_ns, 1_000_000_000))
        if self._libc.timerfd_settime(self._timer_fd, _ABSOLUTE, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _left_s(self, mono_ns: int) -> float:
        return max(0.0, (mono_ns - time.monotonic_ns()) / 1e9)
