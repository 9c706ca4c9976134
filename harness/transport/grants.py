"""The receive memory, granted to whole transfers, first come first served.

An offer that does not fit waits until enough is given back; a smaller one behind it may pass a
bounded number of times. What is granted covers the whole transfer, so one that has been accepted
never waits for another, and memory is bounded by what is accepted. Not thread-safe: its owner holds
a lock.
"""

import mmap
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from harness.transport.arena import Arena
from harness.transport.inbound import Inbound
from harness.transport.limits import ReceiverLimits
from harness.transport.rooms import Landing, Received

#: Offers that may pass the first one in the row while it waits, and how far is looked for them.
_MAX_PASSED = 64
_LOOK_AHEAD = 32


@dataclass(slots=True, eq=False)
class Room:
    """``state`` runs from waiting to receiving, landed and delivered."""

    landing: Landing
    control: Inbound
    state: str = "waiting"
    passed: int = 0
    received: Received | None = None


class Grants:
    """Methods return the rooms that became ``receiving``, in the order of their grants."""

    def __init__(self, limits: ReceiverLimits) -> None:
        self._max_bytes = limits.max_buffer_bytes
        # A block is rounded up to pages, which must not cost a room what it was promised.
        self._arena = Arena(limits.max_buffer_bytes + limits.max_rooms * mmap.PAGESIZE)
        self._waiting: deque[Room] = deque()
        self.granted_bytes = 0

    def ask(self, room: Room) -> list[Room]:
        """Grant memory to the room, or let it wait."""
        self._waiting.append(room)
        return self._admit()

    def withdraw(self, room: Room) -> list[Room]:
        """The room is over: it waits no more, or its memory is given back.

        While a frame is under way to it the kernel may still write there; then ``give_back`` must
        follow when the last claim has ended.
        """
        room.landing.closed = True
        if room.state == "waiting":
            self._waiting.remove(room)
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
        for room in list(islice(self._waiting, _LOOK_AHEAD)):
            first = self._waiting[0]
            if room is not first and first.passed >= _MAX_PASSED:
                break
            if self._reserve(room.landing):
                first.passed += room is not first
                self._waiting.remove(room)
                room.state = "receiving"
                admitted.append(room)
        return admitted

    def _reserve(self, landing: Landing) -> bool:
        if self.granted_bytes + landing.total_bytes > self._max_bytes:
            return False
        landing.block = self._arena.take(landing.total_bytes)
        if landing.block is None:
            return False
        landing.last_byte_mono_ns = time.monotonic_ns()
        self.granted_bytes += landing.total_bytes
        return True
