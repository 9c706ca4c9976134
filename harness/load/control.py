"""The line protocol between a load process and whoever started it.

Towards the parent (stdout), one JSON object a line: with several workers a ``worker`` for each
before the run, and a ``worker_after`` for each at its end; ``ready`` once, ``progress`` at most
every 0.5 s, ``finished`` once. From the parent (stdin): ``{"start_mono_ns": N}`` once, then
possibly ``{"stop": true}``. The end of stdin means the parent is gone and stops the run.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import gevent
import msgspec
from gevent import socket

from harness.core import LoadError, ScenarioError

PROGRESS_INTERVAL_S = 0.5
MAX_LINE_BYTES = 1 << 16
#: A start further away than this is not a reading of this host's CLOCK_MONOTONIC.
MAX_START_DISTANCE_S = 600.0
#: How long the last line waits for a parent that does not read.
FINISH_WAIT_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Ready(msgspec.Struct, tag_field="event", tag="ready"):
    """The schedule is read, prompts are built, the Locust user waits for its start."""


class Progress(msgspec.Struct, tag_field="event", tag="progress"):
    sent: int
    completed: int
    failed: int


class Finished(msgspec.Struct, tag_field="event", tag="finished"):
    """Every planned request has its row, but the ``lost`` ones, whose worker died; nothing else
    lacks one. ``send_lag_p99_s`` is wall time, null if none was sent."""

    completed: int
    failed: int
    unsent: int
    send_lag_p99_s: float | None
    lost: int = 0


class Worker(msgspec.Struct, tag_field="event", tag="worker"):
    """A worker has joined. Its clock less this host's, and the most that this can be off."""

    worker: int
    host: str
    num_planned: int
    shared_clock: bool
    offset_ns: int
    bound_ns: int


class WorkerAfter(msgspec.Struct, tag_field="event", tag="worker_after"):
    """What became of a worker; ``lost`` says why it was. The clock as measured at the end."""

    worker: int
    lost: str | None
    offset_ns: int
    bound_ns: int
    clock_fault: str | None


class Run(Protocol):
    """What is driven: the replay of one process, or the crew of several."""

    @property
    def num_sent(self) -> int: ...
    @property
    def num_completed(self) -> int: ...
    @property
    def num_failed(self) -> int: ...
    def start_at(self, start_mono_ns: int) -> None:
        """Let planned time 0 be ``start_mono_ns`` of CLOCK_MONOTONIC."""

    def stop(self) -> None:
        """Send nothing more; repeatable."""

    def fail(self, error: BaseException) -> None:
        """Stop because of ``error``."""


Message = Ready | Progress | Finished | Worker | WorkerAfter


class _Command(msgspec.Struct, forbid_unknown_fields=True):
    start_mono_ns: int | None = None
    stop: bool = False


def apply(line: bytes, run: Run) -> None:
    """Do what one line from the parent says. Raises ScenarioError."""
    expected = 'a line is {"start_mono_ns": N} or {"stop": true}'
    try:
        command = msgspec.json.decode(line, type=_Command)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"stdin: {error}; {expected}.") from error
    if command.stop:
        run.stop()
    elif command.start_mono_ns is None:
        raise ScenarioError(f"stdin: nothing to do in {line[:80]!r}; {expected}.")
    else:
        distance_s = (command.start_mono_ns - time.monotonic_ns()) / 1e9
        if abs(distance_s) > MAX_START_DISTANCE_S:
            raise ScenarioError(
                f"stdin: start_mono_ns is {distance_s:.0f} s from now; it must be a reading of "
                f"CLOCK_MONOTONIC on this host within {MAX_START_DISTANCE_S:g} s."
            )
        run.start_at(command.start_mono_ns)


def listen(fd: int, run: Run) -> None:
    """Obey lines from ``fd`` until its end, which stops the run. A greenlet of its own.

    Waits in gevent's loop and reads only when there is something, so neither a thread nor a
    poll interval stands between the parent's death and the stop; ``fd`` keeps its flags, which it
    may share with the parent.
    """
    pending = b""
    while True:
        try:
            socket.wait_read(fd)
            data = os.read(fd, MAX_LINE_BYTES)
        except OSError as error:
            run.fail(LoadError(f"stdin cannot be read: {error.strerror}."))
            return
        if not data:
            run.stop()
            return
        *lines, pending = (pending + data).split(b"\n")
        try:
            for line in filter(bytes.strip, lines):
                apply(line, run)
            if len(pending) > MAX_LINE_BYTES:
                raise ScenarioError(f"stdin: a line of more than {MAX_LINE_BYTES} bytes.")
        except ScenarioError as error:
            run.fail(error)
            return


def report_progress(fd: int, run: Run) -> None:
    """Write a progress line when counts changed, at most twice a second. A greenlet of its own."""
    shown: Progress | None = None
    while True:
        gevent.sleep(PROGRESS_INTERVAL_S)
        now = Progress(run.num_sent, run.num_completed, run.num_failed)
        if now != shown and emit(fd, now, run):
            shown = now


def emit(fd: int, message: Message, run: Run) -> bool:
    """Write one line if the parent has room for it now; false if not.

    A pipe that polls writable takes PIPE_BUF bytes without blocking, and no line is longer, so a
    parent that does not read never delays a request. A parent that closed stdout stops the run.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        return False
    try:
        os.write(fd, msgspec.json.encode(message) + b"\n")
    except BrokenPipeError:
        run.stop()
    except OSError as error:
        run.fail(LoadError(f"stdout cannot be written: {error.strerror}."))
    return True


@contextmanager
def stopped_by_signals(run: Run) -> Iterator[None]:
    """Inside the block SIGTERM and SIGINT stop the run in order."""
    watchers = [gevent.signal_handler(number, run.stop) for number in _SIGNALS]
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()


def drive(run: Run, stdin: int, stdout: int, wait: Callable[[], None]) -> None:
    """Say that it is ready, obey, report, until ``wait`` has returned."""
    emit_surely(stdout, Ready(), run)
    greenlets = [gevent.spawn(listen, stdin, run), gevent.spawn(report_progress, stdout, run)]
    for greenlet in greenlets:
        greenlet.link_exception(lambda failed: run.fail(failed.exception))
    try:
        wait()
    finally:
        gevent.killall(greenlets)


def emit_surely(fd: int, message: Message, run: Run) -> None:
    """Write one line, waiting a bounded time for a parent that is slow to read; else fail."""
    give_up_s = time.monotonic() + FINISH_WAIT_S
    while not emit(fd, message, run):
        if time.monotonic() > give_up_s:
            run.fail(LoadError("stdout is full and nobody reads it; the rows are in the spool."))
            return
        gevent.sleep(0.05)
