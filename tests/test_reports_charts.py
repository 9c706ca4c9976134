"""What the charts draw: marks where the data are, labels where they can be read."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from chart_samples import DOTS, EVIL, HEAT, KINDS, STRETCHED, TORNADO, WATERFALL, small
from hypothesis import given
from hypothesis import strategies as st

from reports.charts import chart_spec
from reports.document import Axis, Chart, Mark
from reports.lines import stretch_labels
from reports.reduction import (
    HEAT_MAP_COLUMNS,
    HEAT_MAP_ROWS,
    LINE_POINTS,
    MOST_ROWS,
    cells,
    heat_map_rows,
    stretches,
)
from reports.render import render_png, render_svg

SVG = "{http://www.w3.org/2000/svg}"
NUMBER = r"(-?[0-9.]+)"


def marks(drawn: Chart, kind: str) -> list[list[ElementTree.Element]]:
    """The marks of one kind ("rect", "text", ...) in the chart's SVG, group by group."""
    picture = ElementTree.fromstring(render_svg(drawn))
    return [
        list(group)
        for group in picture.iter(f"{SVG}g")
        if f"mark-{kind} role-mark" in group.get("class", "")
    ]


def words(drawn: Chart) -> list[str]:
    """Every text of the marks, those of axes and legends left out."""
    return [text.text or "" for text in itertools.chain(*marks(drawn, "text"))]


def box(path: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, width and height of a drawn rectangle."""
    found = re.match(rf"M{NUMBER},{NUMBER}h{NUMBER}v{NUMBER}", path.get("d", ""))
    assert found is not None, path.get("d")
    left, top, width, height = (float(number) for number in found.groups())
    return left, top, width, height


def places(symbols: list[ElementTree.Element]) -> Iterator[tuple[float, float]]:
    for symbol in symbols:
        found = re.match(rf"translate\({NUMBER},{NUMBER}\)", symbol.get("transform", ""))
        assert found is not None
        yield float(found[1]), float(found[2])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn(kind: str) -> None:
    assert render_png(KINDS[kind], scale=0.3).startswith(b"\x89PNG")
    picture = ElementTree.fromstring(render_svg(KINDS[kind]))
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert "What it shows" in texts
    assert KINDS[kind].x.title in texts
    drawn = [one for one in picture.iter(f"{SVG}g") if "role-mark" in one.get("class", "")]
    assert any(len(group) for group in drawn)


class TestSegments:
    def test_each_stretch_is_named_once_beside_its_own_line(self) -> None:
        assert words(STRETCHED).count("feed") == 1
        assert words(STRETCHED).count(EVIL) == 1
        assert words(STRETCHED).count("the peak") == 2  # a halo below the words
        frame = stretches(STRETCHED.frame.query("not other"), "x", "y", "stage")
        labels = stretch_labels(
            frame.assign(line=frame["stretch"]), STRETCHED.x, STRETCHED.y, "stage"
        )
        sides = dict(zip(labels["stage"], labels["side"], strict=True))
        # Left of a rise, right of a fall: on neither side does the line cross its name.
        assert sides == {"feed": "left", EVIL: "right"}

    def test_a_chart_without_dashes_has_one_line(self) -> None:
        solid = STRETCHED.frame[~STRETCHED.frame["other"]]
        drawn = replace(STRETCHED, frame=solid, dashed=None)
        assert len(marks(drawn, "line")) == 2
        assert sorted(words(drawn)) == sorted(["feed", EVIL, "the peak", "the peak"])

    def test_the_line_has_no_gap(self) -> None:
        solid = [
            [float(number) for number in re.findall(NUMBER, path.get("d", ""))]
            for (path,) in marks(STRETCHED, "line")
            if "stroke-dasharray" not in path.attrib or path.get("stroke-dasharray") in ("", "1,0")
        ]
        first, second = solid
        assert first[-2:] == second[:2]
        assert (first[0], second[-2]) == (0.0, 780.0)

    @given(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=900),
        st.booleans(),
    )
    def test_stretches_hold_each_point_and_end_where_the_next_begins(
        self, names: list[str], log: bool
    ) -> None:
        frame = pd.DataFrame({"x": np.arange(1.0, len(names) + 1), "y": 1.0, "who": names})
        cut = stretches(frame.sample(frac=1, random_state=1), "x", "y", "who")
        runs = [list(group["x"]) for _, group in cut.groupby("stretch")]
        for before, after in itertools.pairwise(runs):
            assert before[-1] == after[0]
        assert len(cut) - (len(runs) - 1) == min(len(names), LINE_POINTS)
        if len(names) <= LINE_POINTS:
            assert len(runs) == len(list(itertools.groupby(names)))
        axis = Axis("x", "x", log=log)
        labels = stretch_labels(cut.assign(line=cut["stretch"]), axis, Axis("y", "y"), "who")
        assert set(labels["who"]) == set(cut["who"])


class TestHeatMap:
    def test_a_cell_for_every_value_the_best_marked_in_its_row(self) -> None:
        (rects,) = marks(HEAT, "rect")
        boxes = [box(rect) for rect in rects]
        assert len(boxes) == len(HEAT.frame)
        # Two rows, the larger on top, and edges half-way on the logarithmic axis.
        assert {top for _, top, _, _ in boxes} == {0.0, 38.0}
        assert sorted({left for left, _, _, _ in boxes}) == [0.0, 172.5, 517.5]
        assert len({rect.get("fill") for rect in rects}) == len(HEAT.frame)
        (symbol,) = itertools.chain(*marks(HEAT, "symbol"))
        assert list(places([symbol])) == [(345.0, 19.0)]
        assert words(HEAT) == ["the best", "the best"]

    def test_of_many_rows_a_bounded_number_is_drawn_and_the_marked_one_is_kept(self) -> None:
        counts, places = range(1, 101), range(1, 301)
        frame = pd.DataFrame(
            [(place, count, count + place, "feed") for count in counts for place in places],
            columns=["x", "rows", "level", "stage"],
        )
        spec = chart_spec(replace(HEAT, frame=frame, marks=(Mark(10.0, 42, "the best"),)))
        sizes = [len(rows) for rows in spec["datasets"].values()]
        assert max(sizes) == HEAT_MAP_ROWS * HEAT_MAP_COLUMNS <= MOST_ROWS
        drawn = {row["rows"] for rows in spec["datasets"].values() for row in rows if "low" in row}
        assert {1, 42, 100} <= drawn
        assert len(drawn) == HEAT_MAP_ROWS
        assert heat_map_rows(list(counts), [42]) == sorted(drawn)

    def test_a_label_at_the_right_edge_lies_to_the_left_of_its_mark(self) -> None:
        for place, anchor in ((10.0, "start"), (100.0, "end")):
            chart = replace(HEAT, marks=(Mark(place, 2, "the best"),))
            texts = itertools.chain(*marks(chart, "text"))
            assert {text.get("text-anchor") for text in texts} == {anchor}

    def test_cells_meet_and_cover_the_axis(self) -> None:
        generator = np.random.default_rng(2)
        places = np.sort(generator.uniform(1, 50, 3 * HEAT_MAP_COLUMNS))
        frame = pd.DataFrame({"x": np.tile(places, 2), "row": np.repeat([1, 2], len(places))})
        for log in (False, True):
            found = cells(frame, Axis("x", "x", log=log))
            assert len(found) == 2 * HEAT_MAP_COLUMNS
            for _, row in found.groupby("row"):
                np.testing.assert_array_equal(row["high"][:-1], row["low"][1:])
                assert (row["low"] <= row["x"]).all()
                assert (row["x"] <= row["high"]).all()
                assert row["low"].iloc[0] == pytest.approx(places[0])
                assert row["high"].iloc[-1] == pytest.approx(places[-1])

    def test_one_threshold_is_still_a_cell(self) -> None:
        alone = replace(HEAT, frame=HEAT.frame[HEAT.frame["x"] == 10.0])
        (rects,) = marks(alone, "rect")
        assert len(rects) == 2


class TestTornado:
    def test_bars_go_from_the_base_and_the_widest_is_on_top(self) -> None:
        (rects,) = marks(TORNADO, "rect")
        boxes = dict(zip(TORNADO.frame["words"], map(box, rects), strict=True))
        ((rule,),) = marks(TORNADO, "rule")
        found = re.match(rf"translate\({NUMBER}", rule.get("transform", ""))
        assert found is not None
        base = float(found[1])
        one = (boxes["n-high"][2]) / 1.0  # pixels of one unit of x
        for name, value in zip(TORNADO.frame["words"], TORNADO.frame["x"], strict=True):
            left, _, width, _ = boxes[name]
            assert width == pytest.approx(abs(value - 4.0) * one)
            assert (left if value > 4.0 else left + width) == pytest.approx(base)
        rows = sorted(boxes, key=lambda name: boxes[name][1])
        assert rows == ["w-low", "w-high", "n-low", "n-high", "o-low", "o-high"]

    def test_labels_stand_at_the_ends(self) -> None:
        assert sorted(words(TORNADO)) == sorted([*TORNADO.frame["words"], "the base"])

    def test_a_refused_end_has_no_bar(self) -> None:
        refused = TORNADO.frame.assign(x=TORNADO.frame["x"].where(TORNADO.frame["x"] != 9.0))
        drawn = replace(TORNADO, frame=refused)
        (rects,) = marks(drawn, "rect")
        assert len(rects) == 5
        assert "w-high" not in words(drawn)


class TestWaterfall:
    def test_steps_begin_where_the_last_ended(self) -> None:
        for rects, last in zip(marks(WATERFALL, "rect"), (2.5, 2.5), strict=True):
            tops = [box(rect)[1] for rect in rects]
            ends = [box(rect)[1] + box(rect)[3] for rect in rects]
            unit = (ends[0] - tops[0]) / 2.0
            levels = [2.0]
            for top, end in zip(tops[1:], ends[1:], strict=True):
                low, high = (ends[0] - end) / unit, (ends[0] - top) / unit
                assert levels[-1] == pytest.approx(low) or levels[-1] == pytest.approx(high)
                levels.append(high if levels[-1] == pytest.approx(low) else low)
            assert levels[-1] == pytest.approx(last)

    def test_every_step_says_its_size_with_the_sign(self) -> None:
        assert words(WATERFALL) == ["2", "+1.000", "-0.500", "2", "-0.250", "+0.750"]


class TestDots:
    def test_a_mark_a_value_on_the_logarithmic_axis(self) -> None:
        first, second = marks(DOTS, "symbol")
        one, ten = (x for x, _ in places(first))
        hundred, twenty = (x for x, _ in places(second))
        assert ten - one == pytest.approx((hundred - one) / 2)
        assert twenty - one == pytest.approx((hundred - one) * np.log10(20) / 2)
        shapes = {symbol.get("d") for symbol in first}
        assert len(shapes) == 2
        assert words(DOTS) == ["so much", "so much"]


def test_lines_in_one_panel_are_told_apart_by_dashes() -> None:
    lines = small(
        "lines",
        {"x": [1.0, 2.0] * 2, "y": [1.0, 2.0, 2.0, 1.0], "who": ["a", "a", "b", "b"]},
        "who",
    )
    dashes = [path.get("stroke-dasharray") for (path,) in marks(lines, "line")]
    assert len(set(dashes)) == 2
    assert len(list(itertools.chain(*marks(lines, "symbol")))) == 4
    alone = replace(lines, frame=lines.frame.head(2), order=("a",))
    assert "role-legend" not in render_svg(alone)
    assert "role-legend" in render_svg(lines)
