"""What the sections of a report are written from, and the tables they share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.record.run_directory import Manifest
from reports.document import Block, Chart, Figure, Prose, Table

#: Rows of tables that a simulation has no figure for.
LIVE_FIGURES = frozenset(
    {
        "modelled mean (s)",
        "measured mean off the modelled by",
        "modelled P90 (s)",
        "gap per token, ITL P50 (ms)",
        "gap per chunk P50 (ms)",
        "tokens a chunk",
        "send lag P99 (wall ms)",
    }
)


@dataclass(frozen=True, slots=True)
class Run:
    """What the sections are written from."""

    manifest: Manifest
    verdict: dict[str, Any]
    requests: pd.DataFrame
    simulated: pd.DataFrame
    link: pd.DataFrame

    @property
    def is_simulated(self) -> bool:
        return self.manifest.kind == "simulated"

    @property
    def names(self) -> tuple[str, ...]:
        """The deployments of which there are figures: all of a live run."""
        return tuple(n for n in self.manifest.deployment_names() if n in self.summaries)

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.verdict["deployments"]
        return found


def figure(chart: Chart | None, caption: str) -> Block:
    if chart is None:
        return Prose("Nothing was recorded that this chart could show.")
    return Figure(chart, caption)


def table(frame: pd.DataFrame, caption: str) -> Block:
    if frame.empty:
        return Prose(f"{caption} Nothing was recorded for it.")
    return Table(frame, caption)


def by_deployment(
    data: Run, caption: str, rows: dict[str, Callable[[dict[str, Any]], object]]
) -> Table:
    """A table with a column a deployment, a row a figure of its summary. Of a simulated run without
    the figures that only a live one has."""
    if data.is_simulated:
        rows = {name: one for name, one in rows.items() if name not in LIVE_FIGURES}
    columns: dict[str, list[object]] = {"figure": list(rows)}
    for name, one in data.summaries.items():
        columns[name] = [figure(one) for figure in rows.values()]
    return Table(pd.DataFrame(columns, dtype=object), caption)
