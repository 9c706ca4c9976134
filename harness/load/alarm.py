"""Instants to wake at, for any number of greenlets, to a tenth of a millisecond: one timerfd.

gevent's own timers are up to a millisecond late, and yielding in a loop until the time has come
takes the core that the servers need just then. What is due is woken before anything else that the
loop has to do in the same turn, so that a request leaves before the chunks of others are parsed.
"""

import heapq
import time
from types import TracebackType
from typing import Self

import gevent
from gevent.hub import Waiter

from harness import timerfd

_READ = 1
#: libev's highest priority: its callbacks go first.
_FIRST = 2


class Alarm:
    """A context manager; where there is no timerfd, gevent's timers are what there is."""

    def __init__(self) -> None:
        self._timer: timerfd.TimerFd | None = None
        #: Instant, a number that keeps equal instants in order, and who waits for it.
        self._waiting: list[tuple[int, int, Waiter]] = []
        self._count = 0

    def __enter__(self) -> Self:
        if timerfd.AVAILABLE:
            self._timer = timerfd.TimerFd()
            loop = gevent.get_hub().loop
            self._watcher = loop.io(self._timer.fileno(), _READ, priority=_FIRST)
            self._watcher.start(self._ring)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._watcher.stop()
            self._watcher.close()
            self._timer.close()

    def sleep_until(self, mono_ns: int) -> None:
        """Until ``mono_ns`` of CLOCK_MONOTONIC; not at all when that has passed."""
        left_ns = mono_ns - time.monotonic_ns()
        if left_ns <= 0:
            return
        if self._timer is None:
            gevent.sleep(left_ns / 1e9)
            return
        waiter = Waiter()
        self._count += 1
        entry = (mono_ns, self._count, waiter)
        heapq.heappush(self._waiting, entry)
        if self._waiting[0] is entry:
            self._timer.arm(mono_ns)
        waiter.get()

    def _ring(self) -> None:
        """Wake who is due. One that was killed while it waited takes no notice."""
        assert self._timer is not None
        waiting = self._waiting
        while waiting and waiting[0][0] <= time.monotonic_ns():
            heapq.heappop(waiting)[2].switch(None)
        self._timer.arm(waiting[0][0] if waiting else 0)
