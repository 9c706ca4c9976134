"""One generator for each thing that is drawn: children of ``SeedSequence(seed)`` with PCG64.

Changing one law leaves the draws of the others, and a longer run begins like a shorter one. New
streams go to the end; child 5 is that of ``harness.trace.selection``.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Streams:
    lengths: np.random.Generator
    outputs: np.random.Generator
    gaps: np.random.Generator
    states: np.random.Generator
    spread: np.random.Generator
    turns: np.random.Generator
    increments: np.random.Generator
    thinking: np.random.Generator

    @staticmethod
    def of(seed: int) -> "Streams":
        children = np.random.SeedSequence(seed).spawn(9)
        del children[5]
        return Streams(*(np.random.Generator(np.random.PCG64(child)) for child in children))
