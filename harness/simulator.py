"""Discrete events over the same scheduler and profiles as the live run: TTFT with queueing.

The serving model of the emulated engine:

* The gateway hands a request to its prefill instance at once, a hop out later across the link.
* A prefill instance serves one request at a time, first come first served, for T_prefill.
* KV leaves over ``harness.kv_path``: one path for the whole link, shared by all that crosses it and
  followed by a hop back; inside the PD cluster one path per sending instance at the fabric's rate.
* ``push_then_admit``: the decode instance grants slots in the order in which KV lands;
  ``reserve_first``: in the order of dispatch, and the request joins the prefill queue only then.
  A slot is held until (output_tokens - 1) steps after decoding began.
* The first token reaches the gateway when the slot is granted (``ttft_source = "decode"``) or at
  the end of prefill, a hop back later across the link (``"prefill"``).
* A request that has no slot ``admission_deadline_s`` after it asked for one fails.

A hop out is the delay of the link from near to far, where the gateway and PD are and where PrfaaS
is; a hop back that from far to near, the way KV and answers go.

Not modelled: jitter and loss of the link, protocol overhead, time spent in gateway and workers.

With ``ttft_source = "decode"``, and with hop = the hop out where the route crosses, else 0:

    ttft_s = hop + prefill_queue_s + prefill_s + (landed - prefill end) + decode_admission_s
    transfer_s = (landed - prefill end) + hop

``transfer_s`` contains the acknowledgement's way back, since a live sender measures until then, and
the request's way out is in no measured term: the two are equal, so the terms add up to ``ttft_s``.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.core import PD, PRFAAS, Instance, Outcome, Request, Route
from harness.kv_path import KvPath, LayerSizes, ready_times
from harness.scenario import Scenario
from harness.scheduling import events as ev
from harness.scheduling.config import scheduler_config
from harness.scheduling.scheduler import Scheduler, SchedulerConfig
from harness.utilisation import Utilisation, window_s


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request's phases in seconds; what it did not reach is None."""

    rid: str
    index: int
    planned_s: float
    input_tokens: int
    output_tokens: int
    route: Route | None
    outcome: Outcome
    failure_phase: str | None
    prefill_queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    decode_admission_s: float | None
    first_token_s: float | None
    ttft_s: float | None
    time_to_second_token_s: float | None
    e2e_s: float | None
    kv_bytes: int | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """``requests`` in the order of the schedule. ``utilisation``: work served over the planned
    window (``throughput.window_s``), so above 1 where a backlog was left at its end.
    ``end_s`` is when the last request ended."""

    requests: tuple[SimulatedRequest, ...]
    utilisation: Utilisation
    window_s: float
    end_s: float

    @property
    def num_completed(self) -> int:
        return sum(r.outcome == "completed" for r in self.requests)


@dataclass(slots=True)
class _Live:
    """A request on its way: the instants known so far."""

    request: Request
    number: int
    route: Route
    service_s: float
    hop_s: float
    back_s: float
    kv_bytes: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    landed_s: float = 0.0
    granted_s: float = 0.0
    asked_slot_s: float = 0.0
    has_slot: bool = False


@dataclass(slots=True)
class _Prefill:
    path: KvPath | None
    running: bool = False
    queue: deque[_Live] = field(default_factory=deque)


@dataclass(slots=True)
class _Decode:
    free: int
    queue: deque[_Live] = field(default_factory=deque)


def simulate(
    scenario: Scenario,
    deployment_name: str,
    schedule: Sequence[Request],
    *,
    transfer: bool = True,
) -> Simulation:
    """Run ``schedule`` through a deployment. Without ``transfer`` KV moves, and the link is
    crossed, in no time. Deterministic: events at one instant happen in the order they were caused.
    """
    config = scheduler_config(scenario, deployment_name, transfer=transfer)
    return _Run(scenario, config, transfer).run(schedule)


class _Run:
    """The state of one simulation."""

    def __init__(self, scenario: Scenario, config: SchedulerConfig, transfer: bool) -> None:
        self._config = config
        self._scenario = scenario
        self._scheduler = Scheduler(config)
        self._heap: list[tuple[float, int, Callable[[_Live, float], None], _Live]] = []
        self._sequence = 0
        self._end_s = 0.0
        self._rows: list[SimulatedRequest | None] = []
        self._reserve_first = config.admission == "reserve_first"
        self._deadline_s = scenario.scheduling.admission_deadline_s
        self._layerwise = scenario.transport.layerwise
        self._sizes = LayerSizes(scenario.model.architecture)
        self._back_s = scenario.link.far_to_near.delay_s if transfer else 0.0
        self._link = KvPath(scenario.link.rate_bytes_per_s, self._back_s)
        self._prefill = {
            i.name: _Prefill(self._path(i) if transfer else None)
            for i in config.instances
            if i.role == "prefill"
        }
        self._decode = {
            i.name: _Decode(config.decode_max_batch) for i in config.instances if i.role == "decode"
        }
        self._prefill_busy_s = dict.fromkeys((i.cluster for i in config.instances), 0.0)
        self._slots_busy_s = 0.0

    def _path(self, instance: Instance) -> KvPath:
        if instance.cluster == PRFAAS:
            return self._link
        return KvPath(self._scenario.fabric.rate_bytes_per_s, 0.0)

    def run(self, schedule: Sequence[Request]) -> Simulation:
        self._rows = [None] * len(schedule)
        heap = self._heap
        order = sorted(range(len(schedule)), key=lambda n: schedule[n].planned_s)
        for number in order:
            request = schedule[number]
            while heap and heap[0][0] <= request.planned_s:
                now_s, _, happen, live = heapq.heappop(heap)
                happen(live, now_s)
            self._arrive(request, number)
        while heap:
            now_s, _, happen, live = heapq.heappop(heap)
            happen(live, now_s)
        assert self._scheduler.in_flight == 0, "a request neither finished nor failed"
        rows = tuple(row for row in self._rows if row is not None)
        assert len(rows) == len(schedule), "a request was lost"
        window = window_s(self._scenario, schedule)
        return Simulation(rows, self._utilisation(window), window, self._end_s)

    def _at(self, when_s: float, happen: Callable[[_Live, float], None], live: _Live) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (when_s, self._sequence, happen, live))

    def _arrive(self, request: Request, number: int) -> None:
        now_s = request.planned_s
        arrived = ev.Arrived(
            request.rid, request.input_tokens, request.output_tokens, hash_ids=request.hash_ids
        )
        (action,) = self._scheduler.handle(arrived, now_s)
        assert isinstance(action, ev.Dispatch), "every instance is up, so nothing is refused"
        out_and_back_s = (self._config.link_delay_s, self._back_s)
        hop_s, back_s = out_and_back_s if action.route.crosses else (0.0, 0.0)
        live = _Live(request, number, action.route, action.prefill_service_s, hop_s, back_s)
        live.asked_slot_s = now_s
        if self._reserve_first:
            self._ask_slot(live, now_s)
        else:
            self._at(now_s + hop_s, self._join_prefill, live)

    def _join_prefill(self, live: _Live, now_s: float) -> None:
        prefill = self._prefill[live.route.prefill.name]
        if prefill.running:
            prefill.queue.append(live)
        else:
            self._start_prefill(prefill, live, now_s)

    def _start_prefill(self, prefill: _Prefill, live: _Live, now_s: float) -> None:
        prefill.running = True
        live.start_s, live.end_s = now_s, now_s + live.service_s
        sizes = self._sizes(live.request.input_tokens)
        live.kv_bytes = int(sizes.sum())
        if prefill.path is not None:
            ready_s = ready_times(now_s, live.end_s, len(sizes), layerwise=self._layerwise)
            prefill.path.offer(live.number, ready_s, sizes)
        self._scheduler.handle(ev.PrefillStarted(live.request.rid), now_s)
        self._at(live.end_s, self._end_prefill, live)

    def _end_prefill(self, live: _Live, now_s: float) -> None:
        prefill = self._prefill[live.route.prefill.name]
        self._prefill_busy_s[live.route.prefill.cluster] += live.service_s
        self._scheduler.handle(ev.PrefillDone(live.request.rid), now_s)
        landed_s = now_s if prefill.path is None else prefill.path.landed_s(live.number, now_s)
        self._at(landed_s, self._land, live)
        prefill.running = False
        if prefill.queue:
            self._start_prefill(prefill, prefill.queue.popleft(), now_s)

    def _land(self, live: _Live, now_s: float) -> None:
        live.landed_s = now_s
        self._scheduler.handle(ev.TransferDone(live.request.rid, live.kv_bytes), now_s)
        if self._reserve_first:
            self._begin_decode(live, now_s)
        else:
            live.asked_slot_s = now_s
            self._ask_slot(live, now_s)

    def _ask_slot(self, live: _Live, now_s: float) -> None:
        decode = self._decode[live.route.decode.name]
        if decode.free > 0:
            self._grant(decode, live, now_s)
        else:
            decode.queue.append(live)
            self._at(now_s + self._deadline_s, self._give_up, live)

    def _grant(self, decode: _Decode, live: _Live, now_s: float) -> None:
        decode.free -= 1
        live.has_slot = True
        live.asked_slot_s = now_s
        if self._reserve_first:
            self._at(now_s + live.hop_s, self._join_prefill, live)
        else:
            self._begin_decode(live, now_s)

    def _begin_decode(self, live: _Live, now_s: float) -> None:
        live.granted_s = now_s
        self._scheduler.handle(ev.DecodeAdmitted(live.request.rid), now_s)
        decoding_s = (live.request.output_tokens - 1) * self._config.decode_step_s
        self._at(now_s + decoding_s, self._finish, live)

    def _finish(self, live: _Live, now_s: float) -> None:
        decode = self._decode[live.route.decode.name]
        self._slots_busy_s += now_s - live.asked_slot_s
        self._scheduler.handle(ev.Finished(live.request.rid), now_s)
        self._rows[live.number] = self._completed(live, now_s)
        self._end_s = max(self._end_s, now_s)
        decode.free += 1
        if decode.queue:
            self._grant(decode, decode.queue.popleft(), now_s)

    def _give_up(self, live: _Live, now_s: float) -> None:
        if live.has_slot:
            return
        self._decode[live.route.decode.name].queue.remove(live)
        self._scheduler.handle(ev.Failed(live.request.rid, "decode_admission"), now_s)
        self._rows[live.number] = self._failed(live)
        self._end_s = max(self._end_s, now_s)

    def _completed(self, live: _Live, now_s: float) -> SimulatedRequest:
        request = live.request
        from_prefill = self._scenario.scheduling.ttft_source == "prefill"
        first_s = live.end_s + live.back_s if from_prefill else live.granted_s
        second_s = live.granted_s + self._config.decode_step_s
        return SimulatedRequest(
            rid=request.rid,
            index=request.index,
            planned_s=request.planned_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            route=live.route,
            outcome="completed",
            failure_phase=None,
            prefill_queue_s=live.start_s - (request.planned_s + live.hop_s),
            prefill_s=live.service_s,
            transfer_s=live.landed_s - live.end_s + live.hop_s,
            decode_admission_s=live.granted_s - live.landed_s,
            first_token_s=0.0,
            ttft_s=first_s - request.planned_s,
            time_to_second_token_s=(
                second_s - request.planned_s if request.output_tokens > 1 else None
            ),
            e2e_s=now_s - request.planned_s,
            kv_bytes=live.kv_bytes,
        )

    def _failed(self, live: _Live) -> SimulatedRequest:
        request = live.request
        prefilled = not self._reserve_first
        return SimulatedRequest(
            rid=request.rid,
            index=request.index,
            planned_s=request.planned_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            route=live.route,
            outcome="failed",
            failure_phase="decode_admission",
            prefill_queue_s=(
                live.start_s - (request.planned_s + live.hop_s) if prefilled else None
            ),
            prefill_s=live.service_s if prefilled else None,
            transfer_s=live.landed_s - live.end_s + live.hop_s if prefilled else None,
            decode_admission_s=None,
            first_token_s=None,
            ttft_s=None,
            time_to_second_token_s=None,
            e2e_s=None,
            kv_bytes=live.kv_bytes if prefilled else None,
        )

    def _utilisation(self, window: float) -> Utilisation:
        busy_s, count = self._prefill_busy_s, dict.fromkeys(self._prefill_busy_s, 0)
        for instance in self._config.instances:
            count[instance.cluster] += instance.role == "prefill"
        share = {c: busy_s[c] / (n * window) if n else None for c, n in count.items()}
        slots = len(self._decode) * self._config.decode_max_batch
        link_s = self._link.sent_bytes / self._link.rate_bytes_per_s
        return Utilisation(
            prfaas_prefill=share.get(PRFAAS),
            pd_prefill=share.get(PD),
            pd_decode=self._slots_busy_s / (slots * window),
            link=link_s / window if share.get(PRFAAS) is not None else None,
            fabric=self._fabric_share(window),
        )

    def _fabric_share(self, window: float) -> float | None:
        """Use of the local senders' own paths, on average over them."""
        paths = [
            prefill.path
            for prefill in self._prefill.values()
            if prefill.path is not None and prefill.path is not self._link
        ]
        if not paths:
            return None
        return sum(path.sent_bytes / path.rate_bytes_per_s for path in paths) / len(paths) / window
