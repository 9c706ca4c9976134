"""Which of several prefix pools hold a prompt's blocks and states: one look for all of them.

A block goes by its key and the state at its end by ``~key`` (``harness.prefix_pool``).
"""

from collections.abc import Container, Sequence


class Holders:
    """Which of several pools hold what: one integer a unit, whose lowest bits are the pools in the
    order in which they joined. As each pool holds whole prefixes, so do all of them together."""

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}
        self._joined = 0

    def new_bit(self) -> int:
        """The bit of a pool that joins."""
        self._joined += 1
        return 1 << (self._joined - 1)

    def add(self, unit: int, bit: int) -> None:
        self._bits[unit] = self._bits.get(unit, 0) | bit

    def add_all(self, units: Sequence[int], bit: int) -> None:
        bits = self._bits
        if bits.keys().isdisjoint(units):
            bits.update(dict.fromkeys(units, bit))
        else:
            for unit in units:
                bits[unit] = bits.get(unit, 0) | bit

    def remove(self, unit: int, bit: int) -> None:
        left = self._bits[unit] & ~bit
        if left:
            self._bits[unit] = left
        else:
            del self._bits[unit]

    def longest(self, keys: Sequence[int]) -> tuple[int, int]:
        """Leading blocks of ``keys`` that one pool holds, and the place of the first that does."""
        held = leading(keys, self._bits)
        return held, _lowest(self._bits[keys[held - 1]]) if held else 0

    def match(self, keys: Sequence[int], max_blocks: int, *, has_state: bool) -> tuple[int, int]:
        """Blocks of the longest prefix that one pool can use, and the place of the first."""
        bits = self._bits
        blocks = min(leading(keys, bits), max(0, max_blocks))
        if not has_state:
            return blocks, _lowest(bits[keys[blocks - 1]]) if blocks else 0
        while blocks and ~keys[blocks - 1] not in bits:
            blocks -= 1
        return blocks, _lowest(bits[~keys[blocks - 1]]) if blocks else 0


def _lowest(bits: int) -> int:
    """The place of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1


def leading(keys: Sequence[int], units: Container[int]) -> int:
    """How many of the first keys are there, of which none is without those before it. O(log n)."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in units:
            low = middle + 1
        else:
            high = middle
    return low
