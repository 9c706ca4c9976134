"""The schedule, replayed by Locust: one user whose greenlet dispatches, one greenlet a request.

The dispatcher wakes for each planned time and spawns; it never waits for a request, and nothing is
shared between requests, so a slow server delays no send. Times are absolute,
``planned_mono_ns = start_mono_ns + planned_s / time_scale * 1e9``, so that one late wake-up does
not shift the next. Locust's request event fires when a request ends, with its TTFT.
"""

import time

import gevent
from gevent import socket
from gevent.event import AsyncResult, Event
from gevent.pool import Group
from locust import User
from locust.env import Environment
from locust.exception import StopUser
from locust.stats import RequestStats

from harness import timerfd
from harness.core import LoadError, Request
from harness.load.client import CONNECT_AHEAD_S, Aborted, Client, Prepared
from harness.load.completion import StreamError
from harness.load.plan import Plan
from harness.load.spool import Row, Spool


class Replay:
    """The run of one schedule: its counts, its rows, and how it is started and stopped."""

    def __init__(
        self, plan: Plan, schedule: tuple[Request, ...], client: Client, spool: Spool
    ) -> None:
        self.path = plan.path
        self._time_scale = plan.time_scale
        self._schedule = schedule
        self._client = client
        self._spool = spool
        self._start = AsyncResult()
        self._stopping = Event()
        self._finished = Event()
        self._requests = Group()
        self._in_flight: dict[str, Row] = {}
        self._unwritten = {request.rid for request in schedule}
        self._lags_ns: list[int] = []
        self.num_completed = 0
        self.num_failed = 0
        self.num_unsent = 0
        self.error: BaseException | None = None

    @property
    def num_sent(self) -> int:
        return len(self._lags_ns)

    @property
    def send_lag_p99_s(self) -> float | None:
        """Nearest-rank 99th percentile of sent - planned, wall seconds; None if none was sent."""
        if not self._lags_ns:
            return None
        rank = -(-99 * len(self._lags_ns) // 100)
        return sorted(self._lags_ns)[rank - 1] / 1e9

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

    def run(self, environment: Environment) -> None:
        """Replay the schedule and write a row for every request in it. The dispatcher."""
        start_mono_ns: int | None = self._start.get()
        try:
            if start_mono_ns is not None:
                self._dispatch(start_mono_ns, environment)
            self._requests.join()
        finally:
            try:
                self._write_remaining(start_mono_ns)
            except OSError as error:
                self.fail(LoadError(f"the spool cannot be written: {error.strerror}."))
            finally:
                self._finished.set()

    def _dispatch(self, start_mono_ns: int, environment: Environment) -> None:
        for request in self._schedule:
            prepared = self._client.prepare(request)
            planned_mono_ns = self._planned_mono_ns(request, start_mono_ns)
            if not self._sleep_until(planned_mono_ns - round(CONNECT_AHEAD_S * 1e9)):
                return
            row = Row(rid=request.rid, index=request.index, planned_mono_ns=planned_mono_ns)
            greenlet = gevent.Greenlet(self._perform, request, prepared, row, environment)
            greenlet.link_exception(lambda failed: self.fail(failed.exception))
            self._requests.start(greenlet)
            # Let it connect before the next one is prepared, also when sends are due together.
            gevent.sleep(0)

    def _planned_mono_ns(self, request: Request, start_mono_ns: int) -> int:
        return start_mono_ns + round(request.planned_s / self._time_scale * 1e9)

    def _sleep_until(self, mono_ns: int) -> bool:
        """False as soon as the run is stopped. The loop's timer is up to a millisecond late."""
        while not self._stopping.is_set():
            left_s = (mono_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0:
                return True
            self._stopping.wait(left_s)
        return False

    def _perform(
        self, request: Request, prepared: Prepared, row: Row, environment: Environment
    ) -> None:
        planned_mono_ns = row.planned_mono_ns
        assert planned_mono_ns is not None
        self._in_flight[row.rid] = row

        def until_planned() -> None:
            sleep_precisely(planned_mono_ns)
            if self._stopping.is_set():
                raise Aborted
            row.sent_mono_ns = time.monotonic_ns()
            self._lags_ns.append(row.sent_mono_ns - planned_mono_ns)

        self._client.exchange(request, prepared, row, until_planned)
        del self._in_flight[row.rid]
        try:
            self._write(row)
        except OSError as error:
            self.fail(LoadError(f"the spool cannot be written: {error.strerror}."))
            return
        if row.outcome != "unsent":
            self._fire(row, environment)

    def _write(self, row: Row) -> None:
        self._spool.append(row)
        self._unwritten.remove(row.rid)
        self.num_completed += row.outcome == "completed"
        self.num_failed += row.outcome == "failed"
        self.num_unsent += row.outcome == "unsent"

    def _write_remaining(self, start_mono_ns: int | None) -> None:
        """Rows for what was never sent, and for what an error of this process cut short."""
        for request in self._schedule:
            if request.rid not in self._unwritten:
                continue
            row = self._in_flight.get(request.rid) or Row(rid=request.rid, index=request.index)
            if row.sent_mono_ns is not None and row.outcome == "unsent":
                row.outcome = "failed"
                row.failure_phase = "aborted"
                row.failure_message = "the load process failed while this request was in flight"
            elif start_mono_ns is not None:
                row.planned_mono_ns = self._planned_mono_ns(request, start_mono_ns)
            self._write(row)

    def _fire(self, row: Row, environment: Environment) -> None:
        """Tell Locust, with TTFT as response time: from the planned send, as everywhere here."""
        assert row.planned_mono_ns is not None
        ttft_ms = None
        if row.first_token_mono_ns is not None:
            ttft_ms = (row.first_token_mono_ns - row.planned_mono_ns) / 1e6
        exception = None
        if row.failure_phase is not None:
            # Locust keeps one entry for each distinct text: the phase, never the message.
            exception = StreamError(row.failure_phase, f"failed in phase {row.failure_phase}")
        environment.events.request.fire(
            request_type="POST",
            name=self.path,
            response_time=ttft_ms,
            response_length=row.completion_tokens or 0,
            exception=exception,
            context={"rid": row.rid, "ttft_ms": ttft_ms, "outcome": row.outcome},
        )


def sleep_precisely(mono_ns: int) -> None:
    """Until ``mono_ns``, within a tenth of a millisecond where there is a timerfd.

    Yielding in a loop would be as precise and take the core that the servers need just then.
    """
    if timerfd.AVAILABLE:
        with timerfd.TimerFd() as timer:
            timer.arm(mono_ns)
            socket.wait_read(timer.fileno())
    else:
        gevent.sleep(max(0.0, (mono_ns - time.monotonic_ns()) / 1e9))


class ReplayEnvironment(Environment):  # type: ignore[misc]  # locust is not checked here
    """Locust's environment with the replay that its user runs."""

    def __init__(self, replay: Replay) -> None:
        # An exception in the dispatcher must end it; Locust would log it and start over.
        super().__init__(user_classes=[ScheduleUser], catch_exceptions=False)
        self.stats = RequestStats(use_response_times_cache=False)
        self.replay = replay


def replay_schedule(user: User) -> None:
    """The one task of the one user."""
    try:
        user.environment.replay.run(user.environment)
    except Exception as error:
        user.environment.replay.fail(error)
        raise
    raise StopUser


class ScheduleUser(User):  # type: ignore[misc]  # locust is not checked here
    """Replays the whole schedule once."""

    tasks = [replay_schedule]  # noqa: RUF012 - the attribute that Locust reads
