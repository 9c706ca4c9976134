"""Which points are measured, and in which order. Pure: a seed, no clock.

Prefill lengths double from 128 tokens to the model's limit, so a line between two of them in
(log tokens, log seconds) is never long. Points are visited in rounds: each round has every
unfinished point once, in a new random order. A drift of the machine (clocks, temperature,
neighbours) is then spread over all points instead of bending the curve; stopping at any time leaves
all points about as well measured as each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.profiler.estimate import needed_samples

Kind = Literal["prefill", "decode", "prefill_under_egress", "decode_under_ingress"]

SHORTEST_TOKENS = 128
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (1024, 8192, 32768, 131072)
#: Shares of the longest length that are measured with a cached prefix, where there is a cache.
CACHED_SHARES = (4, 2)


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A point of the profile: lengths for prefill, batch and context for decode."""

    kind: Kind
    new_tokens: int = 0
    cached_tokens: int = 0
    batch: int = 0
    context_tokens: int = 0

    @property
    def label(self) -> str:
        """For people."""
        if self.kind.startswith("prefill"):
            cached = f" after {self.cached_tokens:,} cached" if self.cached_tokens else ""
            return f"{self.kind.replace('_', ' ')} {self.new_tokens:,}{cached}"
        return f"{self.kind.replace('_', ' ')} {self.batch} x {self.context_tokens:,}"


def doubling(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low, ... and high itself; a last doubling that comes close to it is left."""
    lengths = []
    length = low
    while length < high:
        lengths.append(length)
        length *= 2
    if lengths and high < 1.25 * lengths[-1] and len(lengths) > 1:
        lengths.pop()
    return (*lengths, high)


def prefill_cells(lengths: Sequence[int], cached: Sequence[int], limit: int) -> tuple[Cell, ...]:
    """Every length at every cached prefix that leaves it inside the limit; a cached prefix that
    fewer than two lengths fit behind makes no curve and is left out."""
    cells = []
    for prefix in sorted({0, *cached}):
        fitting = sorted({one for one in lengths if one + prefix <= limit})
        if len(fitting) > 1:
            cells += [Cell("prefill", one, prefix) for one in fitting]
    return tuple(cells)


def decode_cells(
    batches: Sequence[int], contexts: Sequence[int], capacity_tokens: int | None
) -> tuple[tuple[Cell, ...], tuple[Cell, ...]]:
    """The grid that memory holds, and what it does not. The grid stays complete: a batch that does
    not fit at the longest context is left out at all."""
    cells = [Cell("decode", batch=b, context_tokens=c) for b in batches for c in contexts]
    if capacity_tokens is None:
        return tuple(cells), ()
    longest = max(contexts, default=0)
    kept = tuple(one for one in cells if one.batch * longest <= capacity_tokens)
    return kept, tuple(one for one in cells if one not in kept)


def order_of_round(cells: Sequence[Cell], seed: int, number: int) -> tuple[Cell, ...]:
    """A random order of a round, the same for the same seed."""
    shuffled = np.random.default_rng((seed, number)).permutation(len(cells))
    return tuple(sorted(cells)[i] for i in shuffled)


def unfinished(
    cells: Sequence[Cell], samples: Mapping[Cell, Sequence[float]], bound: float
) -> tuple[Cell, ...]:
    """Cells that want another visit."""
    return tuple(
        cell for cell in cells if len(samples[cell]) < needed_samples(samples[cell], bound)
    )


def visits_left(
    cells: Sequence[Cell], samples: Mapping[Cell, Sequence[float]], bound: float
) -> int:
    """How many visits are still asked for, as far as is known."""
    return sum(max(0, needed_samples(samples[cell], bound) - len(samples[cell])) for cell in cells)
