"""What a simulation tells of each request and of the whole, and a request on its way."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec import field as struct_field

from harness.core import Instance, Outcome, Role, Route
from harness.engine.memory import Memory
from harness.kv_path import KvPath
from harness.scheduling.events import CopyPrefix
from harness.utilisation import Utilisation

FloatArray = npt.NDArray[np.float64]


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
    #: Placements after the first, and how long after the planned send the last one was.
    retries: int = 0
    gateway_s: float | None = 0.0


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
    """``requests`` in the order of the schedule, or none where a sink took them
    (``harness.simulator.rows``); ``num_requests`` counts them all. ``utilisation``: work served
    over the planned window (``utilisation.window_s``), so above 1 where a backlog was left at its
    end.
    ``end_s`` is when the last request ended. ``crossed_bytes`` of KV crossed the link either way,
    of which ``copied_bytes`` were prefixes copied between the clusters.
    """

    requests: Sequence[SimulatedRequest]
    num_requests: int
    num_completed: int
    utilisation: Utilisation
    window_s: float
    end_s: float
    crossed_bytes: float = 0.0
    copied_bytes: float = 0.0
    thresholds: tuple[ThresholdSet, ...] = ()
    roles: tuple[RoleTaken, ...] = ()
    start_s: float = 0.0
    #: Of the requests that completed, in the order of the schedule  # [completed]
    ttft_s: FloatArray = field(default_factory=lambda: np.empty(0), compare=False)
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def throughput_req_per_s(self) -> float:
        """Completed requests over the time from the first arrival to the last end: at saturation
        what the slowest stage carries, else nearly the load."""
        return self.num_completed / (self.end_s - self.start_s)


class Live(Struct, gc=False):
    """A request on its way: the instants known so far. A struct for the reason of
    ``harness.scheduling.events``."""

    rid: str
    number: int
    planned_s: float
    input_tokens: int
    output_tokens: int
    route: Route
    service_s: float
    hop_s: float
    back_s: float
    keys: Sequence[int] = ()
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
    second_s: float = 0.0
    #: Of the decode instance's memory; 0 where that is not counted.
    blocks: int = 0
    #: New tokens that are computed, and tokens of the prompt whose growing KV is sent or resident.
    computed_tokens: int = 0
    sent_tokens: int = 0
    #: Pieces of KV sent before the last part over a link that is shared fairly.
    pieces: int = 0
    #: Who holds what is fetched, and what need not be sent.
    holders: tuple[Memory | None, Memory | None] = (None, None)
    started: bool = False
    prefilled: bool = False
    landed: bool = False
    has_slot: bool = False
    #: When it was placed last, and how often before; ``gone``: an instance's death took it away.
    placed_s: float = 0.0
    retries: int = 0
    gone: bool = False
    #: A prefix on its way across the link.
    copy: CopyPrefix | None = None

    @property
    def key(self) -> int:
        """Another one for each placement; a schedule has at most a million requests."""
        return self.number + (self.retries << 20)

    @property
    def prefill(self) -> Instance:
        return self.route.prefill

    @property
    def decode(self) -> Instance:
        return self.route.decode


class PrefillQueue(Struct):
    """A prefill instance: who waits for it, and the path its KV leaves by."""

    path: KvPath | None
    running: bool = False
    queue: deque[Live] = struct_field(default_factory=deque)


class DecodeQueue(Struct):
    """A decode instance: its free slots and blocks of memory, and who waits for them."""

    free: int
    queue: deque[Live] = struct_field(default_factory=deque)
    #: 0 where memory is not counted, and no request takes any.
    free_blocks: int = 0

    def fits(self, live: Live) -> bool:
        """Whether there is room for a request."""
        return self.free > 0 and live.blocks <= self.free_blocks
