"""What the scheduler knows before the first event: instances, costs, links, switches.

The deployment's policy follows from who prefills:

    local      no PrfaaS cluster: everything in the PD cluster
    remote     no local prefill: everything in PrfaaS, first come first served, without feedback
    threshold  both: l > t goes to PrfaaS
    capacity   both, by least expected completion over all prefill instances, without a threshold

A PD cluster has decode instances, a PrfaaS cluster has none and a link of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from harness.core import Instance, ScenarioError
from harness.deployment import Balancing
from harness.settings import PrefixCache, Scheduling

Admission = Literal["push_then_admit", "reserve_first"]
Placing = Literal["local", "remote", "threshold", "capacity"]

#: (input_tokens, resident_tokens, prefill_s, link) -> expected seconds from the end of prefill to
#: the landing of all KV; ``link`` is the PrfaaS cluster whose link it crosses, None inside one.
TransferTail = Callable[[int, int, float, str | None], float]


@dataclass(frozen=True, slots=True)
class Link:
    """A PrfaaS cluster's link: ``bytes_per_s`` of KV either way, the delay of a dispatch to it and
    of KV from it."""

    bytes_per_s: float
    dispatch_delay_s: float
    kv_delay_s: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """T_decode of a full batch and BS_max of one decode instance."""

    step_s: float
    max_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """``prefill_s``: by hardware name, (new_tokens, cached_tokens) -> seconds. ``moved_bytes``:
    (total_tokens, resident_tokens) -> KV bytes that must move. ``links``: by PrfaaS cluster.
    ``max_tokens``: the longest prompt that is planned for. ``link_silence_s``: a link on which for
    so long nothing moved of what waits, or nothing was heard, is down. ``threshold_tokens`` is
    required for balancing by threshold where both kinds of cluster prefill, and has no effect
    elsewhere. ``ingress_bytes_per_s``: what may enter each PD cluster from outside, where there are
    several clusters of a kind. ``more_decoding``: by hardware, of PD clusters that decode on
    another than the first one.
    """

    instances: tuple[Instance, ...]
    prefill_s: Mapping[str, Callable[[int, int], float]]
    decode_step_s: float
    decode_max_batch: int
    threshold_tokens: int | None
    balancing: Balancing
    scheduling: Scheduling
    prefix_cache: PrefixCache
    links: Mapping[str, Link]
    fabric_bytes_per_s: float
    moved_bytes: Callable[[int, int], int]
    transfer_tail_s: TransferTail
    max_tokens: int
    link_silence_s: float
    retry_after_s: float = 1.0
    ingress_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    more_decoding: Mapping[str, Decoding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prefills = [i for i in self.instances if i.role == "prefill"]
        if not prefills:
            raise ScenarioError("the deployment has no prefill instance; give it at least one")
        if not any(i.role == "decode" for i in self.instances):
            raise ScenarioError("the deployment has no decode instance; give it at least one")
        if min(self.decoding(i.hardware).max_batch for i in self.instances) < 1:
            raise ScenarioError("decode_max_batch is below 1: no request could ever decode")
        if self.policy == "threshold" and self.threshold_tokens is None:
            raise ScenarioError("two clusters prefill: threshold_tokens must say which gets what")
        if missing := {i.hardware for i in prefills} - set(self.prefill_s):
            raise ScenarioError(f"no prefill profile for hardware {', '.join(sorted(missing))}")
        if missing := {i.cluster for i in prefills} - set(self.pd_clusters) - set(self.links):
            raise ScenarioError(f"no link for the PrfaaS cluster {', '.join(sorted(missing))}")

    def decoding(self, hardware: str) -> Decoding:
        """Of a decode instance of some hardware."""
        first = Decoding(self.decode_step_s, self.decode_max_batch)
        return self.more_decoding.get(hardware, first)

    @property
    def pd_clusters(self) -> tuple[str, ...]:
        """The clusters that decode."""
        return tuple(dict.fromkeys(i.cluster for i in self.instances if i.role == "decode"))

    @property
    def policy(self) -> Placing:
        near = set(self.pd_clusters)
        local = {i.cluster in near for i in self.instances if i.role == "prefill"}
        if len(local) == 1:
            return "local" if local.pop() else "remote"
        return self.balancing

    def hardware(self, *, local: bool) -> str:
        """What prefills in the PD clusters, or in the PrfaaS clusters: that of the first one."""
        near = self.pd_clusters
        return next(
            one.hardware
            for one in self.instances
            if one.role == "prefill" and (one.cluster in near) == local
        )

    @property
    def admission(self) -> Admission:
        return self.scheduling.admission

    @property
    def link_delay_s(self) -> float:
        """Of a dispatch to the first PrfaaS cluster; 0 without one."""
        return next((link.dispatch_delay_s for link in self.links.values()), 0.0)

    @property
    def keeps_prefixes(self) -> bool:
        return self.prefix_cache.enabled

    @property
    def has_feedback(self) -> bool:
        """Whether placement follows what links and PrfaaS carry."""
        return self.scheduling.bandwidth_aware and self.policy in ("threshold", "capacity")

    @property
    def has_state(self) -> bool:
        """Whether a prefix is of use only where a state lies: layers whose KV does not grow."""
        tokens = self.prefix_cache.block_tokens
        return self.moved_bytes(tokens, tokens) > 0
