"""One simulation: a request's life from its arrival to its end."""

import math
from collections.abc import Sequence
from functools import partial

from harness.core import Instance, Request
from harness.scenario import Scenario
from harness.scheduling import events as ev
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.agenda import Agenda
from harness.simulator.arrivals import arrivals, first_s, no_collector
from harness.simulator.closed import ClosedLoop
from harness.simulator.control import Control
from harness.simulator.decode import DecodeService
from harness.simulator.faults import INSTANCE_DOWN, Faults
from harness.simulator.link import Paths
from harness.simulator.prefill import PrefillService
from harness.simulator.records import Live, Simulation
from harness.simulator.rows import PHASE_CODES, RowWriter, Sink, ended_row, rejected_row
from harness.simulator.usage import Usage
from harness.utilisation import window_s


class Run:
    """The state of one simulation."""

    def __init__(
        self,
        scenario: Scenario,
        config: SchedulerConfig,
        schedule: Sequence[Request],
        deployment: str,
        *,
        transfer: bool,
        sink: Sink | None,
    ) -> None:
        self._scenario, self._deployment = scenario, deployment
        self._schedule = schedule
        self._agenda = Agenda()
        self._at = self._agenda.at
        self._end_s = 0.0
        self._writer = RowWriter(schedule, sink)
        self._arrivals_left = len(schedule)
        self._reserve_first = config.admission == "reserve_first"
        self._from_prefill = scenario.scheduling.ttft_source == "prefill"
        self._paths = Paths(scenario, config, self._agenda, transfer=transfer)
        self._usage = Usage(config)
        self._control = Control(
            scenario, config, schedule, self._agenda, self._paths,
            retire=self._retire, serve=self._serve, more=lambda: self._arrivals_left > 0,
        )  # fmt: skip
        self._scheduler = self._control.scheduler
        self._handle, self._tell = self._scheduler.handle, self._control.tell
        self._pools = self._control.pools
        self._prefill = PrefillService(
            scenario, config, self._agenda, self._control, self._paths, self._usage, self._sent
        )
        self._decode = DecodeService(
            scenario, config, self._agenda, self._control, self._usage, self._send_out, self._leave
        )
        for one in config.instances:
            self._serve(one)
        #: Little's law: requests in flight over time, and the time that each was, since when.
        self._in_flight_s = self._stayed_s = self._counted_s = 0.0
        self._copied_bytes = 0.0
        load = scenario.load
        self._loop: ClosedLoop | None = None
        if load.concurrency is not None:
            self._loop = ClosedLoop(
                schedule, load.concurrency, load.think_time_s, self._agenda, self._arrive
            )
        self._faults = self._planned_faults(config)

    def _planned_faults(self, config: SchedulerConfig) -> Faults | None:
        there = {one.name for one in config.instances}
        planned = [
            one for one in self._scenario.faults.of(self._deployment) if one.instance in there
        ]
        if not planned:
            return None
        return Faults(
            planned, self._scenario.gateway.max_retries, self._agenda, self._control,
            (self._prefill, self._decode), serve=self._serve, has_begun=self._has_begun,
            clear=self._clear, fail=self._fail, again=self._again, resume=self._without_copy,
        )  # fmt: skip

    def _serve(self, one: Instance) -> None:
        """Put an instance into service in its role."""
        if one.role == "decode":
            self._decode.serve(one)
        else:
            self._prefill.serve(one)

    def _retire(self, name: str) -> None:
        """Take an empty instance out of service."""
        empty = self._prefill.retire(name) or self._decode.retire(name)
        assert empty is not None
        assert not empty.queue, f"{name} is to be converted and not empty"

    def run(self) -> Simulation:
        self._control.begin()
        if self._faults is not None:
            self._faults.begin()
        try:
            with no_collector():
                self._pass()
        except KeyboardInterrupt:
            self._writer.flush()  # nothing of what has ended is lost
            raise
        return self._result()

    def _pass(self) -> None:
        """All that happens."""
        agenda = self._agenda
        if self._loop is not None:
            self._loop.begin()
        else:
            for number, planned_s, tokens, output_tokens in arrivals(self._schedule):
                agenda.until(planned_s)
                self._arrive(number, planned_s, tokens, output_tokens)
        agenda.finish()

    def _result(self) -> Simulation:
        assert self._scheduler.in_flight == 0, "a request neither finished nor failed"
        rows = self._writer.finish()
        assert self._writer.num_rows == len(self._schedule), "a request was lost"
        # Little's law, of what the scheduler counts and what the rows say.
        assert math.isclose(self._in_flight_s, self._stayed_s, rel_tol=1e-6, abs_tol=1e-6)
        if self._pools is not None:
            self._pools.check_nothing_is_left()
        start_s = first_s(self._schedule)
        # A closed loop lasts as long as its answers take.
        window = self._end_s - start_s if self._loop else window_s(self._scenario, self._schedule)
        paths, roles = self._paths, self._control.roles
        return Simulation(
            rows,
            self._writer.num_rows,
            self._writer.num_completed,
            self._usage.shares(start_s, window, paths, roles),
            window,
            self._end_s,
            paths.crossed_bytes(),
            self._copied_bytes,
            tuple(self._control.thresholds),
            tuple(roles),
            start_s,
            self._writer.ttft_s(),
            dict(self._writer.failures),
        )

    def _arrive(
        self, number: int, now_s: float, tokens: int, output_tokens: int, lost: Live | None = None
    ) -> None:
        """Place a request, for the first time or after it was lost with an instance."""
        planned_s, retries = now_s, 0
        if lost is None:
            self._arrivals_left -= 1
        else:
            planned_s, retries = lost.planned_s, lost.retries + 1
        self._count_in_flight(now_s)
        rid = str(number)
        keys: Sequence[int] = ()
        if self._pools is not None:
            keys = self._pools.keys(number, tokens)
        (action,) = self._handle(ev.Arrived(rid, tokens, output_tokens, keys), now_s)
        if type(action) is not ev.Dispatch:
            self._reject(number, planned_s, now_s, retries)
            return
        route = action.route
        hop_s = back_s = 0.0
        if route.crosses:
            hop_s, back_s = self._paths.hops_s(route.prefill.cluster, now_s)
        live = Live(
            rid, number, planned_s, tokens, output_tokens, route, action.prefill_service_s, hop_s,
            back_s, keys,
        )  # fmt: skip
        live.asked_slot_s = live.placed_s = now_s
        if self._faults is not None:
            live.retries = retries
            self._faults.lives[rid] = live
        if action.copy is not None and self._begin_copy(live, action.copy, now_s):
            return
        self._go(live, now_s)

    def _begin_copy(self, live: Live, copy: ev.CopyPrefix, now_s: float) -> bool:
        """Send a prefix across the link; the request goes on when it has arrived."""
        assert self._pools is not None
        nbytes = self._pools.begin_copy(live.rid, live.keys, copy)
        if nbytes is None:
            return False
        self._copied_bytes += nbytes
        live.copy = copy
        sent = partial(self._copy_sent, (live, copy))
        self._paths.send_copy(live.key, copy.source, live.prefill, now_s, nbytes, sent)
        return True

    def _copy_sent(self, what: tuple[Live, ev.CopyPrefix], landed_s: float) -> None:
        """It is known when the copy lands."""
        if what[0].copy is not what[1]:
            return
        if landed_s == math.inf:
            self._at(self._timeout_s(what[0]), self._lose_copy, what)
        else:
            self._at(landed_s, self._end_copy, what)

    def _end_copy(self, what: tuple[Live, ev.CopyPrefix], now_s: float) -> None:
        live, copy = what
        if live.copy is copy:
            self._give_up_copy(live, arrived=True)
            self._go(live, now_s)
            self._prefill.retry_stalled(now_s)

    def _lose_copy(self, what: tuple[Live, ev.CopyPrefix], now_s: float) -> None:
        live, copy = what
        if live.copy is copy:
            self._give_up_copy(live, arrived=False)
            self._lose(live, now_s)

    def _give_up_copy(self, live: Live, *, arrived: bool) -> None:
        assert self._pools is not None
        assert live.copy is not None
        self._pools.end_copy(live.rid, live.keys, live.copy, arrived=arrived)
        live.copy = None
        if not arrived:
            self._paths.drop_copy(live.key)

    def _without_copy(self, live: Live, now_s: float) -> None:
        """What was to be copied is lost at its source; it is computed."""
        self._give_up_copy(live, arrived=False)
        self._go(live, now_s)
        self._prefill.retry_stalled(now_s)

    def _go(self, live: Live, now_s: float) -> None:
        """Towards the prefill instance, or first to the decode instance for a slot."""
        if self._reserve_first:
            self._decode.ask(live, now_s)
        elif live.hop_s:
            self._send_out(live, now_s)
        else:
            self._at(now_s, self._prefill.join, live)

    def _send_out(self, live: Live, now_s: float) -> None:
        if live.hop_s:
            now_s = self._paths.outs[live.route.prefill.cluster].open_s(now_s)
        if now_s == math.inf:
            self._at(self._timeout_s(live), self._lose, live)
        else:
            self._at(now_s + live.hop_s, self._prefill.join, live)

    def _timeout_s(self, live: Live) -> float:
        return max(self._agenda.now_s, live.planned_s + self._scenario.testbed.request_timeout_s)

    def _sent(self, live: Live, landed_s: float) -> None:
        """The prefill has ended, and when its KV lands is known."""
        if live.gone:
            return
        if landed_s == math.inf:
            self._at(self._timeout_s(live), self._lose, live)
        else:
            self._at(max(landed_s, live.resident_s), self._land, live)

    def _land(self, live: Live, now_s: float) -> None:
        if live.gone:
            return
        live.landed_s, live.landed = now_s, True
        if self._pools is not None:
            self._pools.landed(live)
        if self._reserve_first:
            self._decode.begin(live, now_s)
        else:
            live.asked_slot_s = now_s
            self._decode.ask(live, now_s)
        if self._prefill.stalled:
            self._prefill.retry_stalled(now_s)

    def _lose(self, live: Live, now_s: float) -> None:
        """What waits for a link that stays down is given up at the request timeout."""
        if live.gone:
            return
        phase = "transfer" if live.started else "prefill_queue"
        self._leave(live, PHASE_CODES[phase], ev.Failed(live.rid, phase), now_s)

    def _leave(self, live: Live, phase: int, event: ev.Finished | ev.Failed, now_s: float) -> None:
        """The request has ended; whoever waits for its slot or its memory goes on."""
        code = self._writer.route_code(live.route)
        self._writer.add(ended_row(live, phase, now_s, code, from_prefill=self._from_prefill))
        self._stayed_s += now_s - live.planned_s
        if now_s > self._end_s:
            self._end_s = now_s
        if self._loop is not None:
            self._loop.ended(now_s)
        self._clear(live, event, now_s)

    def _clear(self, live: Live, event: ev.Finished | ev.Failed, now_s: float) -> None:
        """One placement of a request is over."""
        if self._faults is not None:
            self._faults.lives.pop(live.rid)
        if self._pools is not None:
            if live.copy is not None:
                self._give_up_copy(live, arrived=False)
            self._pools.ended(live)
        self._decode.release(live, now_s)
        self._count_in_flight(now_s)
        self._tell(event, now_s)
        self._decode.grant_next(live, now_s)
        if self._prefill.stalled:
            self._prefill.retry_stalled(now_s)

    def _has_begun(self, live: Live, now_s: float) -> bool:
        """Whether the first token has reached the gateway."""
        decoding = live.landed and live.has_slot
        return decoding or (
            self._from_prefill and live.prefilled and now_s >= live.end_s + live.back_s
        )

    def _fail(self, live: Live, now_s: float) -> None:
        event = ev.Failed(live.rid, INSTANCE_DOWN)
        self._leave(live, PHASE_CODES[INSTANCE_DOWN], event, now_s)

    def _again(self, live: Live, now_s: float) -> None:
        self._arrive(live.number, now_s, live.input_tokens, live.output_tokens, live)

    def _count_in_flight(self, now_s: float) -> None:
        self._in_flight_s += self._scheduler.in_flight * (now_s - self._counted_s)
        self._counted_s = now_s

    def _reject(self, number: int, planned_s: float, now_s: float, retries: int = 0) -> None:
        self._writer.add(rejected_row(number, planned_s, now_s, retries))
        self._stayed_s += now_s - planned_s
        self._end_s = max(self._end_s, now_s)
        if self._loop is not None:
            self._loop.ended(now_s)
