"""Charts of the plane of two quantities: scattered points and a heat map."""

import altair as alt
import numpy as np
import pandas as pd

from reports.axes import GREY, WIDTH, Drawn, colour, labelled, scale, tooltips
from reports.document import Chart
from reports.lines import mark_layers
from reports.reduction import cells, heat_map_rows, scatter_points

_ROW_HEIGHT = 38


def scatter(chart: Chart) -> Drawn:
    """A mark a point, or a larger one for many; the line y = x where the chart asks for it."""
    frame = scatter_points(chart.frame, chart.x, chart.y, chart.series)
    most = int(frame["count"].max()) if len(frame) else 1
    sizes = alt.Scale(domain=[1, max(most, 2)], range=[22, 22 if most == 1 else 300])
    points = (
        alt.Chart(frame)
        .mark_point(filled=True, opacity=0.55)
        .encode(
            x=alt.X(
                f"{chart.x.column}:Q",
                scale=scale(chart.x),
                axis=labelled(chart.x, frame[chart.x.column]),
            ),
            y=alt.Y(
                f"{chart.y.column}:Q",
                scale=scale(chart.y),
                axis=labelled(chart.y, frame[chart.y.column]),
            ),
            color=colour(chart),
            shape=alt.Shape(f"{chart.series}:N", scale=alt.Scale(domain=list(chart.order))),
            size=alt.Size("count:Q", scale=sizes, legend=None),
            tooltip=[*tooltips(chart, chart.x, chart.y), alt.Tooltip("count:Q")],
        )
    )
    layers: list[alt.Chart] = [points]
    if chart.identity and len(frame):
        both = frame[[chart.x.column, chart.y.column]].to_numpy(dtype=np.float64)
        ends = [float(both.min()), float(both.max())]
        line = pd.DataFrame({chart.x.column: ends, chart.y.column: ends})
        layers.append(
            alt.Chart(line)
            .mark_line(color=GREY, strokeDash=[4, 4], strokeWidth=1.5)
            .encode(x=f"{chart.x.column}:Q", y=f"{chart.y.column}:Q")
        )
    return alt.layer(*layers).properties(width=WIDTH // 2 + 80, height=WIDTH // 2 + 20)


def heat_map(chart: Chart) -> Drawn:
    """A cell for every x in every row, the larger the lighter, which holds in grey as well."""
    assert chart.value is not None, "a heat map needs what its colour stands for"
    x, y, value = chart.x, chart.y, chart.value
    drawn = heat_map_rows(chart.frame[y.column].tolist(), [mark.y for mark in chart.marks])
    frame = cells(chart.frame[chart.frame[y.column].isin(drawn)], x)
    # Each cell reaches under the next, else the ground shows between the two.
    frame["under"] = frame.groupby(y.column)["high"].shift(-1).fillna(frame["high"])
    row = alt.Y(
        f"{y.column}:O",
        sort=sorted(set(frame[y.column]), reverse=True),
        axis=alt.Axis(title=y.title, grid=False),
    )
    along = alt.Scale(
        type="log" if x.log else "linear",
        domain=[float(frame["low"].min()), float(frame["high"].max())],
        nice=False,
        zero=False,
    )
    ground = (
        alt.Chart(frame)
        .mark_rect(strokeWidth=0)
        .encode(
            x=alt.X("low:Q", scale=along, axis=labelled(x, frame[x.column])),
            x2="under:Q",
            y=row,
            color=alt.Color(
                f"{value.column}:Q",
                scale=alt.Scale(scheme="viridis"),
                legend=alt.Legend(title=value.title, orient="right", format=".3~g"),
            ),
            tooltip=[
                *tooltips(chart, x),
                alt.Tooltip(f"{y.column}:O", title=y.title),
                alt.Tooltip(f"{value.column}:Q", title=value.title, format=".4~g"),
            ],
        )
    )
    return alt.layer(ground, *mark_layers(chart, row)).properties(
        width=WIDTH - 90, height=_ROW_HEIGHT * frame[y.column].nunique()
    )
