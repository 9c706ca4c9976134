"""A real decode server is killed while its gateway has requests before it: the run ends and says
which one, what was answered is kept, and nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_tree import alive, children_of
from sglang_cpu.models import write_model

from harness.record.run_directory import RunDirectory
from harness.record.tables import read_table

pytestmark = [pytest.mark.sglang, pytest.mark.netadmin, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
SCENARIO = ROOT / "scenarios/sglang-tiny-dense.toml"
READY_S = 900.0
#: Far more than are answered before the server dies.
NUM_REQUESTS, ANSWERED_BEFORE = 500, 10


def homogeneous_alone(folder: Path, model: Path) -> Path:
    """The shipped scenario with one deployment, of a prefill and a decode server."""
    text = SCENARIO.read_text().replace("../profiles", str(ROOT / "profiles"))
    text = text.replace("../build/sglang-tiny/dense", str(model))
    text = text.replace("num_prefill = 2", "num_prefill = 1")
    before, rest = text.split("[deployments.prfaas_pd]")
    kept = rest[rest.index("[deployments.homogeneous_pd]") :]
    kept = kept[: kept.index("[deployments.naive_heterogeneous]")]
    path = folder / "one-pair.toml"
    path.write_text(before + kept + text[text.index("[testbed]") :])
    return path


def decode_server(runs: Path) -> int:
    """Its first process, as the launcher has told."""
    (told,) = runs.rglob("servers-pd.json")
    pid = json.loads(told.read_text())["pids"]["pd-d0"]
    assert isinstance(pid, int)
    return pid


def num_answered(runs: Path) -> int:
    return sum(path.read_text().count("\n") for path in runs.glob("*/spool/*/client.jsonl"))


def test_a_decode_server_that_dies_in_mid_run_is_named_and_nothing_hangs(tmp_path: Path) -> None:
    scenario = homogeneous_alone(tmp_path, write_model("dense", tmp_path))
    runs = tmp_path / "runs"
    settings = (f"engine.ready_timeout={READY_S:g}s", f"load.num_requests={NUM_REQUESTS}")
    given = [part for one in settings for part in ("--set", one)]
    run = subprocess.Popen(
        [sys.executable, "-m", "harness", "bench", str(scenario), "--runs", str(runs), *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        deadline_s = time.monotonic() + READY_S
        while num_answered(runs) < ANSWERED_BEFORE:
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        below = children_of(run.pid)
        os.kill(decode_server(runs), signal.SIGKILL)
        _, said = run.communicate(timeout=120)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 3, said
    assert "pd-d0 failed in phase died: it was killed by SIGKILL in mid-run" in said
    assert "Traceback" not in said
    assert not alive(below)
    (folder,) = runs.iterdir()
    directory = RunDirectory(folder)
    assert directory.read_manifest().status == "failed"
    rows = read_table(directory, "requests")
    completed = int((rows["outcome"] == "completed").sum())
    assert ANSWERED_BEFORE <= completed < NUM_REQUESTS
    assert set(rows["outcome"]) <= {"completed", "failed", "unsent"}
