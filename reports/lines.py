"""Charts of lines: distributions, series over a quantity, and a line of named stretches."""

from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from reports.axes import (
    COLOURS,
    GREY,
    HEIGHT,
    WIDTH,
    Drawn,
    colour,
    labelled,
    references,
    scale,
    tooltips,
)
from reports.document import Axis, Chart
from reports.reduction import (
    CDF_POINTS,
    LINE_POINTS,
    MOST_ROWS,
    cdf_points,
    line_points,
    stretches,
)

_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
#: Lines of at most this many points show each.
_MOST_POINTS = 30
#: Shares of the axes: a shorter stretch goes without its name where another has it, and one that
#: rises or falls by more has it beside itself.
_SHORT, _STEEP = 0.15, 0.1
#: From this share of the x axis on a mark's label lies to its left.
_FAR = 0.7
_LABEL: dict[str, Any] = {"fontSize": 13, "fontWeight": 600}
#: How the text of a label lies at its point.
_SIDES: dict[str, dict[str, Any]] = {
    "left": {"align": "right", "dx": -14},
    "over": {"align": "center", "dx": 0},
    "right": {"align": "left", "dx": 10},
}


def cdf(chart: Chart) -> Drawn:
    """Distribution functions, dashed where the chart says so."""
    keys = [chart.series] + ([chart.dashed] if chart.dashed else [])
    most = _most(chart, keys, CDF_POINTS)
    frame = _by_line(chart, keys, lambda group: cdf_points(group[chart.x.column], most))
    frame = frame if len(frame) else pd.DataFrame(columns=["value", "share", *keys])
    encoding: dict[str, Any] = {
        "x": alt.X("value:Q", scale=scale(chart.x), axis=labelled(chart.x, frame["value"])),
        "y": alt.Y(
            "share:Q",
            scale=alt.Scale(domain=[0, 1]),
            axis=alt.Axis(format="%", title=chart.y.title),
        ),
        "color": colour(chart),
        "tooltip": [
            alt.Tooltip(f"{chart.series}:N"),
            alt.Tooltip("value:Q", format=".3~g", title=chart.x.title),
            alt.Tooltip("share:Q", format=".1%", title=chart.y.title),
        ],
    }
    if chart.dashed:
        frame, encoding["strokeDash"] = _dashes(chart, frame)
    drawn = alt.Chart(frame).mark_line(interpolate="step-after", strokeWidth=2).encode(**encoding)
    return alt.layer(drawn).properties(width=WIDTH, height=HEIGHT)


def lines(chart: Chart) -> Drawn:
    """A line a series, all in one panel or in a panel each."""
    x, y = chart.x, chart.y
    keys = list(dict.fromkeys([chart.series, *([chart.panel] if chart.panel else [])]))
    most = _most(chart, keys, LINE_POINTS)
    frame = _by_line(chart, keys, lambda group: line_points(group, x.column, y.column, most))
    frame = frame if len(frame) else pd.DataFrame(columns=[x.column, y.column, *keys])
    encoding: dict[str, Any] = {
        "x": alt.X(f"{x.column}:Q", scale=scale(x), axis=labelled(x, frame[x.column])),
        "y": alt.Y(f"{y.column}:Q", scale=scale(y), axis=labelled(y, frame[y.column])),
        "color": colour(chart, symbolType="stroke", symbolSize=600),
        "tooltip": tooltips(chart, x, y),
    }
    if chart.panel != chart.series and len(chart.order) > 1:
        dashes = [_DASHES[number % len(_DASHES)] for number in range(len(chart.order))]
        encoding["strokeDash"] = alt.StrokeDash(
            f"{chart.series}:N", scale=alt.Scale(domain=list(chart.order), range=dashes)
        )
    few = len(frame) == 0 or frame.groupby(keys).size().max() <= _MOST_POINTS
    drawn = alt.Chart().mark_line(strokeWidth=2 if few else 1.5, point=bool(few)).encode(**encoding)
    layers = [drawn, *references(chart)]
    if chart.panel is None:
        return alt.layer(*layers, data=frame).properties(width=WIDTH, height=HEIGHT)
    panels = list(dict.fromkeys(frame[chart.panel]))
    height = max(120, HEIGHT // max(1, len(panels)))
    return (
        alt.layer(*layers)
        .properties(width=WIDTH, height=height)
        .facet(
            data=frame,
            row=alt.Row(
                f"{chart.panel}:N",
                sort=panels,
                title=None,
                header=alt.Header(labelAngle=0, labelOrient="top", labelAnchor="start"),
            ),
        )
    )


def segments(chart: Chart) -> Drawn:
    """Lines in the colours of their stretches, whose names stand beside the solid ones."""
    x, y = chart.x, chart.y
    keys = [chart.dashed] if chart.dashed else []
    frame = _by_line(chart, keys, lambda group: stretches(group, x.column, y.column, chart.series))
    frame["line"] = frame.groupby([*keys, "stretch"], sort=False).ngroup()
    named = frame[~frame[chart.dashed].astype(bool)] if chart.dashed else frame
    labels = stretch_labels(named, x, y, chart.series)
    encoding: dict[str, Any] = {
        "x": alt.X(f"{x.column}:Q", scale=scale(x), axis=labelled(x, frame[x.column])),
        "y": alt.Y(f"{y.column}:Q", scale=scale(y), axis=labelled(y, frame[y.column])),
        "color": alt.Color(
            f"{chart.series}:N",
            scale=alt.Scale(domain=list(chart.order), range=list(COLOURS[: len(chart.order)])),
            legend=None,  # The names stand on the chart.
        ),
    }
    dashes: dict[str, Any] = {}
    if chart.dashed:
        frame, dashes["strokeDash"] = _dashes(chart, frame)
    base = alt.Chart().encode(**encoding)
    layers = [
        base.mark_line(strokeWidth=2.5).encode(detail="line:N", **dashes),
        base.mark_point(filled=True, size=80, opacity=0).encode(tooltip=tooltips(chart, x, y)),
        *references(chart),
    ]
    lift = -22 if chart.dashed else -12  # clear of a dashed line that runs close by
    for side, place in _SIDES.items():
        words = alt.Chart(labels[labels["side"] == side]).mark_text(
            **place, dy=lift, fontSize=13, fontWeight=600, baseline="bottom"
        )
        layers.append(words.encode(**encoding, text=f"{chart.series}:N"))
    return alt.layer(*layers, *mark_layers(chart, f"{y.column}:Q"), data=frame).properties(
        width=WIDTH, height=HEIGHT
    )


def stretch_labels(frame: pd.DataFrame, x: Axis, y: Axis, series: str) -> pd.DataFrame:
    """Where each stretch is named: its middle point, and the side of the line that is free.

    A name is written on every stretch of some length, else on the longest that has it.
    """
    if frame.empty:
        return pd.DataFrame(columns=[x.column, y.column, series, "side"])
    named = frame.assign(_along=_shares(frame[x.column], x), _up=_shares(frame[y.column], y))
    rows = []
    for _, group in named.groupby("line", sort=False):
        along, up = group["_along"].to_numpy(), group["_up"].to_numpy()
        at = int(np.abs(along - (along[0] + along[-1]) / 2).argmin())
        rise, length = up[-1] - up[0], along[-1] - along[0]
        side = "over" if abs(rise) <= _STEEP else "left" if rise > 0 else "right"
        rows.append(group.iloc[[at]].assign(side=side, length=length))
    found = pd.concat(rows)
    longest = found.groupby(series)["length"].transform("max")
    return found[(found["length"] >= _SHORT) | (found["length"] == longest)]


def mark_layers(chart: Chart, y: alt.Y | str) -> list[alt.Chart]:
    """The chart's marks: a dot with a ring, and a label that stays readable on any ground."""
    if not chart.marks:
        return []
    frame = pd.DataFrame(
        [{chart.x.column: one.x, chart.y.column: one.y, "text": one.text} for one in chart.marks]
    )
    place: dict[str, Any] = {"x": f"{chart.x.column}:Q", "y": y}
    layers = [
        alt.Chart(frame)
        .mark_point(
            filled=True, size=110, opacity=1, color="#000000", stroke="#ffffff", strokeWidth=2
        )
        .encode(**place)
    ]
    # A label near the right edge would leave the chart, or lie on its legend.
    along = _shares(pd.concat([chart.frame[chart.x.column], frame[chart.x.column]]), chart.x)
    far = along[-len(frame) :] > _FAR
    for side, some in (("left", frame[~far]), ("right", frame[far])):
        if some.empty:
            continue
        words = {"align": side, "dx": 9 if side == "left" else -9, "dy": -9} | _LABEL
        base = alt.Chart(some)
        layers += [
            base.mark_text(stroke="#ffffff", strokeWidth=4, **words).encode(text="text:N", **place),
            base.mark_text(color="#000000", **words).encode(text="text:N", **place),
        ]
    return layers


def _most(chart: Chart, keys: list[str], usual: int) -> int:
    """Points of each line, so that all of them together are not too many to draw."""
    return max(1, min(usual, MOST_ROWS // max(1, chart.frame.groupby(keys).ngroups)))


def _by_line(chart: Chart, keys: list[str], reduce: Any) -> pd.DataFrame:
    """Each group of ``keys`` reduced to what is drawn of it, its keys as columns again."""
    if not keys:
        reduced: pd.DataFrame = reduce(chart.frame)
        return reduced
    parts = []
    for key, group in chart.frame.groupby(keys, sort=False):
        names: dict[str, Any] = dict(zip(keys, key, strict=True))
        parts.append(reduce(group).assign(**names))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=keys)


def _dashes(chart: Chart, frame: pd.DataFrame) -> tuple[pd.DataFrame, alt.StrokeDash]:
    """The frame with the dashed column as words, and the encoding that draws them."""
    assert chart.dashed is not None
    solid, dashed = chart.dashed_labels
    worded = np.where(frame[chart.dashed].astype(bool), dashed, solid)
    return frame.assign(**{chart.dashed: worded}), alt.StrokeDash(
        f"{chart.dashed}:N",
        scale=alt.Scale(domain=[solid, dashed], range=[[1, 0], [5, 4]]),
        legend=alt.Legend(title=None, orient="bottom", symbolStrokeColor=GREY),
    )


def _shares(values: "pd.Series[float]", axis: Axis) -> NDArray[np.float64]:
    """Values as shares of what the axis spans. # (points,)"""
    scaled = values.to_numpy(dtype=np.float64)
    scaled = np.log(scaled) if axis.log else scaled
    low = scaled.min() if axis.log else min(0.0, scaled.min())
    shares: NDArray[np.float64] = (scaled - low) / ((scaled.max() - low) or 1.0)
    return shares
