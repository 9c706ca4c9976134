"""One streaming completion over its own TCP connection: h11 above a gevent socket.

Each request opens a connection, sends, reads to the end and closes; there is no pool, so that no
request can wait for another. The connection is opened ``CONNECT_AHEAD_S`` before the planned send,
as a client that keeps its connections alive would find it; where connecting takes longer the send
is late, which the send lag shows. The body is never assembled: headers and the fixed JSON are
small, the prompt is a window of the shared pool handed to ``sendmsg`` as it lies; one that is made
of a trace's blocks is put together for its request and let go as it is sent. The arrival time of a
chunk is taken when ``recv`` returns, before anything is parsed.
"""

import contextlib
import resource
import socket as blocking_socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gevent
import h11
import msgspec
from gevent import socket

from harness.core import LoadError, Request
from harness.load.completion import CompletionStream, StreamError, excerpt
from harness.load.plan import Plan
from harness.load.prompts import PromptPool
from harness.load.spool import Row

RECV_BYTES = 1 << 16
#: Wall time; far above a loopback's or a metro link's round trip.
CONNECT_AHEAD_S = 0.05
#: A response larger than this is not a completion of at most a million tokens.
MAX_RESPONSE_BYTES = 1 << 30
#: How long to wait for the rest of an error's body, or for the end of a message after [DONE].
TAIL_S = 1.0
#: Files that a run with many requests in flight may need.
MAX_OPEN_FILES = 1 << 16


class Aborted(gevent.GreenletExit):  # type: ignore[misc]  # gevent publishes no types
    """Thrown into a request in flight when the run is stopped."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to leave: h11 has seen it whole, ``parts`` are its bytes on the wire, from
    which what has been sent is taken away."""

    connection: h11.Connection
    parts: list[memoryview]


class Client:
    """Sends requests of one plan to one address."""

    def __init__(self, plan: Plan, pool: PromptPool) -> None:
        self._pool = pool
        self._path = plan.path.encode()
        self.timeout_s = plan.request_timeout_s
        self.family, self.address = resolve(plan.host, plan.port)
        host = f"[{plan.host}]" if ":" in plan.host else plan.host
        self._headers = [
            (b"host", f"{host}:{plan.port}".encode()),
            (b"content-type", b"application/json"),
            (b"accept", b"text/event-stream"),
            (b"accept-encoding", b"identity"),
            (b"connection", b"close"),
        ]
        if plan.api_key is not None:
            self._headers.append((b"authorization", f"Bearer {plan.api_key}".encode()))
        self._head = b'{"model":' + msgspec.json.encode(plan.model) + b',"prompt":['

    def prepare(self, request: Request) -> Prepared:
        """Format everything that can be before the request's time."""
        prompt = self._pool.text(request.index, request.input_tokens, request.hash_ids)
        head = self._head + prompt.head
        tail = (
            b'],"max_tokens":%d,"stream":true,"stream_options":{"include_usage":true,'
            b'"continuous_usage_stats":true},"ignore_eos":true,"rid":%b}'
            % (request.output_tokens, msgspec.json.encode(request.rid))
        )
        length = len(head) + len(prompt.window) + len(tail)
        connection = h11.Connection(h11.CLIENT)
        headers = [*self._headers, (b"content-length", b"%d" % length)]
        top = connection.send(h11.Request(method=b"POST", target=self._path, headers=headers))
        assert top is not None
        # h11 counts the body against Content-Length; the bytes themselves need no framing.
        for piece in (head, prompt.window, tail):
            connection.send_with_data_passthrough(h11.Data(data=piece))  # type: ignore[arg-type]  # any buffer does
        connection.send(h11.EndOfMessage())
        parts = (memoryview(top + head), prompt.window, memoryview(tail))
        return Prepared(connection, [part for part in parts if part])

    def exchange(
        self, request: Request, prepared: Prepared, row: Row, until_planned: Callable[[], None]
    ) -> None:
        """Connect, send as soon as ``until_planned`` returns, and fill what ``row`` lacks.

        ``until_planned`` waits for the planned time and stamps ``row.sent_mono_ns``.

        A row whose request was aborted before it was sent stays ``unsent``.
        """
        stream = CompletionStream(request.input_tokens, request.output_tokens)
        exchange = _Exchange(self, prepared, stream, row, until_planned)
        deadline = gevent.Timeout(self.timeout_s)
        deadline.start()
        try:
            exchange.run()
            stream.check_complete()
            row.outcome = "completed"
        except StreamError as failure:
            _fail(row, failure)
        except gevent.Timeout as timeout:
            if timeout is not deadline:
                raise
            where = f"in phase {exchange.phase} after request_timeout_s = {self.timeout_s:g} s"
            _fail(row, StreamError("timeout", where))
        except Aborted:
            if row.sent_mono_ns is None:
                return
            _fail(row, StreamError("aborted", f"the run was stopped in phase {exchange.phase}"))
        finally:
            deadline.cancel()
            exchange.close()
            if row.end_mono_ns is None and row.sent_mono_ns is not None:
                row.end_mono_ns = time.monotonic_ns()
            row.first_token_mono_ns = stream.first_token_mono_ns
            row.chunk_mono_ns = stream.chunk_mono_ns
            row.chunk_tokens = stream.chunk_tokens
            row.prompt_tokens = stream.prompt_tokens
            row.completion_tokens = stream.completion_tokens


class _Exchange:
    """The course of one request over one socket. ``phase`` is what a failure now is blamed on."""

    def __init__(
        self,
        client: Client,
        prepared: Prepared,
        stream: CompletionStream,
        row: Row,
        until_planned: Callable[[], None],
    ) -> None:
        self._client = client
        self._until_planned = until_planned
        self._connection = prepared.connection
        self._parts = prepared.parts
        self._stream = stream
        self._row = row
        self._socket: socket.socket | None = None
        self._at_eof = False
        self._recv_mono_ns = 0
        self._received_bytes = 0
        self.phase = "connect"

    def run(self) -> None:
        """Raises StreamError, and passes on gevent's Timeout and Aborted."""
        try:
            try:
                self._connect()
            finally:
                # A refused connection is a failure of its planned time, like any other.
                self._until_planned()
            self.phase = "send"
            self._send()
            self.phase = "headers"
            self._receive()
        except OSError as error:
            raise self._failure(error.strerror or str(error)) from error
        except h11.RemoteProtocolError as error:
            if self._at_eof:
                raise self._failure("the server closed the connection early") from error
            raise StreamError("protocol", f"not HTTP/1.1: {excerpt(str(error))}") from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connect(self) -> None:
        self._socket = socket.socket(self._client.family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.connect(self._client.address)

    def _send(self) -> None:
        assert self._socket is not None
        views = self._parts
        try:
            while views:
                sent_bytes = self._socket.sendmsg(views)
                while views and sent_bytes >= len(views[0]):
                    sent_bytes -= len(views.pop(0))
                if views:
                    views[0] = views[0][sent_bytes:]
        except (BrokenPipeError, ConnectionResetError):
            # A server may refuse a body it has not read, and close: its answer, if one arrived,
            # says more than the broken pipe, which is raised otherwise.
            with contextlib.suppress(OSError, h11.RemoteProtocolError):
                self._receive()
            raise

    def _receive(self) -> None:
        stream = self._stream
        for event in self._events():
            if isinstance(event, h11.Data):
                stream.feed(event.data, self._recv_mono_ns)
                if stream.first_token_mono_ns is not None:
                    self.phase = "stream"
                if stream.done:
                    self._row.end_mono_ns = self._recv_mono_ns
                    self._read_tail()
                    return
            elif isinstance(event, h11.Response):
                self._head(event)
                self.phase = "first_token"

    def _head(self, response: h11.Response) -> None:
        self._row.http_status = response.status_code
        if response.status_code != 200:
            reason = response.reason.decode("latin-1")
            raise StreamError(
                "headers", f"HTTP {response.status_code} {reason}: {self._read_excerpt()}"
            )
        kind = dict(response.headers).get(b"content-type", b"").decode("latin-1")
        if kind.partition(";")[0].strip().lower() != "text/event-stream":
            raise StreamError(
                "protocol",
                f"asked for an event stream, got content type {excerpt(kind)!r}: "
                f"{self._read_excerpt()}",
            )

    def _read_excerpt(self) -> str:
        """What the body says, as far as it comes within TAIL_S."""
        body = bytearray()
        with gevent.Timeout(TAIL_S, False):
            try:
                for event in self._events():
                    if isinstance(event, h11.Data):
                        body += event.data
                    if len(body) >= RECV_BYTES:
                        break
            except (OSError, h11.RemoteProtocolError) as error:
                body += f" (body cut short: {error})".encode()
        return excerpt(body.decode("utf-8", "replace"))

    def _read_tail(self) -> None:
        """Let the server finish its message; the request is complete whether or not it does."""
        # After [DONE] nothing that ends the wait, a deadline or a stop neither, changes the result.
        ends = (OSError, h11.RemoteProtocolError, Aborted, gevent.Timeout)
        with contextlib.suppress(*ends), gevent.Timeout(TAIL_S):
            for event in self._events():
                if isinstance(event, h11.Data):
                    self._stream.feed(event.data, self._recv_mono_ns)

    def _events(self) -> Iterator[h11.Event]:
        """The h11 events of the response up to its end; fills ``first_byte_mono_ns``."""
        assert self._socket is not None
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                self._receive_bytes()
                continue
            over = isinstance(event, h11.EndOfMessage | h11.ConnectionClosed)
            if over or not isinstance(event, h11.Event):
                return
            yield event

    def _receive_bytes(self) -> None:
        assert self._socket is not None
        data = self._socket.recv(RECV_BYTES)
        self._recv_mono_ns = time.monotonic_ns()
        if not data:
            self._at_eof = True
        elif self._row.first_byte_mono_ns is None:
            self._row.first_byte_mono_ns = self._recv_mono_ns
        self._received_bytes += len(data)
        if self._received_bytes > MAX_RESPONSE_BYTES:
            raise StreamError("protocol", f"a response of more than {MAX_RESPONSE_BYTES} bytes")
        self._connection.receive_data(data)
        if len(data) == RECV_BYTES:
            # A peer that always has more would keep every other greenlet from running.
            gevent.sleep(0)

    def _failure(self, message: str) -> StreamError:
        return StreamError(self.phase, message)  # type: ignore[arg-type]  # phases are its values


def resolve(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    """The family and socket address of ``host``, looked up once before the run."""
    try:
        found = blocking_socket.getaddrinfo(host, port, type=blocking_socket.SOCK_STREAM)
    except OSError as error:
        raise LoadError(
            f"cannot resolve the host {host!r} of the plan: {error.strerror}."
        ) from error
    family, _, _, _, address = found[0]
    return family, address


def allow_open_files() -> None:
    """Raise the soft limit on open files towards the hard one; a request holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _fail(row: Row, failure: StreamError) -> None:
    row.outcome = "failed"
    row.failure_phase = failure.phase
    row.failure_message = excerpt(str(failure))
