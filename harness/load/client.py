"""One streaming completion: connect, send at the planned time, read to the end.

The request leaves over a connection of its own or, with ``keep_alive``, over an idle one; there is
no limit on connections, so that no request can wait for another. A connection is taken or opened
``CONNECT_AHEAD_S`` before the planned send, as a client that keeps its connections alive would find
it; where connecting takes longer the send is late, which the send lag shows. The body is never
assembled: head, prompt and tail are handed to ``sendmsg`` in the pieces they lie in, as the kernel
takes them. The arrival time of a chunk is taken when ``recv`` returns, before anything is parsed.

A server may close a connection that is idle, also just as a request leaves on it. Then no byte of a
response comes, and the request is sent once more, on a new connection, its latency still counted
from its planned time. Nothing else is ever sent twice.
"""

import resource
import socket as blocking_socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gevent
import h11
import msgspec

from harness.core import LoadError, Request
from harness.load.completion import CompletionStream, FailurePhase, StreamError, excerpt
from harness.load.connection import RECV_BYTES, Connection, Connections
from harness.load.plan import Plan
from harness.load.prompts import PromptPool, PromptText
from harness.load.response import Response
from harness.load.spool import Row

#: Wall time; far above a loopback's or a metro link's round trip.
CONNECT_AHEAD_S = 0.05
#: How long to wait for the rest of an error's body, or for the end of a message after [DONE].
TAIL_S = 1.0
#: Files that a run with many requests in flight may need.
MAX_OPEN_FILES = 1 << 16
#: SGLang's own surface, where a request names its prompt and its options differently.
NATIVE_PATH = "/generate"


class Aborted(gevent.GreenletExit):  # type: ignore[misc]  # gevent publishes no types
    """Thrown into a request in flight when the run is stopped."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to leave: the bytes before and behind its prompt."""

    head: bytes
    prompt: PromptText
    tail: bytes

    def pieces(self) -> Iterator[memoryview]:
        """What goes over the wire, in order."""
        yield memoryview(self.head)
        yield from self.prompt.pieces()
        yield memoryview(self.tail)


class Client:
    """Sends requests of one plan to one address."""

    def __init__(self, plan: Plan, pool: PromptPool) -> None:
        self._pool = pool
        self.timeout_s = plan.request_timeout_s
        self._connections = Connections(*resolve(plan.host, plan.port), keep_alive=plan.keep_alive)
        # Every read is over before the next begins, so they share it.
        self._buffer = memoryview(bytearray(RECV_BYTES))
        host = f"[{plan.host}]" if ":" in plan.host else plan.host
        headers = [
            (b"Host", f"{host}:{plan.port}".encode()),
            (b"Content-Type", b"application/json"),
            (b"Accept", b"text/event-stream"),
            (b"Accept-Encoding", b"identity"),
        ]
        if not plan.keep_alive:
            headers.append((b"Connection", b"close"))
        if plan.api_key is not None:
            headers.append((b"Authorization", f"Bearer {plan.api_key}".encode()))
        self._asked = h11.Request(method=b"POST", target=plan.path.encode(), headers=headers)
        # All heads of a run differ in the length of the body only.
        self._head = (h11.Connection(h11.CLIENT).send(self._asked) or b"").removesuffix(b"\r\n")
        self._native = plan.path.endswith(NATIVE_PATH)
        model = b'{"model":' + msgspec.json.encode(plan.model) + b',"prompt":['
        self._opening = b'{"input_ids":[' if self._native else model

    def prepare(self, request: Request) -> Prepared:
        """Format everything that can be before the request's time."""
        prompt = self._pool.text(request.index, request.input_tokens, request.hash_ids)
        rid = msgspec.json.encode(request.rid)
        if self._native:
            tail = (
                b'],"sampling_params":{"max_new_tokens":%d,"temperature":0,"ignore_eos":true},'
                b'"stream":true,"rid":%b}' % (request.output_tokens, rid)
            )
        else:
            tail = (
                b'],"max_tokens":%d,"stream":true,"stream_options":{"include_usage":true,'
                b'"continuous_usage_stats":true},"temperature":0,"ignore_eos":true,"rid":%b}'
                % (request.output_tokens, rid)
            )
        length = len(self._opening) + prompt.num_bytes + len(tail)
        head = b"%bContent-Length: %d\r\n\r\n%b" % (self._head, length, self._opening)
        return Prepared(head, prompt, tail)

    def exchange(
        self, request: Request, prepared: Prepared, row: Row, until_planned: Callable[[], None]
    ) -> None:
        """Connect, send as soon as ``until_planned`` returns, and fill what ``row`` lacks.

        ``until_planned`` waits for the planned time and stamps ``row.sent_mono_ns``.

        A row whose request was aborted before it was sent stays ``unsent``.
        """
        exchange = _Exchange(self._connections, self._buffer, self._asked, request, prepared)
        assert row.planned_mono_ns is not None, "who asks has planned it"
        # The limit is a client's patience, which begins with the send, planned or late.
        ahead_s = max(0.0, (row.planned_mono_ns - time.monotonic_ns()) / 1e9)
        deadline = gevent.Timeout(ahead_s + self.timeout_s)
        deadline.start()
        try:
            exchange.run(until_planned)
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
            exchange.leave()
            if row.sent_mono_ns is not None:
                exchange.report(row)

    def close(self) -> None:
        """Close the connections that are idle."""
        self._connections.close()


class _Exchange:
    """The course of one request. ``phase`` is what a failure now is blamed on."""

    def __init__(
        self,
        connections: Connections,
        buffer: memoryview,
        asked: h11.Request,
        request: Request,
        prepared: Prepared,
    ) -> None:
        self._connections = connections
        self._buffer = buffer
        self._asked = asked
        self._request = request
        self._prepared = prepared
        self._connection: Connection | None = None
        #: None once the request has left: from then on it is the response's.
        self._phase: FailurePhase | None = "connect"
        self._sent_again = False
        self._begin()

    @property
    def phase(self) -> FailurePhase:
        """The response's, once the request has left."""
        return self._phase or self._response.phase

    def run(self, until_planned: Callable[[], None]) -> None:
        """Raises StreamError, and passes on gevent's Timeout and Aborted."""
        try:
            try:
                self._connection = self._connections.take()
            finally:
                # A refused connection is a failure of its planned time, like any other.
                until_planned()
            try:
                self._converse(self._connection)
            except (OSError, StreamError):
                if not self._connection.kept or self._response.first_byte_mono_ns is not None:
                    raise
                self._converse(self._reconnect())
        except OSError as error:
            raise StreamError(self.phase, error.strerror or str(error)) from error
        self._response.check()

    def leave(self) -> None:
        """Give the connection back, or close it."""
        if self._connection is not None:
            self._connections.give_back(self._connection, reusable=self._response.reusable)

    def report(self, row: Row) -> None:
        """What was measured, whatever became of it."""
        response, stream = self._response, self._stream
        row.end_mono_ns = response.end_mono_ns or time.monotonic_ns()
        row.sent_again = self._sent_again
        row.http_status = response.status
        row.first_byte_mono_ns = response.first_byte_mono_ns
        row.first_token_mono_ns = stream.first_token_mono_ns
        row.chunk_mono_ns = stream.chunk_mono_ns
        row.chunk_tokens = stream.chunk_tokens
        row.prompt_tokens = stream.prompt_tokens
        row.completion_tokens = stream.completion_tokens

    def _begin(self) -> None:
        head_reader = h11.Connection(h11.CLIENT)
        head_reader.send(self._asked)
        self._stream = CompletionStream(self._request.input_tokens, self._request.output_tokens)
        self._response = Response(self._stream, head_reader)

    def _reconnect(self) -> Connection:
        """The server closed an idle connection as the request left on it."""
        self.leave()
        self._connection = None
        self._phase = "connect"
        self._sent_again = True
        self._begin()
        self._connection = self._connections.open()
        return self._connection

    def _converse(self, connection: Connection) -> None:
        """Send the request and read the response to its end."""
        self._phase = "send"
        broken = None
        try:
            connection.send(self._prepared.pieces())
            self._phase = None
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server may refuse a body it has not read, and close: its answer, if one arrived,
            # says more than the broken pipe.
            broken = error
        try:
            self._receive(connection)
        except (OSError, StreamError):
            if broken is not None and self._response.status is None:
                raise broken from None
            raise
        if broken is not None:
            self._response.check()
            raise broken

    def _receive(self, connection: Connection) -> None:
        response = self._response

        def take(data: bytes, mono_ns: int) -> bool:
            response.feed(data, mono_ns)
            return response.over or response.in_tail

        with connection.reading(take, self._buffer) as reading:
            try:
                reading.wait()
                with gevent.Timeout(TAIL_S, False):
                    while not response.over:
                        reading.wait()
            except (OSError, Aborted, gevent.Timeout):
                # In the tail nothing that ends the wait changes the result.
                if not response.in_tail:
                    raise


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
