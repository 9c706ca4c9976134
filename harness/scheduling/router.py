"""Where a request goes: the length threshold, then the least loaded instance.

Policy of the paper (symbols: l uncached input length, t threshold): l > t is prefilled by the
PrfaaS cluster, the rest by the PD cluster's own prefill instances. The two baselines are the same
rule at its ends: no PrfaaS cluster, everything is local; no local prefill, everything crosses.

l counts what the PD cluster's cache lacks, whichever cluster then prefills: the rule for a scarce
link, where no cached prefix is copied across.

Among prefill instances the one that would be free first is chosen, by remaining work in seconds.
With known service times this equals one central first-come-first-served queue; shortest queue by
count and round robin do not. Ties, which are the rule where instances idle, go to the one that got
its last request longest ago, and then to the lowest index: each instance sends its KV over a path
of its own, and always the first of the idle ones would fill one path while the others are empty.
"""

from collections.abc import Iterable, Sequence

from harness.core import PD, PRFAAS
from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog


def preferred_cluster(
    uncached_tokens: int, threshold_tokens: int | None, clusters: Iterable[str]
) -> str:
    """Cluster that should prefill, of those that can; a threshold is needed to choose of two."""
    able = set(clusters)
    if len(able) == 1:
        return able.pop()
    assert threshold_tokens is not None, "two clusters prefill and there is no threshold"
    return PRFAAS if uncached_tokens > threshold_tokens else PD


def least_work(backlogs: Sequence[PrefillBacklog], now_s: float) -> PrefillBacklog | None:
    """The prefill instance in service that is free first, or None when all are down.

    Ties go to the smallest ``last_given``, then to the lowest index.
    """
    best: PrefillBacklog | None = None
    best_s = 0.0
    for backlog in backlogs:
        if backlog.up:
            free_s = backlog.free_at_s(now_s)
            if (
                best is None
                or free_s < best_s
                or (free_s == best_s and backlog.last_given < best.last_given)
            ):
                best, best_s = backlog, free_s
    return best


def earliest_slot(
    backlogs: Sequence[DecodeBacklog], landed_s: float
) -> tuple[DecodeBacklog, float] | None:
    """The decode instance in service with the earliest slot for KV landing at ``landed_s``.

    Ties go to the instance with the fewest requests assigned, then to the lowest index. Returns
    the instance's backlog and the instant of the slot, or None when all are down.
    """
    best: tuple[DecodeBacklog, float] | None = None
    for backlog in backlogs:
        if not backlog.up:
            continue
        slot_s = backlog.slot_at_s(landed_s)
        if best is None or slot_s < best[1] or (slot_s == best[1] and len(backlog) < len(best[0])):
            best = backlog, slot_s
    return best
