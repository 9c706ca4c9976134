"""Frames as the kernel hands them over from a TUN device, and a reader that checks them."""

import struct
from dataclasses import dataclass

from netem.segments import HEADER

NEAR, FAR = bytes([10, 80, 0, 1]), bytes([10, 80, 0, 2])
FIN, PSH, ACK, CWR = 1, 8, 16, 128
_TCP_OPTIONS = bytes([1, 1, 8, 10]) + bytes(8)


def tcp_frame(
    payload: bytes,
    gso_size: int = 0,
    *,
    sequence: int = 1000,
    flags: int = ACK | PSH,
    ports: tuple[int, int] = (5000, 6000),
    traffic_class: int = 0,
) -> bytes:
    """A TCP/IPv4 frame: partial checksum, one header for all of its segments."""
    tcp = struct.pack("!HHIIBBHHH", *ports, sequence, 77, 8 << 4, flags, 500, 0, 0) + _TCP_OPTIONS
    packet = _ip_header(6, len(tcp) + len(payload), traffic_class) + tcp + payload
    pseudo = NEAR + FAR + struct.pack("!HH", 6, len(tcp) + len(payload))
    packet = packet[:36] + struct.pack("!H", sum16(pseudo)) + packet[38:]
    return HEADER.pack(1, 1 if gso_size else 0, 52, gso_size, 20, 16) + packet


def udp_frame(payload: bytes, ports: tuple[int, int] = (5000, 6000), fragment: int = 0) -> bytes:
    """A UDP/IPv4 frame with a partial checksum."""
    udp = struct.pack("!HHHH", *ports, 8 + len(payload), 0)
    head = bytearray(_ip_header(17, len(udp) + len(payload), 0))
    struct.pack_into("!H", head, 6, fragment)
    pseudo = NEAR + FAR + struct.pack("!HH", 17, len(udp) + len(payload))
    udp = udp[:6] + struct.pack("!H", sum16(pseudo))
    return HEADER.pack(1, 0, 28, 0, 20, 6) + bytes(head) + udp + payload


def _ip_header(protocol: int, body_bytes: int, traffic_class: int) -> bytes:
    head = bytearray(
        struct.pack("!BBHHHBBH", 0x45, traffic_class, 20 + body_bytes, 9, 0x4000, 64, protocol, 0)
        + NEAR
        + FAR
    )
    struct.pack_into("!H", head, 10, ~sum16(bytes(head)) & 0xFFFF)
    return bytes(head)


def sum16(data: bytes) -> int:
    """Ones' complement sum, in the plainest way there is."""
    padded = data + bytes(len(data) % 2)
    total = sum(int.from_bytes(padded[at : at + 2]) for at in range(0, len(padded), 2))
    while total > 0xFFFF:
        total = (total >> 16) + (total & 0xFFFF)
    return total


@dataclass(frozen=True)
class Seen:
    """What a receiver makes of a frame. ``sound``: the transport checksum is right."""

    sequence: int
    payload: bytes
    flags: int
    traffic_class: int
    sound: bool


def read_tcp(frame: bytes) -> Seen:
    """A TCP frame with its IP header checked; a partial checksum is taken for completed."""
    flags, gso_type, _, gso_size, csum_start, csum_offset = HEADER.unpack_from(frame)
    packet = frame[HEADER.size :]
    assert struct.unpack_from("!H", packet, 2)[0] == len(packet)
    assert sum16(packet[:20]) == 0xFFFF
    pseudo = NEAR + FAR + struct.pack("!HH", 6, len(packet) - 20)
    if flags & 1:
        checksum = struct.unpack_from("!H", packet, csum_start + csum_offset)[0]
        sound = checksum == sum16(pseudo)
    else:
        sound = sum16(pseudo + packet[20:]) == 0xFFFF
    payload = packet[52:]
    assert (gso_type == 1 and len(payload) > gso_size) or (gso_type, gso_size) == (0, 0)
    sequence = struct.unpack_from("!I", packet, 24)[0]
    return Seen(sequence, payload, packet[33], packet[1], sound)
