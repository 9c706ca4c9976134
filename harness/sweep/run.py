"""A sweep from its file to its summary: what is there already is not run again.

The manifest says what was asked, by which code, and each session that ran cells of it. Whatever
ends a session, the cells that had ended by then are in the results.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from harness.core import ScenarioError
from harness.machine import describe_machine, describe_versions
from harness.record.run_directory import json_bytes, write_atomically
from harness.sweep.cells import Cell
from harness.sweep.code import describe_code, differences
from harness.sweep.file import ReadSweep
from harness.sweep.local import Pool
from harness.sweep.results import SCHEMA_VERSION, PartWriter, Row, SweepFolder, cell_row
from harness.sweep.summary import sweep_summary

#: Cells that are there, of all, and how many of them have no result.
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """A sweep as it is to be run."""

    sweep: ReadSweep
    overrides: tuple[str, ...]
    cells: tuple[Cell, ...]
    #: In words: how many workers, or which Ray cluster.
    runs_on: str


def run_sweep(
    asked: Asked,
    folder: SweepFolder,
    pool: AbstractContextManager[Pool],
    progress: Progress,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the cells that are not in ``folder`` yet; the summary, which is also written there.

    ScenarioError where the folder's cells are of other code, or another process writes to it.
    """
    begun_s = time.monotonic()
    with folder.alone():
        rows = _kept(asked, folder, say)
        left = [cell for cell in asked.cells if cell.cell_id not in rows]
        log = _Log(asked, folder, len(asked.cells) - len(left))
        log.write("running")
        status = "interrupted"
        try:
            if left:
                _run(left, rows, folder, pool, progress)
            status = "finished"
        finally:
            log.write(status)
        summary = {
            "sweep": asked.sweep.name,
            "scenario": str(asked.sweep.scenario_path),
            "folder": str(folder.path),
            "transfer": asked.sweep.file.transfer,
            "num_resumed": len(asked.cells) - len(left),
            **sweep_summary(asked.cells, rows),
            "wall_s": time.monotonic() - begun_s,
        }
        write_atomically(folder.summary_path, json_bytes(summary))
    return summary


def _kept(asked: Asked, folder: SweepFolder, say: Callable[[str], None]) -> dict[str, Row]:
    """Rows of the sweep's cells that are there; those that were lost are tried again."""
    if not folder.manifest_path.exists():
        return {}
    manifest = folder.read_manifest()
    if different := differences(manifest["code"], describe_code()):
        raise ScenarioError(
            f"The cells in {folder.path} were simulated by other code: {different}. Start a new "
            "folder, since figures of both would not be comparable."
        )
    folder.check_cells()
    rows, unread = folder.read_rows()
    for part, why in unread.items():
        moved = folder.set_aside(part)
        say(f"{part} is damaged and was moved to {moved}; its cells are run again: {why}")
    if manifest["sessions"] and manifest["sweep"]["sha256"] != asked.sweep.sha256:
        say(f"{asked.sweep.where} has changed since; cells that are the same are kept.")
    known = {cell.cell_id for cell in asked.cells}
    return {key: row for key, row in rows.items() if key in known and row["status"] != "lost"}


def _run(
    cells: Sequence[Cell],
    rows: dict[str, Row],
    folder: SweepFolder,
    pool: AbstractContextManager[Pool],
    progress: Progress,
) -> None:
    """Adds the cells' rows to ``rows`` as they come."""
    by_id = {cell.cell_id: cell for cell in cells}
    total = len(rows) + len(cells)
    without = sum(row["status"] != "completed" for row in rows.values())
    progress(len(rows), total, without)
    with PartWriter(folder) as writer, pool as run:
        for outcome in run(cells):
            row = cell_row(by_id[outcome.cell_id], outcome)
            writer.add(row)
            rows[outcome.cell_id] = row
            without += outcome.status != "completed"
            progress(len(rows), total, without)
    assert len(rows) == total, "every cell has an outcome"


class _Log:
    """The manifest, and this session in it."""

    def __init__(self, asked: Asked, folder: SweepFolder, num_resumed: int) -> None:
        self._folder = folder
        earlier = folder.read_manifest()["sessions"] if folder.manifest_path.exists() else []
        session = {
            "started_utc": datetime.now(UTC).isoformat(),
            "runs_on": asked.runs_on,
            "num_resumed": num_resumed,
            "machine": describe_machine(),
            "versions": describe_versions(),
        }
        self._manifest: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "sweep": {"path": str(asked.sweep.path), "sha256": asked.sweep.sha256},
            "scenario": str(asked.sweep.scenario_path),
            "set": list(asked.overrides),
            "transfer": asked.sweep.file.transfer,
            "num_cells": len(asked.cells),
            "code": describe_code(),
            "sessions": [*earlier, session],
        }

    def write(self, status: str) -> None:
        """``running``, then ``finished`` or ``interrupted``."""
        self._manifest["sessions"][-1]["status"] = status
        self._folder.write_manifest(self._manifest)
