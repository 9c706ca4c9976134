"""What the load generator itself adds, against a server whose times are known. Prints JSON.

    python -m benchmarks.load [--json] [--quick] [--peer aiperf=/path/to/its/python]

Each case is one ``python -m harness.load`` over Poisson arrivals against ``harness.load.truth``,
which writes a first token 0.2 s after a request's last byte and 63 more 20 ms apart:

    20 req/s of 512 tokens    100 req/s of 512 tokens    3 req/s of 131,072 tokens

    achieved_ratio    rate sent / rate planned, first to last request
    lag               sent - planned
    ttft_error        TTFT as the tool says, less the server's: first token written - request read
    cpu_s_per_1000    processor seconds of the tool from its start signal to its end
    rss_bytes         the most that it had resident

Our TTFT counts from the planned instant, a peer's from its own send, so only ours has the lag in
it. ``server_late_p99_s`` is how late the server wrote what was due, which is in nobody's error.
Seconds are wall seconds. Both processes ask for the real-time priority that a run's get. ``aiperf``
follows on the same cases where it is found: on PATH or by ``--peer``.
Exit status: 0 every target met, 1 one missed.
"""

import argparse
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.load_peers import aiperf, aiperf_at
from harness.core import Request
from harness.load.plan import Plan, write_plan, write_schedule
from harness.load.truth import Truth, TruthRow, TruthServer, read_rows
from harness.record.spool import ClientRow
from harness.record.spool import read_rows as read_client_rows

TTFT_S, CHUNK_S, OUTPUT_TOKENS = 0.2, 0.02, 64
START_AHEAD_S = 0.5
SEED = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One rate and prompt length, and the most that our own figures may be."""

    rate_req_per_s: float
    prompt_tokens: int
    seconds: float
    lag_p99_s: float
    ttft_error_p50_s: float
    ttft_error_p99_s: float
    cpu_s_per_1000: float
    rss_bytes: float


CASES = (
    Case(20, 512, 60, 2e-3, 1e-3, 5e-3, 6, 150e6),
    Case(100, 512, 60, 5e-3, 1e-3, 10e-3, 3.5, 150e6),
    Case(3, 131_072, 60, math.inf, math.inf, 5e-3, 40, 500e6),
)
#: The achieved rate may be off by this share.
RATE_TOLERANCE = 0.005


def schedule(case: Case, seconds: float) -> tuple[Request, ...]:
    """Poisson arrivals, the same in every run."""
    generator, at_s, requests = random.Random(SEED), 0.0, []
    for index in range(max(10, round(case.rate_req_per_s * seconds))):
        at_s += generator.expovariate(case.rate_req_per_s)
        requests.append(Request(f"{index:06d}", index, at_s, case.prompt_tokens, OUTPUT_TOKENS))
    return tuple(requests)


def nearest_rank(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def prefer(pid: int) -> None:
    """Real-time priority, where this user may have it."""
    with contextlib.suppress(PermissionError, AttributeError):
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def replay(folder: Path, plan: Plan, requests: tuple[Request, ...]) -> tuple[float, int]:
    """Run the load process; its processor seconds from the start signal, and its peak memory."""
    write_schedule(requests, Path(plan.schedule_path))
    write_plan(plan, folder / "plan.json")
    argv = [sys.executable, "-m", "harness.load", str(folder / "plan.json")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if json.loads(process.stdout.readline())["event"] != "ready":
                raise SystemExit("the load process did not get ready")
            prefer(process.pid)
            before_s = cpu_s(process.pid)
            start_ns = time.monotonic_ns() + round(START_AHEAD_S * 1e9)
            process.stdin.write(json.dumps({"start_mono_ns": start_ns}).encode() + b"\n")
            process.stdin.flush()
            for _ in process.stdout:
                pass
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            process.kill()
    if process.returncode:
        raise SystemExit(f"the load process ended with {process.returncode}")
    return used.ru_utime + used.ru_stime - before_s, used.ru_maxrss * 1024


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """One case of our own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = schedule(case, seconds)
        with TruthServer(truth_in(folder)) as server:
            prefer(server.process.pid)
            plan = Plan(
                host="127.0.0.1",
                port=server.port,
                path="/v1/completions",
                api_key=None,
                model="truth",
                time_scale=1.0,
                schedule_path=str(folder / "schedule.jsonl"),
                spool_path=str(folder / "client.jsonl"),
                salt="benchmark",
                request_timeout_s=30.0,
            )
            used_s, rss_bytes = replay(folder, plan, requests)
            late_p99_s = server.stop().late_p99_s
        rows = read_client_rows(folder / "client.jsonl", ClientRow).rows
        truth = {row.rid: row for row in read_rows(folder / "truth.jsonl")}
    figures = of_rows(sorted(rows, key=lambda row: row.index), truth)
    figures |= {"cpu_s_per_1000": used_s / len(requests) * 1000, "rss_bytes": rss_bytes}
    return {
        "tool": "prfaas",
        "rate_req_per_s": case.rate_req_per_s,
        "prompt_tokens": case.prompt_tokens,
        "requests": len(requests),
        **rounded(figures),
        "server_late_p99_s": late_p99_s,
        "missed": missed(case, figures),
    }


def truth_in(folder: Path) -> Truth:
    return Truth(ttft_s=TTFT_S, chunk_s=CHUNK_S, log_path=str(folder / "truth.jsonl"))


def of_rows(rows: Sequence[ClientRow], truth: dict[str | None, TruthRow]) -> dict[str, float]:
    """Figures of a run in which every request completed."""
    lags_s, errors_s, planned_s, sent_s = [], [], [], []
    for row in rows:
        if row.outcome != "completed":
            raise SystemExit(f"{row.rid} failed in phase {row.failure_phase}")
        assert row.planned_mono_ns is not None
        assert row.sent_mono_ns is not None
        assert row.first_token_mono_ns is not None
        told = truth[row.rid]
        true_ns = told.written_mono_ns[0] - told.read_mono_ns
        lags_s.append((row.sent_mono_ns - row.planned_mono_ns) / 1e9)
        errors_s.append((row.first_token_mono_ns - row.planned_mono_ns - true_ns) / 1e9)
        planned_s.append(row.planned_mono_ns / 1e9)
        sent_s.append(row.sent_mono_ns / 1e9)
    return {
        "achieved_ratio": (planned_s[-1] - planned_s[0]) / (sent_s[-1] - sent_s[0]),
        "lag_p99_s": nearest_rank(lags_s, 0.99),
        "ttft_error_p50_s": nearest_rank(errors_s, 0.5),
        "ttft_error_p99_s": nearest_rank(errors_s, 0.99),
    }


def missed(case: Case, figures: dict[str, float]) -> list[str]:
    """The names of figures beyond their target."""
    targets = asdict(case)
    late = [name for name, value in figures.items() if value > targets.get(name, math.inf)]
    off = abs(figures["achieved_ratio"] - 1) > RATE_TOLERANCE
    return late + ["achieved_ratio"] * off


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="nothing but the JSON, as ever")
    parser.add_argument("--quick", action="store_true", help="6 s a case: a trial, not a figure")
    parser.add_argument("--peer", action="append", default=[], metavar="aiperf=PYTHON")
    parser.add_argument("--no-peers", action="store_true")
    given = parser.parse_args()
    peer = None if given.no_peers else aiperf_at(given.peer)
    cases: list[dict[str, Any]] = []
    for case in CASES:
        seconds = 6.0 if given.quick else case.seconds
        print(f"{case.rate_req_per_s:g} req/s, {case.prompt_tokens} tokens", file=sys.stderr)
        cases.append(measure(case, seconds))
        if peer is not None:
            count = len(schedule(case, seconds))
            cases.append(
                aiperf(
                    peer, case.rate_req_per_s, case.prompt_tokens, count, OUTPUT_TOKENS, truth_in
                )
            )
    result = {
        "cases": cases,
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "aiperf": "not found" if peer is None else str(peer),
    }
    print(json.dumps(result, indent=2))
    return int(any(case.get("missed") for case in cases))


if __name__ == "__main__":
    sys.exit(main())
