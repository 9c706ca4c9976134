"""One direction of a link as arithmetic: no clock, no socket, randomness from an explicit seed.

A packet of ``n`` bytes offered at time ``t`` leaves the bottleneck at the virtual finish time
``f = max(t, f_previous) + n / rate`` and arrives at ``a = max(a_previous, f + delay + u)`` with
``u`` uniform in +-jitter; the maximum keeps the order. A packet that would bring the line to more
than ``limit_packets`` (waiting and travelling) is dropped, as is one that meets a loss.

Independent loss with probability p is drawn as the number of packets until the next loss, which
is geometric: ``floor(ln(U) / ln(1 - p))``. One draw a loss instead of one a packet, and a large
segmentation-offload packet is charged for every MTU packet it stands for.
"""

import math
import random
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class DelayLine(Generic[Item]):
    """A FIFO of items with their arrival times, in seconds of one monotonic clock."""

    __slots__ = (
        "_arrival_s",
        "_free_at_s",
        "_held",
        "_random",
        "_until_loss",
        "bytes_total",
        "delay_s",
        "dropped_total",
        "held_bytes",
        "held_packets",
        "jitter_s",
        "limit_packets",
        "loss",
        "packets_total",
        "rate_bytes_per_s",
    )

    def __init__(
        self,
        rate_bytes_per_s: float,
        delay_s: float,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        limit_packets: int = 1000,
        seed: int = 0,
    ) -> None:
        self.rate_bytes_per_s, self.delay_s, self.jitter_s = rate_bytes_per_s, delay_s, jitter_s
        self.loss, self.limit_packets = loss, limit_packets
        #: What arrived at the other end; drops are in neither.
        self.bytes_total = self.packets_total = self.dropped_total = 0
        #: What the line holds now, waiting or travelling.
        self.held_bytes = self.held_packets = 0
        self._held: deque[tuple[float, int, int, Item]] = deque()
        self._free_at_s = self._arrival_s = -math.inf
        self._random = random.Random(seed)
        self._until_loss = self._draw_gap()

    def lost(self, packets: int) -> tuple[int, ...]:
        """Which of the next ``packets`` packets are lost, by index; they are counted as dropped."""
        if self._until_loss >= packets:
            self._until_loss -= packets
            return ()
        losses, position = [], 0
        while position + self._until_loss < packets:
            position += int(self._until_loss)
            losses.append(position)
            position += 1
            self._until_loss = self._draw_gap()
        self._until_loss -= packets - position
        self.dropped_total += len(losses)
        return tuple(losses)

    def push(self, item: Item, wire_bytes: int, packets: int, now_s: float) -> bool:
        """Offer an item; False when the queue limit drops it."""
        if self.held_packets + packets > self.limit_packets and self.held_packets:
            self.dropped_total += packets
            return False
        finish_s = max(now_s, self._free_at_s) + wire_bytes / self.rate_bytes_per_s
        self._free_at_s = finish_s
        arrival_s = finish_s + self.delay_s
        if self.jitter_s:
            arrival_s += self._random.uniform(-self.jitter_s, self.jitter_s)
        self._arrival_s = max(self._arrival_s, arrival_s)
        self._held.append((self._arrival_s, wire_bytes, packets, item))
        self.held_bytes += wire_bytes
        self.held_packets += packets
        return True

    def next_arrival_s(self) -> float | None:
        """When the first held item arrives; None when the line is empty."""
        return self._held[0][0] if self._held else None

    def pop(self, now_s: float) -> Item | None:
        """The next item that has arrived by ``now_s``."""
        if not self._held or self._held[0][0] > now_s:
            return None
        _, wire_bytes, packets, item = self._held.popleft()
        self.held_bytes -= wire_bytes
        self.held_packets -= packets
        self.bytes_total += wire_bytes
        self.packets_total += packets
        return item

    def counters(self) -> dict[str, int]:
        return {
            "bytes": self.bytes_total,
            "packets": self.packets_total,
            "dropped": self.dropped_total,
            "queued_bytes": self.held_bytes,
        }

    def _draw_gap(self) -> float:
        if self.loss <= 0:
            return math.inf
        # 1 - random() lies in (0, 1], so the logarithm exists.
        return math.floor(math.log(1.0 - self._random.random()) / math.log1p(-self.loss))
