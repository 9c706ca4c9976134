"""`prfaas report` of a simulated run: its figures, what it leaves out, and runs cut short."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.core import ScenarioError
from harness.preparation import prepare
from harness.record.run_directory import RunDirectory
from harness.record.tables import compact, read_table, schema
from harness.report import write_report
from harness.scenario import load_scenario
from harness.simulation_run import SimulationRun
from harness.simulation_summary import simulation_document
from harness.simulator import SimulatedRows
from harness.statistics import nearest_rank
from harness.trace import read_trace
from harness.verdict import judge
from harness.workload import build_schedule

SCENARIOS = Path(__file__).parent.parent / "scenarios"
PAPER = SCENARIOS / "paper-case-study.toml"
NAMES = ("prfaas_pd", "homogeneous_pd", "naive_heterogeneous")
LIVE_SECTIONS = ("Verdict", "Measured against modelled", "Link", "Overheads of the harness")


def simulated(root: Path, *overrides: str, scenario: Path = PAPER) -> RunDirectory:
    settings = load_scenario(scenario, overrides)
    with SimulationRun(root, settings) as run:
        prepared = prepare(settings, sinks=run.sink)
        run.conclude(prepared, simulation_document(prepared))
    return run.run


def reported(run: RunDirectory) -> tuple[dict[str, Any], str]:
    compact(run)
    judge(run)
    write_report(run)
    return json.loads(run.verdict_path.read_text()), run.report_path.read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return simulated(tmp_path_factory.mktemp("runs"), "load.num_requests=2000")


def test_the_figures_are_those_that_the_simulation_printed(run: RunDirectory) -> None:
    document, _ = reported(run)
    printed = json.loads(run.simulation_path.read_text())["deployments"]
    assert document["verdict"] == "simulated"
    assert tuple(document["deployments"]) == NAMES
    for name, one in document["deployments"].items():
        assert one["num_planned"] == one["num_completed"] == 2000
        for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "effective_samples"):
            assert one[key] == pytest.approx(printed[name][key], rel=1e-12)
        assert one["lambda_max_req_per_s"] == printed[name]["lambda_max_req_per_s"]
        assert one["modelled_ttft_mean_s"] is None
        assert one["kv_bytes_expected"] is None
        assert one["send_lag_p99_wall_s"] is None
        # What was served in the time of the load: both count the same work.
        used = printed[name]["utilisation"]
        by_cluster = one["prefill_utilisation_by_cluster"]
        for cluster, stage in (("prfaas", "prfaas_prefill"), ("pd", "pd_prefill")):
            assert by_cluster.get(cluster, 0.0) == pytest.approx(used.get(stage, 0.0), rel=0.03)


def test_requests_at_once_follow_littles_law(run: RunDirectory) -> None:
    document, _ = reported(run)
    requests = read_table(run, "requests")
    for name, one in document["deployments"].items():
        rows = requests[requests["deployment"] == name]
        whole_s = rows["end_s"].max()
        level = one["concurrency"]["mean"]
        assert level["in_flight"] == pytest.approx(rows["e2e_s"].sum() / whole_s, rel=1e-6)
        assert level["prefill"] == pytest.approx(rows["prefill_s"].sum() / whole_s, rel=1e-6)
        waits_s = rows["prefill_queue_s"].sum()
        assert level["prefill_queue"] == pytest.approx(waits_s / whole_s, rel=1e-6, abs=1e-9)


def test_it_says_that_nothing_was_run_and_what_it_leaves_out(run: RunDirectory) -> None:
    _, text = reported(run)
    assert "Simulated: nothing was run." in text
    assert "Left out, since only a live run has it" in text
    assert "upported: " not in text
    for heading in LIVE_SECTIONS:
        assert f">{heading}</h2>" not in text
    for heading in ("By input length", "Routes", "Use of each stage", "Capacity", "Decisions"):
        assert f">{heading}</h2>" in text
    assert "send lag" not in text
    assert "2000 of 2000" in text
    assert not run.trace_path.exists()


def test_the_order_of_rows_does_not_matter(run: RunDirectory, tmp_path: Path) -> None:
    before, _ = reported(run)
    other = RunDirectory(tmp_path)
    for path in (run.manifest_path, run.simulation_path, run.table_path("decisions")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    table = pq.read_table(run.table_path("requests"))
    shuffled = table.take(np.random.default_rng(7).permutation(table.num_rows))
    pq.write_table(shuffled.cast(schema("requests")), other.table_path("requests"))
    after, _ = reported(other)
    for name in NAMES:
        for key, value in before["deployments"][name].items():
            assert _rounded(after["deployments"][name][key]) == _rounded(value), (name, key)
    assert _rounded(after["ratios"]) == _rounded(before["ratios"])


def _rounded(value: object) -> object:
    """Sums in another order differ in their last bits."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_the_rows_are_a_trace_in_order(run: RunDirectory) -> None:
    trace = read_trace(run.path, "run", seed=1)
    settings = load_scenario(PAPER, ["load.num_requests=2000"])
    planned = build_schedule(settings.workload, settings.load)
    assert np.array_equal(trace.input_tokens, planned.input_tokens)
    assert np.allclose(trace.arrival_s, planned.planned_s - planned.planned_s[0])


def test_failures_are_infinite_and_have_no_mean(tmp_path: Path) -> None:
    run = simulated(
        tmp_path, "load.num_requests=1500", "load.rate_req_per_s=4", "scheduling.max_wait=5s"
    )
    document, text = reported(run)
    requests = read_table(run, "requests")
    for name, one in document["deployments"].items():
        rows = requests[requests["deployment"] == name]
        done = rows[rows["outcome"] == "completed"]["ttft_s"].to_numpy(dtype=float)
        failed = int((rows["outcome"] == "failed").sum())
        assert one["num_failed"] == failed > 0
        assert one["num_completed"] + failed == one["num_planned"] == 1500
        expected_s = nearest_rank(done, 0.5, failed)
        assert one["ttft_p50_s"] == (None if expected_s == np.inf else pytest.approx(expected_s))
        assert one["concurrency"]["requests_without_end"] == 0
    assert "not completed" in text
    assert "of 1500" in text


def test_what_the_scheduler_changed_is_written(tmp_path: Path) -> None:
    run = simulated(tmp_path, "load.num_requests=1200", scenario=SCENARIOS / "link-cut.toml")
    decisions = read_table(run, "decisions")
    steps = decisions[decisions["action"] == "set_threshold"]
    assert len(steps) > 3
    assert steps["now_s"].is_monotonic_increasing
    _, text = reported(run)
    assert (
        f">{int(steps['threshold_tokens'].max()):,}<" in text
        or str(int(steps["threshold_tokens"].max())) in text
    )


def cut_short(root: Path, after_blocks: int) -> RunDirectory:
    """As by Ctrl-C once so many blocks have been written."""
    settings = load_scenario(PAPER, ["load.num_requests=40000"])
    blocks = 0
    run = SimulationRun(root, settings)

    def sinks(name: str) -> Callable[[SimulatedRows], None]:
        take = run.sink(name)

        def taking(rows: SimulatedRows) -> None:
            nonlocal blocks
            if blocks == after_blocks:
                raise KeyboardInterrupt
            blocks += 1
            take(rows)

        return taking

    with pytest.raises(KeyboardInterrupt), run:
        prepare(settings, transfer=False, sinks=sinks)
    return run.run


def test_a_run_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    run = cut_short(tmp_path, 4)
    assert run.read_manifest().status == "interrupted"
    document, text = reported(run)
    assert document["verdict"] == "simulated"
    assert judge(run).exit_status == 1
    assert "homogeneous_pd: 16384 of 40000 requests had ended and were written" in text
    assert "naive_heterogeneous: 0 of 40000" in text
    assert list(document["deployments"]) == ["prfaas_pd", "homogeneous_pd"]
    assert document["deployments"]["prfaas_pd"]["num_completed"] == 40000
    assert document["ratios"] == {}
    assert "did not end" in text


def test_a_run_without_any_row_says_so(tmp_path: Path) -> None:
    run = cut_short(tmp_path, 0)
    document, text = reported(run)
    assert document["deployments"] == {}
    assert "prfaas_pd: 0" in text


def test_a_table_without_its_end_is_named(tmp_path: Path) -> None:
    run = cut_short(tmp_path, 1)
    path = run.table_path("requests")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ScenarioError, match=r"requests\.parquet.*simulate it again"):
        judge(run)


def test_the_verb_says_simulated_and_leaves_the_table_alone(run: RunDirectory) -> None:
    before = run.table_path("requests").read_bytes()
    shown = subprocess.run(
        [sys.executable, "-m", "harness", "report", str(run.path)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert shown.stdout.startswith("simulated: nothing was run, and there is no verdict")
    assert run.table_path("requests").read_bytes() == before


def test_ctrl_c_leaves_what_had_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness", "simulate", str(PAPER), "--runs", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--requests", "400000", "--no-transfer"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    run = RunDirectory(Path(process.stderr.readline().split()[1]))
    deadline_s = time.monotonic() + 120
    while run.table_path("requests").stat().st_size < 1000 and time.monotonic() < deadline_s:
        time.sleep(0.05)  # until a block has been written
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.communicate()
    assert run.read_manifest().status == "interrupted"
    document, text = reported(run)
    one = document["deployments"]["prfaas_pd"]
    assert 16_384 <= one["num_planned"] == one["num_completed"] <= 400_000
    assert "of 400000 requests had ended and were written" in text


def test_faults_stand_beside_what_they_did(tmp_path: Path) -> None:
    run = simulated(
        tmp_path,
        "load.num_requests=300",
        'faults.instances=[{instance="pd-d0",at="60s",lasts="20s"},'
        '{instance="prfaas-p0",at="50s",kind="slow",factor=4.0,deployments=["prfaas_pd"]}]',
    )
    document, text = reported(run)
    requests = read_table(run, "requests")
    for name, one in document["deployments"].items():
        rows = requests[requests["deployment"] == name]
        assert one["num_failed"] == (rows["failure_phase"] == "instance_down").sum() > 0
        assert one["budget_mean_s"]["gateway"] is not None
        assert f"{one['num_failed']} instance_down" in text
    assert requests["retries"].max() >= 0
    assert "slow, 4 times as long" in text
    assert any(note.startswith("faults: 2 planned") for note in document["notes"])
