"""Which part of a trace is replayed, how fast, and what becomes of lengths outside bounds."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core import ScenarioError
from harness.scenario import Scenario, load_scenario
from harness.scenario_change import with_trace
from harness.trace import Selection, read_trace, select, told
from harness.workload import build_schedule, schedule_notes

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "scenarios" / "paper-case-study.toml"
TRACES = ROOT.parent / "shared" / "data" / "traces"


def mooncake(folder: Path, rows: Sequence[tuple[float, int, int]]) -> Path:
    """``(ms, input, output)``, each with the hash ids 0, 1, ... that its input fills."""
    lines = [
        json.dumps(
            {
                "timestamp": at,
                "input_length": new,
                "output_length": out,
                "hash_ids": list(range(-(-new // 512))),
            }
        )
        for at, new, out in rows
    ]
    path = folder / "t.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def replayed(path: Path, *settings: str, duration_s: float | None = None) -> Scenario:
    own = [one for one in settings if one.startswith(("workload.rate_scale", "load."))]
    others = [one for one in settings if one not in own]
    return with_trace(load_scenario(PAPER, own), path, duration_s, settings=others)


ROWS = [(1000.0 * n, 400 + 100 * n, 5 + n) for n in range(40)]


def test_bounds_drop_or_clip_and_say_how_many(tmp_path: Path) -> None:
    path = mooncake(tmp_path, ROWS)
    bounds = ("workload.min_tokens=1000", "workload.max_tokens=2000")
    dropped = replayed(path, *bounds, "workload.outside_bounds=drop")
    rows = build_schedule(dropped.workload, dropped.load)
    assert rows.input_tokens.tolist() == list(range(1000, 2001, 100))
    assert dropped.workload.left_out == {
        "input below 1000 tokens": 6,
        "input above 2000 tokens": 23,
    }
    clipped = replayed(path, *bounds, "workload.outside_bounds=clip")
    rows = build_schedule(clipped.workload, clipped.load)
    assert rows.input_tokens.tolist() == [min(max(new, 1000), 2000) for _, new, _ in ROWS]
    assert clipped.workload.left_out == {}
    assert clipped.workload.clipped == dropped.workload.left_out
    assert all(len(row.hash_ids) <= -(-row.input_tokens // 512) for row in rows)
    assert rows[-1].hash_ids == (0, 1, 2, 3)
    notes = schedule_notes(clipped.workload, clipped.load)
    assert notes[1] == (
        "workload.trace: 23 lengths clipped to their bound: input above 2000 tokens"
    )
    outputs = replayed(path, "workload.output_max_tokens=20", "workload.outside_bounds=clip")
    assert outputs.workload.output_max_tokens == 20
    with pytest.raises(ScenarioError, match=r"Nothing is left.*input below 90000 tokens"):
        replayed(path, "workload.min_tokens=90000", "workload.outside_bounds=drop")


def test_a_time_scale_keeps_the_rate_by_drawing_requests(tmp_path: Path) -> None:
    path = mooncake(tmp_path, [(100.0 * n, 500 + n, 5) for n in range(20_000)])
    plain = replayed(path)
    day = replayed(path, "workload.trace_time_scale=8")
    rows = build_schedule(day.workload, day.load)
    (gone,) = day.workload.left_out.values()
    assert len(rows) + gone == 20_000
    assert len(rows) == pytest.approx(2500, rel=0.06)
    assert rows[-1].planned_s == pytest.approx(2000 / 8, rel=0.02)
    assert day.load.rate_req_per_s == pytest.approx(plain.load.rate_req_per_s, rel=0.06)
    # Every request kept stays where it was, on the faster clock.
    at = {500 + n: n / 10 / 8 for n in range(20_000)}
    assert all(row.planned_s == pytest.approx(at[row.input_tokens]) for row in rows)
    thinned = replayed(path, "workload.rate_scale=0.5", "workload.trace_time_scale=1")
    half = build_schedule(thinned.workload, thinned.load)
    assert half[-1].planned_s == pytest.approx(2000, rel=0.01)
    assert len(half) == pytest.approx(10_000, rel=0.03)
    shorter = replayed(path, "workload.trace_time_scale=8", duration_s=1000.0)
    part = build_schedule(shorter.workload, shorter.load)
    assert part == rows[: len(part)]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 5000), st.integers(1, 50)),
             min_size=1, max_size=40),
    st.floats(0, 12), st.one_of(st.none(), st.floats(0.1, 12)),
    st.one_of(st.none(), st.integers(1, 30)),
    st.sampled_from([1.0, 2.5]), st.sampled_from(["drop", "clip"]), st.integers(1, 5000),
    st.integers(1, 5000), st.integers(0, 99),
)  # fmt: skip
def test_what_is_selected_and_what_is_left_out_add_up(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int]],
    start_s: float, duration_s: float | None, count: int | None, scale: float,
    outside: str, low: int, high: int, seed: int,
) -> None:  # fmt: skip
    trace = read_trace(mooncake(tmp_path_factory.getbasetemp(), drawn))
    chosen = Selection(
        start_s=start_s, time_scale=scale, min_input_tokens=min(low, high),
        max_input_tokens=max(low, high), outside="drop" if outside == "drop" else "clip",
    )  # fmt: skip
    after_s = trace.arrival_s - start_s
    timely = (after_s >= 0) & (after_s < (np.inf if duration_s is None else duration_s))
    inside = int(timely.sum())
    try:
        part = select(trace, chosen, duration_s, count, seed)
    except ScenarioError:
        bounded = (trace.input_tokens >= min(low, high)) & (trace.input_tokens <= max(low, high))
        # Draws for the rate may leave nothing of a few requests.
        assert scale > 1 or not (timely & (bounded | (outside == "clip"))).any()
        return
    total = len(part.arrival_s) + sum(part.left_out.values())
    assert total == inside if count is None or len(part.arrival_s) < count else total <= inside
    assert (np.diff(part.arrival_s) >= 0).all()
    assert part.input_tokens.min() >= min(low, high)
    assert part.input_tokens.max() <= max(low, high)
    assert bool(told(part)) == bool(part.left_out or part.clipped)


@pytest.mark.parametrize(
    ("settings_of_trace", "words"),
    [
        (("workload.max_tokens=9",), ["'workload.outside_bounds' is missing", '"drop"']),
        (("workload.outside_bounds=drop",), ["'workload.outside_bounds'", "needs one of"]),
        (("workload.outside_bounds=cut",), ["'workload.outside_bounds'", "'clip'"]),
        (("workload.min_tokens=9", "workload.max_tokens=8", "workload.outside_bounds=drop"),
         ["'workload.min_tokens'", "more than"]),
        (("workload.trace_time_scale=0.5",), ["'workload.trace_time_scale'", "less than"]),
        (("workload.trace_start=9h",), ["Nothing is left", "workload.trace_start"]),
    ],
)  # fmt: skip
def test_selections_that_cannot_be_are_refused(
    tmp_path: Path, settings_of_trace: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(ScenarioError) as caught:
        replayed(mooncake(tmp_path, ROWS), *settings_of_trace)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_key_of_traces_without_a_trace_is_refused() -> None:
    for key in ("trace_start=1s", "trace_time_scale=2", "outside_bounds=drop"):
        with pytest.raises(ScenarioError, match=r"there is no workload\.trace"):
            load_scenario(PAPER, [f"workload.{key}"])


if (TRACES / "mooncake_conversation_trace.jsonl").is_file():

    def test_the_published_conversation_is_replayed_closed_fast_and_bounded() -> None:
        path = TRACES / "mooncake_conversation_trace.jsonl"
        closed = replayed(path, "load.concurrency=16", duration_s=600.0)
        rows = build_schedule(closed.workload, closed.load)
        trace = read_trace(path)
        assert not rows.planned_s.any()
        assert rows.input_tokens.tolist() == trace.input_tokens[:1750].tolist()
        assert [row.hash_ids for row in rows] == list(trace.hash_ids[:1750])
        bounds = ("workload.max_tokens=32768", "workload.outside_bounds=drop")
        bounded = replayed(path, *bounds, "workload.trace_start=10min", duration_s=600.0)
        found = build_schedule(bounded.workload, bounded.load)
        inside = (trace.arrival_s >= 600) & (trace.arrival_s < 1200)
        assert len(found) + sum(bounded.workload.left_out.values()) == inside.sum()
        kept = trace.input_tokens[inside & (trace.input_tokens <= 32_768)]
        assert found.input_tokens.tolist() == kept.tolist()
