"""A launcher as the testbed starts it, for tests: told its configuration, heard, and gone."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness.engine.sglang.config import LauncherConfig
from harness.engine.sglang.server import living_members

ROOT = Path(__file__).parents[1]
KEY = "a-key-that-stands-in-no-file"
PATIENCE_S = 600.0


class Launcher:
    """One ``python -m harness.engine.sglang``."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def hear(self) -> dict[str, Any]:
        """The next event; {} at the end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return msgspec.json.decode(line, type=dict[str, Any]) if line else {}

    def end(self) -> int:
        """As the testbed ends it: closes stdin."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)


@contextmanager
def launcher(config: LauncherConfig, **env: str) -> Iterator[Launcher]:
    """In a session of its own, as the testbed's children are."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.engine.sglang"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | env,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        yield Launcher(process)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def groups_under(launcher: Launcher) -> list[int]:
    """Process groups of the servers: each leads one."""
    children = Path(f"/proc/{launcher.process.pid}/task/{launcher.process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def until_gone(groups: list[int]) -> None:
    """Returns when nothing of them lives; the test's own time limit is the bound."""
    deadline_s = time.monotonic() + PATIENCE_S
    while any(living_members(group) for group in groups):
        assert time.monotonic() < deadline_s, groups
        time.sleep(0.05)
