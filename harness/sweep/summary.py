"""What a sweep says: its points with means and intervals over seeds, and the Pareto front.

A point here is a combination of settings with one deployment; its cells differ by the seed. A
figure that a seed does not have (its cell failed, or requests that fail leave it none) has no mean
over seeds either, and the reason is there. The cost is that of ``harness.sweep.execution``, in USD
or in relative prices, where every point has it in that one unit; else the number of GPUs stands for
it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from harness.statistics import seed_interval
from harness.sweep.cells import Cell
from harness.sweep.pareto import demand, dominators
from harness.sweep.results import STAGES, Row

LEVEL = 0.95
#: Figures of a cell that have a mean and an interval over seeds.
FIGURES = (
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "throughput_req_per_s",
    "carried_req_per_s",
    "utilisation",
)
#: What the front compares beside the cost. Requests carried are over the planned window: the time
#: until the last of them has ended would tell two points apart that both carry what is offered.
TTFT, THROUGHPUT = "ttft_p90_s", "carried_req_per_s"
_MOST_NOTES = 20
_MOST_REASONS = 20


def sweep_summary(cells: Sequence[Cell], rows: Mapping[str, Row]) -> dict[str, Any]:
    """One JSON document of the cells whose rows are there; null where there is no figure."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((repr(sorted(cell.settings.items())), cell.deployment), []).append(cell)
    points = [_point(group, rows) for group in groups.values()]
    there = [rows[cell.cell_id] for cell in cells if cell.cell_id in rows]
    status = Counter(row["status"] for row in there)
    return {
        "num_cells": len(cells),
        "num_completed": status["completed"],
        "num_failed": status["failed"],
        "num_lost": status["lost"],
        "num_missing": len(cells) - len(there),
        "level": LEVEL,
        "points": points,
        "pareto": _pareto(points),
        "failed": _failed(cells, rows),
        "notes": _notes(there),
    }


def _point(cells: Sequence[Cell], rows: Mapping[str, Row]) -> dict[str, Any]:
    found = [rows.get(cell.cell_id) for cell in cells]
    there = [None if row is None or row["status"] != "completed" else row for row in found]
    known = [row for row in there if row is not None]
    one = known[0] if known else {}
    return {
        "settings": dict(cells[0].settings),
        "deployment": cells[0].deployment,
        "num_seeds": len(cells),
        "num_completed": len(known),
        "seeds": [cell.seed for cell in cells],
        "threshold_tokens": one.get("threshold_tokens"),
        "num_prfaas": one.get("num_prfaas"),
        "num_prefill": one.get("num_prefill"),
        "num_decode": one.get("num_decode"),
        "num_gpus": one.get("num_gpus"),
        "cost_unit": one.get("cost_unit"),
        "cost_per_hour": _over_seeds("cost_per_hour", there)["mean"],
        "overloaded": any(map(_overloaded, known)),
        "num_requests": sum(row["num_planned"] for row in known),
        "num_failed_requests": sum(row["num_failed"] for row in known),
        **{name: _over_seeds(name, there) for name in FIGURES},
    }


def _overloaded(row: Row) -> bool:
    """Whether a stage had work for longer than the load lasted: then its queue grew with the run,
    and TTFT says how long that was."""
    busiest = _busiest(row)
    return busiest is not None and busiest >= 1


def _over_seeds(name: str, rows: Sequence[Row | None]) -> dict[str, Any]:
    """Mean over seeds and its interval; the reason where there is none."""
    value = _busiest if name == "utilisation" else lambda row: row[name]
    values = [None if row is None else value(row) for row in rows]
    interval = asdict(seed_interval(values, LEVEL))
    del interval["level"]
    return {"mean": _mean(values), **interval}


def _busiest(row: Row) -> float | None:
    """Of the busiest stage."""
    known = [row[f"utilisation_{stage}"] for stage in STAGES]
    return max((value for value in known if value is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _pareto(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds to each point whether it is ``on_front``, by whom it is dominated, and why it is not
    compared where it is not; says what stood for the cost."""
    units = {point["cost_unit"] for point in points if point["num_completed"]}
    priced = len(units) == 1 and None not in units
    key = "cost_per_hour" if priced else "num_gpus"
    fronts: dict[str, list[int]] = {}
    for at, point in enumerate(points):
        reason = _incomparable(point, key)
        point |= {"on_front": None, "dominated_by": None, "not_compared": reason}
        if reason is None:
            fronts.setdefault(repr(sorted(demand(point["settings"]).items())), []).append(at)
    for members in fronts.values():
        values = [
            (points[at][key], points[at][TTFT]["mean"], -points[at][THROUGHPUT]["mean"])
            for at in members
        ]
        for at, by in zip(members, dominators(np.array(values, np.float64)).tolist(), strict=True):
            points[at] |= {"on_front": by < 0, "dominated_by": None if by < 0 else members[by]}
    return {
        "cost": key,
        "unit": units.pop() if priced else "GPUs",
        "objectives": {key: "min", TTFT: "min", THROUGHPUT: "max"},
        "fronts": [
            {
                "demand": demand(points[members[0]]["settings"]),
                "points": [at for at in members if points[at]["on_front"]],
                "dominated": [at for at in members if not points[at]["on_front"]],
            }
            for members in fronts.values()
        ],
    }


def _incomparable(point: dict[str, Any], cost: str) -> str | None:
    if point["overloaded"]:
        return "overloaded: its TTFT follows the length of the run"
    figures = {cost: point[cost], **{name: point[name]["mean"] for name in (TTFT, THROUGHPUT)}}
    missing = [name for name, value in figures.items() if value is None]
    return f"it has no {' and no '.join(missing)}" if missing else None


def _failed(cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Each reason once, with the number of cells that have it and the first of them."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for cell in cells:
        row = rows.get(cell.cell_id)
        if row is None or row["status"] == "completed":
            continue
        key = (row["status"], row["reason"])
        first = {"status": key[0], "reason": key[1], "num_cells": 0, "first": cell.label()}
        found.setdefault(key, first)["num_cells"] += 1
    return list(found.values())[:_MOST_REASONS]


def _notes(rows: Sequence[Row]) -> list[str]:
    """What the simulations noted, each sentence once with the number of cells that say it."""
    counted = Counter(note for row in rows for note in dict.fromkeys(row["notes"] or ()))
    told = [f"{count} of {len(rows)} cells: {note}" for note, count in counted.most_common()]
    more = len(told) - _MOST_NOTES
    kept = told[:_MOST_NOTES]
    return [*kept, f"{more} more notes are in the column `notes`."] if more > 0 else kept
