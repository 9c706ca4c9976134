"""Bounds on what peers can make a receiver hold; times are wall seconds."""

from dataclasses import dataclass

from harness.core import TransportError
from harness.transport.frames import MAX_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """``max_held_rooms`` and ``hold_s`` bound the rooms that nobody has expected yet; ``resume_s``
    is how long a sender may be without any connection before its rooms fail."""

    max_buffer_bytes: int = 2**30
    max_rooms: int = 4096
    max_held_rooms: int = 1024
    hold_s: float = 30.0
    resume_s: float = 5.0
    auth_timeout_s: float = 5.0
    max_connections: int = 1024
    max_pending_connections: int = 256
    max_payload_bytes: int = MAX_PAYLOAD_BYTES

    def __post_init__(self) -> None:
        if not 1 <= self.max_payload_bytes <= MAX_PAYLOAD_BYTES:
            raise TransportError(
                f"max_payload_bytes is {self.max_payload_bytes}; the wire allows 1 to "
                f"{MAX_PAYLOAD_BYTES}"
            )
        if self.max_buffer_bytes < 1:
            raise TransportError(f"max_buffer_bytes is {self.max_buffer_bytes}; give at least 1")
