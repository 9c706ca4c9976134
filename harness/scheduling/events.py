"""What happens to the scheduler and what it answers: the vocabulary of ``Scheduler.handle``.

Two drivers deliver these events with their own clock: the gateway (sockets) and the simulator (a
heap). A request's life is ``Arrived``, ``PrefillStarted``, ``PrefillDone``, ``TransferDone``,
``DecodeAdmitted`` and then exactly one of ``Finished``, ``Failed``, ``Cancelled``. Those in the
middle only sharpen estimates: a driver that learns of one late, or never, loses accuracy and
nothing else. Times are not fields: ``now_s`` of ``handle`` is when the driver learned of it.

Made millions of times in a simulation: a msgspec struct is built in 0.05 us, a frozen dataclass of
six fields in 0.8. None of them is ever part of a cycle, so the collector need not look at them.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from harness.core import Role, Route
from harness.key_runs import Span
from harness.scheduling.congestion import LinkSample


class Arrived(Struct, frozen=True, gc=False):
    """A request asks to be placed."""

    rid: str
    input_tokens: int
    output_tokens: int
    #: Chained hashes of the prompt's full blocks (``harness.block_keys``); () without a cache.
    block_keys: Sequence[int] = ()


class PrefillStarted(Struct, frozen=True, gc=False):
    rid: str


class PrefillDone(Struct, frozen=True, gc=False):
    rid: str


class TransferDone(Struct, frozen=True, gc=False):
    """All KV of the request has landed at its decode instance; None: nobody says how much."""

    rid: str
    kv_bytes: int | None


class DecodeAdmitted(Struct, frozen=True, gc=False):
    """The KV has landed and the request has its decode slot: decoding begins."""

    rid: str


class Finished(Struct, frozen=True, gc=False):
    rid: str


class Failed(Struct, frozen=True, gc=False):
    rid: str
    phase: str


class Cancelled(Struct, frozen=True, gc=False):
    """The client went away; the driver has aborted, or is aborting, the work upstream."""

    rid: str


class InstanceUp(Struct, frozen=True, gc=False):
    instance: str


class InstanceDown(Struct, frozen=True, gc=False):
    instance: str


class LinkSamples(Struct, frozen=True, gc=False):
    """What a PrfaaS cluster's senders say of their connections, as old as each sample's ``at_s``.

    Delivered every period also when there is none: silence is an outage. ``next_s`` is when they
    will be heard again at the latest, where that is further off than the configured silence.
    """

    cluster: str
    samples: tuple[LinkSample, ...]
    next_s: float | None = None


class CacheDelta(Struct, frozen=True, gc=False):
    """What an instance's pool gained and lost since ``seq - 1``; keys of blocks and of states.

    Blocks come key by key or by runs, from all instances alike. Runs gained are told from the
    beginning of their prompts on, runs lost from the end on.
    """

    instance: str
    seq: int
    added_blocks: tuple[int, ...] = ()
    removed_blocks: tuple[int, ...] = ()
    added_states: Sequence[int] = ()
    removed_states: Sequence[int] = ()
    added_runs: Sequence[Span] = ()
    removed_runs: Sequence[Span] = ()


class CacheSnapshot(Struct, frozen=True, gc=False):
    """All that an instance's pool holds as of ``seq``: the answer to ``Resync``."""

    instance: str
    seq: int
    blocks: tuple[int, ...]
    states: tuple[int, ...]
    runs: Sequence[Span] = ()


class Converted(Struct, frozen=True, gc=False):
    """The instance has its new role and is in service; the driver's answer to ``Convert``."""

    instance: str


class Tick(Struct, frozen=True, gc=False):
    """A control period has passed: thresholds and roles are looked at."""


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
    | LinkSamples
    | CacheDelta
    | CacheSnapshot
    | Converted
    | Tick
)


class CopyPrefix(Struct, frozen=True, gc=False):
    """Before the prefill the first ``tokens`` of the prompt's KV are copied between clusters,
    from the pool of ``source`` to the one of ``destination`` (instance names)."""

    source: str
    destination: str
    tokens: int
    kv_bytes: int


class Dispatch(Struct, frozen=True, gc=False):
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
    #: Of ``cached_tokens``, what lies in another instance's pool of the cluster: from where, and
    #: the expected time over the fabric, which ``prefill_service_s`` contains.
    fetched_tokens: int = 0
    fetch_from: str | None = None
    fetch_s: float = 0.0
    #: Prefix that lies in the PD cluster which decodes: KV that does not move.
    resident_tokens: int = 0
    #: To be done before the prefill, in ``copy_s``, which ``prefill_service_s`` contains.
    copy: CopyPrefix | None = None
    copy_s: float = 0.0
    #: Every link was scarce.
    link_scarce: bool = False
    #: The usable prefix of each cluster; empty without a cache or without keys.
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    #: PrfaaS clusters whose link was not known to be down; those with bandwidth for copies.
    link_up: tuple[str, ...] = ()
    roomy: tuple[str, ...] = ()
    #: When each prefill instance compared in the cluster would be done, copies left aside; the
    #: others of it would be free later than these.
    considered_s: Mapping[str, float] = field(default_factory=dict)


class Reject(Struct, frozen=True, gc=False):
    """No place for the request; it leaves no state behind and may come again later.

    ``unavailable``: because no instance could serve it, and not because of those ahead of it.
    """

    rid: str
    retry_after_s: float
    reason: str
    unavailable: bool = False


class Cancel(Struct, frozen=True, gc=False):
    """Abort the request (its instance is gone); the driver answers with ``Failed``."""

    rid: str
    reason: str


class Convert(Struct, frozen=True, gc=False):
    """Give a drained instance of the PD cluster the other role; ``Converted`` answers."""

    instance: str
    role: Role


class SetThreshold(Struct, frozen=True, gc=False):
    """The threshold has changed; for the record, the scheduler uses it already."""

    threshold_tokens: int
    reason: Literal["link", "prfaas_queue", "outage", "recovery", "roles"]


class Resync(Struct, frozen=True, gc=False):
    """A delta of the instance's pool was missed: send a ``CacheSnapshot``."""

    instance: str


Action = Dispatch | Reject | Cancel | Convert | SetThreshold | Resync
