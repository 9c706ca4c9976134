"""The page of a sweep: its points in the plane of cost and TTFT, and over throughput.

One offline file, made by ``reports`` from the summary (``harness.sweep.summary``).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from harness.sweep.console import spread_text
from harness.sweep.grid import settings_text
from harness.sweep.summary import THROUGHPUT, TTFT
from reports.document import (
    Axis,
    Block,
    Chart,
    Document,
    Facts,
    Figure,
    Items,
    Notice,
    Prose,
    Section,
    Table,
    Tone,
)
from reports.render import render

_ON, _OFF = "on the front", "dominated"
_P90 = Axis(TTFT, "P90 TTFT, mean over seeds (s)")


def write_sweep_report(document: dict[str, Any], path: Path) -> Path:
    """Write the page; it appears whole or not at all."""
    sections = [
        Section("Cells", tuple(_cells(document))),
        Section("Cost, TTFT and throughput", tuple(_front(document))),
        Section("Points", (_points(document),)),
    ]
    subtitle = f"Simulated from {document['scenario']}, not measured."
    return render(Document(f"prfaas sweep: {document['sweep']}", subtitle, tuple(sections)), path)


def _cells(document: dict[str, Any]) -> Iterator[Block]:
    completed, total = document["num_completed"], document["num_cells"]
    tone: Tone = "good" if completed == total else "bad"
    reasons = tuple(
        f"{one['num_cells']} {one['status']}, the first ({one['first']}): {one['reason']}"
        for one in document["failed"]
    )
    yield Notice(tone, f"{completed} of {total} cells have a result.", reasons)
    if document["notes"]:
        yield Prose("What the figures rest on:")
        yield Items(tuple(document["notes"]))
    transfer = "simulated" if document["transfer"] else "takes no time"
    yield Facts((("KV transfer", transfer), ("intervals", f"{document['level']:.0%}, over seeds")))


def _front(document: dict[str, Any]) -> Iterator[Block]:
    pareto = document["pareto"]
    cost = "GPUs" if pareto["unit"] == "GPUs" else f"cost per hour ({pareto['unit']})"
    yield Prose(
        "A point is on the front where no other one with the same demand is at least as good in "
        f"cost, P90 TTFT and throughput and better in one, by means over seeds. Cost: {cost}. A "
        "point that is overloaded, or lacks one of the three, is not compared."
    )
    compared = [point for point in document["points"] if point["on_front"] is not None]
    if not compared:
        yield Prose("No point can be compared.")
        return
    frame = pd.DataFrame(
        {
            "cost": [float(point[pareto["cost"]]) for point in compared],
            TTFT: [point[TTFT]["mean"] for point in compared],
            THROUGHPUT: [point[THROUGHPUT]["mean"] for point in compared],
            "standing": [_ON if point["on_front"] else _OFF for point in compared],
        }
    )
    on = sum(point["on_front"] for point in compared)
    title = f"{on} of {len(compared)} points are on a front"
    for axis in (Axis("cost", cost), Axis(THROUGHPUT, "carried, mean over seeds (req/s)")):
        chart = Chart(
            "scatter",
            frame,
            title,
            f"{_P90.title} over {axis.title}. {title}.",
            axis,
            _P90,
            series="standing",
            order=(_ON, _OFF),
        )
        yield Figure(chart)


def _points(document: dict[str, Any]) -> Table:
    key = document["pareto"]["cost"]
    rows = [
        {
            "settings": settings_text(point["settings"]),
            "deployment": point["deployment"],
            "seeds": f"{point['num_completed']}/{point['num_seeds']}",
            "mean TTFT (s)": point["ttft_mean_s"]["mean"],
            "+-": spread_text(point["ttft_mean_s"]) or None,
            "P90 TTFT (s)": point["ttft_p90_s"]["mean"],
            "P90 +-": spread_text(point["ttft_p90_s"]) or None,
            "P99 TTFT (s)": point["ttft_p99_s"]["mean"],
            "req/s": point["throughput_req_per_s"]["mean"],
            "busiest stage": point["utilisation"]["mean"],
            "cost": point[key],
            "front": point["not_compared"] or ("yes" if point["on_front"] else "no"),
        }
        for point in document["points"]
    ]
    return Table(
        pd.DataFrame(rows, dtype=object),
        f"Means over seeds; +-: half the {document['level']:.0%} interval (Student's t).",
    )
