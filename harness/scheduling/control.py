"""What is decided between requests: the links' estimates, the threshold and the roles.

Each PrfaaS cluster has a link and an estimate of it. One threshold serves all of them: what can be
offloaded is the sum over the clusters whose link is up, since among these each request goes to the
one that is expected to be done first. Estimates, threshold and roles are in modules of their own;
here they get what they ask for of the instances and the arrivals.
"""

from collections.abc import Iterable

from harness.core import Role
from harness.scheduling.congestion import CongestionConfig, LinkEstimate, LinkSample
from harness.scheduling.fleet import Cluster, Fleet
from harness.scheduling.order import earliest_slot
from harness.scheduling.roles import RoleChange, RoleControl, RolesConfig, Stages
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.scheduling.threshold import (
    Remote,
    ThresholdChange,
    ThresholdConfig,
    ThresholdControl,
)


class Control:
    """Kept up to date by ``observe`` and ``sample``, asked each period by ``tick_*``."""

    def __init__(self, config: SchedulerConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        #: Whether placement follows what links and PrfaaS carry.
        self.follows = config.has_feedback
        self._estimates = {
            name: LinkEstimate(
                CongestionConfig(link.bytes_per_s, down_after_s=config.link_silence_s)
            )
            for name, link in config.links.items()
        }
        #: The links as of the last report or tick.
        self.links = {name: one.state(0.0) for name, one in self._estimates.items()}
        #: Whether every link is, as of the last report or tick.
        self.is_scarce = False
        self._threshold = _threshold_control(config)
        self._roles = _role_control(config)
        self._watching = self._threshold if self.follows else None
        #: Whether anybody looks at arrivals.
        self.observes = self._watching is not None or self._roles is not None

    @property
    def threshold_tokens(self) -> int | None:
        """What is in force; None where no length decides."""
        return None if self._threshold is None else self._threshold.threshold_tokens

    def is_up(self, cluster: str, now_s: float) -> bool:
        """Whether a PrfaaS cluster's link is not known to be down, by a policy that asks."""
        return not self.follows or not self._estimates[cluster].is_down(now_s)

    def up(self, clusters: tuple[str, ...], now_s: float) -> tuple[str, ...]:
        """Those of the PrfaaS clusters whose link is not known to be down."""
        estimates = self._estimates
        for name in clusters:
            if estimates[name].is_down(now_s):
                return tuple(one for one in clusters if not estimates[one].is_down(now_s))
        return clusters

    def sample(
        self,
        cluster: str,
        samples: Iterable[LinkSample],
        now_s: float,
        next_s: float | None = None,
    ) -> None:
        self.links[cluster] = self._estimates[cluster].handle(samples, now_s, next_s)
        self._judge()

    def _judge(self) -> None:
        self.is_scarce = bool(self.links) and all(one.scarce for one in self.links.values())

    def look(self, now_s: float) -> None:
        """Age the estimates to now."""
        for name, estimate in self._estimates.items():
            self.links[name] = estimate.state(now_s)
        self._judge()

    def observe(
        self,
        input_tokens: int,
        uncached_tokens: int,
        resident_tokens: int,
        hold_s: float,
        now_s: float,
        remote_cached_tokens: int,
    ) -> None:
        """Count an arrival, placed or refused, as demand. ``remote_cached_tokens``: what PrfaaS
        would not have to compute of it."""
        watching = self._watching
        cached_tokens = input_tokens - uncached_tokens
        kv_bytes = self._config.moved_bytes(input_tokens, resident_tokens)
        if watching is not None:
            watching.observe(uncached_tokens, cached_tokens, kv_bytes, now_s, remote_cached_tokens)
        if self._roles is not None:
            self._roles.observe(
                uncached_tokens, cached_tokens, kv_bytes, hold_s, now_s, remote_cached_tokens
            )

    def tick_threshold(self, now_s: float) -> ThresholdChange | None:
        """What link and PrfaaS make of the threshold."""
        if self._threshold is None or not self.follows:
            return None
        return self._threshold.tick(self._remote(now_s), now_s)

    def tick_roles(self, now_s: float) -> tuple[Role | None, ThresholdChange | None]:
        """The role that one more instance shall have, and the threshold if its base moved."""
        if self._roles is None:
            return None, None
        change = self._roles.tick(self._stages(now_s), now_s) or RoleChange()
        return change.to, self._rebase(change.base_tokens)

    def converted(self, now_s: float) -> ThresholdChange | None:
        """A conversion has ended, well or not: the base threshold is solved again."""
        if self._roles is None:
            return None
        return self._rebase(self._roles.converted(self._stages(now_s), now_s))

    def _rebase(self, base_tokens: int | None) -> ThresholdChange | None:
        if base_tokens is None or self._threshold is None:
            return None
        return self._threshold.rebase(base_tokens)

    def _up(self, now_s: float) -> list[Cluster]:
        return [one for one in self._fleet.remote if self.is_up(one.name, now_s)]

    def _remote(self, now_s: float) -> Remote:
        clusters = self._up(now_s)
        states = [self.links[one.name] for one in clusters]
        return Remote(
            link_bytes_per_s=sum(state.capacity_bytes_per_s for state in states),
            waiting_bytes=sum(state.waiting_bytes for state in states),
            scarce=any(state.scarce for state in states),
            num_instances=sum(len(one.order) for one in clusters),
            queue_s=_queued_s(clusters, now_s),
            local_queue_s=_queued_s(self._fleet.local, now_s),
            num_local=sum(len(one.order) for one in self._fleet.local),
        )

    def _stages(self, now_s: float) -> Stages:
        remote, local = self._up(now_s), self._fleet.local
        decodes = [one for cluster in local for one in cluster.decodes if one.in_service]
        slots = sum(one.max_batch for one in decodes)
        busy_slots = sum(one.busy_slots(now_s) for one in decodes)
        slot = earliest_slot(decodes, now_s)
        waits = [
            first.free_at_s(now_s) - now_s
            for first in (one.order.least(now_s) for one in local)
            if first is not None
        ]
        return Stages(
            num_remote=sum(len(one.order) for one in remote),
            num_prefill=sum(len(one.order) for one in local),
            num_decode=len(decodes),
            link_bytes_per_s=sum(self.links[one.name].capacity_bytes_per_s for one in remote),
            remote_busy=_busy_share(remote),
            prefill_busy=_busy_share(local),
            decode_busy=busy_slots / slots if slots else 0.0,
            prefill_wait_s=min(waits, default=0.0),
            decode_wait_s=0.0 if slot is None else slot[1] - now_s,
        )


def _queued_s(clusters: Iterable[Cluster], now_s: float) -> float:
    """Seconds of prefill assigned and not done, over the instances in service."""
    return sum(
        backlog.free_at_s(now_s) - now_s
        for one in clusters
        for backlog in one.prefills
        if backlog.in_service
    )


def _busy_share(clusters: Iterable[Cluster]) -> float:
    """Of the prefill instances in service, the share at work."""
    serving = [one for cluster in clusters for one in cluster.prefills if one.in_service]
    return sum(not one.is_idle for one in serving) / len(serving) if serving else 0.0


def _threshold_control(config: SchedulerConfig) -> ThresholdControl | None:
    if config.policy != "threshold":
        return None
    assert config.threshold_tokens is not None
    return ThresholdControl(
        ThresholdConfig(
            base_tokens=config.threshold_tokens,
            longest_tokens=config.max_tokens,
            link_target=config.scheduling.link_target,
            demand_window_s=config.scheduling.demand_window_s,
            remote_prefill_s=config.prefill_s[config.hardware(local=False)],
            local_prefill_s=config.prefill_s[config.hardware(local=True)],
        )
    )


def _role_control(config: SchedulerConfig) -> RoleControl | None:
    """None where roles stay, or where nothing but the threshold's balance could say which is
    short: a deployment without local prefill, or one balanced by capacity."""
    if not config.scheduling.role_conversion or config.policy not in ("local", "threshold"):
        return None
    offloads = config.policy == "threshold"
    return RoleControl(
        RolesConfig(
            longest_tokens=config.max_tokens,
            role_period_s=config.scheduling.role_period_s,
            link_target=config.scheduling.link_target,
            num_slots=config.decode_max_batch,
            remote_prefill_s=(config.prefill_s[config.hardware(local=False)] if offloads else None),
            local_prefill_s=config.prefill_s[config.hardware(local=True)],
        ),
        config.threshold_tokens if offloads else None,
    )
