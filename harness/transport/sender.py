"""The sending end of KV transfers: N connections to each receiver, shared by all transfers.

A transfer is offered, accepted by the receiver's first Credit, sent layer by layer as the layers
become ready, and acknowledged when the receiver has every byte. Bytes are written in lanes of the
sender's own, or of its user's; futures belong to the loop it is used from.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from harness.core import TransportError
from harness.transport.dialling import SenderSettings
from harness.transport.frames import (
    MAX_PAYLOAD_BYTES,
    REPORT_LAYERS,
    Offer,
    TransferError,
)
from harness.transport.handshake import check_secret
from harness.transport.lane import Lanes
from harness.transport.pool import Pool
from harness.transport.socket_options import SocketOptions
from harness.transport.tcp_info import TcpSample
from harness.transport.tls import TlsFiles
from harness.transport.transfer import Receipt, Transfer

__all__ = ["KvSender", "Receipt", "Transfer"]

MAX_CONNECTIONS = 64
#: A connection asks for more when less than half of this is unsent: 4 ms of 1 Gbit/s.
_MOST_LOWAT_BYTES = 2**20


class KvSender:
    """Opens KV transfers to receivers that know ``secret``. Used within one event loop.

    ``pacing_bytes_per_s`` caps what is sent to one receiver, in equal parts over its connections.
    ``striping`` "whole" keeps a layer on one connection. ``congestion_control`` and ``bdp_bytes``
    (of one connection) are those of ``SocketOptions``. The timeouts are wall seconds: for
    connecting with the handshake, for the acceptance of an offer, by default for the
    acknowledgement after the last layer, and for coming back when every connection was lost.
    """

    def __init__(
        self,
        secret: bytes,
        connections: int = 4,
        checksum: bool = True,
        chunk_bytes: int = 2 * 1024 * 1024,
        pacing_bytes_per_s: float | None = None,
        connect_timeout_s: float = 10.0,
        offer_timeout_s: float = 10.0,
        ack_timeout_s: float = 60.0,
        resume_timeout_s: float = 5.0,
        *,
        striping: Literal["chunked", "whole"] = "chunked",
        congestion_control: str | None = None,
        bdp_bytes: int | None = None,
        tls: TlsFiles | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        if not 1 <= connections <= MAX_CONNECTIONS:
            raise TransportError(f"{connections} connections; give 1 to {MAX_CONNECTIONS}")
        if not 1 <= chunk_bytes <= MAX_PAYLOAD_BYTES:
            raise TransportError(f"chunk_bytes is {chunk_bytes}; give 1 to {MAX_PAYLOAD_BYTES}")
        if pacing_bytes_per_s is not None and not pacing_bytes_per_s > 0:
            raise TransportError(f"pacing_bytes_per_s is {pacing_bytes_per_s}; give more than 0")
        options = SocketOptions(
            congestion_control=congestion_control,
            pacing_bytes_per_s=None
            if pacing_bytes_per_s is None
            else pacing_bytes_per_s / connections,
            bdp_bytes=bdp_bytes,
            notsent_lowat_bytes=min(chunk_bytes, _MOST_LOWAT_BYTES),
            dead_after_s=ack_timeout_s,
        )
        self._settings = SenderSettings(
            secret=check_secret(secret),
            connections=connections,
            checksum=checksum,
            chunk_bytes=chunk_bytes,
            whole_layers=striping == "whole",
            connect_timeout_s=connect_timeout_s,
            offer_timeout_s=offer_timeout_s,
            ack_timeout_s=ack_timeout_s,
            resume_timeout_s=resume_timeout_s,
            options=options,
            tls=tls.client_context() if tls is not None else None,
        )
        self._lanes = lanes or Lanes(1, "kv-sender")
        self._owns_lanes = lanes is None
        self._pools: dict[tuple[str, int], Pool] = {}
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
        self,
        host: str,
        port: int,
        room: int,
        layer_bytes: tuple[int, ...],
        meta: bytes = b"",
        on_layer: Callable[[int], None] | None = None,
    ) -> Transfer:
        """Offer a transfer; returns when the receiver has granted its memory.

        ``on_layer`` is told once, on the caller's loop, of each layer of some bytes that has
        arrived whole. One connection that is up is enough; lost ones are replaced meanwhile.
        """
        pool = self._pool(host, port)
        await pool.reach()
        flags = 0 if on_layer is None else REPORT_LAYERS
        return await pool.open(Offer(room, tuple(layer_bytes), meta, flags=flags), on_layer)

    def samples(self) -> list[TcpSample]:
        """TCP_INFO of every open connection (its fields are None on systems without it)."""
        return [sample for pool in self._pools.values() for sample in pool.samples()]

    async def close(self) -> None:
        """Give up every transfer and close every connection."""
        self._closed = True
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        if self._owns_lanes:
            self._lanes.stop()

    def _pool(self, host: str, port: int) -> Pool:
        if self._closed:
            raise TransferError(None, f"{host}:{port}", "connect", "the sender has been closed")
        pool = self._pools.get((host, port))
        if pool is None:
            pool = self._pools[host, port] = Pool(self._settings, self._lanes, host, port)
        return pool
