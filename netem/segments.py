"""Packets as a TUN device with IFF_VNET_HDR gives them: a 10-byte header, then the IP packet.

``struct virtio_net_hdr`` (virtio 1.2, section 5.1.6; Linux include/uapi/linux/virtio_net.h):
flags u8, gso_type u8, hdr_len u16, gso_size u16, csum_start u16, csum_offset u16, host order.
With ``gso_type`` set the packet stands for ``ceil(payload / gso_size)`` TCP segments, which cross
a real link one by one: each has its own headers and its own chance to be lost. ``cut`` gives a run
of them as a packet of the same kind. ``parse`` is the only way in: what the other functions rely
on is checked there, whatever bytes it is given.
"""

import struct
from dataclasses import dataclass, replace

HEADER = struct.Struct("=BBHHHH")
#: A 64 KiB packet and its header; the kernel hands over no larger one for IPv4.
MAX_FRAME_BYTES = HEADER.size + 65536

_NEEDS_CSUM = 1
_GSO_NONE, _GSO_ECN = 0, 0x80
#: VIRTIO_NET_HDR_GSO_TCPV4 and _TCPV6 by IP version.
_GSO_TCP = {4: 1, 6: 4}
_TCP, _UDP = 6, 17
_MIN_IP_BYTES = {4: 20, 6: 40}
_MIN_TCP_BYTES = 20
_FIN_PSH, _CWR = 0x09, 0x80
_FRAGMENT = 0x3FFF  # more fragments, or an offset
_CE = 0b11


@dataclass(frozen=True, slots=True)
class Packet:
    """A frame and what it stands for. ``gso_size`` is 0 for a single packet.

    ``wire_bytes`` counts the headers of every segment; ``ip_header_bytes`` is one IP header's,
    ``header_bytes`` those of IP and TCP for a segmentation-offload frame.
    """

    frame: bytes
    wire_bytes: int
    packets: int
    ip_header_bytes: int
    header_bytes: int = 0
    gso_size: int = 0


def parse(frame: bytes) -> Packet | None:
    """The packet of a frame; None for anything but a sound IP packet with a sound header."""
    ip_bytes = len(frame) - HEADER.size
    version = frame[HEADER.size] >> 4 if ip_bytes > 0 else 0
    if version not in _MIN_IP_BYTES or ip_bytes < _MIN_IP_BYTES[version]:
        return None
    if version == 4:
        ip_header_bytes = (frame[HEADER.size] & 0x0F) * 4
        stated_bytes = int.from_bytes(frame[HEADER.size + 2 : HEADER.size + 4])
    else:
        ip_header_bytes = 40
        stated_bytes = 40 + int.from_bytes(frame[HEADER.size + 4 : HEADER.size + 6])
    if stated_bytes != ip_bytes or not _MIN_IP_BYTES[version] <= ip_header_bytes <= ip_bytes:
        return None
    flags, gso_type, _, gso_size, csum_start, csum_offset = HEADER.unpack_from(frame)
    if flags & _NEEDS_CSUM and not (
        ip_header_bytes <= csum_start and csum_start + csum_offset + 2 <= ip_bytes
    ):
        return None
    if gso_type == _GSO_NONE:
        return Packet(frame, ip_bytes, 1, ip_header_bytes)
    if gso_type & ~_GSO_ECN != _GSO_TCP[version] or not gso_size or not flags & _NEEDS_CSUM:
        return None
    return _segmented(frame, ip_header_bytes, gso_size, csum_start, csum_offset)


def _segmented(
    frame: bytes, ip_header_bytes: int, gso_size: int, csum_start: int, csum_offset: int
) -> Packet | None:
    """A frame of TCP segments; ``hdr_len`` is only a hint, so the lengths come from the headers."""
    ip_bytes = len(frame) - HEADER.size
    is_tcp = protocol(frame) == _TCP and csum_start == ip_header_bytes and csum_offset == 16
    if not is_tcp or ip_bytes < ip_header_bytes + _MIN_TCP_BYTES:
        return None
    tcp_header_bytes = (frame[HEADER.size + csum_start + 12] >> 4) * 4
    header_bytes = ip_header_bytes + tcp_header_bytes
    if tcp_header_bytes < _MIN_TCP_BYTES or header_bytes > ip_bytes:
        return None
    packets = max(1, -(-(ip_bytes - header_bytes) // gso_size))
    wire_bytes = ip_bytes + (packets - 1) * header_bytes
    return Packet(frame, wire_bytes, packets, ip_header_bytes, header_bytes, gso_size)


def protocol(frame: bytes) -> int:
    """The protocol number of a frame's IP header (IPv6: its first next header)."""
    return frame[HEADER.size + (9 if frame[HEADER.size] >> 4 == 4 else 6)]


def flow_key(packet: Packet) -> bytes:
    """The 5-tuple; without ports where the packet has none or is a fragment."""
    frame, at = packet.frame, HEADER.size
    number = protocol(frame)
    if frame[at] >> 4 == 4:
        addresses = frame[at + 12 : at + 20]
        fragment = int.from_bytes(frame[at + 6 : at + 8]) & _FRAGMENT
    else:
        addresses, fragment = frame[at + 8 : at + 40], 0
    if fragment or number not in (_TCP, _UDP):
        return bytes([number]) + addresses
    ports_at = at + packet.ip_header_bytes
    return bytes([number]) + addresses + frame[ports_at : ports_at + 4]


def cut(packet: Packet, first: int, end: int) -> Packet:
    """Segments ``first`` to ``end`` (exclusive) of a packet as one that stands for just these."""
    assert 0 <= first < end <= packet.packets
    if (first, end) == (0, packet.packets):
        return packet
    flags, gso_type, _, gso_size, csum_start, csum_offset = HEADER.unpack_from(packet.frame)
    payload_at = HEADER.size + packet.header_bytes
    head = bytearray(packet.frame[HEADER.size : payload_at])
    body = packet.frame[payload_at + first * gso_size : payload_at + end * gso_size]
    (sequence,) = struct.unpack_from("!I", head, csum_start + 4)
    struct.pack_into("!I", head, csum_start + 4, (sequence + first * gso_size) & 0xFFFFFFFF)
    if end < packet.packets:
        head[csum_start + 13] &= ~_FIN_PSH & 0xFF
    if first > 0:
        head[csum_start + 13] &= ~_CWR & 0xFF
    _set_ip_length(head, len(head) + len(body), first)
    struct.pack_into("!H", head, csum_start + csum_offset, _pseudo_sum(head, csum_start, len(body)))
    if end - first == 1:
        gso_type, gso_size = _GSO_NONE, 0
    header = HEADER.pack(flags, gso_type, len(head), gso_size, csum_start, csum_offset)
    return Packet(
        header + bytes(head) + body,
        len(body) + (end - first) * len(head),
        end - first,
        packet.ip_header_bytes,
        packet.header_bytes if gso_size else 0,
        gso_size,
    )


def mark(packet: Packet) -> Packet | None:
    """The packet with congestion experienced (RFC 3168); None where it is not ECN-capable."""
    traffic_class_at = HEADER.size + 1
    frame = bytearray(packet.frame)
    if frame[HEADER.size] >> 4 == 4:
        if not frame[traffic_class_at] & _CE:
            return None
        frame[traffic_class_at] |= _CE
        head = frame[HEADER.size : HEADER.size + packet.ip_header_bytes]
        _set_ip_checksum(head)
        frame[HEADER.size : HEADER.size + packet.ip_header_bytes] = head
    else:
        if not frame[traffic_class_at] >> 4 & _CE:
            return None
        frame[traffic_class_at] |= _CE << 4
    return replace(packet, frame=bytes(frame))


def corrupt(packet: Packet, bit: int) -> Packet:
    """A single packet with one bit flipped behind its IP header, ``bit`` taken modulo their number.

    The checksum is completed first: the kernel would make it fit the damage.
    """
    assert packet.packets == 1
    frame = bytearray(packet.frame)
    start = HEADER.size + packet.ip_header_bytes
    if start == len(frame):
        return packet
    flags, _, _, _, csum_start, csum_offset = HEADER.unpack_from(frame)
    if flags & _NEEDS_CSUM:
        total = ~_ones_sum(bytes(frame[HEADER.size + csum_start :])) & 0xFFFF
        # 0 would mean "no checksum" in UDP; both are the same number in ones' complement.
        struct.pack_into("!H", frame, HEADER.size + csum_start + csum_offset, total or 0xFFFF)
        HEADER.pack_into(frame, 0, flags & ~_NEEDS_CSUM, _GSO_NONE, 0, 0, 0, 0)
    byte, shift = divmod(bit % (8 * (len(frame) - start)), 8)
    frame[start + byte] ^= 1 << shift
    return replace(packet, frame=bytes(frame))


def _set_ip_length(head: bytearray, total_bytes: int, first: int) -> None:
    if head[0] >> 4 == 6:
        struct.pack_into("!H", head, 4, total_bytes - 40)
        return
    (identification,) = struct.unpack_from("!H", head, 4)
    struct.pack_into("!HH", head, 2, total_bytes, (identification + first) & 0xFFFF)
    _set_ip_checksum(head)


def _set_ip_checksum(head: bytearray) -> None:
    """Of an IPv4 header, which ``head`` begins with."""
    struct.pack_into("!H", head, 10, 0)
    ip_header_bytes = (head[0] & 0x0F) * 4
    struct.pack_into("!H", head, 10, ~_ones_sum(bytes(head[:ip_header_bytes])) & 0xFFFF)


def _pseudo_sum(head: bytearray, tcp_at: int, body_bytes: int) -> int:
    """The partial checksum the kernel completes: pseudo-header sum, not complemented."""
    addresses = head[8:40] if head[0] >> 4 == 6 else head[12:20]
    tcp_bytes = len(head) - tcp_at + body_bytes
    return _ones_sum(bytes(addresses) + struct.pack("!HH", _TCP, tcp_bytes))


def _ones_sum(data: bytes) -> int:
    """Ones' complement sum of 16-bit words (RFC 1071), an odd byte padded."""
    padded = data + b"\0" if len(data) % 2 else data
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
