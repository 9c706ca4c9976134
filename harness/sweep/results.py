"""The results of a sweep: a folder with one Parquet dataset, a part written whole or not at all.

    manifest.json       what was asked, by which code and where it ran
    cells/*.parquet     one row a cell, in the order in which cells ended
    summary.json, report.html       once all cells are there
    damaged/            parts that a resumed sweep could not read

A part is written beside its name and renamed, so that whoever reads ``cells`` while the sweep
runs, or after it was killed, reads whole parts. A part is written once ``FLUSH_CELLS`` cells have
ended, or ``FLUSH_S`` after the first of them when the next one ends; SIGKILL loses what is in none.
Of a cell that is there twice the later part counts.
"""

import fcntl
import itertools
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from harness.core import ScenarioError
from harness.datafile import printable
from harness.record.run_directory import json_bytes, write_atomically
from harness.sweep.cells import Cell
from harness.sweep.execution import Outcome

SCHEMA_VERSION = 1
FLUSH_CELLS, FLUSH_S = 256, 2.0
_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
STAGES = ("prfaas_prefill", "pd_prefill", "pd_decode", "link", "fabric")


def _columns(kind: pa.DataType, names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, kind) for name in names.split()]


COLUMNS: list[tuple[str, pa.DataType]] = [
    *_columns(_TEXT, "cell_id deployment"),
    ("seed", _INT),
    *_columns(_TEXT, "settings"),  # a JSON object: scenario key to value
    ("transfer", pa.bool_()),
    *_columns(_TEXT, "status reason"),
    *_columns(_INT, "threshold_tokens num_prfaas num_prefill num_decode num_gpus"),
    *_columns(_INT, "num_planned num_completed num_failed"),
    *_columns(_FLOAT, "ttft_mean_s ttft_p50_s ttft_p90_s ttft_p99_s"),
    *_columns(_TEXT, "ttft_p99_reason"),
    *_columns(_FLOAT, "ttft_mean_completed_s ttft_p50_completed_s ttft_p90_completed_s"),
    *_columns(_FLOAT, "ttft_p99_completed_s effective_samples throughput_req_per_s"),
    *_columns(_FLOAT, "carried_req_per_s"),
    *_columns(_FLOAT, " ".join(f"utilisation_{stage}" for stage in STAGES)),
    *_columns(_FLOAT, "lambda_max_req_per_s lambda_max_exact_req_per_s fitting_load_scale"),
    *_columns(_FLOAT, "crossed_bytes cost_per_hour"),
    *_columns(_TEXT, "cost_unit"),
    ("notes", pa.list_(_TEXT)),
    *_columns(_FLOAT, "wall_s cpu_s"),
    *_columns(_TEXT, "host"),
]
SCHEMA = pa.schema(
    COLUMNS, metadata={"prfaas_table": "cells", "prfaas_schema_version": str(SCHEMA_VERSION)}
)
Row = dict[str, Any]
#: What is never null: of any cell, and by how it ended.
_OF_CELL = ("cell_id", "deployment", "seed", "settings", "transfer")
_COUNTS = ("num_gpus", "num_planned", "num_completed", "num_failed", "carried_req_per_s")
_NEEDED = {"completed": _COUNTS, "failed": ("reason",), "lost": ("reason",)}
_PART = re.compile(r"part-[0-9]{6,12}\.parquet")


class _SweepFile(msgspec.Struct):
    path: str
    sha256: str


class _Manifest(msgspec.Struct):
    """Of ``manifest.json`` what a sweep that goes on reads; msgspec, since a manifest is bytes that
    are checked and given back as they are."""

    schema_version: Literal[1]
    sweep: _SweepFile
    code: dict[str, str]
    sessions: list[dict[str, Any]]


def cell_row(cell: Cell, outcome: Outcome) -> Row:
    """A row of the table; what a cell does not have is null."""
    known = {
        "cell_id": cell.cell_id,
        "deployment": cell.deployment,
        "seed": cell.seed,
        "settings": json.dumps(dict(cell.settings), allow_nan=False, ensure_ascii=False),
        "transfer": cell.transfer,
        "status": outcome.status,
        "reason": outcome.reason,
        **outcome.figures,
    }
    return {name: known.get(name) for name, _ in COLUMNS}


class SweepFolder:
    """Paths inside the folder of one sweep, and what is read and written whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new or empty folder. ScenarioError where something is in it already."""
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if folder.manifest_path.exists() and (path / "cells").is_dir():
                raise ScenarioError(
                    f"{path} already holds a sweep; go on with it by --resume {path}, or name "
                    "another folder by --out."
                )
            if any(path.iterdir()):
                raise ScenarioError(
                    f"The folder {path} is not empty, and a sweep would mix with what is in it; "
                    "name a new or empty one by --out."
                )
            (path / "cells").mkdir()
        except OSError as error:
            raise ScenarioError(
                f"cannot make the folder {path}: {error.strerror}. Name one that can be written."
            ) from error
        return folder

    @classmethod
    def existing(cls, path: Path) -> Self:
        """The folder of a sweep that was begun. ScenarioError where it is none."""
        folder = cls(path)
        if not (path / "cells").is_dir() or not folder.manifest_path.is_file():
            raise ScenarioError(
                f"--resume {path} is no folder of a sweep (it has no manifest.json and cells/)."
            )
        return folder

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    def parts(self) -> list[Path]:
        """Parts in the order in which they were written; unfinished ones have another name."""
        found = [one for one in (self.path / "cells").iterdir() if _PART.fullmatch(one.name)]
        return sorted(found, key=part_number)

    def check_cells(self) -> None:
        """ScenarioError for what is among the parts and was not written by a sweep: whoever reads
        ``cells`` as one table would read it too, hidden files excepted."""
        for one in sorted((self.path / "cells").iterdir()):
            if not one.name.startswith((".", "_")) and not _PART.fullmatch(one.name):
                raise ScenarioError(
                    f"{printable(str(one))} is no part of this sweep (part-000000.parquet and so "
                    "on); move it out of that folder."
                )

    def set_aside(self, part: Path) -> Path:
        """Move a part out of ``cells``, which could not be read as one table with it."""
        folder = self.path / "damaged"
        try:
            folder.mkdir(exist_ok=True)
            names = (f"{part.name}.{count}" for count in itertools.count(1))
            moved = next(folder / name for name in names if not (folder / name).exists())
            return part.rename(moved)
        except OSError as error:
            raise ScenarioError(
                f"cannot move the damaged {part} into {folder}: {error.strerror}. Move it out of "
                "cells/ by hand."
            ) from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """ScenarioError where another process is at work on the same sweep."""
        with (self.path / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ScenarioError(
                    f"Another process is running the sweep in {self.path}; wait for it, or end it."
                ) from error
            yield

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace ``manifest.json`` atomically."""
        write_atomically(self.manifest_path, json_bytes(manifest))

    def read_manifest(self) -> dict[str, Any]:
        """ScenarioError where it is not one that a sweep wrote."""
        try:
            content = self.manifest_path.read_bytes()
            msgspec.json.decode(content, type=_Manifest)
            manifest: dict[str, Any] = msgspec.json.decode(content)
        except msgspec.ValidationError as error:
            raise ScenarioError(
                f"{self.manifest_path} is no manifest of a sweep of version {SCHEMA_VERSION} "
                f"({printable(str(error))}); start a new folder."
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            why = printable(str(error))
            raise ScenarioError(
                f"cannot read {self.manifest_path}: {why}; start a new folder."
            ) from error
        return manifest

    def read_rows(self) -> tuple[dict[str, Row], dict[Path, str]]:
        """Rows by cell id, and why for each part that cannot be read and is left out."""
        rows: dict[str, Row] = {}
        unread = {}
        for path in self.parts():
            try:
                # Arrow's own file: one of its threads drops it, which with a file of Python aborts
                # a process that is just ending.
                with pa.OSFile(str(path), "rb") as file:
                    table = pq.read_table(file)
            except (OSError, pa.ArrowException) as error:
                unread[path] = printable(str(error))
                continue
            if not table.schema.equals(SCHEMA) or table.schema.metadata != SCHEMA.metadata:
                raise ScenarioError(
                    f"{path} is no table of cells of version {SCHEMA_VERSION}; start a new folder."
                )
            try:
                found: list[Row] = table.to_pylist()
            except UnicodeDecodeError as error:
                unread[path] = str(error)
                continue
            if why := next(filter(None, map(_row_fault, found)), None):
                unread[path] = why
                continue
            rows |= {row["cell_id"]: row for row in found}
        return rows, unread


def part_number(part: Path) -> int:
    """Of a part's name."""
    return int(part.stem.partition("-")[2])


def _row_fault(row: Row) -> str | None:
    """What a row lacks that ``cell_row`` gives every one, or has that it gives none."""
    status = row["status"]
    if status not in _NEEDED:
        return f"a row has the status {printable(str(status))!r}"
    for name in (*_OF_CELL, *_NEEDED[status]):
        if row[name] is None:
            return f"a row that is {status} has no {name}"
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"a row has the value {value} of {name}"
    return None


class PartWriter:
    """Context manager: gathers rows into parts; whatever happens, what was gathered is written."""

    def __init__(self, folder: SweepFolder) -> None:
        self._folder = folder
        self._rows: list[Row] = []
        self._first_s = 0.0  # when the first of them came
        written = folder.parts()
        self._number = part_number(written[-1]) + 1 if written else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._flush()

    def add(self, row: Row) -> None:
        """One more row; now and then a part."""
        now_s = time.monotonic()
        if not self._rows:
            self._first_s = now_s
        self._rows.append(row)
        if len(self._rows) >= FLUSH_CELLS or now_s - self._first_s >= FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        buffer = pa.BufferOutputStream()
        table = pa.Table.from_pylist(self._rows, schema=SCHEMA)
        pq.write_table(table, buffer, compression="zstd")
        path = self._folder.path / "cells" / f"part-{self._number:06d}.parquet"
        write_atomically(path, buffer.getvalue().to_pybytes())
        self._rows = []
        self._number += 1


def new_folder(name: str) -> Path:
    """Where a sweep goes that was given no folder."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{stamp}-{name}-sweep"
