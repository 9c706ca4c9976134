"""The TOML form of a scenario, whole: the file, its tables, and ``--set`` overrides.

Quantities with a unit are text ("100gbit", "0.8ms", "0.1%", "256KiB") and become base units here.
A key that is not listed is an error that names the nearest one. No path is opened here except the
scenario file itself. Keys and defaults are those of ``harness.scenario_tables``.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from harness.core import ScenarioError
from harness.datafile import explain, printable, read_text_file
from harness.scenario_tables.decisions import (
    DeploymentTable,
    PrefixCacheTable,
    SchedulingTable,
)
from harness.scenario_tables.engines import EngineTable
from harness.scenario_tables.faults import FaultsTable
from harness.scenario_tables.machinery import (
    FabricTable,
    GatewayTable,
    LinkTable,
    ScaleTable,
    TestbedTable,
    TransportTable,
)
from harness.scenario_tables.nodes import NodeTable
from harness.scenario_tables.offered import (
    ARRIVAL_KEYS,
    OPEN_LOOP_KEYS,
    CostTable,
    HardwareTable,
    LoadTable,
    ModelTable,
    PrefixTable,
    SloTable,
    WorkloadTable,
)
from harness.scenario_tables.serving import ServingTable
from harness.scenario_tables.table import Table

MAX_OVERRIDES = 1000


class ScenarioFile(Table):
    """A whole scenario file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    model: ModelTable
    hardware: Annotated[dict[str, HardwareTable], Field(min_length=1, max_length=16)]
    workload: WorkloadTable
    prefix: PrefixTable = Field(default_factory=PrefixTable)
    load: LoadTable
    slo: SloTable
    scale: ScaleTable = Field(default_factory=ScaleTable)
    link: LinkTable
    fabric: FabricTable = Field(default_factory=FabricTable)
    scheduling: SchedulingTable = Field(default_factory=SchedulingTable)
    prefix_cache: PrefixCacheTable = Field(default_factory=PrefixCacheTable)
    serving: ServingTable = Field(default_factory=ServingTable)
    transport: TransportTable = Field(default_factory=TransportTable)
    cost: CostTable = Field(default_factory=CostTable)
    deployments: Annotated[dict[str, DeploymentTable], Field(min_length=1, max_length=16)]
    engine: EngineTable = Field(default_factory=EngineTable)
    nodes: Annotated[dict[str, NodeTable], Field(max_length=1024)] = Field(default_factory=dict)
    testbed: TestbedTable = Field(default_factory=TestbedTable)
    gateway: GatewayTable = Field(default_factory=GatewayTable)
    faults: FaultsTable = Field(default_factory=FaultsTable)


def read_scenario_file(path: Path, overrides: Sequence[str]) -> ScenarioFile:
    """The file with ``KEY=VALUE`` overrides laid over it, validated.

    Raises ScenarioError for a missing file, a TOML error (with its line), an unknown key, a wrong
    unit or a value out of bounds; a key that came from an override is said to.
    """
    document, flags = read_scenario_document(path, overrides)

    def given_by(key: str) -> str:
        inside = [(f"{key}.", f"{name}.", flag) for name, flag in flags.items() if key]
        found = [flag for k, name, flag in inside if k.startswith(name) or name.startswith(k)]
        return f" (given by --set {found[-1]})" if found else ""

    try:
        return ScenarioFile.model_validate(document)
    except ValidationError as error:
        where = f"the scenario file {path}"
        raise ScenarioError(explain(error, ScenarioFile, where, given_by)) from error


def read_scenario_document(
    path: Path, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The file as TOML has it with overrides laid over, not validated; each flag by its key."""
    text = read_text_file(path, "scenario file")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"The scenario file {path} is not TOML: {error}.") from error
    except (RecursionError, ValueError) as error:  # nested too deep; an integer of > 4300 digits
        raise ScenarioError(f"The scenario file {path} is not usable TOML: {error}.") from error
    return document, _override(document, overrides)


class _WorkloadSettings(Table):
    workload: WorkloadTable


def read_workload_settings(settings: Sequence[str]) -> WorkloadTable:
    """``KEY=VALUE`` of workload keys by themselves, validated; ScenarioError as for a file."""
    document: dict[str, Any] = {"workload": {}}
    _override(document, settings)
    try:
        return _WorkloadSettings.model_validate(document).workload
    except ValidationError as error:
        raise ScenarioError(explain(error, _WorkloadSettings, "the settings given")) from error


def _override(document: dict[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Lay ``overrides`` over ``document``; returns each flag as given by its dotted key.

    ``link.profile`` and ``link.file`` replace the scenario's whole link, whose keys would else win
    over theirs, and ``load.concurrency`` its arrivals, which a closed loop has none of.
    """
    if len(overrides) > MAX_OVERRIDES:
        raise ScenarioError(f"At most {MAX_OVERRIDES} --set flags are read, not {len(overrides)}.")
    keys = {flag.partition("=")[0].strip() for flag in overrides}
    if keys & {"link.profile", "link.file"}:
        document["link"] = {}
    if "load.concurrency" in keys:
        for name, closed in (("load", OPEN_LOOP_KEYS), ("workload", ARRIVAL_KEYS)):
            if isinstance(table := document.get(name), dict):
                document[name] = {key: table[key] for key in table if key not in closed}
    flags: dict[str, str] = {}
    for flag in overrides:
        key, separator, value = flag.partition("=")
        steps = [step.strip() for step in key.split(".")]
        if not separator or not all(steps):
            raise ScenarioError(
                f"--set {printable(flag)!r} is not KEY=VALUE with a dotted key, for example "
                "--set workload.cv=2."
            )
        table = document
        for depth, step in enumerate(steps[:-1], start=1):
            inner = table.setdefault(step, {})
            if not isinstance(inner, dict):
                raise ScenarioError(
                    f"--set {printable(flag)}: {printable('.'.join(steps[:depth]))!r} is a value, "
                    f"not a table, so it holds no key {printable(steps[depth])!r}."
                )
            table = inner
        table[steps[-1]] = _value(value)
        flags[".".join(steps)] = printable(flag)
    return flags


def _value(text: str) -> Any:  # Any: whatever TOML can hold
    """``text`` as a TOML value, else as the string it is."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (RecursionError, ValueError):  # TOMLDecodeError is a ValueError
        return text.strip()
    return parsed["value"] if len(parsed) == 1 else text.strip()
