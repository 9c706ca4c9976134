"""The load benchmark's own arithmetic: what is late, what is missed."""

import pytest

from benchmarks.load import CASES, missed, nearest_rank, of_rows, schedule
from harness.load.truth import TruthRow
from harness.record.spool import ClientRow


def pair(index: int, lag_ms: int, up_ms: int, down_ms: int) -> tuple[ClientRow, TruthRow]:
    """A request a second, read by the server ``up_ms`` after its send, answered 200 ms later."""
    planned = index * 1_000_000_000
    sent = planned + lag_ms * 1_000_000
    read = sent + up_ms * 1_000_000
    written = read + 200_000_000
    first = written + down_ms * 1_000_000
    rid = str(index)
    row = ClientRow(rid, index, "completed", planned, sent, first_token_mono_ns=first)
    truth = TruthRow(
        rid=rid, request_id=None, prompt_tokens=1, output_tokens=1, first_byte_mono_ns=read,
        read_mono_ns=read, due_mono_ns=[written], written_mono_ns=[written], whole=True,
    )  # fmt: skip
    return row, truth


def test_errors_hold_the_lag_and_both_ways() -> None:
    pairs = [pair(index, lag_ms=2, up_ms=3, down_ms=4) for index in range(20)]
    figures = of_rows([row for row, _ in pairs], {truth.rid: truth for _, truth in pairs})
    assert figures["lag_p99_s"] == pytest.approx(0.002)
    assert figures["ttft_error_p50_s"] == figures["ttft_error_p99_s"] == pytest.approx(0.009)
    assert figures["achieved_ratio"] == pytest.approx(1)


def test_a_growing_lag_lowers_the_rate() -> None:
    pairs = [pair(index, lag_ms=10 * index, up_ms=0, down_ms=0) for index in range(11)]
    figures = of_rows([row for row, _ in pairs], {truth.rid: truth for _, truth in pairs})
    assert figures["achieved_ratio"] == pytest.approx(10 / 10.1)
    figures |= {"cpu_s_per_1000": 6.1, "rss_bytes": 1e6}
    assert missed(CASES[0], figures) == [
        "lag_p99_s",
        "ttft_error_p50_s",
        "ttft_error_p99_s",
        "cpu_s_per_1000",
        "achieved_ratio",
    ]


def test_a_failed_request_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="failed in phase stream"):
        of_rows([ClientRow("r", 0, "failed", failure_phase="stream")], {})


def test_schedules_are_the_same_in_every_run() -> None:
    for case in CASES:
        assert schedule(case, 6.0) == schedule(case, 6.0)
        assert len(schedule(case, 60.0)) == case.rate_req_per_s * 60


def test_nearest_rank() -> None:
    assert nearest_rank([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert nearest_rank([4.0, 1.0, 3.0, 2.0], 0.99) == 4.0
