"""What the sections of a report are written from, and the tables they share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.record.run_directory import Manifest
from reports.document import Block, Chart, Figure, Prose, Table


@dataclass(frozen=True, slots=True)
class Run:
    """What the sections are written from."""

    manifest: Manifest
    verdict: dict[str, Any]
    requests: pd.DataFrame
    simulated: pd.DataFrame
    link: pd.DataFrame

    @property
    def names(self) -> tuple[str, ...]:
        return self.manifest.deployment_names()

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
    """A table with a column a deployment, a row a figure of its summary."""
    columns: dict[str, list[object]] = {"figure": list(rows)}
    for name, one in data.summaries.items():
        columns[name] = [figure(one) for figure in rows.values()]
    return Table(pd.DataFrame(columns, dtype=object), caption)
