"""What each instance still has to do, in seconds, as far as events have told.

``PrefillBacklog`` models one prefill instance: one request at a time, first come first served,
service times known from the profile. Its horizon is the instant at which it would be free. The
running request is either assumed to have started when the previous one ended, or known to have,
once ``started`` says so; each report replaces the assumption, so an error lasts one request.

``DecodeBacklog`` models one decode instance: ``max_batch`` slots granted in the order in which KV
lands. A newcomer gets its slot when all but max_batch - 1 of those ahead of it are released: at the
max_batch-th latest of their releases, or at once when that lies before its landing.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Any, Protocol

from harness.core import Instance


class Free(Protocol):
    """Finds the instance that is free first (``harness.scheduling.order``)."""

    def enter(self, backlog: "PrefillBacklog", /) -> None: ...


class Slots(Protocol):
    """Finds the instance with the earliest slot (``harness.scheduling.order``)."""

    def enter(self, backlog: "DecodeBacklog", /) -> None: ...
    def lower(self, backlog: "DecodeBacklog", /) -> None: ...


class PrefillBacklog:
    """Remaining work of one prefill instance (seconds)."""

    __slots__ = (
        "_end_s",
        "_reported",
        "_running",
        "_running_service_s",
        "_waiting",
        "_waiting_s",
        "draining",
        "entry",
        "held",
        "index",
        "instance",
        "last_given",
        "order",
        "up",
    )

    def __init__(self, instance: Instance, index: int) -> None:
        self.instance = instance
        self.index = index
        self.up = True
        #: It is to change its role: nothing new goes here.
        self.draining = False
        #: Requests whose KV has not left yet: waiting, running, or being sent.
        self.held = 0
        #: Number of the last request that was sent here, counted over all instances.
        self.last_given = 0
        #: Its cluster's order, to be told of every change, and the entry that it has there.
        self.order: Free | None = None
        self.entry: tuple[Any, ...] | None = None
        self._running: str | None = None
        self._running_service_s = 0.0
        self._end_s = 0.0
        self._reported = False
        self._waiting: OrderedDict[str, float] = OrderedDict()
        self._waiting_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    @property
    def is_idle(self) -> bool:
        return self._running is None

    @property
    def in_service(self) -> bool:
        """Whether it takes new requests."""
        return self.up and not self.draining

    @property
    def is_empty(self) -> bool:
        """Whether its role may be changed."""
        return not self.held

    def free_at_s(self, now_s: float) -> float:
        """When the work assigned so far ends; ``now_s`` if there is none."""
        if self._running is None:
            return now_s
        # A running request past its expected end holds the rest back until its end is reported.
        end_s = self._end_s
        return (end_s if end_s > now_s else now_s) + self._waiting_s

    def add(self, rid: str, service_s: float, ready_s: float) -> None:
        """Queue a request that reaches the instance at ``ready_s``."""
        if self._running is None:
            self._run(rid, service_s, ready_s, reported=False)
        else:
            self._waiting[rid] = service_s
            self._waiting_s += service_s

    def started(self, rid: str, now_s: float) -> bool:
        """The instance began ``rid``, so it is not running anything else. True where it may be free
        earlier than was thought."""
        if rid == self._running:
            end_s = now_s + self._running_service_s
            is_earlier = end_s < self._end_s
            self._end_s, self._reported = end_s, True
            return is_earlier
        if rid not in self._waiting:
            return False
        service_s = self._take(rid)
        if self._running is not None and not self._reported:
            # Only assumed to have started: it was overtaken and still waits, ahead of the rest.
            self._waiting[self._running] = self._running_service_s
            self._waiting.move_to_end(self._running, last=False)
            self._waiting_s += self._running_service_s
        self._run(rid, service_s, now_s, reported=True)
        return True

    def remove(self, rid: str, now_s: float) -> None:
        """``rid`` is prefilled or gone; the next one in line is assumed to start now."""
        if rid != self._running:
            if rid in self._waiting:
                self._take(rid)
            return
        self._running = None
        if self._waiting:
            head = next(iter(self._waiting))
            self._run(head, self._take(head), now_s, reported=False)

    def _run(self, rid: str, service_s: float, since_s: float, *, reported: bool) -> None:
        self._running, self._running_service_s = rid, service_s
        self._end_s, self._reported = since_s + service_s, reported

    def _take(self, rid: str) -> float:
        service_s = self._waiting.pop(rid)
        # Reset at empty, so that rounding does not build up over millions of requests.
        self._waiting_s = self._waiting_s - service_s if self._waiting else 0.0
        return service_s


#: (release_s, landed_s, rid, hold_s): sorted by release; ``rid`` makes it unique.
_Slot = tuple[float, float, str, float]


class DecodeBacklog:
    """Expected occupancy of one decode instance's slots.

    Releases are kept in order only while there are ``max_batch`` requests or more: with fewer the
    next one gets its slot at once, whenever the others end.
    """

    __slots__ = (
        "_by_release",
        "_slots",
        "draining",
        "floor_s",
        "index",
        "instance",
        "known_len",
        "max_batch",
        "order",
        "step_s",
        "up",
    )

    def __init__(self, instance: Instance, index: int, max_batch: int, step_s: float = 0.0) -> None:
        self.instance = instance
        self.index = index
        self.max_batch = max_batch
        #: What one step takes, to who asks how long a slot is held.
        self.step_s = step_s
        self.up = True
        #: It is to change its role: nothing new goes here.
        self.draining = False
        #: Its cluster's order, what that knows of its length, and before when no slot is granted.
        self.order: Slots | None = None
        self.known_len = 0
        self.floor_s = -math.inf
        self._slots: dict[str, _Slot] = {}
        self._by_release: list[_Slot] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def in_service(self) -> bool:
        """Whether it takes new requests."""
        return self.up and not self.draining

    @property
    def is_empty(self) -> bool:
        """Whether its role may be changed."""
        return not self._slots

    def busy_slots(self, now_s: float) -> int:
        """Slots that are taken now: by the requests whose KV has landed, as far as is expected."""
        landed = sum(slot[1] <= now_s for slot in self._slots.values())
        return min(landed, self.max_batch)

    def slot_at_s(self, landed_s: float) -> float:
        """When a request whose KV lands at ``landed_s`` would be granted a slot."""
        return self.slot_since_s(landed_s, landed_s)[0]

    def slot_since_s(self, landed_s: float, now_s: float) -> tuple[float, float]:
        """``slot_at_s``, and before when nobody's slot is granted whose KV lands after ``now_s``.

        From the last release back: only what is released after ``landed_s`` is looked at, however
        many requests are still queued for prefill.
        """
        max_batch = self.max_batch
        if len(self._slots) < max_batch:
            return landed_s, -math.inf
        taken, taken_now, slot_s = 0, 0, landed_s
        for release_s, lands_s, _, _ in reversed(self._releases()):
            if release_s <= landed_s:
                break
            if lands_s <= landed_s:
                taken += 1
                if taken == max_batch:
                    slot_s = release_s
            if lands_s <= now_s:
                taken_now += 1
                if taken_now == max_batch:
                    return slot_s, release_s
        return slot_s, -math.inf

    def _releases(self) -> list[_Slot]:
        if self._by_release is None:
            self._by_release = sorted(self._slots.values())
        return self._by_release

    def add(self, rid: str, landed_s: float, hold_s: float, release_s: float) -> None:
        """``hold_s``: decoding time. ``landed_s`` orders the queue for slots."""
        assert rid not in self._slots, f"request {rid} is here already"
        self._put(rid, (release_s, landed_s, rid, hold_s))

    def landed(self, rid: str, now_s: float) -> None:
        """The KV is there, so decoding ends no earlier than ``hold_s`` from now."""
        slot = self._slots.get(rid)
        if slot is not None:
            release_s, _, _, hold_s = slot
            least_s = now_s + hold_s
            if self._by_release is not None:
                self._drop(slot)
            self._put(rid, (release_s if release_s > least_s else least_s, now_s, rid, hold_s))

    def admitted(self, rid: str, now_s: float) -> None:
        """Decoding begins now."""
        slot = self._slots.get(rid)
        if slot is not None:
            _, landed_s, _, hold_s = slot
            if self._by_release is not None:
                self._drop(slot)
            landed_s = landed_s if landed_s < now_s else now_s
            self._put(rid, (now_s + hold_s, landed_s, rid, hold_s))
            if slot[0] >= self.floor_s > now_s + hold_s and self.order is not None:
                self.order.lower(self)

    def remove(self, rid: str) -> None:
        slot = self._slots.pop(rid, None)
        if slot is None:
            return
        if self._by_release is not None:
            self._drop(slot)
            if len(self._slots) < self.max_batch:
                self._by_release = None
        if self.order is None:
            return
        if slot[0] >= self.floor_s > -math.inf:
            self.order.lower(self)
        if len(self._slots) < self.known_len:
            self.order.enter(self)

    def _put(self, rid: str, slot: _Slot) -> None:
        self._slots[rid] = slot
        if self._by_release is not None:
            insort(self._by_release, slot)

    def _drop(self, slot: _Slot) -> None:
        assert self._by_release is not None
        del self._by_release[bisect_left(self._by_release, slot)]
