"""One simulation: the heap of events, and a request's life through them."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

from harness.core import PRFAAS, Instance, Request
from harness.scenario import Scenario
from harness.scheduling import events as ev
from harness.scheduling.scheduler import Scheduler
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.arrivals import arrivals, first_s, no_collector
from harness.simulator.link import Paths
from harness.simulator.prefixes import Pools
from harness.simulator.pulse import Pulse
from harness.simulator.records import (
    DecodeQueue,
    Live,
    PrefillQueue,
    RoleTaken,
    Simulation,
    ThresholdSet,
)
from harness.simulator.rows import PHASE_CODES, RowWriter, Sink, ended_row, rejected_row
from harness.simulator.usage import Usage
from harness.utilisation import window_s

_Happen = Callable[[Any, float], None]


class Run:
    """The state of one simulation."""

    def __init__(
        self,
        scenario: Scenario,
        config: SchedulerConfig,
        schedule: Sequence[Request],
        *,
        transfer: bool,
        sink: Sink | None,
    ) -> None:
        self._config = config
        self._scenario = scenario
        self._schedule = schedule
        self._scheduler = Scheduler(config)
        self._handle = self._scheduler.handle
        self._heap: list[tuple[float, int, _Happen, Any]] = []
        self._sequence = 0
        self._end_s = 0.0
        self._writer = RowWriter(schedule, sink)
        self._arrivals_left = len(schedule)
        self._reserve_first = config.admission == "reserve_first"
        self._from_prefill = scenario.scheduling.ttft_source == "prefill"
        self._deadline_s = scenario.scheduling.admission_deadline_s
        self._staleness_s = scenario.scheduling.cache_staleness_s
        self._step_s = config.decode_step_s
        self._moved_bytes = config.moved_bytes
        self._out_s = config.link_delay_s
        self._paths = Paths(scenario, transfer=transfer)
        self._link, self._out = self._paths.link, self._paths.out
        self._back_s = self._link.delay_s if transfer else 0.0
        self._prefill: dict[str, PrefillQueue] = {}
        self._decode: dict[str, DecodeQueue] = {}
        for one in config.instances:
            self._serve(one)
        self._usage = Usage(config)
        self._pools: Pools | None = None
        if config.keeps_prefixes:
            self._pools = Pools(scenario, config, schedule, self._pool_changed)
        self._now_s = 0.0
        #: Little's law: requests in flight over time, and the time that each was, since when.
        self._in_flight_s = self._stayed_s = self._counted_s = 0.0
        #: Pools with changes that are on their way to the scheduler.
        self._reporting: set[str] = set()
        #: Instances whose next prefill finds no room.
        self._stalled: dict[str, None] = {}
        self._copied_bytes = 0.0
        self._thresholds: list[ThresholdSet] = []
        self._roles: list[RoleTaken] = []
        self._pulse = Pulse(self._scheduler, self._link, self._back_s)

    def _serve(self, one: Instance) -> None:
        """Put an instance into service in its role."""
        if one.role == "decode":
            self._decode[one.name] = DecodeQueue(self._config.decode_max_batch)
        else:
            self._prefill[one.name] = PrefillQueue(self._paths.of(one))

    def run(self) -> Simulation:
        if self._pulse.wanted:
            self._at(0.0, self._look, None)
        heap, pop = self._heap, heapq.heappop
        with no_collector():
            for number, planned_s, tokens, output_tokens in arrivals(self._schedule):
                while heap and heap[0][0] <= planned_s:
                    self._now_s, _, happen, what = pop(heap)
                    happen(what, self._now_s)
                self._now_s = planned_s
                self._arrivals_left -= 1
                self._arrive(number, planned_s, tokens, output_tokens)
            while heap:
                self._now_s, _, happen, what = pop(heap)
                happen(what, self._now_s)
        return self._result()

    def _result(self) -> Simulation:
        assert self._scheduler.in_flight == 0, "a request neither finished nor failed"
        rows = self._writer.finish()
        assert self._writer.num_rows == len(self._schedule), "a request was lost"
        # Little's law, of what the scheduler counts and what the rows say.
        assert math.isclose(self._in_flight_s, self._stayed_s, rel_tol=1e-6, abs_tol=1e-6)
        if self._pools is not None:
            self._pools.check_nothing_is_left()
        window, start_s = window_s(self._scenario, self._schedule), first_s(self._schedule)
        usage = self._usage.shares(start_s, window, self._link, self._paths.fabric, self._roles)
        return Simulation(
            rows,
            self._writer.num_rows,
            self._writer.num_completed,
            usage,
            window,
            self._end_s,
            self._link.sent_bytes + self._out.sent_bytes,
            self._copied_bytes,
            tuple(self._thresholds),
            tuple(self._roles),
            start_s,
            self._writer.ttft_s(),
            dict(self._writer.failures),
        )

    def _at(self, when_s: float, happen: _Happen, what: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (when_s, self._sequence, happen, what))

    def _tell(self, event: ev.Event, now_s: float) -> None:
        """Give the scheduler an event that is no arrival and do what it says."""
        for action in self._handle(event, now_s):  # mostly none
            match action:
                case ev.SetThreshold(tokens, reason):
                    self._thresholds.append(ThresholdSet(now_s, tokens, reason))
                case ev.Convert():
                    self._convert(action, now_s)
                case ev.Resync(instance):
                    self._at(now_s + self._staleness_s, self._resync, instance)
                case _:
                    raise AssertionError(f"an instance never goes down here: {action}")

    def _look(self, _: None, now_s: float) -> None:
        reports = self._pulse.look(now_s)
        # A deadline that nobody waits for any more is no reason to go on.
        goes_on = self._arrivals_left or self._scheduler.in_flight
        if self._staleness_s > 0:
            self._at(now_s + self._staleness_s, self._report, reports)
        else:
            self._report(reports, now_s)
        if goes_on:
            self._at(self._pulse.next_s(), self._look, None)

    def _report(self, reports: list[ev.Event], now_s: float) -> None:
        for report in reports:
            self._tell(report, now_s)

    def _pool_changed(self, name: str) -> None:
        if name not in self._reporting and self._scenario.scheduling.cache_aware:
            self._reporting.add(name)
            self._at(self._now_s + self._staleness_s, self._report_pool, name)

    def _report_pool(self, name: str, now_s: float) -> None:
        assert self._pools is not None
        self._reporting.discard(name)
        delta = self._pools.delta(name)
        if delta is not None:
            self._tell(delta, now_s)

    def _resync(self, name: str, now_s: float) -> None:
        assert self._pools is not None
        self._report_pool(name, now_s)
        self._tell(self._pools.snapshot(name), now_s)

    def _convert(self, action: ev.Convert, now_s: float) -> None:
        name = action.instance
        empty = self._prefill.pop(name, None) or self._decode.pop(name, None)
        assert empty is not None
        assert not empty.queue, f"{name} is to be converted and not empty"
        ready_s = now_s + self._scenario.scheduling.conversion_s
        self._at(ready_s, self._converted, RoleTaken(now_s, ready_s, name, action.role))

    def _converted(self, taken: RoleTaken, now_s: float) -> None:
        self._tell(ev.Converted(taken.instance), now_s)
        (one,) = (i for i in self._scheduler.instances if i.name == taken.instance)
        assert one.role == taken.role
        self._serve(one)
        self._roles.append(taken)

    def _arrive(self, number: int, now_s: float, tokens: int, output_tokens: int) -> None:
        self._count_in_flight(now_s)
        rid = str(number)
        keys: tuple[int, ...] = ()
        if self._pools is not None:
            keys = self._pools.keys(self._schedule[number])
        (action,) = self._handle(ev.Arrived(rid, tokens, output_tokens, keys), now_s)
        if type(action) is not ev.Dispatch:
            self._reject(number, now_s)
            return
        route = action.route
        hop_s, back_s = (self._out_s, self._back_s) if route.crosses else (0.0, 0.0)
        live = Live(
            rid, number, now_s, tokens, output_tokens, route, action.prefill_service_s, hop_s,
            back_s, keys,
        )  # fmt: skip
        live.asked_slot_s = now_s
        if action.copy is not None and self._begin_copy(live, action.copy, now_s):
            return
        self._go(live, now_s)

    def _begin_copy(self, live: Live, copy: ev.CopyPrefix, now_s: float) -> bool:
        """Send a prefix across the link; the request goes on when it has arrived."""
        assert self._pools is not None
        nbytes = self._pools.begin_copy(live.rid, live.keys, copy)
        if nbytes is None:
            return False
        path = self._out if live.prefill.cluster == PRFAAS else self._link
        landed_s = path.send(now_s, nbytes)
        self._copied_bytes += nbytes
        if landed_s == math.inf:
            self._at(self._timeout_s(live), self._lose_copy, (live, copy))
        else:
            self._at(landed_s, self._end_copy, (live, copy))
        return True

    def _end_copy(self, what: tuple[Live, ev.CopyPrefix], now_s: float) -> None:
        live, copy = what
        assert self._pools is not None
        self._pools.end_copy(live.rid, live.keys, copy, arrived=True)
        self._go(live, now_s)
        self._retry_stalled(now_s)

    def _lose_copy(self, what: tuple[Live, ev.CopyPrefix], now_s: float) -> None:
        live, copy = what
        assert self._pools is not None
        self._pools.end_copy(live.rid, live.keys, copy, arrived=False)
        self._lose(live, now_s)

    def _go(self, live: Live, now_s: float) -> None:
        """Towards the prefill instance, or first to the decode instance for a slot."""
        if self._reserve_first:
            self._ask_slot(live, now_s)
        elif live.hop_s:
            self._send_out(live, now_s)
        else:
            self._at(now_s, self._join_prefill, live)

    def _send_out(self, live: Live, now_s: float) -> None:
        if live.hop_s:
            now_s = self._out.open_s(now_s)
        if now_s == math.inf:
            self._at(self._timeout_s(live), self._lose, live)
        else:
            self._at(now_s + live.hop_s, self._join_prefill, live)

    def _timeout_s(self, live: Live) -> float:
        return max(self._now_s, live.planned_s + self._scenario.testbed.request_timeout_s)

    def _join_prefill(self, live: Live, now_s: float) -> None:
        prefill = self._prefill[live.route.prefill.name]
        if prefill.running or prefill.queue:
            prefill.queue.append(live)
        else:
            self._start_prefill(prefill, live, now_s)

    def _start_prefill(self, prefill: PrefillQueue, live: Live, now_s: float) -> None:
        if self._pools is not None:
            if not self._pools.begin(live, now_s):
                prefill.queue.appendleft(live)
                self._stalled[live.prefill.name] = None
                return
            if live.fetch_s:
                self._at(now_s + live.fetch_s, self._pools.fetched, live)
        prefill.running = live.started = True
        live.start_s = now_s
        live.end_s = end_s = now_s + live.service_s
        tokens, resident = live.input_tokens, live.resident_tokens
        live.kv_bytes = self._moved_bytes(tokens, resident)
        if prefill.path is not None:
            prefill.path.offer(live.number, now_s + live.fetch_s, end_s, tokens, resident)
        self._tell(ev.PrefillStarted(live.rid), now_s)
        self._at(end_s, self._end_prefill, live)

    def _end_prefill(self, live: Live, now_s: float) -> None:
        route = live.route
        prefill = self._prefill[route.prefill.name]
        live.prefilled = True
        self._usage.prefill_busy_s[route.prefill.cluster] += live.service_s
        if self._pools is not None:
            self._pools.prefilled(live)
        self._tell(ev.PrefillDone(live.rid), now_s)
        landed_s = now_s if prefill.path is None else prefill.path.landed_s(live.number, now_s)
        if landed_s == math.inf:
            self._at(self._timeout_s(live), self._lose, live)
        else:
            self._at(max(landed_s, live.resident_s), self._land, live)
        prefill.running = False
        if prefill.queue:
            self._start_prefill(prefill, prefill.queue.popleft(), now_s)

    def _land(self, live: Live, now_s: float) -> None:
        live.landed_s, live.landed = now_s, True
        if self._pools is not None:
            self._pools.landed(live)
        if self._reserve_first:
            self._begin_decode(live, now_s)
        else:
            live.asked_slot_s = now_s
            self._ask_slot(live, now_s)
        if self._stalled:
            self._retry_stalled(now_s)

    def _ask_slot(self, live: Live, now_s: float) -> None:
        decode = self._decode[live.route.decode.name]
        if decode.free > 0:
            self._grant(decode, live, now_s)
            return
        if live.landed:
            # Where a slot is granted at once its grant says that the KV is there.
            self._tell(ev.TransferDone(live.rid, live.kv_bytes), now_s)
        decode.queue.append(live)
        self._at(now_s + self._deadline_s, self._give_up, live)

    def _grant(self, decode: DecodeQueue, live: Live, now_s: float) -> None:
        decode.free -= 1
        live.has_slot = True
        live.asked_slot_s = now_s
        if self._reserve_first:
            self._send_out(live, now_s)
        else:
            self._begin_decode(live, now_s)

    def _begin_decode(self, live: Live, now_s: float) -> None:
        live.granted_s = now_s
        self._tell(ev.DecodeAdmitted(live.rid), now_s)
        live.second_s = now_s + self._step_s
        self._at(now_s + (live.output_tokens - 1) * self._step_s, self._finish, live)

    def _finish(self, live: Live, now_s: float) -> None:
        self._leave(live, 0, ev.Finished(live.rid), now_s)

    def _give_up(self, live: Live, now_s: float) -> None:
        if live.has_slot:
            return
        self._decode[live.decode.name].queue.remove(live)
        phase = "decode_admission"
        self._leave(live, PHASE_CODES[phase], ev.Failed(live.rid, phase), now_s)

    def _lose(self, live: Live, now_s: float) -> None:
        """What waits for a link that stays down is given up at the request timeout."""
        phase = "transfer" if live.started else "prefill_queue"
        self._leave(live, PHASE_CODES[phase], ev.Failed(live.rid, phase), now_s)

    def _leave(self, live: Live, phase: int, event: ev.Finished | ev.Failed, now_s: float) -> None:
        """The request has ended; whoever waits for its slot or its memory goes on."""
        code = self._writer.route_code(live.route)
        self._writer.add(ended_row(live, phase, now_s, code, from_prefill=self._from_prefill))
        if self._pools is not None:
            self._pools.ended(live)
        decode = self._decode[live.route.decode.name]
        if live.has_slot:
            self._usage.slots_busy_s += now_s - live.asked_slot_s
            decode.free += 1
        self._count_in_flight(now_s)
        self._stayed_s += now_s - live.planned_s
        self._tell(event, now_s)
        if now_s > self._end_s:
            self._end_s = now_s
        if live.has_slot and decode.queue:
            self._grant(decode, decode.queue.popleft(), now_s)
        if self._stalled:
            self._retry_stalled(now_s)

    def _count_in_flight(self, now_s: float) -> None:
        self._in_flight_s += self._scheduler.in_flight * (now_s - self._counted_s)
        self._counted_s = now_s

    def _retry_stalled(self, now_s: float) -> None:
        for name in tuple(self._stalled):
            del self._stalled[name]
            prefill = self._prefill[name]
            self._start_prefill(prefill, prefill.queue.popleft(), now_s)

    def _reject(self, number: int, now_s: float) -> None:
        self._writer.add(rejected_row(number, now_s))
        self._end_s = max(self._end_s, now_s)
