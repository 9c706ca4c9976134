"""The threshold on the short time scale: as low as planned, as high as link and PrfaaS need it.

Every control period, over the arrivals of the demand window W (symbols of arXiv 2604.15039, t the
threshold, l a length of uncached input, C the link's capacity as far as it is known):

    link(t)    =  (sum of S_kv over l > t  + what waits for the link) / (C W)
    prfaas(t)  =  (prefill seconds of l > t  + those queued there) / (instances W)
    local(t)   =  (prefill seconds of l <= t + those queued here) / (instances W)

    t = the least t >= base with  link(t) <= link_target max(0.7, local(t))
                             and  prfaas(t) <= max(1, local(t))

Work is moved away from what is short only as long as the local side is not fuller, else it would
be lost there. For the link that begins well before its limit: where link and local prefill are the
two bottlenecks their loads are equal at the t that carries most, and there both have room to spare.
For PrfaaS it begins at the limit, since the planned base is balanced already (Eq. 7).

``base`` is the planned threshold, or what ``harness.scheduling.roles`` has solved since. The
threshold rises at once, when what is needed differs by more than a dead band; it falls by one
geometric step a period, and not while the link is scarce. While no link to a PrfaaS cluster is up
it is longer than any prompt, so that everything stays local; from there it comes back by the same
steps.
"""

from dataclasses import dataclass
from typing import Literal

from harness.scheduling.demand import Demand, PrefillSeconds

Reason = Literal["link", "prfaas_queue", "outage", "recovery", "roles"]

#: Differences of the wanted threshold below this share are the window's noise.
DEAD_BAND = 0.05
#: What is left of the threshold after a period in which it falls: 18 periods from 128K to 19.4K.
FALL = 0.9
#: Load of a link, as a share of its target, up to which nothing is moved away from it.
EASY_LINK = 0.7


@dataclass(frozen=True, slots=True)
class ThresholdConfig:
    """What does not change. ``remote_prefill_s`` is of a PrfaaS instance, ``local_prefill_s`` of a
    PD one: (new_tokens, cached_tokens) -> seconds. ``longest_tokens`` is the longest prompt."""

    base_tokens: int
    longest_tokens: int
    link_target: float
    demand_window_s: float
    remote_prefill_s: PrefillSeconds
    local_prefill_s: PrefillSeconds


@dataclass(frozen=True, slots=True)
class Remote:
    """What can be offloaded to now, summed over the PrfaaS clusters whose link is up.

    ``num_instances`` and ``num_local`` count the prefill instances in service there and here;
    ``queue_s`` and ``local_queue_s`` are the work that waits. With ``num_instances`` 0 nothing can
    be offloaded.
    """

    link_bytes_per_s: float
    waiting_bytes: float
    scarce: bool
    num_instances: int
    num_local: int
    queue_s: float = 0.0
    local_queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ThresholdChange:
    threshold_tokens: int
    reason: Reason


class ThresholdControl:
    """``observe`` each arrival, ``tick`` each control period; ``threshold_tokens`` is in force."""

    def __init__(self, config: ThresholdConfig) -> None:
        self._config = config
        self.base_tokens = config.base_tokens
        self.threshold_tokens = config.base_tokens
        self._demand = Demand(config.base_tokens, config.longest_tokens, config.demand_window_s)
        self._everything_local = config.longest_tokens + 1

    def observe(
        self,
        uncached_tokens: int,
        cached_tokens: int,
        kv_bytes: int,
        now_s: float,
        remote_cached_tokens: int | None = None,
    ) -> None:
        """Count an arrival: l and the bytes that would cross if PrfaaS took it, which has
        ``remote_cached_tokens`` of it, or as many as there are here."""
        config, remote_cached = self._config, remote_cached_tokens
        if remote_cached is None:
            remote_cached = cached_tokens
        self._demand.add(
            uncached_tokens,
            kv_bytes,
            config.remote_prefill_s(uncached_tokens + cached_tokens - remote_cached, remote_cached),
            config.local_prefill_s(uncached_tokens, cached_tokens),
            0.0,
            now_s,
        )

    def rebase(self, base_tokens: int) -> ThresholdChange | None:
        """Take another planned threshold; it holds at once unless a higher one is needed."""
        follows = self.threshold_tokens == self.base_tokens
        self.base_tokens = base_tokens
        self._demand.anchor_at(base_tokens)
        if follows or self.threshold_tokens < base_tokens:
            return self._set(base_tokens, "roles")
        return None

    def tick(self, remote: Remote, now_s: float) -> ThresholdChange | None:
        """What changes after a period, if anything."""
        self._demand.expire(now_s)
        if not remote.num_instances:
            return self._set(self._everything_local, "outage")
        held = self.threshold_tokens
        wanted, reason = self._wanted(remote, now_s)
        if wanted > held * (1 + DEAD_BAND):
            return self._set(wanted, reason)
        falls = wanted < held * (1 - DEAD_BAND) or wanted == self.base_tokens < held
        if falls and not remote.scarce:
            return self._set(max(wanted, int(held * FALL)), "recovery")
        return None

    def _set(self, tokens: int, reason: Reason) -> ThresholdChange | None:
        if tokens == self.threshold_tokens:
            return None
        self.threshold_tokens = tokens
        return ThresholdChange(tokens, reason)

    def _wanted(self, remote: Remote, now_s: float) -> tuple[int, Reason]:
        """The least threshold that fits, from the longest bin down."""
        demand, span_s = self._demand, self._demand.span_s(now_s)
        link_bytes = self._config.link_target * remote.link_bytes_per_s * span_s
        remote_s, most_s = remote.queue_s, remote.num_instances * span_s
        sent_bytes, local_s = remote.waiting_bytes, demand.total_local_s + remote.local_queue_s
        # Without a local instance nothing is gained by keeping work here.
        per_local_s = 1 / (remote.num_local * span_s) if remote.num_local else float("inf")
        sizes, far_s, near_s = demand.kv_bytes, demand.remote_s, demand.local_s
        for place in range(len(sizes) - 1, demand.anchor_bin, -1):
            if not sizes[place]:
                continue
            sent_bytes += sizes[place]
            remote_s += far_s[place]
            local_s -= near_s[place]
            load = local_s * per_local_s
            if sent_bytes > max(EASY_LINK, load) * link_bytes:
                return demand.upper_tokens(place), "link"
            if remote_s > max(1.0, load) * most_s:
                return demand.upper_tokens(place), "prfaas_queue"
        return self.base_tokens, "recovery"
