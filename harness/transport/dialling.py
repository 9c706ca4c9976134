"""A connection to a receiver, up to the point where the protocol begins."""

import asyncio
import socket
import ssl
from dataclasses import dataclass

from harness.transport.channel import Channel, PlainChannel, TlsChannel
from harness.transport.socket_options import SocketOptions, tune_before_connect, tune_connected


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """What all connections of a sender have in common; times are wall seconds."""

    secret: bytes
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


async def dial(settings: SenderSettings, host: str, port: int) -> Channel:
    """Connect; OSError or TransportError where that fails. The caller limits the time."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        tune_before_connect(sock, settings.options)
        await loop.sock_connect(sock, address)
        tune_connected(sock, settings.options)
        if settings.tls is None:
            return PlainChannel(sock, settings.options.notsent_lowat_bytes)
        return TlsChannel(sock, settings.tls, host)
    except BaseException:
        sock.close()
        raise
