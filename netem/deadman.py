"""The dead-man: a process that gives a shaped interface back when nobody is there to do it.

    python -m netem.deadman < {"record": ..., "silence_s": ...} + beats

It holds the record of what was changed (``netem.restoration``) and undoes it once: when standard
input ends, which the kernel brings about however the other side dies; when no line came for
``silence_s``, which is how a side that hangs looks; and at SIGTERM, which a service manager sends
to all. It is the way an orderly end goes too. Then it prints ``{"problems": [...]}`` and exits.

Everything is imported before it says that it is ready; where it may, it asks the kernel to be the
last process killed for memory.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from netem.link import LinkError
from netem.restoration import NicRecord, restore
from netem.state import LeftBehindError

#: How often the other side is heard from, and how long a silence means that it is gone.
BEAT_S, SILENCE_S = 1.0, 10.0
_ANSWER_S, _EXIT_S = 20.0, 20.0
_NEVER_KILLED = "-1000"


class DeadMan:
    """A running dead-man, from the side it watches."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="dead-man beats", daemon=True)

    def start(self, record: NicRecord, silence_s: float) -> None:
        configuration = {"record": asdict(record), "silence_s": silence_s}
        with suppress(BrokenPipeError):
            self._stdin.write(json.dumps(configuration).encode() + b"\n")
        if self._answer().get("event") != "ready":
            raise LinkError("the dead-man process, which would give the interface back, is not up")
        self._beats.start()

    @property
    def is_watching(self) -> bool:
        return self.process.poll() is None

    def release(self) -> tuple[str, ...] | None:
        """Let it undo everything; what it could not, or None when it was dead already."""
        self._stop.set()
        if self._beats.is_alive():
            self._beats.join()
        with suppress(BrokenPipeError):
            self._stdin.close()
        problems = self._answer().get("problems")
        self._stdout.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S)
        return None if problems is None else tuple(problems)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self._stdin.write(b"beat\n")
            except BrokenPipeError:
                return

    def _answer(self) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        line = self._stdout.readline() if poll.poll(_ANSWER_S * 1e3) else b""
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer


@contextmanager
def dead_man(record: NicRecord, log: IO[bytes], silence_s: float = SILENCE_S) -> Iterator[DeadMan]:
    """Have ``record`` undone at the end, by the dead-man or, if that was killed, from here.

    LeftBehindError at the end when the interface is not as it was.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "netem.deadman"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        bufsize=0,
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        # Out of reach of what ends the other side: a terminal's signals, its process group.
        start_new_session=True,
    )
    running = DeadMan(process)
    try:
        running.start(record, silence_s)
        yield running
    finally:
        problems = running.release()
        if problems is None:
            process.kill()
            process.wait()
            problems = restore(record)
        if problems:
            raise LeftBehindError("; ".join(problems))


def watch(silence_s: float, stop: int) -> str:
    """Wait for the end of whoever holds standard input; returns how it came."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(stop, select.POLLIN)
    while ready := poll.poll(silence_s * 1e3):
        if any(descriptor == stop for descriptor, _ in ready):
            return "it was told to by SIGTERM"
        if not os.read(0, 65536):
            return "the link was closed or its process died"
    return f"nothing was heard from the link's process for {silence_s:g} s"


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    stop, stopped = os.pipe()
    signal.signal(signal.SIGTERM, lambda _signum, _frame: os.write(stopped, b"t"))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_NEVER_KILLED)
    with os.fdopen(os.dup(0), "rb", buffering=0) as configuration:
        document = json.loads(configuration.readline())
    record = NicRecord.load(document["record"])
    _say({"event": "ready"})
    reason = watch(document["silence_s"], stop)
    try:
        problems = list(restore(record))
    except (OSError, LinkError) as error:
        problems = [str(error)]
    _say({"problems": problems, "reason": reason})
    outcome = "; ".join(problems) or "as it was"
    os.write(2, f"{record.interface} was given back since {reason}: {outcome}\n".encode())


def _say(message: dict[str, object]) -> None:
    with suppress(BrokenPipeError):  # nobody is left to hear it
        os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
