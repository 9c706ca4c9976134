"""The self-test: what it tries, how it judges, and that a run is refused by it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import CASE_STUDY, scenario

from harness.cli import main
from harness.core import Request
from harness.load.self_test import (
    MOST_CHUNKS,
    SECONDS,
    Bounds,
    ClientRow,
    fault_of,
    figures,
    hardest_seconds,
    peak_rate,
)
from harness.load.truth import TruthRow
from harness.testbed.self_testing import refusal, self_test, summary
from harness.workload import build_schedule

MS = 1_000_000


def test_the_second_with_most_requests_and_that_with_most_tokens_are_tried() -> None:
    quiet = [Request(f"q{i}", i, 10.0 * i, 100, 5) for i in range(20)]
    crowd = [Request(f"c{i}", 20 + i, 300.0 + i, 50, 9) for i in range(8)]
    heavy = [Request(f"h{i}", 28 + i, 400.0 + i, 90_000, 3) for i in range(2)]
    tried = hardest_seconds([*quiet, *crowd, *heavy], time_scale=10.0, tokens_per_chunk=4)
    assert [one.index for one in tried] == list(range(len(tried)))
    assert len({one.rid for one in tried}) == len(tried) == 2 * (8 + 2)
    seconds = [[one for one in tried if int(one.planned_s) == second] for second in range(SECONDS)]
    assert [len(one) for one in seconds] == [8, 2, 8, 2]
    assert [one.input_tokens for one in seconds[0]] == [90_000] + [50] * 7
    assert [one.input_tokens for one in seconds[1]] == [90_000] * 2
    assert [round(one.planned_s, 9) for one in seconds[0]] == [round(0.1 * i, 9) for i in range(8)]
    assert [one.output_tokens for one in seconds[2]] == [9] * 8


def test_long_answers_are_cut_and_an_empty_schedule_tries_nothing() -> None:
    (one, *_) = hardest_seconds([Request("a", 0, 0.0, 5, 100_000)], 1.0, 2)
    assert one.output_tokens == 1 + 2 * MOST_CHUNKS
    assert hardest_seconds([], 1.0, 1) == ()


def test_a_closed_loop_is_tried_with_its_concurrency_in_a_second() -> None:
    schedule = [Request(f"{i}", i, 0.0, 10, 5) for i in range(100)]
    tried = hardest_seconds(schedule, 10.0, 1, concurrency=7)
    assert len(tried) == 7 * SECONDS
    assert peak_rate(np.array([one.planned_s for one in tried])) == 7


def rows_of(lag_ns: int, error_ns: int, count: int = 200) -> tuple[list[Any], list[Any]]:
    client = [
        ClientRow(
            rid=f"{i}",
            outcome="completed",
            planned_mono_ns=i * MS,
            sent_mono_ns=i * MS + lag_ns,
            first_token_mono_ns=i * MS + 200 * MS + error_ns,
        )
        for i in range(count)
    ]
    server = [
        TruthRow(
            rid=f"{i}",
            request_id=None,
            prompt_tokens=1,
            output_tokens=1,
            first_byte_mono_ns=0,
            read_mono_ns=0,
            due_mono_ns=[0],
            written_mono_ns=[i * MS + 200 * MS],
            whole=True,
        )
        for i in range(count)
    ]
    return client, server


TRIED = tuple(Request(f"{i}", i, 0.001 * i, 10, 1) for i in range(200))


@pytest.mark.parametrize(
    ("lag_ms", "error_ms", "words"),
    [
        (9, 4, None),
        (11, 4, "send lag p99 is 11.0 ms, bound 10 ms of wall time"),
        (1, 6, "TTFT error p50 is 6.0 ms, bound 5 ms of wall time"),
        (1, -6, "TTFT error p50 is -6.0 ms, bound 5 ms of wall time"),
    ],
)
def test_each_bound_is_judged(lag_ms: int, error_ms: int, words: str | None) -> None:
    result = figures(TRIED, *rows_of(lag_ms * MS, error_ms * MS))
    assert result["completed"] == 200
    assert result["lag_p99_wall_s"] == pytest.approx(lag_ms / 1e3)
    assert result["ttft_error_p99_wall_s"] == pytest.approx(error_ms / 1e3)
    assert fault_of(result, Bounds()) == words


def test_a_failure_and_a_missing_row_are_faults() -> None:
    client, server = rows_of(0, 0)
    client[3].outcome = "failed"
    client[3].failure_phase, client[3].failure_message = "connect", "Connection refused"
    fault = fault_of(figures(TRIED, client[:-1], server), Bounds())
    assert fault == "2 of 200 requests failed, 3 in connect: Connection refused"


def test_the_shipped_scenario_s_load_passes(tmp_path: Path) -> None:
    given = scenario()
    result = self_test(given, build_schedule(given.workload, given.load), tmp_path / "t", LENIENT)
    assert result["fault"] is None
    assert result["completed"] == result["requests"] > 40
    assert result["longest_prompt_tokens"] > 100_000
    assert result["lag_p99_wall_s"] >= 0
    assert "send lag p99" in summary(result)


#: The test's machine may be busy; what is asked here is that the figures are measured.
LENIENT = Bounds(lag_p99_s=5.0, ttft_error_p50_s=5.0, ttft_error_p99_s=5.0)


def test_what_cannot_be_kept_is_tried_again_and_refused(tmp_path: Path) -> None:
    given = scenario("load.num_requests=20")
    none = Bounds(lag_p99_s=0.0)
    result = self_test(given, build_schedule(given.workload, given.load), tmp_path / "t", none)
    assert result["tries"] == 2
    assert "send lag p99 is" in result["fault"]
    paragraph = refusal(result)
    assert result["fault"] in paragraph
    assert "testbed.self_test=false" in paragraph
    assert "\n" not in paragraph


def test_a_run_that_its_client_cannot_load_ends_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """300 requests in less than a millisecond: the last cannot leave within 10 ms of its time."""
    status = main(
        [
            "bench", str(CASE_STUDY), "--runs", str(tmp_path), "--json",
            "--set", "load.rate_req_per_s=100000", "--set", "load.num_requests=300",
        ]
    )  # fmt: skip
    assert status == 3
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["verdict"] == "not_supported"
    assert "cannot keep this schedule" in document["reasons"][0]
    assert "cannot keep this schedule" in said.err
    manifest = json.loads((Path(document["run_dir"]) / "manifest.json").read_text())
    assert manifest["load_self_test"]["fault"] is not None
    assert manifest["load_self_test"]["tries"] == 2
