"""Replayed traces: Mooncake and Azure formats, quanta, windows, and what is refused."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness.core import Request, ScenarioError
from harness.scenario import Scenario, load_scenario
from harness.scenario_change import with_trace
from harness.trace import QUANTUM_S, read_trace
from harness.workload import arrival_cv, build_schedule, length_distribution

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "scenarios" / "paper-case-study.toml"
TRACES = ROOT.parent / "shared" / "data" / "traces"


def lengths(schedule: Sequence[Request]) -> list[int]:
    return [request.input_tokens for request in schedule]


def written(folder: Path, name: str, *lines: str, end: str = "\n") -> Path:
    path = folder / name
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def mooncake(timestamp: float, new: int, out: int, hash_ids: Sequence[int] = ()) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return json.dumps(dict(zip(names, (timestamp, new, out, list(hash_ids)), strict=True)))


AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def replayed(path: Path, *overrides: str, duration_s: float | None = None) -> Scenario:
    return with_trace(load_scenario(PAPER, overrides), path, duration_s)


def test_mooncake_arrivals_are_spread_inside_their_quantum_in_order(tmp_path: Path) -> None:
    stamps = [0, 0, 0, 2999, 2999, 6001, 12_000]
    lines = [mooncake(t, 1000 + i, 10 + i, [i, i + 1]) for i, t in enumerate(stamps)]
    scenario = replayed(written(tmp_path, "t.jsonl", *lines))
    rows = build_schedule(scenario.workload, scenario.load)
    quanta = [int(r.planned_s // QUANTUM_S) for r in rows]
    assert quanta == [0, 0, 0, 1, 1, 2, 4]
    assert lengths(rows) == [1000 + i for i in range(7)]
    assert [r.output_tokens for r in rows] == [10 + i for i in range(7)]
    assert rows[3].hash_ids == (3, 4)
    assert len({r.planned_s for r in rows}) == 7
    other = build_schedule(scenario.workload, replace(scenario.load, seed=9))
    assert [r.planned_s for r in other] != [r.planned_s for r in rows]
    assert lengths(other) == lengths(rows)
    assert scenario.load.rate_req_per_s == pytest.approx(7 / 15)
    assert (scenario.workload.min_tokens, scenario.workload.max_tokens) == (1000, 1006)


def test_spread_arrivals_are_uniform(tmp_path: Path) -> None:
    lines = [mooncake(3000 * (i // 40), 1000, 10) for i in range(8000)]
    trace = read_trace(written(tmp_path, "t.jsonl", *lines))
    inside = trace.spread_arrivals(np.random.default_rng(3)) % QUANTUM_S
    assert stats.kstest(inside, "uniform", args=(0, QUANTUM_S)).pvalue > 0.01


def test_exact_mooncake_times_are_kept(tmp_path: Path) -> None:
    lines = [mooncake(t, 1000, 10) for t in (500, 1700, 4100)]
    trace = read_trace(written(tmp_path, "t.jsonl", *lines))
    assert trace.quantum_s == 0
    assert trace.arrival_s == pytest.approx([0, 1.2, 3.6])


def test_azure_times_keep_seven_decimals(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "t.csv",
        AZURE_HEADER,
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:46.6805907,396,109",
        "2023-11-16 23:59:59.9999999,879,55",
        "2023-11-17 00:00:00,880,56",
        end="\r\n",
    )
    scenario = replayed(path)
    rows = build_schedule(scenario.workload, scenario.load)
    assert [r.planned_s for r in rows] == pytest.approx(
        [0, 7e-7, 20_653.3194099, 20_653.31941], abs=1e-9
    )
    assert lengths(rows) == [374, 396, 879, 880]
    assert [r.output_tokens for r in rows] == [44, 109, 55, 56]
    assert scenario.workload.trace_format == "azure"


def test_duration_is_trace_time_and_rate_scale_compresses_it(tmp_path: Path) -> None:
    lines = [mooncake(3000 * i, 1000 + i, 10) for i in range(100)]
    path = written(tmp_path, "t.jsonl", *lines)
    plain = replayed(path, duration_s=60.0)
    rows = build_schedule(plain.workload, plain.load)
    assert len(rows) == 20
    assert plain.load.rate_req_per_s == pytest.approx(20 / 60)
    fast = replayed(path, "workload.rate_scale=4", duration_s=60.0)
    quick = build_schedule(fast.workload, fast.load)
    assert lengths(quick) == lengths(rows)
    assert [4 * r.planned_s for r in quick] == pytest.approx([r.planned_s for r in rows], abs=1e-7)
    assert fast.load.rate_req_per_s == pytest.approx(80 / 60)
    assert arrival_cv(quick) == pytest.approx(arrival_cv(rows) or math.nan)


def test_a_duration_inside_a_quantum_is_not_exceeded(tmp_path: Path) -> None:
    path = written(tmp_path, "t.jsonl", *[mooncake(3000 * i, 1000, 10) for i in range(9)])
    scenario = replayed(path, duration_s=7.0)
    rows = build_schedule(scenario.workload, scenario.load)
    assert len(rows) == 3
    assert 6.0 <= rows[-1].planned_s < 7.0


def test_a_traces_lengths_are_its_distribution(tmp_path: Path) -> None:
    lines = [mooncake(0, n, out) for n, out in ((500, 10), (700, 20), (500, 30))]
    found = length_distribution(replayed(written(tmp_path, "t.jsonl", *lines)))
    assert found.lengths.tolist() == [500, 700]
    assert found.weights == pytest.approx([2 / 3, 1 / 3])
    assert found.mean_output_tokens == 20


GOOD = mooncake(0, 10, 10)


@pytest.mark.parametrize(
    ("name", "lines", "words"),
    [
        ("t.jsonl", [], ["is empty"]),
        ("t.jsonl", [GOOD, "", GOOD], ["t.jsonl:2", "line is empty"]),
        ("t.jsonl", [GOOD, GOOD, "{"], ["t.jsonl:3"]),
        ("t.jsonl", [GOOD, '{"timestamp": 0}'], ["t.jsonl:2", "input_length"]),
        ("t.jsonl", [mooncake(0, 0, 1)], ["t.jsonl:1", "input_length"]),
        ("t.jsonl", [GOOD, mooncake(-1, 1, 1)], ["t.jsonl:2", "timestamp"]),
        ("t.jsonl", [GOOD.replace("10", '"10"')], ["t.jsonl:1"]),
        ("t.jsonl", [GOOD.replace("10", "true")], ["t.jsonl:1"]),
        ("t.jsonl", [GOOD.replace("10", "1e999")], ["t.jsonl:1"]),
        ("t.jsonl", ["[" * 100_000], ["t.jsonl:1"]),
        ("t.csv", [AZURE_HEADER], ["no request"]),
        ("t.csv", ["a,b,c", "1,2,3"], ["t.csv:1", AZURE_HEADER]),
        ("t.csv", [AZURE_HEADER, "2023-11-16 18:15:46,1"], ["t.csv:2", "3 values"]),
        ("t.csv", [AZURE_HEADER, "yesterday,1,2"], ["t.csv:2", "'yesterday'"]),
        ("t.csv", [AZURE_HEADER, "2023-13-16 18:15:46,1,2"], ["t.csv:2"]),
        ("t.csv", [AZURE_HEADER, "2023-11-16 18:15:46,1.5,2"], ["t.csv:2", "'1.5'"]),
        ("t.csv", [AZURE_HEADER, "2023-11-16 18:15:46,1,0"], ["t.csv:2", "'0'"]),
        ("t.csv", [AZURE_HEADER, ""], ["t.csv:2", "line is empty"]),
        ("t.txt", ["what is this"], ["not recognised"]),
    ],
)
def test_a_malformed_trace_is_told_by_file_and_line(
    tmp_path: Path, name: str, lines: list[str], words: list[str]
) -> None:
    path = written(tmp_path, name, *lines)
    with pytest.raises(ScenarioError) as caught:
        replayed(path)
    message = str(caught.value)
    assert str(path) in message
    assert all(word in message for word in words), message
    assert "\n" not in message


@settings(max_examples=200)
@given(data=st.binary(max_size=200), head=st.sampled_from(["", AZURE_HEADER + "\n", GOOD + "\n"]))
def test_any_bytes_give_a_trace_or_a_scenario_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, head: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(head.encode() + data)
    for trace_format in ("mooncake", "azure", None):
        told = ""
        try:
            count = len(read_trace(path, trace_format).arrival_s)
        except ScenarioError as error:
            count, told = 0, str(error)
        assert count > 0 or str(path) in told


def test_a_trace_that_is_missing_changed_or_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="does not exist"):
        replayed(tmp_path / "nothing.jsonl")
    with pytest.raises(ScenarioError, match="not a regular file"):
        replayed(tmp_path)
    with pytest.raises(ScenarioError, match="must be positive"):
        replayed(written(tmp_path, "t.jsonl", GOOD), duration_s=0.0)
    scenario = replayed(written(tmp_path, "t.jsonl", GOOD))
    written(tmp_path, "t.jsonl", GOOD, GOOD)
    with pytest.raises(ScenarioError, match="has changed since"):
        build_schedule(scenario.workload, scenario.load)


def test_a_trace_longer_than_the_profiles_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "t.jsonl", mooncake(0, 200_000, 10))
    with pytest.raises(ScenarioError) as caught:
        replayed(path)
    for word in ("200000 tokens", "1 to 131072", "prfaas-1t-8xh200.json", str(path)):
        assert word in str(caught.value)


#: Requests in all, and in the first ten minutes, of the published traces that lie beside this
#: checkout. Where there are none, no test is defined.
PUBLISHED = {
    name: counts
    for name, counts in {
        "mooncake_conversation_trace.jsonl": (12_031, 1750),
        "AzureLLMInferenceTrace_conv.csv": (19_366, 2867),
    }.items()
    if (TRACES / name).is_file()
}

if PUBLISHED:

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_the_published_traces_are_replayed_exactly(name: str) -> None:
        total, in_part = PUBLISHED[name]
        trace = read_trace(TRACES / name)
        assert len(trace.arrival_s) == total
        scenario = replayed(TRACES / name, duration_s=600.0)
        rows = build_schedule(scenario.workload, scenario.load)
        assert len(rows) == in_part
        assert lengths(rows) == trace.input_tokens[:in_part].tolist()
        planned = [r.planned_s for r in rows]
        assert planned == sorted(planned)
        assert planned[0] >= 0
        assert planned[-1] < 600.0
