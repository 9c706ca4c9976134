"""The one scheduler of gateway and simulator: ``handle(event, now_s) -> actions``.

Pure: no clock, socket or random numbers; the same events at the same ``now_s`` give the same
actions. ``now_s`` is in scenario seconds and never decreases by more than the driver's reordering.

State lives from ``Arrived`` to ``Finished``, ``Failed`` or ``Cancelled`` of a request and is then
forgotten, so memory is bounded by what is in flight. An event about a request that is not in
flight is ignored: a late report about a finished one cannot be told from an unknown one.

Admission (who waits for what):
  push_then_admit  prefill starts when the instance is free; the KV lands in buffers; slots are
                   granted first come first served by landing; a slot is held while decoding.
  reserve_first    a decode slot is reserved before prefill may start, and is held through queue,
                   prefill, transfer and decoding.
Decoding holds its slot for (output_tokens - 1) steps, since prefill computes the first token (the
paper's Eq. 5 counts output_tokens steps).

An instance that is to change its role gets no new requests; ``Convert`` is said by the event that
leaves it empty, and it is out of service until ``Converted``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from msgspec import Struct

from harness.core import Instance, Route
from harness.scheduling import events as ev
from harness.scheduling.admission import Refusal, refused_by_count, refused_by_wait
from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog
from harness.scheduling.cache_index import CacheIndex
from harness.scheduling.congestion import LinkState
from harness.scheduling.control import Control
from harness.scheduling.conversion import Conversion
from harness.scheduling.fleet import Fleet
from harness.scheduling.placement import Ask, Crossing, Placement, Placer
from harness.scheduling.prefix_moves import PrefixMoves
from harness.scheduling.router import Routing, groups, uncached_tokens
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.scheduling.threshold import ThresholdChange

#: Without a cache, or without keys.
_NO_HITS: Mapping[str, int] = MappingProxyType({})


@dataclass(slots=True)
class Counters:
    """Requests since the start: arrived = rejected + finished + failed + cancelled + in flight."""

    arrived: int = 0
    rejected: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0


class _Placed(Struct):
    prefill: PrefillBacklog
    decode: DecodeBacklog
    prefilled: bool = False
    landed: bool = False
    crossing: Crossing | None = None


class Scheduler:
    """Places requests on instances and keeps the estimates that placing needs."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._placed: dict[str, _Placed] = {}
        self._fleet = Fleet(config.instances, config.decode_max_batch, config.decoding)
        self._control = Control(config, self._fleet)
        knows = config.keeps_prefixes and config.scheduling.cache_aware
        self._index = CacheIndex(config.instances, has_state=config.has_state) if knows else None
        self._moves = (
            PrefixMoves(config, self._fleet, self._index, self._control.links)
            if self._index is not None
            else None
        )
        self._placer = Placer(config, self._fleet, self._moves)
        self._local = tuple(one.name for one in self._fleet.local)
        self._remote = tuple(one.name for one in self._fleet.remote)
        self._policy = config.policy
        self._reserves = config.admission == "reserve_first"
        self._copies = (
            knows
            and config.has_feedback
            and config.scheduling.cache_copy
            and self._policy == "threshold"
        )
        self._conversion = Conversion(self._fleet)
        self._routes: dict[tuple[int, int], Route] = {}
        self._handlers: dict[type, Callable[..., list[ev.Action]]] = {
            ev.Arrived: self._arrived,
            ev.PrefillStarted: self._prefill_started,
            ev.PrefillDone: self._prefill_done,
            ev.TransferDone: self._transfer_done,
            ev.DecodeAdmitted: self._decode_admitted,
            ev.Finished: self._finished,
            ev.Failed: self._failed,
            ev.Cancelled: self._cancelled,
            ev.InstanceUp: self._instance_up,
            ev.InstanceDown: self._instance_down,
            ev.LinkSamples: self._link_samples,
            ev.CacheDelta: self._cache_report,
            ev.CacheSnapshot: self._cache_report,
            ev.Converted: self._converted,
            ev.Tick: self._tick,
        }

    @property
    def in_flight(self) -> int:
        """Requests dispatched and not yet finished, failed or cancelled."""
        return len(self._placed)

    @property
    def threshold_tokens(self) -> int | None:
        """What is in force now."""
        return self._control.threshold_tokens

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Every instance with the role it has now."""
        return self._fleet.instances

    @property
    def cached_blocks(self) -> int:
        """Keys in the cache index."""
        return 0 if self._index is None else len(self._index)

    @property
    def converting(self) -> str | None:
        """The instance that drains or changes its role."""
        return self._conversion.instance

    def links(self) -> dict[str, LinkState]:
        """Each PrfaaS cluster's link as of the last report or tick."""
        return dict(self._control.links)

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Take one event in and say what to do. Raises ScenarioError for an ``Arrived`` whose
        length the profile does not cover; the request then leaves no trace."""
        actions = self._handlers[type(event)](event, now_s)
        if self._conversion.under_way:
            actions += self._conversion.when_empty()
        return actions

    def queue_lengths(self) -> dict[str, int]:
        """Requests assigned to each instance: waiting and running, or holding or due a slot."""
        return self._fleet.queue_lengths()

    @property
    def fleet(self) -> Fleet:
        """The instances and what they have to do, to be looked at."""
        return self._fleet

    def _arrived(self, event: ev.Arrived, now_s: float) -> list[ev.Action]:
        config, limits, rid = self.config, self.config.scheduling, event.rid
        assert rid not in self._placed, f"request {rid} arrived twice"
        full = refused_by_count(len(self._placed), limits, config.retry_after_s)
        if full is not None:
            return self._reject(rid, full)
        ask = self._ask(event, now_s)
        placement = self._placer.place(ask, groups(self._policy, ask.routing))
        steps = event.output_tokens - 1 if event.output_tokens > 1 else 0
        self._observe(ask, steps * config.decode_step_s)
        if isinstance(placement, str):
            refusal = Refusal(placement, config.retry_after_s, unavailable=True)
            return self._reject(rid, refusal)
        if limits.max_wait_s is not None:
            late = refused_by_wait(placement.start_s, now_s, limits)
            if late is not None:
                return self._reject(rid, late)
        self._take(rid, ask, placement, steps * placement.decode.step_s)
        return [self._dispatch(rid, ask, placement)]

    def _ask(self, event: ev.Arrived, now_s: float) -> Ask:
        control, remote, tokens = self._control, self._remote, event.input_tokens
        if control.follows:
            remote = control.up(remote, now_s)
        roomy, threshold = self._roomy(remote) if self._copies else (), control.threshold_tokens
        if self._index is None or not event.block_keys:
            routing = Routing(tokens, threshold, self._local, remote, roomy, _NO_HITS)
            return Ask(tokens, now_s, routing, None)
        block_tokens = self.config.prefix_cache.block_tokens
        # One token is always computed: it gives the first output.
        lookup = self._index.lookup(event.block_keys, (tokens - 1) // block_tokens)
        if not lookup.depth:
            routing = Routing(tokens, threshold, self._local, remote, roomy, self._index.no_hits)
            return Ask(tokens, now_s, routing, None)
        hits = {
            name: blocks * block_tokens
            for name, blocks in zip(self._index.clusters, lookup.hit_blocks, strict=True)
        }
        uncached = uncached_tokens(tokens, hits, self._local, roomy)
        routing = Routing(uncached, threshold, self._local, remote, roomy, hits)
        if not roomy or self._moves is None:
            return Ask(tokens, now_s, routing, lookup)
        return Ask(tokens, now_s, routing, lookup, self._moves.offers(lookup, routing))

    def _roomy(self, remote: tuple[str, ...]) -> tuple[str, ...]:
        """The PrfaaS clusters whose link has bandwidth for copies."""
        return tuple(name for name in remote if not self._control.links[name].scarce)

    def _observe(self, ask: Ask, hold_s: float) -> None:
        routing, tokens, resident_tokens, remote_cached = ask.routing, ask.input_tokens, 0, 0
        if not self._control.observes:
            return
        if ask.lookup is not None and self._moves is not None:
            resident_tokens = max(self._moves.held_tokens(ask.lookup, n) for n in self._local)
            remote_cached = max([routing.hit_tokens.get(n, 0) for n in self._remote], default=0)
        if routing.roomy:  # a longer prefix would be copied there
            remote_cached = max(remote_cached, tokens - routing.uncached_tokens)
        self._control.observe(
            tokens, routing.uncached_tokens, resident_tokens, hold_s, ask.now_s, remote_cached
        )

    def _take(self, rid: str, ask: Ask, placement: Placement, hold_s: float) -> None:
        counters, now_s = self.counters, ask.now_s
        counters.arrived += 1
        one, decode = placement.prefilling, placement.decode
        prefill = one.reuse.backlog
        prefill.add(rid, one.service_s, placement.start_s)
        prefill.last_given = counters.arrived
        prefill.held += 1
        assert prefill.order is not None
        prefill.order.enter(prefill)
        if self._reserves:
            decode.add(rid, now_s, hold_s, placement.landed_s + hold_s)
        else:
            decode.add(rid, placement.landed_s, hold_s, placement.slot_s + hold_s)
        placed = self._placed[rid] = _Placed(prefill, decode)
        if self._placer.several:
            placed.crossing = self._placer.crossing(ask, placement)

    def _dispatch(self, rid: str, ask: Ask, placement: Placement) -> ev.Dispatch:
        one = placement.prefilling
        ends = (one.reuse.backlog.index, placement.decode.index)
        route = self._routes.get(ends)
        if route is None:
            route = Route(one.reuse.backlog.instance, placement.decode.instance)
            self._routes[ends] = route
        routing, reuse = ask.routing, one.reuse
        return ev.Dispatch(
            rid=rid,
            route=route,
            input_tokens=ask.input_tokens,
            uncached_tokens=routing.uncached_tokens,
            cached_tokens=one.cached_tokens,
            threshold_tokens=routing.threshold_tokens,
            prefill_service_s=one.service_s,
            expected_prefill_start_s=placement.start_s,
            expected_kv_landed_s=placement.landed_s,
            expected_decode_slot_s=placement.slot_s,
            fetched_tokens=reuse.fetched_tokens,
            fetch_from=reuse.source,
            fetch_s=reuse.fetch_s,
            resident_tokens=placement.resident_tokens,
            copy=one.copy,
            copy_s=one.copy_s,
            link_scarce=self._control.is_scarce,
            hit_tokens=routing.hit_tokens,
            link_up=routing.remote,
            roomy=routing.roomy,
            considered_s=reuse.considered_s,
        )

    def _reject(self, rid: str, refusal: Refusal) -> list[ev.Action]:
        self.counters.arrived += 1
        self.counters.rejected += 1
        return [ev.Reject(rid, refusal.retry_after_s, refusal.reason, refusal.unavailable)]

    def _prefill_started(self, event: ev.PrefillStarted, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None and not placed.prefilled:
            prefill = placed.prefill
            if prefill.started(event.rid, now_s) and prefill.order is not None:
                prefill.order.enter(prefill)
        return []

    def _prefill_done(self, event: ev.PrefillDone, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None:
            prefill = placed.prefill
            prefill.remove(event.rid, now_s)
            if prefill.order is not None:
                prefill.order.enter(prefill)
            placed.prefilled = True
        return []

    def _transfer_done(self, event: ev.TransferDone, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None:
            _land(placed)
            if not self._reserves:
                placed.decode.landed(event.rid, now_s)
        return []

    def _decode_admitted(self, event: ev.DecodeAdmitted, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None:
            _land(placed)
            placed.decode.admitted(event.rid, now_s)
        return []

    def _forget(self, rid: str, now_s: float) -> bool:
        placed = self._placed.pop(rid, None)
        if placed is None:
            return False
        if not placed.prefilled:
            prefill = placed.prefill
            prefill.remove(rid, now_s)
            if prefill.order is not None:
                prefill.order.enter(prefill)
        _land(placed)
        placed.decode.remove(rid)
        return True

    def _finished(self, event: ev.Finished, now_s: float) -> list[ev.Action]:
        self.counters.finished += self._forget(event.rid, now_s)
        return []

    def _failed(self, event: ev.Failed, now_s: float) -> list[ev.Action]:
        self.counters.failed += self._forget(event.rid, now_s)
        return []

    def _cancelled(self, event: ev.Cancelled, now_s: float) -> list[ev.Action]:
        self.counters.cancelled += self._forget(event.rid, now_s)
        return []

    def _instance_up(self, event: ev.InstanceUp, _now_s: float) -> list[ev.Action]:
        back = self._fleet.named(event.instance)
        if back.up or self._conversion.instance == event.instance:
            return []
        back.up = True
        self._fleet.changed(back)
        # What its pool holds after the fall is not known; it was forgotten then.
        return [] if self._index is None else [ev.Resync(event.instance)]

    def _instance_down(self, event: ev.InstanceDown, now_s: float) -> list[ev.Action]:
        """Exclude the instance and cancel what still depends on it."""
        lost = self._fleet.named(event.instance)
        given_up = self._conversion.give_up(event.instance)
        if not lost.up and not given_up:
            return []
        lost.up = False
        self._fleet.changed(lost)
        given_up = self._conversion.keep_last() or given_up
        if self._index is not None:
            self._index.forget(event.instance)
        reason = f"instance {event.instance} went down"
        return [
            *(self._changed(self._control.converted(now_s)) if given_up else ()),
            *(
                ev.Cancel(rid, reason)
                for rid, placed in self._placed.items()
                if placed.decode is lost or (placed.prefill is lost and not placed.landed)
            ),
        ]

    def _link_samples(self, event: ev.LinkSamples, now_s: float) -> list[ev.Action]:
        self._control.sample(event.cluster, event.samples, now_s, event.next_s)
        return []

    def _cache_report(
        self, event: ev.CacheDelta | ev.CacheSnapshot, _now_s: float
    ) -> list[ev.Action]:
        if self._index is None or self._index.handle(event):
            return []
        return [ev.Resync(event.instance)]

    def _tick(self, _event: ev.Tick, now_s: float) -> list[ev.Action]:
        self._control.look(now_s)
        role, change = self._control.tick_roles(now_s)
        actions = self._changed(change)
        actions += self._changed(self._control.tick_threshold(now_s))
        if role is not None and not self._conversion.drain(role, now_s):
            actions += self._changed(self._control.converted(now_s))
        return actions

    def _changed(self, change: ThresholdChange | None) -> list[ev.Action]:
        return [] if change is None else [ev.SetThreshold(change.threshold_tokens, change.reason)]

    def _converted(self, event: ev.Converted, now_s: float) -> list[ev.Action]:
        self._fleet.named(event.instance)
        if not self._conversion.done(event.instance):
            return []
        self._routes.clear()
        return self._changed(self._control.converted(now_s))


def _land(placed: _Placed) -> None:
    """The prefill instance no longer holds the request's KV."""
    if not placed.landed:
        placed.prefill.held -= 1
        placed.landed = True
        if placed.crossing is not None:
            placed.crossing.land()
