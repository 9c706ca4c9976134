"""A helper process and its conversation: JSON lines on standard input and output.

The first line sent is the configuration, the first line received is ``{"event": "ready", ...}``;
after that each request line has one answer line. Standard input is also the lifeline: at its end,
which the kernel brings about however the parent dies, the helper exits.

A helper that dies, falls silent or talks nonsense is a ``LinkError`` of one paragraph: which one,
what it was asked, and the last line of what it wrote to standard error.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from netem.link import LinkError

_ANSWER_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 5.0
_MAX_LINE_BYTES = 1 << 20
_STDERR_TAIL_BYTES = 65536
_QUOTED_CHARACTERS = 300
#: Python draws these around the traceback of an exception group.
_BOX = " \t|+-"

#: Starts a process somewhere: ``subprocess.Popen`` or a site's ``popen``.
Popen = Callable[..., "subprocess.Popen[bytes]"]


class Helper:
    """A running helper process. Safe to ask from several threads."""

    def __init__(
        self, name: str, process: "subprocess.Popen[bytes]", stderr: IO[bytes], timeout_s: float
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name, self.process = name, process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, stderr
        self._timeout_s = timeout_s
        self._doing = "starting"
        self._buffer = b""
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one line, return the answer. LinkError when the helper is gone or says "error"."""
        with self._lock:
            if "op" in request:
                self._doing = f"answering {request['op']!r}"
            self._send(request)
            answer = self._receive()
        if "error" in answer:
            raise LinkError(f"{self.name}: {answer['error']}")
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        except OSError as error:
            raise LinkError(self._obituary()) from error

    def _receive(self) -> dict[str, Any]:
        """The next line the helper prints."""
        deadline_s = time.monotonic() + self._timeout_s
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            if not poll.poll(max(0.0, left_s * 1e3)):
                # An answer that comes later would be taken for that to the next question.
                self.process.kill()
                raise LinkError(
                    f"{self.name} gave no answer within {self._timeout_s:g} s while "
                    f"{self._doing}, so it was ended; is the machine overloaded?"
                )
            received = os.read(self._stdout.fileno(), 65536)
            if not received or len(self._buffer) > _MAX_LINE_BYTES:
                raise LinkError(self._obituary())
            self._buffer += received
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.process.kill()
            raise LinkError(
                f"{self.name} said {_quoted(line)} while {self._doing}, which is no JSON object, "
                "so it was ended"
            )
        return answer

    def __enter__(self) -> "Helper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the lifeline, wait for the exit, kill after a bounded time."""
        self._stdin.close()
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._stdout.close()

    def _obituary(self) -> str:
        try:
            status = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return (
                f"{self.name} closed its output or sent an endless line while {self._doing}, "
                "so it was ended"
            )
        said = self._last_words() or "it left no message (a negative status is a signal's number)"
        return f"{self.name} ended with status {status} while {self._doing}: {said}"

    def _last_words(self) -> str:
        """The last line on standard error that has words: of a traceback, the exception."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        lines = [
            line.decode(errors="replace").strip(_BOX) for line in self._stderr.read().split(b"\n")
        ]
        words = [line for line in lines if line.strip()]
        return words[-1].strip()[:_QUOTED_CHARACTERS] if words else ""


@contextmanager
def helper(
    name: str,
    arguments: Sequence[str],
    configuration: dict[str, Any],
    popen: Popen = subprocess.Popen,
    timeout_s: float = _ANSWER_TIMEOUT_S,
    pass_fds: Sequence[int] = (),
) -> Iterator[tuple[Helper, dict[str, Any]]]:
    """Run ``python -m ARGUMENTS`` as a helper; gives it and its ready line."""
    with tempfile.TemporaryFile() as stderr:
        process = popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            pass_fds=tuple(pass_fds),
            env=_environment(),
            # Ctrl-C goes to the whole foreground group; the helper must outlive its parent's
            # orderly shutdown and leaves by its lifeline.
            start_new_session=True,
        )
        with Helper(name, process, stderr, timeout_s) as running:
            ready = running.ask(configuration)
            if ready.get("event") != "ready":
                raise LinkError(f"{name} said {_quoted(repr(ready).encode())} instead of ready")
            yield running, ready


def _quoted(line: bytes) -> str:
    return repr(line[:_QUOTED_CHARACTERS].decode(errors="replace"))


def _environment() -> dict[str, str]:
    """The caller's, with this package importable whatever the working directory is."""
    root = str(Path(__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root}
