"""How a cached prefix gets to where the prefill is: fetched inside a cluster, copied between two.

A hit of h tokens lies somewhere in a cluster. The instance i that prefills fetches what it lacks,
or does with the hit h_i of its own pool where that is quicker:

    fetch_s(i)   = bytes of the hit that i itself does not hold / the fabric's rate
    service_s(i) = min(fetch_s(i) + T(l_total - h, h), T(l_total - h_i, h_i))

Only a few instances are looked at: those that hold all of the hit, and the one that is free first.
So a popular prefix spreads: its holder is passed over when it is so busy that another one fetches
the prefix sooner, and then holds it too.

Across a link with bandwidth to spare a longer hit h' is copied where that is quicker than computing
it again, and only what one instance there holds by itself:

    copy_s = bytes of h' beyond h / rate + delay  <  T(l_total - h, h) - T(l_total - h', h')

The rate is what the link has to spare from far to near; the other way carries no KV of prefills.
"""

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from harness.scheduling.backlog import PrefillBacklog
from harness.scheduling.cache_index import CacheIndex, Lookup
from harness.scheduling.congestion import LinkState
from harness.scheduling.fleet import Cluster, Fleet
from harness.scheduling.router import Routing, copy_sources
from harness.scheduling.scheduler_config import SchedulerConfig

#: Of the instances that hold all of a hit at most so many are compared.
MAX_HOLDERS = 16
#: A copy is reckoned with what the link has to spare, and at least this share of it.
LEAST_SHARE = 0.1


class Reuse(Struct, frozen=True, gc=False):
    """What an instance makes of its cluster's hit. ``service_s`` is fetching and computing;
    ``considered_s`` is when each instance that was compared would be done."""

    backlog: PrefillBacklog
    cached_tokens: int
    fetched_tokens: int
    lacking_bytes: int
    fetch_s: float
    service_s: float
    source: str | None = None
    considered_s: Mapping[str, float] = {}


class Offer(Struct, frozen=True, gc=False):
    """A prefix that one instance of another cluster holds by itself."""

    cluster: str
    holder: str
    tokens: int


class PrefixMoves:
    """Fetches and copies over what the index says; ``links`` is kept up to date elsewhere."""

    def __init__(
        self,
        config: SchedulerConfig,
        fleet: Fleet,
        index: CacheIndex,
        links: Mapping[str, LinkState],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._index = index
        self._links = links
        self._block_tokens = config.prefix_cache.block_tokens

    def best_instance(
        self,
        lookup: Lookup,
        cluster: Cluster,
        first: PrefillBacklog,
        hit: int,
        computing_s: Callable[[int], float],
        now_s: float,
    ) -> Reuse:
        """The instance that would be done soonest with a prompt of which the cluster holds ``hit``
        tokens. ``first`` is the one that is free first; ``computing_s`` is of what is cached."""
        blocks = hit // self._block_tokens
        best: Reuse | None = None
        best_key = (0.0, 0, 0)
        considered_s: dict[str, float] = {}
        for one in self._candidates(lookup, cluster, first, blocks):
            reuse = self._reuse(lookup, one, hit, computing_s)
            end_s = one.free_at_s(now_s) + reuse.service_s
            considered_s[one.instance.name] = end_s
            key = (end_s, one.last_given, one.index)
            if best is None or key < best_key:
                best, best_key = reuse, key
        assert best is not None
        source = self._source(lookup, cluster, blocks) if best.lacking_bytes else None
        return replace(best, source=source, considered_s=considered_s)

    def _reuse(
        self, lookup: Lookup, one: PrefillBacklog, hit: int, computing_s: Callable[[int], float]
    ) -> Reuse:
        """The cheaper of the whole hit, fetched as far as the instance lacks it, and what the
        instance can go on from by itself."""
        index, config, blocks = self._index, self._config, hit // self._block_tokens
        bit = index.bit_of[one.instance.name]
        held = lookup.held_blocks(bit, blocks) * self._block_tokens
        lacking = config.moved_bytes(hit, held)
        if not index.has_state or lookup.state_holders(blocks, bit):
            lacking -= config.moved_bytes(hit, hit)
        fetch_s = lacking / config.fabric_bytes_per_s
        service_s = fetch_s + computing_s(hit)
        if not lacking:
            return Reuse(one, hit, 0, 0, 0.0, service_s)
        own = lookup.last_state(bit, blocks) * self._block_tokens if index.has_state else held
        alone_s = computing_s(own)
        if alone_s < service_s:
            return Reuse(one, own, 0, 0, 0.0, alone_s)
        return Reuse(one, hit, hit - held, lacking, fetch_s, service_s)

    def _candidates(
        self, lookup: Lookup, cluster: Cluster, first: PrefillBacklog, blocks: int
    ) -> list[PrefillBacklog]:
        index, found = self._index, [first]
        for name in index.names(lookup.holders(blocks, index.bits_of_cluster[cluster.name])):
            holder = self._fleet.named(name)
            if isinstance(holder, PrefillBacklog) and holder.in_service and holder is not first:
                found.append(holder)
                if len(found) > MAX_HOLDERS:
                    break
        return found

    def _source(self, lookup: Lookup, cluster: Cluster, blocks: int) -> str:
        """An instance of the cluster that holds most of the hit, prefill or decode."""
        index = self._index
        bits = index.bits_of_cluster[cluster.name]
        whole = lookup.holders(blocks, bits)
        if whole:
            return next(index.names(lookup.state_holders(blocks, whole) or whole))
        return max(
            index.names(bits), key=lambda name: lookup.held_blocks(index.bit_of[name], blocks)
        )

    def held_tokens(self, lookup: Lookup, cluster: str) -> int:
        """The leading tokens that the cluster's instances hold together, with a state or not."""
        bit = self._index.bit_of_cluster[cluster]
        return lookup.held_blocks(bit, lookup.depth) * self._block_tokens

    def offers(self, lookup: Lookup, routing: Routing) -> tuple[Offer | None, Offer | None]:
        """What may be copied to a PD cluster and to a PrfaaS cluster."""
        far, near = copy_sources(routing)
        hits = routing.hit_tokens
        return (
            None if far is None else self._offer(lookup, far, hits[far]),
            None if near is None else self._offer(lookup, near, hits[near]),
        )

    def _offer(self, lookup: Lookup, cluster: str, tokens: int) -> Offer | None:
        index = self._index
        blocks = tokens // self._block_tokens
        holders = lookup.holders(blocks, index.bits_of_cluster[cluster])
        if index.has_state:
            holders = lookup.state_holders(blocks, holders)
        holder = next(index.names(holders), None)
        return None if holder is None else Offer(cluster, holder, tokens)

    def copying(self, offer: Offer, to: Cluster, own: int) -> tuple[int, float]:
        """Bytes and seconds of a copy to a cluster that holds ``own`` tokens itself."""
        moved = self._config.moved_bytes(offer.tokens, own)
        name = offer.cluster if to.finishes else to.name
        link, state = self._config.links[name], self._links[name]
        if not to.finishes:
            return moved, moved / link.bytes_per_s + link.dispatch_delay_s
        capacity = state.capacity_bytes_per_s
        spare = max(capacity - state.goodput_bytes_per_s, LEAST_SHARE * capacity)
        return moved, moved / spare + link.kv_delay_s
