"""Spool files: JSON lines that the load generator, the gateway and the workers append as they go.

A process that dies may leave one last line without its end; it is counted and passed over. Any
other line that cannot be read is an error that names file and line. Instants are CLOCK_MONOTONIC
nanoseconds of the host; durations named ``*_wall_s`` or ``late_s`` are wall seconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, Literal, Protocol, TypeVar

import msgspec

from harness.core import Outcome, PrfaasError

#: A client row of a 1M-token output with one chunk a token stays below this.
MAX_LINE_BYTES = 64 * 1024 * 1024
Row = TypeVar("Row")


class _OfRequest(Protocol):
    @property
    def rid(self) -> str: ...


RequestRow = TypeVar("RequestRow", bound=_OfRequest)


class SpoolError(PrfaasError):
    """A spool holds a line that no process of ours writes; the message names file and line."""


@dataclass(frozen=True, slots=True)
class ClientRow:
    """A request as the load generator saw it; ``chunk_tokens`` are the tokens new in each chunk."""

    rid: str
    index: int
    outcome: Outcome
    planned_mono_ns: int | None = None
    sent_mono_ns: int | None = None
    first_byte_mono_ns: int | None = None
    first_token_mono_ns: int | None = None
    end_mono_ns: int | None = None
    chunk_mono_ns: tuple[int, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    http_status: int | None = None
    failure_phase: str | None = None
    failure_message: str | None = None


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """What a prefill instance measured of one request; null where it did not come to pass."""

    received_mono_ns: int | None = None
    start_mono_ns: int | None = None
    end_mono_ns: int | None = None
    service_wall_s: float | None = None
    late_s: float | None = None
    kv_acked_mono_ns: int | None = None
    kv_wire_bytes_sent: int | None = None
    kv_retransmits: int | None = None
    cached_tokens: int | None = None
    fetched_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """What a decode instance measured of one request; null where it did not come to pass."""

    received_mono_ns: int | None = None
    landed_mono_ns: int | None = None
    granted_mono_ns: int | None = None
    first_written_mono_ns: int | None = None
    end_mono_ns: int | None = None
    kv_wire_bytes_received: int | None = None
    kv_layers: int | None = None
    cached_tokens: int | None = None
    late_s: float | None = None
    resident_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """What a real prefill server says of one request, durations by its own clock."""

    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    first_token: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """What a real decode server says of one request, durations by its own clock; ``prefilled``:
    whether it ran a prefill itself."""

    admission_s: float | None = None
    first_token_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    retractions: int | None = None
    prefilled: bool | None = None


@dataclass(frozen=True, slots=True)
class GatewayRow:
    """A request as the gateway saw it, with the spans that its workers reported."""

    rid: str
    received_mono_ns: int | None = None
    dispatched_mono_ns: int | None = None
    first_chunk_mono_ns: int | None = None
    first_written_mono_ns: int | None = None
    end_mono_ns: int | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None
    crosses: bool | None = None
    outcome: str | None = None
    failure_phase: str | None = None
    failure_message: str | None = None
    threshold_tokens: int | None = None
    #: Placements after the first: an instance was lost before the first token.
    retries: int | None = None
    prefill: PrefillSpan | None = None
    decode: DecodeSpan | None = None
    #: In place of the spans, of engines whose clock is not the host's.
    prefill_times: PrefillTimes | None = None
    decode_times: DecodeTimes | None = None
    #: XXH3 of the ids that were answered, as JSON.
    output_digest: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A request as a worker saw it: the same spans, kept where the gateway did not learn them."""

    rid: str
    instance: str
    prefill: PrefillSpan | None = None
    decode: DecodeSpan | None = None


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One sample of the link's counters (``link``), of one TCP connection (``tcp``) or of what the
    gateway makes of those (``estimate``, in scenario units; ``peer`` is whose sample came last)."""

    mono_ns: int
    kind: Literal["link", "tcp", "estimate"] = "link"
    direction: str | None = None
    bytes_total: int | None = None
    packets_total: int | None = None
    dropped_total: int | None = None
    queued_bytes: int | None = None
    cluster: str | None = None
    peer: str | None = None
    connection: int | None = None
    rtt_s: float | None = None
    retransmits: int | None = None
    cwnd: int | None = None
    delivery_rate_bytes_per_s: float | None = None
    unsent_bytes: int | None = None
    min_rtt_s: float | None = None
    bytes_acked: int | None = None
    backlog_bytes: int | None = None
    in_flight_bytes: int | None = None
    utilisation: float | None = None
    waiting_s: float | None = None
    capacity_bytes_per_s: float | None = None
    scarce: bool | None = None


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One sample of an instance; ``busy_s_total`` is wall time since its process started, and the
    ``kv_*_total`` are what a real prefill server counts."""

    mono_ns: int
    instance: str
    role: str
    queued: int | None = None
    running: int | None = None
    busy_s_total: float | None = None
    kv_sent_wire_bytes_total: int | None = None
    kv_transfers_total: int | None = None


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One sample of a load worker, in wall seconds; counts and ``cpu_s`` are since its start, the
    maxima since its last sample."""

    mono_ns: int
    worker: int
    sent: int | None = None
    completed: int | None = None
    failed: int | None = None
    in_flight: int | None = None
    lag_max_s: float | None = None
    loop_delay_max_s: float | None = None
    cpu_s: float | None = None
    rss_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """What the scheduler decided, with all that it decided by; ``*_s`` are scenario seconds.

    ``action`` is ``dispatch`` or ``reject`` of a request's ``attempt`` (0 is the first), or
    ``set_threshold``, ``convert``, ``resync``, which no request asked for. Of a placement there are
    the lengths, each cluster's usable prefix (``hit_tokens``), the threshold, the links that were
    up and had room for copies, how long each prefill instance was busy (``waits_s``), when each of
    those that were compared for a prefix would be done (``considered_s``), the slot that each
    decode instance had to offer (``slots_s``), how many requests each instance had (``assigned``),
    and what came of it. ``scheduling.replay`` decides by it once more.
    """

    mono_ns: int
    action: str
    rid: str | None = None
    attempt: int | None = None
    now_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    block_keys: int | None = None
    uncached_tokens: int | None = None
    cached_tokens: int | None = None
    resident_tokens: int | None = None
    threshold_tokens: int | None = None
    hit_tokens: dict[str, int] | None = None
    link_scarce: bool | None = None
    link_up: tuple[str, ...] | None = None
    roomy: tuple[str, ...] | None = None
    waits_s: dict[str, float] | None = None
    considered_s: dict[str, float] | None = None
    slots_s: dict[str, float] | None = None
    assigned: dict[str, int] | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None
    prefill_service_s: float | None = None
    expected_prefill_start_s: float | None = None
    expected_kv_landed_s: float | None = None
    expected_decode_slot_s: float | None = None
    fetched_tokens: int | None = None
    fetch_from: str | None = None
    fetch_s: float | None = None
    copy_from: str | None = None
    copy_to: str | None = None
    copied_tokens: int | None = None
    copied_bytes: int | None = None
    copy_s: float | None = None
    instance: str | None = None
    reason: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """The simulator's account of one request, scenario seconds."""

    rid: str
    prefill_queue_s: float
    prefill_s: float
    transfer_s: float
    decode_admission_s: float
    ttft_s: float
    e2e_s: float | None = None
    prefill_instance: str | None = None
    decode_instance: str | None = None
    kv_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ExpectedRow:
    """What geometry and profiles say of one request with nothing cached: KV bytes, and prefill
    seconds by hardware. Each resident token is ``growing_bytes_per_token`` less to move."""

    rid: str
    kv_bytes_expected: int
    kv_wire_bytes_expected: int
    prefill_s: dict[str, float]
    growing_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class Spool(Generic[Row]):
    """The rows of one file in order. ``truncated`` counts a last line that has no end."""

    rows: tuple[Row, ...]
    truncated: int
    missing: bool


def read_rows(path: Path, row: type[Row]) -> Spool[Row]:
    """Read a spool; a file that was never opened for writing is missing, which is not an error."""
    decoder = msgspec.json.Decoder(row)
    rows: list[Row] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Spool((), 0, missing=True)
    except OSError as error:
        raise SpoolError(f"cannot read {path}: {error.strerror}") from error
    with file:
        number = 0
        while line := _next_line(path, file):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise SpoolError(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes")
            try:
                rows.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return Spool(tuple(rows), 1, missing=False)
                raise SpoolError(
                    f"{path}:{number}: {error}. The run's records are damaged; "
                    "remove the line to read the rest."
                ) from error
    return Spool(tuple(rows), 0, missing=False)


def _next_line(path: Path, file: IO[bytes]) -> bytes:
    try:
        return file.readline(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise SpoolError(f"cannot read {path}: {error.strerror}") from error


def by_rid(path: Path, rows: tuple[RequestRow, ...]) -> dict[str, RequestRow]:
    """Rows by request; SpoolError when a request has two."""
    found: dict[str, RequestRow] = {}
    for number, row in enumerate(rows, start=1):
        if row.rid in found:
            raise SpoolError(f"{path}:{number}: request {row.rid} has a second row")
        found[row.rid] = row
    return found
