"""Rooms that are over and remembered, so that late frames are known and late users are told.

The oldest are forgotten. Not thread-safe: its owner holds a lock.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from harness.transport.frames import Ack, Code, Error

_REMEMBERED_ROOMS = 4096
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Acknowledged:
    session: bytes
    transfer: int
    payload_bytes: int


class Ended:
    """Of each room how its last transfer ended."""

    def __init__(self) -> None:
        self._failed: OrderedDict[int, str] = OrderedDict()
        self._acknowledged: OrderedDict[int, _Acknowledged] = OrderedDict()

    def fail(self, room: int, problem: str) -> None:
        _remember(self._failed, room, problem)

    def acknowledge(self, room: int, session: bytes, transfer: int, payload_bytes: int) -> None:
        _remember(self._acknowledged, room, _Acknowledged(session, transfer, payload_bytes))

    def begin(self, room: int) -> None:
        """The room is used again."""
        self._acknowledged.pop(room, None)

    def failure(self, room: int) -> str | None:
        """Why the room failed; it is not used again as long as that is known."""
        return self._failed.get(room)

    def acknowledgement(self, session: bytes | None, room: int, transfer: int) -> Ack | None:
        """What was said at the end of this transfer."""
        known = self._acknowledged.get(room)
        if known is None or (known.session, known.transfer) != (session, transfer):
            return None
        return Ack(room, known.payload_bytes, transfer)

    def answer(self, session: bytes | None, room: int, transfer: int) -> Ack | Error:
        """To a frame of a room that is not open: late, or the sender's fault."""
        ack = self.acknowledgement(session, room, transfer)
        if ack is not None:
            return ack
        if room in self._failed:
            return Error(room, Code.ABORTED, self._failed[room], transfer)
        return Error(room, Code.UNKNOWN_ROOM, "no transfer of yours has this room", transfer)


def _remember(memory: OrderedDict[int, Value], room: int, value: Value) -> None:
    memory[room] = value
    memory.move_to_end(room)
    if len(memory) > _REMEMBERED_ROOMS:
        memory.popitem(last=False)
