"""One response from its bytes to tokens and times, without I/O: head, body, event stream.

h11 reads and bounds the head; the body's bytes are unframed by ``surface.framing`` and told to the
completion stream with the time they arrived. Whatever is wrong is a StreamError whose phase says
how far the response had come:

    headers -> first_token -> stream -> (tail: [DONE] came, or a refusal's body is being read)
"""

import h11

from harness.load.completion import CompletionStream, FailurePhase, StreamError, excerpt
from harness.surface.framing import Body, FramingError, body_of

#: A response larger than this is not a completion of at most a million tokens.
MAX_RESPONSE_BYTES = 1 << 30
#: How much of a refusal's body is read for its message.
MAX_REFUSAL_BYTES = 1 << 16
#: Heads that say that another follows (100 Continue, 103 Early Hints), at the most.
MAX_INFORMATIONAL = 16


class Response:
    """Feed what arrives until ``over``; ``check`` then raises what is wrong with it, if anything.

    ``phase`` is what a failure now is blamed on. ``in_tail``: nothing that may still come changes
    the result, so a reader waits for it a short time only. ``end_mono_ns`` is when [DONE] came.
    """

    def __init__(self, stream: CompletionStream, head_reader: h11.Connection) -> None:
        self.phase: FailurePhase = "headers"
        self.status: int | None = None
        self.first_byte_mono_ns: int | None = None
        self.end_mono_ns: int | None = None
        self.over = False
        self._stream = stream
        self._head_reader = head_reader
        self._body: Body | None = None
        self._stays_open = False
        self._received_bytes = 0
        #: A body that is not a completion stream: what its head says is wrong, and its bytes.
        self._refusal: StreamError | None = None
        self._refusal_body = b""

    @property
    def in_tail(self) -> bool:
        return self._stream.done or self._refusal is not None

    @property
    def reusable(self) -> bool:
        """The connection is left as before the request: another one may follow on it."""
        whole = self._body is not None and self._body.over and not self._body.rest
        return self.over and whole and self._stays_open

    def feed(self, data: bytes, mono_ns: int) -> None:
        """Take ``data`` that arrived at ``mono_ns``; none is the end of the connection."""
        self._received_bytes += len(data)
        if self._received_bytes > MAX_RESPONSE_BYTES:
            raise StreamError("protocol", f"a response of more than {MAX_RESPONSE_BYTES} bytes")
        if not data:
            self._end()
            return
        if self.first_byte_mono_ns is None:
            self.first_byte_mono_ns = mono_ns
        if self._body is None:
            data = self._read_head(data)
        if self._body is None:
            return
        if not self._body.over:
            try:
                payload = self._body.feed(data)
            except FramingError as error:
                raise StreamError("protocol", f"not HTTP/1.1: {error}") from error
            if payload:
                self._take(payload, mono_ns)
        self.over = self.over or self._body.over

    def check(self) -> None:
        """Raise StreamError unless it is a whole completion with the counts asked for."""
        if self._refusal is not None:
            text = excerpt(self._refusal_body.decode("utf-8", "replace"))
            raise StreamError(self._refusal.phase, f"{self._refusal}{text}")
        self._stream.check_complete()

    def _end(self) -> None:
        if self._body is None or not (self._body.end() or self.in_tail):
            raise StreamError(self.phase, "the server closed the connection early")
        self.over = True
        self._stays_open = False

    def _read_head(self, data: bytes) -> bytes:
        """What of ``data`` lies behind the head, once that has come."""
        try:
            self._head_reader.receive_data(data)
            for _ in range(MAX_INFORMATIONAL):
                event = self._head_reader.next_event()
                if event is h11.NEED_DATA:
                    return b""
                if isinstance(event, h11.Response):
                    break
            else:
                raise StreamError("protocol", f"{MAX_INFORMATIONAL} heads before the response's")
        except h11.RemoteProtocolError as error:
            raise StreamError("protocol", f"not HTTP/1.1: {excerpt(str(error))}") from error
        headers = dict(event.headers)
        self._body = body_of(headers)
        closing = b"close" in headers.get(b"connection", b"").lower()
        self._stays_open = event.http_version == b"1.1" and not closing
        self._judge(event, headers.get(b"content-type", b"").decode("latin-1"))
        return self._head_reader.trailing_data[0]

    def _judge(self, head: h11.Response, kind: str) -> None:
        self.status = head.status_code
        if head.status_code != 200:
            reason = head.reason.decode("latin-1")
            self._refusal = StreamError("headers", f"HTTP {head.status_code} {reason}: ")
        elif kind.partition(";")[0].strip().lower() != "text/event-stream":
            message = f"asked for an event stream, got content type {excerpt(kind)!r}: "
            self._refusal = StreamError("protocol", message)
        else:
            self.phase = "first_token"

    def _take(self, payload: bytes, mono_ns: int) -> None:
        if self._refusal is not None:
            self._refusal_body += payload
            self.over = len(self._refusal_body) >= MAX_REFUSAL_BYTES
            return
        stream = self._stream
        stream.feed(payload, mono_ns)
        if stream.first_token_mono_ns is not None:
            self.phase = "stream"
        if stream.done and self.end_mono_ns is None:
            self.end_mono_ns = mono_ns
