"""Worker processes: results in order, errors told, nobody left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core import PrfaasError
from harness.cores import Cores

ROOT = Path(__file__).parent.parent
#: Two workers that wait for a minute, told by their ids.
WAITING = """
import os, sys, time
sys.path.insert(0, {tests!r})
from harness.cores import Cores
from test_cores import tell_and_wait
if __name__ == "__main__":
    with Cores(2) as cores:
        cores.map(tell_and_wait, [{folder!r}] * 2)
"""


def square(number: int) -> int:
    return number * number


def no_seven(number: int) -> int:
    if number == 7:
        raise ValueError("seven")
    return number


def die(_number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tell_and_wait(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(60)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_their_arguments(workers: int) -> None:
    with Cores(workers) as cores:
        assert cores.map(square, range(20)) == [n * n for n in range(20)]
        with pytest.raises(ValueError, match="seven"):
            cores.map(no_seven, range(10))
        assert cores.map(square, [3]) == [9]


def test_a_worker_that_dies_is_told() -> None:
    with Cores(2) as cores, pytest.raises(PrfaasError, match="died"):
        cores.map(die, range(4))


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    pids = tmp_path / "pids"
    pids.mkdir()
    script.write_text(WAITING.format(tests=str(ROOT / "tests"), folder=str(pids)))
    parent = subprocess.Popen([sys.executable, str(script)], cwd=ROOT)
    try:
        assert until(lambda: len(list(pids.iterdir())) == 2)
    finally:
        parent.kill()
        parent.wait()
    assert until(lambda: not any(is_alive(int(one.name)) for one in pids.iterdir()))
    assert len(list(pids.iterdir())) == 2


def until(reached: Callable[[], bool]) -> bool:
    """Whether it comes true within half a minute."""
    end = time.monotonic() + 30
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
