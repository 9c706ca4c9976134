"""One direction of the forwarder's link, from a frame offered to frames that arrive: no I/O.

    frame -> parse -> the flow's cap -> impairments -> delay line -> frames

Every packet that a segmentation-offload frame stands for has its own fate; a frame whose packets
differ is cut into runs, which stay in order. A queue with room for part of a frame takes that part.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from netem.delayline import DelayLine
from netem.flowcap import FlowCap
from netem.impairments import Fate, Impairments
from netem.link import MIN_LIMIT_PACKETS, QUEUE_BDPS, Direction, DirectionName, LinkSpec
from netem.segments import Packet, corrupt, cut, flow_key, mark, parse


@dataclass(frozen=True, slots=True)
class WaySettings:
    """A direction with what the whole link adds to it."""

    direction: Direction
    limit_packets: int
    cap_bytes_per_s: float | None = None
    cap_limit_packets: int = MIN_LIMIT_PACKETS


def way_settings(spec: LinkSpec, name: DirectionName) -> WaySettings:
    """One direction of a link. A capped flow queues as a link of the cap's rate would."""
    cap = spec.per_flow_cap_bytes_per_s
    cap_packets = math.ceil(QUEUE_BDPS * (cap or 0.0) * spec.rtt_s / spec.mtu_bytes)
    return WaySettings(
        spec.direction(name), spec.queue_packets(name), cap, max(MIN_LIMIT_PACKETS, cap_packets)
    )


class Way:
    """Packets on their way. ``seed`` names the random streams: the same one, the same fates."""

    def __init__(self, settings: WaySettings, seed: str) -> None:
        direction = settings.direction
        self.malformed_total = self.marked_total = 0
        self._line: DelayLine[Packet] = DelayLine(direction, settings.limit_packets, seed)
        self._impairments = Impairments(direction, seed)
        self._cap: FlowCap[Packet] = FlowCap(settings.cap_bytes_per_s, settings.cap_limit_packets)

    def offer(self, frame: bytes, now_s: float) -> None:
        """A frame enters; what is no IP packet is counted as malformed and dropped."""
        packet = parse(frame)
        if packet is None:
            self.malformed_total += 1
        elif self._cap.cap_bytes_per_s is None:
            self._enter(packet, now_s)
        else:
            key = flow_key(packet)
            packet = self._fitting(packet, self._cap.room_packets(key))
            self._cap.offer(key, packet, packet.wire_bytes, packet.packets, now_s)
            self._release(now_s)

    def next_event_s(self) -> float | None:
        """When ``pop`` has something to do next; None when nothing is held."""
        arrival_s, release_s = self._line.next_arrival_s(), self._cap.next_release_s()
        if arrival_s is None or release_s is None:
            return release_s if arrival_s is None else arrival_s
        return min(arrival_s, release_s)

    def pop(self, now_s: float) -> Packet | None:
        """The next packet that has arrived by ``now_s``."""
        self._release(now_s)
        return self._line.pop(now_s)

    def refused(self, packet: Packet) -> None:
        """The device did not take a packet that ``pop`` gave: it is dropped and has not arrived."""
        self._line.bytes_total -= packet.wire_bytes
        self._line.packets_total -= packet.packets
        self._line.dropped_total += packet.packets

    def change(self, settings: WaySettings, now_s: float) -> None:
        """Go on with other settings; see ``DelayLine.change`` and ``FlowCap.change``."""
        self._release(now_s)
        self._line.change(settings.direction, settings.limit_packets, now_s)
        self._impairments.change(settings.direction)
        self._cap.change(settings.cap_bytes_per_s, settings.cap_limit_packets, now_s)
        self._release(now_s)

    def counters(self) -> dict[str, int]:
        """As a ``DirectionCounters``; malformed frames count as dropped packets."""
        totals = self._line.counters()
        totals["dropped"] += self._cap.dropped_total + self.malformed_total
        totals["queued_bytes"] += self._cap.held_bytes
        return totals

    def _release(self, now_s: float) -> None:
        """What its flow's cap lets go on enters the line at the instant it might, not now."""
        while (released := self._cap.pop(now_s)) is not None:
            release_s, packet = released
            self._enter(packet, release_s)

    def _enter(self, packet: Packet, now_s: float) -> None:
        fates = self._impairments.draw(packet.packets)
        if not fates:
            self._push(packet, now_s)
            return
        for first, end, fate in _runs(packet.packets, fates):
            self._enter_run(cut(packet, first, end), fate, now_s)

    def _enter_run(self, part: Packet, fate: Fate, now_s: float) -> None:
        if Fate.LOST in fate:
            marked = mark(part) if self._line.direction.ecn else None
            if marked is None:
                self._line.dropped_total += part.packets
                return
            self.marked_total += part.packets
            part = marked
        if Fate.CORRUPTED in fate:
            part = corrupt(part, self._impairments.draw_bit())
        for _ in range(2 if Fate.DUPLICATED in fate else 1):
            self._push(part, now_s, overtakes=Fate.OVERTAKES in fate)

    def _push(self, packet: Packet, now_s: float, *, overtakes: bool = False) -> None:
        packet = self._fitting(packet, self._line.room_packets)
        self._line.push(packet, packet.wire_bytes, packet.packets, now_s, overtakes=overtakes)

    def _fitting(self, packet: Packet, room: int) -> Packet:
        """As much of a packet as a queue has room for, the rest dropped; all where it has none."""
        if not 0 < room < packet.packets:
            return packet
        self._line.dropped_total += packet.packets - room
        return cut(packet, 0, room)


def _runs(packets: int, fates: dict[int, Fate]) -> Iterator[tuple[int, int, Fate]]:
    """(first, end, fate) of runs in order: single packets with a fate, and all between them."""
    start = 0
    for index, fate in fates.items():
        if index > start:
            yield start, index, Fate(0)
        yield index, index + 1, fate
        start = index + 1
    if start < packets:
        yield start, packets, Fate(0)
