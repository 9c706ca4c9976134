"""Sweeps on a real Ray cluster of several local nodes: the same numbers, whoever of it dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sweep_files import ROOT, SIXTY_FOUR, cells_of, kept, serial, written

from harness.core import EngineError
from harness.sweep.file import read_sweep
from harness.sweep.on_ray import MAX_LOSSES, ray_pool
from harness.sweep.results import SweepFolder
from harness.sweep.run import Asked, Progress, run_sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow]

#: On the loopback; a driver that is given 127.0.0.1 looks for the machine's outer address.
HOST = "127.0.0.2"
#: Of each node; nothing of a sweep needs much of it.
STORE_BYTES = 100_000_000
LONG = """\
seeds = 1
deployments = ["prfaas_pd"]
[set]
load.num_requests = 200000
"""


def silent(*_: object) -> None:
    """Nobody is told."""


@contextmanager
def nodes(count: int) -> Iterator[Any]:
    """A cluster on the loopback: a head without cores, and nodes of one core each."""
    from ray.cluster_utils import Cluster

    # Its sockets lie there, whose names may have 107 bytes.
    folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    with folder as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", place)
        head = {
            "num_cpus": 0,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "node_ip_address": HOST,
        }
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(count):
                add_node(cluster)
            yield cluster
        finally:
            cluster.shutdown()


def add_node(cluster: Any, **more: Any) -> Any:
    return cluster.add_node(
        num_cpus=1, object_store_memory=STORE_BYTES, node_ip_address=HOST, **more
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with nodes(3) as made:
        yield made


def swept(path: Path, folder: Path, cluster: Any, progress: Progress = silent) -> dict[str, Any]:
    """The sweep on the cluster, into a folder, new or begun."""
    asked = Asked(read_sweep(path), (), cells_of(path), "the test's cluster")
    there = SweepFolder.existing(folder) if folder.exists() else SweepFolder.create(folder)
    return run_sweep(asked, there, ray_pool(cluster.address), progress, silent)


def test_sixty_four_cells_survive_the_death_of_a_node_with_the_numbers_of_a_serial_run(
    cluster: Any, tmp_path: Path
) -> None:
    path = written(tmp_path)
    dying = add_node(cluster)
    cluster.wait_for_nodes()
    killed = []

    def kill_a_node(there: int, total: int, without: int) -> None:
        assert (total, without) == (64, 0)
        if there >= 8 and not killed:
            killed.append(there)
            cluster.remove_node(dying, allow_graceful=False)

    summary = swept(path, tmp_path / "out", cluster, kill_a_node)
    assert killed
    assert killed[0] < 64
    assert summary["num_completed"] == 64
    assert kept(tmp_path / "out") == serial(cells_of(path))
    # Nothing is run again.
    assert swept(path, tmp_path / "out", cluster)["num_resumed"] == 64


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_ends_early_leaves_its_cells_and_the_sweep_is_resumed(
    cluster: Any, tmp_path: Path, signum: signal.Signals
) -> None:
    path, folder = written(tmp_path, SIXTY_FOUR.replace("200", "2000")), tmp_path / "out"
    arguments = ["sweep", str(path), "--ray", cluster.address]
    driver = subprocess.Popen(
        [sys.executable, "-m", "harness", *arguments, "--out", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + 240
        while not list((folder / "cells").glob("part-*")):
            assert driver.poll() is None, driver.stderr and driver.stderr.read()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        driver.send_signal(signum)
        _, err = driver.communicate(timeout=60)
    finally:
        driver.kill()
        driver.wait()
    before = kept(folder)
    assert 0 < len(before) < 64
    if signum == signal.SIGTERM:
        assert driver.returncode == 130, err
        assert f"{len(before)} of 64 cells are kept" in err
        assert f"--ray {cluster.address}" in err
    resumed = subprocess.run(
        [sys.executable, "-m", "harness", *arguments, "--resume", str(folder), "--json"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout)
    assert (summary["num_completed"], summary["num_resumed"]) == (64, len(before))
    rows = kept(folder)
    assert len(rows) == 64
    some = cells_of(path)[::9]
    assert serial(some) == {cell.cell_id: rows[cell.cell_id] for cell in some}


def test_a_cell_that_cannot_be_simulated_is_not_tried_again(cluster: Any, tmp_path: Path) -> None:
    text = 'seeds = 1\ndeployments = ["prfaas_pd"]\n[grid]\nload.duration = ["60s", "1us"]\n'
    summary = swept(written(tmp_path, text), tmp_path / "out", cluster)
    assert (summary["num_completed"], summary["num_failed"]) == (1, 1)
    assert "No request arrives" in summary["failed"][0]["reason"]


def test_a_cell_whose_worker_dies_each_time_is_lost_and_tried_again_by_a_resumed_sweep(
    cluster: Any, tmp_path: Path
) -> None:
    ended = threading.Event()
    killed: set[int] = set()

    def kill_workers() -> None:
        while not ended.wait(0.05):
            for pid in descendants(os.getpid()):
                if command_of(pid).startswith("ray::cell"):
                    killed.add(pid)
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_workers)
    killer.start()
    path = written(tmp_path, LONG)
    try:
        summary = swept(path, tmp_path / "out", cluster)
    finally:
        ended.set()
        killer.join()
    assert (summary["num_completed"], summary["num_lost"]) == (0, 1)
    assert len(killed) >= MAX_LOSSES
    assert f"died {MAX_LOSSES} times" in summary["failed"][0]["reason"]
    summary = swept(path, tmp_path / "out", cluster)
    assert (summary["num_completed"], summary["num_resumed"]) == (1, 0)


def descendants(pid: int) -> list[int]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    children = [int(child) for child in listed.split()]
    return [*children, *(one for child in children for one in descendants(child))]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_node_with_other_code_is_refused_at_the_start_and_when_it_joins(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    for package in ("harness", "netem", "reports"):
        shutil.copytree(ROOT / package, other / package)
    with (other / "harness" / "queueing.py").open("a") as file:
        file.write("\n# Another checkout.\n")
    path = written(tmp_path, SIXTY_FOUR.replace("200", "5000"))
    monkeypatch.chdir(tmp_path)  # workers look for modules where their driver was started first
    late: list[Any] = []

    def join(_there: int, _total: int, _without: int) -> None:
        if not late:
            late.append(add_node(cluster, env_vars={"PYTHONPATH": str(other)}))

    try:
        with pytest.raises(EngineError, match="sources_sha256"):
            swept(path, tmp_path / "joins", cluster, join)
        with pytest.raises(EngineError, match="Install the same version"):
            swept(path, tmp_path / "out", cluster)
    finally:
        for node in late:
            cluster.remove_node(node)
    assert not SweepFolder(tmp_path / "out").parts()


@pytest.mark.parametrize("address", [f"{HOST}:1", f"ray://{HOST}:1", "nowhere"])
def test_no_cluster_at_the_address_is_said_so(address: str) -> None:
    with pytest.raises(EngineError, match=r"ray start --head"), ray_pool(address):
        raise AssertionError("there is none")
