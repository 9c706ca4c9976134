"""The known-truth server: what it writes, when it says it did, and what it says of itself."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core import LoadError
from harness.load.truth import Truth, TruthRow, TruthServer, read_rows

BODY = {
    "model": "m",
    "prompt": [11111] * 40,
    "max_tokens": 9,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "rid": "r/1",
}


def asked(port: int, *requests: bytes) -> bytes:
    """All that the server answers on one connection, the last request of which closes it."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        for request in requests:
            sock.sendall(request)
        with sock.makefile("rb") as answer:
            return answer.read()


def posted(body: object, *headers: str) -> bytes:
    text = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(text)}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + text


def events(answer: bytes) -> list[str]:
    return [line[6:].decode() for line in answer.split(b"\n") if line.startswith(b"data: ")]


def served(folder: Path, request: bytes, **changes: object) -> tuple[bytes, list[TruthRow]]:
    log = folder / "log"
    truth = Truth(**({"ttft_s": 0.1, "chunk_s": 0.02, "log_path": str(log)} | changes))  # type: ignore[arg-type]  # a test's own
    with TruthServer(truth) as server:
        answer = asked(server.port, request)
        finished = server.stop()
    rows = read_rows(log)
    assert finished.requests == len(rows)
    assert finished.chunks == sum(len(row.written_mono_ns) for row in rows)
    return answer, rows


def test_chunks_are_due_from_the_last_byte_on_and_never_early(tmp_path: Path) -> None:
    answer, (row,) = served(
        tmp_path, posted(BODY, "X-Request-ID: abc"), tokens_per_chunk=4, api_key=None
    )
    *chunks, summary, done = events(answer)
    assert done == "[DONE]"
    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 5, 9]
    assert json.loads(summary)["choices"] == []
    assert json.loads(summary)["usage"]["prompt_tokens"] == 40
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    assert (row.rid, row.request_id, row.whole) == ("r/1", "abc", True)
    assert (row.prompt_tokens, row.output_tokens) == (40, 9)
    assert row.first_byte_mono_ns <= row.read_mono_ns
    assert row.due_mono_ns == [row.read_mono_ns + ms * 1_000_000 for ms in (100, 120, 140)]
    pairs = zip(row.due_mono_ns, row.written_mono_ns, strict=True)
    assert all(due <= written for due, written in pairs)


def test_a_client_that_leaves_has_a_row_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with TruthServer(Truth(ttft_s=0.0, chunk_s=60.0, log_path=str(log))) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.sendall(posted(BODY))
            while b"data: " not in sock.recv(1 << 16):
                pass
        server.stop()
    (row,) = read_rows(log)
    assert (row.whole, len(row.written_mono_ns)) == (False, 1)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (posted(BODY), b"401 Unauthorized"),
        (posted(BODY, "Authorization: Bearer other"), b"401 Unauthorized"),
        (posted(BODY, "Authorization: Bearer k"), b"200 OK"),
        (posted({"prompt": {}}, "Authorization: Bearer k"), b"400 "),
        (posted({**BODY, "stream": False}, "Authorization: Bearer k"), b"400 "),
        (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", b"200 OK"),
        (b"GET /other HTTP/1.1\r\nConnection: close\r\n\r\n", b"404 Not Found"),
    ],
)
def test_what_it_refuses(tmp_path: Path, request_bytes: bytes, status: bytes) -> None:
    answer, _ = served(tmp_path, request_bytes, ttft_s=0.0, chunk_s=0.0, api_key="k")
    assert answer.startswith(b"HTTP/1.1 " + status)


def test_a_wrong_configuration_is_said(tmp_path: Path) -> None:
    truth = Truth(ttft_s=0.0, chunk_s=0.0, log_path=str(tmp_path / "no" / "log"))
    with pytest.raises(LoadError, match="see stderr"), TruthServer(truth):
        pass


def test_it_needs_neither_locust_nor_gevent() -> None:
    code = (
        "import sys, harness.load.truth_server\n"
        "sys.exit(any(name.split('.')[0] in ('locust', 'gevent') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
