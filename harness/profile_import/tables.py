"""Tables of costs, CSV with a header or a JSON array of objects, as points of a profile.

    prefill    new_tokens, cached_tokens (0 where there is none), and one of the times below
    decode     batch, context_tokens, and one of the times below

A time column has its unit in its name: ``prefill_s``, ``prefill_ms``, ``ttft_s``, ``ttft_ms`` and
``step_s``, ``step_ms``, ``tpot_s``, ``tpot_ms``. ``provenance`` and ``source`` may be columns too,
else they are the same for the whole table. The order of rows means nothing; other columns are not
read. Every error names the row and the column.
"""

import csv
import difflib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from harness.core import ScenarioError
from harness.datafile import nearest, printable, read_text_file, shortened, unique_keys
from harness.profile import MAX_TOKENS, DecodePoint, PrefillPoint, Provenance

MAX_ROWS = 20_000
MAX_BATCH = 100_000
MAX_S = 1e6

#: Time columns of each kind of table and the seconds in one of their units.
PREFILL_TIMES = {"prefill_s": 1.0, "prefill_ms": 1e-3, "ttft_s": 1.0, "ttft_ms": 1e-3}
DECODE_TIMES = {"step_s": 1.0, "step_ms": 1e-3, "tpot_s": 1.0, "tpot_ms": 1e-3}
PROVENANCES: dict[str, Provenance] = {kind: kind for kind in get_args(Provenance)}
_KNOWN = ("provenance", "source")
COLUMNS = (
    "new_tokens",
    *PREFILL_TIMES,
    "batch",
    "context_tokens",
    *DECODE_TIMES,
    "cached_tokens",
    *_KNOWN,
)


@dataclass(frozen=True, slots=True)
class TableReading:
    """How to read a table: ``columns`` maps our names to the table's, ``where`` keeps the rows with
    these values, ``provenance`` and ``source`` are of rows that do not say themselves."""

    provenance: Provenance
    source: str
    columns: Mapping[str, str]
    where: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in COLUMNS:
                near = nearest(name, list(COLUMNS))
                hint = f"did you mean {near!r}? " if near else ""
                raise ScenarioError(
                    f"There is no column {printable(name)!r} to map: {hint}The columns are "
                    f"{', '.join(COLUMNS)}."
                )


def read_prefill_table(path: Path, reading: TableReading) -> tuple[PrefillPoint, ...]:
    """Prefill points by (cached, new) tokens; ScenarioError names row and column."""
    table = _Table(path, reading, PREFILL_TIMES, ("cached_tokens", *_KNOWN))
    found: dict[tuple[int, int], tuple[_Row, PrefillPoint]] = {}
    for row in table.rows:
        new = table.whole(row, "new_tokens", 1, MAX_TOKENS)
        cached = 0
        if table.has("cached_tokens"):
            cached = table.whole(row, "cached_tokens", 0, MAX_TOKENS)
        point = PrefillPoint(new, cached, table.seconds(row), *table.known(row))
        if (cached, new) in found:
            raise table.twice(
                row, found[cached, new][0], f"{new} new tokens with {cached} cached ones"
            )
        found[cached, new] = (row, point)
    ordered = [found[key] for key in sorted(found)]
    for (early, before), (late, after) in pairwise(ordered):
        if before.cached_tokens == after.cached_tokens and after.prefill_s < before.prefill_s:
            raise table.wrong(
                late,
                table.time,
                f"{after.prefill_s:g} s at {after.new_tokens} new tokens is less than the "
                f"{before.prefill_s:g} s at {before.new_tokens} in {early.label}. A longer prefill "
                "never takes less time: measure again, or leave one of the rows out",
            )
    return tuple(point for _, point in ordered)


def read_decode_table(path: Path, reading: TableReading) -> tuple[DecodePoint, ...]:
    """Decode points by (batch, context); ScenarioError names row and column."""
    table = _Table(path, reading, DECODE_TIMES, _KNOWN)
    found: dict[tuple[int, int], tuple[_Row, DecodePoint]] = {}
    for row in table.rows:
        batch = table.whole(row, "batch", 1, MAX_BATCH)
        context = table.whole(row, "context_tokens", 1, MAX_TOKENS)
        if (batch, context) in found:
            raise table.twice(
                row, found[batch, context][0], f"batch {batch} at {context} tokens of context"
            )
        point = DecodePoint(batch, context, table.seconds(row), *table.known(row))
        found[batch, context] = (row, point)
    return tuple(found[key][1] for key in sorted(found))


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    cells: Mapping[str, Any]


class _Table:
    """The rows of a file and the one time column among them."""

    def __init__(
        self,
        path: Path,
        reading: TableReading,
        times: Mapping[str, float],
        optional: tuple[str, ...],
    ) -> None:
        self._path = path
        self._reading = reading
        rows = _read_rows(path)
        self._header = list(dict.fromkeys(name for row in rows for name in row.cells))
        self._check_header(optional)
        present = [name for name in times if self._theirs(name) in self._header]
        if len(present) != 1:
            found = f"{' and '.join(map(repr, present))} are both there" if present else "none is"
            raise ScenarioError(
                f"The table {path} needs one time column of {', '.join(times)}, but {found}; its "
                f"columns are {', '.join(map(printable, self._header))}. Map a column with "
                f"--column {next(iter(times))}=NAME."
            )
        self.time = present[0]
        self._unit_s = times[self.time]
        self.rows = self._kept(rows)

    def has(self, name: str) -> bool:
        return self._theirs(name) in self._header

    def whole(self, row: _Row, name: str, least: int, most: int) -> int:
        """A whole number of ``row`` within bounds."""
        value = self._number(row, name)
        if value != math.floor(value) or not least <= value <= most:
            raise self.wrong(row, name, f"{value:g} is not a whole number from {least} to {most}")
        return int(value)

    def seconds(self, row: _Row) -> float:
        """The row's time, positive."""
        value = self._number(row, self.time) * self._unit_s
        if not 0 < value <= MAX_S:
            raise self.wrong(
                row, self.time, f"{value:g} s is not a time above 0 and up to {MAX_S:g} s"
            )
        return value

    def known(self, row: _Row) -> tuple[Provenance, str]:
        """Provenance and source of the row, the table's where it does not say."""
        provenance, source = self._reading.provenance, self._reading.source
        if self.has("provenance"):
            given = str(self._cell(row, "provenance"))
            if given not in PROVENANCES:
                raise self.wrong(
                    row, "provenance", f"{shortened(given)} is none of {', '.join(PROVENANCES)}"
                )
            provenance = PROVENANCES[given]
        if self.has("source"):
            source = str(self._cell(row, "source"))
        return provenance, source

    def wrong(self, row: _Row, name: str, what: str) -> ScenarioError:
        return ScenarioError(
            f"The table {self._path}, {row.label}, column {printable(self._theirs(name))!r}: "
            f"{what}."
        )

    def twice(self, row: _Row, first: _Row, what: str) -> ScenarioError:
        return ScenarioError(
            f"The table {self._path}, {row.label}: {what} are in {first.label} already; keep one, "
            "or choose among the rows with --where COLUMN=VALUE."
        )

    def _theirs(self, name: str) -> str:
        return self._reading.columns.get(name, name)

    def _check_header(self, optional: tuple[str, ...]) -> None:
        for name in optional:
            if self.has(name):
                continue
            if name in self._reading.columns:
                raise self._missing(name)
            if near := difflib.get_close_matches(name, self._header, n=1, cutoff=0.8):
                raise ScenarioError(
                    f"The table {self._path} has a column {printable(near[0])!r} but no {name!r}; "
                    f"rename it, or map it with --column {name}={printable(near[0])}."
                )
        for column in self._reading.where:
            if column not in self._header:
                raise self._missing(column)

    def _kept(self, rows: list[_Row]) -> list[_Row]:
        where = self._reading.where
        kept = [
            row
            for row in rows
            if all(_text(row.cells.get(name)) == value for name, value in where.items())
        ]
        if not kept:
            wanted = " and ".join(f"{name} = {value}" for name, value in where.items())
            raise ScenarioError(
                f"The table {self._path} has no row{f' with {printable(wanted)}' if where else ''}."
            )
        return kept

    def _missing(self, name: str) -> ScenarioError:
        hint = f" Map a column with --column {name}=NAME." if name in COLUMNS else ""
        return ScenarioError(
            f"The table {self._path} has no column {printable(self._theirs(name))!r}; its columns "
            f"are {', '.join(map(printable, self._header))}.{hint}"
        )

    def _cell(self, row: _Row, name: str) -> Any:  # Any: whatever JSON can hold
        if not self.has(name):
            raise self._missing(name)
        value = row.cells.get(self._theirs(name))
        if value is None or (isinstance(value, str) and not value.strip()):
            raise self.wrong(row, name, "there is no value")
        return value.strip() if isinstance(value, str) else value

    def _number(self, row: _Row, name: str) -> float:
        value = self._cell(row, name)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.wrong(row, name, f"{shortened(value)} is not a finite number")
        return number


def _text(value: Any) -> str:  # Any: whatever JSON can hold
    return "" if value is None else str(value).strip()


def _read_rows(path: Path) -> list[_Row]:
    text = read_text_file(path, "table")
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise ScenarioError(f"The table {path} must end in {' or '.join(_READERS)}.")
    rows = _READERS[suffix](path, text)
    if not 0 < len(rows) <= MAX_ROWS:
        raise ScenarioError(f"The table {path} has {len(rows)} rows; it needs 1 to {MAX_ROWS}.")
    return rows


def _read_csv(path: Path, text: str) -> list[_Row]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[_Row] = []
    try:
        header = [name.strip() for name in next(lines, [])]
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ScenarioError(f"The table {path} has two columns {printable(twice)!r}.")
        for cells in lines:
            if not cells:
                continue
            label = f"line {lines.line_num}"
            if len(cells) != len(header):
                raise ScenarioError(
                    f"The table {path}, {label} has {len(cells)} cells, but the header names "
                    f"{len(header)} columns."
                )
            rows.append(_Row(label, dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        raise ScenarioError(f"The table {path}, line {lines.line_num}: {error}.") from error
    return rows


def _read_json(path: Path, text: str) -> list[_Row]:
    try:
        content = json.loads(text, object_pairs_hook=unique_keys)
    except (RecursionError, ValueError) as error:
        raise ScenarioError(f"The table {path} is not usable JSON: {error}.") from error
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ScenarioError(f"The table {path} must be a JSON array of objects, one a row.")
    return [_Row(f"row {number}", row) for number, row in enumerate(content, start=1)]


_READERS = {".csv": _read_csv, ".json": _read_json}
