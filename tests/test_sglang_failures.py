"""Failures by what real servers wrote, and the figures that they tell, by recorded answers."""

from pathlib import Path

import pytest

from harness.engine.sglang.failures import how_it_ended, is_hopeless, name_failure, server_error

RECORDED = Path(__file__).parent / "sglang_cpu" / "recorded"

#: The end of a log of SGLang 0.5.23, its exit status, the phase, and what must be quoted.
LOGS = {
    "missing": (1, "load", "couldn't find them in the cached files"),
    "arch": (-9, "load", "Cannot find model module. 'NoSuchForCausalLM'"),
    "port": (None, "port", "[Errno 98] error while attempting to bind on address"),
    "badflag": (2, "launch", "unrecognized arguments: --no-such-flag 3"),
    "weights": (-9, "load", "Cannot find any model weights with `models/dense`"),
    "nogpu": (-9, "driver", "_cuda_setDevice"),
}
#: A line of PyTorch, SGLang or the loader before it was ready, and the phase.
LINES = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0": "memory",
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.": "memory",
    "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried": "memory",
    "RuntimeError: Found no NVIDIA driver on your system. Please check that you have": "driver",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).": "driver",
    "RuntimeError: CUDA driver version is insufficient for CUDA runtime version": "driver",
    "ImportError: libcuda.so.1: cannot open shared object file: No such file or": "driver",
    "torch.AcceleratorError: CUDA error: invalid device ordinal": "driver",
    "ModuleNotFoundError: No module named 'sgl_kernel'": "launch",
    "launch_server.py: error: argument --tp: invalid int value: 'x'": "launch",
    "AssertionError: no_buffer only supports page_size=1.": "launch",
    "safetensors_rust.SafetensorError: Error while deserializing header": "load",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_of_a_real_server_tells_its_failure(name: str) -> None:
    status, phase, quoted = LOGS[name]
    lines = (RECORDED / f"{name}.log").read_text().splitlines()
    failure = name_failure(status, lines, was_ready=False)
    assert failure.phase == phase
    assert quoted in failure.told
    assert failure.advice
    assert not failure.told.startswith("[2026")


@pytest.mark.parametrize("line", LINES)
def test_a_telling_line_is_found_among_others(line: str) -> None:
    around = [
        "Ignore import error when loading x: No module named 'y'",
        line,
        "",
        "  warnings.warn(",
    ]
    assert name_failure(1, around, was_ready=False).phase == LINES[line]
    assert name_failure(1, around, was_ready=False).told == line


def test_words_of_a_running_server_are_not_taken_for_a_failure() -> None:
    busy = [
        "ValueError: bad request of a client",
        "No module named 'z'",
        "Decode batch, #running-req: 1",
    ]
    died = name_failure(-11, busy, was_ready=True)
    assert (died.phase, died.told) == ("died", "Decode batch, #running-req: 1")
    oom = name_failure(1, [*busy, "torch.OutOfMemoryError: CUDA out of memory."], was_ready=True)
    assert oom.phase == "memory"
    killed = "Subprocess scheduler_0 (pid=9) crashed with exit code -9. Triggering SIGQUIT"
    assert name_failure(-9, [killed], was_ready=True).phase == "died"
    assert name_failure(-9, [killed], was_ready=False).phase == "memory"
    assert name_failure(0, [], was_ready=False).phase == "launch"


def test_only_what_leaves_no_hope_ends_the_waiting() -> None:
    port = (RECORDED / "port.log").read_text().splitlines()
    assert sum(map(is_hopeless, port)) == 1
    for name in set(LOGS) - {"port"}:
        assert not any(map(is_hopeless, (RECORDED / f"{name}.log").read_text().splitlines()))


def test_the_words_of_a_failure() -> None:
    failure = name_failure(2, ["x: error: unrecognized arguments: --y"], was_ready=False)
    told = str(server_error("pd-p0", failure, how_it_ended(2), "logs/pd-p0.log"))
    assert told.startswith("SGLang server pd-p0 failed in phase launch: it exited with 2; it wrote")
    assert told.endswith("(log: logs/pd-p0.log)")
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-200) == "was killed by signal 200"
    long = name_failure(1, ["ValueError: " + "\x1b" * 900], was_ready=False)
    assert len(long.told) == 300
    assert long.told.isprintable()
