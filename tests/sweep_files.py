"""For the tests of sweeps: small sweep files of the case study, and what runs them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.sweep.cells import Cell, resolve_cells
from harness.sweep.execution import MEASURED, run_cell
from harness.sweep.file import read_sweep
from harness.sweep.local import local_pool
from harness.sweep.results import Row, SweepFolder, cell_row
from harness.sweep.run import Asked, run_sweep

ROOT = Path(__file__).parent.parent
CASE_STUDY = ROOT / "scenarios" / "paper-case-study.toml"
#: 4 loads x 2 CVs x 4 seeds x 2 deployments.
SIXTY_FOUR = """\
seeds = 4
deployments = ["prfaas_pd", "homogeneous_pd"]
[set]
load.num_requests = 200
[grid]
load.rate_req_per_s = [1.0, 1.27, 1.5, 1.8]
workload.cv = [1.0, 2.0]
"""
#: 2 loads x 2 seeds x 2 deployments, small.
EIGHT = """\
seeds = 2
deployments = ["prfaas_pd", "homogeneous_pd"]
[set]
load.num_requests = 100
[grid]
load.rate_req_per_s = [1.0, 1.5]
"""


def written(folder: Path, text: str = SIXTY_FOUR, name: str = "small.toml") -> Path:
    """A sweep file over the case study."""
    path = folder / name
    path.write_text(f'scenario = "{CASE_STUDY}"\n{text}')
    return path


def cells_of(path: Path, *overrides: str) -> tuple[Cell, ...]:
    return resolve_cells(read_sweep(path), overrides)


def serial(cells: tuple[Cell, ...]) -> dict[str, Row]:
    """What each cell gives in this process, one after another, by its id."""
    return {cell.cell_id: compared(cell_row(cell, run_cell(cell))) for cell in cells}


def compared(row: Row) -> Row:
    """Without what only that run of the cell has."""
    return {key: value for key, value in row.items() if key not in MEASURED}


def kept(folder: Path) -> dict[str, Row]:
    """The rows that a sweep has kept, by cell id."""
    rows, unread = SweepFolder(folder).read_rows()
    assert not unread
    return {key: compared(row) for key, row in rows.items()}


def silent(*_: object) -> None:
    """Nobody is told."""


def swept(
    path: Path, folder: Path, workers: int = 2, say: Callable[[str], None] = silent
) -> dict[str, Any]:
    """The sweep, run with so many local workers into a folder, new or begun."""
    sweep = read_sweep(path)
    asked = Asked(sweep, (), cells_of(path), f"{workers} workers")
    there = SweepFolder.existing(folder) if folder.exists() else SweepFolder.create(folder)
    return run_sweep(asked, there, local_pool(workers), silent, say)
