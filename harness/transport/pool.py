"""The connections to one receiver and the transfers that share them.

A connection that can take bytes asks for them (``take``), so each gets what it carries, not an
equal part. The transfers that have bytes ready take turns, a quantum each: a short one is not stuck
behind a long one. The quantum is an equal part of what waits, between 16 KiB and ``chunk_bytes``,
so that the last bytes do not all lie on one connection. With ``whole_layers`` a layer stays on the
connection that took it.

A lost connection is replaced while transfers are open: what was not acknowledged on it is sent
again over others. Without any connection for ``resume_timeout_s`` the transfers fail; at once when
the receiver's machine says that nobody listens there any more.
"""

import asyncio
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from harness.core import TransportError
from harness.transport.channel import Channel, PlainChannel, TlsChannel
from harness.transport.frames import (
    Ack,
    Control,
    Credit,
    Error,
    LayerDone,
    Offer,
    TransferError,
    WireError,
)
from harness.transport.lane import Lanes
from harness.transport.outbound import Outbound
from harness.transport.socket_options import SocketOptions, tune_before_connect, tune_connected
from harness.transport.tcp_info import TcpSample
from harness.transport.transfer import Chunk, Transfer
from harness.transport.wire import encode_control

_LEAST_QUANTUM_BYTES = 16 * 1024
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
#: How long a peer may take to read what is queued when the sender closes.
_FAREWELL_S = 0.5


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """What all connections of a sender have in common; times are wall seconds."""

    secret: bytes
    session: bytes
    connections: int
    checksum: bool
    chunk_bytes: int
    whole_layers: bool
    connect_timeout_s: float
    offer_timeout_s: float
    ack_timeout_s: float
    resume_timeout_s: float
    options: SocketOptions
    tls: ssl.SSLContext | None


class Pool:
    """Used from one event loop; ``take``, ``answered`` and ``lost`` come from lanes."""

    def __init__(self, settings: SenderSettings, lanes: Lanes, host: str, port: int) -> None:
        self.peer = f"{host}:{port}"
        self.lock = threading.RLock()
        self.checksum = settings.checksum
        self._settings, self._lanes = settings, lanes
        self._host, self._port = host, port
        self._loop = asyncio.get_running_loop()
        self._slots: list[Outbound | None] = [None] * settings.connections
        self._idle: list[Outbound] = []
        self._transfers: dict[int, Transfer] = {}
        self._ready: deque[Transfer] = deque()
        self._queued: set[Transfer] = set()
        self._backlog_bytes = 0
        self._retired_retransmits = 0
        self._connecting = asyncio.Lock()
        self._mending: asyncio.Task[None] | None = None
        self._closed = False

    # The user's side

    def samples(self) -> list[TcpSample]:
        """TCP_INFO of every open connection."""
        with self.lock:
            alive, backlog_bytes = self._alive(), self._backlog_bytes
        taken = [each.sample(self.peer, backlog_bytes) for each in alive]
        return [one for one in taken if one is not None]

    async def connect(self) -> None:
        """Fill the empty slots."""
        if len(self._alive()) == len(self._slots):
            return
        for error in await self._fill():
            raise error

    async def open(self, offer: Offer, on_layer: Callable[[int], None] | None) -> Transfer:
        """Offer a transfer; returns when the receiver has granted its memory."""
        try:
            encode_control(offer)
        except WireError as error:
            raise TransferError(offer.room, self.peer, "offer", str(error)) from error
        with self.lock:
            if offer.room in self._transfers:
                raise TransferError(
                    offer.room, self.peer, "offer", "this sender has it open already"
                )
            alive = self._alive()
            if not alive:
                raise TransferError(offer.room, self.peer, "offer", "every connection is lost")
            control = alive[offer.room % len(alive)]
            transfer = Transfer(self, control, offer, self._settings.ack_timeout_s, on_layer)
            self._transfers[offer.room] = transfer
        await transfer.accepted(time.monotonic() + self._settings.offer_timeout_s)
        return transfer

    async def close(self) -> None:
        """Give up every transfer and close every connection."""
        with self.lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.abort("the sender is closing")
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.gather(self._mending, return_exceptions=True)
        async with self._connecting:
            self._closed = True
        with self.lock:
            connections = self._alive()
        ends = [asyncio.wrap_future(each.ended) for each in connections]
        for connection in connections:
            connection.close("the sender is closing")
        if ends:
            await asyncio.wait(ends, timeout=_FAREWELL_S)
        for connection in connections:
            connection.abort("the sender is closing")
        await asyncio.gather(*ends)

    # For transfers, with the lock held

    def enqueue(self, transfer: Transfer, nbytes: int) -> None:
        """``nbytes`` more are ready, or the credit has grown."""
        self._backlog_bytes += nbytes
        if transfer not in self._queued and transfer.sendable():
            self._queued.add(transfer)
            self._ready.append(transfer)
        if self._ready and self._idle:
            self._idle.pop(0).wake()

    def forget(self, transfer: Transfer, unsent_bytes: int) -> None:
        """The transfer has ended, well or badly."""
        self._backlog_bytes -= unsent_bytes
        if self._transfers.get(transfer.room) is transfer:
            del self._transfers[transfer.room]

    def retransmits(self) -> int | None:
        """Segments sent again so far, on the connections of now and before."""
        counts = [one.retransmits for one in self.samples()]
        if any(count is None for count in counts):
            return None
        return self._retired_retransmits + sum(count or 0 for count in counts)

    # For connections, in their lanes

    def take(self, connection: Outbound) -> list[Chunk]:
        """See ``Source``."""
        with self.lock:
            quantum_bytes = self._quantum_bytes()
            most_bytes = min(quantum_bytes, connection.max_payload_bytes)
            chunks: list[Chunk] = []
            taken_bytes = 0
            while taken_bytes < quantum_bytes and (more := self._next_chunks(most_bytes)):
                chunks += more
                taken_bytes += sum(len(chunk.view) for chunk in more)
            self._backlog_bytes -= taken_bytes
            if not chunks:
                self._idle.append(connection)
            elif self._ready and self._idle:
                self._idle.pop(0).wake()
            return chunks

    def answered(self, frame: Control) -> None:
        """See ``Source``."""
        if not isinstance(frame, Credit | LayerDone | Ack | Error):
            raise WireError(f"a receiver has no {type(frame).__name__} frame for this sender")
        with self.lock:
            transfer = self._transfers.get(frame.room)
            if transfer is None:
                return  # the answer to one that has been given up
            match frame:
                case Credit(_, limit_bytes):
                    transfer.credit(limit_bytes)
                case LayerDone(_, layer, _):
                    transfer.layer_arrived(layer)
                case Ack(_, payload_bytes):
                    transfer.acknowledge(payload_bytes)
                case Error(_, code, message):
                    transfer.fail(f"the receiver ended it: {message} ({code.name})")

    def lost(self, connection: Outbound, unacknowledged: list[Chunk], reason: str) -> None:
        """See ``Source``."""
        with self.lock:
            if self._slots[connection.index] is not connection:
                return  # it never got that far
            self._slots[connection.index] = None
            if connection in self._idle:
                self._idle.remove(connection)
            for chunk in unacknowledged:
                chunk.transfer.send_again(chunk)
            alive = self._alive()
            for transfer in self._transfers.values():
                if transfer.control is connection:
                    transfer.control = None
            self._move_orphans(alive)
            if not self._closed:
                self._loop.call_soon_threadsafe(self._mend, reason)

    def _alive(self) -> list[Outbound]:
        return [each for each in self._slots if each is not None and each.alive]

    def _quantum_bytes(self) -> int:
        share = -(-self._backlog_bytes // max(1, len(self._alive())))
        return min(self._settings.chunk_bytes, max(_LEAST_QUANTUM_BYTES, share))

    def _next_chunks(self, most_bytes: int) -> list[Chunk]:
        """What the transfer sends whose turn it is."""
        while self._ready:
            transfer = self._ready.popleft()
            self._queued.discard(transfer)
            if transfer.sendable():  # otherwise it has ended, or its credit is used up
                chunks = transfer.next_chunks(most_bytes, self._settings.whole_layers)
                if transfer.sendable():
                    self._queued.add(transfer)
                    self._ready.append(transfer)
                return chunks
        return []

    def _move_orphans(self, alive: list[Outbound]) -> None:
        if not alive:
            return
        for transfer in list(self._transfers.values()):
            if transfer.control is None:
                transfer.move(alive[transfer.room % len(alive)])
        while self._ready and self._idle:
            self._idle.pop(0).wake()

    # Connecting, on the user's loop

    async def _fill(self) -> list[TransportError]:
        """Try every empty slot once; the errors."""
        async with self._connecting:
            if self._closed:
                raise TransferError(None, self.peer, "connect", "the sender has been closed")
            empty = [
                index for index, each in enumerate(self._slots) if each is None or not each.alive
            ]
            results = await asyncio.gather(
                *map(self._open_connection, empty), return_exceptions=True
            )
        errors = [result for result in results if result is not None]
        for error in errors:
            if not isinstance(error, TransportError):
                raise error
        with self.lock:
            self._move_orphans(self._alive())
        return [error for error in errors if isinstance(error, TransportError)]

    async def _open_connection(self, index: int) -> None:
        settings = self._settings
        phase = "connect"
        connection: Outbound | None = None
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                channel = await self._dial()
                phase = "handshake"
                connection = Outbound(
                    channel, self._lanes.next(), index, settings.secret, settings.session, self
                )
                connection.start()
                await asyncio.wrap_future(connection.welcomed)
        except (OSError, TransportError) as error:  # TimeoutError is an OSError
            if connection is not None:
                connection.abort("the handshake failed")
            problem = str(error) or f"no answer within {settings.connect_timeout_s:g} s"
            raise TransferError(None, self.peer, phase, problem) from error
        except BaseException:
            if connection is not None:
                connection.abort("given up")
            raise
        with self.lock:
            if connection.alive:
                self._slots[index] = connection
                connection.wake()

    async def _dial(self) -> Channel:
        options = self._settings.options
        found = await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            tune_before_connect(sock, options)
            await self._loop.sock_connect(sock, address)
            tune_connected(sock, options)
            if self._settings.tls is None:
                return PlainChannel(sock)
            return TlsChannel(sock, self._settings.tls, self._host)
        except BaseException:
            sock.close()
            raise

    def _mend(self, reason: str) -> None:
        """Replace what was lost, as long as somebody needs it."""
        if self._closed or self._mending is not None or not self._transfers:
            return
        if len(self._alive()) == len(self._slots):
            return
        self._mending = asyncio.create_task(self._reconnect(reason))
        self._mending.add_done_callback(self._mended)

    def _mended(self, task: "asyncio.Task[None]") -> None:
        self._mending = None
        if not task.cancelled():
            task.result()
            self._mend("a connection was lost")

    async def _reconnect(self, reason: str) -> None:
        pause_s, deadline_s = _FIRST_PAUSE_S, time.monotonic() + self._settings.resume_timeout_s
        while self._transfers:
            errors = await self._fill()
            if not errors and len(self._alive()) == len(self._slots):
                return
            if self._alive():
                deadline_s = time.monotonic() + self._settings.resume_timeout_s
            elif errors and (
                time.monotonic() > deadline_s
                or all(isinstance(each.__cause__, ConnectionRefusedError) for each in errors)
            ):
                self._give_up(f"{reason}; no connection could be made again: {errors[0]}")
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _give_up(self, problem: str) -> None:
        with self.lock:
            for transfer in list(self._transfers.values()):
                transfer.fail(problem)
