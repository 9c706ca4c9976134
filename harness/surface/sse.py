"""Server-sent events from bytes, without I/O (WHATWG HTML, section 9.2.6).

Lines end in CRLF, LF or CR; a line that starts with a colon is a comment; an empty line dispatches
the event gathered so far, if it has data. Only whole lines are decoded, so a UTF-8 sequence may be
cut anywhere. How the bytes were cut into chunks never changes the events.
"""

import re
from typing import NamedTuple

#: A line, or the data of one event, longer than this is not a completion chunk.
MAX_LINE_BYTES = 1 << 20

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseError(ValueError):
    """The stream holds a line or an event beyond the bound."""


class Event(NamedTuple):
    """One dispatched event: its data lines joined by newlines, and its type."""

    data: str
    name: str = "message"


class SseParser:
    """Feed bytes, get events. An event that the end of the stream cuts off is never dispatched."""

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._after_cr = False
        self._at_start = True
        #: Nothing of a line or an event has been seen since the last event's end.
        self._between_events = False
        self._data: list[str] = []
        self._data_bytes = 0
        self._name = ""
        self.last_event_id = ""
        self.retry_ms: int | None = None

    def feed(self, chunk: bytes | bytearray) -> list[Event]:
        """The events that ``chunk`` completes. Raises SseError beyond the bound."""
        if self._between_events and chunk[:6] == b"data: " and chunk[-2:] == b"\n\n":
            # Nearly all chunks of a stream of tokens are one whole event on one line.
            line = bytes(chunk[:-2])
            if b"\n" not in line and b"\r" not in line and len(line) <= MAX_LINE_BYTES:
                return [Event(line[6:].decode("utf-8", "replace"))]
        events: list[Event] = []
        if self._after_cr and chunk:
            # The CR that ended the last chunk ended its line; an LF here belongs to it.
            self._after_cr = False
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
        if not chunk:
            return events
        *lines, rest = _LINE_END.split(bytes(chunk))
        self._after_cr = chunk[-1:] == b"\r"
        for line in lines:
            if self._partial:
                line = b"".join((*self._partial, line))
                self._partial.clear()
                self._partial_bytes = 0
            self._line(line, events)
        if rest:
            self._partial.append(rest)
            self._partial_bytes += len(rest)
            _bound(self._partial_bytes, "a line")
        self._between_events = not (
            self._partial or self._after_cr or self._at_start or self._data or self._name
        )
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        _bound(len(line), "a line")
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            self._dispatch(events)
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data_bytes += len(value) + 1
            _bound(self._data_bytes, "the data of an event")
            self._data.append(_decoded(value))
        elif name == b"event":
            self._name = _decoded(value)
        elif name == b"id":
            if b"\0" not in value:
                self.last_event_id = _decoded(value)
        elif name == b"retry":
            text = _decoded(value)
            if text.isascii() and text.isdigit() and len(text) < 16:
                self.retry_ms = int(text)

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            events.append(Event("\n".join(self._data), self._name or "message"))
            self._data = []
            self._data_bytes = 0
        self._name = ""


def _decoded(value: bytes) -> str:
    return value.removeprefix(b" ").decode("utf-8", "replace")


def _bound(num_bytes: int, what: str) -> None:
    if num_bytes > MAX_LINE_BYTES:
        raise SseError(f"{what} of the event stream is longer than {MAX_LINE_BYTES} bytes")
