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

from collections.abc import Callable
from dataclasses import dataclass

from harness.core import Instance, Route
from harness.scheduling import events as ev
from harness.scheduling.admission import Refusal, refused_by_count, refused_by_wait
from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog
from harness.scheduling.cache_index import CacheIndex, Lookup
from harness.scheduling.congestion import LinkState
from harness.scheduling.control import Control
from harness.scheduling.conversion import Conversion
from harness.scheduling.fleet import Fleet
from harness.scheduling.placement import Ask, Placement, Placer
from harness.scheduling.prefix_moves import PrefixMoves
from harness.scheduling.router import Routing, groups, uncached_tokens
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.scheduling.threshold import ThresholdChange


@dataclass(slots=True)
class Counters:
    """Requests since the start: arrived = rejected + finished + failed + cancelled + in flight."""

    arrived: int = 0
    rejected: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0


@dataclass(slots=True)
class _Placed:
    prefill: PrefillBacklog
    decode: DecodeBacklog
    prefilled: bool = False
    landed: bool = False


class Scheduler:
    """Places requests on instances and keeps the estimates that placing needs."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._placed: dict[str, _Placed] = {}
        self._fleet = Fleet(config.instances, config.decode_max_batch)
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
        config, limits = self.config, self.config.scheduling
        assert event.rid not in self._placed, f"request {event.rid} arrived twice"
        full = refused_by_count(len(self._placed), limits, config.retry_after_s)
        if full is not None:
            return self._reject(event.rid, full)
        ask = self._ask(event, now_s)
        placement = self._placer.place(ask, groups(self._policy, ask.routing))
        hold_s = max(0, event.output_tokens - 1) * config.decode_step_s
        self._observe(ask, hold_s)
        if isinstance(placement, str):
            refusal = Refusal(placement, config.retry_after_s, unavailable=True)
            return self._reject(event.rid, refusal)
        late = refused_by_wait(placement.start_s, now_s, limits)
        if late is not None:
            return self._reject(event.rid, late)
        self._take(event.rid, placement, hold_s, now_s)
        return [self._dispatch(event.rid, ask, placement)]

    def _ask(self, event: ev.Arrived, now_s: float) -> Ask:
        lookup: Lookup | None = None
        hits: dict[str, int] = {}
        if self._index is not None and event.block_keys:
            block_tokens = self.config.prefix_cache.block_tokens
            # One token is always computed: it gives the first output.
            lookup = self._index.lookup(event.block_keys, (event.input_tokens - 1) // block_tokens)
            hits = {
                name: blocks * block_tokens
                for name, blocks in zip(self._index.clusters, lookup.hit_blocks, strict=True)
            }
        control, remote = self._control, self._remote
        roomy: tuple[str, ...] = ()
        if control.follows:
            remote = tuple(name for name in remote if control.is_up(name, now_s))
        if self._copies:
            roomy = tuple(name for name in remote if not control.links[name].scarce)
        uncached = uncached_tokens(event.input_tokens, hits, self._local, roomy)
        routing = Routing(uncached, control.threshold_tokens, self._local, remote, roomy, hits)
        if not roomy or lookup is None or self._moves is None:
            return Ask(event.input_tokens, now_s, routing, lookup)
        offers = self._moves.offers(lookup, routing)
        return Ask(event.input_tokens, now_s, routing, lookup, offers)

    def _observe(self, ask: Ask, hold_s: float) -> None:
        routing, resident_tokens = ask.routing, 0
        if ask.lookup is not None and self._moves is not None:
            held = [self._moves.held_tokens(ask.lookup, name) for name in self._local]
            resident_tokens = max(held)
        remote_cached = max((routing.hit_tokens.get(name, 0) for name in self._remote), default=0)
        if routing.roomy:  # a longer prefix would be copied there
            remote_cached = max(remote_cached, ask.input_tokens - routing.uncached_tokens)
        self._control.observe(
            ask.input_tokens,
            routing.uncached_tokens,
            resident_tokens,
            hold_s,
            ask.now_s,
            remote_cached,
        )

    def _take(self, rid: str, placement: Placement, hold_s: float, now_s: float) -> None:
        self.counters.arrived += 1
        one, decode = placement.prefilling, placement.decode
        one.reuse.backlog.add(rid, one.service_s, placement.start_s)
        one.reuse.backlog.last_given = self.counters.arrived
        one.reuse.backlog.held += 1
        self._fleet.changed(one.reuse.backlog)
        if self._reserves:
            decode.add(rid, now_s, hold_s, placement.landed_s + hold_s)
        else:
            decode.add(rid, placement.landed_s, hold_s, placement.slot_s + hold_s)
        self._placed[rid] = _Placed(one.reuse.backlog, decode)

    def _dispatch(self, rid: str, ask: Ask, placement: Placement) -> ev.Dispatch:
        one = placement.prefilling
        ends = (one.reuse.backlog.index, placement.decode.index)
        route = self._routes.get(ends)
        if route is None:
            route = Route(one.reuse.backlog.instance, placement.decode.instance)
            self._routes[ends] = route
        return ev.Dispatch(
            rid=rid,
            route=route,
            input_tokens=ask.input_tokens,
            uncached_tokens=ask.routing.uncached_tokens,
            cached_tokens=one.cached_tokens,
            threshold_tokens=ask.routing.threshold_tokens,
            prefill_service_s=one.service_s,
            expected_prefill_start_s=placement.start_s,
            expected_kv_landed_s=placement.landed_s,
            expected_decode_slot_s=placement.slot_s,
            fetched_tokens=one.reuse.fetched_tokens,
            fetch_from=one.reuse.source,
            fetch_s=one.reuse.fetch_s,
            resident_tokens=placement.resident_tokens,
            copy=one.copy,
            copy_s=one.copy_s,
            link_scarce=self._control.is_scarce,
            hit_tokens=ask.routing.hit_tokens,
            link_up=ask.routing.remote,
            roomy=ask.routing.roomy,
            considered_s=one.reuse.considered_s,
        )

    def _reject(self, rid: str, refusal: Refusal) -> list[ev.Action]:
        self.counters.arrived += 1
        self.counters.rejected += 1
        return [ev.Reject(rid, refusal.retry_after_s, refusal.reason, refusal.unavailable)]

    def _prefill_started(self, event: ev.PrefillStarted, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None and not placed.prefilled:
            placed.prefill.started(event.rid, now_s)
            self._fleet.changed(placed.prefill)
        return []

    def _prefill_done(self, event: ev.PrefillDone, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None:
            placed.prefill.remove(event.rid, now_s)
            self._fleet.changed(placed.prefill)
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
            placed.prefill.remove(rid, now_s)
            self._fleet.changed(placed.prefill)
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
    placed.prefill.held -= not placed.landed
    placed.landed = True
