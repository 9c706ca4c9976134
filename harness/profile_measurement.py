"""What a measured profile holds beside its points: how it was measured, and what else was found.

All of it is optional in a profile file; imported profiles have none. Times are seconds, rates bytes
a second. An interval is [low, high] at ``level``.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=4000)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
IntervalFile = Annotated[list[Number], Field(min_length=2, max_length=2)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class QuantilesFile(_Part):
    """Of the times between tokens of one decode point, all batches together."""

    p5: Number
    p50: Number
    p90: Number
    p99: Number


class ReleaseFile(_Part):
    """When of a prefill of ``new_tokens`` which share of its KV bytes was final; both lists ascend
    and end at 1, one entry a layer or chunk."""

    new_tokens: Annotated[int, Field(ge=1, le=2**31)]
    byte_shares: Annotated[list[Share], Field(min_length=1, max_length=10_000)]
    time_shares: Annotated[list[Share], Field(min_length=1, max_length=10_000)]
    samples: Count
    source: Text


class OverheadFile(_Part):
    """T_prefill from outside and from inside, and what lies between: means, so that ``parts_s`` add
    up to outside - inside. The median difference beside them shows what stalls do to the means."""

    new_tokens: Count
    cached_tokens: Count
    outside_s: Number
    inside_s: Number
    median_difference_s: Number
    parts_s: dict[str, Number]


class KvFile(_Part):
    """S_kv at one length: as moved, where something moved and counted it, and by geometry, to the
    page. ``phi_bytes_per_s`` is Phi_kv = S_kv / T_prefill."""

    tokens: Count
    moved_bytes: Number | None
    geometry_bytes: Number
    phi_bytes_per_s: Number


class InterferenceFile(_Part):
    """What KV traffic costs: the time beside it over the time without, and the traffic."""

    kind: Literal["prefill_under_egress", "decode_under_ingress"]
    new_tokens: Count
    batch: Count
    context_tokens: Count
    ratio: Number
    interval: IntervalFile | None
    kv_bytes_per_s: Number


class BatchFile(_Part):
    """BS_max at a context: the largest batch of the measured range that meets the SLO, None if none
    does; or the most requests that the engine's KV memory holds."""

    context_tokens: Count
    max_batch: Count | None


class MissingFile(_Part):
    """A point that was asked for and is not there, or not tight, and why."""

    point: Text
    reason: Text


class GpuFile(_Part):
    """Over all samples that were used; throttle reasons are NVML's bits."""

    driver: Text
    names: list[Text]
    min_sm_clock_hz: Number
    mean_sm_clock_hz: Number
    mean_power_w: Number
    max_temperature_c: Number
    max_memory_used_bytes: Number
    throttle_reasons: Count


class MeasurementFile(_Part):
    """How, on what, and with what the points were measured."""

    started_utc: Text
    sessions: Count
    seed: Count
    level: Share
    bound: Number
    prefill_from: Literal["inside", "outside"]
    samples_file: Text
    time_scale: Number
    byte_scale: Number
    noise_cv: Number | None
    engine_flags: dict[str, Any]
    model_path: Text | None
    config_sha256: Text | None
    weights_sha256: Text | None
    hashes_absent: Text | None
    gpu: GpuFile | None
    gpu_absent: Text | None
    machine: dict[str, Any]
    overhead: list[OverheadFile]
    kv: list[KvFile]
    interference: list[InterferenceFile]
    slo_tpot_s: Number | None
    slo_batches: list[BatchFile]
    #: Empty where the engine does not say how many tokens it holds.
    memory_batches: list[BatchFile] = []
    missing: list[MissingFile]
    notes: list[Text]
