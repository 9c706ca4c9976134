"""The receiving end of KV transfers: a server that lands rooms in bounded buffers.

A room lives from its Offer to ``Received.release()``: receiving, landed (whole and acknowledged),
delivered (its user has the buffer). ``expect(room)`` may come before the offer or after the KV has
landed; a room that nobody expects within the hold time is dropped. Whatever goes wrong with one
room is told to its sender and to whoever expects it, and touches no other room.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import ip_address
from types import TracebackType
from typing import Self

from harness.core import TransportError
from harness.transport.frames import (
    MAX_PAYLOAD_BYTES,
    NO_ROOM,
    Ack,
    Code,
    Credit,
    Data,
    Done,
    Error,
    Frame,
    Offer,
    Resume,
    TransferError,
)
from harness.transport.handshake import check_secret
from harness.transport.inbound import Inbound
from harness.transport.rooms import Landing, Received, RoomError

#: Failed rooms that are remembered, so that their late frames are known and late users are told.
_REMEMBERED_ROOMS = 4096
#: How long a peer may take to read why the receiver closes.
_FAREWELL_S = 0.5


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """Bounds on what peers can make the receiver hold; times are wall seconds.

    ``max_held_rooms`` and ``hold_s`` bound the rooms that nobody has expected yet.
    """

    max_buffer_bytes: int = 2**30
    max_rooms: int = 4096
    max_held_rooms: int = 1024
    hold_s: float = 30.0
    auth_timeout_s: float = 5.0
    max_connections: int = 1024
    max_pending_connections: int = 256
    max_payload_bytes: int = 2**20

    def __post_init__(self) -> None:
        if not 1 <= self.max_payload_bytes <= MAX_PAYLOAD_BYTES:
            raise TransportError(
                f"max_payload_bytes is {self.max_payload_bytes}; the wire allows 1 to "
                f"{MAX_PAYLOAD_BYTES}"
            )


@dataclass(slots=True)
class _Room:
    landing: Landing
    control: Inbound
    timer: asyncio.TimerHandle | None


@dataclass(slots=True)
class _Expectation:
    future: asyncio.Future[Received]
    timer: asyncio.TimerHandle


class KvReceiver:
    """Accepts KV transfers from peers that know ``secret``. Used within one event loop."""

    def __init__(self, secret: bytes, limits: ReceiverLimits | None = None) -> None:
        self._secret = check_secret(secret)
        self._limits = limits or ReceiverLimits()
        self._server: asyncio.Server | None = None
        self._address = "no address yet"
        self._connections: set[Inbound] = set()
        self._rooms: dict[int, _Room] = {}
        self._delivered: dict[int, Received] = {}
        self._expected: dict[int, _Expectation] = {}
        self._failed: OrderedDict[int, str] = OrderedDict()
        self._buffered_bytes = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of all buffers, from an offer's acceptance to the release of its buffer."""
        return self._buffered_bytes

    @property
    def rooms(self) -> int:
        """Rooms that hold a buffer."""
        return len(self._rooms) + len(self._delivered)

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on one address of this machine; returns the port."""
        if self._server is not None:
            raise TransportError(f"this KV receiver already listens on {self._address}")
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                self._new_connection,
                host,
                port,
                start_serving=False,
                backlog=self._limits.max_pending_connections,
            )
        except OSError as error:
            raise TransportError(
                f"the KV receiver cannot listen on {host}:{port}: {error}"
            ) from error
        address, bound = server.sockets[0].getsockname()[:2]
        if ip_address(address).is_unspecified:
            server.close()
            raise TransportError(
                f"the KV receiver will not listen on every address ({host!r}); name one"
            )
        self._server = server
        self._address = f"{host}:{bound}"
        try:
            await server.start_serving()
        except OSError as error:
            await self.close()
            raise TransportError(
                f"the KV receiver cannot listen on {self._address}: {error}"
            ) from error
        return int(bound)

    async def close(self) -> None:
        """Stop listening, end every connection, fail every room and expectation."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for room in [*self._rooms, *self._expected]:
            self.discard(room, "the receiver is closing")
        for received in list(self._delivered.values()):
            received.release()
        connections = list(self._connections)
        for connection in connections:
            connection.refuse(Code.CLOSED, "the receiver is closing")
        if connections:
            await asyncio.wait([each.lost for each in connections], timeout=_FAREWELL_S)
        for connection in connections:
            connection.abort()  # a peer that did not read the farewell
        await asyncio.gather(*(each.lost for each in connections))

    def expect(self, room: int, deadline_mono_s: float) -> asyncio.Future[Received]:
        """The room's KV, once it has landed whole; whoever gets it must release it.

        Fails with TransportError when the transfer fails or the deadline (time.monotonic) passes.
        Cancelling the future drops the room. A user that may be cancelled between the landing and
        the await calls ``discard(room)`` afterwards.
        """
        if room in self._expected or room in self._delivered:
            raise self._error(room, "expect", "it is already expected")
        future: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        if room in self._failed:
            future.set_exception(self._error(room, "expect", self._failed[room]))
            return future
        entry = self._rooms.get(room)
        if entry is not None and entry.landing.landed:
            future.set_result(self._deliver(entry))
            return future
        if entry is not None and entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        left_s = max(0.0, deadline_mono_s - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left_s, self._expired, room)
        self._expected[room] = _Expectation(future, timer)
        future.add_done_callback(lambda done: self._if_cancelled(room, done))
        return future

    def discard(self, room: int, reason: str = "the receiver's user gave it up") -> None:
        """Drop a room in whatever state it is: fail it, or release its delivered buffer."""
        received = self._delivered.get(room)
        if received is not None:
            received.release()
        else:
            self._fail(room, Code.ABORTED, "transfer", reason)

    # Connections

    def _new_connection(self) -> Inbound:
        return Inbound(
            self._secret,
            self._limits.max_payload_bytes,
            self._limits.auth_timeout_s,
            self._admit,
            self._on_frame,
            self._on_lost,
        )

    def _admit(self, connection: Inbound) -> bool:
        pending = sum(other.session is None for other in self._connections)
        if (
            pending >= self._limits.max_pending_connections
            or len(self._connections) >= self._limits.max_connections
        ):
            return False
        self._connections.add(connection)
        return True

    def _on_lost(self, connection: Inbound) -> None:
        self._connections.discard(connection)
        for room, entry in list(self._rooms.items()):
            if entry.control is connection and not entry.landing.landed:
                landing = entry.landing
                self._fail(
                    room,
                    Code.PEER_LOST,
                    "transfer",
                    f"the connection was lost after {landing.payload_bytes} of "
                    f"{landing.total_bytes} bytes",
                )

    def _on_frame(self, connection: Inbound, frame: Frame) -> None:
        match frame:
            case Data():
                self._on_data(connection, frame)
            case Offer():
                self._on_offer(connection, frame)
            case Done():
                self._on_done(connection, frame)
            case Error(room, _, message):
                if room != NO_ROOM and self._receiving(connection, room) is not None:
                    self._fail(room, Code.ABORTED, "transfer", f"the sender gave up: {message}")
            case Resume(room):
                connection.send(Error(room, Code.UNSUPPORTED, "resuming is not offered"))
            case _:
                connection.refuse(Code.PROTOCOL, f"a sender has no {type(frame).__name__} frame")

    def _receiving(self, connection: Inbound, room: int) -> _Room | None:
        """The room, if it is still receiving and belongs to this connection's session."""
        entry = self._rooms.get(room)
        if entry is None or entry.landing.session != connection.session or entry.landing.landed:
            return None
        return entry

    def _on_offer(self, connection: Inbound, offer: Offer) -> None:
        refusal = self._refusal(offer)
        if refusal is not None:
            connection.send(Error(offer.room, *refusal))
            return
        assert connection.session is not None
        landing = Landing(offer, connection.session, connection.peer)
        self._buffered_bytes += landing.total_bytes
        timer = None
        if offer.room not in self._expected:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._limits.hold_s, self._hold_expired, offer.room)
        self._rooms[offer.room] = _Room(landing, connection, timer)
        connection.send(Credit(offer.room, landing.total_bytes))

    def _refusal(self, offer: Offer) -> tuple[Code, str] | None:
        limits, total_bytes = self._limits, sum(offer.layer_bytes)
        if offer.room in self._rooms or offer.room in self._delivered:
            return Code.DUPLICATE_ROOM, "another transfer has this room"
        if offer.room in self._failed:
            return Code.DUPLICATE_ROOM, f"the room has failed already: {self._failed[offer.room]}"
        if offer.flags:
            return Code.UNSUPPORTED, f"offer flags {offer.flags:#x} are not known here"
        if self._buffered_bytes + total_bytes > limits.max_buffer_bytes:
            return Code.NO_BUFFER, (
                f"{total_bytes} bytes do not fit: {self._buffered_bytes} of "
                f"{limits.max_buffer_bytes} bytes of receive buffers are in use"
            )
        if self.rooms >= limits.max_rooms:
            return Code.NO_BUFFER, f"all {limits.max_rooms} rooms are in use"
        held = sum(entry.timer is not None for entry in self._rooms.values())
        if offer.room not in self._expected and held >= limits.max_held_rooms:
            return Code.NO_BUFFER, f"{held} rooms wait for a request already"
        return None

    def _on_data(self, connection: Inbound, data: Data) -> None:
        entry = self._receiving(connection, data.room)
        if entry is None:
            self._answer_unknown(connection, data.room)
            return
        try:
            entry.landing.write(data)
        except RoomError as error:
            self._fail(data.room, error.code, "transfer", str(error))
            return
        if entry.landing.landed:
            self._landed(entry)

    def _on_done(self, connection: Inbound, done: Done) -> None:
        entry = self._receiving(connection, done.room)
        if entry is None:
            self._answer_unknown(connection, done.room)
            return
        try:
            entry.landing.finish(done)
        except RoomError as error:
            self._fail(done.room, error.code, "transfer", str(error))
            return
        if entry.landing.landed:
            self._landed(entry)

    def _answer_unknown(self, connection: Inbound, room: int) -> None:
        """Late frames of a failed room are expected; others are the sender's fault."""
        if room not in self._failed:
            connection.send(Error(room, Code.UNKNOWN_ROOM, "no transfer of yours has this room"))

    # Rooms

    def _landed(self, entry: _Room) -> None:
        landing = entry.landing
        entry.control.send(Ack(landing.room, landing.payload_bytes))
        expectation = self._expected.get(landing.room)
        # A future that was cancelled a moment ago is still here; its callback drops the room.
        if expectation is not None and not expectation.future.done():
            del self._expected[landing.room]
            expectation.timer.cancel()
            expectation.future.set_result(self._deliver(entry))

    def _deliver(self, entry: _Room) -> Received:
        room = entry.landing.room
        if entry.timer is not None:
            entry.timer.cancel()
        del self._rooms[room]
        received = entry.landing.deliver(self._released)
        self._delivered[room] = received
        return received

    def _released(self, room: int) -> None:
        self._buffered_bytes -= self._delivered.pop(room).payload_bytes

    def _expired(self, room: int) -> None:
        entry = self._rooms.get(room)
        arrived = f"{entry.landing.payload_bytes} bytes" if entry else "no offer"
        self._fail(room, Code.DEADLINE, "transfer", f"{arrived} had arrived by the deadline")

    def _hold_expired(self, room: int) -> None:
        self._fail(
            room, Code.DEADLINE, "hold", f"nobody expected it within {self._limits.hold_s:g} s"
        )

    def _if_cancelled(self, room: int, future: asyncio.Future[Received]) -> None:
        if future.cancelled():
            self.discard(room, "the receiver's user cancelled it")

    def _fail(self, room: int, code: Code, phase: str, problem: str) -> None:
        """Free the room, remember why, and tell both its sender and its user."""
        entry, expectation = self._rooms.pop(room, None), self._expected.pop(room, None)
        if entry is None and expectation is None:
            return
        self._failed[room] = problem
        if len(self._failed) > _REMEMBERED_ROOMS:
            self._failed.popitem(last=False)
        peer = "its sender"
        if entry is not None:
            peer = entry.landing.peer
            self._buffered_bytes -= entry.landing.total_bytes
            if entry.timer is not None:
                entry.timer.cancel()
            entry.control.send(Error(room, code, problem))
        if expectation is not None:
            expectation.timer.cancel()
            if not expectation.future.done():
                expectation.future.set_exception(TransferError(room, peer, phase, problem))

    def _error(self, room: int, phase: str, problem: str) -> TransferError:
        return TransferError(room, f"the receiver on {self._address}", phase, problem)
