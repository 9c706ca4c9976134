"""The load process against a server of known truth: schedule, times, counts, and how it stops."""

import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from load_process import ROOT, LoadProcess, evenly, load_process, plan_in
from truth_server import truth_server

from harness.core import Request
from harness.load.prompts import prompt_ids

TTFT_S = 0.08
CHUNK_S = 0.03


def server_log(path: Path, count: int) -> dict[str, dict[str, Any]]:
    """The server's lines by rid, once it has logged them all."""
    give_up_s = time.monotonic() + 10
    while True:
        lines = [json.loads(line) for line in path.open()]
        if len(lines) >= count:
            return {line["rid"]: line for line in lines}
        assert time.monotonic() < give_up_s, "the server did not log every request"
        time.sleep(0.01)


def assert_conserved(finished: dict[str, Any], rows: list[dict[str, Any]], planned: int) -> None:
    outcomes = [row["outcome"] for row in rows]
    assert len(rows) == len({row["rid"] for row in rows}) == planned
    for outcome in ("completed", "failed", "unsent"):
        assert finished[outcome] == outcomes.count(outcome)


@pytest.mark.quiet
def test_known_times_are_read_back(tmp_path: Path) -> None:
    requests = tuple(
        Request(f"{i:06d}", i, 0.3 * i, 1 + 37 * i, 9, hash_ids=(1, 2)) for i in range(40)
    )
    with truth_server(tmp_path / "log", ttft_s=TTFT_S, chunk_s=CHUNK_S, tokens_per_chunk=4) as port:
        plan = plan_in(tmp_path, port, requests, time_scale=10.0, api_key="k")
        with load_process(plan) as load:
            start_mono_ns = load.start()
            finished, rows = load.finish()
        log = server_log(tmp_path / "log", 40)
    assert_conserved(finished, rows, 40)
    assert finished["completed"] == 40
    for request, row in zip(requests, rows, strict=True):
        truth = log[row["rid"]]
        assert (row["rid"], row["index"]) == (request.rid, request.index)
        assert row["planned_mono_ns"] == start_mono_ns + round(request.planned_s / 10 * 1e9)
        assert row["sent_mono_ns"] >= row["planned_mono_ns"]
        assert row["prompt_tokens"] == request.input_tokens == truth["prompt_tokens"]
        ids = prompt_ids("homogeneous_pd-r0", request.index, request.input_tokens, request.hash_ids)
        assert sum(ids) == truth["prompt_sum"]
        assert ids[:8] == truth["prompt"][:8]
        assert row["completion_tokens"] == truth["max_tokens"] == 9
        assert row["chunk_tokens"] == [1, 4, 4]
        assert row["first_token_mono_ns"] == row["chunk_mono_ns"][0]
        assert row["first_token_mono_ns"] >= truth["written_mono_ns"][0]
        assert row["http_status"] == 200
        assert "authorization: bearer k" in truth["head"].lower()
    ttft_s = [(row["first_token_mono_ns"] - row["planned_mono_ns"]) / 1e9 for row in rows]
    gap_s = [(row["chunk_mono_ns"][1] - row["chunk_mono_ns"][0]) / 1e9 for row in rows]
    # The reader's own error, against the server's clock, and the nominal times at their least.
    late_s = [
        (row["first_token_mono_ns"] - log[row["rid"]]["written_mono_ns"][0]) / 1e9 for row in rows
    ]
    assert statistics.median(late_s) < 0.002
    assert min(ttft_s) == pytest.approx(TTFT_S, abs=0.002)
    assert statistics.median(gap_s) == pytest.approx(CHUNK_S, abs=0.002)
    lag_s = sorted((row["sent_mono_ns"] - row["planned_mono_ns"]) / 1e9 for row in rows)
    assert statistics.median(lag_s) < 0.002
    assert finished["send_lag_p99_s"] == pytest.approx(lag_s[39])


@pytest.mark.quiet
def test_a_slow_server_delays_no_send(tmp_path: Path) -> None:
    """Open loop: all are sent in the first second though none is answered before it is over."""
    schedule = evenly(60, 1 / 60, output_tokens=1)
    with (
        truth_server(tmp_path / "log", ttft_s=1.5) as port,
        load_process(plan_in(tmp_path, port, schedule)) as load,
    ):
        load.start()
        finished, rows = load.finish()
    assert finished["completed"] == 60
    last_sent_mono_ns = max(row["sent_mono_ns"] for row in rows)
    assert last_sent_mono_ns < min(row["first_token_mono_ns"] for row in rows)
    assert statistics.median(row["sent_mono_ns"] - row["planned_mono_ns"] for row in rows) < 5e6


def test_simultaneous_sends(tmp_path: Path) -> None:
    with (
        truth_server(tmp_path / "log", ttft_s=0.01) as port,
        load_process(plan_in(tmp_path, port, evenly(50, 0.0))) as load,
    ):
        load.start()
        finished, rows = load.finish()
    assert_conserved(finished, rows, 50)
    assert finished["completed"] == 50


@pytest.mark.parametrize("how", ["stop", "end_of_stdin", "SIGTERM", "SIGINT"])
def test_stopped_mid_run(tmp_path: Path, how: str) -> None:
    """Answered ones stay, those in flight are aborted, the rest is unsent; all have rows."""
    requests = (
        *evenly(5, 0.0, output_tokens=1),
        *(Request(f"{i:06d}", i, (i - 4) * 0.1, 40, 100_000) for i in range(5, 200)),
    )
    with (
        truth_server(tmp_path / "log", ttft_s=0.01, chunk_s=0.5) as port,
        load_process(plan_in(tmp_path, port, requests)) as load,
    ):
        load.start()
        load.until_sent(10)
        stop(load, how)
        finished, rows = load.finish()
    assert_conserved(finished, rows, 200)
    assert finished["completed"] == 5
    assert finished["failed"] >= 5
    assert finished["unsent"] >= 150
    for row in rows:
        if row["outcome"] == "failed":
            assert row["failure_phase"] == "aborted"
            assert row["end_mono_ns"] > row["sent_mono_ns"]
        if row["outcome"] == "unsent":
            assert row["sent_mono_ns"] is row["end_mono_ns"] is row["failure_phase"] is None
            assert row["planned_mono_ns"] is not None


@pytest.mark.parametrize("how", ["stop", "end_of_stdin", "SIGTERM"])
def test_stopped_before_the_start(tmp_path: Path, how: str) -> None:
    with load_process(plan_in(tmp_path, 9, evenly(30, 0.1))) as load:
        assert load.next_event() == {"event": "ready"}
        stop(load, how)
        finished, rows = load.finish()
    assert_conserved(finished, rows, 30)
    assert (finished["unsent"], finished["send_lag_p99_s"]) == (30, None)
    assert {row["planned_mono_ns"] for row in rows} == {None}


def test_an_orphan_ends_by_itself(tmp_path: Path) -> None:
    """Nobody reads stdout and nobody holds stdin any more: it still writes its rows and goes."""
    with truth_server(tmp_path / "log", chunk_s=0.1) as port:
        plan = plan_in(tmp_path, port, evenly(500, 0.05, output_tokens=1000))
        with load_process(plan) as load:
            load.start()
            load.until_sent(3)
            assert load.process.stdout is not None
            load.process.stdout.close()
            load.close_stdin()
            assert load.process.wait(60) == 0
    assert len((tmp_path / "client.jsonl").read_text().splitlines()) == 500


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("start", "malformed"),
        ('{"start": 5}', "unknown field `start`"),
        ('{"start_mono_ns": "soon"}', "Expected `int | null`"),
        ("{}", "nothing to do"),
        ('{"start_mono_ns": 1790000000000000000}', "CLOCK_MONOTONIC"),
        ("x" * 70_000, "malformed"),
    ],
)
def test_a_wrong_command_is_refused_and_rows_are_written(
    tmp_path: Path, line: str, words: str
) -> None:
    with load_process(plan_in(tmp_path, 9, evenly(3, 0.1))) as load:
        load.next_event()
        assert load.process.stdin is not None
        load.process.stdin.write(line + "\n")
        status, stderr = load.refusal()
    assert status == 2
    assert stderr.count("\n") == 1
    assert words in stderr
    assert len((tmp_path / "client.jsonl").read_text().splitlines()) == 3


def test_rows_are_there_as_soon_as_requests_end(tmp_path: Path) -> None:
    """A killed process leaves the rows of what had ended."""
    with truth_server(tmp_path / "log") as port:
        plan = plan_in(tmp_path, port, (*evenly(5, 0.0), Request("last", 5, 60.0, 4, 1)))
        with load_process(plan) as load:
            load.start()
            while load.next_event()["completed"] < 5:
                pass
            load.process.kill()
            load.process.wait()
    rows = [json.loads(line) for line in (tmp_path / "client.jsonl").open()]
    assert [row["outcome"] for row in rows] == ["completed"] * 5


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with (
        truth_server(tmp_path / "log") as port,
        load_process(plan_in(tmp_path, port, evenly(5, 0.05), spool_path="/dev/full")) as load,
    ):
        load.start()
        status, stderr = load.refusal()
    assert status == 3
    assert stderr == "harness.load: the spool cannot be written: No space left on device.\n"


LOCUST_COUNTS = """
import json
import sys
from pathlib import Path
import locust
import harness.load.__main__ as main
from harness.load.user import ReplayEnvironment
environments = []
class Watched(ReplayEnvironment):
    def __init__(self, replay):
        super().__init__(replay)
        environments.append(self)
main.ReplayEnvironment = Watched
main.replay_plan(Path(sys.argv[1]))
total = environments[0].stats.total
print(total.num_requests, total.num_failures, total.median_response_time, file=sys.stderr)
print(sorted(e.error for e in environments[0].stats.errors.values()), file=sys.stderr)
entries = environments[0].stats.entries
print(json.dumps({
    f"{kind} {name}": [entry.num_requests, entry.num_failures, entry.avg_response_time]
    for (name, kind), entry in entries.items()
}), file=sys.stderr)
"""


@pytest.mark.quiet
def test_locust_counts_what_the_spool_has(tmp_path: Path) -> None:
    requests = (*evenly(20, 0.01, output_tokens=2), Request("000020", 20, 0.3, 40, 100_000))
    with truth_server(tmp_path / "log", ttft_s=0.1, chunk_s=0.5) as port:
        plan = plan_in(tmp_path, port, requests, request_timeout_s=2.0)
        argv = [sys.executable, "-c", LOCUST_COUNTS, str(plan)]
        command = json.dumps({"start_mono_ns": time.monotonic_ns() + 2_000_000_000}) + "\n"
        # stdin stays open until the run is over: its end would stop it.
        with subprocess.Popen(
            argv, cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(command)
            process.stdin.flush()
            counts, errors = process.stderr.readline(), process.stderr.readline()
            entries = json.loads(process.stderr.readline())
    rows = [json.loads(line) for line in (tmp_path / "client.jsonl").open()]
    requests_counted, failures_counted, median_ms = (float(word) for word in counts.split())
    assert requests_counted == len(rows) == 21
    assert failures_counted == 1
    assert "failed in phase timeout" in errors
    # Beside the requests, entries that no total counts: of those that completed, and by phase.
    path = "/v1/completions"
    assert {name: entry[:2] for name, entry in entries.items()} == {
        f"POST {path}": [21, 1],
        f"TTFT {path}": [20, 0],
        f"E2E {path}": [20, 0],
        f"TPOT {path}": [20, 0],
        f"ITL {path}": [20, 0],
        "FAILED timeout": [1, 0],
    }
    gap_ms = statistics.mean(
        (row["chunk_mono_ns"][1] - row["chunk_mono_ns"][0]) / 1e6 for row in rows[:20]
    )
    assert entries[f"ITL {path}"][2] == pytest.approx(gap_ms)
    assert entries[f"TPOT {path}"][2] == pytest.approx(gap_ms)
    assert entries["FAILED timeout"][2] >= 2000
    ttft_ms = [(row["first_token_mono_ns"] - row["planned_mono_ns"]) / 1e6 for row in rows]
    # Locust keeps two digits of a response time.
    assert median_ms == pytest.approx(statistics.median(ttft_ms), rel=0.06)


def stop(load: LoadProcess, how: str) -> None:
    if how == "stop":
        load.tell(stop=True)
    elif how == "end_of_stdin":
        load.close_stdin()
    else:
        load.signal(signal.Signals[how])
