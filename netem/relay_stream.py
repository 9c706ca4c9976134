"""What the relay's connections share: a direction of the link, and the streams that cross it.

All connections of a direction share one ``DelayLine``, FIFO at chunk granularity, so they compete
for the rate as they would on a link. A direction stops reading at ``limit_bytes`` held; a stream
at what is not yet taken by its receiver.
"""

import asyncio
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from netem.delayline import DelayLine
from netem.link import Direction

_MAX_CHUNK_BYTES, _MIN_CHUNK_BYTES = 65536, 1448
#: A chunk should take no longer than this to serialise, or it would stand in the others' way.
_CHUNK_S = 0.25e-3
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

#: What travels: bytes, or the end of the stream, or its failure.
Chunk = bytes | Literal["end", "reset"]


class SharedLine:
    """One direction of the link, shared by all connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop, configuration: dict[str, Any]) -> None:
        # The queue is bounded in bytes, by not reading; the line itself drops nothing.
        self.line: DelayLine[tuple[Stream, Chunk]] = DelayLine(
            _shape(configuration), limit_packets=sys.maxsize
        )
        self.limit_bytes = configuration["limit_bytes"]
        #: New connections read as much at once.
        self.chunk_bytes = _chunk_bytes(self.line.direction)
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[Stream] = deque()

    @property
    def full(self) -> bool:
        return bool(self.line.held_bytes >= self.limit_bytes)

    def push(self, stream: "Stream", chunk: Chunk) -> None:
        self.line.push((stream, chunk), _payload_bytes(chunk), 1, time.monotonic())
        if self._timer is None:
            self._arm()

    def wait_for_room(self, stream: "Stream") -> None:
        self._waiting.append(stream)

    def change(self, configuration: dict[str, Any]) -> None:
        """Go on with another rate and delay; see ``DelayLine.change``."""
        self.line.change(_shape(configuration), sys.maxsize, time.monotonic())
        self.limit_bytes = configuration["limit_bytes"]
        self.chunk_bytes = _chunk_bytes(self.line.direction)
        if self._timer is not None:
            self._timer.cancel()
        self._deliver()

    def _arm(self) -> None:
        arrival_s = self.line.next_arrival_s()
        # The loop's clock is time.monotonic, as the line's is.
        self._timer = None if arrival_s is None else self._loop.call_at(arrival_s, self._deliver)

    def _deliver(self) -> None:
        while (item := self.line.pop(time.monotonic())) is not None:
            stream, chunk = item
            stream.arrive(chunk)
        for _ in range(len(self._waiting)):
            if self.full:
                break
            self._waiting.popleft().find_room()
        self._arm()


class Stream:
    """One direction of one connection: read at ``source``, written at ``target``."""

    def __init__(self, line: SharedLine, at_end: Callable[[], None]) -> None:
        self.shared, self._at_end = line, at_end
        self.source: asyncio.Transport | None = None
        self.target: asyncio.Transport | None = None
        self.ended = False
        self._travelling_bytes = 0
        self._receiver_full = self._queued = False

    def offer(self, chunk: Chunk) -> None:
        """A chunk enters the link."""
        if chunk == "end":
            self.source = None  # Read on, it would only end again.
        self._travelling_bytes += _payload_bytes(chunk)
        self.shared.push(self, chunk)
        self.throttle()

    def arrive(self, chunk: Chunk) -> None:
        """A chunk reaches the other end."""
        self._travelling_bytes -= _payload_bytes(chunk)
        # Reading starts when both sockets are there; only a client's failure may come before.
        assert self.target is not None or chunk == "reset", "bytes for a socket not yet connected"
        if self.target is not None and not self.target.is_closing():
            if isinstance(chunk, bytes):
                self.target.write(chunk)
            elif chunk == "end":
                _write_eof(self.target)
            else:
                reset(self.target)
        if chunk == "end":
            self.ended = True
            self._at_end()
        self.throttle()

    def receiver_is_full(self, full: bool) -> None:
        self._receiver_full = full
        self.throttle()

    def find_room(self) -> None:
        """The direction, for which this stream waited in line, has room."""
        self._queued = False
        self.throttle()

    def throttle(self) -> None:
        """Read on, or not, as the direction and the receiver allow."""
        if self._queued or self.source is None or self.source.is_closing():
            return
        self._queued = self.shared.full
        if self._queued:
            self.shared.wait_for_room(self)
        if self._queued or self._receiver_full:
            self.source.pause_reading()
        else:
            self.source.resume_reading()


def _shape(configuration: dict[str, Any]) -> Direction:
    return Direction(configuration["rate_bytes_per_s"], configuration["delay_s"])


def _chunk_bytes(shape: Direction) -> int:
    wanted_bytes = shape.rate_bytes_per_s * _CHUNK_S
    return int(min(max(wanted_bytes, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES))


def _payload_bytes(chunk: Chunk) -> int:
    return len(chunk) if isinstance(chunk, bytes) else 0


def _write_eof(transport: asyncio.Transport) -> None:
    try:
        transport.write_eof()
    except OSError:
        reset(transport)  # the peer had reset the connection and the loop has yet to see it


def reset(transport: asyncio.Transport) -> None:
    """Close at once with a TCP reset."""
    transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
    )
    transport.abort()
