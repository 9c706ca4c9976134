"""Child processes: spoken to in lines, watched, and gone at the end however they behave."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.core import EngineError
from harness.testbed.children import Child, Children

ECHO = """
import json, sys
print(json.dumps({"event": "ready", "pid": 1}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order.get("noise"):
        print("not json", flush=True)
    print(json.dumps({"event": order["event"], "text": order.get("text")}), flush=True)
"""
DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"event": "ready"}', flush=True)
signal.pause()
"""


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as open_children:
        yield open_children


def start(children: Children, code: str, log: Path, name: str = "echo") -> Child:
    return children.start(name, subprocess.Popen, ["-c", code], log, EngineError)


def test_a_child_answers_orders_and_stops_when_its_stdin_closes(
    children: Children, tmp_path: Path
) -> None:
    child = start(children, ECHO, tmp_path / "log")
    assert children.wait_for(child, "ready", 20)["pid"] == 1
    child.tell({"event": "hello", "text": "a", "noise": True})
    assert children.wait_for(child, "hello", 20)["text"] == "a"
    children.stop(child)
    assert child.process.returncode == 0


def test_what_one_child_says_is_kept_while_another_is_awaited(
    children: Children, tmp_path: Path
) -> None:
    first, second = (start(children, ECHO, tmp_path / name, name) for name in ("a", "b"))
    assert children.wait_for(second, "ready", 20)
    assert children.wait_for(first, "ready", 20)


def test_a_child_that_dies_is_named_with_its_signal_and_last_words(
    children: Children, tmp_path: Path
) -> None:
    code = "import sys; print('so long', file=sys.stderr, flush=True)\n" + ECHO
    child = start(children, code, tmp_path / "log")
    children.wait_for(child, "ready", 20)
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"echo was killed by signal 9.*so long"):
        children.wait_for(child, "never", 20)
    with pytest.raises(EngineError, match="echo is gone"):
        # More than a pipe holds: it breaks, whether or not the kernel has torn it down by now.
        child.tell({"event": "x" * 10_000_000})


def test_a_failure_that_a_child_tells_is_raised(children: Children, tmp_path: Path) -> None:
    child = start(children, 'print(\'{"event": "failed", "message": "no"}\')', tmp_path / "l")
    with pytest.raises(EngineError, match="echo: no"):
        children.wait_for(child, "ready", 20)


def test_silence_ends_at_the_deadline(children: Children, tmp_path: Path) -> None:
    child = start(children, ECHO, tmp_path / "log")
    children.wait_for(child, "ready", 20)
    with pytest.raises(EngineError, match=r"did not report 'more' within 0\.1 s"):
        children.wait_for(child, "more", 0.1)


def test_a_child_that_ignores_everything_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.testbed.children.GRACE_S", 0.2)
    with Children() as children:
        child = start(children, DEAF, tmp_path / "log", "deaf")
        children.wait_for(child, "ready", 20)
    assert child.process.returncode == -signal.SIGKILL
