"""Which instance of a cluster is free first, and which has the earliest slot: O(log n) each.

Both orders are heaps of lower bounds. What a backlog has got more of is found out at the top of the
heap and put back; only what it has got less of must be entered anew.

``PrefillOrder``: an instance is free first. Idle instances are free now, whenever that is, and have
a heap of their own. Ties, which are the rule where instances idle, go to the one that got its last
request longest ago, then to the lowest index: each sends its KV over a path of its own, and always
the first of the idle ones would fill one path while the others are empty.

``SlotOrder``: for KV that lands at a given instant a decode instance with fewer than ``max_batch``
requests grants a slot at once, so that the one with the fewest, then the lowest index, is taken.
Where all have as many, each has an instant before which it grants no slot, and they are looked at
by that instant until none is left that could be earlier.
"""

import heapq
import math
from collections.abc import Sequence

from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog

#: (free_s, last given, index, backlog); the index is unique, so that backlogs are not compared.
_Busy = tuple[float, int, int, PrefillBacklog]
_Idle = tuple[int, int, PrefillBacklog]
#: (requests, index, backlog) and (earliest slot, index, backlog).
_Fewest = tuple[int, int, DecodeBacklog]
_Floor = tuple[float, int, DecodeBacklog]


class PrefillOrder:
    """The prefill instances of one cluster that take requests. ``enter`` after every change."""

    def __init__(self) -> None:
        self._busy: list[_Busy] = []
        self._idle: list[_Idle] = []
        self._entered: dict[int, PrefillBacklog] = {}

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, backlog: PrefillBacklog) -> None:
        """Note that the backlog changed; it leaves while it takes no requests."""
        if not backlog.up or backlog.draining:
            backlog.entry = None
            if self._entered.get(backlog.index) is backlog:
                del self._entered[backlog.index]
            return
        known = backlog.entry
        if backlog.is_idle:
            if known is not None and len(known) == 3 and known[0] == backlog.last_given:
                return
            backlog.entry = idle = (backlog.last_given, backlog.index, backlog)
            heapq.heappush(self._idle, idle)
        else:
            free_s = backlog.free_at_s(-math.inf)
            if known is not None and len(known) == 4 and free_s >= known[0]:
                return
            backlog.entry = busy = (free_s, backlog.last_given, backlog.index, backlog)
            heapq.heappush(self._busy, busy)
            if len(self._busy) > 64 + 4 * len(self._entered):
                # Entries that were overtaken; each costs as much work as brought it here.
                self._busy = [one for one in self._busy if one[3].entry is one]
                heapq.heapify(self._busy)
        if known is None:
            self._entered[backlog.index] = backlog
            backlog.order = self

    def least(self, now_s: float) -> PrefillBacklog | None:
        """The instance that is free first, or None when none takes requests."""
        busy, waiting = self._busy, self._idle
        while waiting and waiting[0][2].entry is not waiting[0]:
            heapq.heappop(waiting)
        idle = waiting[0] if waiting else None
        while busy:
            top = busy[0]
            if idle is not None and top[0] > now_s:
                break
            free_s, given, index, backlog = top
            if backlog.entry is not top:
                heapq.heappop(busy)
                continue
            now_free_s, now_given = backlog.free_at_s(now_s), backlog.last_given
            if now_free_s == free_s and now_given == given:
                return backlog if idle is None or top[:3] < (now_s, *idle[:2]) else idle[2]
            backlog.entry = again = (now_free_s, now_given, index, backlog)
            heapq.heapreplace(busy, again)
        return None if idle is None else idle[2]


class SlotOrder:
    """The decode instances of one cluster. A backlog says itself when it has fewer requests
    (``enter``) or may grant a slot earlier (``lower``)."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._fewest: list[_Fewest] = []
        self._floors: list[_Floor] = []
        self._members: dict[int, DecodeBacklog] = {}

    def enter(self, backlog: DecodeBacklog) -> None:
        """Note an instance, that it has fewer requests, or that it goes into or out of service."""
        index = backlog.index
        if not backlog.in_service:
            if self._members.get(index) is backlog:
                del self._members[index]
            return
        if index not in self._members:
            self._members[index] = backlog
            backlog.order = self
            self.lower(backlog)
        backlog.known_len = len(backlog)
        heapq.heappush(self._fewest, (backlog.known_len, index, backlog))
        if len(self._fewest) > 64 + 4 * len(self._members):
            self._fewest = [(one.known_len, one.index, one) for one in self._members.values()]
            heapq.heapify(self._fewest)

    def lower(self, backlog: DecodeBacklog) -> None:
        """Nothing is known of when the instance grants its next slot."""
        backlog.floor_s = -math.inf
        heapq.heappush(self._floors, (-math.inf, backlog.index, backlog))
        if len(self._floors) > 64 + 4 * len(self._members):
            self._floors = [(one.floor_s, one.index, one) for one in self._members.values()]
            heapq.heapify(self._floors)

    def earliest(self, landed_s: float, now_s: float) -> tuple[DecodeBacklog, float] | None:
        """The instance with the earliest slot for KV that lands then, and the instant of the slot;
        None when none takes requests. Ties go to the fewest requests, then the lowest index."""
        first = self._least()
        if first is None:
            return None
        if len(first) < self._max_batch:
            return first, landed_s
        slot_s = first.slot_at_s(landed_s)
        if slot_s <= landed_s:
            return first, slot_s  # none is earlier, and none has fewer
        return self._search(landed_s, now_s)

    def _least(self) -> DecodeBacklog | None:
        fewest, members = self._fewest, self._members
        while fewest:
            known, index, backlog = fewest[0]
            if members.get(index) is not backlog or known != backlog.known_len:
                heapq.heappop(fewest)
                continue
            count = len(backlog)
            if count == known:
                return backlog
            backlog.known_len = count
            heapq.heapreplace(fewest, (count, index, backlog))
        return None

    def _search(self, landed_s: float, now_s: float) -> tuple[DecodeBacklog, float]:
        """By the instants before which none is granted, as far as one could still be earlier."""
        best: tuple[float, int, int, DecodeBacklog] | None = None
        floors, members = self._floors, self._members
        seen: dict[int, _Floor] = {}
        while floors and (best is None or floors[0][0] <= best[0]):
            floor_s, index, backlog = heapq.heappop(floors)
            stale = members.get(index) is not backlog or floor_s != backlog.floor_s
            if stale or index in seen:
                continue
            slot_s, backlog.floor_s = backlog.slot_since_s(landed_s, now_s)
            seen[index] = (backlog.floor_s, index, backlog)
            key = (slot_s, len(backlog), index, backlog)
            if best is None or key[:3] < best[:3]:
                best = key
        for entry in seen.values():
            heapq.heappush(floors, entry)
        assert best is not None, "an instance is in service and has no floor"
        return best[3], best[0]


def earliest_slot(
    backlogs: Sequence[DecodeBacklog], landed_s: float
) -> tuple[DecodeBacklog, float] | None:
    """What ``SlotOrder.earliest`` finds, by looking at every instance."""
    best: tuple[DecodeBacklog, float] | None = None
    for backlog in backlogs:
        if not backlog.in_service:
            continue
        slot_s = backlog.slot_at_s(landed_s)
        if best is None or slot_s < best[1] or (slot_s == best[1] and len(backlog) < len(best[0])):
            best = backlog, slot_s
    return best
