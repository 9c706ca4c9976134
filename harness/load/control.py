"""The line protocol between a load process and whoever started it.

Towards the parent (stdout), one JSON object a line: ``ready`` once, ``progress`` at most every
0.5 s, ``finished`` once. From the parent (stdin): ``{"start_mono_ns": N}`` once, then possibly
``{"stop": true}``. The end of stdin means the parent is gone and stops the run.
"""

import os
import select
import time

import gevent
import msgspec
from gevent import socket

from harness.core import LoadError, ScenarioError
from harness.load.user import Replay

PROGRESS_INTERVAL_S = 0.5
MAX_LINE_BYTES = 1 << 16
#: A start further away than this is not a reading of this host's CLOCK_MONOTONIC.
MAX_START_DISTANCE_S = 600.0
#: How long the last line waits for a parent that does not read.
FINISH_WAIT_S = 10.0


class Ready(msgspec.Struct, tag_field="event", tag="ready"):
    """The schedule is read, prompts are built, the Locust user waits for its start."""


class Progress(msgspec.Struct, tag_field="event", tag="progress"):
    sent: int
    completed: int
    failed: int


class Finished(msgspec.Struct, tag_field="event", tag="finished"):
    """Every planned request has its row; ``send_lag_p99_s`` is wall time, null if none was sent."""

    completed: int
    failed: int
    unsent: int
    send_lag_p99_s: float | None


class _Command(msgspec.Struct, forbid_unknown_fields=True):
    start_mono_ns: int | None = None
    stop: bool = False


def apply(line: bytes, replay: Replay) -> None:
    """Do what one line from the parent says. Raises ScenarioError."""
    expected = 'a line is {"start_mono_ns": N} or {"stop": true}'
    try:
        command = msgspec.json.decode(line, type=_Command)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"stdin: {error}; {expected}.") from error
    if command.stop:
        replay.stop()
    elif command.start_mono_ns is None:
        raise ScenarioError(f"stdin: nothing to do in {line[:80]!r}; {expected}.")
    else:
        distance_s = (command.start_mono_ns - time.monotonic_ns()) / 1e9
        if abs(distance_s) > MAX_START_DISTANCE_S:
            raise ScenarioError(
                f"stdin: start_mono_ns is {distance_s:.0f} s from now; it must be a reading of "
                f"CLOCK_MONOTONIC on this host within {MAX_START_DISTANCE_S:g} s."
            )
        replay.start_at(command.start_mono_ns)


def listen(fd: int, replay: Replay) -> None:
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
            replay.fail(LoadError(f"stdin cannot be read: {error.strerror}."))
            return
        if not data:
            replay.stop()
            return
        *lines, pending = (pending + data).split(b"\n")
        try:
            for line in filter(bytes.strip, lines):
                apply(line, replay)
            if len(pending) > MAX_LINE_BYTES:
                raise ScenarioError(f"stdin: a line of more than {MAX_LINE_BYTES} bytes.")
        except ScenarioError as error:
            replay.fail(error)
            return


def report_progress(fd: int, replay: Replay) -> None:
    """Write a progress line when counts changed, at most twice a second. A greenlet of its own."""
    shown: Progress | None = None
    while True:
        gevent.sleep(PROGRESS_INTERVAL_S)
        now = Progress(replay.num_sent, replay.num_completed, replay.num_failed)
        if now != shown and emit(fd, now, replay):
            shown = now


def emit(fd: int, message: Ready | Progress | Finished, replay: Replay) -> bool:
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
        replay.stop()
    except OSError as error:
        replay.fail(LoadError(f"stdout cannot be written: {error.strerror}."))
    return True


def emit_surely(fd: int, message: Ready | Finished, replay: Replay) -> None:
    """Write one line, waiting a bounded time for a parent that is slow to read; else fail."""
    give_up_s = time.monotonic() + FINISH_WAIT_S
    while not emit(fd, message, replay):
        if time.monotonic() > give_up_s:
            replay.fail(LoadError("stdout is full and nobody reads it; the rows are in the spool."))
            return
        gevent.sleep(0.05)
