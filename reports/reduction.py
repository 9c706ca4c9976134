"""Data frames brought to a bounded number of points before they are drawn."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from reports.document import Axis

#: Rows of one chart's data; the drawing library refuses more than 5,000.
MOST_ROWS = 4800
CDF_POINTS, LINE_POINTS = 240, 400
SCATTER_POINTS, SCATTER_CELLS = 1200, 32
HEAT_MAP_COLUMNS, HEAT_MAP_ROWS = 200, 24


def cdf_points(values: "pd.Series[float]", most: int = CDF_POINTS) -> pd.DataFrame:
    """At most ``most`` steps (value, share) of the distribution; infinities only count."""
    ordered = np.sort(values.dropna().to_numpy(dtype=np.float64))
    reached = int(np.isfinite(ordered).sum())
    if reached == 0:
        return pd.DataFrame({"value": [], "share": []}, dtype="float64")
    ranks = np.unique(np.linspace(0, reached - 1, min(reached, most)).round().astype(int))
    return pd.DataFrame({"value": ordered[ranks], "share": (ranks + 1) / len(ordered)})


def line_points(frame: pd.DataFrame, x: str, y: str, most: int = LINE_POINTS) -> pd.DataFrame:
    """Means of y over at most ``most`` equal intervals of x, at the intervals' middles."""
    known = frame[[x, y]].dropna()
    if len(known) <= most:
        return known.sort_values(x)
    low, high = float(known[x].min()), float(known[x].max())
    width = (high - low) / most or 1.0
    place = np.minimum(((known[x] - low) / width).astype(int), most - 1)
    means = known.groupby(place)[y].mean()
    return pd.DataFrame({x: low + (means.index.to_numpy() + 0.5) * width, y: means.to_numpy()})


def scatter_points(frame: pd.DataFrame, x: Axis, y: Axis, series: str) -> pd.DataFrame:
    """The points, or, where there are many, the centres of occupied cells, with their counts."""
    known = frame[[x.column, y.column, series]].dropna()
    if len(known) <= SCATTER_POINTS:
        return known.assign(count=1)
    cells = pd.DataFrame({series: known[series].to_numpy()})
    side = min(SCATTER_CELLS, math.isqrt(MOST_ROWS // known[series].nunique()))
    for axis in (x, y):
        values = known[axis.column].to_numpy(dtype=np.float64)
        values = np.log(values) if axis.log else values
        low, span = values.min(), np.ptp(values) or 1.0
        place = np.minimum((values - low) / span * side, side - 1).astype(int)
        centre = low + (place + 0.5) / side * span
        cells[axis.column] = np.exp(centre) if axis.log else centre
    counted = cells.groupby([series, x.column, y.column], sort=False).size()
    return counted.rename("count").reset_index()


def stretches(frame: pd.DataFrame, x: str, y: str, series: str) -> pd.DataFrame:
    """A line cut where its series changes: x, y, series and the stretch's number.

    At most ``LINE_POINTS`` of the line's points, evenly chosen. A stretch ends at the first point
    of the next, so that the line has no gap.
    """
    known = frame[[x, y, series]].dropna().sort_values(x, kind="stable")
    if len(known) > LINE_POINTS:
        known = known.iloc[np.linspace(0, len(known) - 1, LINE_POINTS).round().astype(int)]
    changed = known[series].ne(known[series].shift()).to_numpy()
    known = known.assign(stretch=np.cumsum(changed)).reset_index(drop=True)
    first = np.flatnonzero(changed)[1:]
    ends = known.iloc[first].assign(stretch=known["stretch"].to_numpy()[first - 1])
    ends[series] = known[series].to_numpy()[first - 1]
    return pd.concat([known, ends]).sort_values(["stretch", x], kind="stable", ignore_index=True)


def heat_map_rows(rows: Sequence[float], kept: Sequence[float]) -> list[float]:
    """At most ``HEAT_MAP_ROWS`` of the rows, evenly chosen, and those of ``kept``; ascending."""
    known = sorted(set(rows))
    always = sorted(set(kept) & set(known))
    if len(known) <= HEAT_MAP_ROWS:
        return known
    others = [row for row in known if row not in always]
    room = max(HEAT_MAP_ROWS - len(always), 0)
    chosen = np.linspace(0, len(others) - 1, room).round().astype(int)
    return sorted([*always, *(others[at] for at in chosen)])


def cells(frame: pd.DataFrame, x: Axis) -> pd.DataFrame:
    """The frame by x with ``low`` and ``high``, the edges of each point's cell along it.

    Edges lie half-way between neighbours, on the axis' own scale. Of many values of x, at most
    ``HEAT_MAP_COLUMNS`` are kept, evenly chosen.
    """
    places = np.unique(frame[x.column].to_numpy(dtype=np.float64))
    if len(places) > HEAT_MAP_COLUMNS:
        chosen = np.linspace(0, len(places) - 1, HEAT_MAP_COLUMNS).round().astype(int)
        places = places[chosen]
    scaled = np.log(places) if x.log else places
    between = (scaled[1:] + scaled[:-1]) / 2
    between = np.exp(between) if x.log else between
    edges = np.concatenate((places[:1], between, places[-1:]))
    known = frame[frame[x.column].isin(places)].sort_values(x.column, kind="stable")
    at = np.searchsorted(places, known[x.column].to_numpy(dtype=np.float64))
    return known.assign(low=edges[at], high=edges[at + 1])
