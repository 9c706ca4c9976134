"""Blocks that several sections of the plan report are made of."""

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from reports.document import Block, Chart, Figure, Table

#: One figure of a deployment, a comparison or a point of a sweep.
Value = Callable[[dict[str, Any]], object]


def drawn(chart: Chart | None, caption: str) -> Iterator[Block]:
    """The chart with its caption; nothing where there is nothing to draw."""
    if chart is not None:
        yield Figure(chart, caption)


def side_by_side(things: dict[str, dict[str, Any]], caption: str, rows: dict[str, Value]) -> Table:
    """A table with a column a thing, a row a figure of it."""
    columns: dict[str, list[object]] = {"figure": list(rows)}
    for name, one in things.items():
        columns[name] = [value(one) for value in rows.values()]
    return Table(pd.DataFrame(columns, dtype=object), caption)


def one_by_one(things: list[dict[str, Any]], caption: str, columns: dict[str, Value]) -> Table:
    """A table with a row a thing, a column a figure of it."""
    rows = [{name: value(one) for name, value in columns.items()} for one in things]
    return Table(pd.DataFrame(rows, columns=list(columns), dtype=object), caption)
