"""The TOML form of a sweep: a scenario, what varies of it, and the seeds.

    scenario = "paper-case-study.toml"      relative to the sweep file
    seeds = 4                               1 to 4; or a list, [1, 7, 9]
    deployments = ["prfaas_pd"]             all of the scenario's by default
    transfer = true                         as prfaas simulate without --no-transfer

    [set]                                   for all cells
    load.num_requests = 2000
    [grid]                                  every combination
    load.rate_req_per_s = [1.0, 1.5]
    workload.cv = [1, 2]
    [[list]]                                each row with each combination of the grid
    link.rate = "100gbit"

Keys below ``set``, ``grid`` and ``list`` are the scenario's, as ``--set`` takes them; whether each
exists and what it may be the scenario says (``harness.sweep.cells``).
"""

import builtins
import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from harness.core import ScenarioError
from harness.datafile import explain, printable, read_text_file
from harness.scenario_tables.table import Table
from harness.scenario_values import Name, PathText

MAX_SEEDS = 1000
#: More cells than this are held in no memory; a file may allow up to here.
MAX_CELLS = 100_000
_DEFAULT_CELLS = 10_000
#: Tables and lists inside one another; a scenario's are a handful.
_MAX_DEPTH = 32


def _seeds(value: Any) -> tuple[int, ...]:
    """N as 1 to N, a list as it is."""
    right = f"give a number from 1 to {MAX_SEEDS}, or a list of different whole numbers"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SEEDS:
        return tuple(range(1, value + 1))
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_SEEDS:
        raise ValueError(right)
    for one in value:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0 or value.count(one) > 1:
            raise ValueError(right)
    return tuple(value)


class SweepFile(Table):
    """A whole sweep file; without ``seeds`` the scenario's own is used."""

    scenario: PathText
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    seeds: Annotated[Any, AfterValidator(_seeds)] = None
    deployments: Annotated[builtins.list[Name], Field(min_length=1, max_length=16)] | None = None
    transfer: bool = True
    max_cells: Annotated[int, Field(ge=1, le=MAX_CELLS)] = _DEFAULT_CELLS
    """More cells than this are refused: a grid grows faster than one thinks."""
    set: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)
    list: Annotated[builtins.list[dict[str, Any]], Field(max_length=MAX_CELLS)] = Field(
        default_factory=builtins.list
    )


@dataclass(frozen=True, slots=True)
class ReadSweep:
    """The file's tables, where it lies, and the SHA-256 of its text."""

    path: Path
    sha256: str
    file: SweepFile

    @property
    def where(self) -> str:
        """As errors name it."""
        return f"the sweep file {self.path}"

    @property
    def name(self) -> str:
        """As folders and tables name it."""
        return self.file.name or self.path.stem

    @property
    def scenario_path(self) -> Path:
        return self.path.parent / self.file.scenario


def read_sweep(path: Path) -> ReadSweep:
    """The file, validated but for the scenario's keys.

    ScenarioError names the file, the key and the nearest valid one, or the line that is no TOML.
    """
    text = read_text_file(path, "sweep file")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"The sweep file {path} is not TOML: {error}.") from error
    except (RecursionError, ValueError) as error:  # nested too deep; an integer of > 4300 digits
        raise ScenarioError(f"The sweep file {path} is not usable TOML: {error}.") from error
    _check_depth(document, path)
    try:
        file = SweepFile.model_validate(document)
    except ValidationError as error:
        raise ScenarioError(explain(error, SweepFile, f"the sweep file {path}")) from error
    return ReadSweep(path=path, sha256=hashlib.sha256(text.encode()).hexdigest(), file=file)


def _check_depth(document: dict[str, Any], path: Path) -> None:
    """What is nested deeper than any scenario would end in a RecursionError further on."""
    left: list[tuple[str, Any, int]] = [(key, value, 1) for key, value in document.items()]
    while left:
        name, value, depth = left.pop()
        if depth > _MAX_DEPTH:
            raise ScenarioError(
                f"The key {printable(name)!r} in the sweep file {path} is nested more than "
                f"{_MAX_DEPTH} deep; no key of a scenario is."
            )
        if isinstance(value, dict):
            left += [(f"{name}.{key}", inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(name, inner, depth + 1) for inner in value]
