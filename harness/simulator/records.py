"""What a simulation tells of each request and of the whole, and a request on its way."""

from collections import deque
from dataclasses import dataclass, field

from harness.core import Instance, Outcome, Request, Role, Route
from harness.engine.memory import Memory
from harness.kv_path import KvPath
from harness.utilisation import Utilisation


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request's phases in seconds; what it did not reach is None.

    ``cached_tokens`` its prefill did not have to compute, of which ``fetched_tokens`` came from
    elsewhere in the cluster; of ``resident_tokens`` no KV had to be sent.
    """

    rid: str
    index: int
    planned_s: float
    input_tokens: int
    output_tokens: int
    route: Route | None
    outcome: Outcome
    failure_phase: str | None
    prefill_queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    decode_admission_s: float | None
    first_token_s: float | None
    ttft_s: float | None
    time_to_second_token_s: float | None
    e2e_s: float | None
    kv_bytes: int | None
    cached_tokens: int = 0
    fetched_tokens: int = 0
    resident_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ThresholdSet:
    """The threshold in force from ``at_s`` on, and why."""

    at_s: float
    threshold_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoleTaken:
    """An instance that serves in another role from ``at_s`` on; it drained until ``left_s``."""

    left_s: float
    at_s: float
    instance: str
    role: Role


@dataclass(frozen=True, slots=True)
class Simulation:
    """``requests`` in the order of the schedule. ``utilisation``: work served over the planned
    window (``throughput.window_s``), so above 1 where a backlog was left at its end.
    ``end_s`` is when the last request ended. ``crossed_bytes`` of KV crossed the link either way,
    of which ``copied_bytes`` were prefixes copied between the clusters.
    """

    requests: tuple[SimulatedRequest, ...]
    utilisation: Utilisation
    window_s: float
    end_s: float
    crossed_bytes: float = 0.0
    copied_bytes: float = 0.0
    thresholds: tuple[ThresholdSet, ...] = ()
    roles: tuple[RoleTaken, ...] = ()

    @property
    def num_completed(self) -> int:
        return sum(r.outcome == "completed" for r in self.requests)


@dataclass(slots=True)
class Live:
    """A request on its way: the instants known so far."""

    request: Request
    number: int
    route: Route
    service_s: float
    hop_s: float
    back_s: float
    keys: tuple[int, ...] = ()
    fetch_s: float = 0.0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    resident_tokens: int = 0
    #: When what the decode instance fetches of the resident part is there.
    resident_s: float = 0.0
    kv_bytes: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    landed_s: float = 0.0
    granted_s: float = 0.0
    asked_slot_s: float = 0.0
    #: Who holds what is fetched, and what need not be sent.
    holders: tuple[Memory | None, Memory | None] = (None, None)
    started: bool = False
    prefilled: bool = False
    landed: bool = False
    has_slot: bool = False

    @property
    def prefill(self) -> Instance:
        return self.route.prefill

    @property
    def decode(self) -> Instance:
        return self.route.decode


@dataclass(slots=True)
class PrefillQueue:
    """A prefill instance: who waits for it, and the path its KV leaves by."""

    path: KvPath | None
    running: bool = False
    queue: deque[Live] = field(default_factory=deque)


@dataclass(slots=True)
class DecodeQueue:
    """A decode instance: its free slots, and who waits for one."""

    free: int
    queue: deque[Live] = field(default_factory=deque)


def completed(live: Live, now_s: float, first_s: float, second_s: float) -> SimulatedRequest:
    """The row of a request whose last token came now, its first and second ones when said."""
    request = live.request
    return SimulatedRequest(
        rid=request.rid,
        index=request.index,
        planned_s=request.planned_s,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        route=live.route,
        outcome="completed",
        failure_phase=None,
        prefill_queue_s=live.start_s - (request.planned_s + live.hop_s),
        prefill_s=live.service_s,
        transfer_s=live.landed_s - live.end_s + live.hop_s,
        decode_admission_s=live.granted_s - live.landed_s,
        first_token_s=0.0,
        ttft_s=first_s - request.planned_s,
        time_to_second_token_s=second_s - request.planned_s if request.output_tokens > 1 else None,
        e2e_s=now_s - request.planned_s,
        kv_bytes=live.kv_bytes,
        cached_tokens=live.cached_tokens,
        fetched_tokens=live.fetched_tokens,
        resident_tokens=live.resident_tokens,
    )


def failed(live: Live, phase: str) -> SimulatedRequest:
    """The row of a request that was placed and failed in ``phase``."""
    request = live.request
    return SimulatedRequest(
        rid=request.rid,
        index=request.index,
        planned_s=request.planned_s,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        route=live.route,
        outcome="failed",
        failure_phase=phase,
        prefill_queue_s=(live.start_s - (request.planned_s + live.hop_s) if live.started else None),
        prefill_s=live.service_s if live.prefilled else None,
        transfer_s=live.landed_s - live.end_s + live.hop_s if live.landed else None,
        decode_admission_s=None,
        first_token_s=None,
        ttft_s=None,
        time_to_second_token_s=None,
        e2e_s=None,
        kv_bytes=live.kv_bytes if live.started else None,
        cached_tokens=live.cached_tokens,
        fetched_tokens=live.fetched_tokens,
        resident_tokens=live.resident_tokens,
    )


def rejected(request: Request) -> SimulatedRequest:
    """The row of a request that was refused at once."""
    return SimulatedRequest(
        rid=request.rid,
        index=request.index,
        planned_s=request.planned_s,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        route=None,
        outcome="failed",
        failure_phase="rejected",
        prefill_queue_s=None,
        prefill_s=None,
        transfer_s=None,
        decode_admission_s=None,
        first_token_s=None,
        ttft_s=None,
        time_to_second_token_s=None,
        e2e_s=None,
        kv_bytes=None,
    )
