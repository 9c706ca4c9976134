"""Cells on the cores of this machine, one process a worker."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from harness.core import EngineError
from harness.cores import Cores
from harness.sweep.cells import Cell
from harness.sweep.execution import Outcome, failed, run_cell

#: What runs cells: outcomes as they come, in any order, each cell's once.
Pool = Callable[[Iterable[Cell]], Iterator[Outcome]]


@contextmanager
def local_pool(workers: int | None) -> Iterator[Pool]:
    """``workers`` processes, by default one for each core that this process may use."""
    with Cores(workers) as cores:

        def run(cells: Iterable[Cell]) -> Iterator[Outcome]:
            try:
                for cell, call in cores.ended(run_cell, cells):
                    error = call.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise error
                    yield call.result() if error is None else failed(cell.cell_id, error)
            except BrokenProcessPool as error:
                raise EngineError(
                    "A worker process died, as when the system is out of memory. The cells that "
                    f"had ended are kept; resume with fewer workers than {cores.workers}."
                ) from error

        yield run
