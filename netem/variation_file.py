"""Schedules from TOML (``netem.variation_tables``) and from CSV.

A CSV of measurements has a header with ``time`` and any of ``rate``, ``rtt``, ``delay``, ``jitter``
and ``loss``. A column's cells carry units ("9.7gbit"), or its name does (``rate_gbit``, ``rtt_ms``,
``loss_percent``) and the cells are numbers. A row holds until the next one, the last for good; an
empty cell leaves the link's own value.
"""

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from netem.datafile import MAX_FILE_BYTES, nearest, read_toml
from netem.link import LinkError
from netem.loss import IndependentLoss
from netem.units import parse_duration_s, parse_fraction, parse_rate_bytes_per_s
from netem.variation import Change, LinkSchedule, diurnal, microbursts, outage
from netem.variation_tables import MicroburstTable, Ways, check_variation

#: More rows than anybody measures in one file.
_MAX_ROWS = 200_000
#: How a quantity's unit is written in a column's name, where that is not as in a value.
_UNIT_NAMES = {"percent": "%"}
_MOST_BURSTS = 200_000


def read_schedule(path: Path, duration_s: float) -> LinkSchedule:
    """The schedule of a TOML or CSV file, what repeats in it for ``duration_s``.

    LinkError names the file, the key or the line, and what is right.
    """
    if path.suffix.lower() == ".csv":
        return LinkSchedule(read_measurements(path))
    return schedule_of(read_toml(path, "schedule"), f"the schedule {path}", duration_s, path.parent)


def schedule_of(
    variation: Mapping[str, Any], where: str, duration_s: float, folder: Path
) -> LinkSchedule:
    """The schedule of a [variation] table; ``folder`` is where its files' paths begin."""
    table = check_variation(variation, where)
    changes = [one.change(where) for one in table.change]
    changes += [outage(one.at, one.at + one.for_, one.direction) for one in table.outage]
    if table.diurnal is not None:
        changes += diurnal(table.diurnal.swing, table.diurnal.period, duration_s)
    if table.microburst is not None:
        changes += _bursts(table.microburst, where, duration_s)
    for one in table.measurements:
        changes += read_measurements(folder / one.file, one.direction)
    return LinkSchedule(tuple(changes))


def _bursts(table: MicroburstTable, where: str, duration_s: float) -> tuple[Change, ...]:
    if duration_s / table.every > _MOST_BURSTS:
        raise LinkError(
            f"[microburst] in {where} makes {duration_s / table.every:.0f} bursts, more than "
            f"{_MOST_BURSTS}; make 'every' longer."
        )
    return microbursts(
        table.depth, table.min_duration, table.max_duration, table.every, duration_s, table.seed
    )


_PARSERS: dict[str, Callable[[str], float]] = {
    "time": parse_duration_s,
    "rate": parse_rate_bytes_per_s,
    "rtt": parse_duration_s,
    "delay": parse_duration_s,
    "jitter": parse_duration_s,
    "loss": parse_fraction,
}


def read_measurements(path: Path, direction: Ways = "both") -> tuple[Change, ...]:
    """The rows of a CSV file as changes. LinkError names the file, the line and the column."""
    where = f"the measurements {path}"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise LinkError(f"The measurements {path} are larger than {MAX_FILE_BYTES} bytes.")
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [
                (reader.line_num, row) for reader in [csv.reader(file)] for row in reader if row
            ]
    except OSError as error:
        raise LinkError(f"The measurements {path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise LinkError(f"The measurements {path} are not usable CSV: {error}.") from error
    if len(rows) < 2 or len(rows) > _MAX_ROWS:
        raise LinkError(
            f"There must be a header and 1 to {_MAX_ROWS} rows in {where}, not {len(rows)} lines."
        )
    (_, header), *body = rows
    columns = [_column(name.strip(), where) for name in header]
    names = [name for name, _ in columns]
    if "time" not in names or len(set(names)) < len(names) or len(names) < 2:
        raise LinkError(
            f"The header of {where} must have 'time' and each other column once, not "
            f"{', '.join(header)}."
        )
    if "rtt" in names and (direction != "both" or "delay" in names):
        raise LinkError(
            f"The column 'rtt' of {where} is both delays; give 'delay' for one direction."
        )
    values = [_row(line, row, columns, where) for line, row in body]
    return _changes([line for line, _ in body], values, direction, where)


def _column(name: str, where: str) -> tuple[str, str]:
    """(quantity, unit) of a column; the unit is empty when the cells have theirs."""
    quantity, _, unit = name.partition("_")
    if quantity in _PARSERS:
        return quantity, _UNIT_NAMES.get(unit, unit)
    near = nearest(quantity, list(_PARSERS))
    hint = f"did you mean {near!r}? " if near else ""
    raise LinkError(
        f"Unknown column {name!r} in {where}: {hint}Columns: {', '.join(_PARSERS)}, each with its "
        "unit in the cells or as rate_gbit, rtt_ms, loss_percent."
    )


def _row(line: int, row: list[str], columns: list[tuple[str, str]], where: str) -> dict[str, float]:
    if len(row) != len(columns):
        raise LinkError(f"Line {line} of {where} has {len(row)} cells instead of {len(columns)}.")
    values = {}
    for cell, (quantity, unit) in zip(row, columns, strict=True):
        if not cell.strip():
            continue
        try:
            values[quantity] = _PARSERS[quantity](f"{cell.strip()}{unit}")
        except ValueError as error:
            raise LinkError(f"Line {line}, column {quantity!r} of {where}: {error}.") from error
    if "time" not in values:
        raise LinkError(f"Line {line} of {where} has no time.")
    return values


def _changes(
    lines: list[int], values: list[dict[str, float]], direction: Ways, where: str
) -> tuple[Change, ...]:
    changes = []
    ends_s = [later["time"] for later in values[1:]] + [math.inf]
    for line, one, end_s in zip(lines, values, ends_s, strict=True):
        if end_s <= one["time"]:
            raise LinkError(
                f"Line {line} of {where}: the next line is not later; times must ascend."
            )
        delay_s = one["rtt"] / 2 if "rtt" in one else one.get("delay")
        changes.append(
            Change(
                one["time"],
                end_s,
                direction,
                rate_bytes_per_s=one.get("rate"),
                delay_s=delay_s,
                jitter_s=one.get("jitter"),
                loss=IndependentLoss(one["loss"]) if "loss" in one else None,
            )
        )
    return tuple(changes)
