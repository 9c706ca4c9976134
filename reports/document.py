"""What a report is made of: a document of sections, a section of blocks.

Cells of tables and values of facts are shown as given when they are text; numbers are rounded to
four significant digits, and a missing one is a dash. Charts name columns of their data frame.
"""

from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

ChartKind = Literal["cdf", "stacked_bars", "scatter", "lines"]
Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A column on an axis, its title with the unit, and whether the scale is logarithmic."""

    column: str
    title: str
    log: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; ``title`` says what it shows to be true, ``alt`` says it to who cannot see it.

    kind          x             y             series      panel
    cdf           the values    (computed)    a line      -
    stacked_bars  categories    bar lengths   a layer     a panel each
    scatter       values        values        a colour    -
    lines         values        values        a line      a panel each

    ``order`` fixes the order, and so the colours, of the series; ``dashed`` names a boolean column
    (cdf) for the lines drawn dashed. ``reference`` is a level with its label (lines);
    ``identity`` draws y = x (scatter). Infinite values of a cdf count, but are never reached.
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
    identity: bool = False


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
