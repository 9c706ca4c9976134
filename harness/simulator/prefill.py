"""Prefill instances: one request at a time, first come first served, for T_prefill; or in steps of
several requests and of parts of them (``harness.simulator.prefill_steps``).

With prefix caches a prefill begins when there is room for what it needs; until then its instance
is stalled, and those behind it wait.
"""

from collections.abc import Callable
from functools import partial

from harness.core import Instance
from harness.scenario import Scenario
from harness.scheduling import events as ev
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.agenda import Agenda
from harness.simulator.control import Control
from harness.simulator.kv_out import KvOut
from harness.simulator.link import Paths
from harness.simulator.prefill_steps import Part, StepCost, steps_of
from harness.simulator.records import Live, PrefillQueue
from harness.simulator.usage import Usage


class PrefillService:
    """The queues of the instances that prefill. ``sent`` is called at the end of a prefill with
    when its last layer lands, infinite where the path stays down."""

    def __init__(
        self,
        scenario: Scenario,
        config: SchedulerConfig,
        agenda: Agenda,
        control: Control,
        paths: Paths,
        usage: Usage,
        sent: Callable[[Live, float], None],
    ) -> None:
        self._agenda = agenda
        self._tell, self._pools = control.tell, control.pools
        self._paths = paths
        self._usage = usage
        self._kv_out = KvOut(config, paths, sent)
        self._steps = steps_of(scenario.serving)
        #: By hardware.
        self._costs = {
            name: StepCost(scenario.hardware[name].profile, prefill_s)
            for name, prefill_s in config.prefill_s.items()
        }
        self._moved_bytes = config.moved_bytes
        self._queues: dict[str, PrefillQueue] = {}
        #: Instances whose next prefill finds no room.
        self.stalled: dict[str, None] = {}
        #: Of instances that are slow: how many times as long everything takes.
        self._slowness: dict[str, float] = {}
        #: Instances that died and are not back.
        self._dead: dict[str, PrefillQueue] = {}

    def serve(self, one: Instance) -> None:
        """Put an instance into service."""
        before = self._dead.pop(one.name, None)
        self._queues[one.name] = PrefillQueue(before.path if before else self._paths.of(one))

    def retire(self, name: str) -> PrefillQueue | None:
        """Take an instance out of service; None where it is none of these."""
        return self._queues.pop(name, None)

    def join(self, live: Live, now_s: float) -> None:
        """The request has come to its instance."""
        if live.gone:
            return
        prefill = self._queues[live.route.prefill.name]
        if prefill.running or prefill.queue:
            prefill.queue.append(live)
        elif self._steps is None:
            self._start(prefill, live, now_s)
        else:
            prefill.queue.append(live)
            self._step(prefill, now_s)

    def _next(self, prefill: PrefillQueue, now_s: float) -> None:
        """Go on with those that wait, if any."""
        if self._steps is not None:
            self._step(prefill, now_s)
        elif prefill.queue:
            self._start(prefill, prefill.queue.popleft(), now_s)

    def _start(self, prefill: PrefillQueue, live: Live, now_s: float) -> None:
        """One prompt, whole."""
        if not self._begin(live, now_s):
            prefill.queue.appendleft(live)
            self.stalled[live.prefill.name] = None
            return
        if self._slowness:
            live.service_s *= self._slowness.get(live.route.prefill.name, 1.0)
        prefill.running = True
        live.end_s = end_s = now_s + live.service_s
        self._kv_out.offer(live, prefill.path, now_s + live.fetch_s, end_s)
        self._agenda.at(end_s, self._end, live)

    def _begin(self, live: Live, now_s: float) -> bool:
        """A request's turn has come; False while there is no room for what it needs."""
        if self._pools is not None:
            if not self._pools.begin(live, now_s):
                return False
            if live.fetch_s:
                self._agenda.at(now_s + live.fetch_s, self._pools.fetched, live)
        live.started = True
        live.start_s = now_s
        live.sent_tokens = live.resident_tokens
        live.kv_bytes = self._moved_bytes(live.input_tokens, live.resident_tokens)
        self._tell(ev.PrefillStarted(live.rid), now_s)
        return True

    def _end(self, live: Live, now_s: float) -> None:
        if live.gone:
            return
        route = live.route
        prefill = self._queues[route.prefill.name]
        self._usage.prefill_busy_s[route.prefill.cluster] += live.service_s
        self._done(prefill, live, now_s)
        prefill.running = False
        if prefill.queue:
            self._start(prefill, prefill.queue.popleft(), now_s)

    def _done(self, prefill: PrefillQueue, live: Live, now_s: float) -> None:
        """All of a prompt has been computed."""
        live.prefilled = True
        if self._pools is not None:
            self._pools.prefilled(live)
        self._tell(ev.PrefillDone(live.rid), now_s)
        self._kv_out.end(live, prefill.path, now_s)

    def _step(self, prefill: PrefillQueue, now_s: float) -> None:
        """Parts of several prompts."""
        if not prefill.queue:
            return
        assert self._steps is not None
        assert not prefill.running, "two steps at once"
        one = prefill.queue[0].prefill
        parts = self._steps.choose(prefill.queue, partial(self._begin, now_s=now_s))
        if not parts:
            self.stalled[one.name] = None
            return
        for part in parts:
            if prefill.queue[0] is part.live:
                prefill.queue.popleft()
            else:  # somebody before it waits for room
                prefill.queue.remove(part.live)
        fetch_s = max((live.fetch_s for live, begin, _ in parts if not begin), default=0.0)
        step_s = fetch_s + self._costs[one.hardware](parts)
        end_s = now_s + step_s * self._slowness.get(one.name, 1.0)
        for part in parts:
            if part.is_last:
                self._kv_out.offer(part.live, prefill.path, now_s + fetch_s, end_s)
        prefill.running = True
        self._agenda.at(end_s, self._end_step, (prefill, parts, now_s))

    def _end_step(self, what: tuple[PrefillQueue, list[Part], float], now_s: float) -> None:
        prefill, parts, begun_s = what
        one = parts[0].live.prefill
        if self._queues.get(one.name) is not prefill:
            return  # it died
        self._usage.prefill_busy_s[one.cluster] += now_s - begun_s
        for part in parts:
            live = part.live
            if live.gone:
                continue
            live.computed_tokens = part.end
            if part.is_last:
                live.end_s, live.service_s = now_s, now_s - live.start_s
                self._done(prefill, live, now_s)
            else:
                tokens = live.cached_tokens + part.end
                self._kv_out.send_piece(live, prefill.path, tokens, now_s)
                prefill.queue.append(live)
        prefill.running = False
        self._step(prefill, now_s)

    def retry_stalled(self, now_s: float) -> None:
        """Memory was given back."""
        for name in tuple(self.stalled):
            del self.stalled[name]
            self._next(self._queues[name], now_s)

    def fail(self, name: str) -> None:
        """An instance is gone; nothing where it is none of these."""
        if name in self._queues:
            self._dead[name] = self._queues.pop(name)
            self.stalled.pop(name, None)

    def slow(self, name: str, factor: float, _now_s: float, /) -> None:
        """What begins at the instance takes ``factor`` times as long from now on."""
        self._slowness[name] = factor

    def unqueue(self, live: Live) -> None:
        """Nobody waits for a prefill with this request any more."""
        name = live.route.prefill.name
        prefill = self._queues.get(name)
        if prefill is not None and live in prefill.queue:
            prefill.queue.remove(live)
            if not prefill.queue:
                self.stalled.pop(name, None)

    def drop(self, live: Live, now_s: float) -> None:
        """Its prefill ends here, and no more of its KV becomes ready."""
        if not live.started or live.landed:
            return
        name = live.route.prefill.name
        prefill = self._queues.get(name) or self._dead.get(name)
        self._kv_out.withdraw(live, None if prefill is None else prefill.path, now_s)
        if live.prefilled or self._steps is not None:  # a step goes on without it
            return
        self._usage.prefill_busy_s[live.route.prefill.cluster] += now_s - live.start_s
        if name in self._queues:
            prefill = self._queues[name]
            prefill.running = False
            self._next(prefill, now_s)
