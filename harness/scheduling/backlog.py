"""What each instance still has to do, in seconds, as far as events have told.

``PrefillBacklog`` models one prefill instance: one request at a time, first come first served,
service times known from the profile. Its horizon is the instant at which it would be free. The
running request is either assumed to have started when the previous one ended, or known to have,
once ``started`` says so; each report replaces the assumption, so an error lasts one request.

``DecodeBacklog`` models one decode instance: ``max_batch`` slots granted in the order in which KV
lands. A newcomer gets its slot when all but max_batch - 1 of those ahead of it are released: at the
max_batch-th latest of their releases, or at once when that lies before its landing.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import NamedTuple

from harness.core import Instance


class PrefillBacklog:
    """Remaining work of one prefill instance (seconds)."""

    __slots__ = (
        "_reported",
        "_running",
        "_running_service_s",
        "_since_s",
        "_waiting",
        "_waiting_s",
        "draining",
        "held",
        "index",
        "instance",
        "last_given",
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
        self._running: str | None = None
        self._running_service_s = 0.0
        self._since_s = 0.0
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
        return max(now_s, self._since_s + self._running_service_s) + self._waiting_s

    def add(self, rid: str, service_s: float, ready_s: float) -> None:
        """Queue a request that reaches the instance at ``ready_s``."""
        if self._running is None:
            self._run(rid, service_s, ready_s, reported=False)
        else:
            self._waiting[rid] = service_s
            self._waiting_s += service_s

    def started(self, rid: str, now_s: float) -> None:
        """The instance began ``rid``, so it is not running anything else."""
        if rid == self._running:
            self._since_s, self._reported = now_s, True
            return
        if rid not in self._waiting:
            return
        service_s = self._take(rid)
        if self._running is not None and not self._reported:
            # Only assumed to have started: it was overtaken and still waits, ahead of the rest.
            self._waiting[self._running] = self._running_service_s
            self._waiting.move_to_end(self._running, last=False)
            self._waiting_s += self._running_service_s
        self._run(rid, service_s, now_s, reported=True)

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
        self._since_s, self._reported = since_s, reported

    def _take(self, rid: str) -> float:
        service_s = self._waiting.pop(rid)
        # Reset at empty, so that rounding does not build up over millions of requests.
        self._waiting_s = self._waiting_s - service_s if self._waiting else 0.0
        return service_s


class _Slot(NamedTuple):
    """Sorted by release; ``rid`` makes it unique."""

    release_s: float
    landed_s: float
    rid: str
    hold_s: float


class DecodeBacklog:
    """Expected occupancy of one decode instance's slots."""

    __slots__ = ("_by_release", "_slots", "draining", "index", "instance", "max_batch", "up")

    def __init__(self, instance: Instance, index: int, max_batch: int) -> None:
        self.instance = instance
        self.index = index
        self.max_batch = max_batch
        self.up = True
        #: It is to change its role: nothing new goes here.
        self.draining = False
        self._slots: dict[str, _Slot] = {}
        self._by_release: list[_Slot] = []

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
        landed = sum(slot.landed_s <= now_s for slot in self._by_release)
        return min(landed, self.max_batch)

    def slot_at_s(self, landed_s: float) -> float:
        """When a request whose KV lands at ``landed_s`` would be granted a slot.

        From the last release back: only what is released after ``landed_s`` is looked at, however
        many requests are still queued for prefill.
        """
        if len(self._slots) < self.max_batch:
            return landed_s
        taken = 0
        for slot in reversed(self._by_release):
            if slot.release_s <= landed_s:
                break
            taken += slot.landed_s <= landed_s
            if taken == self.max_batch:
                return slot.release_s
        return landed_s

    def add(self, rid: str, landed_s: float, hold_s: float, release_s: float) -> None:
        """``hold_s``: decoding time. ``landed_s`` orders the queue for slots."""
        assert rid not in self._slots, f"request {rid} is here already"
        self._put(_Slot(release_s, landed_s, rid, hold_s))

    def landed(self, rid: str, now_s: float) -> None:
        """The KV is there, so decoding ends no earlier than ``hold_s`` from now."""
        slot = self._take(rid)
        if slot is not None:
            release_s = max(slot.release_s, now_s + slot.hold_s)
            self._put(slot._replace(release_s=release_s, landed_s=now_s))

    def admitted(self, rid: str, now_s: float) -> None:
        """Decoding begins now."""
        slot = self._take(rid)
        if slot is not None:
            landed_s = min(slot.landed_s, now_s)
            self._put(slot._replace(release_s=now_s + slot.hold_s, landed_s=landed_s))

    def remove(self, rid: str) -> None:
        self._take(rid)

    def _put(self, slot: _Slot) -> None:
        self._slots[slot.rid] = slot
        insort(self._by_release, slot)

    def _take(self, rid: str) -> _Slot | None:
        slot = self._slots.pop(rid, None)
        if slot is not None:
            del self._by_release[bisect_left(self._by_release, slot)]
        return slot
