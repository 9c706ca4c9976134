"""Where the body of an HTTP/1.1 response ends, and its bytes, without I/O (RFC 9112, section 6.3).

A parser of whole messages spends 25 us on each chunk of a stream, which for a client that reads
thousands of them a second is half of its time. The head is for h11 to read; here are the three
ways in which a body can be framed: chunked, of a given length, or to the connection's end. How the
bytes were cut never changes what comes out.
"""

import re
from typing import Protocol

#: A chunk's size with its extensions, and all lines of a trailer.
MAX_SIZE_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 1 << 14
#: Nothing of a stream of tokens is as large; a size that is shows that the framing is lost.
MAX_CHUNK_BYTES = 1 << 30

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r\n")
_CR = ord("\r")
_IN_SIZE, _IN_DATA, _AFTER_DATA, _IN_TRAILER = range(4)
#: The longest line that each of these states takes.
_LINE_BYTES = (MAX_SIZE_LINE_BYTES, 0, 2, MAX_TRAILER_BYTES)


class FramingError(ValueError):
    """The bytes are not a body framed as the head says."""


class Body(Protocol):
    """``over`` once the body's last byte has come; ``rest`` are the bytes behind it."""

    over: bool
    rest: bytes

    def feed(self, data: bytes) -> bytes:
        """What of the payload ``data`` carries. Raises FramingError; never called once over."""

    def end(self) -> bool:
        """The connection ended: whether the body did, too."""


class ChunkedBody:
    """``Transfer-Encoding: chunked`` (section 7.1). Extensions and trailers are passed over."""

    def __init__(self) -> None:
        self.over = False
        self.rest = b""
        self._state = _IN_SIZE
        #: Bytes of the chunk that are yet to come.
        self._left = 0
        #: The beginning of a line, or of the CRLF behind a chunk.
        self._partial = b""
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """What of the payload ``data`` carries."""
        if self._partial:
            data, self._partial = self._partial + data, b""
        pieces = []
        at, end = 0, len(data)
        while at < end and not self.over:
            if self._state == _IN_DATA:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = _AFTER_DATA
                continue
            line_end = self._line_end(data, at)
            if not line_end:
                self._partial = data[at:]
                break
            self._line(data, at, line_end)
            at = line_end
        if self.over:
            self.rest = data[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self) -> bool:
        """The connection ended."""
        return self.over

    def _line_end(self, data: bytes, at: int) -> int:
        """Where the line at ``at`` ends, its CRLF included; 0 when that has not come."""
        if self._state == _AFTER_DATA and data[at] != _CR:
            raise FramingError("a chunk does not end where its size says")
        most = _LINE_BYTES[self._state]
        found = data.find(b"\r\n", at, at + most) + 2
        if found >= 2:
            return found
        if len(data) - at >= most:
            raise FramingError(f"no end of line within {most} bytes in the framing of chunks")
        return 0

    def _line(self, data: bytes, at: int, line_end: int) -> None:
        if self._state == _IN_SIZE:
            size = _SIZE_LINE.fullmatch(data, at, line_end)
            if size is None:
                raise FramingError(f"a chunk's size is not {data[at:line_end][:40]!r}")
            self._left = int(size[1], 16)
            if self._left > MAX_CHUNK_BYTES:
                raise FramingError(f"a chunk of {self._left} bytes")
            self._state = _IN_DATA if self._left else _IN_TRAILER
        elif self._state == _AFTER_DATA:
            if line_end != at + 2:
                raise FramingError("a chunk does not end where its size says")
            self._state = _IN_SIZE
        else:
            self._trailer_bytes += line_end - at
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise FramingError(f"a trailer of more than {MAX_TRAILER_BYTES} bytes")
            self.over = line_end == at + 2


class SizedBody:
    """``Content-Length: num_bytes``."""

    def __init__(self, num_bytes: int) -> None:
        self.over = num_bytes == 0
        self.rest = b""
        self._left = num_bytes

    def feed(self, data: bytes) -> bytes:
        """What of the payload ``data`` carries."""
        payload, self.rest = data[: self._left], data[self._left :]
        self._left -= len(payload)
        self.over = self._left == 0
        return payload

    def end(self) -> bool:
        """The connection ended."""
        return self.over


class OpenBody:
    """Neither of both: the body is all that comes."""

    def __init__(self) -> None:
        self.over = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """All of ``data``."""
        return data

    def end(self) -> bool:
        """The connection ended, and with it the body."""
        self.over = True
        return True


def body_of(headers: dict[bytes, bytes]) -> Body:
    """The body behind a head with ``headers`` (names in lower case), which h11 has checked."""
    if b"transfer-encoding" in headers:
        return ChunkedBody()
    length = headers.get(b"content-length")
    return OpenBody() if length is None else SizedBody(int(length))
