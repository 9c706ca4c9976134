"""The scheduler with a real clock: events in, its actions carried out, decisions written down.

``now_s`` is scenario time since the run's start, so a control period lasts
``control_period_s / time_scale`` of wall time. What the scheduler wants of a worker (``Convert``,
``Resync``) is done in the background and answered with an event; a worker that does not do it is
reported as down. An instance that is down is asked for its health until it answers again.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Protocol, Self

import msgspec

from harness.core import EngineError
from harness.gateway.decision_log import Asked, DecisionLog
from harness.gateway.metrics import GatewayMetrics
from harness.gateway.upstream import InstanceUnreachableError, Upstream
from harness.scheduling import events as ev
from harness.scheduling.scheduler import Scheduler

#: Between two questions to an instance that is down whether it is up again, wall time.
PROBE_PERIOD_S = 1.0
#: It says so within this, or is asked again: half a connection says nothing for ever.
PROBE_WITHIN_S = 5.0
#: The event loop's own grain.
MIN_SLEEP_S = 0.001


class Losable(Protocol):
    """What can be told that its instance is gone."""

    def lose(self, error: EngineError) -> None: ...


class InstanceDownError(EngineError):
    """The instance that a request depended on went down."""


class PoolSnapshot(msgspec.Struct):
    """A worker's answer to ``GET /cache_snapshot``."""

    seq: int
    blocks: tuple[int, ...]
    states: tuple[int, ...]


class Driver:
    """Async context manager: what it does in the background ends with it."""

    def __init__(
        self,
        make_scheduler: Callable[[], Scheduler],
        upstream: Upstream,
        decisions: DecisionLog,
        metrics: GatewayMetrics,
        time_scale: float,
    ) -> None:
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler()
        self._upstream = upstream
        self.decisions = decisions
        self._metrics = metrics
        self._time_scale = time_scale
        self._losable: dict[str, Losable] = {}
        self._parent: asyncio.Task[object] | None = None
        self._failure: BaseException | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.down: set[str] = set()
        self.start_mono_ns = time.monotonic_ns()

    async def __aenter__(self) -> Self:
        self._parent = asyncio.current_task()
        scheduling = self.scheduler.config.scheduling
        if scheduling.bandwidth_aware or scheduling.role_conversion:
            self._spawn(self._tick(scheduling.control_period_s))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks, self._parent = list(self._background), None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def begin(self, start_mono_ns: int) -> None:
        """The run's time starts at an instant of its own. What the scheduler had learnt was on
        another axis, so it starts anew, unless somebody's request is in flight."""
        self.start_mono_ns = start_mono_ns
        if not self.scheduler.in_flight:
            self.scheduler = self._make_scheduler()
            if self.scheduler.config.keeps_prefixes:
                for instance in self.scheduler.instances:
                    self._spawn(self._resync(instance.name))

    def now_s(self) -> float:
        """Scenario time since the run's start."""
        return (time.monotonic_ns() - self.start_mono_ns) / 1e9 * self._time_scale

    def wall_s(self, scenario_s: float) -> float:
        return scenario_s / self._time_scale

    def place(
        self, rid: str, attempt: int, tokens: int, output_tokens: int, keys: tuple[int, ...]
    ) -> ev.Dispatch | ev.Reject:
        """Ask where a request goes."""
        now_s, scheduler = self.now_s(), self.scheduler
        asked = Asked(
            mono_ns=time.monotonic_ns(),
            rid=rid,
            attempt=attempt,
            now_s=now_s,
            input_tokens=tokens,
            output_tokens=output_tokens,
            num_keys=len(keys),
            waits_s=scheduler.fleet.waits_s(now_s),
            assigned=scheduler.queue_lengths(),
        )
        placed, *others = scheduler.handle(ev.Arrived(rid, tokens, output_tokens, keys), now_s)
        assert isinstance(placed, ev.Dispatch | ev.Reject)
        self.decisions.placed(asked, placed, self._slots_s(placed, now_s))
        self._do_all(others)
        return placed

    def _slots_s(self, placed: ev.Dispatch | ev.Reject, now_s: float) -> dict[str, float]:
        """The slot that each decode instance had to offer. The request has its own by now."""
        if isinstance(placed, ev.Reject):
            return {}
        reserves = self.scheduler.config.admission == "reserve_first"
        slots_s = self.scheduler.fleet.slots_s(now_s if reserves else placed.expected_kv_landed_s)
        return slots_s | {placed.route.decode.name: placed.expected_decode_slot_s}

    def depends(self, rid: str, losable: Losable) -> None:
        """``losable`` is told when an instance of ``rid``'s route goes down."""
        self._losable[rid] = losable

    def tell(self, event: ev.Event) -> None:
        """Let the scheduler know, and do what it says."""
        self._do_all(self.scheduler.handle(event, self.now_s()))

    def end(self, event: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        """A request, or one attempt at it, is over."""
        self._losable.pop(event.rid, None)
        self.tell(event)

    def lose(self, instance: str) -> None:
        """Nothing answers at an instance's address."""
        if instance not in self.down:
            self.down.add(instance)
            self._spawn(self._until_up(instance))
        self.tell(ev.InstanceDown(instance))

    async def examine(self, clusters: Iterable[str]) -> None:
        """Ask the instances of ``clusters`` whether they are there: what takes one down often takes
        those beside it. One that does not answer in time is left alone; its link may be slow."""
        named = set(clusters)
        there = [one.name for one in self.scheduler.instances if one.cluster in named]
        await asyncio.gather(*(self._examine(name) for name in there if name not in self.down))

    async def _examine(self, instance: str) -> None:
        try:
            async with asyncio.timeout(PROBE_PERIOD_S):
                await self._upstream.ask(instance, "GET", "/health")
        except InstanceUnreachableError as error:
            if error.in_time:
                self.lose(instance)
        except (EngineError, TimeoutError):
            return  # it is there, or nobody can tell

    def _do_all(self, actions: list[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.Cancel():
                    losable = self._losable.get(action.rid)
                    if losable is not None:
                        losable.lose(InstanceDownError(action.reason))
                case ev.SetThreshold():
                    self._note(action)
                    self._metrics.threshold_changes.labels(action.reason).inc()
                case ev.Convert():
                    self._note(action)
                    self._spawn(self._convert(action))
                case ev.Resync():
                    self._note(action)
                    self._spawn(self._resync(action.instance))
                case ev.Dispatch() | ev.Reject():
                    raise AssertionError("only an arrival is placed")

    def _note(self, action: ev.SetThreshold | ev.Convert | ev.Resync) -> None:
        self.decisions.changed(action, self.now_s())

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        """In the background; a fault in it ends the gateway."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if task.cancelled() or task.exception() is None or self._failure is not None:
            return
        self._failure = task.exception()
        if self._parent is not None:
            self._parent.cancel()

    async def _tick(self, period_s: float) -> None:
        """At multiples of the period on the run's own axis, where the simulator has them too."""
        while True:
            start_mono_ns, now_s = self.start_mono_ns, self.now_s()
            due_s = now_s - now_s % period_s + period_s
            # A sleep may end a little early: then it is not time yet, nor for two ticks in one.
            while now_s < due_s and self.start_mono_ns == start_mono_ns:
                await asyncio.sleep(max(MIN_SLEEP_S, self.wall_s(due_s - now_s)))
                now_s = self.now_s()
            if self.start_mono_ns == start_mono_ns:
                self.tell(ev.Tick())

    async def _convert(self, action: ev.Convert) -> None:
        """A conversion takes ``conversion_s``, of which the worker itself may spend a part."""
        over_s = self.now_s() + self.scheduler.config.scheduling.conversion_s
        body = msgspec.json.encode({"role": action.role})
        try:
            await self._upstream.ask_when_idle(action.instance, "/convert", 409, body)
        except EngineError as error:
            print(f"{action.instance} did not become {action.role}: {error}", file=sys.stderr)
            self.lose(action.instance)
            return
        await asyncio.sleep(max(0.0, self.wall_s(over_s - self.now_s())))
        self.tell(ev.Converted(action.instance))

    async def _resync(self, instance: str) -> None:
        """Until it has answered, since its deltas mean nothing before; or is down: it is asked
        when it comes back."""
        while True:
            try:
                raw = await self._upstream.ask(instance, "GET", "/cache_snapshot")
                pool = msgspec.json.decode(raw, type=PoolSnapshot)
            except (EngineError, msgspec.MsgspecError) as error:
                print(f"{instance} tells nothing of its pool: {error}", file=sys.stderr)
            else:
                self.tell(ev.CacheSnapshot(instance, pool.seq, pool.blocks, pool.states))
                return
            if instance in self.down:
                return
            await asyncio.sleep(PROBE_PERIOD_S)

    async def _until_up(self, instance: str) -> None:
        while True:
            await asyncio.sleep(PROBE_PERIOD_S)
            try:
                async with asyncio.timeout(PROBE_WITHIN_S):
                    await self._upstream.ask(instance, "GET", "/health")
                    await self._take_role(instance)
            except (EngineError, TimeoutError):
                continue
            self.down.discard(instance)
            self.tell(ev.InstanceUp(instance))
            return

    async def _take_role(self, instance: str) -> None:
        """A worker that was started again has its first role, and one that was lost while it
        converted may have either; it is to have the one that the scheduler counts on."""
        if self.scheduler.config.scheduling.role_conversion:
            role = self.scheduler.fleet.named(instance).instance.role
            body = msgspec.json.encode({"role": role})
            await self._upstream.ask_when_idle(instance, "/convert", 409, body)

    def state(self) -> dict[str, object]:
        """What ``/state`` tells of the scheduler."""
        scheduler = self.scheduler
        return {
            "now_s": self.now_s(),
            "threshold_tokens": scheduler.threshold_tokens,
            "queue_lengths": scheduler.queue_lengths(),
            "waits_s": scheduler.fleet.waits_s(self.now_s()),
            "roles": {one.name: one.role for one in scheduler.instances},
            "converting": scheduler.converting,
            "down": sorted(self.down),
            "links": scheduler.links(),
            "cached_blocks": scheduler.cached_blocks,
            "counters": scheduler.counters,
        }
