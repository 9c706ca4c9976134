"""What happens to the scheduler and what it answers: the vocabulary of ``Scheduler.handle``.

Two drivers deliver these events with their own clock: the gateway (sockets) and the simulator (a
heap). A request's life is ``Arrived``, ``PrefillStarted``, ``PrefillDone``, ``TransferDone``,
``DecodeAdmitted`` and then exactly one of ``Finished``, ``Failed``, ``Cancelled``. Those in the
middle only sharpen estimates: a driver that learns of one late, or never, loses accuracy and
nothing else. Times are not fields: ``now_s`` of ``handle`` is when the driver learned of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.core import Route


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request asks to be placed; each cluster holds so many tokens of its prefix."""

    rid: str
    input_tokens: int
    output_tokens: int
    cached_tokens_by_cluster: Mapping[str, int] = field(default_factory=dict)
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    rid: str


@dataclass(frozen=True, slots=True)
class PrefillDone:
    rid: str


@dataclass(frozen=True, slots=True)
class TransferDone:
    """All KV of the request has landed at its decode instance."""

    rid: str
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class DecodeAdmitted:
    """The KV has landed and the request has its decode slot: decoding begins."""

    rid: str


@dataclass(frozen=True, slots=True)
class Finished:
    rid: str


@dataclass(frozen=True, slots=True)
class Failed:
    rid: str
    phase: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away; the driver has aborted, or is aborting, the work upstream."""

    rid: str


@dataclass(frozen=True, slots=True)
class InstanceUp:
    instance: str


@dataclass(frozen=True, slots=True)
class InstanceDown:
    instance: str


Event = (
    Arrived
    | PrefillStarted
    | PrefillDone
    | TransferDone
    | DecodeAdmitted
    | Finished
    | Failed
    | Cancelled
    | InstanceUp
    | InstanceDown
)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request along ``route`` now. The other fields are the inputs of the decision.

    ``uncached_tokens`` is l of the paper, the length that was compared with ``threshold_tokens``;
    ``cached_tokens`` is the prefix held by the cluster that prefills, so the prefill computes
    ``input_tokens - cached_tokens``. Expected instants are scenario seconds on ``now_s``'s axis.
    """

    rid: str
    route: Route
    input_tokens: int
    uncached_tokens: int
    cached_tokens: int
    threshold_tokens: int | None
    prefill_service_s: float
    expected_prefill_start_s: float
    expected_kv_landed_s: float
    expected_decode_slot_s: float


@dataclass(frozen=True, slots=True)
class Reject:
    """No place for the request; it leaves no state behind and may come again later."""

    rid: str
    retry_after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Abort the request (its instance is gone); the driver answers with ``Failed``."""

    rid: str
    reason: str


Action = Dispatch | Reject | Cancel
