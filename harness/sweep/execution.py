"""One cell run: exactly what ``prfaas simulate`` says of its deployment, and what that costs.

    cost per hour = sum of GPUs x price + rent of the link + price of what crosses it in an hour

in the unit of the scenario's prices, USD or relative; the link of a deployment without a PrfaaS
cluster is not counted. What crosses in an hour is by the simulated traffic over the planned window.
"""

import platform
import time
from dataclasses import dataclass
from typing import Any

from harness.core import PrfaasError
from harness.planning.economics import HOURS_PER_MONTH, gpus, prices
from harness.preparation import prepare
from harness.scenario import Scenario
from harness.simulation_summary import simulation_document
from harness.simulator import SimulatedRows, Simulation
from harness.sweep.cells import Cell

_SECONDS_PER_HOUR = 3600
_BYTES_PER_GB = 1e9
_BYTES_PER_S_PER_GBPS = 1e9 / 8

#: Columns of a cell's result that only its run has; they may differ when all else is the same.
MEASURED = ("wall_s", "cpu_s", "host")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cell ended: ``figures`` where it was simulated, else a ``reason``.

    ``failed``: the cell itself cannot be simulated, and would fail again. ``lost``: what ran it
    died, as often as it was tried.
    """

    cell_id: str
    status: str
    reason: str | None
    figures: dict[str, Any]


def run_cell(cell: Cell) -> Outcome:
    """Simulate the cell. An error of the project's tree is its outcome; others are faults."""
    wall_s, cpu_s = time.monotonic(), time.process_time()
    status, reason, figures = "completed", None, {}
    try:
        figures = _figures(cell)
    except PrfaasError as error:
        status, reason = "failed", str(error)
    figures["wall_s"] = time.monotonic() - wall_s
    figures["cpu_s"] = time.process_time() - cpu_s
    figures["host"] = platform.node()
    return Outcome(cell.cell_id, status, reason, figures)


def failed(cell_id: str, error: BaseException) -> Outcome:
    """Of a call that raised what no scenario should make it raise: a fault of the program."""
    return Outcome(cell_id, "failed", f"{type(error).__name__}: {error}", {})


def _drop(_rows: SimulatedRows) -> None:
    """The rows of requests are counted by then, and not kept."""


def _figures(cell: Cell) -> dict[str, Any]:
    prepared = prepare(cell.scenario, transfer=cell.transfer, sinks=lambda _name: _drop)
    document = simulation_document(prepared)
    found: dict[str, Any] = document["deployments"][cell.deployment]
    utilisation: dict[str, float] = found.pop("utilisation")
    simulation = prepared.simulations[cell.deployment]
    return {
        **found,
        **{f"utilisation_{stage}": value for stage, value in utilisation.items()},
        **_cost(cell.scenario, cell.deployment, simulation),
        "carried_req_per_s": simulation.num_completed / simulation.window_s,
        "crossed_bytes": simulation.crossed_bytes,
        "notes": document["notes"],
    }


def _cost(scenario: Scenario, name: str, simulation: Simulation) -> dict[str, Any]:
    deployment = scenario.deployments[name]
    counted = gpus(scenario, deployment)
    costs: dict[str, Any] = {
        "num_gpus": sum(counted.values()),
        "cost_unit": None,
        "cost_per_hour": None,
    }
    known = prices(scenario, [deployment])
    if known is None:
        return costs
    unit, price = known
    links = deployment.prfaas_clusters(scenario.link.rate_bytes_per_s)
    gbps = sum(one.link_bytes_per_s for one in links) / _BYTES_PER_S_PER_GBPS
    gb_per_hour = simulation.crossed_bytes / simulation.window_s * _SECONDS_PER_HOUR / _BYTES_PER_GB
    return costs | {
        "cost_unit": unit,
        "cost_per_hour": sum(price[name] * count for name, count in counted.items())
        + gbps * scenario.cost.link_price_per_gbps_month / HOURS_PER_MONTH
        + gb_per_hour * scenario.cost.link_price_per_gb,
    }
