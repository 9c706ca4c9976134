"""One chart of every kind, from numbers that are known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from reports.document import Axis, Chart, Mark

EVIL = "</script><script>alert(1)</script><b>&"


def chart(kind: Any, size: int = 30, **change: Any) -> Chart:
    generator = np.random.default_rng(1)
    frame = pd.DataFrame(
        {
            "x": generator.uniform(1, 50, size),
            "y": generator.uniform(1, 50, size),
            "bin": [["short", "long"][number % 2] for number in range(size)],
            "who": [["a", "b", EVIL][number % 3] for number in range(size)],
            "made_up": [number % 2 == 0 for number in range(size)],
        }
    )
    whole = Chart(
        kind, frame, "What it shows", "What it shows, in words", Axis("x", "x (s)"),
        Axis("y", "y (s)"), "who", ("a", "b", EVIL),
    )  # fmt: skip
    return replace(whole, **change)


def small(kind: Any, rows: dict[str, list[Any]], series: str, **change: Any) -> Chart:
    """A chart of few rows, whose every number is known."""
    frame = pd.DataFrame(rows)
    order = tuple(dict.fromkeys(frame[series]))
    return replace(chart(kind), frame=frame, series=series, order=order, **change)


#: Over x from 1 to 10,000 the line rises by "feed", falls by "drain".
STRETCHED = small(
    "segments",
    {
        "x": [1.0, 10.0, 100.0, 1000.0, 1e4, 1.0, 1e4],
        "y": [1.0, 2.0, 3.0, 2.5, 0.5, 1.2, 0.7],
        "stage": ["feed", "feed", "feed", EVIL, EVIL, "feed", EVIL],
        "other": [False] * 5 + [True] * 2,
    },
    "stage",
    x=Axis("x", "x (s)", log=True),
    dashed="other",
    dashed_labels=("this way", "that way"),
    marks=(Mark(100.0, 3.0, "the peak"),),
)
HEAT = small(
    "heat_map",
    {
        "x": [1.0, 10.0, 100.0] * 2,
        "rows": [1, 1, 1, 2, 2, 2],
        "level": [1.0, 2.0, 3.0, 4.0, 6.0, 5.0],
        "stage": ["feed", "feed", EVIL] * 2,
    },
    "stage",
    x=Axis("x", "x (s)", log=True),
    y=Axis("rows", "rows"),
    value=Axis("level", "level (1/s)"),
    marks=(Mark(10.0, 2, "the best"),),
)
TORNADO = small(
    "tornado",
    {
        "x": [3.0, 5.0, 1.0, 9.0, 3.9, 3.8],
        "input": ["narrow", "narrow", "wide", "wide", "one side", "one side"],
        "end": ["low", EVIL] * 3,
        "words": ["n-low", "n-high", "w-low", "w-high", "o-low", "o-high"],
    },
    "end",
    y=Axis("input", "input"),
    text="words",
    x_reference=(4.0, "the base"),
)
WATERFALL = small(
    "waterfall",
    {
        "part": ["start", "+ a", "+ b", "start", "+ b", "+ a"],
        "y": [2.0, 3.0, 2.5, 2.0, 1.75, 2.5],
        "way": ["forth"] * 3 + [EVIL] * 3,
    },
    "part",
    x=Axis("part", "part"),
    panel="way",
)
DOTS = small(
    "dots",
    {
        "x": [1.0, 10.0, 100.0, 20.0],
        "who": ["m1", "m1", "m2", "m2"],
        "size": ["short", EVIL] * 2,
        "where": ["here", "here", "there", "there"],
    },
    "size",
    x=Axis("x", "x (s)", log=True),
    y=Axis("who", "y (s)"),
    panel="where",
    x_reference=(50.0, "so much"),
)
KINDS = {
    "cdf": chart("cdf", dashed="made_up", dashed_labels=("measured", "simulated")),
    "stacked_bars": chart("stacked_bars", x=Axis("bin", "length"), panel="made_up"),
    "scatter": chart("scatter", identity=True, x=Axis("x", "x (s)", log=True)),
    "lines": chart("lines", panel="who", reference=(60.0, "capacity")),
    "segments": STRETCHED,
    "heat_map": HEAT,
    "tornado": TORNADO,
    "waterfall": WATERFALL,
    "dots": DOTS,
}
