"""A recorded decision made once more, from what was recorded of it.

The cluster follows from the lengths, the hits, the threshold and the links (``router``). Of its
prefill instances the one that is free first is chosen, or of those that were compared for a cached
prefix the one that would be done first; ties go to the one that got its last request longest ago,
then to the first in order. Of the decode instances the one with the earliest slot; ties go to the
fewest requests assigned, then to the first in order. So rows are replayed from the first on.

Only for one PrfaaS and one PD cluster, and not for balancing by capacity, where two clusters'
expected landings are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.core import Instance, ScenarioError
from harness.scheduling.router import Routing, groups, uncached_tokens
from harness.scheduling.scheduler_config import Placing


@dataclass(frozen=True, slots=True)
class Inputs:
    """A placement's inputs, under the names that they have in the record."""

    input_tokens: int
    threshold_tokens: int | None
    hit_tokens: Mapping[str, int]
    link_up: tuple[str, ...]
    roomy: tuple[str, ...]
    waits_s: Mapping[str, float]
    considered_s: Mapping[str, float]
    slots_s: Mapping[str, float]
    assigned: Mapping[str, int]


class Replay:
    """``route`` for the placements of one scheduler in their order."""

    def __init__(self, instances: Sequence[Instance], policy: Placing) -> None:
        if policy == "capacity":
            raise ScenarioError("decisions by capacity cannot be replayed from their rows")
        self._policy: Placing = policy
        self._cluster_of = {one.name: one.cluster for one in instances}
        self._index_of = {one.name: index for index, one in enumerate(instances)}
        near = dict.fromkeys(one.cluster for one in instances if one.role == "decode")
        self._local = tuple(near)
        self._given: dict[str, int] = {}
        self._count = 0

    def uncached_tokens(self, inputs: Inputs) -> int:
        """l, the length that is compared with the threshold."""
        return uncached_tokens(inputs.input_tokens, inputs.hit_tokens, self._local, inputs.roomy)

    def route(self, inputs: Inputs) -> tuple[str, str]:
        """The names of the prefill and the decode instance; it counts as given to them."""
        prefill = self._prefill(inputs, self._names(inputs))
        decode = min(
            inputs.slots_s,
            key=lambda name: (
                inputs.slots_s[name],
                inputs.assigned[name],
                self._index_of[name],
            ),
        )
        self._count += 1
        self._given[prefill] = self._count
        return prefill, decode

    def _names(self, inputs: Inputs) -> list[str]:
        """The prefill instances in service of the first cluster that has any."""
        routing = Routing(
            self.uncached_tokens(inputs),
            inputs.threshold_tokens,
            self._local,
            inputs.link_up,
            inputs.roomy,
            inputs.hit_tokens,
        )
        for group in groups(self._policy, routing):
            there = [name for name in inputs.waits_s if self._cluster_of[name] in group]
            if there:
                return there
        raise ScenarioError("no prefill instance was up for a request that was placed")

    def _prefill(self, inputs: Inputs, names: list[str]) -> str:
        free_first = self._first(names, inputs.waits_s)
        if len(inputs.considered_s) < 2:
            return free_first
        if free_first not in inputs.considered_s:
            raise ScenarioError(f"{free_first} was free first and was not compared")
        return self._first(inputs.considered_s, inputs.considered_s)

    def _first(
        self, names: Sequence[str] | Mapping[str, float], when_s: Mapping[str, float]
    ) -> str:
        return min(
            names,
            key=lambda name: (when_s[name], self._given.get(name, 0), self._index_of[name]),
        )
