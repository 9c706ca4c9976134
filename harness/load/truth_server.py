"""``python -m harness.load.truth_server``: a completion server whose times are known.

Told how to answer by one line on stdin (``truth.Truth``), it prints ``ready`` with its port, and
ends with its stdin, printing how late it was itself. One thread, one selector: what is due is
written first, then what has come is read, and nothing else is done between an instant that is due
and its write but to make the timer's system call: a chunk is formatted while its predecessor is on
the way. Instants come from a timerfd, about 0.06 ms late where a loop's own timers are a
millisecond.
"""

import heapq
import os
import selectors
import socket
import sys
import time
from array import array
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from harness import timerfd
from harness.child import Spool, settle
from harness.core import LoadError, PrfaasError
from harness.load.truth import Finished, Ready, Truth
from harness.load.truth_answer import Answer, answer_to, header
from harness.surface.generate import MAX_BODY_BYTES

RECV_BYTES = 1 << 18
MAX_HEAD_BYTES = 1 << 16
BACKLOG = 1024
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class _Due(NamedTuple):
    """An instant at which an answer's next chunk is due. Ties go by ``order``."""

    mono_ns: int
    order: int
    answer: Answer


class _Connection:
    """One client's socket: what came of its request, and what has not left of the answer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()
        self.first_byte_mono_ns = 0
        self.body_at = 0
        self.wanted_bytes: int | None = None
        self.answer: Answer | None = None
        self.unsent = b""
        self.close_after = False


class Server:
    """The loop. ``run`` returns when stdin is at its end."""

    def __init__(self, truth: Truth, listening: socket.socket, log: Spool | None) -> None:
        self._truth = truth
        self._listening = listening
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._buffer = memoryview(bytearray(RECV_BYTES))
        self._due: list[_Due] = []
        self._connections: dict[Answer, _Connection] = {}
        self._num_requests = 0
        self._late_ns = array("q")
        self._ended = False

    def run(self, timer: timerfd.TimerFd | None) -> Finished:
        register = self._selector.register
        register(0, selectors.EVENT_READ, self._end)
        register(self._listening, selectors.EVENT_READ, self._accept)
        if timer is not None:
            register(timer, selectors.EVENT_READ, lambda: timer.arm(0))
        armed_mono_ns = None
        with self._selector:
            while not self._ended:
                next_mono_ns = self._due[0].mono_ns if self._due else None
                wait_s = None
                if timer is None and next_mono_ns is not None:
                    wait_s = max(0.0, (next_mono_ns - time.monotonic_ns()) / 1e9)
                elif timer is not None and next_mono_ns != armed_mono_ns:
                    timer.arm(next_mono_ns or 0)
                    armed_mono_ns = next_mono_ns
                ready = self._selector.select(wait_s)
                self._write_due()
                for key, _ in ready:
                    key.data()
                    self._write_due()
        return self._finished()

    def _end(self) -> None:
        self._ended = not os.read(0, RECV_BYTES)

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except BlockingIOError:  # it left before it was taken
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._serve(connection))

    def _serve(self, connection: _Connection) -> None:
        """Read what is there, or write on what the kernel had no room for."""
        if connection.sock.fileno() < 0:  # closed since the selector reported it
            return
        try:
            if connection.unsent:
                self._send(connection, b"")
            read_mono_ns = self._read(connection)
            if read_mono_ns is not None:
                self._request(connection, read_mono_ns)
        except (OSError, EOFError):
            self._close(connection)

    def _read(self, connection: _Connection) -> int | None:
        """When it read the last byte of a request, once it has. EOFError if the client left."""
        try:
            num_bytes = connection.sock.recv_into(self._buffer)
        except BlockingIOError:
            return None
        now_ns = time.monotonic_ns()
        if not num_bytes:
            raise EOFError
        if connection.answer is not None:
            raise OSError("a second request before the answer to the first")
        received = connection.received
        if not received:
            connection.first_byte_mono_ns = now_ns
        received += self._buffer[:num_bytes]
        if connection.wanted_bytes is None:
            self._head(connection)
        wanted = connection.wanted_bytes
        return None if wanted is None or len(received) < wanted else now_ns

    def _head(self, connection: _Connection) -> None:
        at = connection.received.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if at < 0:
            if len(connection.received) > MAX_HEAD_BYTES:
                raise OSError("a head beyond the bound")
            return
        length = header(bytes(connection.received[: at + 4]), "content-length") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise OSError("a body beyond the bound")
        connection.body_at = at + 4
        connection.wanted_bytes = at + 4 + int(length)

    def _request(self, connection: _Connection, read_mono_ns: int) -> None:
        """Answer, or schedule the answer to, the request that ``connection`` holds."""
        head = bytes(connection.received[: connection.body_at])
        body = bytes(memoryview(connection.received)[connection.body_at :])
        connection.received, connection.wanted_bytes = bytearray(), None
        connection.close_after = (header(head, "connection") or "").lower() == "close"
        answer = answer_to(head, body, self._truth)
        if isinstance(answer, str):
            self._send(connection, b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n" % answer.encode())
            self._leave(connection)
            return
        answer.begin(connection.first_byte_mono_ns, read_mono_ns)
        self._num_requests += 1
        connection.answer = answer
        self._connections[answer] = connection
        self._schedule(answer)
        self._send(connection, STREAM_HEAD)

    def _schedule(self, answer: Answer) -> None:
        heapq.heappush(self._due, _Due(answer.due_mono_ns, id(answer), answer))

    def _write_due(self) -> None:
        due = self._due
        while due and due[0].mono_ns <= (now_ns := time.monotonic_ns()):
            answer = heapq.heappop(due).answer
            connection = self._connections.get(answer)
            if connection is None:  # its client has left
                continue
            try:
                self._send(connection, answer.chunk)
            except OSError:
                self._close(connection)
                continue
            self._late_ns.append(now_ns - answer.due_mono_ns)
            answer.advance(now_ns)
            if not answer.over:
                self._schedule(answer)
                continue
            answer.row.whole = True
            self._forget(connection)
            self._leave(connection)

    def _send(self, connection: _Connection, data: bytes) -> None:
        data = connection.unsent + data
        try:
            sent_bytes = connection.sock.send(data)
        except BlockingIOError:
            sent_bytes = 0
        was, connection.unsent = connection.unsent, data[sent_bytes:]
        if bool(was) != bool(connection.unsent):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            key = self._selector.get_key(connection.sock)
            self._selector.modify(connection.sock, events, key.data)

    def _leave(self, connection: _Connection) -> None:
        """The answer is out: close the connection if its client asked for that."""
        if connection.close_after:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._forget(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _forget(self, connection: _Connection) -> None:
        """The request is over, well or not: its row."""
        answer, connection.answer = connection.answer, None
        if answer is not None:
            del self._connections[answer]
            if self._log is not None:
                self._log.write(answer.row)

    def _finished(self) -> Finished:
        for connection in list(self._connections.values()):
            self._forget(connection)
        late_ns = sorted(self._late_ns)
        p50_s, p99_s, max_s = (
            late_ns[-(-rank * len(late_ns) // 100) - 1] / 1e9 if late_ns else None
            for rank in (50, 99, 100)
        )
        return Finished(self._num_requests, len(late_ns), p50_s, p99_s, max_s, time.process_time())


def _read_truth() -> Truth:
    """The first line of stdin, and not a byte more of it, since the loop watches the descriptor."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise LoadError("the known-truth server's stdin ended before its configuration line.")
        line += byte
    try:
        return msgspec.json.decode(line, type=Truth)
    except msgspec.DecodeError as error:
        raise LoadError(f"the known-truth server's configuration line: {error}.") from error


def _tell(message: Ready | Finished) -> None:
    os.write(1, msgspec.json.encode(message) + b"\n")


def serve() -> None:
    """Serve until stdin ends. Raises LoadError when it cannot."""
    truth = _read_truth()
    with ExitStack() as stack:
        try:
            log = None if truth.log_path is None else stack.enter_context(Spool(truth.log_path))
            listening = socket.create_server(
                (truth.host, truth.port),
                family=socket.AF_INET6 if ":" in truth.host else socket.AF_INET,
                backlog=BACKLOG,
            )
        except OSError as error:
            raise LoadError(f"the known-truth server cannot start: {error}.") from error
        stack.enter_context(listening)
        listening.setblocking(False)
        timer = stack.enter_context(timerfd.TimerFd()) if timerfd.AVAILABLE else None
        settle()
        _tell(Ready(listening.getsockname()[1]))
        _tell(Server(truth, listening, log).run(timer))


def main() -> int:
    try:
        serve()
    except PrfaasError as error:
        print(f"harness.load.truth_server: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
