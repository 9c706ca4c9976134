"""Which instance of a cluster prefills, which one decodes, and when: least expected completion.

For a cluster with a usable hit of h tokens, over its prefill instances i in service:

    choose i    = argmin  free_at(i) + fetch_s(i)
    service_s   = copy_s + fetch_s + T_prefill(l_total - h, h)

with fetch_s and copy_s of ``harness.scheduling.prefix_moves``. With nothing cached this is the
least remaining work in seconds, which with known service times equals one central first-come-first-
served queue; shortest queue by count and round robin do not.

Of several clusters the one is taken whose request would get its decode slot first.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog
from harness.scheduling.cache_index import Lookup
from harness.scheduling.events import CopyPrefix
from harness.scheduling.fleet import Cluster, Fleet
from harness.scheduling.prefix_moves import Offer, PrefixMoves, Reuse
from harness.scheduling.router import Routing
from harness.scheduling.scheduler_config import Link, SchedulerConfig

_NOBODY_DECODES = "no decode instance is up"


class Ask(Struct, frozen=True, gc=False):
    """A request to place: what the choice of cluster rests on, and what the caches hold of it."""

    input_tokens: int
    now_s: float
    routing: Routing
    lookup: Lookup | None
    #: What may be copied to a PD cluster and to a PrfaaS cluster.
    offers: tuple[Offer | None, Offer | None] = (None, None)


class Prefilling(Struct, frozen=True, gc=False):
    """A prefill instance chosen in one cluster, and what it costs."""

    cluster: Cluster
    reuse: Reuse
    cached_tokens: int
    copy: CopyPrefix | None
    copy_s: float
    service_s: float
    free_s: float


class _Bound(Struct, frozen=True, gc=False):
    """Before ``end_s`` no instance of the cluster is done; ``place``: in the order given."""

    end_s: float
    place: int
    hit_tokens: int
    cluster: Cluster
    first: PrefillBacklog
    free_s: float
    link: Link | None


class Placement(Struct, frozen=True, gc=False):
    """Both instances of a request and the expected instants of its way."""

    prefilling: Prefilling
    decode: DecodeBacklog
    resident_tokens: int
    start_s: float
    landed_s: float
    slot_s: float


class Crossing(Struct, frozen=True, gc=False):
    """KV that a cluster is to get from another and has not got."""

    source: Cluster
    destination: Cluster
    nbytes: int

    def land(self) -> None:
        """It has come, or never will."""
        self.source.crossing_bytes -= self.nbytes
        self.destination.crossing_bytes -= self.nbytes


class Placer:
    """Finds instances for requests; ``links`` is kept up to date by the scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        fleet: Fleet,
        moves: PrefixMoves | None,
    ) -> None:
        self._config = config
        self._reserves = config.admission == "reserve_first"
        #: Whether links are to choose from.
        self.several = bool(config.ingress_bytes_per_s)
        self._fleet = fleet
        self._moves = moves
        self._costs: dict[tuple[str, int], float] = {}

    def place(self, ask: Ask, groups: Iterable[Sequence[str]]) -> Placement | str:
        """The earliest decode slot in the first group that has any; else why none has."""
        reason = "no prefill instance is up"
        for names in groups:
            best = self._single(ask, names[0]) if len(names) == 1 else self._of_several(ask, names)
            if best is None:
                continue
            if not isinstance(best, str):
                return best
            reason = best
        return reason

    def crossing(self, ask: Ask, placement: Placement) -> Crossing | None:
        """Count the KV of a placed request that crosses. Asked for where there are several links:
        with one there is no choice that what waits for it could change."""
        if placement.prefilling.cluster.finishes:
            return None
        destination = self._fleet.clusters[placement.decode.instance.cluster]
        nbytes = self._config.moved_bytes(ask.input_tokens, placement.resident_tokens)
        found = Crossing(placement.prefilling.cluster, destination, nbytes)
        found.source.crossing_bytes += nbytes
        found.destination.crossing_bytes += nbytes
        return found

    def _single(self, ask: Ask, name: str) -> Placement | str | None:
        """In one cluster; None where nobody prefills."""
        cluster = self._fleet.clusters[name]
        now_s = ask.now_s
        first = cluster.order.least(now_s)
        if first is None:
            return None
        free_s = first.free_at_s(now_s)
        near = cluster if cluster.finishes else self._home(ask, free_s)
        if near is None:
            return _NOBODY_DECODES
        if ask.lookup is None:
            instance = first.instance
            service_s = self._config.prefill_s[instance.hardware](ask.input_tokens, 0)
            considered_s = {instance.name: free_s + service_s}
            reuse = Reuse(first, 0, 0, 0, 0.0, service_s, None, considered_s)
            one = Prefilling(cluster, reuse, 0, None, 0.0, service_s, free_s)
        else:
            self._costs.clear()
            hit = ask.routing.hit_tokens.get(name, 0)
            one = self._prefilling(ask, _Bound(0.0, 0, hit, cluster, first, free_s, None))
        found = self._timeline(ask, one, near)
        return _NOBODY_DECODES if found is None else found

    def _of_several(self, ask: Ask, names: Sequence[str]) -> Placement | str | None:
        self._costs.clear()
        bounds = self._bounds(ask, names)
        if not bounds:
            return None
        best = self._earliest(ask, bounds)
        return _NOBODY_DECODES if best is None else best

    def _bounds(self, ask: Ask, names: Sequence[str]) -> list[_Bound]:
        """Each cluster that can prefill, by when it could be done at the earliest: were what the
        cluster holds on the instance that is free first."""
        found: list[_Bound] = []
        for place, name in enumerate(names):
            cluster = self._fleet.clusters[name]
            first = cluster.order.least(ask.now_s)
            if first is None:
                continue
            hit = ask.routing.hit_tokens.get(name, 0)
            link = None if cluster.finishes else self._config.links[name]
            free_s = end_s = first.free_at_s(ask.now_s)
            offer = ask.offers[link is not None]
            cached_tokens = hit if offer is None else max(hit, offer.tokens)
            if link is not None:
                end_s = max(free_s, ask.now_s + link.dispatch_delay_s)
            end_s += self._prefill_s(first.instance.hardware, ask.input_tokens, cached_tokens)
            found.append(_Bound(end_s, place, hit, cluster, first, free_s, link))
        found.sort(key=lambda one: (one.end_s, one.place))
        return found

    def _earliest(self, ask: Ask, bounds: list[_Bound]) -> Placement | None:
        """The earliest expected slot, then the earliest landing, then the first in order."""
        home = None
        if not all(one.cluster.finishes for one in bounds):
            home = self._home(ask, bounds[0].end_s)
        best: Placement | None = None
        before: tuple[float, int, Link | None] | None = None
        for one in bounds:
            if best is not None and one.end_s >= best.slot_s:
                break
            near = one.cluster if one.link is None else home
            like = (one.end_s, one.hit_tokens, one.link)
            # Without a hit of their own equals behind equal links land at the same time.
            again = like == before and one.link is not None and not one.hit_tokens
            again = again and not self.several
            if near is None or again:
                continue
            before = like
            timeline = self._timeline(ask, self._prefilling(ask, one), near)
            if timeline is not None and (
                best is None or (timeline.slot_s, timeline.landed_s) < (best.slot_s, best.landed_s)
            ):
                best = timeline
        return best

    def _home(self, ask: Ask, lands_s: float) -> Cluster | None:
        """The PD cluster that finishes what PrfaaS prefills: the earliest slot for what does not
        land before ``lands_s``, nor before the cluster's link has taken what it is to get; then the
        longest prefix held, so that less must cross."""
        clusters: Sequence[Cluster] = self._fleet.local
        if len(clusters) == 1:
            return clusters[0]
        hits = ask.routing.hit_tokens
        if hits:
            clusters = sorted(clusters, key=lambda one: -hits[one.name])
        best, best_s = None, 0.0
        ingress, now_s = self._config.ingress_bytes_per_s, ask.now_s
        for cluster in clusters:
            rate, taken_s = ingress.get(cluster.name), lands_s
            if rate is not None and cluster.crossing_bytes:
                taken_s = max(taken_s, now_s + cluster.crossing_bytes / rate)
            found = cluster.slots.earliest(taken_s, now_s)
            if found is not None and (best is None or found[1] < best_s):
                best, best_s = cluster, found[1]
                if best_s <= lands_s:
                    break  # none is earlier
        return best

    def _prefilling(self, ask: Ask, bound: _Bound) -> Prefilling:
        """The best instance of a cluster, and a copy to it where that pays."""
        cluster, hit, first, free_s = bound.cluster, bound.hit_tokens, bound.first, bound.free_s
        # One hardware in a cluster, as in the paper: the cost is the same on each instance.
        hardware, tokens = first.instance.hardware, ask.input_tokens
        if not hit:
            service_s = self._prefill_s(hardware, tokens, 0)
            considered_s = {first.instance.name: free_s + service_s}
            reuse = Reuse(first, 0, 0, 0, 0.0, service_s, None, considered_s)
        else:
            assert self._moves is not None
            assert ask.lookup is not None
            reuse = self._moves.best_instance(
                ask.lookup,
                cluster,
                first,
                hit,
                lambda cached_tokens: self._prefill_s(hardware, tokens, cached_tokens),
                ask.now_s,
            )
            free_s = reuse.backlog.free_at_s(ask.now_s)
        cached_tokens, service_s, copy, copy_s = reuse.cached_tokens, reuse.service_s, None, 0.0
        offer = ask.offers[not cluster.finishes]
        if offer is not None and offer.tokens > hit and self._is_linked(ask, cluster):
            assert self._moves is not None
            moved, taking_s = self._moves.copying(offer, cluster, hit)
            copied_s = taking_s + reuse.fetch_s + self._prefill_s(hardware, tokens, offer.tokens)
            if copied_s < service_s:
                copy = CopyPrefix(offer.holder, reuse.backlog.instance.name, offer.tokens, moved)
                copy_s, service_s, cached_tokens = taking_s, copied_s, offer.tokens
        return Prefilling(cluster, reuse, cached_tokens, copy, copy_s, service_s, free_s)

    def _prefill_s(self, hardware: str, input_tokens: int, cached_tokens: int) -> float:
        """Looked up once for all clusters with the same hit."""
        key = (hardware, cached_tokens)
        found = self._costs.get(key)
        if found is None:
            cost = self._config.prefill_s[hardware]
            found = self._costs[key] = cost(input_tokens - cached_tokens, cached_tokens)
        return found

    def _is_linked(self, ask: Ask, cluster: Cluster) -> bool:
        return cluster.finishes or cluster.name in ask.routing.roomy

    def _timeline(self, ask: Ask, one: Prefilling, near: Cluster) -> Placement | None:
        """The decode instance and the expected prefill start, KV landing and slot."""
        config, cluster, now_s = self._config, one.cluster, ask.now_s
        link, hop_s = None, 0.0
        if not cluster.finishes:
            link = cluster.name
            hop_s = config.links[link].dispatch_delay_s
        held = 0
        if one.copy is not None and link is None:
            held = one.copy.tokens  # by then it lies in this cluster
        elif ask.lookup is not None and self._moves is not None:
            # Held from the start of the prompt, a state or not: growing KV need not move, and the
            # state moves anyway.
            held = self._moves.held_tokens(ask.lookup, near.name)
        prefill_s = one.service_s - one.reuse.fetch_s - one.copy_s
        tail_s = config.transfer_tail_s(ask.input_tokens, held, prefill_s, link)
        if self._reserves:
            found = near.slots.earliest(now_s, now_s)
            if found is None:
                return None
            ready_s = found[1] + hop_s
            start_s = one.free_s if one.free_s > ready_s else ready_s
            end_s = start_s + one.service_s
            if self.several:
                end_s = self._sent_s(one, end_s, link, now_s)
            landed_s = end_s + tail_s
            return Placement(one, found[0], held, start_s, landed_s, found[1])
        ready_s = now_s + hop_s
        start_s = one.free_s if one.free_s > ready_s else ready_s
        end_s = start_s + one.service_s
        if self.several:
            end_s = self._sent_s(one, end_s, link, now_s)
        landed_s = end_s + tail_s
        found = near.slots.earliest(landed_s, now_s)
        if found is None:
            return None
        return Placement(one, found[0], held, start_s, landed_s, found[1])

    def _sent_s(self, one: Prefilling, end_s: float, link: str | None, now_s: float) -> float:
        """The end of prefill, and of what is to leave its cluster before where links are to choose
        from."""
        if link is None:
            return end_s
        waits_s = one.cluster.crossing_bytes / self._config.links[link].bytes_per_s
        return max(end_s, now_s + waits_s)
