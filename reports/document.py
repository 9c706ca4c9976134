"""What a report is made of: a document of sections, a section of blocks.

Cells of tables and values of facts are shown as given when they are text; numbers are rounded to
four significant digits, and a missing one is a dash. Charts name columns of their data frame.
"""

from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

ChartKind = Literal[
    "cdf",
    "dots",
    "heat_map",
    "lines",
    "scatter",
    "segments",
    "stacked_bars",
    "tornado",
    "waterfall",
]
Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A column on an axis, its title with the unit, and whether the scale is logarithmic."""

    column: str
    title: str
    log: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the plane of a chart's axes, and its label."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; ``title`` says what it shows to be true, ``alt`` says it to who cannot see it.

    kind          x             y             series                    panel
    cdf           the values    (computed)    a line                    -
    dots          values        a row         a colour and a shape      a column each
    heat_map      values        a row         named in the tooltip      -
    lines         values        values        a line                    a row each
    scatter       values        values        a colour                  -
    segments      values        values        the stretches of a line   -
    stacked_bars  categories    bar lengths   a layer                   a column each
    tornado       bar ends      a row         which end                 -
    waterfall     categories    levels        (the category)            a column each

    ``order`` fixes the order, and so the colours, of the series; ``dashed`` names a boolean column
    (cdf, segments) for the lines drawn dashed. ``reference`` is a level of y with its label (lines,
    segments), ``x_reference`` one of x (dots, lines, segments; the base of a tornado). ``identity``
    draws y = x (scatter). ``value`` is what a cell's colour stands for (heat_map), ``text`` a
    column of labels (tornado), ``marks`` are drawn on top (heat_map, segments).

    Infinite values of a cdf count, but are never reached. The rows of a tornado are sorted by the
    span of their ends. A level of a waterfall is what is reached with the category, so that a bar
    is the step from the level before it; the first stands on zero.
    """

    kind: ChartKind
    frame: pd.DataFrame
    title: str
    alt: str
    x: Axis
    y: Axis
    series: str
    order: tuple[str, ...]
    series_title: str = ""
    panel: str | None = None
    dashed: str | None = None
    dashed_labels: tuple[str, str] = ("solid", "dashed")
    reference: tuple[float, str] | None = None
    x_reference: tuple[float, str] | None = None
    identity: bool = False
    value: Axis | None = None
    text: str | None = None
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with the words below it."""

    chart: Chart
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; its first column heads the rows."""

    frame: pd.DataFrame
    caption: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one a line."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Prose:
    """One paragraph of plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list of plain sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """A result that must not be overlooked, with its reasons."""

    tone: Tone
    text: str
    items: tuple[str, ...] = ()


Block = Figure | Table | Facts | Prose | Items | Notice


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    heading: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    sections: tuple[Section, ...] = field(default=())
