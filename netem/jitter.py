"""What a packet's delay departs from the mean by: draws of a distribution, one like the last.

A draw is ``jitter_s`` times an entry of the distribution's table (``netem.delay_tables``), the
same for every backend. With a correlation c the entry's level is that of ``z``, a Gaussian series
``z = c z_previous + sqrt(1 - c^2) n``: the distribution stays what it is, and successive draws have
an autocorrelation of c less at most 0.02, or 0.1 for the skewed laws. tc-netem mixes the levels
themselves, which narrows the distribution.
"""

import math
from array import array
from random import Random

from netem.delay_tables import ENTRIES, SCALE, delay_table
from netem.link import Direction


def most_jitter_s(direction: Direction) -> float:
    """How far a delay may lie from its mean: no table goes beyond 4 deviations."""
    return direction.jitter_s * (1 if direction.jitter_distribution == "uniform" else 4)


class Jitter:
    """A series of draws in seconds around 0."""

    def __init__(self, direction: Direction, random: Random) -> None:
        self._random = random
        self._z = random.gauss(0.0, 1.0)
        self.change(direction)

    def change(self, direction: Direction) -> None:
        """Go on as ``direction`` says."""
        self._unit_s = direction.jitter_s / SCALE
        self._correlation = direction.jitter_correlation
        self._table = array("h")
        if direction.jitter_s:
            self._table.frombytes(delay_table(direction.jitter_distribution))

    def draw_s(self) -> float:
        if not self._unit_s:
            return 0.0
        return self._table[int(self._draw_level() * ENTRIES)] * self._unit_s

    def _draw_level(self) -> float:
        """Uniform in [0, 1)."""
        if not self._correlation:
            return self._random.random()
        fresh = math.sqrt(1 - self._correlation**2) * self._random.gauss(0.0, 1.0)
        self._z = self._correlation * self._z + fresh
        return min(0.5 * (1 + math.erf(self._z / math.sqrt(2))), 1 - 1e-12)
