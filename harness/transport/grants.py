"""The receive memory, granted to whole transfers.

Offers that do not fit wait until enough is given back. The smallest goes first, so that short
transfers do not stand behind long ones; but whoever has waited longest is passed a bounded number
of times, and then goes before all others. What is granted covers the whole transfer, so one that
has been accepted never waits for another, and memory is bounded by what is accepted. Not
thread-safe: its owner holds a lock.
"""

import mmap
import time
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from harness.transport.arena import Arena
from harness.transport.inbound import Inbound
from harness.transport.limits import ReceiverLimits
from harness.transport.rooms import Landing, Received

#: Offers that may pass the one that has waited longest.
_MAX_PASSED = 64


@dataclass(slots=True, eq=False)
class Room:
    """``state`` runs from waiting to receiving, landed and delivered."""

    landing: Landing
    control: Inbound
    attempt: int = 0
    state: str = "waiting"
    passed: int = 0
    received: Received | None = None


class Grants:
    """Methods return the rooms that became ``receiving``, in the order of their grants."""

    def __init__(self, limits: ReceiverLimits) -> None:
        self._max_bytes = limits.max_buffer_bytes
        # A block is rounded up to pages, which must not cost a room what it was promised.
        self._arena = Arena(limits.max_buffer_bytes + limits.max_rooms * mmap.PAGESIZE)
        self._waiting: dict[Room, None] = {}  # oldest first
        self._by_size: list[tuple[int, int, Room]] = []  # a heap; some wait no more
        self._numbers = count()
        self.granted_bytes = 0

    def ask(self, room: Room) -> list[Room]:
        """Grant memory to the room, or let it wait."""
        self._waiting[room] = None
        if len(self._by_size) > 2 * len(self._waiting) + 64:
            self._by_size = [entry for entry in self._by_size if entry[2] in self._waiting]
            heapify(self._by_size)
        heappush(self._by_size, (room.landing.total_bytes, next(self._numbers), room))
        return self._admit()

    def withdraw(self, room: Room) -> list[Room]:
        """The room is over: it waits no more, or its memory is given back.

        While a frame is under way to it the kernel may still write there; then ``give_back`` must
        follow when the last claim has ended, which its owner is asked for.
        """
        room.landing.closed = True
        if room.state == "waiting":
            del self._waiting[room]
            return self._admit()
        self.granted_bytes -= room.landing.total_bytes
        return self.give_back(room.landing)

    def give_back(self, landing: Landing) -> list[Room]:
        """The memory of a closed landing, unless it has claims."""
        if landing.claims:
            return []
        assert landing.block is not None
        self._arena.give_back(landing.block)
        landing.block = None
        return self._admit()

    def _admit(self) -> list[Room]:
        admitted = []
        while self._waiting:
            oldest = next(iter(self._waiting))
            room = oldest if oldest.passed >= _MAX_PASSED else self._smallest()
            if not self._reserve(room.landing):
                break
            oldest.passed += room is not oldest
            del self._waiting[room]
            room.state = "receiving"
            admitted.append(room)
        return admitted

    def _smallest(self) -> Room:
        while self._by_size[0][2] not in self._waiting:
            heappop(self._by_size)
        return self._by_size[0][2]

    def _reserve(self, landing: Landing) -> bool:
        if self.granted_bytes + landing.total_bytes > self._max_bytes:
            return False
        landing.block = self._arena.take(landing.total_bytes)
        if landing.block is None:
            return False
        landing.last_byte_mono_ns = time.monotonic_ns()
        self.granted_bytes += landing.total_bytes
        return True
