"""The run of one shard of the schedule: counts, rows, and how it is started and stopped.

Open loop: the dispatcher wakes for each planned time and spawns; it never waits for a request, and
nothing is shared between requests, so a slow server delays no send. Times are absolute,
``planned_mono_ns = start_mono_ns + planned_s / time_scale * 1e9``, so that one late wake-up does
not shift the next.

Closed loop: ``concurrency`` slots take the requests in order. A slot is free at ``start_mono_ns``,
then whenever its request's answer is over, whatever became of it; the next request is planned for

    planned_mono_ns = the instant the slot became free + think_time_s / time_scale * 1e9

so latency counts from there, and what the client itself takes to send is send lag as ever.
"""

import time
from array import array
from collections.abc import Callable
from typing import Protocol

import gevent
from gevent.event import AsyncResult, Event
from gevent.pool import Group

from harness.core import LoadError, Request
from harness.load.alarm import Alarm
from harness.load.client import CONNECT_AHEAD_S, Aborted, Client, Prepared
from harness.load.plan import Plan
from harness.load.schedule import Shard
from harness.load.spool import Row

#: Rows of requests that were never sent between two looks at the event loop.
_ROWS_AT_ONCE = 256


class RowSink(Protocol):
    """Where rows go: a spool of this host, or the way to the master's."""

    def append(self, row: Row) -> None:
        """Keep one row. Raises OSError when it cannot."""


class Replay:
    """One shard's run. ``slots`` is its share of a closed loop's concurrency, None: open loop."""

    def __init__(
        self, plan: Plan, shard: Shard, client: Client, sink: RowSink, slots: int | None = None
    ) -> None:
        self.path = plan.path
        self._time_scale = plan.time_scale
        self._think_ns = round(plan.think_time_s / plan.time_scale * 1e9)
        self._shard = shard
        self._client = client
        self._sink = sink
        self._slots = slots
        self._alarm = Alarm()
        self._start = AsyncResult()
        self._stopping = Event()
        self._finished = Event()
        self._requests = Group()
        self._in_flight: dict[int, Row] = {}
        self._written = bytearray(len(shard))
        self._next = 0
        self._begun = False
        self.lags_ns = array("q")
        self.num_completed = 0
        self.num_failed = 0
        self.num_unsent = 0
        self.error: BaseException | None = None

    @property
    def num_planned(self) -> int:
        return len(self._shard)

    @property
    def num_lost(self) -> int:
        """Always 0 once it is over: only a worker that dies leaves requests without a row."""
        return self.num_planned - self.num_completed - self.num_failed - self.num_unsent

    @property
    def num_sent(self) -> int:
        return len(self.lags_ns)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def send_lag_p99_s(self) -> float | None:
        """Nearest-rank 99th percentile of sent - planned, wall seconds; None if none was sent."""
        return lag_p99_s(self.lags_ns)

    def start_at(self, start_mono_ns: int) -> None:
        """Let planned time 0 be ``start_mono_ns`` of CLOCK_MONOTONIC."""
        if self._start.ready():
            self.fail(LoadError("the run was started twice; start_mono_ns is given once."))
            return
        self._start.set(start_mono_ns)

    def stop(self) -> None:
        """Send nothing more and abort what is in flight. Safe to call at any time, repeatedly."""
        self._stopping.set()
        if not self._start.ready():
            self._start.set(None)
        gevent.killall(list(self._requests), Aborted, block=False)

    def fail(self, error: BaseException) -> None:
        """Stop the run because of ``error``, which ``wait`` then raises."""
        if self.error is None:
            self.error = error
        self.stop()

    def wait(self) -> None:
        """Until every planned request has its row. Raises what made the run fail."""
        self._finished.wait()
        if self.error is not None:
            raise self.error

    def run(self, ended: Callable[[Row], None]) -> None:
        """Replay the shard and write a row for every request in it. The dispatcher.

        ``ended`` is told of each request that was sent, once it has its row. A second call does
        nothing: Locust may spawn its user again.
        """
        if self._begun:
            return
        self._begun = True
        start_mono_ns: int | None = self._start.get()
        try:
            with self._alarm:
                if start_mono_ns is None:
                    pass
                elif self._slots is None:
                    self._dispatch(start_mono_ns, ended)
                else:
                    self._open_slots(start_mono_ns, self._slots, ended)
                self._requests.join()
        finally:
            try:
                self._write_remaining(start_mono_ns)
            except OSError as error:
                self.fail(LoadError(f"the spool cannot be written: {error.strerror}."))
            finally:
                self._finished.set()

    def _dispatch(self, start_mono_ns: int, ended: Callable[[Row], None]) -> None:
        for at, request in enumerate(self._shard):
            planned_mono_ns = self._planned_mono_ns(request.planned_s, start_mono_ns)
            prepared = self._client.prepare(request)
            if not self._sleep_until(planned_mono_ns - round(CONNECT_AHEAD_S * 1e9)):
                return
            row = Row(rid=request.rid, index=request.index, planned_mono_ns=planned_mono_ns)
            self._spawn(self._perform, at, request, prepared, row, ended)
            # Let it connect before the next one is prepared, also when sends are due together.
            gevent.sleep(0)

    def _open_slots(self, start_mono_ns: int, slots: int, ended: Callable[[Row], None]) -> None:
        for _ in range(slots):
            self._spawn(self._fill_slot, start_mono_ns, ended)

    def _fill_slot(self, start_mono_ns: int, ended: Callable[[Row], None]) -> None:
        planned_mono_ns = start_mono_ns
        while not self._stopping.is_set() and self._next < len(self._shard):
            at, self._next = self._next, self._next + 1
            request = self._shard[at]
            if not self._sleep_until(planned_mono_ns - round(CONNECT_AHEAD_S * 1e9)):
                return
            row = Row(rid=request.rid, index=request.index, planned_mono_ns=planned_mono_ns)
            free_mono_ns = self._perform(at, request, self._client.prepare(request), row, ended)
            planned_mono_ns = free_mono_ns + self._think_ns

    def _spawn(self, function: Callable[..., object], *arguments: object) -> None:
        greenlet = gevent.Greenlet(function, *arguments)
        greenlet.link_exception(lambda failed: self.fail(failed.exception))
        self._requests.start(greenlet)

    def _planned_mono_ns(self, planned_s: float, start_mono_ns: int) -> int:
        return start_mono_ns + round(planned_s / self._time_scale * 1e9)

    def _sleep_until(self, mono_ns: int) -> bool:
        """False as soon as the run is stopped. The loop's timer is up to a millisecond late."""
        while not self._stopping.is_set():
            left_s = (mono_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0:
                return True
            self._stopping.wait(left_s)
        return False

    def _perform(
        self,
        at: int,
        request: Request,
        prepared: Prepared,
        row: Row,
        ended: Callable[[Row], None],
    ) -> int:
        """One request from its connection to its row; when its answer was over."""
        planned_mono_ns = row.planned_mono_ns
        assert planned_mono_ns is not None
        self._in_flight[at] = row

        def until_planned() -> None:
            self._alarm.sleep_until(planned_mono_ns)
            if self._stopping.is_set():
                raise Aborted
            row.sent_mono_ns = time.monotonic_ns()
            self.lags_ns.append(row.sent_mono_ns - planned_mono_ns)

        self._client.exchange(request, prepared, row, until_planned)
        free_mono_ns = time.monotonic_ns()
        del self._in_flight[at]
        try:
            self._write(at, row)
        except OSError as error:
            self.fail(LoadError(f"the spool cannot be written: {error.strerror}."))
            return free_mono_ns
        if row.outcome != "unsent":
            ended(row)
        return free_mono_ns

    def _write(self, at: int, row: Row) -> None:
        self._sink.append(row)
        self._written[at] = 1
        self.num_completed += row.outcome == "completed"
        self.num_failed += row.outcome == "failed"
        self.num_unsent += row.outcome == "unsent"

    def _write_remaining(self, start_mono_ns: int | None) -> None:
        """Rows for what was never sent, and for what an error of this process cut short."""
        for at in range(len(self._shard)):
            if self._written[at]:
                continue
            request = self._shard[at]
            row = self._in_flight.get(at) or Row(rid=request.rid, index=request.index)
            if row.sent_mono_ns is not None and row.outcome == "unsent":
                row.outcome = "failed"
                row.failure_phase = "aborted"
                row.failure_message = "the load process failed while this request was in flight"
            elif start_mono_ns is not None and self._slots is None:
                row.planned_mono_ns = self._planned_mono_ns(request.planned_s, start_mono_ns)
            self._write(at, row)
            if at % _ROWS_AT_ONCE == 0:
                gevent.sleep(0)  # a million rows take seconds, and a master waits for heartbeats


def lag_p99_s(lags_ns: "array[int]") -> float | None:
    """Nearest-rank 99th percentile of send lags, wall seconds; None where there is none."""
    if not lags_ns:
        return None
    rank = -(-99 * len(lags_ns) // 100)
    return sorted(lags_ns)[rank - 1] / 1e9
