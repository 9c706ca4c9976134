"""One connection within its lane: bytes in through an Intake, bytes out from a queue.

What is said on it is its End's business: the accepting half (``inbound``) or the dialling half
(``outbound``). Control frames go out at once; when nothing waits and the socket takes more, the end
is asked for the next batch (``pull``). A socket is writable while less than its low-water mark is
unsent, so each batch goes to a connection that can take it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from harness.transport.channel import Channel
from harness.transport.frames import Control, DataHead, WireError
from harness.transport.intake import DataEnd, Intake
from harness.transport.lane import Lane
from harness.transport.wire import encode_control

_READS_PER_TURN = 4
_BUFFERS_PER_SEND = 64


class End(Protocol):
    """What a connection tells its owner, in its lane."""

    def opened(self) -> None:
        """The channel's own handshake is over."""

    def received(self, event: Control | DataHead | DataEnd) -> None:
        """In order of arrival; may raise WireError."""

    def drained(self) -> None:
        """What had been read at once has been handed over."""

    def broke(self, error: WireError) -> None:
        """The peer broke the protocol."""

    def pull(self) -> Iterable[memoryview | bytes]:
        """The next bytes to send; nothing puts the connection to sleep until ``wake``."""

    def lost(self, reason: str) -> None:
        """The connection has ended; nothing follows."""


class Connection:
    """``start`` it once; every callback of its end comes from its lane.

    A peer that leaves more than ``max_unread_bytes`` of answers unread is given up.
    """

    def __init__(
        self, channel: Channel, lane: Lane, end: End, max_unread_bytes: int | None = None
    ) -> None:
        self.sock = channel.sock
        self.intake = Intake()
        self._channel, self._lane, self._end = channel, lane, end
        self._max_unread_bytes = max_unread_bytes
        self._fd = channel.sock.fileno()
        self._out: deque[memoryview | bytes] = deque()
        self._out_bytes = 0
        self._writing = self._open = self._ended = False
        self._closing: str | None = None

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait in this process for the kernel to take them."""
        return self._out_bytes

    def start(self) -> None:
        self._lane.submit(self._start)

    def send(self, frame: Control) -> None:
        """Queue a control frame; from any thread."""
        data = encode_control(frame)
        self._in_lane(lambda: self._queue(data))

    def wake(self) -> None:
        """Ask the end for bytes again; from any thread."""
        self._lane.submit(self._want_to_write)

    def close(self, reason: str) -> None:
        """Send what is queued, then end; from any thread."""
        self._in_lane(lambda: self._close(reason))

    def abort(self, reason: str) -> None:
        """End at once; from any thread."""
        self._in_lane(lambda: self._end_now(reason))

    def _in_lane(self, call: Callable[[], None]) -> None:
        if self._lane.here:
            call()
        else:
            self._lane.submit(call)

    # In the lane

    def _start(self) -> None:
        if self._ended:
            return
        self._lane.loop.add_reader(self._fd, self._readable)
        self._go_on()

    def _go_on(self) -> None:
        """The channel's own handshake, step by step, then whatever comes."""
        try:
            self._open = self._channel.shake_hands()
        except OSError as error:  # an SSLError is one
            self._end_now(f"the handshake of the channel failed: {error}")
            return
        if self._open:
            self._end.opened()
            if self._channel.pending():
                self._readable()

    def _readable(self) -> None:
        if not self._open:
            self._go_on()
            return
        for _ in range(_READS_PER_TURN):
            if self._ended or not self._read():
                break
        else:
            if self._channel.pending():
                self._lane.loop.call_soon(self._readable)
        if not self._ended:
            self._end.drained()

    def _read(self) -> bool:
        """One read and what it completes; whether there may be more."""
        try:
            nbytes = self._channel.receive(self.intake.buffers())
        except OSError as error:
            self._end_now(f"the connection was lost: {error}")
            return False
        if nbytes is None:
            return False
        if nbytes == 0:
            self._end_now(self._closing or "the connection was closed by the peer")
            return False
        try:
            for event in self.intake.received(nbytes):
                self._end.received(event)
                if self._ended or self._closing is not None:
                    return False
        except WireError as error:
            self._end.broke(error)
            return False
        return True

    def _queue(self, data: bytes) -> None:
        if self._ended or self._closing is not None:
            return
        if self._max_unread_bytes is not None and self._out_bytes > self._max_unread_bytes:
            self._end_now("the peer does not read what it is told")
            return
        self._out.append(data)
        self._out_bytes += len(data)
        self._flush()

    def _want_to_write(self) -> None:
        if not self._writing and not self._ended:
            self._writing = True
            self._lane.loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        if not self._out:
            self._out.extend(self._end.pull())
            self._out_bytes = sum(map(len, self._out))
            if not self._out:
                self._writing = False
                self._lane.loop.remove_writer(self._fd)
                return
        self._flush()

    def _flush(self) -> None:
        """Hand over what is queued as far as the kernel takes it."""
        while self._out:
            try:
                taken = self._channel.send(list(islice(self._out, _BUFFERS_PER_SEND)))
            except OSError as error:
                self._end_now(f"the connection was lost: {error}")
                return
            if taken is None:
                self._want_to_write()
                return
            self._out_bytes -= taken
            while taken:
                first = self._out[0]
                if taken < len(first):
                    self._out[0] = memoryview(first)[taken:]
                    break
                taken -= len(first)
                self._out.popleft()
        if self._closing is not None:
            self._end_now(self._closing)

    def _close(self, reason: str) -> None:
        if self._ended or self._closing is not None:
            return
        self._closing = reason
        if self._out:
            self._flush()
        else:
            self._end_now(reason)

    def _end_now(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._out.clear()
        self._out_bytes = 0
        self._lane.loop.remove_reader(self._fd)
        self._lane.loop.remove_writer(self._fd)
        self._channel.close()
        self._end.lost(reason)
