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
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.core import PD, EngineError, Instance, Route, ScenarioError
from harness.scheduling import events as ev
from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog
from harness.scheduling.router import earliest_slot, least_work, preferred_cluster

Admission = Literal["push_then_admit", "reserve_first"]


def no_transfer(_tokens: int, _prefill_s: float, _crosses: bool) -> float:
    """A transfer that takes no time."""
    return 0.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler knows before the first event.

    ``prefill_s``: by hardware name, (new_tokens, cached_tokens) -> seconds. ``link_delay_s``: of a
    dispatch to the other cluster. ``transfer_tail_s``: (input_tokens, prefill_s, crosses) ->
    expected seconds from the end of prefill until the KV has landed. ``threshold_tokens`` is
    required where both clusters prefill, and has no effect elsewhere.
    """

    instances: tuple[Instance, ...]
    prefill_s: Mapping[str, Callable[[int, int], float]]
    decode_step_s: float
    decode_max_batch: int
    threshold_tokens: int | None
    admission: Admission
    link_delay_s: float = 0.0
    transfer_tail_s: Callable[[int, float, bool], float] = no_transfer
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        prefills = [i for i in self.instances if i.role == "prefill"]
        if not prefills:
            raise ScenarioError("the deployment has no prefill instance; give it at least one")
        if not any(i.role == "decode" for i in self.instances):
            raise ScenarioError("the deployment has no decode instance; give it at least one")
        if self.decode_max_batch < 1:
            raise ScenarioError("decode_max_batch is below 1: no request could ever decode")
        if self.threshold_tokens is None and len({i.cluster for i in prefills}) > 1:
            raise ScenarioError("two clusters prefill: threshold_tokens must say which gets what")
        missing = {i.hardware for i in prefills} - set(self.prefill_s)
        if missing:
            raise ScenarioError(f"no prefill profile for hardware {', '.join(sorted(missing))}")


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
        self.threshold_tokens = config.threshold_tokens
        self.counters = Counters()
        self._placed: dict[str, _Placed] = {}
        self._prefill: dict[str, list[PrefillBacklog]] = {}
        self._decode: list[DecodeBacklog] = []
        self._backlogs: dict[str, PrefillBacklog | DecodeBacklog] = {}
        for index, instance in enumerate(config.instances):
            assert instance.name not in self._backlogs, f"two instances named {instance.name}"
            if instance.role == "prefill":
                prefill = PrefillBacklog(instance, index)
                self._prefill.setdefault(instance.cluster, []).append(prefill)
                self._backlogs[instance.name] = prefill
            else:
                decode = DecodeBacklog(instance, index, config.decode_max_batch)
                self._decode.append(decode)
                self._backlogs[instance.name] = decode
        self._routes = {
            (p.instance.name, d.instance.name): Route(p.instance, d.instance)
            for backlogs in self._prefill.values()
            for p in backlogs
            for d in self._decode
        }
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
        }

    @property
    def in_flight(self) -> int:
        """Requests dispatched and not yet finished, failed or cancelled."""
        return len(self._placed)

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Take one event in and say what to do. Raises ScenarioError for an ``Arrived`` whose
        length the profile does not cover; the request then leaves no trace."""
        return self._handlers[type(event)](event, now_s)

    def queue_lengths(self) -> dict[str, int]:
        """Requests assigned to each instance: waiting and running, or holding or due a slot."""
        return {name: len(backlog) for name, backlog in self._backlogs.items()}

    def _arrived(self, event: ev.Arrived, now_s: float) -> list[ev.Action]:
        rid = event.rid
        assert rid not in self._placed, f"request {rid} arrived twice"
        cached = event.cached_tokens_by_cluster
        uncached_tokens = event.input_tokens - cached.get(PD, 0)
        backlog = self._choose_prefill(uncached_tokens, now_s)
        if backlog is None:
            return self._reject(rid, "no prefill instance is up")
        instance = backlog.instance
        cached_tokens = cached.get(instance.cluster, 0)
        service_s = self.config.prefill_s[instance.hardware](
            event.input_tokens - cached_tokens, cached_tokens
        )
        hold_s = max(0, event.output_tokens - 1) * self.config.decode_step_s
        timeline = self._choose_decode(backlog, event.input_tokens, service_s, now_s)
        if timeline is None:
            return self._reject(rid, "no decode instance is up")
        decode, start_s, landed_s, slot_s = timeline
        self.counters.arrived += 1
        backlog.add(rid, service_s, start_s)
        backlog.last_given = self.counters.arrived
        if self.config.admission == "reserve_first":
            decode.add(rid, now_s, hold_s, landed_s + hold_s)
        else:
            decode.add(rid, landed_s, hold_s, slot_s + hold_s)
        self._placed[rid] = _Placed(backlog, decode)
        return [
            ev.Dispatch(
                rid=rid,
                route=self._routes[instance.name, decode.instance.name],
                input_tokens=event.input_tokens,
                uncached_tokens=uncached_tokens,
                cached_tokens=cached_tokens,
                threshold_tokens=self.threshold_tokens,
                prefill_service_s=service_s,
                expected_prefill_start_s=start_s,
                expected_kv_landed_s=landed_s,
                expected_decode_slot_s=slot_s,
            )
        ]

    def _choose_prefill(self, uncached_tokens: int, now_s: float) -> PrefillBacklog | None:
        """Least work in the preferred cluster, or in any other while that one is down."""
        preferred = preferred_cluster(uncached_tokens, self.threshold_tokens, self._prefill)
        chosen = least_work(self._prefill[preferred], now_s)
        if chosen is None:
            others = [b for c, bs in self._prefill.items() if c != preferred for b in bs]
            chosen = least_work(others, now_s)
        return chosen

    def _choose_decode(
        self, prefill: PrefillBacklog, input_tokens: int, service_s: float, now_s: float
    ) -> tuple[DecodeBacklog, float, float, float] | None:
        """Decode backlog and the expected prefill start, KV landing and slot."""
        crosses = prefill.instance.cluster != PD
        hop_s = self.config.link_delay_s if crosses else 0.0
        tail_s = self.config.transfer_tail_s(input_tokens, service_s, crosses)
        free_s = prefill.free_at_s(now_s)
        if self.config.admission == "reserve_first":
            found = earliest_slot(self._decode, now_s)
            if found is None:
                return None
            start_s = max(free_s, found[1] + hop_s)
            return found[0], start_s, start_s + service_s + tail_s, found[1]
        start_s = max(free_s, now_s + hop_s)
        landed_s = start_s + service_s + tail_s
        found = earliest_slot(self._decode, landed_s)
        return None if found is None else (found[0], start_s, landed_s, found[1])

    def _reject(self, rid: str, reason: str) -> list[ev.Action]:
        self.counters.arrived += 1
        self.counters.rejected += 1
        return [ev.Reject(rid, self.config.retry_after_s, reason)]

    def _prefill_started(self, event: ev.PrefillStarted, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None and not placed.prefilled:
            placed.prefill.started(event.rid, now_s)
        return []

    def _prefill_done(self, event: ev.PrefillDone, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None:
            placed.prefill.remove(event.rid, now_s)
            placed.prefilled = True
        return []

    def _transfer_done(self, event: ev.TransferDone, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None:
            placed.landed = True
            if self.config.admission == "push_then_admit":
                placed.decode.landed(event.rid, now_s)
        return []

    def _decode_admitted(self, event: ev.DecodeAdmitted, now_s: float) -> list[ev.Action]:
        placed = self._placed.get(event.rid)
        if placed is not None:
            placed.landed = True
            placed.decode.admitted(event.rid, now_s)
        return []

    def _forget(self, rid: str, now_s: float) -> bool:
        placed = self._placed.pop(rid, None)
        if placed is None:
            return False
        if not placed.prefilled:
            placed.prefill.remove(rid, now_s)
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

    def _named(self, name: str) -> PrefillBacklog | DecodeBacklog:
        backlog = self._backlogs.get(name)
        if backlog is None:
            known = ", ".join(self._backlogs)
            raise EngineError(f"there is no instance {name!r} in this deployment; it has {known}")
        return backlog

    def _instance_up(self, event: ev.InstanceUp, _now_s: float) -> list[ev.Action]:
        self._named(event.instance).up = True
        return []

    def _instance_down(self, event: ev.InstanceDown, _now_s: float) -> list[ev.Action]:
        """Exclude the instance and cancel what still depends on it."""
        lost = self._named(event.instance)
        if not lost.up:
            return []
        lost.up = False
        reason = f"instance {event.instance} went down"
        return [
            ev.Cancel(rid, reason)
            for rid, placed in self._placed.items()
            if placed.decode is lost or (placed.prefill is lost and not placed.landed)
        ]
