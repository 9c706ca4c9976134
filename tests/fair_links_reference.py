"""Max-min fair sharing in small steps of time, line by line: what ``FairLinks`` is checked against.

No groups, no virtual time, no heap: at every step each line with something to send gets its share
by progressive filling, and so many of its bytes leave.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Piece:
    """Of transfer ``key``; the last one of it says when all of it left."""

    ready_s: float
    nbytes: float
    key: int
    last: bool


@dataclass
class FluidLine:
    """Pieces leave in the order in which they became ready; ``ends``: the capacities it uses."""

    ends: tuple[str, ...]
    pieces: list[Piece] = field(default_factory=list)
    sent_bytes: float = 0.0


def max_min(
    ends: Sequence[tuple[str, ...]], capacity: Mapping[str, float], cap: float
) -> list[float]:
    """Rates of lines that all want as much as they can get, by raising all of them together."""
    rates, fixed = [0.0] * len(ends), [False] * len(ends)
    while not all(fixed):
        room = [
            cap - rate if not done else math.inf for rate, done in zip(rates, fixed, strict=True)
        ]
        for name, most in capacity.items():
            users = [n for n, own in enumerate(ends) if name in own]
            rising = [n for n in users if not fixed[n]]
            for n in rising:
                left = most - sum(rates[u] for u in users)
                room[n] = min(room[n], left / len(rising))
        step = max(0.0, min(r for r, done in zip(room, fixed, strict=True) if not done))
        for n, done in enumerate(fixed):
            if not done:
                rates[n] += step
        for n, own in enumerate(ends):
            full = any(
                sum(rates[u] for u, other in enumerate(ends) if name in other)
                >= capacity[name] * (1 - 1e-12)
                for name in own
            )
            fixed[n] = fixed[n] or full or rates[n] >= cap * (1 - 1e-12)
    return rates


def fluid(
    lines: list[FluidLine],
    capacity_at: Callable[[float], Mapping[str, float]],
    cap_at: Callable[[float], float],
    step_s: float,
    until_s: float,
) -> dict[int, float]:
    """When the last byte of each transfer left, to a few steps."""
    left: dict[int, float] = {}
    queues = [sorted(line.pieces, key=lambda one: one.ready_s) for line in lines]
    done = [0.0] * len(lines)
    number = 0
    while any(queues):
        now_s = number * step_s
        number += 1
        assert now_s < until_s, "it never ends"
        busy = [n for n, queue in enumerate(queues) if queue and queue[0].ready_s <= now_s]
        rates = max_min([lines[n].ends for n in busy], capacity_at(now_s), cap_at(now_s))
        for n, rate in zip(busy, rates, strict=True):
            done[n] += rate * step_s
            queue = queues[n]
            while queue and queue[0].ready_s <= now_s and done[n] >= queue[0].nbytes - 1e-9:
                piece = queue.pop(0)
                done[n] -= piece.nbytes
                if piece.last:
                    left[piece.key] = now_s + step_s
            if not queue or queue[0].ready_s > now_s:
                done[n] = 0.0  # an idle line saves nothing up
    return left
