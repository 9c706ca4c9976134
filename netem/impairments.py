"""What befalls packets beside rate and delay: loss, copies, damage, overtaking.

Each is a chain of its own (``netem.chance``) with a random stream of its own, so that switching one
on, or changing it, leaves the pattern of the others as it was. A packet that is lost and copied is
neither, as in tc-netem: one of the two gets through.
"""

from enum import Flag, auto
from random import Random

from netem.chance import Chain, Events, chance_chain, loss_chain
from netem.link import Direction


class Fate(Flag):
    LOST = auto()
    DUPLICATED = auto()
    CORRUPTED = auto()
    OVERTAKES = auto()


class Impairments:
    """Draws the fates of a stream of packets. ``seed`` names the random streams."""

    def __init__(self, direction: Direction, seed: str) -> None:
        self._random = {fate: Random(f"{seed} {fate.name}") for fate in Fate}
        self._bits = Random(f"{seed} bits")
        self._running: dict[Fate, tuple[Chain, int]] = {}
        self._events: dict[Fate, Events] = {}
        self.change(direction)

    def change(self, direction: Direction) -> None:
        """Go on as ``direction`` says; a chain that stays the same stays in its state."""
        for fate, (chain, pause) in _chains(direction).items():
            if self._running.get(fate) != (chain, pause):
                self._running[fate] = chain, pause
                self._events[fate] = Events(chain, self._random[fate], pause)

    def draw(self, packets: int) -> dict[int, Fate]:
        """The fates of the next ``packets`` packets by index, ascending; most have none."""
        fates: dict[int, Fate] = {}
        for fate, events in self._events.items():
            for index in events.among(packets):
                fates[index] = fates[index] | fate if index in fates else fate
        both = Fate.LOST | Fate.DUPLICATED
        for index, fate in fates.items():
            if both in fate:
                fates[index] = fate & ~both
        return dict(sorted(fates.items()))

    def draw_bit(self) -> int:
        """Which bit of a corrupted packet is flipped, modulo their number."""
        return self._bits.getrandbits(32)


def _chains(direction: Direction) -> dict[Fate, tuple[Chain, int]]:
    """The chain of every fate, and how many packets after an event cannot be one."""
    one = direction
    return {
        Fate.LOST: (loss_chain(one.loss), 0),
        Fate.DUPLICATED: (chance_chain(one.duplicate, one.duplicate_correlation), 0),
        Fate.CORRUPTED: (chance_chain(one.corrupt, one.corrupt_correlation), 0),
        Fate.OVERTAKES: (
            chance_chain(one.reorder, one.reorder_correlation),
            max(0, one.reorder_gap - 1),
        ),
    }
