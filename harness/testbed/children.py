"""Child processes of the testbed: started, spoken to in JSON lines, watched, and gone at the end.

Each child has its own process group, so that Ctrl-C reaches the harness alone, which then stops
the children in order. Closing a child's stdin asks it to stop; one that does not is terminated,
then killed, by its own process group. A harness that dies closes the pipes, which stops them too.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from harness.core import PrfaasError

#: How long a child may take to stop by itself, wall time.
GRACE_S = 5.0

Popen = Callable[..., "subprocess.Popen[bytes]"]


class Child:
    """One child process; ``blame`` is raised for what it does wrong."""

    def __init__(
        self,
        name: str,
        process: "subprocess.Popen[bytes]",
        log_path: Path,
        blame: type[PrfaasError],
        events: "queue.SimpleQueue[tuple[Child, dict[str, Any]]]",
    ) -> None:
        self.name = name
        self.process = process
        self.log_path = log_path
        self.blame = blame
        self.stopping = False
        #: The latest event of each kind that nobody has taken yet.
        self.heard: dict[str, dict[str, Any]] = {}
        self._events = events
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    def tell(self, order: Mapping[str, object] | msgspec.Struct) -> None:
        """Send one JSON line."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self.blame(f"{self.name} is gone; {self.last_words()}") from error

    def last_words(self) -> str:
        """The end of the child's log, for a message."""
        try:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        said = f"its last line was: {lines[-1][:300]}" if lines else "it wrote nothing"
        return f"{said} (log: {self.log_path})"

    def stop(self) -> None:
        """Ask, then insist. Returns when the process is gone."""
        self.stopping = True
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it went first
            self.process.stdin.close()
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            if signum is not None:
                _signal_group(self.process, signum)
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue
            break
        self._reader.join(GRACE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.MsgspecError:
                event = {"event": "noise", "line": line[:300].decode(errors="replace")}
            self._events.put((self, event))
        status = self.process.wait()
        self._events.put((self, {"event": "exited", "status": status}))


class Children:
    """Context manager: every child that was started is gone when it ends, last started first."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        #: What the last child was granted, for the record.
        self.priority = "normal priority"
        self._events: queue.SimpleQueue[tuple[Child, dict[str, Any]]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            while self._children:
                self.stop(self._children[-1])
        finally:
            # An interrupt during the orderly way out; a stopped process heeds this one too.
            for child in self._children:
                _signal_group(child.process, signal.SIGKILL)

    def start(
        self,
        name: str,
        popen: Popen,
        arguments: list[str],
        log_path: Path,
        blame: type[PrfaasError],
        rank: int = 0,
    ) -> Child:
        """Start ``python ARGUMENTS`` by ``popen``, its stderr going to ``log_path``.

        A ``rank`` above 0 asks for that real-time priority.
        """
        with log_path.open("ab") as log:
            process = popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        child = Child(name, process, log_path, blame, self._events)
        self._children.append(child)
        if rank:
            self.priority = _prefer(process, rank)
        return child

    def stop(self, child: Child) -> None:
        """Stop one child."""
        child.stop()
        self._children.remove(child)

    def next_event(self, timeout_s: float) -> tuple[Child, dict[str, Any]] | None:
        """The next event of any child, None after ``timeout_s``. A child that failed raises."""
        try:
            child, event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if event["event"] == "failed":
            raise child.blame(f"{child.name}: {event['message']}")
        if event["event"] == "exited" and not child.stopping:
            status = event["status"]
            how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
            raise child.blame(f"{child.name} {how} in mid-run; {child.last_words()}")
        child.heard[event["event"]] = event
        return child, event

    def wait_for(self, child: Child, event: str, timeout_s: float) -> dict[str, Any]:
        """Wait until ``child`` has reported ``event``; what others report meanwhile is kept."""
        deadline_s = time.monotonic() + timeout_s
        while event not in child.heard:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self.next_event(left_s) is None:
                break
        if event in child.heard:
            return child.heard.pop(event)
        raise child.blame(
            f"{child.name} did not report {event!r} within {timeout_s:g} s; {child.last_words()}"
        )


def _prefer(process: "subprocess.Popen[bytes]", rank: int) -> str:
    """Ask for a real-time priority; says what was granted (root gets it).

    These processes sleep nearly all the time and must run promptly when they wake: what a
    neighbour on the machine makes them wait would read as queueing. The kernel keeps a share of
    each core for everyone else.
    """
    try:
        os.sched_setscheduler(process.pid, os.SCHED_RR, os.sched_param(rank))
    except (PermissionError, ProcessLookupError):
        return "normal priority"
    return "real-time priority"


def _signal_group(process: "subprocess.Popen[bytes]", signum: signal.Signals) -> None:
    """Signal the group that the child leads, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)
