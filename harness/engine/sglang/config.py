"""What the launcher of a cluster's SGLang servers is told on its first line of stdin."""

from typing import Literal

import msgspec

from harness.core import Role
from harness.scenario_tables.engines import Requirement

#: A server that serves whole requests by itself is neither.
ServerRole = Role | Literal["both"]


class ServerConfig(msgspec.Struct, forbid_unknown_fields=True):
    """One server to launch; port 0 takes a free one. ``base_gpu``: the first of its tp x dp."""

    name: str
    role: ServerRole
    port: int = 0
    bootstrap_port: int = 0
    tp: int = 1
    dp: int = 1
    ep: int = 1
    base_gpu: int = 0
    ib_device: str | None = None
    extra_flags: list[str] = []  # msgspec copies it for each
    env: dict[str, str] = {}


class AttachedConfig(msgspec.Struct, forbid_unknown_fields=True):
    """A server that runs already: looked at, neither started nor stopped."""

    name: str
    role: ServerRole
    url: str
    bootstrap: str | None = None


class LauncherConfig(msgspec.Struct, forbid_unknown_fields=True):
    """One cluster's servers. Times are wall time; None leaves a value to the engine.

    ``hybrid``: the model has layers with a recurrent state. ``api_key``: the bearer token that
    launched servers want and attached ones are shown. ``version``: the exact one, if it has to be.
    """

    cluster: str
    address: str
    log_directory: str
    api_key: str
    ready_timeout_s: float
    servers: list[ServerConfig] = []
    attached: list[AttachedConfig] = []
    python: str | None = None
    version: str | None = None
    requires: list[Requirement] = []
    model_path: str | None = None
    model_name: str = "default"
    hybrid: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    transfer_backend: Literal["mooncake", "nixl"] = "mooncake"
    transfer_protocol: Literal["tcp", "rdma"] = "tcp"
    page_size: int | None = None
    chunked_prefill_tokens: int | None = None
    load_format: str = "auto"
    mem_fraction: float | None = None
    max_total_tokens: int | None = None
    context_tokens: int | None = None
    max_running_requests: int | None = None
    health_period_s: float = 2.0
    unhealthy_s: float = 60.0
