"""The main job on a small scale, with everything real, and what is left when it is cut short."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from process_tree import alive, children_of

from harness.core import BUDGET_TERMS

ROOT = Path(__file__).parent.parent
CASE_STUDY = str(ROOT / "scenarios/paper-case-study.toml")
#: Short enough for a test; too short for a claim, which the verdict must say.
NUM_REQUESTS = 24
DEPLOYMENTS = ("prfaas_pd", "homogeneous_pd", "naive_heterogeneous")
KEYS = {
    "num_planned",
    "num_completed",
    "num_failed",
    "num_unsent",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "modelled_ttft_mean_s",
    "modelled_ttft_p90_s",
    "throughput_req_per_s",
    "kv_bytes_sent",
    "kv_bytes_cross",
    "kv_bytes_expected",
    "budget_residual_p95_s",
    "prefill_utilisation",
    "send_lag_p99_wall_s",
}


def bench(runs: Path, *settings: str) -> list[str]:
    # What is tested is what a run does, on however busy a machine.
    known = ("testbed.link_backend=relay", "testbed.self_test=false")
    base = (f"load.num_requests={NUM_REQUESTS}", *known)
    given = [part for one in (*base, *settings) for part in ("--set", one)]
    return [sys.executable, "-m", "harness", "bench", CASE_STUDY, "--runs", str(runs), *given]


@contextmanager
def started(runs: Path, *settings: str) -> Iterator[subprocess.Popen[str]]:
    """A run in progress; whatever the test does, it is gone afterwards."""
    process = subprocess.Popen(
        [*bench(runs, *settings), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll what other processes make true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.05)


def client_rows(runs: Path) -> int:
    return sum(path.read_text().count("\n") for path in runs.glob("*/spool/*/client.jsonl"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], int]:
    runs = tmp_path_factory.mktemp("runs")
    result = subprocess.run(
        [*bench(runs), "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert "Traceback" not in result.stderr, result.stderr
    document = json.loads(result.stdout)
    return Path(document["run_dir"]), document, result.returncode


def test_the_document_has_every_key_and_conserves_requests(
    finished: tuple[Path, dict[str, Any], int],
) -> None:
    _, document, status = finished
    assert tuple(document["deployments"]) == DEPLOYMENTS
    assert (document["time_scale"], document["byte_scale"]) == (10, 1000)
    assert document["link_backend"] == "relay"
    for one in document["deployments"].values():
        assert set(one) >= KEYS
        ended = one["num_completed"] + one["num_failed"] + one["num_unsent"]
        assert one["num_planned"] == ended == NUM_REQUESTS
        assert one["num_completed"] == NUM_REQUESTS
        assert one["ttft_p99_s"] is None  # fewer than 1,000 effective samples
        assert one["kv_bytes_sent"] == pytest.approx(one["kv_bytes_expected"], rel=1e-5)
    cross = {name: one["kv_bytes_cross"] for name, one in document["deployments"].items()}
    assert cross["homogeneous_pd"] == 0
    naive = document["deployments"]["naive_heterogeneous"]
    assert cross["naive_heterogeneous"] == naive["kv_bytes_sent"]
    assert 0 < cross["prfaas_pd"] < document["deployments"]["prfaas_pd"]["kv_bytes_sent"]
    # 24 requests bear no claim, and the verdict and the status say so.
    assert document["verdict"] == "not_supported"
    assert any("300" in reason for reason in document["reasons"])
    assert status == 1


def test_every_requests_budget_adds_up(finished: tuple[Path, dict[str, Any], int]) -> None:
    run, _, _ = finished
    requests = pd.read_parquet(run / "requests.parquet")
    assert len(requests) == NUM_REQUESTS * len(DEPLOYMENTS)
    terms = requests[[f"{term}_s" for term in BUDGET_TERMS]]
    assert terms.notna().all(axis=None)
    assert (terms >= 0).all(axis=None)
    left = requests["ttft_s"] - terms.sum(axis=1) - requests["residual_s"]
    assert left.abs().max() < 1e-6
    expected = requests["kv_wire_bytes_expected"]
    assert (requests["kv_wire_bytes_received"] == expected).all()
    same = requests.groupby("rid")["planned_s"].nunique()
    assert (same == 1).all()  # the same arrivals for all three


def test_the_report_is_one_file_that_loads_nothing(
    finished: tuple[Path, dict[str, Any], int],
) -> None:
    run, _, _ = finished
    html = (run / "report.html").read_text()
    for deployment in DEPLOYMENTS:
        assert deployment in html
    for loading in ('src="http', "src='http", 'href="http', "url(http", "@import"):
        assert loading not in html
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["link_check"] is not None


def test_ctrl_c_leaves_a_readable_run_and_no_process(tmp_path: Path) -> None:
    with started(tmp_path, "load.num_requests=400") as process:
        wait_for(lambda: client_rows(tmp_path) >= 3)
        below = children_of(process.pid)
        assert len(below) >= 4
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    document = json.loads(out)
    assert process.returncode == 1
    assert document["status"] == "interrupted"
    assert any("interrupted" in reason for reason in document["reasons"])
    one = document["deployments"]["prfaas_pd"]
    assert one["num_completed"] >= 3
    assert one["num_completed"] + one["num_failed"] + one["num_unsent"] == 400
    assert alive(below) == []


@pytest.mark.parametrize("victim", ["harness.engine", "harness.gateway", "harness.load"])
def test_a_killed_process_ends_the_run_with_its_name(tmp_path: Path, victim: str) -> None:
    with started(tmp_path, "load.num_requests=400") as process:
        wait_for(lambda: client_rows(tmp_path) >= 3)
        below = children_of(process.pid)
        target = next(pid for pid, command in below.items() if victim in command)
        os.kill(target, signal.SIGKILL)
        out, err = process.communicate(timeout=90)
    assert "Traceback" not in err
    document = json.loads(out)
    assert process.returncode == 3
    assert document["status"] == "failed"
    named = {"harness.engine": "worker-", "harness.gateway": "gateway", "harness.load": "load"}
    assert any(named[victim] in reason and "signal 9" in reason for reason in document["reasons"])
    one = document["deployments"]["prfaas_pd"]
    assert one["num_completed"] + one["num_failed"] + one["num_unsent"] == 400
    assert alive(below) == []


def test_sigkill_of_the_harness_leaves_no_process_and_a_run_to_report(tmp_path: Path) -> None:
    with started(tmp_path, "load.num_requests=400") as process:
        wait_for(lambda: client_rows(tmp_path) >= 3)
        below = children_of(process.pid)
        process.kill()
        process.wait(10)
        wait_for(lambda: not alive(below), 20)
    (run,) = tmp_path.iterdir()
    again = subprocess.run(
        [sys.executable, "-m", "harness", "report", str(run), "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert again.returncode == 1, again.stderr
    document = json.loads(again.stdout)
    assert document["status"] == "running"
    assert document["deployments"]["prfaas_pd"]["num_completed"] >= 3
    assert (run / "report.html").exists()
