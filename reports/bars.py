"""Charts with a row or a column a category: stacked bars, tornado, waterfall, and dots."""

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from reports.axes import (
    COLOURS,
    HEIGHT,
    WIDTH,
    Drawn,
    colour,
    labelled,
    legend,
    references,
    scale,
    tooltips,
)
from reports.document import Chart

#: A dark and a light one, which stay apart in grey.
_ENDS = ("#0072B2", "#E69F00")
_LEVEL, _RISE, _FALL = "#8a939d", "#0072B2", "#D55E00"
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
_ROW_HEIGHT, _LABELS = 34, 210


def stacked_bars(chart: Chart) -> Drawn:
    """A bar a category, its layers in the order of the series."""
    ranks = {name: rank for rank, name in enumerate(chart.order)}
    frame = chart.frame.assign(_rank=chart.frame[chart.series].map(ranks))
    bars = (
        alt.Chart(frame)
        .mark_bar()
        .encode(
            x=_categories(chart, list(dict.fromkeys(frame[chart.x.column])), labelAngle=-40),
            y=alt.Y(f"{chart.y.column}:Q", axis=labelled(chart.y), scale=alt.Scale(zero=True)),
            color=colour(chart),
            order=alt.Order("_rank:Q"),
            tooltip=[
                alt.Tooltip(f"{chart.series}:N"),
                alt.Tooltip(f"{chart.x.column}:N", title=chart.x.title),
                alt.Tooltip(f"{chart.y.column}:Q", format=".3~g", title=chart.y.title),
            ],
        )
    )
    return _in_columns(chart, bars, frame, 260)


def tornado(chart: Chart) -> Drawn:
    """Bars from the base to each end, a row an input, the widest span on top."""
    assert chart.x_reference is not None, "a tornado needs its base"
    base, _ = chart.x_reference
    x, y = chart.x.column, chart.y.column
    frame = chart.frame.dropna(subset=[x])
    known = frame.groupby(y)[x]
    # The base is one end of the span where both values lie on the same side of it.
    span = known.max().clip(lower=base) - known.min().clip(upper=base)
    rows = list(span.sort_values(ascending=False, kind="stable").index)
    place: dict[str, Any] = {
        "x": alt.X(
            f"{x}:Q",
            scale=alt.Scale(zero=False, nice=False, padding=110),
            axis=labelled(chart.x),
        ),
        "y": alt.Y(f"{y}:N", sort=rows, axis=alt.Axis(title=None, labelLimit=0)),
        "yOffset": alt.YOffset(f"{chart.series}:N", sort=list(chart.order)),
    }
    bars = (
        alt.Chart()
        .mark_bar()
        .encode(
            **place,
            x2=alt.datum(base),
            color=alt.Color(
                f"{chart.series}:N",
                scale=alt.Scale(domain=list(chart.order), range=list(_ENDS)),
                legend=legend(chart),
            ),
            tooltip=[*tooltips(chart, chart.x), *_text_tooltip(chart)],
        )
    )
    layers = [bars, *references(chart)]
    if chart.text is not None:
        ends: tuple[tuple[Any, dict[str, Any]], ...] = (
            (alt.datum[x] >= base, {"align": "left", "dx": 5}),
            (alt.datum[x] < base, {"align": "right", "dx": -5}),
        )
        for test, side in ends:
            words = alt.Chart().transform_filter(test).mark_text(fontSize=11, **side)
            layers.append(words.encode(**place, text=f"{chart.text}:N"))
    return alt.layer(*layers, data=frame).properties(
        width=WIDTH - _LABELS, height=_ROW_HEIGHT * max(1, len(rows))
    )


def waterfall(chart: Chart) -> Drawn:
    """The first level from zero, then the step to each next one, with its size in figures."""
    y = chart.y.column
    levels = chart.frame[y]
    before = (levels.groupby(chart.frame[chart.panel]) if chart.panel else levels).shift()
    step = levels - before
    frame = chart.frame.assign(
        _before=before.fillna(0.0),
        _top=np.fmax(levels, before.fillna(0.0)),
        _step=step,
        _words=np.where(step.isna(), levels.map("{:.3g}".format), step.map("{:+.3f}".format)),
        _kind=np.where(step.isna(), "level", np.where(step < 0, "fall", "rise")),
    )
    place = _categories(chart, None, labelAngle=-30, labelLimit=_LABELS)
    bars = (
        alt.Chart()
        .mark_bar()
        .encode(
            x=place,
            y=alt.Y(f"{y}:Q", axis=labelled(chart.y), scale=alt.Scale(zero=True)),
            y2="_before:Q",
            color=alt.Color(
                "_kind:N",
                scale=alt.Scale(domain=["level", "rise", "fall"], range=[_LEVEL, _RISE, _FALL]),
                legend=None,  # The labels carry the sign.
            ),
            tooltip=[
                alt.Tooltip(f"{chart.x.column}:N", title=chart.x.title),
                alt.Tooltip(f"{y}:Q", format=".4~g", title=chart.y.title),
                alt.Tooltip("_step:Q", format="+.4~g", title="step"),
            ],
        )
    )
    words = alt.Chart().mark_text(dy=-7, fontSize=12).encode(x=place, y="_top:Q", text="_words:N")
    layered = alt.layer(bars, words, data=frame)
    # Slanted words reach to the left of each panel.
    drawn = _in_columns(chart, layered, frame, HEIGHT - 80, WIDTH - 100)
    # Each panel has its own order of the categories.
    return drawn.resolve_scale(x="independent") if chart.panel else drawn


def dots(chart: Chart) -> Drawn:
    """A row a category, a mark a series in it. On a logarithmic axis a bar's length says nothing,
    a mark's place does."""
    x, y = chart.x.column, chart.y.column
    rows = list(dict.fromkeys(chart.frame[y]))
    axis = alt.Axis(title=chart.y.title or None, labelLimit=0, grid=True)
    row = alt.Y(f"{y}:N", sort=rows, axis=axis)
    order = list(chart.order)
    shapes = alt.Scale(domain=order, range=[_SHAPES[i % len(_SHAPES)] for i in range(len(order))])
    span = alt.Chart().mark_rule(color="#b6bdc5", strokeWidth=2)
    marks = (
        alt.Chart()
        .mark_point(filled=True, size=90, opacity=1)
        .encode(
            x=alt.X(f"{x}:Q", scale=scale(chart.x), axis=labelled(chart.x, chart.frame[x])),
            y=row,
            color=alt.Color(
                f"{chart.series}:N",
                scale=alt.Scale(domain=order, range=list(COLOURS[: len(order)])),
                legend=legend(chart),
            ),
            shape=alt.Shape(f"{chart.series}:N", scale=shapes),
            tooltip=[alt.Tooltip(f"{y}:N", title=chart.y.title), *tooltips(chart, chart.x)],
        )
    )
    layers = [
        span.encode(x=alt.X(f"min({x}):Q", title=chart.x.title), x2=f"max({x}):Q", y=row),
        marks,
        *references(chart),
    ]
    return _in_columns(
        chart,
        alt.layer(*layers, data=chart.frame),
        chart.frame,
        _ROW_HEIGHT * max(1, len(rows)) - 6,
        WIDTH - _LABELS // 2,
    )


def _categories(chart: Chart, order: list[Any] | None, **axis: Any) -> alt.X:
    """Categories along x; without an order as the data has them."""
    return alt.X(
        f"{chart.x.column}:N", sort=order, axis=alt.Axis(title=chart.x.title or None, **axis)
    )


def _text_tooltip(chart: Chart) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{chart.text}:N", title="input")] if chart.text else []


def _in_columns(
    chart: Chart, drawn: Any, frame: pd.DataFrame, height: int, width: int = WIDTH
) -> Drawn:
    """The drawing as it is, or in a column a panel. Altair's two kinds of it share no type."""
    if chart.panel is None:
        whole: Drawn = drawn.properties(width=width, height=height)
        return whole
    panels = list(dict.fromkeys(frame[chart.panel]))
    narrow = max(120, width // max(1, len(panels)) - 20)
    panelled: Drawn = drawn.properties(width=narrow, height=height).facet(
        column=alt.Column(
            f"{chart.panel}:N",
            sort=panels,
            title=None,
            # Room for the words above a line of reference.
            header=alt.Header(labelPadding=20 if chart.x_reference else 10),
        )
    )
    return panelled
