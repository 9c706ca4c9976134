"""A whole direction: the fates of packets inside offload frames, caps, queue and odd input."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from netem_frames import ACK, read_tcp, tcp_frame, udp_frame

from netem.direction_json import settings_from_json, settings_to_json
from netem.link import Direction, LinkSpec, Slot, symmetric
from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss
from netem.segments import Packet
from netem.way import Way, WaySettings, way_settings

MSS = 1000
#: 40 full segments.
FRAME_PACKETS = 40


def a_way(seed: str = "seed", limit: int = 10**9, rate: float = 1e9, **more: Any) -> Way:
    return Way(WaySettings(Direction(rate, 0.001, **more), limit), seed)


def drain(way: Way) -> list[tuple[float, Packet]]:
    found = []
    while (event_s := way.next_event_s()) is not None:
        while (packet := way.pop(event_s)) is not None:
            found.append((event_s, packet))
    return found


def offer_frames(way: Way, frames: int, traffic_class: int = 0) -> None:
    """Offload frames whose sequence numbers count segments over all of them."""
    for index in range(frames):
        sequence = index * FRAME_PACKETS * MSS
        payload = bytes(FRAME_PACKETS * MSS)
        frame = tcp_frame(payload, MSS, sequence=sequence, flags=ACK, traffic_class=traffic_class)
        way.offer(frame, float(index))


def segments(packets: list[tuple[float, Packet]]) -> list[int]:
    """The numbers of the segments that arrived, in the order of their arrival."""
    numbers: list[int] = []
    for _, packet in packets:
        first = read_tcp(packet.frame).sequence // MSS
        numbers += range(first, first + packet.packets)
    return numbers


def test_loss_inside_offload_frames_is_that_of_their_packets() -> None:
    frames, loss = 5000, GilbertElliott(p=0.005, r=0.2)
    way = a_way(loss=loss)
    offer_frames(way, frames)
    arrived = segments(drain(way))
    total = frames * FRAME_PACKETS
    assert len(arrived) == len(set(arrived))
    lost = sorted(set(range(total)) - set(arrived))
    assert way.counters()["dropped"] == len(lost)
    assert len(lost) / total == pytest.approx(loss.mean_rate, rel=0.2)
    bursts = 1 + sum(1 for early, late in pairwise(lost) if late > early + 1)
    assert len(lost) / bursts == pytest.approx(loss.mean_burst_packets, rel=0.2)
    assert arrived == sorted(arrived)


def test_the_same_losses_whether_packets_come_together_or_one_by_one() -> None:
    together, singly = a_way(loss=IndependentLoss(0.05)), a_way(loss=IndependentLoss(0.05))
    offer_frames(together, 100)
    for index in range(100 * FRAME_PACKETS):
        singly.offer(tcp_frame(bytes(MSS), sequence=index * MSS, flags=ACK), 0.0)
    assert segments(drain(together)) == segments(drain(singly))


def test_the_share_that_overtakes_is_the_one_asked_for_and_it_arrives_first() -> None:
    way = a_way(reorder=0.05)
    offer_frames(way, 1000)
    arrived = segments(drain(way))
    assert sorted(arrived) == list(range(1000 * FRAME_PACKETS))
    ahead = [arrived[at : at + FRAME_PACKETS] for at in range(0, len(arrived), FRAME_PACKETS)]
    jumped = sum(count_jumps(frame) for frame in ahead)
    assert jumped / len(arrived) == pytest.approx(0.05, rel=0.2)


def count_jumps(frame: list[int]) -> int:
    """How many of a frame's segments came before its first that waited.

    The overtaking ones arrive first, in order; those that waited follow, in order.
    """
    for at in range(1, len(frame)):
        if frame[at] < frame[at - 1]:
            return at
    return 0


def test_a_gap_lets_only_every_so_manieth_packet_overtake() -> None:
    way = a_way(reorder=1.0, reorder_gap=10)
    offer_frames(way, 100)
    arrived = segments(drain(way))
    ahead = [arrived[at : at + FRAME_PACKETS] for at in range(0, len(arrived), FRAME_PACKETS)]
    assert {count_jumps(frame) for frame in ahead} == {4}
    assert ahead[0][:4] == [9, 19, 29, 39]


def test_the_share_of_copies_is_the_one_asked_for() -> None:
    way = a_way(duplicate=0.03)
    offer_frames(way, 1000)
    arrived = segments(drain(way))
    total = 1000 * FRAME_PACKETS
    assert len(set(arrived)) == total
    assert (len(arrived) - total) / total == pytest.approx(0.03, rel=0.1)


def test_the_share_of_damage_is_the_one_asked_for_and_the_receiver_sees_it() -> None:
    way = a_way(corrupt=0.02)
    offer_frames(way, 1000)
    found = drain(way)
    unsound = sum(1 for _, packet in found if not read_tcp(packet.frame).sound)
    assert sum(packet.packets for _, packet in found) == 1000 * FRAME_PACKETS
    assert unsound / (1000 * FRAME_PACKETS) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("capable", [True, False])
def test_a_loss_is_a_mark_where_the_sender_can_be_told(capable: bool) -> None:
    way = a_way(loss=IndependentLoss(0.1), ecn=True)
    offer_frames(way, 100, traffic_class=2 if capable else 0)
    found = drain(way)
    marked = sum(
        packet.packets for _, packet in found if read_tcp(packet.frame).traffic_class & 3 == 3
    )
    dropped = way.counters()["dropped"]
    assert (marked > 0, dropped > 0) == (capable, not capable)
    assert marked == way.marked_total
    assert (marked + dropped) / (100 * FRAME_PACKETS) == pytest.approx(0.1, rel=0.2)
    if capable:
        assert segments(found) == list(range(100 * FRAME_PACKETS))


def test_one_impairment_more_leaves_the_pattern_of_the_others() -> None:
    plain, jittery = (
        a_way(loss=IndependentLoss(0.05)),
        a_way(loss=IndependentLoss(0.05), jitter_s=0.001, corrupt=0.2, reorder=0.1),
    )
    for way in (plain, jittery):
        offer_frames(way, 50)
    assert set(segments(drain(plain))) == set(segments(drain(jittery)))


def test_a_change_of_rate_leaves_the_pattern_of_losses() -> None:
    steady, changed = a_way(loss=GilbertElliott(0.02, 0.3)), a_way(loss=GilbertElliott(0.02, 0.3))
    for way in (steady, changed):
        offer_frames(way, 20)
        if way is changed:
            other = Direction(1e7, 0.001, loss=GilbertElliott(0.02, 0.3))
            way.change(WaySettings(other, 10**9), 20.0)
        offer_frames(way, 20)
    assert steady.counters()["dropped"] == changed.counters()["dropped"] > 0
    assert segments(drain(steady)) == segments(drain(changed))


def test_a_full_queue_takes_what_it_has_room_for() -> None:
    way = a_way(limit=100)
    for _ in range(3):
        way.offer(tcp_frame(bytes(FRAME_PACKETS * MSS), MSS, flags=ACK), 0.0)
    assert sum(packet.packets for _, packet in drain(way)) == 100
    assert way.counters()["dropped"] == 20


def test_every_flow_has_its_cap_and_all_share_the_rate() -> None:
    cap, rate = 1e6, 2.5e6
    way = Way(WaySettings(Direction(rate, 0.0), 10**9, cap, 10**9), "seed")
    for _ in range(50):
        for flow in range(3):
            way.offer(tcp_frame(bytes(FRAME_PACKETS * MSS), MSS, ports=(flow, 1)), 0.0)
    found = drain(way)
    wire_bytes = sum(packet.wire_bytes for _, packet in found)
    # Three flows of 1 MB/s want more than the link has; each alone gets its own.
    assert wire_bytes / found[-1][0] == pytest.approx(rate, rel=0.02)
    alone = Way(WaySettings(Direction(rate, 0.0), 10**9, cap, 10**9), "seed")
    for _ in range(50):
        alone.offer(tcp_frame(bytes(FRAME_PACKETS * MSS), MSS), 0.0)
    found = drain(alone)
    assert sum(packet.wire_bytes for _, packet in found) / found[-1][0] == pytest.approx(
        cap, rel=0.04
    )
    assert alone.counters()["queued_bytes"] == 0


def test_what_the_link_adds_to_a_direction() -> None:
    spec = symmetric("wan", 1e9, 0.1, per_flow_cap_bytes_per_s=1e8)
    settings = way_settings(spec, "near_to_far")
    assert settings.cap_limit_packets == math.ceil(1.5 * 1e8 * 0.1 / 1500)
    assert settings.limit_packets == spec.queue_packets("near_to_far")
    assert way_settings(symmetric("lan", 1e9, 1e-4), "far_to_near").cap_bytes_per_s is None


@pytest.mark.parametrize(
    "loss",
    [None, IndependentLoss(0.1, 0.2), GilbertElliott(0.1, 0.2), FourStateLoss(0.1, 0.2, p14=0.01)],
)
def test_settings_survive_json(loss: Any) -> None:
    slot = Slot(0.1, 0.2, 3, 4)
    one = Direction(1e9, 0.1, 0.01, "pareto", 0.3, loss, 0.1, slot=slot, ecn=True)
    other = Direction(1e8, 0.2)
    spec = LinkSpec("odd", one, other, per_flow_cap_bytes_per_s=1e6)
    for name in ("near_to_far", "far_to_near"):
        settings = way_settings(spec, name)  # type: ignore[arg-type]  # both are names
        assert settings_from_json(json.loads(json.dumps(settings_to_json(settings)))) == settings


soup = st.lists(
    st.one_of(
        st.binary(max_size=120),
        st.just(tcp_frame(bytes(5000), MSS)),
        st.just(udp_frame(b"hello")),
        st.builds(
            lambda at, value: bytes(
                [*(sound := tcp_frame(bytes(3000), MSS))[:at], value, *sound[at + 1 :]]
            ),
            st.integers(min_value=0, max_value=60),
            st.integers(min_value=0, max_value=255),
        ),
    ),
    max_size=30,
)


@given(soup, st.sampled_from([None, 1e5]))
def test_every_frame_is_delivered_or_counted(frames: list[bytes], cap: float | None) -> None:
    direction = Direction(
        1e6, 0.001, loss=IndependentLoss(0.2), duplicate=0.2, corrupt=0.2, reorder=0.2, ecn=True
    )
    way = Way(WaySettings(direction, 30, cap, 10), "seed")
    for index, frame in enumerate(frames):
        way.offer(frame, index * 1e-4)
    arrived = sum(packet.packets for _, packet in drain(way))
    counters = way.counters()
    assert counters["packets"] == arrived
    assert counters["queued_bytes"] == 0
    assert way.malformed_total <= counters["dropped"]
    assert way.malformed_total >= sum(1 for frame in frames if len(frame) < 30)
