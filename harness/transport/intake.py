"""Cuts the bytes of one connection into frames, and lets payloads go straight to their places.

Sans-I/O. Read into ``buffers()`` (scatter: the place of a payload first, then the stage for what
follows it), then iterate ``received(nbytes)``:

    DataHead    a data frame begins: call ``place(view)`` before going on, or its payload is dropped
    DataEnd     the payload of the last DataHead has arrived whole
    Control     any other frame

So a payload is copied once by the kernel; only what came with an earlier frame passes the stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from harness.transport.frames import Control, DataHead, Kind, WireError
from harness.transport.wire import DATA_HEAD, HEADER, header_fault, parse_body, parse_data_head

_STAGE_BYTES = 64 * 1024
_DISCARD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class DataEnd:
    """``placed`` is false when the payload was dropped, in part or whole."""

    head: DataHead
    placed: bool


class Intake:
    """The reading half of a connection. Before ``unlock`` only frames of the handshake pass."""

    def __init__(self, stage_bytes: int = _STAGE_BYTES) -> None:
        self._stage = memoryview(bytearray(stage_bytes))
        self._start = self._end = 0
        self._max_payload_bytes = 0
        self._violation: str | None = None
        self._head: DataHead | None = None
        self._left_bytes = 0
        self._place: memoryview | None = None
        self._placed = False
        self._discard: memoryview | None = None

    def unlock(self, max_payload_bytes: int) -> None:
        """The handshake is over: accept every kind, and data frames up to this payload."""
        self._max_payload_bytes = max_payload_bytes

    @property
    def left_bytes(self) -> int:
        """Of the payload under way, what has not come yet."""
        return self._left_bytes

    def shut(self) -> None:
        """Nothing more is listened to: whatever comes is dropped unread."""
        self._violation = "bytes after the end"

    def place(self, view: memoryview | None) -> None:
        """Where the rest of the payload goes; None drops it (also in the middle of a payload)."""
        assert self._head is not None
        assert view is None or len(view) == self._left_bytes
        self._place = view
        self._placed = view is not None

    def buffers(self) -> list[memoryview]:
        """Where to read to, in this order; never empty."""
        if self._violation is not None:
            return [self._dropped()]  # a length that was refused must not size the stage
        if self._left_bytes:
            if self._place is not None:
                return [self._place, self._room()]
            if self._left_bytes > _DISCARD_BYTES:
                return [self._dropped()]
            return [self._dropped()[: self._left_bytes], self._room()]
        return [self._room()]

    def received(self, nbytes: int) -> Iterator[Control | DataHead | DataEnd]:
        """Iterate what ``nbytes`` read into ``buffers()`` complete; WireError at a violation."""
        if self._violation is not None:
            raise WireError(self._violation)
        if self._left_bytes:
            took = min(nbytes, self._left_bytes)
            self._took(took)
            nbytes -= took
        self._end += nbytes
        while True:
            if self._head is not None:
                self._unstage()
                if self._left_bytes:
                    return
                yield self._ended()
            frame = self._next()
            if frame is None:
                return
            yield frame

    def _room(self) -> memoryview:
        """Free space of the stage; what it holds moves to its front when the back is full."""
        pending = self._end - self._start
        if pending == 0:
            self._start = self._end = 0
        needed = HEADER.size
        if pending >= HEADER.size:
            length = HEADER.unpack_from(self._stage, self._start)[3]
            kind = HEADER.unpack_from(self._stage, self._start)[2]
            needed += DATA_HEAD.size if kind == Kind.DATA else length
        needed = max(needed, pending + 1)
        if self._start + needed > len(self._stage) or self._end == len(self._stage):
            held = bytes(self._stage[self._start : self._end])
            if needed > len(self._stage):
                self._stage = memoryview(bytearray(needed + _STAGE_BYTES))
            self._stage[:pending] = held
            self._start, self._end = 0, pending
        return self._stage[self._end :]

    def _took(self, nbytes: int) -> None:
        """``nbytes`` of the payload were read."""
        self._left_bytes -= nbytes
        if self._place is not None:
            self._place = self._place[nbytes:]

    def _unstage(self) -> None:
        """Move the part of the payload that lies in the stage."""
        staged = min(self._left_bytes, self._end - self._start)
        if not staged:
            return
        if self._place is not None:
            self._place[:staged] = self._stage[self._start : self._start + staged]
        self._start += staged
        self._took(staged)

    def _ended(self) -> DataEnd:
        assert self._head is not None
        end = DataEnd(self._head, self._placed)
        self._head = self._place = None
        self._placed = False
        return end

    def _dropped(self) -> memoryview:
        if self._discard is None:
            self._discard = memoryview(bytearray(_DISCARD_BYTES))
        return self._discard

    def _next(self) -> Control | DataHead | None:
        try:
            return self._parse()
        except WireError as error:
            self._violation = str(error)
            raise

    def _parse(self) -> Control | DataHead | None:
        staged = self._end - self._start
        if staged < HEADER.size:
            return None
        magic, version, kind, length = HEADER.unpack_from(self._stage, self._start)
        fault = header_fault(magic, version, kind, length, self._max_payload_bytes)
        if fault is not None:
            raise WireError(fault)
        at = self._start + HEADER.size
        fixed = DATA_HEAD.size if kind == Kind.DATA else length
        if staged < HEADER.size + fixed:
            return None
        body = self._stage[at : at + fixed]
        self._start = at + fixed
        if kind == Kind.DATA:
            self._head = parse_data_head(body, length)
            self._left_bytes = self._head.length_bytes
            return self._head
        return parse_body(kind, body)
