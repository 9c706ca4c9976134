"""What the gateway is told on its first line of stdin."""

import msgspec

from harness.attention import KvDtype
from harness.core import Instance, Role
from harness.engine_settings import EngineKind
from harness.profile_file import ProfileSource
from harness.scheduling.config import Policy
from harness.settings import Timeouts


class WorkerAddress(msgspec.Struct, forbid_unknown_fields=True):
    """An instance and where the gateway reaches it."""

    name: str
    cluster: str
    role: Role
    hardware: str
    host: str
    port: int
    #: A prefill instance's bootstrap server as decode instances reach it; its own address if None.
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None

    def instance(self) -> Instance:
        return Instance(self.name, self.cluster, self.role, self.hardware)


class GatewayConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One deployment's gateway. Durations ``*_s`` are scenario time, ``*_wall_s`` wall time.

    ``api_key`` None: whoever reaches the gateway may use it, which only loopback allows.
    ``tokenizer``: the path of a ``tokenizer.json`` for prompts given as text; None: one token a
    byte, as the emulated engines have it. ``max_retries``: placements after the first.
    ``canary_timeout_wall_s`` None: a pair may take as long as it likes. ``page_tokens`` and
    ``counts_kv`` are of SGLang: tokens of a page, and whether its version counts KV bytes; the
    samples of its ``/metrics`` go to ``engines_spool``.
    """

    host: str
    port: int
    model: str
    workers: list[WorkerAddress]
    profiles: dict[str, ProfileSource]
    architecture: str
    kv_dtype: KvDtype
    policy: Policy
    time_scale: float
    byte_scale: float
    request_timeout_wall_s: float
    api_key: str | None
    worker_key: str
    gateway_spool: str
    decisions_spool: str
    link_spool: str
    timeouts: Timeouts
    max_retries: int
    max_body_bytes: int
    tokenizer: str | None
    engine: EngineKind = "emulated"
    canary_timeout_wall_s: float | None = None
    page_tokens: int = 1
    counts_kv: bool = False
    engines_spool: str = ""
