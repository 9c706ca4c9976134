"""One connection to a receiver: the sender's half of the handshake, then batches of chunks.

Every data frame is kept in mind until the receiver's Progress counts it, so that the frames of a
connection that is lost can be sent again over others.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Protocol

from harness.core import TransportError
from harness.transport.channel import Channel
from harness.transport.connection import Connection
from harness.transport.frames import (
    NO_ROOM,
    Control,
    DataHead,
    Error,
    Hello,
    Progress,
    WireError,
)
from harness.transport.handshake import Dialling
from harness.transport.intake import DataEnd
from harness.transport.lane import Lane
from harness.transport.tcp_info import TcpSample, read_retransmits, sample
from harness.transport.transfer import Chunk
from harness.transport.wire import encode_data_head


class Source(Protocol):
    """Where chunks come from and answers go; all of it from any lane."""

    checksum: bool

    def take(self, connection: "Outbound") -> list[Chunk]:
        """The next batch; when it is empty the connection sleeps until it is woken."""

    def progressed(self) -> None:
        """The receiver has taken data."""

    def answered(self, frame: Control) -> None:
        """A frame of the receiver about one room."""

    def faulted(self, connection: "Outbound", chunks: list[Chunk], reason: str) -> None:
        """This program failed while it served the connection."""

    def lost(self, connection: "Outbound", chunks: list[Chunk], reason: str) -> None:
        """The connection has ended; the receiver has not acknowledged these chunks."""


class Outbound:
    """Client side of one connection. ``welcomed`` ends when both have proven the secret."""

    def __init__(
        self,
        channel: Channel,
        lane: Lane,
        index: int,
        secret: bytes,
        session: bytes,
        source: Source,
    ) -> None:
        self.index = index
        self.alive = True
        self.max_payload_bytes = 0
        self.started_mono_s = time.monotonic()
        self._retransmits: int | None = 0  # when it ended
        self.welcomed: Future[None] = Future()
        self.ended: Future[None] = Future()
        for future in (self.welcomed, self.ended):
            future.set_running_or_notify_cancel()  # whoever waits for it must not cancel it
        self._source = source
        self._handshake = Dialling(secret, session)
        self._unacknowledged: deque[Chunk] = deque()
        self._acknowledged_frames = 0
        self._reason: str | None = None
        self._connection = Connection(channel, lane, self)

    def start(self) -> None:
        """From any thread."""
        self._connection.start()

    def sample(self, peer: str, backlog_bytes: int) -> TcpSample | None:
        """This connection's TCP_INFO now; None when it has just ended."""
        try:
            return sample(
                self._connection.sock,
                time.monotonic_ns(),
                peer,
                self.index,
                self._connection.queued_bytes,
                backlog_bytes,
            )
        except TransportError:
            if self._connection.sock.fileno() >= 0:
                raise
            return None

    @property
    def retransmits(self) -> int | None:
        """Segments sent again on this connection, up to now or its end; None without TCP_INFO."""
        try:
            return read_retransmits(self._connection.sock)
        except TransportError:
            if self._connection.sock.fileno() >= 0:
                raise
            return self._retransmits

    def send(self, frame: Control) -> None:
        """From any thread."""
        self._connection.send(frame)

    def wake(self) -> None:
        """There may be chunks; from any thread."""
        self._connection.wake()

    def detach(self) -> None:
        """Hold no view of a user's buffer that is yet to be sent; blocks a moment."""
        self._connection.detach()

    def close(self, reason: str) -> None:
        """Write what is queued, then close; from any thread."""
        self._retire(reason)
        self._connection.close(reason)

    def abort(self, reason: str) -> None:
        """Close at once; from any thread."""
        self._retire(reason)
        self._connection.abort(reason)

    def _retire(self, reason: str) -> None:
        self.alive = False
        self._reason = self._reason or reason

    # As the connection's end, in its lane

    def opened(self) -> None:
        """The receiver speaks first."""

    def received(self, event: Control | DataHead | DataEnd) -> None:
        if isinstance(event, Error) and event.room == NO_ROOM:
            self.abort(f"refused: {event.message} ({event.code.name})")
        elif not self.welcomed.done():
            self._shake_hands(event)
        elif isinstance(event, Progress):
            self._acknowledge(event.frames)
        elif isinstance(event, DataHead | DataEnd):
            raise WireError("a receiver sends no data")
        else:
            self._source.answered(event)

    def drained(self) -> None:
        """Nothing is owed to the receiver after a read."""

    def broke(self, error: WireError) -> None:
        self.abort(f"the peer broke the protocol: {error}")

    def pull(self) -> Iterable[memoryview | bytes]:
        if not self.welcomed.done() or not self.alive:
            return ()
        chunks = self._source.take(self)
        self._unacknowledged.extend(chunks)
        return self._encoded(chunks)

    def _encoded(self, chunks: list[Chunk]) -> Iterator[memoryview | bytes]:
        for chunk in chunks:
            yield encode_data_head(
                chunk.transfer.room,
                chunk.layer,
                chunk.offset,
                chunk.views[0],
                self._source.checksum,
                chunk.transfer.number,
                *chunk.views[1:],
            )
            yield from chunk.views

    def faulted(self, reason: str) -> None:
        self._source.faulted(self, list(self._unacknowledged), reason)

    def ending(self) -> None:
        self._retransmits = self.retransmits

    def lost(self, reason: str) -> None:
        self._retire(reason)
        assert self._reason is not None
        try:
            self._source.lost(self, list(self._unacknowledged), self._reason)
        finally:
            self._unacknowledged.clear()
            if not self.welcomed.done():
                self.welcomed.set_exception(TransportError(self._reason))
            self.ended.set_result(None)

    def _acknowledge(self, frames: int) -> None:
        newly = frames - self._acknowledged_frames
        if not 0 < newly <= len(self._unacknowledged):
            raise WireError(
                f"{frames} data frames counted; {self._acknowledged_frames} had been and "
                f"{len(self._unacknowledged)} are under way"
            )
        self._acknowledged_frames = frames
        self._source.progressed()
        for _ in range(newly):
            self._unacknowledged.popleft()

    def _shake_hands(self, event: object) -> None:
        answer = self._handshake.answer(event)
        if isinstance(answer, Hello):
            self._connection.send(answer)
        else:
            self.max_payload_bytes = answer
            self._connection.intake.unlock(answer)
            self.welcomed.set_result(None)
