"""A load process under test: given a plan, driven over stdin, read back from its spool."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.core import Request
from harness.load.plan import Plan, write_plan, write_schedule

ROOT = Path(__file__).parent.parent


def evenly(
    count: int, every_s: float, input_tokens: int = 40, output_tokens: int = 8
) -> tuple[Request, ...]:
    return tuple(
        Request(f"{index:06d}", index, index * every_s, input_tokens, output_tokens)
        for index in range(count)
    )


def plan_in(folder: Path, port: int, schedule: Sequence[Request], **changes: Any) -> Path:
    """Write a plan and its schedule into ``folder``; the plan's path."""
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "path": "/v1/completions",
        "api_key": None,
        "model": "prfaas-1t",
        "time_scale": 1.0,
        "schedule_path": "schedule.jsonl",
        "spool_path": "client.jsonl",
        "salt": "homogeneous_pd-r0",
        "request_timeout_s": 20.0,
    }
    write_schedule(tuple(schedule), folder / "schedule.jsonl")
    write_plan(Plan(**(values | changes)), folder / "plan.json")
    return folder / "plan.json"


class LoadProcess:
    """One ``python -m harness.load PLAN.json``."""

    def __init__(self, plan: Path, pass_fds: tuple[int, ...] = ()) -> None:
        self.folder = plan.parent
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.load", str(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            pass_fds=pass_fds,
        )
        self.events: list[dict[str, Any]] = []

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def next_event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.refusal()}"
        event: dict[str, Any] = json.loads(line)
        self.events.append(event)
        return event

    def until_ready(self) -> list[dict[str, Any]]:
        """Wait for ready; what was said of the workers before."""
        while self.next_event() != {"event": "ready"}:
            assert self.events[-1]["event"] == "worker"
        return self.events[:-1]

    def start(self, delay_s: float = 0.1) -> int:
        """Wait for ready and start; the start_mono_ns given."""
        self.until_ready()
        start_mono_ns = time.monotonic_ns() + int(delay_s * 1e9)
        self.tell(start_mono_ns=start_mono_ns)
        return start_mono_ns

    def until_sent(self, count: int) -> None:
        """Read progress until ``count`` requests were sent."""
        while self.next_event().get("sent", 0) < count:
            pass

    def finish(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Wait for the end: the finished event and the spool's rows by index."""
        while self.next_event()["event"] != "finished":
            pass
        assert self.process.wait(60) == 0
        return self.events[-1], self.rows()

    def rows(self) -> list[dict[str, Any]]:
        """The whole lines of all spools, by index."""
        rows = [
            json.loads(line)
            for path in self.folder.glob("client*.jsonl")
            for line in path.open()
            if line.endswith("\n")
        ]
        return sorted(rows, key=lambda row: row["index"])

    def refusal(self) -> tuple[int, str]:
        """Wait for the end: exit status and stderr."""
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr


@contextmanager
def load_process(plan: Path) -> Iterator[LoadProcess]:
    load = LoadProcess(plan)
    with load.process:
        try:
            yield load
        finally:
            load.process.kill()
