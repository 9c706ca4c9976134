"""One connection within its lane: bytes in through an Intake, bytes out from a queue.

What is said on it is its End's business: the accepting half (``inbound``) or the dialling half
(``outbound``). Control frames go out at once; when nothing waits and the socket takes more, the end
is asked for the next batch (``pull``). A socket is writable while little is unsent, so each batch
goes to a connection that can take it.

Sending never ends the connection within the call, for the sender may hold a lock: a loss is told in
a later turn. An error that nobody expected ends the connection, is told to its end, so that
what it touched fails with a reason, and goes to the user's loop.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Protocol

from harness.transport.channel import Channel
from harness.transport.frames import Control, DataHead, WireError
from harness.transport.intake import DataEnd, Intake
from harness.transport.lane import Lane
from harness.transport.wire import encode_control

_READS_PER_TURN = 4
_BUFFERS_PER_SEND = 64
_LAST_READS = 64
#: Bytes of a payload that are waited for before the lane wakes: fewer, larger reads.
_MOST_AWAITED_BYTES = 2 * 1024 * 1024
#: How long a connection that is closing waits for the peer to read the last words.
_LINGER_S = 1.0


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

    def faulted(self, reason: str) -> None:
        """This program failed while it served the connection; ``lost`` follows."""

    def ending(self) -> None:
        """The socket is about to be closed."""

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
        self._writing = self._open = self._broken = self._ended = False
        self._closing: str | None = None

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait in this process for the kernel to take them."""
        return self._out_bytes

    def start(self) -> None:
        self.in_lane(self._start)

    def send(self, frame: Control) -> None:
        """Queue a control frame; from any thread."""
        self.in_lane(partial(self._queue, encode_control(frame)))

    def wake(self) -> None:
        """Ask the end for bytes again; from any thread."""
        self._lane.submit(partial(self._guarded, self._want_to_write))

    def close(self, reason: str) -> None:
        """Send what is queued, then end; from any thread."""
        self.in_lane(partial(self._close, reason))

    def abort(self, reason: str) -> None:
        """End at once; from any thread."""
        self.in_lane(partial(self._end_now, reason))

    def detach(self) -> None:
        """Copy the views that wait to be sent, so that what they show may change; blocks a moment.

        From any thread that holds no lock.
        """
        done: Future[None] = Future()

        def copy() -> None:
            self._out = deque(map(bytes, self._out))
            done.set_result(None)

        self.in_lane(copy)
        done.result()

    def in_lane(self, call: Callable[[], None]) -> None:
        """Run ``call`` for this connection, now if this is its lane."""
        if self._lane.here:
            self._guarded(call)
        else:
            self._lane.submit(partial(self._guarded, call))

    # In the lane

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - told to all whom it concerns, see above
            reason = f"this program failed: {error!r}"
            self._lane.report({"message": "KV connection: " + reason, "exception": error})
            try:
                self._end.faulted(reason)
            finally:
                self._end_now(reason)

    def _start(self) -> None:
        if self._ended:
            return
        self._lane.loop.add_reader(self._fd, self._guarded, self._readable)
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
            if not self._ended and self._channel.pending():
                self._readable()

    def _readable(self) -> None:
        if self._ended:
            return
        if not self._open:
            self._go_on()
            return
        for _ in range(_READS_PER_TURN):
            if not self._read():
                break
        else:
            if self._channel.pending():
                self._lane.loop.call_soon(self._guarded, self._readable)
        if not self._ended:
            self._channel.wake_at(min(self.intake.left_bytes, _MOST_AWAITED_BYTES))
            self._end.drained()

    def _read(self) -> bool:
        """One read and what it completes; whether there may be more."""
        try:
            buffers = self.intake.buffers()
            nbytes = self._channel.receive(buffers)
        except OSError as error:
            self._end_now(f"the connection was lost: {error}")
            return False
        if nbytes is None:
            return False
        if nbytes == 0:
            self._end_now(self._closing or "the connection was closed by the peer")
            return False
        if self._closing is not None:
            return True  # it is not listened to any more
        try:
            for event in self.intake.received(nbytes):
                self._end.received(event)
                if self._ended or self._closing is not None:
                    return False
        except WireError as error:
            self._end.broke(error)
            return False
        # A short read has emptied the socket: asking again would cost a system call for nothing.
        return nbytes == sum(map(len, buffers)) or self._channel.pending()

    def _queue(self, data: bytes) -> None:
        if self._ended or self._broken or self._closing is not None:
            return
        if self._max_unread_bytes is not None and self._out_bytes > self._max_unread_bytes:
            self._break("the peer does not read what it is told")
            return
        self._out.append(data)
        self._out_bytes += len(data)
        if self._open:
            self._flush()

    def _want_to_write(self) -> None:
        if not self._writing and not self._ended:
            self._writing = True
            self._lane.loop.add_writer(self._fd, self._guarded, self._writable)

    def _writable(self) -> None:
        if self._broken:
            return
        if not self._out:
            self._out.extend(self._end.pull())
            self._out_bytes = sum(map(len, self._out))
            if not self._out:
                self._writing = False
                self._lane.loop.remove_writer(self._fd)
                return
        self._flush()
        if self._closing is not None and not self._out and not self._broken:
            self._end_now(self._closing)

    def _flush(self) -> None:
        """Hand over what is queued as far as the kernel takes it."""
        while self._out:
            try:
                batch = list(islice(self._out, _BUFFERS_PER_SEND))
                nbytes = sum(map(len, batch))
                taken = self._channel.send(batch, nbytes)
            except OSError as error:
                self._break(f"the connection was lost: {error}")
                return
            if taken is None:
                self._want_to_write()
                return
            self._out_bytes -= taken
            full = taken < nbytes and not self._channel.one_at_a_time
            while taken:
                first = self._out[0]
                if taken < len(first):
                    self._out[0] = memoryview(first)[taken:]
                    break
                taken -= len(first)
                self._out.popleft()
            if full:
                self._want_to_write()
                return

    def _break(self, reason: str) -> None:
        """Nothing can be sent any more: hear the peer's last words, then end."""
        self._broken = True
        self._out.clear()
        self._out_bytes = 0

        def end() -> None:
            for _ in range(_LAST_READS):
                if self._ended or not self._read():
                    break
            self._end_now(reason)

        self._lane.loop.call_soon(self._guarded, end)

    def _close(self, reason: str) -> None:
        if self._ended or self._broken or self._closing is not None:
            return
        self._closing = reason
        self.intake.shut()
        if self._open:
            self._flush()
        if self._broken:
            return
        if self._open and self._out:
            self._lane.loop.call_later(_LINGER_S, self._guarded, partial(self._end_now, reason))
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
        try:
            self._end.ending()
        finally:
            self._channel.close()
            self._end.lost(reason)
