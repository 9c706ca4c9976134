"""Values that change at known instants, as those of a link by its schedule."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from harness.scenario import Scenario
from netem.link import DirectionName, LinkSpec
from netem.variation import OUTAGE_LOSS


class Course:
    """A value that is constant between changes. ``steps``: from when on it is what, in time order;
    the first one holds before as well."""

    def __init__(self, steps: Sequence[tuple[float, float]]) -> None:
        assert steps, "a course needs a value to begin with"
        assert all(b[0] > a[0] for a, b in pairwise(steps)), "changes ascend"
        self.steps = tuple(steps)
        self._first, self._varies = self.steps[0][1], len(self.steps) > 1

    def at(self, now_s: float) -> float:
        """The value at an instant."""
        if not self._varies:
            return self._first
        value = self._first
        for from_s, one in self.steps[1:]:
            if from_s > now_s:
                break
            value = one
        return value

    def next_s(self, now_s: float) -> float:
        """When it changes next; infinite when it does no more."""
        return next((at_s for at_s, _ in self.steps[1:] if at_s > now_s), math.inf)

    def mean(self, start_s: float, end_s: float) -> float:
        """Over a span."""
        total = 0.0
        ends = (*(at_s for at_s, _ in self.steps[1:]), math.inf)
        for number, ((from_s, value), until_s) in enumerate(zip(self.steps, ends, strict=True)):
            low = start_s if number == 0 else max(start_s, from_s)
            total += value * max(0.0, min(end_s, until_s) - low)
        return total / (end_s - start_s)


def is_out(spec: LinkSpec) -> bool:
    """Whether either direction loses every packet."""
    ways = (spec.near_to_far, spec.far_to_near)
    return any(way.loss_rate >= OUTAGE_LOSS.probability for way in ways)


def link_specs(scenario: Scenario) -> list[tuple[float, LinkSpec]]:
    """The link as it starts and after each change."""
    specs = [(0.0, scenario.link)]
    if scenario.link_schedule is not None:
        for step in scenario.link_schedule.steps(scenario.link):
            if step.at_s <= 0:
                specs.clear()
            specs.append((step.at_s, step.spec))
    return specs


def link_course(scenario: Scenario, value: Callable[[LinkSpec], float]) -> Course:
    """Something about the link through a run."""
    steps: list[tuple[float, float]] = []
    for at_s, spec in link_specs(scenario):
        one = value(spec)
        if not steps or one != steps[-1][1]:
            steps.append((at_s, one))
    return Course(steps)


def delay_course(scenario: Scenario, direction: DirectionName) -> Course:
    """The delay of one way."""
    return link_course(scenario, lambda spec: spec.direction(direction).delay_s)
