"""The links as paths, with the changes that the scenario schedules, and the fabric's.

Every PrfaaS cluster has a link of its own. KV and copies to PD go from far to near, copies to
PrfaaS from near to far. An outage, every packet lost, of either direction stops both: nothing is
acknowledged then. Changes and impairments are of ``[link]``, the first cluster's; further links
have their rate and the delays that ``[link]`` starts with. What is on its way when a delay changes
keeps the one it left with, and nothing overtakes.

Transfers share a link by layers, first come first served (``harness.kv_path``), or fairly
(``harness.simulator.crossing``): where something beside the link's rate bounds what one of them
carries, or where PD clusters' own links may be what binds.
"""

from collections.abc import Sequence

from harness.core import PRFAAS, Instance
from harness.kv_path import KvPath, LayerSizes, RateChange
from harness.scenario import Scenario
from harness.scheduling.scheduler_config import Link, SchedulerConfig
from harness.simulator.agenda import Agenda
from harness.simulator.course import Course, delay_course, is_out
from harness.simulator.crossing import Crossing, CrossingEnd, Landed
from harness.simulator.sharing import Sharing
from netem.link import DirectionName


class Paths:
    """Both ways of each PrfaaS cluster's link by its name, and one path over the fabric for each
    local sender; without ``transfer`` nobody has one.

    ``crossing`` carries what crosses to PD where that is shared fairly, else ``links`` do.
    """

    def __init__(
        self, scenario: Scenario, config: SchedulerConfig, agenda: Agenda, *, transfer: bool
    ) -> None:
        self._scenario = scenario
        self._transfer = transfer
        self._sizes = LayerSizes(scenario.model.architecture)
        self._near = frozenset(config.pd_clusters)
        self._instances = {one.name: one for one in config.instances}
        # Without transfer nothing crosses, and the rates told are infinite: any other one will do.
        ends = {
            name: one if transfer and name != PRFAAS else None for name, one in config.links.items()
        }
        self.crossing: Crossing | None = None
        sharing = Sharing.of(scenario, config) if transfer else None
        if sharing is not None:
            delay = delay_course(scenario, "far_to_near")
            self.crossing = Crossing(sharing, self._sizes, agenda, delay, layerwise=self._layerwise)
        self.links: dict[str, KvPath | CrossingEnd] = {}
        for name, more in ends.items():
            if self.crossing is not None:
                self.links[name] = self.crossing.end(name)
            else:
                self.links[name] = link_path(scenario, "far_to_near", self._sizes, more)
        self.outs = {
            name: link_path(scenario, "near_to_far", self._sizes, more)
            for name, more in ends.items()
        }
        self._delays = {
            name: _hops(scenario, more, transfer=transfer) for name, more in ends.items()
        }
        #: Of the links whose delays stay.
        self._hops_s = {
            name: (out.at(0.0), back.at(0.0))
            for name, (out, back) in self._delays.items()
            if len(out.steps) == len(back.steps) == 1
        }
        self.fabric: list[KvPath] = []

    @property
    def _layerwise(self) -> bool:
        return self._scenario.transport.layerwise

    def hops_s(self, cluster: str, now_s: float) -> tuple[float, float]:
        """What a dispatch to a PrfaaS cluster and an answer from it take on their way."""
        found = self._hops_s.get(cluster)
        if found is not None:
            return found
        out, back = self._delays[cluster]
        return out.at(now_s), back.at(now_s)

    def of(self, prefill: Instance) -> KvPath | None:
        """The path by which the instance's KV leaves; None where it takes no time, or crosses by
        ``crossing``."""
        if not self._transfer:
            return None
        if prefill.cluster not in self._near:
            path = self.links[prefill.cluster]
            return path if isinstance(path, KvPath) else None
        rate = self._scenario.fabric.rate_bytes_per_s
        path = KvPath(rate, 0.0, (), self._sizes, layerwise=self._layerwise)
        self.fabric.append(path)
        return path

    def send_copy(
        self, number: int, source: str, to: Instance, now_s: float, nbytes: float, landed: Landed
    ) -> None:
        """Send a prefix from an instance to one in another cluster for request ``number``;
        ``landed`` is called once with when it lands."""
        holder = self._instances[source]
        if to.cluster not in self._near:
            landed(self.outs[to.cluster].send(now_s, nbytes))
            return
        path = self.links[holder.cluster]
        if isinstance(path, KvPath):
            landed(path.send(now_s, nbytes))
        else:
            assert self.crossing is not None
            line = (holder.name, holder.cluster), (to.name, to.cluster)
            self.crossing.send(-1 - number, line, now_s, nbytes, landed)

    def drop_copy(self, number: int) -> None:
        """Nobody waits for the prefix any more that was sent for request ``number``."""
        if self.crossing is not None:
            self.crossing.drop(-1 - number)

    def crossed_bytes(self) -> float:
        """Of KV, either way, over every link."""
        ways = (*self.links.values(), *self.outs.values())
        return sum((one.sent_bytes for one in ways), 0.0)


class _VaryingPath(KvPath):
    """A path whose delay changes: what departs at an instant takes the delay of that instant."""

    def __init__(
        self,
        rate_bytes_per_s: float,
        delay: Course,
        changes: Sequence[RateChange],
        sizes: LayerSizes,
        *,
        layerwise: bool,
    ) -> None:
        super().__init__(rate_bytes_per_s, 0.0, changes, sizes, layerwise=layerwise)
        self._delay, self._last_s = delay, 0.0

    def landed_s(self, key: int, now_s: float) -> float:
        return self._arrives_s(super().landed_s(key, now_s))

    def send(self, now_s: float, nbytes: float) -> float:
        return self._arrives_s(super().send(now_s, nbytes))

    def _arrives_s(self, departed_s: float) -> float:
        self._last_s = max(self._last_s, departed_s + self._delay.at(departed_s))
        return self._last_s


def link_path(
    scenario: Scenario, direction: DirectionName, sizes: LayerSizes, more: Link | None = None
) -> KvPath:
    """One way of the scenario's link, or of a further one."""
    way, layerwise = scenario.link.direction(direction), scenario.transport.layerwise
    if more is not None:
        return KvPath(more.bytes_per_s, way.delay_s, (), sizes, layerwise=layerwise)
    changes, delay = link_changes(scenario, direction), delay_course(scenario, direction)
    if len(delay.steps) > 1:
        return _VaryingPath(way.rate_bytes_per_s, delay, changes, sizes, layerwise=layerwise)
    return KvPath(way.rate_bytes_per_s, way.delay_s, changes, sizes, layerwise=layerwise)


def link_changes(scenario: Scenario, direction: DirectionName) -> tuple[RateChange, ...]:
    """When the rate of one way becomes another; 0 while there is an outage."""
    if scenario.link_schedule is None:
        return ()
    changes: list[RateChange] = []
    rate = scenario.link.direction(direction).rate_bytes_per_s
    for step in scenario.link_schedule.steps(scenario.link):
        out = is_out(step.spec)
        after = 0.0 if out else step.spec.direction(direction).rate_bytes_per_s
        if after != rate:
            changes.append(RateChange(step.at_s, after))
            rate = after
    return tuple(changes)


def _hops(scenario: Scenario, more: Link | None, *, transfer: bool) -> tuple[Course, Course]:
    """The delays of a link, out and back."""
    if not transfer:
        return Course(((0.0, 0.0),)), Course(((0.0, 0.0),))
    if more is not None:
        return Course(((0.0, more.dispatch_delay_s),)), Course(((0.0, more.kv_delay_s),))
    return delay_course(scenario, "near_to_far"), delay_course(scenario, "far_to_near")
