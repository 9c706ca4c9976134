"""One launched SGLang server: its process group, its log, whether it is ready, and its end.

What the server writes goes through the launcher into its log file, so that the last lines tell a
failure and the bearer token, which SGLang prints among its settings, stands in no file.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import IO

from harness.core import EngineError
from harness.engine.sglang import boot
from harness.engine.sglang.command import arguments, environment
from harness.engine.sglang.config import LauncherConfig, ServerConfig
from harness.engine.sglang.failures import (
    TAIL_LINES,
    Failure,
    how_it_ended,
    is_hopeless,
    name_failure,
    server_error,
)
from harness.engine.sglang.versions import Version

#: From SIGTERM to SIGKILL; the testbed gives the launcher 5 s before it insists.
TERM_GRACE_S = 2.0
#: A line longer than that is cut: progress bars have no end of line.
MAX_LINE_BYTES = 64 * 1024


async def launch(
    config: LauncherConfig, asked: ServerConfig, version: Version, python: str
) -> "Server":
    """Start a server; EngineError of phase launch where its interpreter does not start."""
    words = arguments(config, asked, version)
    folder = tempfile.TemporaryDirectory(prefix="prfaas-sglang-")
    log_path = str(Path(config.log_directory) / f"{asked.name}.log")
    log: IO[bytes] | None = None
    try:
        log = open(log_path, "ab", buffering=0)  # noqa: SIM115  # the server's, closed by stop
        log.write(f"$ {python} -m sglang.launch_server {shlex.join(words)}\n".encode())
        process = await asyncio.create_subprocess_exec(
            python,
            boot.__file__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=environment(config, asked, dict(os.environ), folder.name),
            cwd=config.log_directory,
        )
    except OSError as error:
        folder.cleanup()
        if log is not None:
            log.close()
        failure = Failure("launch", str(error), "see engine.python and the run directory")
        raise server_error(asked.name, failure, "did not start", log_path) from error
    assert process.stdin is not None
    if config.api_key:
        words = [*words, "--api-key", config.api_key]
    process.stdin.write(json.dumps(words).encode() + b"\n")
    return Server(config, asked, process, folder, log)


class Server:
    """A launched server; after ``stop`` it and all its processes are gone."""

    def __init__(
        self,
        config: LauncherConfig,
        asked: ServerConfig,
        process: asyncio.subprocess.Process,
        folder: "tempfile.TemporaryDirectory[str]",
        log: IO[bytes],
    ) -> None:
        self.name, self.role, self.port = asked.name, asked.role, asked.port
        self.bootstrap_port = asked.bootstrap_port
        self.url = f"http://{config.address}:{asked.port}"
        self.log_path = str(log.name)
        self.was_ready = False
        #: What it said of plugins that did not load.
        self.warnings: list[str] = []
        self._process, self._folder, self._log = process, folder, log
        self._key = config.api_key.encode()
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._hopeless = asyncio.Event()
        self._copying = asyncio.create_task(self._copy())

    @property
    def pid(self) -> int:
        """Of the server's first process, which leads its process group."""
        return self._process.pid

    async def ended(self) -> EngineError:
        """Wait until the server cannot serve any more; says why."""
        ending = asyncio.create_task(self._process.wait())
        hopeless = asyncio.create_task(self._hopeless.wait())
        try:
            await asyncio.wait((ending, hopeless), return_when=asyncio.FIRST_COMPLETED)
        finally:
            hopeless.cancel()
            ending.cancel()
        if self._process.returncode is not None:
            # All that it wrote; something that it started may hold the pipe open.
            await asyncio.wait((self._copying,), timeout=1.0)
        return self.error()

    def error(self, phase_of_running: str = "") -> EngineError:
        """What became of it, in words; ``phase_of_running``: what a running one did not do."""
        status = self._process.returncode
        failure = name_failure(status, list(self._lines), self.was_ready)
        if status is None and phase_of_running:
            told = failure.told if failure.phase != "launch" else (self._lines or [""])[-1][:300]
            phase = failure.phase if failure.phase != "launch" else "ready"
            failure = Failure(phase, told, "raise engine.ready_timeout, or see the log")
            return server_error(self.name, failure, phase_of_running, self.log_path)
        how = "cannot get ready" if status is None else how_it_ended(status)
        mid_run = " in mid-run" if self.was_ready else ""
        return server_error(self.name, failure, how + mid_run, self.log_path)

    async def stop(self) -> None:
        """Ask the server, then kill its process group; returns when all of it is gone."""
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), TERM_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        await self._process.wait()
        deadline_s = time.monotonic() + TERM_GRACE_S
        while living_members(group) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        self._copying.cancel()
        await asyncio.wait((self._copying,))
        self._log.close()
        self._folder.cleanup()

    async def _copy(self) -> None:
        """Its output to its log, line by line."""
        assert self._process.stdout is not None
        rest = b""
        while piece := await self._process.stdout.read(MAX_LINE_BYTES):
            *whole, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                whole, rest = [*whole, rest], b""
            for line in whole:
                self._take(line)
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        line = line.replace(self._key, b"***") if self._key else line
        self._log.write(line + b"\n")
        text = line.decode(errors="replace")
        self._lines.append(text)
        if "Failed to execute general plugin" in text:
            self.warnings.append(text[-300:])
        if not self.was_ready and is_hopeless(text):
            self._hopeless.set()


def living_members(group: int) -> list[int]:
    """Processes of a process group that still run; a zombie does not."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, of_group = (
                Path(entry.path, "stat").read_text().rpartition(") ")[2].split(maxsplit=3)[:3]
            )
            if int(of_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found
