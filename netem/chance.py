"""Which packets meet an event, such as a loss or a copy: a chain, drawn a sojourn at a time.

A packet that finds the chain in state s is an event with probability ``e_s``; after it the chain
leaves s with the probabilities of ``exits``. Sojourns and the gaps between events inside one are
geometric, ``floor(ln(U) / ln(1 - p))``, so a chain costs a draw an event and a sojourn, not a
packet, and a large segmentation-offload packet is charged for every packet it stands for.

The chains of the loss models are tc-netem's (``netem.loss``). Correlated chances are not: netem
mixes each uniform draw with the one before, which moves the rate (1 % at a correlation of 25 %
becomes 0.0002 %). Here a chance p with correlation c is the two-state chain that keeps the rate p
and has the autocorrelation c: an event follows one with probability p + c (1 - p), else p (1 - c).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss, Loss


@dataclass(frozen=True, slots=True)
class State:
    """``event``: the chance of a packet that finds the chain here; ``exits``: (state, chance)."""

    event: float
    exits: tuple[tuple[int, float], ...] = ()


Chain: TypeAlias = tuple[State, ...]


def chance_chain(probability: float, correlation: float = 0.0) -> Chain:
    """Events with one probability, each like the one before to the extent of ``correlation``."""
    if not correlation:
        return (State(probability),)
    enters, leaves = probability * (1 - correlation), (1 - probability) * (1 - correlation)
    return (State(0.0, ((1, enters),)), State(1.0, ((0, leaves),)))


def loss_chain(loss: Loss | None) -> Chain:
    """The chain of a loss model."""
    match loss:
        case None:
            return chance_chain(0.0)
        case IndependentLoss():
            return chance_chain(loss.probability, loss.correlation)
        case GilbertElliott():
            return (
                State(loss.loss_good, ((1, loss.p),)),
                State(loss.loss_bad, ((0, loss.r),)),
            )
        case FourStateLoss():
            return (
                State(0.0, ((2, loss.p13), (3, loss.p14))),
                State(0.0, ((2, loss.p23),)),
                State(1.0, ((0, loss.p31), (1, loss.p32))),
                State(1.0, ((0, 1.0),)),
            )


class Events:
    """The events of one chain. After each, and at first, ``pause`` packets cannot be one."""

    def __init__(self, chain: Chain, random: Random, pause: int = 0) -> None:
        self._chain, self._random, self._pause = chain, random, pause
        self._state = 0
        self._stay = self._draw_sojourn()
        self._until = self._draw_until()

    def among(self, packets: int) -> Sequence[int]:
        """Which of the next ``packets`` packets are events, by index."""
        if self._until >= packets:
            self._until -= packets
            return ()
        events, position = [], 0
        while position + self._until < packets:
            position += int(self._until)
            events.append(position)
            position += 1
            self._until = self._draw_until()
        self._until -= packets - position
        return events

    def _draw_until(self) -> float:
        """How many packets pass before the next event."""
        if not any(state.event > 0 for state in self._chain):
            return math.inf
        until = float(self._pause)
        while True:
            gap = self._geometric(self._chain[self._state].event)
            if gap < self._stay:
                self._stay -= gap + 1
                return until + gap
            until += self._stay
            if until == math.inf:
                return until
            self._leave()

    def _leave(self) -> None:
        exits = self._chain[self._state].exits
        point = self._random.random() * sum(chance for _, chance in exits)
        for state, chance in exits:
            self._state = state
            if point < chance:
                break
            point -= chance
        self._stay = self._draw_sojourn()

    def _draw_sojourn(self) -> float:
        """Packets that find the chain in this state, one at least."""
        return 1 + self._geometric(sum(chance for _, chance in self._chain[self._state].exits))

    def _geometric(self, probability: float) -> float:
        """Trials that fail before the first success."""
        if probability >= 1:
            return 0.0
        if probability <= 0:
            return math.inf
        # 1 - random() lies in (0, 1], so the logarithm exists.
        return math.floor(math.log(1.0 - self._random.random()) / math.log1p(-probability))
