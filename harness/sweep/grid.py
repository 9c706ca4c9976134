"""Which settings a sweep file asks for: its points, each a mapping of scenario keys to values.

    points = rows of the list (one empty row without) x product of the grid's values

in the order of the file, the last key of the grid fastest. A key may be written dotted, quoted or
as a table; it may be given in one place only, and no key inside a table that another one replaces.
A key is dotted bare names, since --set would read another key from " a.b " or "a.b=1 #".
"""

import datetime
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core import ScenarioError
from harness.datafile import printable
from harness.sweep.file import ReadSweep

SEED_KEY = "load.seed"
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """What varies at this point (``settings``), and all of it as ``--set`` takes it."""

    settings: Settings
    overrides: tuple[str, ...]


def points(sweep: ReadSweep, overrides: Sequence[str] = ()) -> tuple[Point, ...]:
    """Every point; ``overrides`` are the ``KEY=VALUE`` of the command line, laid over ``set``.

    ScenarioError for a key in two places, a grid without values, or too many cells.
    """
    fixed = _flat(sweep.file.set, "set", sweep.where)
    grid = _flat(sweep.file.grid, "grid", sweep.where)
    rows = [_flat(row, f"list[{at}]", sweep.where) for at, row in enumerate(sweep.file.list)] or [
        {}
    ]
    _check_values(grid, rows, sweep.where)
    _check_places(sweep, overrides, fixed, grid, rows)
    _check_count(sweep, len(rows) * math.prod(len(values) for values in grid.values()))
    constant = (*(override(key, fixed[key], sweep.where) for key in fixed), *overrides)
    return tuple(
        Point(
            settings,
            (*constant, *(override(key, settings[key], sweep.where) for key in settings)),
        )
        for settings in _settings(grid, rows)
    )


def override(key: str, value: Any, where: str) -> str:
    """``key = value`` of a TOML file as the ``KEY=VALUE`` of ``--set``."""
    return f"{key}={_toml(value, key, where)}"


def setting_text(value: Any) -> str:
    """A value as people read it in a table."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings in one line; without any the scenario is as its file has it."""
    listed = ", ".join(f"{key} = {setting_text(value)}" for key, value in settings.items())
    return listed or "as the scenario has it"


def _settings(grid: Mapping[str, list[Any]], rows: Sequence[Settings]) -> Iterator[Settings]:
    for row in rows:
        for values in itertools.product(*grid.values()):
            yield {**row, **dict(zip(grid, values, strict=True))}


def _flat(table: Mapping[str, Any], place: str, where: str, before: str = "") -> Settings:
    """Nested tables as dotted keys; an empty table would be without effect."""
    if not table and before:
        raise ScenarioError(f"'{place}.{before[:-1]}' in {where} is an empty table; remove it.")
    found: Settings = {}
    for key, value in table.items():
        name = f"{before}{key}"
        if not _KEY.fullmatch(key):
            raise ScenarioError(
                f"'{place}.{printable(name)}' in {where} is no key: give names of letters, digits, "
                "_ and -, with dots between them, for example workload.cv."
            )
        inner = _flat(value, place, where, f"{name}.") if isinstance(value, dict) else {name: value}
        if twice := next((one for one in inner if one in found), None):
            raise ScenarioError(f"'{place}.{printable(twice)}' is in {where} twice; keep one.")
        found |= inner
    return found


def _check_values(grid: Settings, rows: Sequence[Settings], where: str) -> None:
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ScenarioError(
                f"The value of 'grid.{printable(key)}' in {where} is wrong: give a list of at "
                f"least one value, for example {printable(key)} = [1, 2]; what is the same for "
                "all cells stands in [set]."
            )
    for at, row in enumerate(rows):
        if not row and len(rows) > 1:
            raise ScenarioError(
                f"'list[{at}]' in {where} sets nothing; give it a key of the scenario, or remove "
                "it."
            )


def _check_places(
    sweep: ReadSweep,
    overrides: Sequence[str],
    fixed: Settings,
    grid: Settings,
    rows: Sequence[Settings],
) -> None:
    """A key that is set twice would have a value that depends on the order of the file."""
    places = dict.fromkeys(fixed, "set")
    # What is the same for all cells the command line may override.
    places |= {_flag_key(flag): "--set" for flag in overrides}
    of_seeds = {SEED_KEY: "seeds"} if sweep.file.seeds is not None else {}
    listed = dict.fromkeys(key for row in rows for key in row)
    for place, keys in (("grid", grid), ("list", listed), ("seeds", of_seeds)):
        for key in keys:
            for other, there in places.items():
                if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                    same = "" if key == other else f" ({printable(other)!r})"
                    raise ScenarioError(
                        f"The key {printable(key)!r} in {sweep.where} is given by {place} and by "
                        f"{there}{same}; keep one of them."
                    )
        places |= dict.fromkeys(keys, place)


def _flag_key(flag: str) -> str:
    """The key of ``KEY=VALUE``, whose names may have spaces around them."""
    return ".".join(name.strip() for name in flag.partition("=")[0].split("."))


def _check_count(sweep: ReadSweep, num_points: int) -> None:
    seeds, deployments = sweep.file.seeds or (None,), sweep.file.deployments or (None,)
    check_cells(sweep, num_points * len(seeds) * len(deployments))


def check_cells(sweep: ReadSweep, count: int) -> None:
    """ScenarioError for more cells than the file allows."""
    if count > sweep.file.max_cells:
        raise ScenarioError(
            f"'max_cells' in {sweep.where} is {sweep.file.max_cells:,}, but grid, list, seeds and "
            f"deployments make {count:,} cells or more. Take values out, or raise max_cells."
        )


def _toml(value: Any, key: str, where: str) -> str:
    """A value that TOML gave, as TOML on one line."""
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for this one control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(_toml(one, key, where) for one in value)}]"
    if isinstance(value, dict):
        pairs = (
            f"{json.dumps(k, ensure_ascii=False)} = {_toml(v, key, where)}"
            for k, v in value.items()
        )
        return f"{{{', '.join(pairs)}}}"
    assert isinstance(value, datetime.datetime | datetime.date | datetime.time), "TOML has no more"
    raise ScenarioError(
        f"The value of {printable(key)!r} in {where} is a date or a time of day, which no key of a "
        'scenario is; a duration is text with a unit, for example "0.8ms".'
    )
