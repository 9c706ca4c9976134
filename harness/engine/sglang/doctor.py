"""Whether real SGLang servers can run on this machine: interpreter, versions, driver and GPUs."""

from harness.core import EngineError
from harness.engine.sglang.probe import ask_interpreter, driver_version, find_interpreter
from harness.engine.sglang.versions import known_version
from netem.doctor import Finding

_LACKS = 'real servers (engine.kind = "sglang")'


def sglang_finding(python: str | None = None) -> Finding:
    """One line for ``prfaas doctor``; without GPUs nothing but the versions is asked for."""
    driver = driver_version()
    try:
        who = find_interpreter(python)
        probe = ask_interpreter(python, gpus=driver is not None)
    except EngineError as error:
        return Finding("sglang", "missing", str(error), _LACKS, "name one by --python")
    gpus = driver or "no NVIDIA driver (nvidia-smi is not there)"
    if probe.sglang is None:
        found = f"{who} (Python {probe.python}) has no sglang; {gpus}"
        remedy = "pip install prfaas-bench[sglang] there, or name an interpreter by --python"
        return Finding("sglang", "missing", found, _LACKS, remedy)
    backends = [name for name in ("mooncake", "nixl") if getattr(probe, name)]
    found = f"{probe.sglang} in {who}, torch {probe.torch}, "
    found += f"transfer by {' or '.join(backends) or 'nothing'}; {gpus}"
    _, untested = known_version(probe.sglang)
    if driver is None:
        lacks = "servers on GPUs; tiny models can be served without (nox -s sglang-cpu)"
        return Finding("sglang", "limited", found, lacks, "install the driver, or use such a node")
    if probe.error is not None:
        lacks = f"servers on GPUs: torch says {probe.error.splitlines()[0][:200]!r}"
        remedy = "install a driver for torch's CUDA, or torch for the driver's"
        return Finding("sglang", "limited", found, lacks, remedy)
    if not backends:
        lacks = "prefill and decode on different servers"
        return Finding("sglang", "limited", found, lacks, "pip install mooncake-transfer-engine")
    if untested is not None:
        remedy = "set engine.version to one that is, and install it"
        return Finding("sglang", "limited", f"{found}, {probe.gpus} GPUs", untested, remedy)
    return Finding("sglang", "ok", f"{found}, {probe.gpus} GPUs")
