"""Charts as Vega-Lite specifications, reduced to a bounded number of points before drawing.

Colours are those of Okabe and Ito (2008), which stay apart in the common forms of colour blindness;
lines are told apart by dashes too, and panels by headings.
"""

import math
import textwrap
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from reports.document import Axis, Chart

COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442",
)  # fmt: skip
CDF_POINTS, LINE_POINTS = 240, 400
SCATTER_POINTS, SCATTER_CELLS = 1200, 32
_WIDTH, _HEIGHT = 780, 320
_GREY = "#595959"
_MOST_DECADES = 4
Drawn = alt.Chart | alt.LayerChart | alt.FacetChart


def chart_spec(chart: Chart) -> dict[str, Any]:
    """The Vega-Lite specification of a chart, its data inside."""
    draw = {
        "cdf": _cdf,
        "stacked_bars": _stacked_bars,
        "scatter": _scatter,
        "lines": _lines,
    }[chart.kind]
    title = alt.TitleParams(
        textwrap.wrap(chart.title, 100), anchor="start", fontSize=15, fontWeight=600, offset=14
    )
    drawn = draw(chart).properties(title=title)
    configured = (
        drawn.configure(font="system-ui, 'DejaVu Sans', sans-serif", aria=False)
        .configure_view(strokeWidth=0)
        .configure_axis(labelFontSize=12, titleFontSize=13, gridColor="#e4e4e4", titlePadding=8)
        .configure_legend(labelFontSize=12, titleFontSize=13, symbolStrokeWidth=3, labelLimit=260)
        .configure_header(labelFontSize=13, labelFontWeight=600)
    )
    spec: dict[str, Any] = configured.to_dict()
    return spec


def cdf_points(values: "pd.Series[float]") -> pd.DataFrame:
    """At most ``CDF_POINTS`` steps (value, share) of the distribution; infinities only count."""
    ordered = np.sort(values.dropna().to_numpy(dtype=np.float64))
    reached = int(np.isfinite(ordered).sum())
    if reached == 0:
        return pd.DataFrame({"value": [], "share": []}, dtype="float64")
    ranks = np.unique(np.linspace(0, reached - 1, min(reached, CDF_POINTS)).round().astype(int))
    return pd.DataFrame({"value": ordered[ranks], "share": (ranks + 1) / len(ordered)})


def line_points(frame: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Means of y over at most ``LINE_POINTS`` equal intervals of x, at the intervals' middles."""
    known = frame[[x, y]].dropna()
    if len(known) <= LINE_POINTS:
        return known.sort_values(x)
    low, high = float(known[x].min()), float(known[x].max())
    width = (high - low) / LINE_POINTS or 1.0
    place = np.minimum(((known[x] - low) / width).astype(int), LINE_POINTS - 1)
    means = known.groupby(place)[y].mean()
    return pd.DataFrame({x: low + (means.index.to_numpy() + 0.5) * width, y: means.to_numpy()})


def scatter_points(frame: pd.DataFrame, x: Axis, y: Axis, series: str) -> pd.DataFrame:
    """The points, or, where there are many, the centres of occupied cells, with their counts."""
    known = frame[[x.column, y.column, series]].dropna()
    if len(known) <= SCATTER_POINTS:
        return known.assign(count=1)
    cells = pd.DataFrame({series: known[series].to_numpy()})
    for axis in (x, y):
        values = known[axis.column].to_numpy(dtype=np.float64)
        values = np.log(values) if axis.log else values
        low, span = values.min(), np.ptp(values) or 1.0
        place = np.minimum((values - low) / span * SCATTER_CELLS, SCATTER_CELLS - 1).astype(int)
        centre = low + (place + 0.5) / SCATTER_CELLS * span
        cells[axis.column] = np.exp(centre) if axis.log else centre
    counted = cells.groupby([series, x.column, y.column], sort=False).size()
    return counted.rename("count").reset_index()


def _colour(chart: Chart) -> alt.Color:
    return alt.Color(
        f"{chart.series}:N",
        scale=alt.Scale(domain=list(chart.order), range=list(COLOURS[: len(chart.order)])),
        # Headings of panels already name the series.
        legend=None
        if chart.panel == chart.series
        else alt.Legend(title=chart.series_title or None, orient="bottom", columns=4),
    )


def _scale(axis: Axis) -> alt.Scale:
    return alt.Scale(type="log", nice=False) if axis.log else alt.Scale(zero=True)


def _axis(axis: Axis, values: "pd.Series[float] | None" = None) -> alt.Axis:
    """``values`` is what a logarithmic axis spans, which decides its labels."""
    ticks = log_ticks(values) if axis.log and values is not None else ()
    chosen: dict[str, Any] = {"values": list(ticks)} if ticks else {"tickCount": 8}
    return alt.Axis(format=".6~g", labelOverlap=True, title=axis.title, **chosen)


def log_ticks(values: "pd.Series[float]") -> tuple[float, ...]:
    """1, 2 and 5 times the powers of ten within the values, powers of ten alone beyond 4 decades.

    Nothing where fewer than two lie within: the drawing library's own ticks fit better then.
    """
    known = values.to_numpy(dtype=np.float64)
    known = known[np.isfinite(known) & (known > 0)]
    if not len(known):
        return ()
    low, high = float(known.min()), float(known.max())
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= _MOST_DECADES else (1,)
    # A decimal literal is the nearest double; a product with a power of ten need not be.
    ticks = [float(f"{step}e{power}") for power in range(first, last + 1) for step in steps]
    within = tuple(tick for tick in ticks if low <= tick <= high)
    return within if len(within) > 1 else ()


def _cdf(chart: Chart) -> Drawn:
    keys = [chart.series] + ([chart.dashed] if chart.dashed else [])
    parts = []
    for key, group in chart.frame.groupby(keys, sort=False):
        names: dict[str, Any] = dict(zip(keys, key, strict=True))
        parts.append(cdf_points(group[chart.x.column]).assign(**names))
    frame = pd.concat(parts) if parts else pd.DataFrame(columns=["value", "share", *keys])
    encoding: dict[str, Any] = {
        "x": alt.X("value:Q", scale=_scale(chart.x), axis=_axis(chart.x, frame["value"])),
        "y": alt.Y(
            "share:Q",
            scale=alt.Scale(domain=[0, 1]),
            axis=alt.Axis(format="%", title=chart.y.title),
        ),
        "color": _colour(chart),
        "tooltip": [
            alt.Tooltip(f"{chart.series}:N"),
            alt.Tooltip("value:Q", format=".3~g", title=chart.x.title),
            alt.Tooltip("share:Q", format=".1%", title=chart.y.title),
        ],
    }
    if chart.dashed:
        solid, dashed = chart.dashed_labels
        frame[chart.dashed] = np.where(frame[chart.dashed].astype(bool), dashed, solid)
        encoding["strokeDash"] = alt.StrokeDash(
            f"{chart.dashed}:N",
            scale=alt.Scale(domain=[solid, dashed], range=[[1, 0], [5, 4]]),
            legend=alt.Legend(title=None, orient="bottom"),
        )
    lines = alt.Chart(frame).mark_line(interpolate="step-after", strokeWidth=2).encode(**encoding)
    return alt.layer(lines).properties(width=_WIDTH, height=_HEIGHT)


def _stacked_bars(chart: Chart) -> Drawn:
    ranks = {name: rank for rank, name in enumerate(chart.order)}
    frame = chart.frame.assign(_rank=chart.frame[chart.series].map(ranks))
    categories = list(dict.fromkeys(frame[chart.x.column]))
    bars = (
        alt.Chart(frame)
        .mark_bar()
        .encode(
            x=alt.X(
                f"{chart.x.column}:N",
                sort=categories,
                axis=alt.Axis(title=chart.x.title, labelAngle=-40),
            ),
            y=alt.Y(f"{chart.y.column}:Q", axis=_axis(chart.y), scale=alt.Scale(zero=True)),
            color=_colour(chart),
            order=alt.Order("_rank:Q"),
            tooltip=[
                alt.Tooltip(f"{chart.series}:N"),
                alt.Tooltip(f"{chart.x.column}:N", title=chart.x.title),
                alt.Tooltip(f"{chart.y.column}:Q", format=".3~g", title=chart.y.title),
            ],
        )
    )
    if chart.panel is None:
        whole: alt.Chart = bars.properties(width=_WIDTH, height=_HEIGHT)
        return whole
    panels = list(dict.fromkeys(frame[chart.panel]))
    width = max(120, _WIDTH // max(1, len(panels)) - 20)
    panelled: alt.FacetChart = bars.properties(width=width, height=260).facet(
        column=alt.Column(f"{chart.panel}:N", sort=panels, title=None)
    )
    return panelled


def _scatter(chart: Chart) -> Drawn:
    frame = scatter_points(chart.frame, chart.x, chart.y, chart.series)
    most = int(frame["count"].max()) if len(frame) else 1
    sizes = alt.Scale(domain=[1, max(most, 2)], range=[22, 22 if most == 1 else 300])
    points = (
        alt.Chart(frame)
        .mark_point(filled=True, opacity=0.55)
        .encode(
            x=alt.X(
                f"{chart.x.column}:Q",
                scale=_scale(chart.x),
                axis=_axis(chart.x, frame[chart.x.column]),
            ),
            y=alt.Y(
                f"{chart.y.column}:Q",
                scale=_scale(chart.y),
                axis=_axis(chart.y, frame[chart.y.column]),
            ),
            color=_colour(chart),
            shape=alt.Shape(f"{chart.series}:N", scale=alt.Scale(domain=list(chart.order))),
            size=alt.Size("count:Q", scale=sizes, legend=None),
            tooltip=[
                alt.Tooltip(f"{chart.series}:N"),
                alt.Tooltip(f"{chart.x.column}:Q", format=".3~g", title=chart.x.title),
                alt.Tooltip(f"{chart.y.column}:Q", format=".3~g", title=chart.y.title),
                alt.Tooltip("count:Q"),
            ],
        )
    )
    layers: list[alt.Chart] = [points]
    if chart.identity and len(frame):
        both = frame[[chart.x.column, chart.y.column]].to_numpy(dtype=np.float64)
        ends = [float(both.min()), float(both.max())]
        line = pd.DataFrame({chart.x.column: ends, chart.y.column: ends})
        layers.append(
            alt.Chart(line)
            .mark_line(color=_GREY, strokeDash=[4, 4], strokeWidth=1.5)
            .encode(x=f"{chart.x.column}:Q", y=f"{chart.y.column}:Q")
        )
    return alt.layer(*layers).properties(width=_WIDTH // 2 + 80, height=_WIDTH // 2 + 20)


def _lines(chart: Chart) -> Drawn:
    keys = [chart.series] + ([chart.panel] if chart.panel else [])
    parts = []
    for key, group in chart.frame.groupby(keys, sort=False):
        names: dict[str, Any] = dict(zip(keys, key, strict=True))
        parts.append(line_points(group, chart.x.column, chart.y.column).assign(**names))
    columns = [chart.x.column, chart.y.column, *keys]
    frame = pd.concat(parts) if parts else pd.DataFrame(columns=columns)
    lines = (
        alt.Chart()
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X(f"{chart.x.column}:Q", scale=_scale(chart.x), axis=_axis(chart.x)),
            y=alt.Y(f"{chart.y.column}:Q", scale=_scale(chart.y), axis=_axis(chart.y)),
            color=_colour(chart),
            tooltip=[
                alt.Tooltip(f"{chart.x.column}:Q", format=".4~g", title=chart.x.title),
                alt.Tooltip(f"{chart.y.column}:Q", format=".3~g", title=chart.y.title),
            ],
        )
    )
    layers = [lines]
    if chart.reference is not None:
        level, label = chart.reference
        # One row a panel, else the words are drawn once for every point.
        once = alt.Chart().transform_aggregate(points="count()")
        rule = once.mark_rule(color=_GREY, strokeDash=[4, 4]).encode(y=alt.datum(level))
        words = once.mark_text(
            align="right", baseline="bottom", dx=-4, dy=-3, color=_GREY, fontSize=12
        ).encode(x=alt.value("width"), y=alt.datum(level), text=alt.datum(label))
        layers += [rule, words]
    if chart.panel is None:
        return alt.layer(*layers, data=frame).properties(width=_WIDTH, height=_HEIGHT)
    panels = list(dict.fromkeys(frame[chart.panel]))
    layered = alt.layer(*layers).properties(width=_WIDTH, height=120)
    return layered.facet(
        data=frame,
        row=alt.Row(
            f"{chart.panel}:N",
            sort=panels,
            title=None,
            header=alt.Header(labelAngle=0, labelOrient="top", labelAnchor="start"),
        ),
    )
