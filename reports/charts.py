"""Charts as Vega-Lite specifications, one for every kind that a document knows."""

import textwrap
from typing import Any

import altair as alt

from reports.bars import dots, stacked_bars, tornado, waterfall
from reports.document import Chart
from reports.lines import cdf, lines, segments
from reports.planes import heat_map, scatter


def chart_spec(chart: Chart) -> dict[str, Any]:
    """The Vega-Lite specification of a chart, its data inside."""
    draw = {
        "cdf": cdf,
        "dots": dots,
        "heat_map": heat_map,
        "lines": lines,
        "scatter": scatter,
        "segments": segments,
        "stacked_bars": stacked_bars,
        "tornado": tornado,
        "waterfall": waterfall,
    }[chart.kind]
    title = alt.TitleParams(
        textwrap.wrap(chart.title, 100), anchor="start", fontSize=15, fontWeight=600, offset=20
    )
    drawn = draw(chart).properties(title=title)
    configured = (
        drawn.configure(font="system-ui, 'DejaVu Sans', sans-serif", aria=False)
        .configure_view(strokeWidth=0)
        .configure_axis(labelFontSize=12, titleFontSize=13, gridColor="#e4e4e4", titlePadding=8)
        .configure_legend(labelFontSize=12, titleFontSize=13, symbolStrokeWidth=3, labelLimit=0)
        .configure_header(labelFontSize=13, labelFontWeight=600)
    )
    spec: dict[str, Any] = configured.to_dict()
    return spec
