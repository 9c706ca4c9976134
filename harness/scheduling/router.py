"""Which cluster prefills: the deployment's policy, the caches and the state of the links.

Policy of the paper (symbols: l uncached input length, t threshold, l_total the prompt): l > t is
prefilled by a PrfaaS cluster, the rest by the PD cluster's own prefill instances.

    a link is scarce (or no prefix is ever copied)   l = l_total - the PD clusters' best hit
    there is bandwidth to spare                      l = l_total - the best hit anywhere

The baselines have no threshold: no PrfaaS cluster, everything is local; no local prefill,
everything crosses; by capacity, whichever is expected to be done first.

A cluster whose link is down is never chosen, where the policy follows its links at all.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from harness.scheduling.scheduler_config import Placing


class Routing(Struct, frozen=True, gc=False):
    """What a choice of cluster rests on, in tokens; clusters by name, in the deployment's order.

    ``uncached_tokens`` is l, ``hit_tokens`` the usable prefix of each cluster. ``remote`` holds the
    PrfaaS clusters whose link is not known to be down, ``roomy`` those of them whose link has
    bandwidth to spare for copies of prefixes.
    """

    uncached_tokens: int
    threshold_tokens: int | None
    local: tuple[str, ...]
    remote: tuple[str, ...]
    roomy: tuple[str, ...]
    hit_tokens: Mapping[str, int]


def uncached_tokens(
    input_tokens: int, hit_tokens: Mapping[str, int], local: Iterable[str], roomy: Iterable[str]
) -> int:
    """l: what the longest prefix that counts leaves to compute."""
    if not hit_tokens:
        return input_tokens
    return input_tokens - max(hit_tokens[name] for name in (*local, *roomy))


#: Clusters to choose from by least expected completion; the next group where none of one can.
Groups = tuple[tuple[str, ...], ...]


def _by_threshold(routing: Routing) -> Groups:
    assert routing.threshold_tokens is not None, "two clusters prefill and there is no threshold"
    if routing.uncached_tokens > routing.threshold_tokens:
        return routing.remote, routing.local
    return routing.local, routing.remote


POLICIES: Mapping[Placing, Callable[[Routing], Groups]] = {
    "local": lambda routing: (routing.local,),
    "remote": lambda routing: (routing.remote,),
    "threshold": _by_threshold,
    "capacity": lambda routing: ((*routing.local, *routing.remote),),
}


def groups(policy: Placing, routing: Routing) -> Groups:
    """The clusters that may prefill, in groups of falling preference."""
    return POLICIES[policy](routing)


def copy_sources(routing: Routing) -> tuple[str | None, str | None]:
    """Whence a longer prefix may be copied to a PD cluster and to a PrfaaS cluster: across a link
    with bandwidth to spare, from the cluster with the longest hit; None without any."""
    hits = routing.hit_tokens
    if not hits or not routing.roomy:
        return None, None
    far, near = (max(names, key=hits.__getitem__) for names in (routing.roomy, routing.local))
    return far if hits[far] else None, near if hits[near] else None
