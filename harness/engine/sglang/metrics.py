"""What a server has counted by the end of its life, from its ``/metrics`` (Prometheus text).

Names are those of SGLang 0.5.23, which 0.5.9 shares but for what ``versions`` lists. A figure of a
server of several ranks is the sum of theirs, a share the largest. Histograms appear with their
first sample, so one that is missing counted nothing, or is not known to the version: None.

``kv_transfer_total_mb`` is of MiB, page-rounded, states included. In 0.5.9 it is a gauge that is
never set, and gauges of that name are not read.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_PREFIX = "sglang:"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Total:
    """A histogram as its sum and the number of samples."""

    sum: float
    count: int


@dataclass(frozen=True, slots=True)
class Counters:
    """One server. ``stage_s`` is by stage (prefill_bootstrap, prefill_forward,
    prefill_transfer_kv_cache, decode_bootstrap, decode_transferred, ...)."""

    num_running: int | None
    num_queued: int | None
    token_usage: float | None
    window_usage: float | None
    state_usage: float | None
    page_size: int | None
    max_total_tokens: int | None
    queue_s: Total | None
    ttft_s: Total | None
    itl_s: Total | None
    stage_s: dict[str, Total]
    kv_transfer_bytes: Total | None
    kv_transfer_s: Total | None
    prompt_tokens: int | None
    generated_tokens: int | None
    cached_tokens: int | None

    def told(self) -> dict[str, Any]:
        """For a file of the run."""
        return asdict(self)


def read_counters(exposition: str) -> Counters:
    """ValueError where ``exposition`` is no Prometheus text."""
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            samples.setdefault(sample.name.removeprefix(_PREFIX), []).append(sample)

    def sum_of(name: str) -> int | None:
        found = samples.get(name)
        return round(sum(sample.value for sample in found)) if found else None

    def largest(name: str) -> float | None:
        return max((sample.value for sample in samples.get(name, ())), default=None)

    def total(name: str, unit: float = 1.0) -> Total | None:
        return _total(samples.get(f"{name}_sum", ()), samples.get(f"{name}_count", ()), unit)

    page_size, pool = largest("page_size"), largest("max_total_num_tokens")
    return Counters(
        num_running=sum_of("num_running_reqs"),
        num_queued=sum_of("num_queue_reqs"),
        token_usage=largest("token_usage"),
        window_usage=largest("swa_token_usage"),
        state_usage=largest("mamba_usage"),
        page_size=None if page_size is None else int(page_size),
        max_total_tokens=None if pool is None else int(pool),
        queue_s=total("queue_time_seconds"),
        ttft_s=total("time_to_first_token_seconds"),
        itl_s=total("inter_token_latency_seconds"),
        stage_s=_by_stage(samples),
        kv_transfer_bytes=total("kv_transfer_total_mb", _MIB),
        kv_transfer_s=total("kv_transfer_latency_ms", 1e-3),
        prompt_tokens=sum_of("prompt_tokens_total"),
        generated_tokens=sum_of("generation_tokens_total"),
        cached_tokens=sum_of("cached_tokens_total"),
    )


def _by_stage(samples: dict[str, list[Sample]]) -> dict[str, Total]:
    name = "per_stage_req_latency_seconds"
    sums, counts = samples.get(f"{name}_sum", []), samples.get(f"{name}_count", [])
    found = {}
    for stage in dict.fromkeys(sample.labels.get("stage", "") for sample in sums):
        total = _total(_of_stage(sums, stage), _of_stage(counts, stage), 1.0)
        if total is not None:
            found[stage] = total
    return found


def _of_stage(samples: Iterable[Sample], stage: str) -> list[Sample]:
    return [sample for sample in samples if sample.labels.get("stage", "") == stage]


def _total(sums: Iterable[Sample], counts: Iterable[Sample], unit: float) -> Total | None:
    """Over all ranks; None where nobody has a line of it."""
    values, numbers = [s.value for s in sums], [s.value for s in counts]
    return Total(sum(values) * unit, round(sum(numbers))) if numbers else None
