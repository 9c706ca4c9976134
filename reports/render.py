"""Renders a document to one HTML file that needs nothing else: no network, no other file.

The Vega libraries are inlined once. Each chart is first an SVG picture, so that it is there without
scripts and on paper; a script then puts the live chart in its place. The page's own content
security policy forbids every load from elsewhere.
"""

import base64
import functools
import json
import math
import numbers
import os
import re
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import pandas as pd
import vl_convert

from reports.charts import chart_spec
from reports.document import Block, Chart, Document, Facts, Figure, Items, Notice, Prose, Table

#: vl-convert names a Vega-Lite version by its first two numbers.
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
MISSING = "\N{EN DASH}"
_KINDS = {
    Figure: "figure",
    Table: "table",
    Facts: "facts",
    Prose: "prose",
    Items: "items",
    Notice: "notice",
}


def render(document: Document, path: Path) -> Path:
    """Write the document as HTML; the file appears whole or not at all."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = cell_text
    page = environment.get_template("report.html.j2").render(
        document=document,
        sections=[
            {"heading": section.heading, "blocks": [_block(block) for block in section.blocks]}
            for section in document.sections
        ],
        bundle=_bundle(),
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def render_png(chart: Chart, scale: float = 2.0) -> bytes:
    """The chart as a PNG picture."""
    picture: bytes = vl_convert.vegalite_to_png(
        chart_spec(chart), vl_version=VEGA_LITE, scale=scale
    )
    return picture


def render_svg(chart: Chart) -> str:
    """The chart as an SVG picture."""
    return _svg(chart_spec(chart))


def _svg(spec: dict[str, Any]) -> str:
    picture: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    return picture


def cell_text(value: object) -> str:
    """A table cell: text as it is, numbers to four significant digits, a dash for nothing."""
    if value is None or value is pd.NA:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isnan(number):
            return MISSING
        if math.isinf(number):
            return "infinite" if number > 0 else "-infinite"
        # Rounded first: 9.9999 has two figures before the point.
        digits = 3 - math.floor(math.log10(abs(float(f"{number:.3e}")))) if number else 0
        return f"{number:,.{min(max(digits, 0), 12)}f}"
    return str(value)


def is_number(value: object) -> bool:
    """Whether a cell is set to the right."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@functools.cache
def _bundle() -> str:
    script: str = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE
    )
    # Either would end, or change how the browser reads, the element that holds the script.
    return re.sub(r"<(/script|!--)", r"\\x3c\1", script, flags=re.IGNORECASE)


def _block(block: Block) -> dict[str, Any]:
    content: dict[str, Any] = {"kind": _KINDS[type(block)], "it": block}
    if isinstance(block, Figure):
        spec = chart_spec(block.chart)
        content["picture"] = base64.b64encode(_svg(spec).encode()).decode("ascii")
        # "<" inside JSON text could end the element that holds it.
        content["spec"] = json.dumps(spec, allow_nan=False).replace("<", "\\u003c")
    if isinstance(block, Table):
        content["columns"] = [str(column) for column in block.frame.columns]
        content["rows"] = [
            [(cell_text(value), is_number(value)) for value in row]
            for row in block.frame.astype(object).itertuples(index=False, name=None)
        ]
    return content
