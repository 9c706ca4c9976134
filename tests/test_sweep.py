"""Sweeps that run: the same rows by whoever runs them, kept whatever ends a sweep, and resumed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from sweep_files import (
    CASE_STUDY,
    EIGHT,
    ROOT,
    cells_of,
    kept,
    serial,
    swept,
    written,
)

from harness.cli import main
from harness.core import EngineError
from harness.preparation import prepare
from harness.scenario import load_scenario
from harness.simulation_summary import simulation_document
from harness.sweep.cells import Cell
from harness.sweep.execution import run_cell
from harness.sweep.local import local_pool
from harness.sweep.results import SweepFolder, cell_row

#: Long enough to be stopped in the middle: some hundred cells, each a part of a second.
LONG = EIGHT.replace("seeds = 2", "seeds = 40").replace("100", "4000")


def test_a_cell_is_what_simulate_says_of_its_deployment(tmp_path: Path) -> None:
    cell = cells_of(written(tmp_path, EIGHT))[-1]
    scenario = load_scenario(
        CASE_STUDY, ["load.num_requests=100", "load.rate_req_per_s=1.5", "load.seed=2"]
    )
    found = simulation_document(prepare(scenario))["deployments"]["homogeneous_pd"]
    row = cell_row(cell, run_cell(cell))
    for key, value in found.items():
        if key == "utilisation":
            assert {f"utilisation_{stage}": row[f"utilisation_{stage}"] for stage in value} == {
                f"utilisation_{stage}": of for stage, of in value.items()
            }
        else:
            assert row[key] == value, key
    window_s = prepare(scenario).simulations["homogeneous_pd"].window_s
    assert row["carried_req_per_s"] == 100 / window_s
    assert row["cost_per_hour"] == row["num_gpus"] == 96
    assert row["cost_unit"] == "relative"
    priced = load_scenario(
        CASE_STUDY,
        [
            "load.num_requests=100",
            "cost.link_price_per_gb=0.5",
            "cost.link_price_per_gbps_month=73",
        ],
    )
    alone = replace(priced, deployments={"prfaas_pd": priced.deployments["prfaas_pd"]})
    row = cell_row(
        cell, run_cell(Cell("x", {}, "prfaas_pd", seed=1, transfer=True, scenario=alone))
    )
    window_s = prepare(priced).simulations["prfaas_pd"].window_s
    # 32 H200 at 2 and 64 H20 at 1; 100 Gbit/s at 73 / 730 an hour; half a unit for each GB.
    crossing = row["crossed_bytes"] / 1e9 / (window_s / 3600) * 0.5
    assert row["cost_per_hour"] == pytest.approx(128 + 10 + crossing, rel=1e-12)


def test_serial_parallel_and_resumed_give_the_same_rows(tmp_path: Path) -> None:
    path = written(tmp_path, EIGHT)
    cells = cells_of(path)
    expected = serial(cells)
    assert {row["status"] for row in expected.values()} == {"completed"}
    summaries = [swept(path, tmp_path / f"by-{workers}", workers) for workers in (1, 2)]
    assert kept(tmp_path / "by-1") == kept(tmp_path / "by-2") == expected
    # Some cells are there, in a sweep of fewer seeds; one part more was never finished.
    fewer = written(tmp_path, EIGHT.replace("seeds = 2", "seeds = 1"), "fewer.toml")
    resumed = tmp_path / "resumed"
    assert swept(fewer, resumed)["num_cells"] == 4
    (resumed / "cells" / ".part-000009.parquet.1.partial").write_bytes(b"PAR1")
    summaries.append(swept(path, resumed))
    assert kept(resumed) == expected
    assert [one["num_resumed"] for one in summaries] == [0, 0, 4]
    for one in summaries:
        assert json.loads((Path(one["folder"]) / "summary.json").read_text()) == one
    points = [(one["points"], one["pareto"], one["notes"]) for one in summaries]
    assert points[0] == points[1] == points[2]
    manifest = json.loads((resumed / "manifest.json").read_text())
    assert [one["status"] for one in manifest["sessions"]] == ["finished", "finished"]
    assert manifest["num_cells"] == 8
    parts = SweepFolder(resumed).parts()
    assert swept(path, resumed)["num_resumed"] == 8, "nothing is left to be run"
    assert SweepFolder(resumed).parts() == parts


def test_a_cell_that_cannot_be_simulated_is_kept_with_its_reason_and_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = 'seeds = 1\ndeployments = ["prfaas_pd"]\n[[list]]\nload.duration = "100s"\n'
    path = written(tmp_path, text + '[[list]]\nload.duration = "1us"\n')
    folder = tmp_path / "out"
    arguments = ["sweep", str(path), "--workers", "1"]
    assert main([*arguments, "--json", "--out", str(folder)]) == 1
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert (document["num_completed"], document["num_failed"]) == (1, 1)
    assert "No request arrives" in document["failed"][0]["reason"]
    assert "No request arrives" in err
    assert "load.duration = 1us, seed 1, prfaas_pd" in err
    assert main([*arguments, "--resume", str(folder)]) == 1
    out, _ = capfd.readouterr()
    assert "1 of 2 cells" in out
    assert len(pq.read_table(folder / "cells")) == 2
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_a_worker_that_dies_ends_the_sweep_and_not_what_was_kept(tmp_path: Path) -> None:
    cells = cells_of(written(tmp_path, LONG))
    before = set(multiprocessing.active_children())

    def run_and_kill() -> None:
        with local_pool(1) as run:
            for _ in run(cells):
                for child in set(multiprocessing.active_children()) - before:
                    child.kill()

    with pytest.raises(EngineError, match="resume with fewer workers"):
        run_and_kill()
    assert set(multiprocessing.active_children()) <= before


FAULTS = """\
deployments = ["prfaas_pd", "homogeneous_pd"]
[set]
load.num_requests = 100
faults.instances = [
    {instance = "prfaas-p0", at = "5s", lasts = "20s"OF_ONE},
    {instance = "pd-p0", kind = "slow", factor = 3.0, at = "1s"OF_BOTH},
]
"""


@pytest.mark.parametrize(
    ("of_one", "of_both"),
    [("", ""), (["prfaas_pd"], ""), ("", ["prfaas_pd", "homogeneous_pd"])],
)
def test_each_cell_has_the_faults_of_its_deployment(
    tmp_path: Path, of_one: list[str], of_both: list[str]
) -> None:
    text = FAULTS
    for place, names in (("OF_ONE", of_one), ("OF_BOTH", of_both)):
        text = text.replace(place, f", deployments = {json.dumps(names)}" if names else "")
    cells = cells_of(written(tmp_path, text))
    # The same faults in the terms of --set, of the whole scenario.
    faults = text[text.index("[\n") :].replace("\n", "")
    scenario = load_scenario(CASE_STUDY, ["load.num_requests=100", f"faults.instances={faults}"])
    expected = simulation_document(prepare(scenario))["deployments"]
    plain = cells_of(written(tmp_path, text[: text.index("faults")], "plain.toml"))
    for cell, without in zip(cells, plain, strict=True):
        row = cell_row(cell, run_cell(cell))
        assert row["status"] == "completed", row["reason"]
        for key in ("ttft_mean_s", "num_failed", "throughput_req_per_s"):
            assert row[key] == expected[cell.deployment][key]
        assert row["ttft_mean_s"] != run_cell(without).figures["ttft_mean_s"]
        assert [one.instance for one in cell.scenario.faults.instances] == (
            ["prfaas-p0", "pd-p0"] if cell.deployment == "prfaas_pd" else ["pd-p0"]
        )


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[tuple[Callable[..., "subprocess.Popen[str]"], Path, Path]]:
    """Starts a long sweep as a user does, and waits until it has kept something."""
    path, folder = written(tmp_path, LONG), tmp_path / "out"
    started: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        arguments = ["sweep", str(path), "--out", str(folder), "--workers", "2"]
        process = subprocess.Popen(
            [sys.executable, "-m", "harness", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        deadline_s = time.monotonic() + 120
        while not list((folder / "cells").glob("part-*")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        return process

    yield start, path, folder
    for process in started:
        process.kill()
        process.communicate()


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def is_running(pid: int) -> bool:
    """Whether it computes; who has ended may still wait to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_ends_a_sweep_leaves_its_cells_and_no_process(
    begun: tuple[Callable[..., "subprocess.Popen[str]"], Path, Path], signum: signal.Signals
) -> None:
    start, path, folder = begun
    process = start()
    workers = children_of(process.pid)
    assert len(workers) >= 2
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    deadline_s = time.monotonic() + 30
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline_s, "workers are still there"
        time.sleep(0.05)
    cells = cells_of(path)
    rows = kept(folder)
    assert 0 < len(rows) < len(cells)
    manifest = json.loads((folder / "manifest.json").read_text())
    if signum == signal.SIGKILL:
        assert manifest["sessions"][-1]["status"] == "running"
    else:
        assert process.returncode == 130, err
        assert f"{len(rows)} of {len(cells)} cells are kept" in err
        assert f"prfaas sweep {path} --resume {folder} --workers 2" in err
        assert manifest["sessions"][-1]["status"] == "interrupted"
    # Those that are there are whole and right, and a sweep of them alone has nothing to run.
    some = tuple(cell for cell in cells if cell.cell_id in rows)[:6]
    assert serial(some) == {cell.cell_id: rows[cell.cell_id] for cell in some}


def test_ray_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # what an import of it then fails by
    path, folder = written(tmp_path, EIGHT), tmp_path / "out"
    assert main(["sweep", str(path), "--ray", "auto", "--out", str(folder)]) == 2
    assert "pip install 'prfaas-bench[ray]'" in capfd.readouterr().err
    assert not folder.exists()
