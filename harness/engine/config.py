"""What a worker process is told on its first line of stdin: one cluster's instances and costs."""

from typing import Literal

import msgspec

from harness.attention import KvDtype
from harness.core import Role
from harness.engine_settings import Reference
from harness.profile_file import ProfileSource
from harness.settings import PrefixCache

#: Wall time between two lines of ``/link_samples``.
LINK_SAMPLES_PERIOD_S = 0.1


class InstanceConfig(msgspec.Struct, forbid_unknown_fields=True):
    """One instance of the cluster; ``port`` 0 takes a free one."""

    name: str
    role: Role
    hardware: str
    port: int = 0


class EngineConfig(msgspec.Struct, forbid_unknown_fields=True):
    """One worker process. Durations ``*_s`` are scenario time, ``*_wall_s`` wall time.

    ``fabric_bytes_per_s`` and ``prefix_cache`` are in the scenario's units. ``convertible``: the
    instances may be given another role. ``noise_cv`` is the coefficient of variation of compute.
    ``decode_steps``: ``full_batch`` takes ``decode_step_s`` always, ``by_batch`` the profile's time
    of the batch that runs. ``decode_memory_bytes``: of each instance, in the scenario's units, None
    without a bound. ``report_layers``: spans say when each layer was final.
    ``reference``: instances compute with torch in contexts of ``context_tokens``, and what plans an
    emulated engine's time is not looked at.
    """

    cluster: str
    address: str
    own_network: bool
    instances: list[InstanceConfig]
    profiles: dict[str, ProfileSource]
    architecture: str
    kv_dtype: KvDtype
    time_scale: float
    byte_scale: float
    seed: int
    admission: Literal["push_then_admit", "reserve_first"]
    admission_deadline_s: float
    stream_interval_tokens: int
    connections: int
    io_threads: int
    layerwise: bool
    checksum: bool
    chunk_bytes: int
    striping: Literal["chunked", "whole"]
    congestion_control: str | None
    pacing_bytes_per_s: float | None
    bdp_bytes: int
    fabric_bytes_per_s: float
    prefix_cache: PrefixCache
    convertible: bool
    decode_step_s: float
    decode_max_batch: int
    transfer_deadline_wall_s: float
    sample_period_wall_s: float
    max_connections: int
    max_buffer_bytes: int
    secret_hex: str
    api_key: str
    engines_spool: str
    link_spool: str
    noise_cv: float = 0.0
    decode_steps: Literal["full_batch", "by_batch"] = "full_batch"
    decode_memory_bytes: float | None = None
    report_layers: bool = False
    reference: Reference | None = None
    context_tokens: int = 0
