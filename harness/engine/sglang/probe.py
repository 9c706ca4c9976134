"""What an interpreter has of SGLang, and what this host has of GPUs: asked before any launch.

Loading a model for minutes only to hear that there is no driver helps nobody, so the interpreter is
asked for its versions, which takes a moment, and for GPUs where they are wanted.
"""

import shutil
import subprocess
import sys

import msgspec

from harness.core import EngineError

#: PyTorch with CUDA takes so long to import from a cold disk.
TIMEOUT_S = 120.0

_SCRIPT = """
import importlib.metadata, importlib.util, json, sys
found = {"python": sys.version.split()[0]}
for name in ("sglang", "torch"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
for name in ("mooncake", "nixl"):
    found[name] = importlib.util.find_spec(name) is not None
if "cuda" in sys.argv:
    try:
        import torch
        found["cuda"] = torch.version.cuda
        torch.cuda.init()
        found["gpus"] = torch.cuda.device_count()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


class Probe(msgspec.Struct):
    """``cuda``: the version that torch was built with; ``error``: why it has no GPU."""

    python: str
    sglang: str | None
    torch: str | None
    mooncake: bool
    nixl: bool
    cuda: str | None = None
    gpus: int = 0
    error: str | None = None


def ask_interpreter(python: str | None, gpus: bool) -> Probe:
    """EngineError, with its phase, for an interpreter that is not there or does not answer."""
    path = find_interpreter(python)
    words = [path, "-c", _SCRIPT, *(["cuda"] if gpus else [])]
    try:
        done = subprocess.run(words, capture_output=True, timeout=TIMEOUT_S, check=False, cwd="/")
    except subprocess.TimeoutExpired as error:
        raise _launch(f"{path} did not say what it has within {TIMEOUT_S:g} s") from error
    except OSError as error:
        raise _launch(f"{path} does not start: {error.strerror}") from error
    try:
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Probe)
    except (IndexError, msgspec.MsgspecError) as error:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        told = f': "{said[-1][:300]}"' if said else ""
        raise _launch(f"{path} exited with {done.returncode}{told}") from error


def find_interpreter(python: str | None) -> str:
    """The path of ``python``; EngineError where there is none."""
    if python is None:
        return sys.executable
    path = shutil.which(python)
    if path is None:
        raise _launch(f"{python} is no executable file; correct engine.python")
    return path


def check_interpreter(
    probe: Probe, python: str | None, version: str | None, backend: str | None
) -> str:
    """The version of SGLang that is there, as asked for; EngineError where it is not."""
    who = python or sys.executable
    if probe.sglang is None:
        raise _launch(
            f"{who} (Python {probe.python}) has no sglang; install it there, or name the "
            "interpreter that has it in engine.python"
        )
    if version is not None and probe.sglang != version:
        raise _launch(
            f"{who} has sglang {probe.sglang}, but engine.version asks for {version}; install "
            "that, or change engine.version"
        )
    if backend is not None and not getattr(probe, backend):
        raise _launch(
            f"{who} has no {backend}, which engine.transfer_backend asks for; install "
            f"{'mooncake-transfer-engine' if backend == 'mooncake' else 'nixl'} there"
        )
    return probe.sglang


def check_gpus(probe: Probe, needed: int) -> None:
    """EngineError of phase driver where GPUs 0 to ``needed`` - 1 cannot be used."""
    advice = 'see nvidia-smi and prfaas doctor, or set engine.device = "cpu"'
    if probe.error is not None:
        raise EngineError(
            f"SGLang cannot run in phase driver: torch {probe.torch} has no GPU here "
            f'("{probe.error.splitlines()[0][:300]}"); {driver_version() or advice}'
        )
    if probe.gpus < needed:
        raise EngineError(
            f"SGLang cannot run in phase driver: the servers of this host need {needed} GPUs, and "
            f"torch sees {probe.gpus}; lower tp or the number of instances, or set base_gpu"
        )


def driver_version() -> str | None:
    """What nvidia-smi says of the driver and the GPUs, one line; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer ({type(error).__name__})"
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode or not lines:
        return f"nvidia-smi fails: {lines[0][:200] if lines else f'exit status {done.returncode}'}"
    driver, _, gpu = lines[0].partition(", ")
    return f"driver {driver}, {len(lines)} x {gpu}"


def _launch(why: str) -> EngineError:
    return EngineError(f"SGLang cannot run in phase launch: {why}.")
