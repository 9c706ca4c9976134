"""Offload packets: measured, cut into what the kernel accepts as the same stream, damaged."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from netem_frames import ACK, CWR, FIN, PSH, read_tcp, tcp_frame, udp_frame

from netem.segments import HEADER, MAX_FRAME_BYTES, Packet, corrupt, cut, flow_key, mark, parse


def parsed(frame: bytes) -> Packet:
    packet = parse(frame)
    assert packet is not None
    return packet


def whole_and_payload(data: st.DataObject) -> tuple[Packet, bytes, int, int]:
    """An offload packet, its payload, its segment size and its first sequence number."""
    gso_size = data.draw(st.integers(min_value=100, max_value=1448))
    size = data.draw(st.integers(min_value=gso_size + 1, max_value=40 * gso_size))
    payload = bytes(index % 251 for index in range(size))
    start = data.draw(st.sampled_from([0, 1000, 2**32 - 500]))
    return parsed(tcp_frame(payload, gso_size, sequence=start)), payload, gso_size, start


@given(st.data())
def test_cuts_are_the_stream_between_them(data: st.DataObject) -> None:
    whole, payload, gso_size, start = whole_and_payload(data)
    assert whole.packets == -(-len(payload) // gso_size)
    assert whole.wire_bytes == len(payload) + 52 * whole.packets
    first = data.draw(st.integers(min_value=0, max_value=whole.packets - 1))
    end = data.draw(st.integers(min_value=first + 1, max_value=whole.packets))
    part = cut(whole, first, end)
    assert parse(part.frame) == part
    assert part.packets == end - first
    seen = read_tcp(part.frame)
    assert seen.sound
    assert seen.payload == payload[first * gso_size : end * gso_size]
    assert seen.sequence == (start + first * gso_size) % 2**32
    assert flow_key(part) == flow_key(whole)


@given(st.data())
def test_a_cut_of_a_cut_is_a_cut(data: st.DataObject) -> None:
    whole, _, _, _ = whole_and_payload(data)
    first, middle, end = sorted(
        data.draw(st.integers(min_value=0, max_value=whole.packets)) for _ in range(3)
    )
    if first < middle < end:
        twice = cut(cut(whole, first, end), middle - first, end - first)
        assert read_tcp(twice.frame) == read_tcp(cut(whole, middle, end).frame)


def test_flags_go_with_the_segment_they_belong_to() -> None:
    whole = parsed(tcp_frame(bytes(5000), 1000, flags=ACK | PSH | FIN | CWR))
    assert read_tcp(cut(whole, 0, 2).frame).flags == ACK | CWR
    assert read_tcp(cut(whole, 2, 3).frame).flags == ACK
    assert read_tcp(cut(whole, 3, 5).frame).flags == ACK | PSH | FIN


def test_a_single_packet_and_a_whole_one_stay_as_they_are() -> None:
    single = parsed(tcp_frame(bytes(100)))
    assert (single.wire_bytes, single.packets) == (152, 1)
    assert cut(single, 0, 1) is single
    whole = parsed(tcp_frame(bytes(5000), 1000))
    assert cut(whole, 0, 5) is whole


@pytest.mark.parametrize("payload_bytes", [1449, 2896, 2897, 65_000])
def test_segments_are_counted_from_the_payload_not_the_hint(payload_bytes: int) -> None:
    frame = bytearray(tcp_frame(bytes(payload_bytes), 1448))
    struct.pack_into("=H", frame, 2, 40_000)  # hdr_len may be any linear length
    assert parsed(bytes(frame)).packets == -(-payload_bytes // 1448)


@pytest.mark.parametrize("traffic_class", [0, 1, 2, 3, 0xB8 | 2])
def test_a_mark_is_set_where_the_sender_allows_it(traffic_class: int) -> None:
    packet = parsed(tcp_frame(bytes(3000), 1000, traffic_class=traffic_class))
    marked = mark(packet)
    if traffic_class & 3 == 0:
        assert marked is None
        return
    assert marked is not None
    seen = read_tcp(marked.frame)
    assert seen.sound
    assert seen.traffic_class == traffic_class | 3
    assert (marked.packets, marked.wire_bytes) == (packet.packets, packet.wire_bytes)


@given(st.integers(min_value=0, max_value=2**32), st.binary(max_size=200))
def test_a_corrupted_packet_differs_in_one_bit_that_its_checksum_shows(
    bit: int, payload: bytes
) -> None:
    packet = parsed(tcp_frame(payload))
    damaged = corrupt(packet, bit)
    before, after = packet.frame[HEADER.size :], damaged.frame[HEADER.size :]
    assert damaged.frame[0] & 1 == 0  # No partial checksum, which the kernel would make fit.
    differing = int.from_bytes(before[20:36] + before[38:]) ^ int.from_bytes(
        after[20:36] + after[38:]
    )
    assert differing.bit_count() <= 1  # 0 when it is the checksum that was hit
    assert before[:20] == after[:20]
    assert not read_tcp(damaged.frame).sound
    assert parse(damaged.frame) == damaged


def test_flows_are_told_apart_by_their_five_tuple() -> None:
    def key(frame: bytes) -> bytes:
        return flow_key(parsed(frame))

    one = key(tcp_frame(b"x", ports=(1, 2)))
    assert key(tcp_frame(bytes(9000), 1000, ports=(1, 2), sequence=9)) == one
    assert key(tcp_frame(b"x", ports=(1, 3))) != one
    assert key(tcp_frame(b"x", ports=(2, 1))) != one
    assert key(udp_frame(b"x", ports=(1, 2))) != one
    # Only the first fragment has ports: all go by addresses alone.
    first, later = key(udp_frame(b"x", (1, 2), 0x2000)), key(udp_frame(b"y", (9, 9), 0x0010))
    assert first == later
    assert first != key(udp_frame(b"x", (1, 2)))


def test_ipv6_is_a_flow_too() -> None:
    addresses = bytes(range(32))
    udp = struct.pack("!HHHH", 7, 8, 12, 0) + b"data"
    packet = struct.pack("!IHBB", 6 << 28, len(udp), 17, 64) + addresses + udp
    frame = HEADER.pack(0, 0, 0, 0, 0, 0) + packet
    assert flow_key(parsed(frame)) == bytes([17]) + addresses + udp[:4]
    assert parsed(frame).wire_bytes == 52


anything = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda header, packet: HEADER.pack(*header) + packet,
        st.tuples(
            st.sampled_from([0, 1, 2, 3, 255]),
            st.sampled_from([0, 1, 3, 4, 5, 0x81, 255]),
            *([st.integers(min_value=0, max_value=65535)] * 4),
        ),
        st.binary(max_size=200),
    ),
)


@st.composite
def nearly_sound(draw: st.DrawFn) -> bytes:
    """A sound frame with a few bytes changed, or its end cut off."""
    frame = bytearray(
        draw(
            st.sampled_from(
                [tcp_frame(bytes(3000), 1000), tcp_frame(b"abc"), udp_frame(b"x"), tcp_frame(b"")]
            )
        )
    )
    for _ in range(draw(st.integers(min_value=0, max_value=4))):
        at = draw(st.integers(min_value=0, max_value=min(len(frame), 70) - 1))
        frame[at] = draw(st.integers(min_value=0, max_value=255))
    return bytes(frame[: draw(st.integers(min_value=0, max_value=len(frame)))])


@given(st.one_of(anything, nearly_sound()), st.data())
def test_no_bytes_break_the_parser_or_what_it_lets_through(
    frame: bytes, data: st.DataObject
) -> None:
    packet = parse(frame)
    if packet is None:
        return
    assert packet.packets >= 1
    assert packet.wire_bytes >= len(frame) - HEADER.size
    flow_key(packet)
    marked = mark(packet)
    assert marked is None or parse(marked.frame) is not None
    first = data.draw(st.integers(min_value=0, max_value=packet.packets - 1))
    single = cut(packet, first, first + 1)
    assert parse(single.frame) is not None
    damaged = corrupt(single, data.draw(st.integers(min_value=0, max_value=2**32)))
    assert parse(damaged.frame) is not None


def test_what_is_no_sound_packet_is_refused() -> None:
    sound = tcp_frame(bytes(3000), 1000)
    assert parse(sound) is not None
    assert parse(b"") is None
    assert parse(sound[:-1]) is None
    assert parse(sound + b"x") is None
    assert len(sound) <= MAX_FRAME_BYTES
    for at, value in (
        (1, 3),  # a kind of offload that was not asked for
        (0, 0),  # segments without a checksum to complete
        (4, 0),  # segments of nothing
        (10, 0x55),  # IP version 5
        (10, 0x44),  # an IP header of 16 bytes
        (19, 17),  # segments of another protocol
        (42, 0x40),  # a TCP header of 16 bytes
    ):
        broken = bytearray(sound)
        broken[at] = value
        if at == 4:
            broken[5] = 0
        assert parse(bytes(broken)) is None, (at, value)
