"""Where KV lands: one preallocated buffer a room, every byte of it written exactly once.

A room is one transfer. Its layers lie one after another in the buffer, so that layer k occupies
[starts[k], starts[k] + layer_bytes[k]) and one set of intervals covers all of them.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from harness.core import TransportError
from harness.transport.frames import Code, Data, Done, Offer

#: Pieces out of order that a room may hold; more than any honest striping leaves.
MAX_INTERVALS = 16384


class RoomError(TransportError):
    """A frame does not fit its room; ``code`` is what the sender is told."""

    def __init__(self, code: Code, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class Coverage:
    """The bytes that have arrived, as sorted disjoint intervals; neighbours are merged."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> bool:
        """Add [start, end); False, and no change, when a byte of it has already arrived."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, start)
        if (at > 0 and ends[at - 1] > start) or (at < len(starts) and starts[at] < end):
            return False
        joins_left = at > 0 and ends[at - 1] == start
        joins_right = at < len(starts) and starts[at] == end
        if joins_left and joins_right:
            ends[at - 1] = ends[at]
            del starts[at], ends[at]
        elif joins_left:
            ends[at - 1] = end
        elif joins_right:
            starts[at] = start
        else:
            starts.insert(at, start)
            ends.insert(at, end)
        return True


@dataclass(slots=True)
class Received:
    """A transfer that arrived whole. Its memory counts as used until ``release()``.

    ``payload_bytes`` is the receiver's own count of KV bytes. ``meta`` is what came with the end of
    the transfer, or with its offer when the end carried none; ``last_byte_mono_ns`` is when the
    last KV byte was in the buffer (when the offer came, for a transfer of no bytes).
    """

    room: int
    payload_bytes: int
    layers: int
    meta: bytes
    offer_meta: bytes
    last_byte_mono_ns: int
    _buffer: memoryview | None
    _starts: tuple[int, ...]
    _on_release: Callable[[int], None] | None = field(repr=False)

    @property
    def buffer(self) -> memoryview:
        """All layers, one after another; read-only."""
        if self._buffer is None:
            raise TransportError(f"the KV buffer of room {self.room} has been released")
        return self._buffer

    def layer(self, layer: int) -> memoryview:
        """The bytes of one layer; read-only."""
        return self.buffer[self._starts[layer] : self._starts[layer + 1]]

    def release(self) -> None:
        """Give the buffer back; further calls do nothing."""
        if self._on_release is not None:
            release, self._on_release, self._buffer = self._on_release, None, None
            release(self.room)


class Landing:
    """A transfer on its way in: checks every frame against the offer before it is written."""

    def __init__(self, offer: Offer, session: bytes, peer: str) -> None:
        self.room = offer.room
        self.session = session
        self.peer = peer
        self.layer_bytes = offer.layer_bytes
        self.total_bytes = sum(offer.layer_bytes)
        self.payload_bytes = 0
        self.last_byte_mono_ns = time.monotonic_ns()
        self._offer_meta = offer.meta
        self._done_meta: bytes | None = None
        self._starts = tuple(accumulate(offer.layer_bytes, initial=0))
        self._view = memoryview(bytearray(self.total_bytes))
        self._coverage = Coverage()

    @property
    def landed(self) -> bool:
        """Whether the sender is done and every byte is there."""
        return self._done_meta is not None and self.payload_bytes == self.total_bytes

    def write(self, data: Data) -> None:
        """Put a data frame in its place; RoomError when it is corrupt or does not belong there."""
        length = len(data.payload)
        if data.layer >= len(self.layer_bytes):
            raise RoomError(
                Code.PROTOCOL, f"data for layer {data.layer} of {len(self.layer_bytes)}"
            )
        if data.offset + length > self.layer_bytes[data.layer]:
            raise RoomError(
                Code.PROTOCOL,
                f"data for bytes {data.offset} to {data.offset + length} of layer {data.layer}, "
                f"which has {self.layer_bytes[data.layer]}",
            )
        if not data.intact():
            raise RoomError(
                Code.CHECKSUM, f"wrong checksum in layer {data.layer} at byte {data.offset}"
            )
        start = self._starts[data.layer] + data.offset
        if not self._coverage.add(start, start + length):
            raise RoomError(
                Code.PROTOCOL, f"byte {data.offset} of layer {data.layer} or after came twice"
            )
        if len(self._coverage) > MAX_INTERVALS:
            raise RoomError(Code.PROTOCOL, f"more than {MAX_INTERVALS} pieces out of order")
        self._view[start : start + length] = data.payload
        self.payload_bytes += length
        self.last_byte_mono_ns = time.monotonic_ns()

    def finish(self, done: Done) -> None:
        """The sender says that it has handed everything over; bytes may still be on their way."""
        if self._done_meta is not None:
            raise RoomError(Code.PROTOCOL, "the end of the transfer came twice")
        if done.payload_bytes != self.total_bytes:
            raise RoomError(
                Code.PROTOCOL,
                f"the sender ends after {done.payload_bytes} bytes; it offered {self.total_bytes}",
            )
        self._done_meta = done.meta

    def deliver(self, on_release: Callable[[int], None]) -> Received:
        """Hand the buffer to its user."""
        assert self.landed, self.room
        return Received(
            room=self.room,
            payload_bytes=self.payload_bytes,
            layers=len(self.layer_bytes),
            meta=self._done_meta or self._offer_meta,
            offer_meta=self._offer_meta,
            last_byte_mono_ns=self.last_byte_mono_ns,
            _buffer=self._view.toreadonly(),
            _starts=self._starts,
            _on_release=on_release,
        )
