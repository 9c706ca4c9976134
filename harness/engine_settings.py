"""What serves a scenario, as resolved: the emulated or the reference engine, or SGLang servers.

The TOML form, where units and defaults live, is ``harness.scenario_tables.engines``;
``harness.engine_resolution`` makes the one from the other.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.core import PRFAAS, Instance
from harness.scenario_tables.engines import Requirement

EngineKind = Literal["emulated", "reference", "sglang"]
#: The [engine] sub-table that an instance's servers follow.
EngineRole = Literal["prfaas", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class SglangRole:
    """What the servers of one role have; ``[engine]`` and its sub-table are laid over each other.

    ``base_gpu`` is the first GPU of the role's first instance; None: after the roles before it.
    """

    tp: int
    dp: int
    ep: int
    base_gpu: int | None
    ib_device: str | None
    extra_flags: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Attached:
    """A server that runs already. ``bootstrap`` is HOST:PORT of a prefill server."""

    url: str
    bootstrap: str | None


@dataclass(frozen=True, slots=True)
class Sglang:
    """Real servers. ``python`` None: the interpreter that runs the harness. ``model_path`` is None
    where every server is attached; ``ready_timeout_s`` is wall time. None of the other values:
    the engine's own default."""

    model_path: Path | None
    python: str | None
    version: str | None
    requires: tuple[Requirement, ...]
    device: Literal["cuda", "cpu"]
    transfer_backend: Literal["mooncake", "nixl"]
    transfer_protocol: Literal["tcp", "rdma"]
    page_size: int | None
    chunked_prefill_tokens: int | None
    load_format: str
    mem_fraction: float | None
    max_total_tokens: int | None
    context_tokens: int | None
    max_running_requests: int | None
    ready_timeout_s: float
    roles: dict[EngineRole, SglangRole]
    attach: dict[str, Attached]


@dataclass(frozen=True, slots=True)
class Reference:
    """A model in torch, by the model file ``compute`` that completes the architecture, or by the
    folder ``model_path``. ``threads`` compute on the processor. ``prefill_slots``: prompts whose KV
    an instance holds. ``context_tokens`` None: as long as the workload's longest request.
    ``ranks``: what one of so many holds is computed, of the architecture file ``whole``.
    ``model_sha256`` is of the model file, or of the folder's config.json."""

    compute: str | None
    model_path: str | None
    seed: int
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cuda", "cpu"]
    threads: int
    chunk_tokens: int
    prefill_slots: int
    context_tokens: int | None
    ready_timeout_s: float
    ranks: int = 1
    whole: str | None = None
    model_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """``sglang`` and ``reference`` are None but for their own kind."""

    kind: EngineKind
    sglang: Sglang | None
    reference: Reference | None = None


def engine_role(instance: Instance) -> EngineRole:
    """Which sub-table of ``[engine]`` the servers of an instance follow."""
    return "prfaas" if instance.cluster == PRFAAS else instance.role
