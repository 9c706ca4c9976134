"""The link's two ways as paths, with the changes that the scenario schedules.

KV and copies to PD go from far to near, copies to PrfaaS from near to far. An outage, every packet
lost, of either direction stops both: nothing is acknowledged then.
"""

from harness.core import PRFAAS, Instance
from harness.kv_path import KvPath, LayerSizes, RateChange
from harness.scenario import Scenario
from netem.link import DirectionName, LinkSpec
from netem.variation import OUTAGE_LOSS


class Paths:
    """The link's two ways, and one path over the fabric for each local sender; without
    ``transfer`` nobody has one."""

    def __init__(self, scenario: Scenario, *, transfer: bool) -> None:
        self._scenario = scenario
        self._transfer = transfer
        self._sizes = LayerSizes(scenario.model.architecture)
        self.link = link_path(scenario, "far_to_near", self._sizes)
        self.out = link_path(scenario, "near_to_far", self._sizes)
        self.fabric: list[KvPath] = []

    def of(self, prefill: Instance) -> KvPath | None:
        """The path by which the instance's KV leaves."""
        if not self._transfer:
            return None
        if prefill.cluster == PRFAAS:
            return self.link
        layerwise = self._scenario.transport.layerwise
        rate = self._scenario.fabric.rate_bytes_per_s
        path = KvPath(rate, 0.0, (), self._sizes, layerwise=layerwise)
        self.fabric.append(path)
        return path


def link_path(scenario: Scenario, direction: DirectionName, sizes: LayerSizes) -> KvPath:
    """One way of the scenario's link."""
    way = scenario.link.direction(direction)
    changes = link_changes(scenario, direction)
    layerwise = scenario.transport.layerwise
    return KvPath(way.rate_bytes_per_s, way.delay_s, changes, sizes, layerwise=layerwise)


def link_changes(scenario: Scenario, direction: DirectionName) -> tuple[RateChange, ...]:
    """When the rate of one way becomes another; 0 while there is an outage."""
    if scenario.link_schedule is None:
        return ()
    changes: list[RateChange] = []
    rate = scenario.link.direction(direction).rate_bytes_per_s
    for step in scenario.link_schedule.steps(scenario.link):
        out = _is_out(step.spec)
        after = 0.0 if out else step.spec.direction(direction).rate_bytes_per_s
        if after != rate:
            changes.append(RateChange(step.at_s, after))
            rate = after
    return tuple(changes)


def _is_out(spec: LinkSpec) -> bool:
    ways = (spec.near_to_far, spec.far_to_near)
    return any(way.loss_rate >= OUTAGE_LOSS.probability for way in ways)
