"""What the kinds of charts have in common: sizes, colours, scales, axes and lines of reference.

Colours are those of Okabe and Ito (2008), which stay apart in the common forms of colour blindness.
What they tell apart is told by dashes, shapes, headings or words on the chart too.
"""

import math
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from reports.document import Axis, Chart

COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442",
)  # fmt: skip
GREY = "#595959"
WIDTH, HEIGHT = 780, 320
_MOST_DECADES = 4
Drawn = alt.Chart | alt.LayerChart | alt.FacetChart


def colour(chart: Chart, **symbols: Any) -> alt.Color:
    """The colours of the series in their order, with a legend where there is something to tell.

    ``symbols`` are options of the legend.
    """
    # Headings of panels already name the series.
    told = chart.panel == chart.series or len(chart.order) == 1
    return alt.Color(
        f"{chart.series}:N",
        scale=alt.Scale(domain=list(chart.order), range=list(COLOURS[: len(chart.order)])),
        legend=None if told else legend(chart, **symbols),
    )


def legend(chart: Chart, **symbols: Any) -> alt.Legend:
    """The legend of the series, below the chart."""
    return alt.Legend(title=chart.series_title or None, orient="bottom", columns=4, **symbols)


def scale(axis: Axis) -> alt.Scale:
    """From zero, or logarithmic over just what there is."""
    return alt.Scale(type="log", nice=False) if axis.log else alt.Scale(zero=True)


def labelled(axis: Axis, values: "pd.Series[float] | None" = None) -> alt.Axis:
    """``values`` is what a logarithmic axis spans, which decides its labels."""
    ticks = log_ticks(values) if axis.log and values is not None else ()
    chosen: dict[str, Any] = {"values": list(ticks)} if ticks else {"tickCount": 8}
    return alt.Axis(format=",.6~g", labelOverlap=True, title=axis.title, **chosen)


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


def references(chart: Chart) -> list[alt.Chart]:
    """The chart's lines of reference and their words, once a panel. Layers without data."""
    # One row a panel, else the words are drawn once for every point.
    once = alt.Chart().transform_aggregate(points="count()")
    words: dict[str, Any] = {"color": GREY, "fontSize": 12}
    layers = []
    if chart.reference is not None:
        level, label = chart.reference
        layers += [
            once.mark_rule(color=GREY, strokeDash=[4, 4]).encode(y=alt.datum(level)),
            once.mark_text(align="right", baseline="bottom", dx=-4, dy=-3, **words).encode(
                x=alt.value("width"), y=alt.datum(level), text=alt.datum(label)
            ),
        ]
    if chart.x_reference is not None:
        place, label = chart.x_reference
        layers += [
            once.mark_rule(color=GREY, strokeDash=[4, 4]).encode(x=alt.datum(place)),
            once.mark_text(baseline="bottom", dy=-5, **words).encode(
                x=alt.datum(place), y=alt.value(0), text=alt.datum(label)
            ),
        ]
    return layers


def tooltips(chart: Chart, *axes: Axis) -> list[alt.Tooltip]:
    """The series and the values on the axes."""
    values = [alt.Tooltip(f"{one.column}:Q", format=",.4~g", title=one.title) for one in axes]
    return [alt.Tooltip(f"{chart.series}:N", title=chart.series_title or chart.series), *values]
