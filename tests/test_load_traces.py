"""Traces replayed against a server of known truth: counts conserved, lengths the trace's own."""

import json
from pathlib import Path

import numpy as np
import pytest
from load_process import ROOT, load_process, plan_in

from harness.core import Request
from harness.load.truth import Truth, TruthServer
from harness.trace import TraceFormat, read_trace

TRACES = ROOT.parent / "shared" / "data" / "traces"
QUICK = Truth(ttft_s=0.01, chunk_s=0.0, tokens_per_chunk=512)
MINUTES = 10


def replay(folder: Path, requests: list[Request], time_scale: float, workers: int) -> None:
    with (
        TruthServer(QUICK) as server,
        load_process(
            plan_in(
                folder, server.port, requests,
                time_scale=time_scale, workers=workers, request_timeout_s=60.0,
            )
        ) as load,
    ):  # fmt: skip
        start_mono_ns = load.start()
        finished, rows = load.finish()
    outcomes = [row["outcome"] for row in rows]
    counts = {name: outcomes.count(name) for name in ("completed", "failed", "unsent")}
    assert counts == {name: finished[name] for name in counts}
    assert sum(counts.values()) == len(rows) == len(requests)
    assert counts["completed"] == len(requests)
    for request, row in zip(requests, rows, strict=True):
        planned_ns = round(request.planned_s / time_scale * 1e9)
        assert row["planned_mono_ns"] - start_mono_ns == planned_ns
        assert row["rid"] == request.rid
        assert row["prompt_tokens"] == request.input_tokens
        assert row["completion_tokens"] == request.output_tokens
        assert sum(row["chunk_tokens"]) == request.output_tokens


def requests_of(path: Path, kind: TraceFormat, seconds: float) -> list[Request]:
    part = read_trace(path, kind).part(seconds, None)
    arrivals_s = np.sort(part.spread_arrivals(np.random.default_rng(1)))
    columns = zip(
        arrivals_s.tolist(),
        part.input_tokens.tolist(),
        part.output_tokens.tolist(),
        part.hash_ids,
        strict=True,
    )
    return [Request(f"{at:06d}", at, *row) for at, row in enumerate(columns)]


def test_a_small_mooncake_trace(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 500 * (at // 3), "input_length": 600 + at, "output_length": 1 + at % 700,
         "hash_ids": [at % 4, 100 + at]}
        for at in range(60)
    ]  # fmt: skip
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = requests_of(tmp_path / "trace.jsonl", "mooncake", 3600)
    assert [one.input_tokens for one in requests] == [line["input_length"] for line in lines]
    replay(tmp_path, requests, time_scale=5.0, workers=2)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.exists(), reason="the published traces are not part of the project")
@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("mooncake_conversation_trace.jsonl", "mooncake", 1500),
        ("AzureLLMInferenceTrace_conv.csv", "azure", 2000),
    ],
)
def test_ten_minutes_of_a_published_trace(
    tmp_path: Path, name: str, kind: TraceFormat, count: int
) -> None:
    requests = requests_of(TRACES / name, kind, 60.0 * MINUTES)
    assert len(requests) > count
    replay(tmp_path, requests, time_scale=40.0, workers=2)
