"""The kernel's view of one TCP connection.

``struct tcp_info`` of Linux (include/uapi/linux/tcp.h) is read with one getsockopt. Its times are
microseconds and its delivery rate bytes per second; both are converted here. Other systems lay the
structure out differently, so there :func:`read_tcp_info` raises and a sample carries None.
"""

import socket
import struct
import sys
from dataclasses import dataclass

from harness.core import TransportError
from harness.transport.socket_options import SocketLike

#: Up to tcpi_delivery_rate (kernel 4.9): 8 bytes of flags, 24 u32, 4 u64, 6 u32, 1 u64.
_TCP_INFO = struct.Struct("=8B24I4Q6IQ")
#: Where tcpi_total_retrans lies.
_RETRANSMITS, _RETRANSMITS_AT = struct.Struct("=I"), 8 + 23 * 4
_UNKNOWN_U32 = 0xFFFFFFFF
_HAS_TCP_INFO = sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """What congestion control knows. ``cwnd_packets`` counts segments of ``mss_bytes``."""

    rtt_s: float
    min_rtt_s: float | None
    retransmits: int
    cwnd_packets: int
    mss_bytes: int
    unacked_packets: int
    lost_packets: int
    bytes_acked: int
    notsent_bytes: int
    delivery_rate_bytes_per_s: int | None


@dataclass(frozen=True, slots=True)
class TcpSample:
    """One connection at one moment. None where the system has no TCP_INFO or no value yet.

    ``unsent_bytes`` is what waits in this process and in the kernel before its first transmission;
    ``backlog_bytes`` are the layers ready for this receiver that no connection has taken yet, the
    same on each of its connections; ``in_flight_bytes`` is sent and not acknowledged.
    ``retransmits`` and ``bytes_acked`` count since the connection opened.
    """

    mono_ns: int
    peer: str
    connection: int
    rtt_s: float | None
    min_rtt_s: float | None
    retransmits: int | None
    cwnd: int | None
    delivery_rate_bytes_per_s: int | None
    bytes_acked: int | None
    unsent_bytes: int
    backlog_bytes: int
    in_flight_bytes: int | None


def read_tcp_info(sock: SocketLike) -> TcpInfo:
    """Read TCP_INFO of a connected socket; TransportError where there is none."""
    fields = _TCP_INFO.unpack(_read(sock))
    words, longs, tail = fields[8:32], fields[32:36], fields[36:43]
    return TcpInfo(
        rtt_s=words[15] / 1e6,
        min_rtt_s=None if tail[3] == _UNKNOWN_U32 else tail[3] / 1e6,
        retransmits=words[23],
        cwnd_packets=words[18],
        mss_bytes=words[2],
        unacked_packets=words[4],
        lost_packets=words[6],
        bytes_acked=longs[2],
        notsent_bytes=tail[2],
        delivery_rate_bytes_per_s=tail[6] or None,
    )


def read_retransmits(sock: SocketLike) -> int | None:
    """Segments sent again since the connection opened; None on systems without TCP_INFO.

    Every transfer asks for it twice of each connection, so the rest is left unread.
    """
    if not _HAS_TCP_INFO:
        return None
    (count,) = _RETRANSMITS.unpack_from(_read(sock), _RETRANSMITS_AT)
    return int(count)


def _read(sock: SocketLike) -> bytes:
    if not _HAS_TCP_INFO:
        raise TransportError(
            f"TCP_INFO has no known layout on {sys.platform}; run on Linux for TCP samples"
        )
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError as error:
        raise TransportError(f"TCP_INFO of a connection could not be read: {error}") from error
    if len(raw) < _TCP_INFO.size:
        raise TransportError(
            f"this kernel's TCP_INFO has {len(raw)} bytes, {_TCP_INFO.size} are needed (Linux 4.9)"
        )
    return raw


def sample(
    sock: SocketLike,
    mono_ns: int,
    peer: str,
    connection: int,
    queued_bytes: int,
    backlog_bytes: int,
) -> TcpSample:
    """Sample a connection; the kernel's fields are None on systems without TCP_INFO."""
    if not _HAS_TCP_INFO:
        unknown = (None,) * 6
        return TcpSample(mono_ns, peer, connection, *unknown, queued_bytes, backlog_bytes, None)
    info = read_tcp_info(sock)
    return TcpSample(
        mono_ns=mono_ns,
        peer=peer,
        connection=connection,
        rtt_s=info.rtt_s,
        min_rtt_s=info.min_rtt_s,
        retransmits=info.retransmits,
        cwnd=info.cwnd_packets,
        delivery_rate_bytes_per_s=info.delivery_rate_bytes_per_s,
        bytes_acked=info.bytes_acked,
        unsent_bytes=info.notsent_bytes + queued_bytes,
        backlog_bytes=backlog_bytes,
        in_flight_bytes=info.unacked_packets * info.mss_bytes,
    )
