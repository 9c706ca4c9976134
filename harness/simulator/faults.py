"""Instances that die and come back, and such that are slow, by the scenario's schedule.

What an instance was doing when it dies is lost, and so is what its pool held; KV that was on its
way from it or to it never lands, and what of it was ready still takes its turn on a link. The
scheduler is told at once, as where connections break, and says which requests depended on it
(``Cancel``). As the gateway does (``harness.gateway.front``) such a request is placed again at
once, ``gateway.max_retries`` times at the most, unless its first token has gone out; else it fails
in phase ``instance_down``. Where nobody can take it, it is refused as one that arrives would be.

An instance that comes back is empty, has the role that the scheduler counts on, and is known to be
back at once. Of one that is slow nobody is told: what begins there takes ``factor`` times as long,
and the scheduler goes on to expect what the profile says.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from harness.core import Instance
from harness.scheduling import events as ev
from harness.settings import InstanceFault
from harness.simulator.agenda import Agenda
from harness.simulator.control import Control
from harness.simulator.records import Live

#: Where a request fails whose instance died under it.
INSTANCE_DOWN = "instance_down"


class Service(Protocol):
    """The instances of one role."""

    def fail(self, name: str) -> None:
        """An instance is gone; nothing where it is none of these."""

    def slow(self, name: str, factor: float, now_s: float, /) -> None:
        """What begins at the instance takes ``factor`` times as long from now on."""

    def unqueue(self, live: Live) -> None:
        """Nobody waits with this request any more."""

    def drop(self, live: Live, now_s: float) -> None:
        """What the instance is doing for the request ends."""


class Faults:
    """``clear`` takes a request out of everything that it holds, ``fail`` ends it, ``again`` places
    it anew, ``resume`` lets one go on whose copy is lost; ``serve`` puts an instance into service.
    ``lives`` are the requests in flight."""

    def __init__(
        self,
        planned: Sequence[InstanceFault],
        max_retries: int,
        agenda: Agenda,
        control: Control,
        services: Sequence[Service],
        *,
        serve: Callable[[Instance], None],
        has_begun: Callable[[Live, float], bool],
        clear: Callable[[Live, ev.Failed, float], None],
        fail: Callable[[Live, float], None],
        again: Callable[[Live, float], None],
        resume: Callable[[Live, float], None],
    ) -> None:
        self._planned = planned
        self._max_retries = max_retries
        self._agenda = agenda
        self._control = control
        self._services = services
        self._serve, self._has_begun = serve, has_begun
        self._clear, self._fail = clear, fail
        self._again, self._resume = again, resume
        self.lives: dict[str, Live] = {}

    def begin(self) -> None:
        """Plan them all."""
        at = self._agenda.at
        for fault in self._planned:
            starts, ends = (
                (self._die, self._come_back)
                if fault.kind == "kill"
                else (self._slow, self._recover)
            )
            at(fault.at_s, starts, fault)
            if fault.lasts_s is not None:
                at(fault.until_s, ends, fault)

    def _die(self, fault: InstanceFault, now_s: float) -> None:
        name = fault.instance
        lost = [self.lives[rid] for rid in self._control.lose(name, now_s)]
        for live in lost:
            live.gone = True
        copying = [
            live
            for live in self.lives.values()
            if not live.gone and live.copy is not None and live.copy.source == name
        ]
        for service in self._services:
            service.fail(name)
        if self._control.pools is not None:
            self._control.pools.lose(name)
        again = [live for live in lost if self._may_come_again(live, now_s)]
        self._take_away(lost, again, now_s)
        for live in copying:
            self._resume(live, now_s)
        # Once all is known that goes wrong at this instant: what takes one down often takes others.
        for live in again:
            self._agenda.at(now_s, self._again, live)

    def _may_come_again(self, live: Live, now_s: float) -> bool:
        return live.retries < self._max_retries and not self._has_begun(live, now_s)

    def _take_away(self, lost: Sequence[Live], again: Sequence[Live], now_s: float) -> None:
        """First out of every line, so that what they leave goes to none of them."""
        for live in lost:
            for service in self._services:
                service.unqueue(live)
        kept = {live.rid for live in again}
        for live in lost:
            for service in self._services:
                service.drop(live, now_s)
            if live.rid in kept:
                self._clear(live, ev.Failed(live.rid, INSTANCE_DOWN), now_s)
            else:
                self._fail(live, now_s)

    def _come_back(self, fault: InstanceFault, now_s: float) -> None:
        self._serve(self._control.instance(fault.instance))
        self._control.tell(ev.InstanceUp(fault.instance), now_s)

    def _slow(self, fault: InstanceFault, now_s: float) -> None:
        assert fault.factor is not None, "what is slow has a factor"
        self._set(fault.instance, fault.factor, now_s)

    def _recover(self, fault: InstanceFault, now_s: float) -> None:
        self._set(fault.instance, 1.0, now_s)

    def _set(self, name: str, factor: float, now_s: float) -> None:
        for service in self._services:
            service.slow(name, factor, now_s)
