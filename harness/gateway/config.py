"""What the gateway is told on its first line of stdin."""

from typing import Literal

import msgspec

from harness.attention import KvDtype
from harness.core import Instance, Role
from harness.profile_file import ProfileSource


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


class GatewayConfig(msgspec.Struct, forbid_unknown_fields=True):
    """One deployment's gateway. Durations ``*_s`` are scenario time, ``*_wall_s`` wall time."""

    host: str
    port: int
    model: str
    workers: list[WorkerAddress]
    profiles: dict[str, ProfileSource]
    architecture: str
    kv_dtype: KvDtype
    threshold_tokens: int | None
    decode_step_s: float
    decode_max_batch: int
    admission: Literal["push_then_admit", "reserve_first"]
    ttft_source: Literal["decode", "prefill"]
    time_scale: float
    byte_scale: float
    layerwise: bool
    link_bytes_per_s: float
    fabric_bytes_per_s: float
    dispatch_delay_s: float
    kv_delay_s: float
    request_timeout_wall_s: float
    max_in_flight: int
    api_key: str
    worker_key: str
    gateway_spool: str
    decisions_spool: str
    link_spool: str
