"""The load in a real run: several workers, one that is lost, a closed loop, and the records."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from live import Live, live, scenario
from synthetic_run import Options, build

from harness.core import Instance
from harness.record.run_directory import Manifest
from harness.record.tables import compact, read_table
from harness.scenario import Scenario, scenario_hash, to_manifest
from harness.testbed.loading import LoadResult
from harness.verdict import Gates, judge

FEW = Gates(min_completed=1)
SETTINGS = ("load.num_requests=40", "load.rate_req_per_s=1.2")


def record(found: Live, given: Scenario, result: LoadResult) -> pd.DataFrame:
    """Close the run's books as a bench does; its requests by rid."""
    cell = replace(found.cell, start_mono_ns=result.start_mono_ns, end_mono_ns=result.end_mono_ns)
    instances: dict[str, tuple[Instance, ...]] = {
        cell.deployment: given.deployments[cell.deployment].instances()
    }
    found.run.write_manifest(
        Manifest(
            run_id="test",
            started_utc="2026-01-01T00:00:00+00:00",
            started_mono_ns=0,
            scenario=to_manifest(given),
            scenario_hash=scenario_hash(given),
            time_scale=given.scale.time,
            byte_scale=given.scale.bytes,
            deployments=(cell,),
            instances=instances,
            status="finished",
            load_workers=result.workers,
            load_workers_lost=result.workers_lost(),
        )
    )
    compact(found.run)
    return read_table(found.run, "requests").set_index("rid")


def load_workers() -> list[int]:
    """Pids of the load workers that this process' load started."""

    def children(pid: int) -> list[int]:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    (load,) = [
        pid
        for pid in children(os.getpid())
        if b"harness.load\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return sorted(children(load))


def quiet(*_: Any) -> None:
    """Nobody looks."""


def test_two_workers_replay_what_one_would(tmp_path: Path) -> None:
    found: dict[int, list[Any]] = {}
    for workers in (1, 2):
        given = scenario(*SETTINGS, f"load.workers={workers}")
        with live(given, "homogeneous_pd", tmp_path / str(workers)) as running:
            result = running.testbed.replay("salt", quiet, quiet)
        rows = record(running, given, result)
        assert set(rows["outcome"]) == {"completed"}
        planned_ns = rows["planned_mono_ns"] - result.start_mono_ns
        same = rows[["index", "input_tokens", "output_tokens", "prompt_tokens"]]
        found[workers] = [planned_ns.tolist(), same.to_numpy().tolist(), list(rows.index)]
        samples = read_table(running.run, "load")
        assert set(samples["worker"]) == set(range(workers))
        assert samples.groupby("worker")["sent"].max().sum() == 40
        assert (samples["cpu_wall_s"] > 0).all()
    assert found[1] == found[2]


def test_a_lost_worker_invalidates_the_claim_and_its_records_count(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one(sent: int, *_: int) -> None:
        if sent >= 8 and not killed:
            killed.append(load_workers()[0])
            os.kill(killed[0], signal.SIGKILL)

    given = scenario("load.num_requests=120", "load.rate_req_per_s=1.2", "load.workers=2")
    with live(given, "homogeneous_pd", tmp_path) as running:
        result = running.testbed.replay("salt", kill_one, quiet)
    assert killed
    assert result.completed + result.failed + result.unsent + result.lost == 120
    assert result.lost > 0
    (lost,) = result.workers_lost()
    assert "was killed by signal 9" in lost
    rows = record(running, given, result)
    counts = rows["outcome"].value_counts()
    assert counts.sum() == len(rows) == 120
    assert counts["completed"] >= result.completed
    assert counts["unsent"] > 0
    of_killed = rows[rows["index"] % 2 == int(lost.split()[2])]
    assert (rows.drop(of_killed.index)["outcome"] == "completed").all()
    # What had left and had not ended is failed, since the gateway saw it.
    assert set(of_killed["outcome"]) <= {"completed", "failed", "unsent"}
    assert (of_killed[of_killed["outcome"] == "failed"]["failure_phase"] == "lost").all()
    verdict = judge(running.run, FEW)
    assert verdict.verdict == "not_supported"
    assert any("a worker was lost" in reason for reason in verdict.reasons)


def test_a_closed_loop_says_so_and_is_not_judged_by_a_schedule(tmp_path: Path) -> None:
    given = scenario("load.num_requests=24", "load.concurrency=3", "workload.output_tokens=64")
    with live(given, "homogeneous_pd", tmp_path) as running:
        result = running.testbed.replay("salt", quiet, quiet)
    rows = record(running, given, result)
    assert set(rows["outcome"]) == {"completed"}
    verdict = judge(running.run, FEW)
    assert not any("planned times differ" in reason for reason in verdict.reasons)
    assert any("closed loop of 3 requests in flight" in note for note in verdict.notes)


def test_the_verdict_says_what_the_load_was_not(tmp_path: Path) -> None:
    built = build(tmp_path, Options(num_requests=40))
    built.change_manifest(
        load_workers_lost=["prfaas_pd-r0: load worker 1 of 4: its process was killed by signal 9"],
        load_clock_faults=["prfaas_pd-r0: load worker 2 on h, its clock moved 4.00 ms"],
        load_self_test={"skipped": "testbed.self_test is false"},
    )
    compact(built.run)
    verdict = judge(built.run, FEW)
    assert verdict.verdict == "not_supported"
    assert len(verdict.reasons) == 2
    assert "load worker 1 of 4: its process was killed by signal 9" in verdict.reasons[0]
    assert "load worker 2 on h, its clock moved 4.00 ms" in verdict.reasons[1]
    assert "load: the client was not tried before: testbed.self_test is false" in verdict.notes
