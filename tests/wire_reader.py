"""For the transport's tests: an Intake that lands every payload, and frames from it."""

from collections.abc import Iterator
from dataclasses import dataclass

from harness.transport.frames import Control, DataHead
from harness.transport.intake import DataEnd, Intake


@dataclass(frozen=True)
class Data:
    """A data frame that arrived whole."""

    room: int
    layer: int
    offset: int
    payload: bytes
    checksum: int | None
    transfer: int = 0

    def intact(self) -> bool:
        head = DataHead(
            self.room, self.layer, self.offset, len(self.payload), self.checksum, self.transfer
        )
        return head.intact(memoryview(self.payload))


class WireReader:
    """``feed`` bytes, get the frames that they complete."""

    def __init__(self, stage_bytes: int = 1024) -> None:
        self.intake = Intake(stage_bytes)
        self._landing = bytearray()

    def unlock(self, max_payload_bytes: int) -> None:
        self.intake.unlock(max_payload_bytes)

    def feed(self, data: bytes | bytearray) -> list[Control | Data]:
        return list(self.frames(data))

    def frames(self, data: bytes | bytearray) -> Iterator[Control | Data]:
        """As ``recvmsg_into`` would: the buffers are filled in turn."""
        left = memoryview(data)
        while True:
            taken = 0
            for buffer in self.intake.buffers():
                part = left[taken : taken + len(buffer)]
                buffer[: len(part)] = part
                taken += len(part)
            left = left[taken:]
            yield from self._received(taken)
            if not left:
                return

    def _received(self, nbytes: int) -> Iterator[Control | Data]:
        for event in self.intake.received(nbytes):
            match event:
                case DataHead():
                    self._landing = bytearray(event.length_bytes)
                    self.intake.place(memoryview(self._landing))
                case DataEnd(head, placed):
                    assert placed
                    payload = bytes(self._landing)
                    yield Data(
                        *(head.room, head.layer, head.offset, payload, head.checksum),
                        head.transfer,
                    )
                case _:
                    yield event
