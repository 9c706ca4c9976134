"""Visits points round by round until each is known well enough, or the budget has been spent.

A point where requests fail is given up after FAILURES of them, with the reason; a server that does
not answer at all ends the session. What was measured so far is kept either way.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Protocol

from harness.core import EngineError
from harness.profiler.plan import Cell, Kind, order_of_round, unfinished, visits_left
from harness.profiler.samples import Sample, SampleFile
from harness.profiler.target import Target

FAILURES = 2
#: Visits without a sample that can be used.
FRUITLESS = 3


class Visit(Protocol):
    """Measures one point once."""

    async def __call__(self, cell: Cell, visit: int, *, is_first: bool) -> list[Sample]: ...


#: Told where a session stands: the point, visits made, visits still asked for.
Progress = Callable[[Cell | None, int, int], None]


@dataclass(slots=True)
class Campaign:
    """One session over some cells. ``deadline_s`` is of ``time.monotonic``."""

    target: Target
    cells: Sequence[Cell]
    visits: Mapping[Kind, Visit]
    file: SampleFile
    bound: float
    seed: int
    session: int
    deadline_s: float
    progress: Progress
    #: Points that cannot be measured, and why.
    given_up: dict[Cell, str] = field(default_factory=dict)
    _values: dict[Cell, list[float]] = field(default_factory=dict)
    _failures: dict[Cell, int] = field(default_factory=dict)
    _fruitless: dict[Cell, int] = field(default_factory=dict)
    _warmed: set[Cell] = field(default_factory=set)

    async def run(self) -> None:
        """Until every cell is done, or time is up."""
        self._values = visit_means(self.file.samples, self.cells)
        number = 0
        while todo := self._todo():
            for cell in order_of_round(todo, self.seed, 10_000 * self.session + number):
                if time.monotonic() >= self.deadline_s:
                    return
                await self._visit(cell)
                self._tell(cell)
            number += 1
        self._tell(None)

    def _todo(self) -> tuple[Cell, ...]:
        cells = [cell for cell in self.cells if cell not in self.given_up]
        return unfinished(cells, self._values, self.bound)

    def _tell(self, cell: Cell | None) -> None:
        cells = [one for one in self.cells if one not in self.given_up]
        done = sum(map(len, self._values.values()))
        self.progress(cell, done, visits_left(cells, self._values, self.bound))

    async def _visit(self, cell: Cell) -> None:
        visit = 1 + max((s.visit for s in self.file.samples if s.cell == cell), default=-1)
        try:
            samples = await self.visits[cell.kind](cell, visit, is_first=cell not in self._warmed)
        except EngineError as error:
            await self._failed(cell, visit, str(error))
            return
        self._warmed.add(cell)
        for sample in samples:
            self.file.add(sample)
        used = [one.value_s for one in samples if one.used and one.value_s is not None]
        if used:
            self._values[cell].append(fmean(used))
            return
        self._fruitless[cell] = self._fruitless.get(cell, 0) + 1
        if self._fruitless[cell] >= FRUITLESS:
            self.given_up[cell] = samples[-1].unused_because or "no sample could be used"

    async def _failed(self, cell: Cell, visit: int, why: str) -> None:
        self.file.add(
            Sample(
                **asdict(cell),
                session=self.session,
                visit=visit,
                used=False,
                unused_because=f"failed: {why}",
                value_s=None,
                unix_s=time.time(),
                mono_ns=time.monotonic_ns(),
            )
        )
        await self.target.info()  # EngineError if nothing is there any more
        self._failures[cell] = self._failures.get(cell, 0) + 1
        if self._failures[cell] >= FAILURES:
            self.given_up[cell] = why


def visit_means(samples: Sequence[Sample], cells: Sequence[Cell]) -> dict[Cell, list[float]]:
    """The mean of every visit's used samples, by cell, in the order in which they were made."""
    wanted = set(cells)
    groups: dict[Cell, dict[tuple[int, int], list[float]]] = {cell: {} for cell in cells}
    for one in samples:
        cell = one.cell
        if cell in wanted and one.used and one.value_s is not None:
            groups[cell].setdefault((one.session, one.visit), []).append(one.value_s)
    return {cell: [fmean(group) for group in visits.values()] for cell, visits in groups.items()}
