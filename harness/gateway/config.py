"""What the gateway is told on its first line of stdin."""

import msgspec

from harness.attention import KvDtype
from harness.core import Instance, Role
from harness.profile_file import ProfileSource
from harness.scheduling.config import Policy
from harness.surface.generate import MAX_BODY_BYTES


class WorkerAddress(msgspec.Struct, forbid_unknown_fields=True):
    """An instance and where the gateway reaches it."""

    name: str
    cluster: str
    role: Role
    hardware: str
    host: str
    port: int

    def instance(self) -> Instance:
        return Instance(self.name, self.cluster, self.role, self.hardware)


class Timeouts(msgspec.Struct, forbid_unknown_fields=True):
    """How long a phase of a request may last; None: as long as the whole request may.

    A queue may rightly hold a request for as long as its client waits, so only what cannot be a
    queue has a bound of its own unless one is given: answering a connection, and the next token.
    ``*_s`` are scenario time.
    """

    connect_wall_s: float = 5.0
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    decode_admission_s: float | None = None
    between_tokens_s: float | None = 60.0


class GatewayConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One deployment's gateway. Durations ``*_s`` are scenario time, ``*_wall_s`` wall time.

    ``api_key`` None: whoever reaches the gateway may use it, which only loopback allows.
    ``tokenizer``: the path of a ``tokenizer.json`` for prompts given as text; None: one token a
    byte, as the emulated engines have it. ``max_retries``: placements after the first.
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
    timeouts: Timeouts = msgspec.field(default_factory=Timeouts)
    max_retries: int = 2
    max_body_bytes: int = MAX_BODY_BYTES
    tokenizer: str | None = None
