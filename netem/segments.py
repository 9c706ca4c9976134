"""Packets as a TUN device with IFF_VNET_HDR gives them: a 10-byte header, then the IP packet.

``struct virtio_net_hdr`` (virtio 1.2, section 5.1.6; Linux include/uapi/linux/virtio_net.h):
flags u8, gso_type u8, hdr_len u16, gso_size u16, csum_start u16, csum_offset u16, host order.
With ``gso_type`` set the packet stands for ``ceil(payload / gso_size)`` TCP segments, which cross
a real link one by one: each has its own headers and its own chance to be lost. ``without`` cuts
the lost ones out and gives the remaining runs as smaller packets of the same kind.
"""

import struct
from collections.abc import Sequence

HEADER = struct.Struct("=BBHHHH")
#: A 64 KiB packet and its header; the kernel hands over no larger one for IPv4.
MAX_FRAME_BYTES = HEADER.size + 65536

_NEEDS_CSUM = 1
_GSO_NONE, _GSO_TCPV4, _GSO_TCPV6, _GSO_ECN = 0, 1, 4, 0x80
_FIN_PSH, _CWR = 0x09, 0x80
_TCP = 6


def measure(frame: bytes) -> tuple[int, int]:
    """(IP bytes on the wire, packets) of a frame, counting the headers of every segment."""
    gso_type = frame[1] & ~_GSO_ECN
    ip_bytes = len(frame) - HEADER.size
    if gso_type == _GSO_NONE:
        return ip_bytes, 1
    header_bytes, gso_size = _header_bytes(frame), HEADER.unpack_from(frame)[3]
    segments = max(1, -(-(ip_bytes - header_bytes) // gso_size))
    return ip_bytes + (segments - 1) * header_bytes, segments


def without(frame: bytes, lost: Sequence[int]) -> list[bytes]:
    """The frames that remain when the segments with the indices ``lost`` (ascending) are lost."""
    _, segments = measure(frame)
    runs, start = [], 0
    for index in (*lost, segments):
        if index > start:
            runs.append((start, index))
        start = index + 1
    if runs == [(0, segments)]:
        return [frame]
    return [_cut(frame, first, end, segments) for first, end in runs]


def _header_bytes(frame: bytes) -> int:
    """Length of the IP and TCP headers; hdr_len is only a hint, csum_start is exact."""
    tcp_at: int = HEADER.unpack_from(frame)[4]
    return tcp_at + (frame[HEADER.size + tcp_at + 12] >> 4) * 4


def _cut(frame: bytes, first: int, end: int, segments: int) -> bytes:
    """Segments ``first`` to ``end`` (exclusive) of a TCP segmentation-offload frame."""
    flags, gso_type, _, gso_size, csum_start, csum_offset = HEADER.unpack_from(frame)
    header_bytes = _header_bytes(frame)
    head = bytearray(frame[HEADER.size : HEADER.size + header_bytes])
    body = frame[HEADER.size + header_bytes :][first * gso_size : end * gso_size]
    (sequence,) = struct.unpack_from("!I", head, csum_start + 4)
    struct.pack_into("!I", head, csum_start + 4, (sequence + first * gso_size) & 0xFFFFFFFF)
    if end < segments:
        head[csum_start + 13] &= ~_FIN_PSH & 0xFF
    if first > 0:
        head[csum_start + 13] &= ~_CWR & 0xFF
    _set_ip_length(head, header_bytes + len(body), first)
    struct.pack_into("!H", head, csum_start + csum_offset, _pseudo_sum(head, csum_start, len(body)))
    if len(body) <= gso_size:
        gso_type, gso_size = _GSO_NONE, 0
    header = HEADER.pack(
        flags | _NEEDS_CSUM, gso_type, header_bytes, gso_size, csum_start, csum_offset
    )
    return header + bytes(head) + body


def _set_ip_length(head: bytearray, total_bytes: int, first: int) -> None:
    if head[0] >> 4 == 6:
        struct.pack_into("!H", head, 4, total_bytes - 40)
        return
    (identification,) = struct.unpack_from("!H", head, 4)
    struct.pack_into("!HH", head, 2, total_bytes, (identification + first) & 0xFFFF)
    struct.pack_into("!H", head, 10, 0)
    ip_header_bytes = (head[0] & 0x0F) * 4
    struct.pack_into("!H", head, 10, ~_ones_sum(bytes(head[:ip_header_bytes])) & 0xFFFF)


def _pseudo_sum(head: bytearray, tcp_at: int, body_bytes: int) -> int:
    """The partial checksum the kernel completes: pseudo-header sum, not complemented."""
    addresses = head[8:40] if head[0] >> 4 == 6 else head[12:20]
    tcp_bytes = len(head) - tcp_at + body_bytes
    return _ones_sum(bytes(addresses) + struct.pack("!HH", _TCP, tcp_bytes))


def _ones_sum(data: bytes) -> int:
    """Ones' complement sum of 16-bit words (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
