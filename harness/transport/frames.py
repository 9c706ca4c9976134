"""What the two ends of a KV transfer say to each other: the frames as records, and their bounds.

``wire`` turns them into bytes and back, and says who sends which.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from harness.core import TransportError

VERSION = 3
MAGIC = 0x4B56
NONCE_BYTES = PROOF_BYTES = 32
SESSION_BYTES = 16
#: Not a room: an error with it concerns the whole connection.
NO_ROOM = 2**64 - 1
MAX_ROOM = 2**63 - 1
MAX_LAYERS = 4096
MAX_TRANSFER_BYTES = 2**44
MAX_PAYLOAD_BYTES = 4 * 2**20
MAX_META_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 1024
MAX_PIECES = 4096
ROLE_SENDER = 1
REPORT_LAYERS = 1
#: What the payload is made of; the transfer itself treats it as bytes.
DTYPES = ("bytes", "bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "int8")

MAX_NUMBER = 2**32 - 1

#: Room, transfer, layer, offset.
_PLACE = struct.Struct("!QIIQ")


class WireError(TransportError):
    """Bytes that are no frame of this protocol; the connection they came from cannot be used on."""


class TransferError(TransportError):
    """One transfer or connection failed; names the room, the peer and the phase."""

    def __init__(self, room: int | None, peer: str, phase: str, problem: str) -> None:
        subject = "KV transfer" if room is None else f"KV transfer of room {room}"
        super().__init__(f"{subject} with {peer}, phase {phase}: {problem}")
        self.room, self.peer, self.phase, self.problem = room, peer, phase, problem


class Kind(IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    OFFER = 4
    CREDIT = 5
    DATA = 6
    LAYER_DONE = 7
    DONE = 8
    ACK = 9
    ERROR = 10
    RESUME = 11
    PROGRESS = 12
    ARRIVED = 13


class Code(IntEnum):
    """Why an Error was sent."""

    PROTOCOL = 1
    UNAUTHENTICATED = 2
    UNKNOWN_ROOM = 3
    DUPLICATE_ROOM = 4
    NO_BUFFER = 5
    CHECKSUM = 6
    DEADLINE = 7
    ABORTED = 8
    CLOSED = 9
    UNSUPPORTED = 10
    PEER_LOST = 11


@dataclass(frozen=True, slots=True)
class Challenge:
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    role: int
    session: bytes
    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    proof: bytes
    max_payload_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """``layer_bytes`` are the bytes to be sent; ``prefix_tokens`` the destination has already.

    ``flags`` may be REPORT_LAYERS: the receiver says LayerDone of every layer that holds bytes.
    ``transfer`` is another one each time that the session offers the room, and ``attempt`` counts
    the connections that this transfer has had before.
    """

    room: int
    layer_bytes: tuple[int, ...]
    meta: bytes = b""
    dtype: str = "bytes"
    prefix_tokens: int = 0
    flags: int = 0
    transfer: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Credit:
    room: int
    limit_bytes: int
    transfer: int = 0


@dataclass(frozen=True, slots=True)
class DataHead:
    """What precedes a payload of ``length_bytes``, which begins in ``layer`` and may go on in those
    after it; ``checksum`` is None where it was left out."""

    room: int
    layer: int
    offset: int
    length_bytes: int
    checksum: int | None
    transfer: int = 0

    def intact(self, payload: memoryview) -> bool:
        """Whether the checksum holds; true when the sender left it out."""
        return self.checksum is None or self.checksum == checksum_of(
            self.room, self.layer, self.offset, payload, self.transfer
        )


@dataclass(frozen=True, slots=True)
class LayerDone:
    room: int
    layer: int
    payload_bytes: int
    transfer: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    room: int
    payload_bytes: int
    meta: bytes = b""
    transfer: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    room: int
    payload_bytes: int
    transfer: int = 0


@dataclass(frozen=True, slots=True)
class Error:
    room: int
    code: Code
    message: str
    transfer: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    """The room goes on over this connection; the receiver answers with its Credit and what has
    Arrived, or with its Ack."""

    room: int
    transfer: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """``frames`` data frames have been taken from this connection since it opened."""

    frames: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Bytes [start, end) of all layers, one after another, that need not be sent again.

    Not all of them, where they are in more than MAX_PIECES pieces.
    """

    room: int
    pieces: tuple[tuple[int, int], ...]
    transfer: int = 0


Control = (
    Challenge
    | Hello
    | Welcome
    | Offer
    | Credit
    | LayerDone
    | Done
    | Ack
    | Error
    | Resume
    | Progress
    | Arrived
)


def checksum_of(
    room: int, layer: int, offset: int, payload: memoryview, transfer: int = 0, *more: memoryview
) -> int:
    """xxh3-64 of the payload, seeded with the xxh3-64 of where it belongs.

    ``more`` is the rest of a payload that lies in several buffers.
    """
    seed = xxhash.xxh3_64_intdigest(_PLACE.pack(room, transfer, layer, offset))
    if not more:
        return xxhash.xxh3_64_intdigest(payload, seed)
    digest = xxhash.xxh3_64(payload, seed)
    for view in more:
        digest.update(view)
    return digest.intdigest()
