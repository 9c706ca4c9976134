"""A cap on every flow by itself: a token bucket for each 5-tuple, as clouds have. No clock.

The bucket of a flow fills at ``cap`` and holds ``burst_bytes``; what finds it empty waits in the
flow's own queue, and what finds ``limit_packets`` waiting there is dropped. As arithmetic (the
generic cell rate algorithm): with the theoretical time ``T = max(t, T_previous)`` a packet offered
at ``t`` goes on at ``max(t, T - burst / cap)``, and ``T`` grows by ``n / cap``. A flow whose
theoretical time has passed has a full bucket and needs no memory.
"""

import heapq
import itertools
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: The bucket holds what the cap passes in a millisecond, between one packet and the largest frame:
#: a message after a silence is not held up by the cap.
_BURST_S, _MIN_BURST_BYTES, _MAX_BURST_BYTES = 1e-3, 1500, 65536
#: Beyond this many flows those with a full bucket are forgotten.
_FORGET_ABOVE = 1024


@dataclass(slots=True)
class _Flow:
    full_at_s: float
    waiting_packets: int = 0


class FlowCap(Generic[Item]):
    """What waits for its flow's bucket. ``cap_bytes_per_s`` None: nothing ever does."""

    def __init__(self, cap_bytes_per_s: float | None, limit_packets: int) -> None:
        self.cap_bytes_per_s, self.limit_packets = cap_bytes_per_s, limit_packets
        self.held_bytes = self.dropped_total = 0
        self._flows: dict[bytes, _Flow] = {}
        self._waiting: list[tuple[float, int, bytes, int, int, Item]] = []
        self._order = itertools.count()

    @property
    def flows(self) -> int:
        """How many flows are remembered."""
        return len(self._flows)

    def room_packets(self, flow_key: bytes) -> int:
        """How many packets more the flow's queue takes."""
        flow = self._flows.get(flow_key)
        return self.limit_packets if flow is None else self.limit_packets - flow.waiting_packets

    def offer(
        self, flow_key: bytes, item: Item, wire_bytes: int, packets: int, now_s: float
    ) -> None:
        """Put an item in its flow's queue; ``pop`` gives it when the flow may send it."""
        if packets > self.room_packets(flow_key):
            self.dropped_total += packets
            return
        release_s = now_s
        if self.cap_bytes_per_s is not None:
            flow = self._flow(flow_key, now_s)
            release_s = max(now_s, flow.full_at_s - self._burst_s(self.cap_bytes_per_s))
            flow.full_at_s += wire_bytes / self.cap_bytes_per_s
            flow.waiting_packets += packets
        entry = (release_s, next(self._order), flow_key, wire_bytes, packets, item)
        heapq.heappush(self._waiting, entry)
        self.held_bytes += wire_bytes

    def next_release_s(self) -> float | None:
        """When the next item may go on; None when nothing waits."""
        return self._waiting[0][0] if self._waiting else None

    def pop(self, now_s: float) -> tuple[float, Item] | None:
        """The next item that may go on by ``now_s``, with the instant from which it might."""
        if not self._waiting or self._waiting[0][0] > now_s:
            return None
        release_s, _, flow_key, wire_bytes, packets, item = heapq.heappop(self._waiting)
        self.held_bytes -= wire_bytes
        if flow_key in self._flows:
            self._flows[flow_key].waiting_packets -= packets
        return release_s, item

    def change(self, cap_bytes_per_s: float | None, limit_packets: int, now_s: float) -> None:
        """Another cap or limit from ``now_s``: what waits is offered again, in its order."""
        if (cap_bytes_per_s, limit_packets) == (self.cap_bytes_per_s, self.limit_packets):
            return
        self.cap_bytes_per_s, self.limit_packets = cap_bytes_per_s, limit_packets
        waiting = sorted(self._waiting)
        self._flows, self._waiting, self.held_bytes = {}, [], 0
        for _, _, flow_key, wire_bytes, packets, item in waiting:
            self.offer(flow_key, item, wire_bytes, packets, now_s)

    def _flow(self, flow_key: bytes, now_s: float) -> _Flow:
        flow = self._flows.get(flow_key)
        if flow is None:
            if len(self._flows) >= _FORGET_ABOVE:
                self._flows = {
                    key: flow
                    for key, flow in self._flows.items()
                    if flow.full_at_s > now_s or flow.waiting_packets
                }
            flow = self._flows[flow_key] = _Flow(now_s)
        flow.full_at_s = max(flow.full_at_s, now_s)
        return flow

    @staticmethod
    def _burst_s(cap_bytes_per_s: float) -> float:
        burst_bytes = min(max(cap_bytes_per_s * _BURST_S, _MIN_BURST_BYTES), _MAX_BURST_BYTES)
        return burst_bytes / cap_bytes_per_s
