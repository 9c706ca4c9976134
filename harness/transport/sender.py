"""The sending end of KV transfers: N connections to each receiver, shared by all transfers.

A transfer is offered, accepted by the receiver's first Credit, sent layer by layer as the layers
become ready, and acknowledged when the receiver has every byte. Layers are cut into chunks; the
transfers that have chunks ready take turns, one chunk each, so a short one is not stuck behind a
long one; each chunk goes to the writable connection with the fewest unsent bytes. A connection
that is lost fails the transfers that used it, and is replaced at the next ``open``.
"""

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from harness.core import TransportError
from harness.transport.frames import (
    MAX_PAYLOAD_BYTES,
    SESSION_BYTES,
    Ack,
    Code,
    Credit,
    Error,
    Frame,
    Offer,
    TransferError,
    WireError,
)
from harness.transport.handshake import check_secret
from harness.transport.outbound import Outbound
from harness.transport.tcp_info import TcpSample
from harness.transport.transfer import Receipt, Transfer

__all__ = ["KvSender", "Receipt", "Transfer"]

MAX_CONNECTIONS = 64
#: How long a peer may take to read what is queued when the sender closes.
_FAREWELL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Settings:
    secret: bytes
    session: bytes
    connections: int
    checksum: bool
    chunk_bytes: int
    pacing_bytes_per_s: float | None
    connect_timeout_s: float
    offer_timeout_s: float
    ack_timeout_s: float


class KvSender:
    """Opens KV transfers to receivers that know ``secret``. Used within one event loop.

    ``pacing_bytes_per_s`` caps what is sent to one receiver, in equal parts over its connections.
    The timeouts are wall seconds: for connecting with the handshake, for the acceptance of an
    offer, and by default for the acknowledgement after the last layer.
    """

    def __init__(
        self,
        secret: bytes,
        connections: int = 4,
        checksum: bool = True,
        chunk_bytes: int = 256 * 1024,
        pacing_bytes_per_s: float | None = None,
        connect_timeout_s: float = 10.0,
        offer_timeout_s: float = 10.0,
        ack_timeout_s: float = 60.0,
    ) -> None:
        if not 1 <= connections <= MAX_CONNECTIONS:
            raise TransportError(f"{connections} connections; give 1 to {MAX_CONNECTIONS}")
        if not 1 <= chunk_bytes <= MAX_PAYLOAD_BYTES:
            raise TransportError(f"chunk_bytes is {chunk_bytes}; give 1 to {MAX_PAYLOAD_BYTES}")
        if pacing_bytes_per_s is not None and not pacing_bytes_per_s > 0:
            raise TransportError(f"pacing_bytes_per_s is {pacing_bytes_per_s}; give more than 0")
        self._settings = _Settings(
            secret=check_secret(secret),
            session=secrets.token_bytes(SESSION_BYTES),
            connections=connections,
            checksum=checksum,
            chunk_bytes=chunk_bytes,
            pacing_bytes_per_s=pacing_bytes_per_s,
            connect_timeout_s=connect_timeout_s,
            offer_timeout_s=offer_timeout_s,
            ack_timeout_s=ack_timeout_s,
        )
        self._pools: dict[tuple[str, int], _Pool] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def connect(self, host: str, port: int) -> None:
        """Have all connections to the receiver open and authenticated, or raise TransportError."""
        await self._pool(host, port).connect()

    async def open(
        self, host: str, port: int, room: int, layer_bytes: tuple[int, ...], meta: bytes = b""
    ) -> Transfer:
        """Offer a transfer; returns when the receiver has reserved its buffer."""
        pool = self._pool(host, port)
        await pool.connect()
        return await pool.open(Offer(room, tuple(layer_bytes), meta))

    def samples(self) -> list[TcpSample]:
        """TCP_INFO of every open connection (its fields are None on systems without it)."""
        return [sample for pool in self._pools.values() for sample in pool.samples()]

    async def close(self) -> None:
        """Give up every transfer and close every connection."""
        self._closed = True
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    def _pool(self, host: str, port: int) -> "_Pool":
        if self._closed:
            raise TransferError(None, f"{host}:{port}", "connect", "the sender has been closed")
        pool = self._pools.get((host, port))
        if pool is None:
            pool = self._pools[host, port] = _Pool(self._settings, host, port)
        return pool


class _Pool:
    """The connections to one receiver and the transfers that share them."""

    def __init__(self, settings: _Settings, host: str, port: int) -> None:
        self._settings = settings
        self._host, self._port = host, port
        self.peer = f"{host}:{port}"
        self._slots: list[Outbound | None] = [None] * settings.connections
        self._closed = False
        self._turn = 0
        self._connecting = asyncio.Lock()
        self._transfers: dict[int, Transfer] = {}
        self._ready: deque[Transfer] = deque()

    def samples(self) -> list[TcpSample]:
        return [each.sample(self.peer) for each in self._slots if each is not None and each.alive]

    async def connect(self) -> None:
        """Fill the empty slots."""
        if all(each is not None and each.alive for each in self._slots):
            return
        async with self._connecting:
            if self._closed:
                raise TransferError(None, self.peer, "connect", "the sender has been closed")
            results = await asyncio.gather(
                *(
                    self._open_connection(index)
                    for index, each in enumerate(self._slots)
                    if each is None or not each.alive
                ),
                return_exceptions=True,
            )
        for result in results:
            if result is not None:
                raise result

    async def _open_connection(self, index: int) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        connection = Outbound(
            index, settings.secret, settings.session, self._on_frame, self.pump, self._on_lost
        )
        pacing = settings.pacing_bytes_per_s
        phase = "connect"
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                await loop.create_connection(lambda: connection, self._host, self._port)
                phase = "handshake"
                await connection.welcomed
            connection.tune(
                settings.chunk_bytes,
                settings.ack_timeout_s,
                None if pacing is None else pacing / settings.connections,
            )
        except (OSError, TransportError) as error:  # TimeoutError is an OSError
            connection.abort("the handshake failed")
            problem = str(error) or f"no answer within {settings.connect_timeout_s:g} s"
            raise TransferError(None, self.peer, phase, problem) from error
        except BaseException:
            connection.abort("given up")
            raise
        self._slots[index] = connection

    async def open(self, offer: Offer) -> Transfer:
        if offer.room in self._transfers:
            raise TransferError(offer.room, self.peer, "offer", "this sender has it open already")
        control = self._roomiest(writable=False)
        if control is None:
            raise TransferError(offer.room, self.peer, "offer", "every connection is lost")
        chunk_bytes = min(self._settings.chunk_bytes, control.max_payload_bytes)
        transfer = Transfer(self, control, offer, chunk_bytes, self._settings.ack_timeout_s)
        try:
            control.send(offer)
        except WireError as error:
            raise TransferError(offer.room, self.peer, "offer", str(error)) from error
        self._transfers[offer.room] = transfer
        await transfer.accepted(time.monotonic() + self._settings.offer_timeout_s)
        return transfer

    def enqueue(self, transfer: Transfer) -> None:
        """The transfer has chunks that its credit covers."""
        self._ready.append(transfer)
        self.pump()

    def forget(self, transfer: Transfer) -> None:
        """The transfer has ended, well or badly."""
        if self._transfers.get(transfer.room) is transfer:
            del self._transfers[transfer.room]

    def pump(self) -> None:
        """Let the transfers take turns as long as a connection takes chunks."""
        while self._ready:
            connection = self._roomiest(writable=True)
            if connection is None:
                return
            transfer = self._ready.popleft()
            if transfer.send_chunk(connection, self._settings.checksum):
                self._ready.append(transfer)

    def _roomiest(self, writable: bool) -> Outbound | None:
        """The connection with the fewest unsent bytes; equals take turns."""
        self._turn += 1
        best: Outbound | None = None
        for step in range(len(self._slots)):
            each = self._slots[(self._turn + step) % len(self._slots)]
            if (
                each is not None
                and each.alive
                and (each.writable or not writable)
                and (best is None or each.queued_bytes < best.queued_bytes)
            ):
                best = each
        return best

    def _on_frame(self, frame: Frame) -> None:
        if not isinstance(frame, Credit | Ack | Error):
            raise WireError(f"a receiver has no {type(frame).__name__} frame for this sender")
        transfer = self._transfers.get(frame.room)
        if transfer is None:
            return  # the answer to one that has been given up
        match frame:
            case Credit(_, limit_bytes):
                transfer.credit(limit_bytes)
            case Ack(_, payload_bytes):
                transfer.acknowledge(payload_bytes)
            case Error(_, code, message):
                transfer.fail(f"the receiver ended it: {message} ({code.name})")

    def _on_lost(self, connection: Outbound, reason: str) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.uses(connection):
                transfer.fail(reason, tell=Code.PEER_LOST)

    async def close(self) -> None:
        for transfer in list(self._transfers.values()):
            transfer.abort("the sender is closing")
        async with self._connecting:
            self._closed = True
        open_now = [each for each in self._slots if each is not None]
        for connection in open_now:
            connection.close("the sender is closing")
        if open_now:
            await asyncio.wait([each.lost for each in open_now], timeout=_FAREWELL_S)
        for connection in open_now:
            connection.abort("the sender is closing")
        await asyncio.gather(*(each.lost for each in open_now))
