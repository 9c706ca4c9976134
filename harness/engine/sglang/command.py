"""The command line and environment of one SGLang server.

Flags that every known version has are given to all; ``harness.engine.sglang.versions`` says what a
version calls otherwise. The bearer token is no part of it: ``boot`` reads it from stdin.
"""

import os
import tempfile
from collections.abc import Sequence

from harness.engine.sglang.config import LauncherConfig, ServerConfig
from harness.engine.sglang.versions import Version

#: Flags that the launcher gives, with all their spellings, and what stands for them.
_RESERVED: dict[str, tuple[str, ...]] = {
    "set engine.model_path": ("--model-path", "--model"),
    "set engine.device": ("--device",),
    "set engine.tp": ("--tensor-parallel-size", "--tp-size", "--tp"),
    "set engine.dp": ("--data-parallel-size", "--dp-size", "--dp"),
    "set engine.ep": ("--expert-parallel-size", "--ep-size", "--ep"),
    "set base_gpu in the table of the role": ("--base-gpu-id",),
    "set engine.ib_device": ("--disaggregation-ib-device",),
    "set engine.transfer_backend": ("--disaggregation-transfer-backend",),
    "set engine.page_size": ("--page-size",),
    "set engine.chunked_prefill_tokens": ("--chunked-prefill-size",),
    "set engine.load_format": ("--load-format",),
    "set engine.mem_fraction": ("--mem-fraction-static",),
    "set engine.max_total_tokens": ("--max-total-tokens",),
    "set engine.context_tokens": ("--context-length",),
    "set engine.max_running_requests": ("--max-running-requests",),
    "the testbed chooses it": (
        "--host",
        "--port",
        "--api-key",
        "--disaggregation-mode",
        "--disaggregation-bootstrap-port",
        "--served-model-name",
        "--enable-metrics",
    ),
    "one server is one process tree on one host": ("--nnodes", "--node-rank", "--dist-init-addr"),
}


def reserved_flag(flag: str) -> str | None:
    """What to do instead of giving ``flag``, where it is not for the user to give."""
    name = flag.partition("=")[0]
    for instead, spellings in _RESERVED.items():
        if name in spellings:
            return instead
    return None


def gpus_of(tp: int, dp: int, extra_flags: Sequence[str]) -> int:
    """GPUs of one server: with attention of its own a data-parallel rank shares those of tp."""
    return tp if "--enable-dp-attention" in extra_flags else tp * dp


def arguments(config: LauncherConfig, server: ServerConfig, version: Version) -> list[str]:
    """The arguments of ``sglang.launch_server``; ports are chosen by now."""
    given: dict[str, object] = {
        "--model-path": config.model_path,
        "--served-model-name": config.model_name,
        "--host": config.address,
        "--port": server.port,
        "--device": config.device,
        "--load-format": config.load_format,
        "--tensor-parallel-size": server.tp,
        "--data-parallel-size": _several(server.dp),
        "--expert-parallel-size": _several(server.ep),
        "--base-gpu-id": (server.base_gpu or None) if config.device == "cuda" else None,
        "--page-size": config.page_size,
        "--chunked-prefill-size": config.chunked_prefill_tokens,
        "--mem-fraction-static": config.mem_fraction,
        "--max-total-tokens": config.max_total_tokens,
        "--context-length": config.context_tokens,
        "--max-running-requests": config.max_running_requests,
    }
    flags = [word for key, value in given.items() if value is not None for word in (key, value)]
    words = [str(word) for word in flags] + ["--enable-metrics"]
    if server.role != "both":
        words += _disaggregation(config, server)
    if config.device == "cpu":
        words += _without_gpu(config, server, version)
    return [*words, *server.extra_flags]


def environment(
    config: LauncherConfig, server: ServerConfig, inherited: dict[str, str], folder: str
) -> dict[str, str]:
    """The whole environment of a server; ``folder`` holds its sockets and is its own."""
    env = {
        # Nothing is fetched: the model is a folder, and a run needs no network.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # Health is asked for all the time, and shall not make the engine generate.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_HOST_IP": config.address,
        "HOST_IP": config.address,
        "TMPDIR": folder,
        # What was compiled for one server is there for the next; its default lies in TMPDIR.
        "TORCHINDUCTOR_CACHE_DIR": inherited.get(
            "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        ),
        "PYTHONUNBUFFERED": "1",
    }
    if config.transfer_protocol == "tcp":
        memory = "" if config.device == "cpu" else ",cuda"
        env |= {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "UCX_TLS": f"tcp,self{memory}"}
    else:
        env |= {"MOONCAKE_PROTOCOL": "rdma"}
    if config.device == "cpu":
        # Compiling a kernel by a C++ compiler takes longer than all that a tiny model computes.
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return inherited | env | server.env


def _disaggregation(config: LauncherConfig, server: ServerConfig) -> list[str]:
    words = ["--disaggregation-mode", server.role]
    words += ["--disaggregation-transfer-backend", config.transfer_backend]
    if server.role == "prefill":
        words += ["--disaggregation-bootstrap-port", str(server.bootstrap_port)]
    if server.ib_device is not None:
        words += ["--disaggregation-ib-device", server.ib_device]
    return words


def _without_gpu(config: LauncherConfig, server: ServerConfig, version: Version) -> list[str]:
    """What a server needs where torch is all there is."""
    words = ["--attention-backend", "torch_native", "--disable-cuda-graph"]
    words += version.cpu_flags.get("sleep_on_idle", ())
    if server.role == "decode":
        words += version.cpu_flags.get("retraction_backup", ())
    if config.hybrid:
        words += [*version.cpu_flags.get("mamba_no_buffer", ()), "--disable-overlap-schedule"]
        words += ["--max-mamba-cache-size", "64"]
    return words


def _several(count: int) -> int | None:
    """Left out for one, so that a version's own default stands."""
    return None if count == 1 else count
