"""Kept connections: taken again, passed over when closed, and never a request sent twice for
nothing."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_process import evenly, load_process, plan_in

from harness.load.truth import Truth
from harness.load.truth_answer import Answer, answer_to, header

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
NUM_REQUESTS = 12


@dataclass
class Served:
    """What a server saw: connections, and the rids whose requests it read on each."""

    port: int
    rids: list[list[str]] = field(default_factory=list)

    def all_rids(self) -> list[str]:
        return sorted(rid for rids in self.rids for rid in rids)


#: Given the answer and how many requests the connection carried before: the bytes to write, and
#: whether the connection stays.
Behaviour = Callable[[bytes, int], tuple[bytes, bool]]


def keeps(answer: bytes, _before: int) -> tuple[bytes, bool]:
    return answer, True


def closes_silently(answer: bytes, _before: int) -> tuple[bytes, bool]:
    return answer, False


def drops_the_second(answer: bytes, before: int) -> tuple[bytes, bool]:
    """As a server does whose idle timeout ran out while the request was on its way."""
    return (answer, True) if before == 0 else (b"", False)


def breaks_the_second(answer: bytes, before: int) -> tuple[bytes, bool]:
    return (answer, True) if before == 0 else (HEAD, False)


@contextmanager
def serving(behave: Behaviour) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        served = Served(listening.getsockname()[1])

        def accept() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listening.accept()
                    served.rids.append([])
                    arguments = (sock, served.rids[-1], behave)
                    threading.Thread(target=converse, args=arguments, daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def converse(sock: socket.socket, rids: list[str], behave: Behaviour) -> None:
    with sock, sock.makefile("rb") as incoming, suppress(OSError):
        stays = True
        while stays:
            lines = []
            while (line := incoming.readline()) not in (b"", b"\r\n"):
                lines.append(line)
            if not lines:
                return
            head = b"".join(lines) + b"\r\n"
            body = incoming.read(int(header(head, "content-length") or 0))
            told = answer_to(head, body, Truth(ttft_s=0, chunk_s=0))
            assert isinstance(told, Answer)
            assert told.row.rid is not None
            rids.append(told.row.rid)
            whole = HEAD
            while not told.over:
                whole += told.chunk
                told.advance(0)
            answer, stays = behave(whole, len(rids) - 1)
            sock.sendall(answer)
            stays = stays and header(head, "connection") != "close"


def replayed(
    folder: Path, behave: Behaviour, *, keep_alive: bool
) -> tuple[Served, list[dict[str, Any]]]:
    with serving(behave) as served:
        plan = plan_in(folder, served.port, evenly(NUM_REQUESTS, 0.15), keep_alive=keep_alive)
        with load_process(plan) as load:
            load.start()
            _, rows = load.finish()
        return served, rows


def test_a_connection_is_taken_again(tmp_path: Path) -> None:
    served, rows = replayed(tmp_path, keeps, keep_alive=True)
    assert {row["outcome"] for row in rows} == {"completed"}
    assert served.all_rids() == [row["rid"] for row in rows]
    # The next is taken 50 ms before its send; on a busy machine the one before may last as long.
    assert len(served.rids) < NUM_REQUESTS
    assert not any(row["sent_again"] for row in rows)


def test_without_keep_alive_each_has_its_own(tmp_path: Path) -> None:
    served, rows = replayed(tmp_path, keeps, keep_alive=False)
    assert {row["outcome"] for row in rows} == {"completed"}
    assert len(served.rids) == NUM_REQUESTS


def test_a_connection_closed_while_idle_is_nobodys_failure(tmp_path: Path) -> None:
    served, rows = replayed(tmp_path, closes_silently, keep_alive=True)
    assert {row["outcome"] for row in rows} == {"completed"}
    assert served.all_rids() == [row["rid"] for row in rows]


def test_a_request_that_met_a_closing_connection_is_sent_again(tmp_path: Path) -> None:
    served, rows = replayed(tmp_path, drops_the_second, keep_alive=True)
    assert {row["outcome"] for row in rows} == {"completed"}
    again = [row["rid"] for row in rows if row["sent_again"]]
    assert again
    assert served.all_rids() == sorted([row["rid"] for row in rows] + again)
    for row in rows:
        assert row["planned_mono_ns"] <= row["sent_mono_ns"] <= row["first_byte_mono_ns"]


def test_nothing_is_sent_again_once_a_response_has_begun(tmp_path: Path) -> None:
    served, rows = replayed(tmp_path, breaks_the_second, keep_alive=True)
    assert served.all_rids() == [row["rid"] for row in rows]
    failed = [row for row in rows if row["outcome"] == "failed"]
    assert failed
    assert {row["failure_phase"] for row in failed} == {"first_token"}
    assert not any(row["sent_again"] for row in rows)
