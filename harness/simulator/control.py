"""The scheduler of one simulation: what it is told beside placing, and what it says then.

Reports of the link and of the prefix pools reach it ``cache_staleness_s`` late; of what it answers
the threshold is recorded, and a conversion takes ``conversion_s`` out of service.
"""

from collections.abc import Callable, Sequence

from harness.core import Instance, Request
from harness.scenario import Scenario
from harness.scheduling import events as ev
from harness.scheduling.scheduler import Scheduler
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.agenda import Agenda
from harness.simulator.link import Paths
from harness.simulator.prefixes import Pools
from harness.simulator.pulse import Pulse
from harness.simulator.records import RoleTaken, ThresholdSet


class Control:
    """``retire`` and ``serve`` take an instance out of service and put it into it; ``more`` says
    whether requests are still to come."""

    def __init__(
        self,
        scenario: Scenario,
        config: SchedulerConfig,
        schedule: Sequence[Request],
        agenda: Agenda,
        paths: Paths,
        *,
        retire: Callable[[str], None],
        serve: Callable[[Instance], None],
        more: Callable[[], bool],
    ) -> None:
        self._agenda = agenda
        self._retire, self._serve, self._more = retire, serve, more
        self.scheduler = Scheduler(config)
        self._handle = self.scheduler.handle
        self._cache_aware = scenario.scheduling.cache_aware
        self._staleness_s = scenario.scheduling.cache_staleness_s
        self._conversion_s = scenario.scheduling.conversion_s
        self.pools: Pools | None = None
        if config.keeps_prefixes:
            self.pools = Pools(scenario, config, schedule, self._pool_changed)
        delays_s = {name: paths.hops_s(name, 0.0)[1] for name in paths.links}
        self._pulse = Pulse(self.scheduler, paths.links, delays_s)
        #: Pools with changes that are on their way to the scheduler.
        self._reporting: set[str] = set()
        self.thresholds: list[ThresholdSet] = []
        self.roles: list[RoleTaken] = []
        self._converting: dict[str, RoleTaken] = {}

    def begin(self) -> None:
        """From the start on look at the link each period, where anybody acts on it."""
        if self._pulse.wanted:
            self._agenda.at(0.0, self._look, None)

    def tell(self, event: ev.Event, now_s: float) -> None:
        """Give the scheduler an event that is no arrival and do what it says."""
        for action in self._handle(event, now_s):  # mostly none
            self._obey(action, now_s)

    def _obey(self, action: ev.Action, now_s: float) -> None:
        match action:
            case ev.SetThreshold(tokens, reason):
                self.thresholds.append(ThresholdSet(now_s, tokens, reason))
            case ev.Convert():
                self._convert(action, now_s)
            case ev.Resync(instance):
                self._agenda.at(now_s + self._staleness_s, self._resync, instance)
            case _:
                raise AssertionError(f"only an arrival is placed: {action}")

    def lose(self, name: str, now_s: float) -> list[str]:
        """An instance has died: the requests that depended on it."""
        self._converting.pop(name, None)
        lost: list[str] = []
        for action in self._handle(ev.InstanceDown(name), now_s):
            if isinstance(action, ev.Cancel):
                lost.append(action.rid)
            else:
                self._obey(action, now_s)
        return lost

    def instance(self, name: str) -> Instance:
        """An instance in the role that the scheduler counts on."""
        return self.scheduler.fleet.named(name).instance

    def _look(self, _: None, now_s: float) -> None:
        reports = self._pulse.look(now_s)
        # A deadline that nobody waits for any more is no reason to go on.
        goes_on = self._more() or self.scheduler.in_flight
        if self._staleness_s > 0:
            self._agenda.at(now_s + self._staleness_s, self._report, reports)
        else:
            self._report(reports, now_s)
        if goes_on:
            self._agenda.at(self._pulse.next_s(), self._look, None)

    def _report(self, reports: list[ev.Event], now_s: float) -> None:
        for report in reports:
            self.tell(report, now_s)

    def _pool_changed(self, name: str) -> None:
        if name not in self._reporting and self._cache_aware:
            self._reporting.add(name)
            self._agenda.at(self._agenda.now_s + self._staleness_s, self._report_pool, name)

    def _report_pool(self, name: str, now_s: float) -> None:
        assert self.pools is not None
        self._reporting.discard(name)
        delta = self.pools.delta(name)
        if delta is not None:
            self.tell(delta, now_s)

    def _resync(self, name: str, now_s: float) -> None:
        assert self.pools is not None
        self._report_pool(name, now_s)
        self.tell(self.pools.snapshot(name), now_s)

    def _convert(self, action: ev.Convert, now_s: float) -> None:
        self._retire(action.instance)
        ready_s = now_s + self._conversion_s
        taken = RoleTaken(now_s, ready_s, action.instance, action.role)
        self._converting[action.instance] = taken
        self._agenda.at(ready_s, self._converted, taken)

    def _converted(self, taken: RoleTaken, now_s: float) -> None:
        if self._converting.get(taken.instance) is not taken:
            return  # it died meanwhile
        del self._converting[taken.instance]
        self.tell(ev.Converted(taken.instance), now_s)
        (one,) = (i for i in self.scheduler.instances if i.name == taken.instance)
        assert one.role == taken.role
        self._serve(one)
        self.roles.append(taken)
