"""The bottleneck and the way of one direction as arithmetic: no clock, no socket, a given seed.

A packet of ``n`` bytes offered at time ``t`` leaves the bottleneck at the virtual finish time
``f = max(t, f_previous) + n / rate`` and arrives at ``a = max(a_previous, f + delay + u)`` with
``u`` a draw of the jitter; the maximum keeps the order. A packet that overtakes arrives at ``f``:
it queues as the others do and skips the way. One that would bring the line to more than
``limit_packets`` (waiting and travelling) is dropped.

With a slot the way is open at instants: the first packet that comes after the last slot opened
waits a uniform time between ``min_delay_s`` and ``max_delay_s`` for the next, and those behind it
go with it until the slot's packets or bytes are used up, when the one after it is drawn.

When the direction changes, what waits in the queue leaves at the new rate from then on; what has
left the bottleneck keeps the delay it was given.
"""

import math
from collections import deque
from random import Random
from typing import Generic, NamedTuple, TypeVar

from netem.jitter import Jitter
from netem.link import Direction, Slot

Item = TypeVar("Item")


class _Held(NamedTuple, Generic[Item]):
    arrival_s: float
    finish_s: float
    wire_bytes: int
    packets: int
    item: Item


class DelayLine(Generic[Item]):
    """A queue of items with their arrival times, in seconds of one monotonic clock."""

    def __init__(self, direction: Direction, limit_packets: int, seed: str = "") -> None:
        self.direction, self.limit_packets = direction, limit_packets
        #: What arrived at the other end; drops are in neither.
        self.bytes_total = self.packets_total = self.dropped_total = 0
        #: What the line holds now, waiting or travelling.
        self.held_bytes = self.held_packets = 0
        self._in_order: deque[_Held[Item]] = deque()
        self._overtaking: deque[_Held[Item]] = deque()
        self._free_at_s = self._arrival_s = -math.inf
        self._jitter = Jitter(direction, Random(f"{seed} jitter"))
        self._slots = _Slots(direction.slot, Random(f"{seed} slot"))

    @property
    def room_packets(self) -> int:
        """How many packets more the line takes."""
        return max(0, self.limit_packets - self.held_packets)

    def push(
        self, item: Item, wire_bytes: int, packets: int, now_s: float, *, overtakes: bool = False
    ) -> bool:
        """Offer an item; False when the queue limit drops it."""
        if packets > self.room_packets:
            self.dropped_total += packets
            return False
        finish_s = max(now_s, self._free_at_s) + wire_bytes / self.direction.rate_bytes_per_s
        self._free_at_s = finish_s
        if overtakes:
            self._overtaking.append(_Held(finish_s, finish_s, wire_bytes, packets, item))
        else:
            travelled_s = finish_s + max(0.0, self.direction.delay_s + self._jitter.draw_s())
            open_s = self._slots.pass_s(max(self._arrival_s, travelled_s), wire_bytes, packets)
            self._arrival_s = open_s
            self._in_order.append(_Held(open_s, finish_s, wire_bytes, packets, item))
        self.held_bytes += wire_bytes
        self.held_packets += packets
        return True

    def next_arrival_s(self) -> float | None:
        """When the first held item arrives; None when the line is empty."""
        source = self._first()
        return source[0].arrival_s if source else None

    def pop(self, now_s: float) -> Item | None:
        """The next item that has arrived by ``now_s``."""
        source = self._first()
        if not source or source[0].arrival_s > now_s:
            return None
        held = source.popleft()
        self.held_bytes -= held.wire_bytes
        self.held_packets -= held.packets
        self.bytes_total += held.wire_bytes
        self.packets_total += held.packets
        return held.item

    def change(self, direction: Direction, limit_packets: int, now_s: float) -> None:
        """Go on as ``direction`` from ``now_s``; nothing held is lost, whatever the new limit."""
        stretch = self.direction.rate_bytes_per_s / direction.rate_bytes_per_s
        self.direction, self.limit_packets = direction, limit_packets
        self._jitter.change(direction)
        self._slots.change(direction.slot)
        if stretch == 1:
            return
        self._free_at_s = _stretched(self._free_at_s, now_s, stretch)
        self._overtaking = deque(self._requeued(self._overtaking, now_s, stretch))
        self._in_order = deque(self._requeued(self._in_order, now_s, stretch))
        self._arrival_s = self._in_order[-1].arrival_s if self._in_order else -math.inf

    def counters(self) -> dict[str, int]:
        return {
            "bytes": self.bytes_total,
            "packets": self.packets_total,
            "dropped": self.dropped_total,
            "queued_bytes": self.held_bytes,
        }

    def _first(self) -> deque[_Held[Item]]:
        """The queue whose head arrives next; an empty one when nothing is held."""
        if not self._overtaking:
            return self._in_order
        if not self._in_order or self._overtaking[0].arrival_s < self._in_order[0].arrival_s:
            return self._overtaking
        return self._in_order

    def _requeued(
        self, queue: deque[_Held[Item]], now_s: float, stretch: float
    ) -> list[_Held[Item]]:
        """The queue with the remaining time at the bottleneck stretched, in order as before."""
        requeued, last_s = [], -math.inf
        for held in queue:
            finish_s = _stretched(held.finish_s, now_s, stretch)
            last_s = max(last_s, held.arrival_s + finish_s - held.finish_s)
            requeued.append(_Held(last_s, finish_s, held.wire_bytes, held.packets, held.item))
        return requeued


class _Slots:
    """When a path that opens in slots lets a packet pass; at once without a slot."""

    def __init__(self, slot: Slot | None, random: Random) -> None:
        self._slot, self._random = slot, random
        self._opens_s = -math.inf
        self._packets_left = self._bytes_left = math.inf

    def change(self, slot: Slot | None) -> None:
        if slot != self._slot:
            self._slot, self._opens_s = slot, -math.inf

    def pass_s(self, due_s: float, wire_bytes: int, packets: int) -> float:
        if self._slot is None:
            return due_s
        if self._opens_s < due_s:
            self._open_after(due_s, self._slot)
        passed_s = self._opens_s
        self._packets_left -= packets
        self._bytes_left -= wire_bytes
        if self._packets_left <= 0 or self._bytes_left <= 0:
            self._open_after(passed_s, self._slot)
        return passed_s

    def _open_after(self, at_s: float, slot: Slot) -> None:
        self._opens_s = at_s + self._random.uniform(slot.min_delay_s, slot.max_delay_s)
        self._packets_left = slot.packets or math.inf
        self._bytes_left = slot.bytes or math.inf


def _stretched(instant_s: float, now_s: float, stretch: float) -> float:
    """What still lies ahead of ``now_s`` takes ``stretch`` times as long."""
    return now_s + (instant_s - now_s) * stretch if instant_s > now_s else instant_s
