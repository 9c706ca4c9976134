"""BurstGPT, ServeGen and runs of our own as traces, and what is refused of each."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core import Request, ScenarioError
from harness.record.tables import COLUMNS
from harness.scenario import Scenario, load_scenario
from harness.scenario_change import with_trace
from harness.trace import TraceFormat, read_trace
from harness.workload import build_schedule, length_distribution, schedule_notes

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "scenarios" / "paper-case-study.toml"

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_8 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)


def written(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def replayed(path: Path, *settings: str, duration_s: float | None = None) -> Scenario:
    own = [one for one in settings if one.startswith(("workload.rate_scale", "load."))]
    others = [one for one in settings if one not in own]
    return with_trace(load_scenario(PAPER, own), path, duration_s, settings=others)


# BurstGPT


def test_burstgpt_goes_by_column_names_and_counts_what_failed(tmp_path: Path) -> None:
    six = written(
        tmp_path, "six.csv", BURST,
        "5,ChatGPT,472,18,490,Conversation log",
        "45,GPT-4,1087,0,1087,API log",
        "45,GPT-4,1088,7,1095,API log",
        "118,ChatGPT,0,0,0,API log",
        "118,GPT-4,417,276,693,Conversation log",
    )  # fmt: skip
    scenario = replayed(six)
    rows = build_schedule(scenario.workload, scenario.load)
    assert scenario.workload.trace_format == "burstgpt"
    assert [(r.input_tokens, r.output_tokens) for r in rows] == [(472, 18), (1088, 7), (417, 276)]
    # Whole seconds are a quantum: spread inside it.
    assert [int(r.planned_s) for r in rows] == [0, 40, 113]
    assert rows[1].planned_s != 40
    why = "without request or response tokens (failed when recorded)"
    assert scenario.workload.left_out == {why: 2}
    assert schedule_notes(scenario.workload, scenario.load) == (
        f"workload.trace: 2 requests left out: {why}",
    )
    eight = written(
        tmp_path, "eight.csv", BURST_8,
        "19440110.5,1722ac82,43,GPT-4,906,446,1352,Conversation log",
        "19440161.25,,2,ChatGPT,36,29,65,API log",
    )  # fmt: skip
    trace = read_trace(eight)
    assert trace.quantum_s == 0
    assert trace.arrival_s.tolist() == [0, 50.75]
    assert trace.input_tokens.tolist() == [906, 36]
    assert trace.output_tokens.tolist() == [446, 29]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([BURST], ["no request"]),
        (["Timestamp,Model", "1,2"], [":1", '"Request tokens"']),
        ([BURST + ",Request tokens", "1"], [":1", "once"]),
        ([BURST, "5,ChatGPT,472,18,490"], [":2", "6 values", "not 5"]),
        ([BURST, ""], [":2", "line is empty"]),
        ([BURST, "1,a,2,3,5,b", "now,a,2,3,5,b"], [":3", "'now'"]),
        ([BURST, "-1,a,2,3,5,b"], [":2", "'-1'"]),
        ([BURST, "1,a,2.5,3,5,b"], [":2", "'2.5'"]),
        ([BURST, "1,a,2,nan,5,b"], [":2", "'nan'"]),
        ([BURST, "1,a,2,0,2,b"], ["no request with tokens"]),
    ],
)
def test_a_bad_burstgpt_line_is_told(tmp_path: Path, lines: list[str], words: list[str]) -> None:
    path = written(tmp_path, "b.csv", *lines)
    with pytest.raises(ScenarioError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert all(word in message for word in (str(path), *words)), message


# ServeGen


def servegen(folder: Path) -> Path:
    """Client 0: silent, then two Gamma windows; client 7: one of Weibull gaps."""
    written(
        folder, "chunk-0-trace.csv",
        "0,0,0,,0,0", "600,0.5,1.1,Gamma,0.8,2.5", "1200,2,0.9,Gamma,1.2,0.4",
    )  # fmt: skip
    written(folder, "chunk-7-trace.csv", "0,0,0,,0,0", "600,1,3,Weibull,0.4,0.3", "1200,0,0,,0,0")
    laws = {
        "0": {"input_tokens": "{100: 0.25, 200: 0.75}", "output_tokens": "{9: 1.0}"},
        "1200": {"input_tokens": "{}", "output_tokens": "{}"},
    }
    (folder / "chunk-0-dataset.json").write_text(json.dumps(laws))
    one = {"600": {"input_tokens": "{3000: 1.0}", "output_tokens": "{0: 0.5, 40: 5e-1}"}}
    (folder / "chunk-7-dataset.json").write_text(json.dumps(one))
    return folder


def test_servegen_windows_have_their_counts_lengths_and_seed(tmp_path: Path) -> None:
    folder = servegen(tmp_path)
    trace = read_trace(folder, seed=3)
    assert trace.format == "servegen"
    assert (np.diff(trace.arrival_s) >= 0).all()
    small, large = trace.input_tokens < 1000, trace.input_tokens == 3000
    first = (trace.arrival_s >= 600) & (trace.arrival_s < 1200)
    assert (small & first).sum() == 300
    assert (small & (trace.arrival_s >= 1200)).sum() == 1200
    assert trace.end_s == 1800
    # Client 7 has 600, of which those without an output token are left out and counted.
    (gone,) = trace.left_out.values()
    assert large.sum() + gone == 600
    assert 240 < gone < 360
    assert set(trace.output_tokens[large]) == {40}
    assert np.mean(trace.input_tokens[small] == 200) == pytest.approx(0.75, abs=0.04)
    again, other = read_trace(folder, seed=3), read_trace(folder, seed=4)
    assert again.arrival_s.tolist() == trace.arrival_s.tolist()
    assert other.arrival_s.tolist() != trace.arrival_s.tolist()
    part = read_trace(folder, seed=3, start_s=900, duration_s=600)
    inside = (trace.arrival_s >= 900) & (trace.arrival_s < 1500)
    assert part.arrival_s == pytest.approx(trace.arrival_s[inside])


def test_servegen_is_replayed_from_where_the_scenario_says(tmp_path: Path) -> None:
    scenario = replayed(servegen(tmp_path), "workload.trace_start=600s", duration_s=300.0)
    rows = build_schedule(scenario.workload, scenario.load)
    assert 0 <= rows[0].planned_s < 30
    assert rows[-1].planned_s < 300
    assert scenario.load.rate_req_per_s == pytest.approx(len(rows) / 300)
    assert length_distribution(scenario).weights.sum() == pytest.approx(1)
    with pytest.raises(ScenarioError, match=r"no request from 0 s to 300 s"):
        replayed(tmp_path, duration_s=300.0)


def test_windows_without_lengths_are_counted(tmp_path: Path) -> None:
    folder = servegen(tmp_path)
    (folder / "chunk-7-dataset.json").write_text(
        json.dumps({"1200": {"input_tokens": "{1: 1}", "output_tokens": "{1: 1}"}})
    )
    trace = read_trace(folder)
    assert trace.left_out == {"of windows without a law of lengths": 600}
    assert len(trace.arrival_s) == 1500


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("chunk-7-trace.csv", "", ["chunk-7-trace.csv", "empty"]),
        ("chunk-7-trace.csv", "0,1,1,Gamma,1\n", ["chunk-7-trace.csv:1", "6 values"]),
        ("chunk-7-trace.csv", "0,0,0,,0,0\n600,x,1,Gamma,1,1\n", ["chunk-7-trace.csv:2"]),
        ("chunk-7-trace.csv", "0,1,1,Pareto,1,1\n", [":1", '"Gamma" or "Weibull"']),
        ("chunk-7-trace.csv", "0,1,1,Gamma,0,1\n", [":1", "shape"]),
        ("chunk-7-trace.csv", "0,nan,1,Gamma,1,1\n", [":1", "not a rate"]),
        ("chunk-7-trace.csv", "5,1,1,Gamma,1,1\n5,1,1,Gamma,1,1\n", [":2", "must start after"]),
        ("chunk-7-trace.csv", "0,1e6,1,Gamma,1,1\n", ["at most 1000000 are drawn", "duration"]),
        ("chunk-7-dataset.json", "{", ["chunk-7-dataset.json", "not JSON"]),
        ("chunk-7-dataset.json", "[]", ["chunk-7-dataset.json", "starts in seconds"]),
        ("chunk-7-dataset.json", '{"0": {"text_tokens": "{1: 1.0}"}}', ["'0'", "multimodal"]),
        ("chunk-7-dataset.json", '{"0": {"input_tokens": "{1: 0.5}", "output_tokens": "{1: 1}"}}',
         ["'0.input_tokens'", "add up"]),
        ("chunk-7-dataset.json", '{"0": {"input_tokens": "{1: 1}", "output_tokens": "f(1)"}}',
         ["'0.output_tokens'", "{tokens: probability"]),
    ],
)  # fmt: skip
def test_a_bad_servegen_folder_is_told(
    tmp_path: Path, name: str, text: str, words: list[str]
) -> None:
    folder = servegen(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(ScenarioError) as caught:
        read_trace(folder)
    message = str(caught.value)
    assert all(word in message for word in (str(folder), *words)), message
    assert "\n" not in message


# Our own runs


def table(folder: Path, rows: Sequence[Request], cells: Sequence[tuple[str, int]]) -> Path:
    schema = pa.schema(COLUMNS["requests"])
    found = [
        {
            "deployment": name,
            "repeat": repeat,
            "rid": row.rid,
            "index": row.index,
            "planned_s": row.planned_s,
            "input_tokens": row.input_tokens,
            "output_tokens": row.output_tokens,
        }
        for name, repeat in cells
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(found, schema=schema), folder / "requests.parquet")
    return folder / "requests.parquet"


def test_a_run_of_ours_is_replayed_as_it_was_offered(tmp_path: Path) -> None:
    scenario = load_scenario(
        PAPER,
        [
            'workload.sessions={turns=4,think_time="20s",increment_tokens=300}',
            "load.num_requests=80",
        ],
    )
    rows = build_schedule(scenario.workload, scenario.load)
    path = table(tmp_path, rows, [("prfaas_pd", 0), ("homogeneous_pd", 0), ("prfaas_pd", 1)])
    for where in (path, tmp_path):
        again = replayed(where)
        found = build_schedule(again.workload, again.load)
        assert again.workload.trace_format == "run"
        assert found.input_tokens.tolist() == rows.input_tokens.tolist()
        assert found.output_tokens.tolist() == rows.output_tokens.tolist()
        assert found.planned_s == pytest.approx(rows.planned_s - rows.planned_s[0], abs=1e-8)
        assert found.chains is None, "a table has no hash ids"


def test_a_schedule_beside_a_run_gives_its_hash_ids(tmp_path: Path) -> None:
    rows = [Request(f"{n:06d}", n, float(n), 600, 5, (0, n + 1)) for n in range(3)]
    table(tmp_path, rows, [("prfaas_pd", 0)])
    lines = [json.dumps({name: getattr(row, name) for name in Request.__slots__}) for row in rows]
    written(tmp_path, "schedule.jsonl", *lines)
    assert read_trace(tmp_path).hash_ids == ((0, 1), (0, 2), (0, 3))
    written(tmp_path, "schedule.jsonl", lines[0], "{")
    with pytest.raises(ScenarioError, match=r"schedule\.jsonl:2"):
        read_trace(tmp_path)
    written(tmp_path, "schedule.jsonl", lines[0])
    with pytest.raises(ScenarioError, match="has no request '000001'"):
        read_trace(tmp_path)


def test_a_table_that_is_no_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(ScenarioError, match="no table of requests"):
        read_trace(path)
    pq.write_table(pa.table({"rid": ["a"]}), path)
    with pytest.raises(ScenarioError, match=r"requests\.parquet"):
        read_trace(tmp_path)
    table(tmp_path, [Request("0", 0, 0.0, 0, 5)], [("a", 0)])
    with pytest.raises(ScenarioError, match="'input_tokens' outside 1"):
        read_trace(tmp_path)
    table(tmp_path, [], [("a", 0)])
    with pytest.raises(ScenarioError, match="empty"):
        read_trace(tmp_path)


@settings(max_examples=150)
@given(
    data=st.binary(max_size=200),
    head=st.sampled_from(["", BURST + "\n1,a,2,3,5,b\n"]),
    kind=st.sampled_from(["burstgpt", "run", "servegen", None]),
)
def test_any_bytes_give_a_trace_or_a_scenario_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, head: str, kind: TraceFormat | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    path.write_bytes(head.encode() + data)
    told = ""
    try:
        count = len(read_trace(path, kind).arrival_s)
    except ScenarioError as error:
        count, told = 0, str(error)
    assert count > 0 or str(path) in told
