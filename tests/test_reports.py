"""The generic report: bounded charts, one safe, accessible file that loads nothing."""

import base64
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from chart_samples import EVIL, KINDS, chart
from hypothesis import given
from hypothesis import strategies as st

from reports.axes import log_ticks
from reports.charts import chart_spec
from reports.document import (
    Axis,
    Document,
    Facts,
    Figure,
    Items,
    Notice,
    Prose,
    Section,
    Table,
)
from reports.reduction import (
    CDF_POINTS,
    HEAT_MAP_COLUMNS,
    LINE_POINTS,
    MOST_ROWS,
    SCATTER_CELLS,
    SCATTER_POINTS,
    cdf_points,
    line_points,
    scatter_points,
)
from reports.render import cell_text, render, render_png, render_svg


def data_rows(spec: dict[str, Any]) -> int:
    return sum(len(rows) for rows in spec.get("datasets", {}).values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_title_axes_and_series(kind: str) -> None:
    spec = chart_spec(KINDS[kind])
    text = json.dumps(spec, allow_nan=False)
    assert spec["title"]["text"] == ["What it shows"]
    for title in (KINDS[kind].x.title, KINDS[kind].y.title):
        # The rows of a tornado say what they are.
        assert json.dumps(title) in text or (kind, title) == ("tornado", "input")
    assert "#0072B2" in text or '"scheme": "viridis"' in text


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("cdf", 3 * CDF_POINTS),
        ("lines", 3 * LINE_POINTS),
        ("scatter", 3 * SCATTER_CELLS**2),
        ("heat_map", 2 * HEAT_MAP_COLUMNS),
        # Every stretch shares a point with the next, and its name is a point more.
        ("segments", 4 * LINE_POINTS),
    ],
)
def test_charts_of_many_points_stay_small(kind: str, bound: int) -> None:
    change = {"y": Axis("bin", "bin"), "value": Axis("y", "y")} if kind == "heat_map" else {}
    spec = chart_spec(chart(kind, size=30_000, **change))
    assert 100 < data_rows(spec) <= bound


@pytest.mark.parametrize("kind", ["cdf", "lines", "scatter"])
def test_many_series_of_many_points_are_still_drawn(kind: str) -> None:
    whole = chart(kind, size=40_000)
    names = [f"series {number}" for number in range(40)]
    frame = whole.frame.assign(who=[names[number % 40] for number in range(len(whole.frame))])
    spec = chart_spec(replace(whole, frame=frame, order=tuple(names)))
    assert 1000 < data_rows(spec) <= MOST_ROWS


@given(st.lists(st.floats(0, 1e3) | st.just(math.inf), max_size=600))
def test_cdf_points_lie_on_the_distribution(values: list[float]) -> None:
    points = cdf_points(pd.Series(values, dtype="float64"))
    assert len(points) <= CDF_POINTS
    for value, share in points.itertuples(index=False):
        # A step stands between the shares strictly below and up to its value.
        below = sum(other < value for other in values) / len(values)
        upto = sum(other <= value for other in values) / len(values)
        assert below < share + 1e-12
        assert share <= upto + 1e-12
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert points["value"].iloc[-1] == max(finite)
        assert points["share"].iloc[-1] == pytest.approx(len(finite) / len(values))
    else:
        assert points.empty


def test_line_points_keep_the_mean() -> None:
    frame = pd.DataFrame({"t": np.arange(8000.0), "v": np.sin(np.arange(8000.0) / 500)})
    points = line_points(frame, "t", "v")
    assert len(points) == LINE_POINTS
    assert points["v"].mean() == pytest.approx(frame["v"].mean(), abs=1e-9)
    assert points["t"].is_monotonic_increasing
    np.testing.assert_allclose(points["v"], np.sin(points["t"] / 500), atol=0.002)


def test_scatter_points_keep_the_counts() -> None:
    many = chart("scatter", size=9000).frame
    for log in (False, True):
        points = scatter_points(many, Axis("x", "", log), Axis("y", "", log), "who")
        assert len(points) <= 3 * SCATTER_CELLS**2
        assert points["count"].sum() == 9000
        assert points["x"].between(1, 50).all()
    few = many.head(SCATTER_POINTS)
    assert len(scatter_points(few, Axis("x", ""), Axis("y", ""), "who")) == SCATTER_POINTS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\N{EN DASH}"), (math.nan, "\N{EN DASH}"), (pd.NA, "\N{EN DASH}"),
        (math.inf, "infinite"), (0, "0"), (1234567, "1,234,567"), (0.0, "0"),
        (3.14159, "3.142"), (12345.6, "12,346"), (0.00123456, "0.001235"), (-2.5, "-2.500"),
        (9.99999, "10.00"),
        (np.float64(2.0), "2.000"), (np.int64(7), "7"), (True, "yes"), ("as it is", "as it is"),
    ],
)  # fmt: skip
def test_cells(value: object, text: str) -> None:
    assert cell_text(value) == text


class Page(HTMLParser):
    """Elements with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.words.append(data.strip())

    def all(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    table = pd.DataFrame({"name": [EVIL, "b"], "value": [1.5, None]}, dtype=object)
    document = Document(
        f"Title {EVIL}",
        "Subtitle",
        (
            Section("First", (Notice("bad", f"Refused {EVIL}", ("for a reason",)), Prose("Words"))),
            Section("Charts", tuple(Figure(one, "caption") for one in KINDS.values())),
            Section("Data", (Table(table, "A table"), Facts((("k", EVIL),)), Items(("one",)))),
        ),
    )
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert render(document, path) == path
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    return Page(path.read_text(encoding="utf-8"))


def test_the_file_loads_nothing(page: Page) -> None:
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "data"):
            target = attributes.get(name)
            assert target is None or target.startswith(("data:image/svg+xml;base64,", "#")), target
    assert not [tag for tag, _ in page.elements if tag in ("link", "iframe", "base", "object")]
    policy = next(one for one in page.all("meta") if one.get("http-equiv"))["content"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_text_from_outside_stays_text(page: Page) -> None:
    assert page.words.count(EVIL) == 2  # a row's head, a fact's value
    assert f"Refused {EVIL}" in page.words
    # A specification a chart, the libraries, the page's script: no script came from the data.
    assert len(page.scripts) == len(KINDS) + 2
    assert "alert(1)" not in "".join(page.scripts[len(KINDS) :])


def test_every_chart_has_a_picture_words_and_its_specification(page: Page) -> None:
    pictures = list(page.all("img"))
    assert [one["alt"] for one in pictures] == ["What it shows, in words"] * len(KINDS)
    for one in pictures:
        source = one["src"]
        assert source is not None
        svg = base64.b64decode(source.partition(",")[2]).decode()
        assert svg.startswith("<svg")
        assert "What it shows" in svg
    assert [json.loads(text) for text in page.scripts[: len(KINDS)]] == [
        chart_spec(one) for one in KINDS.values()
    ]
    assert "window.vegaEmbed=" in page.scripts[len(KINDS)]


def test_the_page_is_made_for_everyone(page: Page) -> None:
    assert next(page.all("html"))["lang"] == "en"
    headings = [tag for tag, _ in page.elements if tag in ("h1", "h2", "h3")]
    assert headings == ["h1", "h2", "h2", "h2"]
    # A caption lies outside of what scrolls, and names its table.
    (table,) = page.all("table")
    captions = [one["id"] for one in page.all("figcaption") if "id" in one]
    assert captions == [table["aria-labelledby"]]
    assert {one.get("scope") for one in page.all("th")} == {"row", "col"}
    identifiers = [one["id"] for _, one in page.elements if "id" in one]
    assert len(identifiers) == len(set(identifiers)) == 4
    scrolling = [one for one in page.all("div") if one.get("class") == "scroll"]
    assert len(scrolling) == len(KINDS) + 1
    assert all(one.get("tabindex") == "0" for one in scrolling)
    assert all(one.get("aria-label") or one.get("aria-labelledby") for one in scrolling)


def test_a_logarithmic_axis_has_labels_beside_one() -> None:
    assert log_ticks(pd.Series([0.3, 14.0, math.inf])) == (0.5, 1.0, 2.0, 5.0, 10.0)
    assert log_ticks(pd.Series([1e-3, 1e4])) == tuple(10.0**power for power in range(-3, 5))
    for too_few in ([], [0.0], [3.0, 4.0], [math.inf]):
        assert log_ticks(pd.Series(too_few, dtype="float64")) == ()
    picture = render_svg(chart("cdf", x=Axis("x", "x (s)", log=True)))
    for label in (5, 10, 20):
        assert f">{label}</text>" in picture


def test_a_picture_for_elsewhere() -> None:
    png = render_png(KINDS["cdf"], scale=1.0)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width = int.from_bytes(png[16:20], "big")
    assert 800 < width < 1200


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    bad = Document("t", "s", (Section("h", (Figure(chart("cdf", x=Axis("nothing", "x"))),)),))
    with pytest.raises(KeyError):
        render(bad, path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
