"""The client against hostile servers: every way to fail has its phase, and memory stays bounded."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hostile_modes import HOSTILE
from load_process import evenly, load_process, plan_in
from truth_server import truth_server

from harness.core import Request

#: What the client must say of each mode: failure phase (None: completed), words of the message.
EXPECTED: dict[str, tuple[str | None, str]] = {
    "honest": (None, ""),
    "trickled_head": ("timeout", "in phase headers"),
    "giant_chunk": ("protocol", "a chunk of 1099511627775 bytes"),
    "refuse": ("headers", 'HTTP 503 Service Unavailable: {"error":"no capacity'),
    "refuse_unread": ("headers", "HTTP 413 Content Too Large: too long"),
    "never_read": ("timeout", "in phase send after request_timeout_s"),
    "silent": ("timeout", "in phase headers"),
    "silent_after_head": ("timeout", "in phase first_token"),
    "garbage": ("protocol", "not HTTP/1.1"),
    "endless_header": ("protocol", "not HTTP/1.1"),
    "close_before_head": ("headers", "closed the connection early"),
    "reset_before_head": ("headers", "reset by peer"),
    "reset_in_stream": ("stream", "reset by peer"),
    "close_before_token": ("first_token", "closed the connection early"),
    "close_in_stream": ("stream", "closed the connection early"),
    "no_done": ("protocol", "without [DONE]"),
    "no_tokens": ("first_token", "without a generated token"),
    "no_usage": ("protocol", "continuous_usage_stats"),
    "only_summary": ("protocol", "no streamed chunk carried"),
    "error_event": ("stream", "KV transfer failed"),
    "not_json": ("protocol", "not a completion chunk"),
    "not_a_stream": ("protocol", "application/json"),
    "too_many_tokens": ("usage_mismatch", "asked for 8 tokens, the server generated 9"),
    "too_few_tokens": ("usage_mismatch", "asked for 8 tokens, the server generated 1"),
    "wrong_prompt": ("usage_mismatch", "the server counted"),
    "endless_comments": ("timeout", "in phase first_token"),
    "endless_line": ("protocol", "longer than"),
    "never_ends": (None, ""),
    "odd_but_right": (None, ""),
}

#: Enough that a body fits no socket buffer.
LONG_TOKENS = 800_000
#: Modes that never look at the body.
UNREAD = ("refuse_unread", "never_read")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("truth") / "log"


@pytest.fixture(scope="module")
def port(log: Path) -> Iterator[int]:
    with truth_server(log) as port:
        yield port


def replay(folder: Path, port: int, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    plan = plan_in(folder, port, evenly(2, 0.02), **changes)
    with load_process(plan) as load:
        load.start()
        return load.finish()


def test_every_mode_is_expected() -> None:
    assert EXPECTED.keys() | {"reset_at_random"} == HOSTILE.keys()


@pytest.fixture(scope="module")
def hostile_rows(
    tmp_path_factory: pytest.TempPathFactory, port: int
) -> dict[str, list[dict[str, Any]]]:
    """Two rows a mode: all modes that read the body at once in one run, the others alone."""
    unread = [mode for mode in EXPECTED if mode in UNREAD]
    mixed = [
        Request(f"{mode}/{copy}", 2 * place + copy, 0.01 * place, 40, 8)
        for place, mode in enumerate(mode for mode in EXPECTED if mode not in UNREAD)
        for copy in range(2)
    ]
    runs = [("by-rid", mixed), *((mode, list(evenly(2, 0.01, LONG_TOKENS))) for mode in unread)]
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in EXPECTED}
    for path, schedule in runs:
        plan = plan_in(
            tmp_path_factory.mktemp(path),
            port,
            schedule,
            path=f"/hostile/{path}",
            request_timeout_s=2.0,
        )
        with load_process(plan) as load:
            load.start()
            finished, rows = load.finish()
        assert finished["completed"] + finished["failed"] == len(schedule) == len(rows)
        for row in rows:
            found[row["rid"].partition("/")[0] if path == "by-rid" else path].append(row)
    return found


@pytest.mark.quiet
@pytest.mark.parametrize("mode", EXPECTED)
def test_a_hostile_server_is_blamed_by_phase(
    hostile_rows: dict[str, list[dict[str, Any]]], mode: str
) -> None:
    phase, words = EXPECTED[mode]
    rows = hostile_rows[mode]
    assert len(rows) == 2
    for row in rows:
        assert row["failure_phase"] == phase, row
        assert words in (row["failure_message"] or "")
        assert len(row["failure_message"] or "") <= 300
        assert row["outcome"] == ("failed" if phase else "completed")
        assert row["planned_mono_ns"] <= row["sent_mono_ns"] <= row["end_mono_ns"]
        assert len(row["chunk_mono_ns"]) == len(row["chunk_tokens"])
        if phase in ("connect", "send", "headers", "first_token"):
            assert row["first_token_mono_ns"] is None


@pytest.mark.quiet
def test_good_rows_among_bad_ones_are_exact(
    hostile_rows: dict[str, list[dict[str, Any]]], log: Path
) -> None:
    lines = [json.loads(line) for line in log.open()]
    truth = {line["rid"]: line for line in lines}
    for row in hostile_rows["honest"]:
        written = truth[row["rid"]]["written_mono_ns"]
        assert row["chunk_tokens"] == [1] * len(written) == [1] * 8
        assert (row["prompt_tokens"], row["completion_tokens"]) == (40, 8)
        assert row["first_token_mono_ns"] == row["chunk_mono_ns"][0]
        pairs = zip(written, row["chunk_mono_ns"], strict=True)
        assert all(left < came for left, came in pairs)
        assert row["chunk_mono_ns"] == sorted(row["chunk_mono_ns"])


def test_a_reset_at_any_byte_is_blamed_by_what_had_come(
    tmp_path: Path, port: int, log: Path
) -> None:
    """No token is told that the server had not written whole, and none is called complete."""
    schedule = [Request(f"cut/{n}", n, 0.01 * n, 40, 8) for n in range(60)]
    with load_process(plan_in(tmp_path, port, schedule, path="/hostile/reset_at_random")) as load:
        load.start()
        finished, rows = load.finish()
    assert finished["failed"] == len(rows) == 60
    written = {line["rid"]: len(line["written_mono_ns"]) for line in map(json.loads, log.open())}
    for row in rows:
        tokens = sum(row["chunk_tokens"])
        assert tokens == (row["completion_tokens"] or 0) <= written[row["rid"]]
        assert (row["first_token_mono_ns"] is not None) == (row["failure_phase"] == "stream")
        assert "reset" in row["failure_message"]
    assert {row["failure_phase"] for row in rows} == {"headers", "first_token", "stream"}


def test_a_failure_keeps_what_was_measured_before_it(tmp_path: Path, port: int) -> None:
    _, (row, _) = replay(tmp_path, port, path="/hostile/close_in_stream")
    assert row["http_status"] == 200
    assert row["first_byte_mono_ns"] <= row["first_token_mono_ns"] <= row["end_mono_ns"]
    assert row["chunk_tokens"] == [1, 1]
    assert (row["prompt_tokens"], row["completion_tokens"]) == (40, 2)


def test_the_first_token_is_the_first_chunk_with_one(tmp_path: Path, port: int) -> None:
    _, (row, _) = replay(tmp_path, port, path="/hostile/odd_but_right")
    # Headers and empty chunks come at once, the token 50 ms later.
    assert row["first_token_mono_ns"] - row["first_byte_mono_ns"] > 40e6
    assert row["chunk_tokens"] == [8]


def test_nobody_listens(tmp_path: Path) -> None:
    with closed_port() as port:
        _, rows = replay(tmp_path, port)
    assert {row["failure_phase"] for row in rows} == {"connect"}
    assert "refused" in rows[0]["failure_message"]


def test_a_host_that_does_not_resolve_is_the_plans_fault(tmp_path: Path) -> None:
    with load_process(plan_in(tmp_path, 80, evenly(1, 0.1), host="no-such-host.invalid")) as load:
        status, stderr = load.refusal()
    assert status == 3
    assert "cannot resolve the host 'no-such-host.invalid'" in stderr


@pytest.mark.quiet
def test_floods_do_not_hold_up_the_schedule_or_memory(tmp_path: Path, port: int) -> None:
    """Twenty connections that never stop sending, and the dispatcher still sends them all."""
    plan = plan_in(
        tmp_path, port, evenly(20, 0.05), path="/hostile/endless_comments", request_timeout_s=2.0
    )
    with load_process(plan) as load:
        load.start()
        load.until_sent(20)
        status = Path(f"/proc/{load.process.pid}/status").read_text()
        _, rows = load.finish()
    peak_kib = int(status.split("VmHWM:")[1].split()[0])
    assert peak_kib < 150 * 1024
    assert [row["failure_phase"] for row in rows] == ["timeout"] * 20


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that was free a moment ago and is held, bound but not listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
