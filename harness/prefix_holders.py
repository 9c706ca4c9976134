"""Which of several prefix pools hold a prompt's blocks and states: one look for all of them.

Blocks go by runs of keys (``harness.key_runs``), the states at blocks' ends by the blocks' keys.
"""

from collections.abc import Sequence

from harness.key_runs import KeyRuns


class Holders:
    """Which of several pools hold what: one integer a run or state, whose lowest bits are the pools
    in the order in which they joined. As each pool holds whole prefixes, so do all together."""

    def __init__(self) -> None:
        self._runs = KeyRuns()
        self._states: dict[int, int] = {}
        self._joined = 0
        self.add = self._runs.add
        self.remove = self._runs.remove

    def new_bit(self) -> int:
        """The bit of a pool that joins."""
        self._joined += 1
        return 1 << (self._joined - 1)

    def add_states(self, keys: Sequence[int], bit: int) -> None:
        """A pool has these states."""
        states = self._states
        if states.keys().isdisjoint(keys):
            states.update(dict.fromkeys(keys, bit))
            return
        for key in keys:
            states[key] = states.get(key, 0) | bit

    def remove_states(self, keys: Sequence[int], bit: int) -> None:
        """A pool has these no more."""
        states = self._states
        for key in keys:
            had = states[key]
            if had == bit:
                del states[key]
            else:
                states[key] = had & ~bit

    def longest(self, keys: Sequence[int], max_blocks: int) -> tuple[int, int]:
        """Leading blocks of ``keys`` that one pool holds, and the place of the first that does."""
        held, bits = self._runs.last(keys, min(len(keys), max_blocks))
        return held, _lowest(bits) if held else 0

    def match(self, keys: Sequence[int], max_blocks: int, *, has_state: bool) -> tuple[int, int]:
        """Blocks of the longest prefix that one pool can use, and the place of the first."""
        blocks, bits = self._runs.last(keys, min(len(keys), max_blocks))
        if has_state:
            states = self._states
            while blocks and keys[blocks - 1] not in states:
                blocks -= 1
            bits = states[keys[blocks - 1]] if blocks else 0
        return blocks, _lowest(bits) if blocks else 0


def _lowest(bits: int) -> int:
    """The place of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
