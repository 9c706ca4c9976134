"""The highest load that meets an SLO, between two loads of which the verdict is known.

The response is taken to get worse with load. From a load that is as good as none the search doubles
until a load misses, then halves what lies between the highest load that meets and the lowest one
that misses, on a logarithmic scale, until they are ``tolerance`` apart. A load may be undecided:
it is then neither end, and what is left of the bracket is halved on its two sides, so that both
ends come as near to the undecided loads as the tolerance asks, and no nearer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from harness.saturation.judging import Outcome

Ended = Literal["decided", "undecided", "budget", "unattainable", "unbounded"]

#: The load that is as good as none, as a share of where the search begins.
IDLE_SHARE = 1 / 64
#: Loads that one search may try.
MOST_LOADS = 20
#: Above the start by this factor there is no end.
MOST_GROWTH = 64.0

#: The verdict on a load; None where the budget does not allow one.
Ask = Callable[[float], Outcome | None]


@dataclass(frozen=True, slots=True)
class Bracket:
    """``low`` meets and ``high`` misses, in the unit of the loads; None where none was found.

    ``decided``: they are as near as was asked. ``undecided``: between them lie loads on which no
    verdict could be had. ``budget``: it was used up first. ``unattainable``: not even a load that
    is as good as none meets. ``unbounded``: no load misses.
    """

    low: float | None
    high: float | None
    ended: Ended
    undecided: tuple[float, ...] = ()


@dataclass(slots=True)
class _Search:
    """``low`` and ``high`` so far, and undecided loads between them."""

    ask: Ask
    tolerance: float
    low: float | None = None
    high: float | None = None
    undecided: list[float] = field(default_factory=list)
    tried: int = 0

    def try_load(self, load: float) -> Outcome | None:
        """The verdict on ``load``, noted; None where there can be none any more."""
        if self.tried == MOST_LOADS:
            return None
        outcome = self.ask(load)
        if outcome is None:
            return None
        self.tried += 1
        if outcome == "meets":
            self.low = load
        elif outcome == "misses":
            self.high = load
        else:
            self.undecided.append(load)
        low, high = self.low or 0.0, self.high or math.inf
        self.undecided = sorted(one for one in self.undecided if low < one < high)
        return outcome

    def next_load(self) -> float | None:
        """The middle of the wider gap next to an end; None where it is narrow enough."""
        assert self.low is not None
        assert self.high is not None
        ends = [self.low, *self.undecided, self.high]
        gaps = ((ends[0], ends[1]), (ends[-2], ends[-1]))
        below, above = max(gaps, key=lambda gap: gap[1] / gap[0])
        return math.sqrt(below * above) if above > below * (1 + self.tolerance) else None

    @property
    def is_narrow(self) -> bool:
        """Whether the ends are as near to each other as was asked."""
        assert self.low is not None
        assert self.high is not None
        return self.high <= self.low * (1 + self.tolerance)

    def result(self, ended: Ended) -> Bracket:
        return Bracket(self.low, self.high, ended, tuple(self.undecided))


def bracket(ask: Ask, start: float, tolerance: float) -> Bracket:
    """Search from ``start`` > 0 on, for ends whose ratio is at most 1 + ``tolerance``."""
    assert start > 0, "a load is positive"
    assert tolerance > 0, "a bracket has a width"
    search = _Search(ask, tolerance)
    outcome = search.try_load(start * IDLE_SHARE)
    if outcome is None:
        return search.result("budget")
    if outcome == "misses":
        return search.result("unattainable")
    load = start
    while search.high is None:
        if load > start * MOST_GROWTH:
            return search.result("unbounded")
        if search.try_load(load) is None:
            return search.result("budget")
        load *= 2
    return _narrowed(search)


def _narrowed(search: _Search) -> Bracket:
    """Halve until the ends are near to each other, or to what is undecided between them."""
    if search.low is None:  # an idle system neither meets nor misses: its TTFT is the bound
        return search.result("undecided")
    while not search.is_narrow and (load := search.next_load()) is not None:
        if search.try_load(load) is None:
            return search.result("budget")
    return search.result("decided" if search.is_narrow else "undecided")
