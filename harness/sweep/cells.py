"""The cells of a sweep: each point under each seed, for each deployment, resolved and checked.

    id = SHA-256 of {the scenario as resolved, with this deployment alone; its name; the options}

Paths are not in it, contents are: a cell keeps its id when files move, when points are added, when
another deployment changes, and loses it when anything changes that it is simulated from.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.core import ScenarioError
from harness.datafile import nearest, printable
from harness.scenario import Scenario, load_scenario, scenario_hash
from harness.settings import Faults
from harness.sweep.file import ReadSweep
from harness.sweep.grid import SEED_KEY, Point, check_cells, points, settings_text


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. ``scenario`` has this deployment alone; ``settings`` are what varies."""

    cell_id: str
    settings: Mapping[str, Any]
    deployment: str
    seed: int
    transfer: bool
    scenario: Scenario

    def label(self) -> str:
        """As messages name it."""
        return f"{settings_text(self.settings)}, seed {self.seed}, {self.deployment}"


def resolve_cells(sweep: ReadSweep, overrides: Sequence[str] = ()) -> tuple[Cell, ...]:
    """Every cell, by point, then deployment, then seed.

    ScenarioError names the cell whose scenario is wrong, or the two that are the same.
    """
    found: dict[str, Cell] = {}
    seeds: Sequence[int | None] = sweep.file.seeds or (None,)
    for point in points(sweep, overrides):
        scenarios = [_scenario(sweep, point, seed) for seed in seeds]
        for name in _deployments(sweep, point, scenarios[0]):
            for scenario in scenarios:
                cell = _cell(sweep, point, scenario, name)
                if (same := found.get(cell.cell_id)) is not None:
                    raise ScenarioError(
                        f"Two cells of {sweep.where} are the same simulation: "
                        f"({same.label()}) and ({cell.label()}); take one of them out."
                    )
                found[cell.cell_id] = cell
        check_cells(sweep, len(found))
    return tuple(found.values())


def _scenario(sweep: ReadSweep, point: Point, seed: int | None) -> Scenario:
    of_seed = () if seed is None else (f"{SEED_KEY}={seed}",)
    try:
        return load_scenario(sweep.scenario_path, (*point.overrides, *of_seed))
    except ScenarioError as error:
        which = settings_text(point.settings) + ("" if seed is None else f", seed {seed}")
        raise ScenarioError(
            f"In the cell ({printable(which)}) of {sweep.where}: {error}"
        ) from error


def _deployments(sweep: ReadSweep, point: Point, scenario: Scenario) -> Sequence[str]:
    there = list(scenario.deployments)
    for name in sweep.file.deployments or ():
        if name not in there:
            near = nearest(name, there)
            hint = f"did you mean {near!r}? It" if near else "it"
            raise ScenarioError(
                f"The key 'deployments' in {sweep.where} names {printable(name)!r}, which the "
                f"scenario {sweep.scenario_path} does not have in the cell "
                f"({settings_text(point.settings)}): {hint} has {', '.join(there)}."
            )
    return sweep.file.deployments or there


def _faults(scenario: Scenario, deployment: str) -> Faults:
    """Those that this deployment has; the others would be of instances that are not there."""
    there = {one.name for one in scenario.deployments[deployment].instances()}
    return Faults(
        tuple(
            replace(one, deployments=None)
            for one in scenario.faults.of(deployment)
            if one.instance in there
        )
    )


def _cell(sweep: ReadSweep, point: Point, scenario: Scenario, deployment: str) -> Cell:
    alone = replace(
        scenario,
        deployments={deployment: scenario.deployments[deployment]},
        faults=_faults(scenario, deployment),
    )
    transfer = sweep.file.transfer
    content = json.dumps([scenario_hash(alone), deployment, {"transfer": transfer}])
    return Cell(
        cell_id=hashlib.sha256(content.encode()).hexdigest(),
        settings=point.settings,
        deployment=deployment,
        seed=scenario.load.seed,
        transfer=transfer,
        scenario=alone,
    )
