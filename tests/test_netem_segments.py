"""Offload packets: measured, and cut into what the kernel accepts as the same TCP stream."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.segments import HEADER, measure, without

_SOURCE, _DESTINATION = bytes([10, 80, 0, 1]), bytes([10, 80, 0, 2])
_TCP_OPTIONS = bytes([1, 1, 8, 10]) + bytes(8)
_FIN, _PSH, _ACK, _CWR = 1, 8, 16, 128


def frame(payload: bytes, gso_size: int, sequence: int = 1000, flags: int = _ACK | _PSH) -> bytes:
    """A TCP/IPv4 frame as the kernel hands it over: partial checksum, one header for all."""
    tcp = struct.pack("!HHIIBBHHH", 5000, 6000, sequence, 77, 8 << 4, flags, 500, 0, 0)
    tcp += _TCP_OPTIONS
    total = 20 + len(tcp) + len(payload)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, total, 9, 0x4000, 64, 6, 0) + _SOURCE + _DESTINATION
    header = HEADER.pack(1, 1 if gso_size else 0, 52, gso_size, 20, 16)
    return header + ip + tcp + payload


def sum16(data: bytes) -> int:
    total = sum(int.from_bytes(data[at : at + 2]) for at in range(0, len(data), 2))
    while total > 0xFFFF:
        total = (total >> 16) + (total & 0xFFFF)
    return total


def read(cut: bytes) -> tuple[int, bytes, int]:
    """(sequence, payload, TCP flags) of a frame, its headers checked."""
    _, gso_type, _, gso_size, csum_start, csum_offset = HEADER.unpack_from(cut)
    packet = cut[HEADER.size :]
    assert struct.unpack_from("!H", packet, 2)[0] == len(packet)
    assert sum16(packet[:20]) == 0xFFFF
    pseudo = _SOURCE + _DESTINATION + struct.pack("!HH", 6, len(packet) - 20)
    assert struct.unpack_from("!H", packet, csum_start + csum_offset)[0] == sum16(pseudo)
    payload = packet[52:]
    assert (gso_type == 1 and len(payload) > gso_size) or (gso_type, gso_size) == (0, 0)
    return struct.unpack_from("!I", packet, 24)[0], payload, packet[33]


@given(st.data())
def test_what_remains_is_the_stream_without_the_lost_segments(data: st.DataObject) -> None:
    gso_size = data.draw(st.integers(min_value=100, max_value=1448))
    payload = bytes(data.draw(st.integers(min_value=gso_size + 1, max_value=40 * gso_size)))
    payload = bytes(index % 251 for index in range(len(payload)))
    start = data.draw(st.sampled_from([0, 1000, 2**32 - 500]))
    whole = frame(payload, gso_size, start)
    wire_bytes, segments = measure(whole)
    assert segments == -(-len(payload) // gso_size)
    assert wire_bytes == len(payload) + 52 * segments
    lost = sorted(data.draw(st.sets(st.integers(min_value=0, max_value=segments - 1), min_size=1)))
    kept: dict[int, bytes] = {}
    for part in without(whole, lost):
        sequence, body, _ = read(part)
        assert measure(part)[1] == -(-len(body) // gso_size)
        kept[(sequence - start) % 2**32] = body
    expected = bytearray(payload)
    present = bytearray(len(payload))
    for offset, body in kept.items():
        assert bytes(expected[offset : offset + len(body)]) == body
        present[offset : offset + len(body)] = b"\1" * len(body)
    for segment in range(segments):
        window = present[segment * gso_size : (segment + 1) * gso_size]
        assert set(window) == {0 if segment in lost else 1}


def test_flags_go_with_the_segment_they_belong_to() -> None:
    whole = frame(bytes(5000), 1000, flags=_ACK | _PSH | _FIN | _CWR)
    first, last = (read(part)[2] for part in without(whole, [2]))
    assert first == _ACK | _CWR
    assert last == _ACK | _PSH | _FIN


def test_a_single_packet_is_lost_whole() -> None:
    single = frame(bytes(100), 0)
    assert measure(single) == (152, 1)
    assert without(single, [0]) == []


def test_without_losses_the_frame_is_untouched() -> None:
    whole = frame(bytes(5000), 1000)
    assert without(whole, []) == [whole]


@pytest.mark.parametrize("payload_bytes", [1449, 2896, 2897, 65_000])
def test_segments_are_counted_from_the_payload_not_the_hint(payload_bytes: int) -> None:
    whole = bytearray(frame(bytes(payload_bytes), 1448))
    struct.pack_into("=H", whole, 2, 40_000)  # hdr_len may be any linear length
    assert measure(bytes(whole))[1] == -(-payload_bytes // 1448)
