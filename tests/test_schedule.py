"""Schedules by columns: the same as the requests they stand for, and their bytes pinned."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core import Request
from harness.scenario import load_scenario
from harness.schedule import HashChains, Schedule
from harness.workload import build_schedule

PAPER = Path(__file__).parents[1] / "scenarios" / "paper-case-study.toml"
ON_OFF = (
    "workload.arrivals=on_off",
    "workload.on_duration=20s",
    "workload.off_duration=40s",
    "workload.on_rate_multiple=2.5",
)
STATES = (
    "workload.arrivals=mmpp",
    'workload.states=[{rate_multiple=0.2,mean_duration="60s"},'
    '{rate_multiple=1,mean_duration="30s"},{rate_multiple=5,mean_duration="10s"}]',
)
#: A change here changes every published run: it needs a note in the changelog. The same on every
#: machine; what is drawn by laws that were here from the start is what it always was.
PINNED = {
    (): "e5578924c8d0618024c6ee98bba08ede5f744849581a73727c04be17442475cd",
    (
        "workload.cv=2",
        "load.num_requests=2000",
    ): "7d2da12839f71122e52fdccabf3e003320fa53829e6566e885253d09a2c9e6ac",
    (
        "workload.cv=0.5",
        "load.seed=7",
        "load.duration=1200s",
    ): "2c01435ed7c2986942d1181c9dd012db1c130e1888077ab8b268a0dcde14be82",
    (
        *ON_OFF,
        "load.num_requests=3000",
    ): "9b85b3b45c1f8fe5209485f7355168ff1c010391346ad21f6889ad64bf565bb0",
    (
        *ON_OFF,
        "workload.cv=1.5",
        "load.duration=3000s",
    ): "d03875311fa49928b361aa3096f0c6b612121ab5277d7d91edbb1cf37952eae3",
    (
        "workload.arrivals=weibull",
        "workload.cv=2",
        "load.num_requests=3000",
    ): "9ce2eb72895ba11ae0ca31c18463430f96ad70a586b7dd74ce014a649da9580c",
    (
        *STATES,
        "load.num_requests=3000",
    ): "bb09c1a6758285fe8892a9e97be62a0e4190857a5a0ec4c50b02eb80019692a6",
    ('workload.shape.diurnal={period="1h",peak_at="20min",swing="70%"}', "load.duration=2h"): (
        "b474c4f9ef099dc80072b52c3cd6c39d3165d429ad46b0576e377e6ace25ff2e"
    ),
    (
        *ON_OFF,
        'workload.shape.ramps=[{at="0s",multiple=1},{at="300s",multiple=4}]',
    ): "5a8a4099ae439825b1f21f57f3fdcbdf5435167b103cffea33e3f0612bd0398b",
    (
        'workload.sessions={turns=4,think_time="20s",increment_tokens=300}',
    ): "3a5b074adc3d784a0193a5a14ef0f6c1b13aa67f530f5ee2cdaa9235f924b31d",
}


def scheduled(*overrides: str) -> Schedule:
    scenario = load_scenario(PAPER, overrides)
    return build_schedule(scenario.workload, scenario.load)


@pytest.mark.parametrize("overrides", PINNED, ids=" ".join)
def test_the_bytes_of_a_seed_are_pinned(overrides: tuple[str, ...]) -> None:
    assert scheduled(*overrides).sha256() == PINNED[overrides]


def columns(rows: Sequence[Request]) -> Schedule:
    return Schedule(
        np.array([row.index for row in rows], dtype=np.int64),
        np.array([row.planned_s for row in rows], dtype=np.float64),
        np.array([row.input_tokens for row in rows], dtype=np.int64),
        np.array([row.output_tokens for row in rows], dtype=np.int64),
        HashChains.of([row.hash_ids for row in rows]),
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[Request, ...]:
    chains = draw(st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=4), max_size=9))
    return tuple(
        Request(f"{n:06d}", n, n / 7, n + 1, 2 * n + 1, tuple(chain))
        for n, chain in enumerate(chains)
    )


@settings(max_examples=60)
@given(rows=requests(), cut=st.slices(9), other=requests())
def test_a_schedule_is_the_sequence_of_its_requests(
    rows: tuple[Request, ...], cut: slice, other: tuple[Request, ...]
) -> None:
    schedule = columns(rows)
    assert tuple(schedule) == rows
    assert [schedule[n] for n in range(-len(rows), len(rows))] == [*rows, *rows]
    assert tuple(schedule[cut]) == rows[cut]
    assert schedule[cut] == rows[cut]
    assert (schedule == other) == (rows == other) == (schedule == columns(other))
    assert (schedule.sha256() == columns(other).sha256()) == (rows == other)
    with pytest.raises(IndexError):
        schedule[len(rows)]


def test_a_hash_does_not_ask_how_the_columns_are_held() -> None:
    turns = scheduled("workload.sessions={turns=4,think_time='20s',increment_tokens=300}")
    assert turns.chains is not None
    assert turns.chains.flat.dtype == np.uint32
    assert len(turns.chains.flat) < int(turns.chains.count.sum()) / 2, "turns share their ids"
    apart = columns(tuple(turns))
    assert apart.sha256() == turns.sha256()
    assert apart == turns
    assert turns[10:20].sha256() == columns(tuple(turns)[10:20]).sha256()
    assert turns[10:20] != turns[11:21]
    assert turns != [*turns][:-1]


def test_a_long_schedule_is_iterated_as_it_is_indexed() -> None:
    rows = scheduled("load.num_requests=10000")
    assert [request.planned_s for request in rows] == rows.planned_s.tolist()
    assert [request.rid for request in rows][4095:4098] == ["004095", "004096", "004097"]
    assert next(iter(rows)) == rows[0]
    assert type(rows[0].planned_s) is float
    assert type(rows[0].input_tokens) is int
