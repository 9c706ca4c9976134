"""The cache index where pools report by runs: a look costs O(runs), not O(blocks).

Bits say which instances hold a run's blocks and in which clusters any does; those of a state at a
block's end are kept by the block's key, as only what is hit is looked at (``cache_index``).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from harness.key_runs import KeyRuns, Span, common


class Place(NamedTuple):
    """An instance's bit, its cluster's, those of all instances of the cluster, and both of its own:
    what a run has that nobody else of the cluster holds."""

    bit: int
    cluster_bit: int
    fellows: int
    both: int


class CacheRuns:
    """What the pools hold, as told by runs."""

    def __init__(self) -> None:
        self._runs = KeyRuns()
        self._states: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks that any pool holds."""
        return self._runs.blocks

    def has(self, key: int) -> bool:
        """Whether a prompt that begins with this key is known."""
        return key in self._runs.by_first

    def add(self, place: Place, runs: Iterable[Span], states: Iterable[int]) -> None:
        bits, held = place.both, self._states
        for run in runs:
            self._runs.add(run, bits)
        if held.keys().isdisjoint(states):
            held.update(dict.fromkeys(states, bits))
            return
        for key in states:
            held[key] = held.get(key, 0) | bits

    def remove(self, place: Place, runs: Iterable[Span], states: Iterable[int]) -> None:
        bit, cluster_bit, fellows, both = place
        for run in runs:
            self._runs.remove(run, bit, both, fellows, cluster_bit)
        held = self._states
        for key in states:
            if held[key] == both:
                del held[key]
            else:
                self._lose_state(key, place)

    def _lose_state(self, key: int, place: Place) -> None:
        left = self._states[key] & ~place.bit
        if not left & place.fellows:
            left &= ~place.cluster_bit
        if left:
            self._states[key] = left
        else:
            del self._states[key]

    def forget(self, place: Place) -> None:
        """Nothing is known of the instance."""
        self._runs.forget(place.bit, place.fellows, place.cluster_bit)
        for key in [key for key, bits in self._states.items() if bits & place.bit]:
            self._lose_state(key, place)

    def follow(
        self, keys: Sequence[int], most: int, alive: int
    ) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
        """Of ``alive``, who holds how much of the first ``most`` blocks: up to where any does, at
        which depths whose blocks end, and at which there are states of whom."""
        by_first, all_states = self._runs.by_first, self._states
        depth = 0
        lost: list[tuple[int, int]] = []
        states: list[tuple[int, int]] = []
        while alive and depth < most:
            run = by_first.get(keys[depth])
            still = 0 if run is None else alive & run.bits
            if still != alive:
                lost.append((depth, alive ^ still))
                alive = still
            if run is None or not still:
                break
            length = min(most - depth, run.end - run.first)
            same = common(keys, depth, run.keys, run.first, length)
            for key in keys[depth : depth + same]:
                depth += 1
                found = all_states.get(key)
                if found is not None:
                    states.append((depth, found))
        if alive:
            lost.append((depth, alive))
        return depth, lost, states
