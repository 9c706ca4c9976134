"""Several load workers under one Locust master: one schedule, one set of records, none missing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from load_process import ROOT, LoadProcess, evenly, load_process, plan_in

from harness.core import Request
from harness.load.truth import Truth, TruthServer

TRUTH = Truth(ttft_s=0.05, chunk_s=0.02, tokens_per_chunk=4)
ENDLESS = Truth(ttft_s=0.05, chunk_s=0.5)


def workers_of(load: LoadProcess) -> list[int]:
    """The pids of a master's local workers, in the order in which they were started."""
    children = Path(f"/proc/{load.process.pid}/task/{load.process.pid}/children").read_text()
    return sorted(map(int, children.split()))


def is_gone(pid: int) -> bool:
    """Whether the process has ended, also where nobody has waited for it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_until_gone(pids: list[int], patience_s: float = 30.0) -> None:
    give_up_s = time.monotonic() + patience_s
    while not all(map(is_gone, pids)):
        assert time.monotonic() < give_up_s, "processes are left"
        time.sleep(0.05)


def truths(row: dict[str, Any], start_mono_ns: int) -> tuple[Any, ...]:
    """What of a row is the schedule's and the server's, not the moment's."""
    names = ("rid", "index", "outcome", "prompt_tokens", "completion_tokens", "chunk_tokens")
    return (row["planned_mono_ns"] - start_mono_ns, *(row[name] for name in names))


def test_four_workers_have_the_records_of_one(tmp_path: Path) -> None:
    requests = tuple(
        Request(f"{i:06d}", i, 0.02 * (i // 2), 30 + i, 9, hash_ids=(i % 3,)) for i in range(80)
    )
    found = []
    with TruthServer(TRUTH) as server:
        for workers in (1, 4):
            folder = tmp_path / str(workers)
            folder.mkdir()
            plan = plan_in(folder, server.port, requests, workers=workers, time_scale=0.7)
            with load_process(plan) as load:
                start_mono_ns = load.start()
                finished, rows = load.finish()
            assert (finished["completed"], finished["lost"]) == (80, 0)
            found.append([truths(row, start_mono_ns) for row in rows])
    assert found[0] == found[1]
    assert [len(path.read_text().splitlines()) for path in sorted((tmp_path / "4").glob("c*"))] == [
        20
    ] * 4


def test_a_million_is_split_without_a_loss() -> None:
    """Of the shards of any number of workers, not a request is in two or in none."""
    from harness.load.schedule import shard_of

    shard = shard_of(evenly(1000, 0.1))
    for workers in (1, 2, 3, 7, 64):
        indexes = [one.index for k in range(workers) for one in shard.part(k, workers)]
        assert sorted(indexes) == list(range(1000))


def test_a_killed_worker_is_accounted_for_and_the_others_go_on(tmp_path: Path) -> None:
    requests = evenly(120, 0.05, output_tokens=5)
    with (
        TruthServer(TRUTH) as server,
        load_process(plan_in(tmp_path, server.port, requests, workers=3)) as load,
    ):
        load.start()
        load.until_sent(30)
        pids = workers_of(load)
        os.kill(pids[1], signal.SIGKILL)
        finished, rows = load.finish()
    after = [event for event in load.events if event["event"] == "worker_after"]
    assert [event["lost"] for event in after] == [None, "its process was killed by signal 9", None]
    outcomes = [row["outcome"] for row in rows]
    assert outcomes.count("completed") == finished["completed"] == len(rows)
    assert finished["completed"] + finished["lost"] == 120
    assert 1 <= finished["lost"] <= 40
    by_worker = [sum(row["index"] % 3 == k for row in rows) for k in range(3)]
    assert by_worker[0] == by_worker[2] == 40
    assert by_worker[1] == 40 - finished["lost"]
    wait_until_gone(pids)


def test_all_workers_lost_is_an_error(tmp_path: Path) -> None:
    with (
        TruthServer(TRUTH) as server,
        load_process(plan_in(tmp_path, server.port, evenly(200, 0.1), workers=2)) as load,
    ):
        load.start()
        load.until_sent(3)
        for pid in workers_of(load):
            os.kill(pid, signal.SIGKILL)
        status, stderr = load.refusal()
    assert status == 3
    assert "every load worker was lost" in stderr


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "stop", "end_of_stdin"])
def test_stopped_in_mid_run_every_request_has_its_row(tmp_path: Path, how: str) -> None:
    with (
        TruthServer(ENDLESS) as server,
        load_process(
            plan_in(tmp_path, server.port, evenly(300, 0.1, output_tokens=10_000), workers=3)
        ) as load,
    ):
        load.start()
        load.until_sent(6)
        pids = workers_of(load)
        if how == "stop":
            load.tell(stop=True)
        elif how == "end_of_stdin":
            load.close_stdin()
        else:
            load.signal(signal.Signals[how])
        finished, rows = load.finish()
    outcomes = [row["outcome"] for row in rows]
    assert len(rows) == len({row["rid"] for row in rows}) == 300
    assert outcomes.count("failed") == finished["failed"] >= 6
    assert outcomes.count("unsent") == finished["unsent"]
    assert finished["completed"] + finished["failed"] + finished["unsent"] == 300
    wait_until_gone(pids)


def test_workers_end_with_their_master(tmp_path: Path) -> None:
    """A master that is killed takes nobody's rows with it, and leaves nobody behind."""
    with (
        TruthServer(ENDLESS) as server,
        load_process(
            plan_in(tmp_path, server.port, evenly(300, 0.1, output_tokens=10_000), workers=2)
        ) as load,
    ):
        load.start()
        load.until_sent(4)
        pids = workers_of(load)
        load.signal(signal.SIGKILL)
        wait_until_gone(pids)
        rows = load.rows()
    assert len(rows) == len({row["rid"] for row in rows}) == 300
    assert {row["outcome"] for row in rows} == {"failed", "unsent"}


def test_a_worker_that_cannot_write_is_blamed_by_number(tmp_path: Path) -> None:
    (tmp_path / "client-1.jsonl").write_text("{}\n")
    with load_process(plan_in(tmp_path, 9, evenly(4, 0.1), workers=2)) as load:
        status, stderr = load.refusal()
    assert status == 2
    assert "load worker 1: " in stderr
    assert "already has rows" in stderr


def test_a_closed_loop_holds_its_concurrency(tmp_path: Path) -> None:
    """Never more than N in flight; each leaves when its slot's last one has ended."""
    schedule = tuple(Request(f"{i:06d}", i, 0.0, 40, 9) for i in range(60))
    with (
        TruthServer(TRUTH) as server,
        load_process(plan_in(tmp_path, server.port, schedule, concurrency=4)) as load,
    ):
        start_mono_ns = load.start()
        finished, rows = load.finish()
    assert finished["completed"] == 60
    assert most_in_flight(rows) == 4
    assert [row["planned_mono_ns"] for row in rows[:4]] == [start_mono_ns] * 4
    ends = sorted(row["end_mono_ns"] for row in rows)
    for row in rows[4:]:
        assert row["planned_mono_ns"] >= ends[0]
        assert row["sent_mono_ns"] >= row["planned_mono_ns"]
    # Each slot's next request follows its last: none starts before as many have ended.
    starts = sorted(row["planned_mono_ns"] for row in rows)
    assert all(starts[at] >= ends[at - 4] for at in range(4, 60))


def test_think_time_and_workers_share_a_closed_loop(tmp_path: Path) -> None:
    schedule = tuple(Request(f"{i:06d}", i, 0.0, 40, 1) for i in range(30))
    with (
        TruthServer(TRUTH) as server,
        load_process(
            plan_in(
                tmp_path,
                server.port,
                schedule,
                concurrency=3,
                workers=2,
                think_time_s=1.0,
                time_scale=10.0,
            )
        ) as load,
    ):
        load.start()
        finished, rows = load.finish()
    assert finished["completed"] == 30
    assert most_in_flight(rows) <= 3
    ends = sorted(row["end_mono_ns"] for row in rows)
    starts = sorted(row["planned_mono_ns"] for row in rows)
    assert all(starts[at] >= ends[at - 3] + 100_000_000 for at in range(3, 30))


def most_in_flight(rows: list[dict[str, Any]]) -> int:
    edges = sorted(
        [(row["sent_mono_ns"], 1) for row in rows] + [(row["end_mono_ns"], -1) for row in rows]
    )
    busy = most = 0
    for _, step in edges:
        busy += step
        most = max(most, busy)
    return most


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def remote_worker(
    folder: Path, port: int, token: str, *before: str
) -> Iterator["subprocess.Popen[str]"]:
    (folder / "token").write_text(token + "\n")
    argv = [
        *before, sys.executable, "-m", "harness.load", "worker",
        "--master", f"127.0.0.1:{port}",
        "--token-file", str(folder / "token"),
        "--keep", str(folder / "kept.jsonl"),
    ]  # fmt: skip
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_worker_of_another_host_sends_its_rows(tmp_path: Path) -> None:
    port = free_port()
    with (
        TruthServer(TRUTH) as server,
        load_process(
            plan_in(
                tmp_path, server.port, evenly(60, 0.03), workers=1, remote_workers=1,
                bind_port=port, token="known", samples_path="load.jsonl",
            )
        ) as load,
        remote_worker(tmp_path, port, "known") as worker,
    ):  # fmt: skip
        load.start()
        finished, rows = load.finish()
        assert worker.wait(20) == 0
    assert finished["completed"] == len(rows) == 60
    kept = sorted(map(json.loads, (tmp_path / "kept.jsonl").open()), key=lambda row: row["index"])
    assert kept == [row for row in rows if row["index"] % 2 == 1]
    samples = [json.loads(line) for line in (tmp_path / "load-1.jsonl").open()]
    assert {sample["worker"] for sample in samples} == {1}


def test_a_wrong_token_is_refused_and_the_place_stays_free(tmp_path: Path) -> None:
    port = free_port()
    plan = plan_in(
        tmp_path, 9, evenly(4, 0.05), workers=0, remote_workers=1, bind_port=port, token="known"
    )
    with load_process(plan) as load:
        with remote_worker(tmp_path, port, "guessed") as stranger:
            _, said = stranger.communicate(timeout=60)
        assert stranger.returncode == 3
        assert "refuses this worker: its token is not this run's" in said
        with remote_worker(tmp_path, port, "known") as worker:
            load.start()
            finished, _ = load.finish()
            assert worker.wait(20) == 0
    assert finished["failed"] == 4  # nobody listens on port 9; all were sent by the right one


def test_garbage_on_the_master_s_port_harms_nobody(tmp_path: Path) -> None:
    import zmq

    port = free_port()
    plan = plan_in(
        tmp_path, 9, evenly(4, 0.05), workers=0, remote_workers=1, bind_port=port, token="known"
    )
    with load_process(plan) as load, zmq.Context() as context:
        with context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.IDENTITY, b"\xff\xfe")
            stranger.connect(f"tcp://127.0.0.1:{port}")
            for message in (b"", b"\xc1", b"\x93\x01", b"x" * 100_000, b"\x93\xa4quit\xc0\xa1x"):
                stranger.send(message)
        with remote_worker(tmp_path, port, "known") as worker:
            load.start()
            finished, _ = load.finish()
            assert worker.wait(20) == 0
    assert finished["failed"] == 4


def can_move_clocks() -> bool:
    """Whether a process can be given a clock of its own, as another host has."""
    argv = ["unshare", "--user", "--map-root-user", "--time", "--monotonic", "5", "true"]
    try:
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_move_clocks(), reason="needs time namespaces")
def test_a_clock_of_its_own_is_measured_and_taken_out(tmp_path: Path) -> None:
    port, ahead_s = free_port(), 5000
    other_host = [
        "unshare", "--user", "--map-root-user", "--time", "--monotonic", str(ahead_s),
        "--fork", "--kill-child",
    ]  # fmt: skip
    requests = evenly(40, 0.04)
    with (
        TruthServer(TRUTH) as server,
        load_process(
            plan_in(
                tmp_path, server.port, requests, workers=1, remote_workers=1,
                bind_port=port, token="known",
            )
        ) as load,
        remote_worker(tmp_path, port, "known", *other_host),
    ):  # fmt: skip
        start_mono_ns = load.start()
        finished, rows = load.finish()
    assert finished["completed"] == 40
    workers = [event for event in load.events if event["event"] == "worker"]
    assert [worker["shared_clock"] for worker in workers] == [True, False]
    offset_ns, bound_ns = workers[1]["offset_ns"], workers[1]["bound_ns"]
    # The truth is known here: both clocks tick alike, one is ahead by a whole number of seconds.
    assert abs(offset_ns - ahead_s * 10**9) <= bound_ns
    for request, row in zip(requests, rows, strict=True):
        assert row["planned_mono_ns"] == start_mono_ns + round(request.planned_s * 1e9)
        assert row["planned_mono_ns"] <= row["sent_mono_ns"] < row["planned_mono_ns"] + 5 * 10**9
        assert row["sent_mono_ns"] < row["first_token_mono_ns"] <= row["end_mono_ns"]
    after = [event for event in load.events if event["event"] == "worker_after"]
    assert [event["clock_fault"] for event in after] == [None, None]


def test_the_web_ui_shows_the_run_and_changes_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, TruthServer(TRUTH) as server:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        plan = plan_in(
            tmp_path, server.port, evenly(1200, 0.05), web_fd=listener.fileno(), workers=1
        )
        load = LoadProcess(plan, pass_fds=(listener.fileno(),))
        with load.process:
            try:
                load.start()
                load.until_sent(40)
                with urllib.request.urlopen(f"{url}/", timeout=20) as page:
                    assert b"Locust" in page.read()
                for path in ("/stop", "/swarm", "/stats/reset"):
                    with pytest.raises(HTTPError) as refused:
                        urllib.request.urlopen(f"{url}{path}", data=b"user_count=5", timeout=20)
                    assert refused.value.code == 403
                names = wait_for_entries(url)
                load.tell(stop=True)
                finished, _ = load.finish()
            finally:
                load.process.kill()
    assert finished["completed"] + finished["failed"] + finished["unsent"] == 1200
    assert finished["completed"] >= 30  # 40 had left, the refused orders have stopped none
    assert {"POST", "TTFT", "E2E", "TPOT", "ITL"} <= names


def wait_for_entries(url: str) -> set[str]:
    """The types of Locust's entries, once a worker has reported some: it does every 3 s."""
    give_up_s = time.monotonic() + 20
    while True:
        with urllib.request.urlopen(f"{url}/stats/requests", timeout=20) as answer:
            stats = json.loads(answer.read())["stats"]
        names = {entry["method"] for entry in stats if entry["method"]}
        if "ITL" in names:
            return names
        assert time.monotonic() < give_up_s
        time.sleep(0.2)
