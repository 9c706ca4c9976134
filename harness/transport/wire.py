"""Frames of the KV transfer protocol, version 3. Sans-I/O: bytes in, frames out.

Every frame is an 8-byte header and a body, all integers big-endian:

    magic u16 | version u8 | kind u8 | body length u32

    Challenge   receiver -> sender   nonce[32]
    Hello       sender -> receiver   role u8, session[16], nonce[32], proof[32]
    Welcome     receiver -> sender   proof[32], largest data payload u32
    Offer       sender -> receiver   room u64, transfer u32, attempt u32, flags u32, layers u32,
                                     dtype u8, prefix tokens u64, meta length u32,
                                     layers x u64 bytes, meta
    Credit      receiver -> sender   room u64, transfer u32, limit u64: payload bytes that may be
                                     sent since the start; the first one accepts the offer
    Data        sender -> receiver   room u64, transfer u32, layer u16, flags u16, offset u64,
                                     checksum u64, payload
    LayerDone   receiver -> sender   room u64, transfer u32, layer u32, bytes u64: it is all there
    Done        sender -> receiver   room u64, transfer u32, bytes u64, meta: all was handed over
    Ack         receiver -> sender   room u64, transfer u32, bytes u64: everything has arrived
    Error       either way           room u64 (2^64 - 1: the connection), transfer u32, code u16,
                                     UTF-8 text
    Resume      sender -> receiver   room u64, transfer u32, attempt u32: the room goes on here
    Progress    receiver -> sender   frames u64: data frames taken from this connection so far
    Arrived     receiver -> sender   room u64, transfer u32, pieces x (start u64, end u64)

A data frame's checksum is the xxh3-64 of its payload, seeded with the xxh3-64 of (room u64,
transfer u32, layer u32, offset u64), so bytes that come with the wrong place fail it too. A payload
may go on in the layers after the one that it begins in. Data of one transfer may use any connection
of the session once its Credit has arrived; Offer, Done and the answers use the connection of the
Offer. When a connection is lost, the data frames that no Progress has counted are sent again over
others, with the same bounds, but for those that Arrived tells of: a frame that comes twice is
dropped. A Resume asks for it. A room whose own connection is lost goes on with Resume (or the same
Offer again) over another one; Done may be repeated too.

What was written on a lost connection may still arrive, at any time. ``transfer`` keeps it out of
the next use of the room, and ``attempt``, which grows with each move to another connection, keeps
an old Offer or Resume from taking the answers back to a dead one.
"""

import struct

from harness.transport.frames import (
    DTYPES,
    MAGIC,
    MAX_LAYERS,
    MAX_MESSAGE_BYTES,
    MAX_META_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PIECES,
    MAX_ROOM,
    MAX_TRANSFER_BYTES,
    NO_ROOM,
    NONCE_BYTES,
    VERSION,
    Ack,
    Arrived,
    Challenge,
    Code,
    Control,
    Credit,
    DataHead,
    Done,
    Error,
    Hello,
    Kind,
    LayerDone,
    Offer,
    Progress,
    Resume,
    Welcome,
    WireError,
    checksum_of,
)

_FLAG_CHECKSUM = 1

HEADER = struct.Struct("!HBBI")
_HELLO = struct.Struct("!B16s32s32s")
_WELCOME = struct.Struct("!32sI")
_OFFER = struct.Struct("!QIIIIBQI")
_COUNTED = struct.Struct("!QIQ")
DATA_HEAD = struct.Struct("!QIHHQQ")
_LAYER_DONE = struct.Struct("!QIIQ")
_ERROR = struct.Struct("!QIH")
_RESUME = struct.Struct("!QII")
_PROGRESS = struct.Struct("!Q")
_ARRIVED = struct.Struct("!QI")
_PIECE = struct.Struct("!QQ")
_HEADED_DATA = struct.Struct("!HBBIQIHHQQ")

#: Least and greatest body length of each kind, checked before the body is awaited.
_BODY_BOUNDS: dict[int, tuple[int, int]] = {
    Kind.CHALLENGE: (NONCE_BYTES, NONCE_BYTES),
    Kind.HELLO: (_HELLO.size, _HELLO.size),
    Kind.WELCOME: (_WELCOME.size, _WELCOME.size),
    Kind.OFFER: (_OFFER.size, _OFFER.size + 8 * MAX_LAYERS + MAX_META_BYTES),
    Kind.CREDIT: (_COUNTED.size, _COUNTED.size),
    Kind.DATA: (DATA_HEAD.size + 1, DATA_HEAD.size + MAX_PAYLOAD_BYTES),
    Kind.LAYER_DONE: (_LAYER_DONE.size, _LAYER_DONE.size),
    Kind.DONE: (_COUNTED.size, _COUNTED.size + MAX_META_BYTES),
    Kind.ACK: (_COUNTED.size, _COUNTED.size),
    Kind.ERROR: (_ERROR.size, _ERROR.size + MAX_MESSAGE_BYTES),
    Kind.RESUME: (_RESUME.size, _RESUME.size),
    Kind.PROGRESS: (_PROGRESS.size, _PROGRESS.size),
    Kind.ARRIVED: (_ARRIVED.size, _ARRIVED.size + MAX_PIECES * _PIECE.size),
}
_HANDSHAKE_KINDS = frozenset({Kind.CHALLENGE, Kind.HELLO, Kind.WELCOME, Kind.ERROR})


def encode_data_head(
    room: int,
    layer: int,
    offset: int,
    payload: memoryview,
    checksum: bool,
    transfer: int = 0,
    *more: memoryview,
) -> bytes:
    """Header and fixed fields of a data frame (40 bytes); the payload follows it on the wire.

    ``more`` is the rest of a payload that lies in several buffers.
    """
    payload_bytes = len(payload) + sum(map(len, more))
    assert 0 < payload_bytes <= MAX_PAYLOAD_BYTES, payload_bytes
    digest = checksum_of(room, layer, offset, payload, transfer, *more) if checksum else 0
    flags = _FLAG_CHECKSUM if checksum else 0
    length = DATA_HEAD.size + payload_bytes
    return _HEADED_DATA.pack(
        MAGIC, VERSION, Kind.DATA, length, room, transfer, layer, flags, offset, digest
    )


def encode_control(frame: Control) -> bytes:
    """One frame as bytes; WireError when a field is beyond the protocol's bounds."""
    try:
        kind, body = _encode_body(frame)
    except struct.error as error:
        raise WireError(f"{type(frame).__name__} has a field out of range: {error}") from error
    least, most = _BODY_BOUNDS[kind]
    if not least <= len(body) <= most:
        raise WireError(
            f"{type(frame).__name__} would have {len(body)} bytes; the protocol allows "
            f"{least} to {most}"
        )
    parse_body(kind, memoryview(body))  # what this side sends, the other must be able to read
    return HEADER.pack(MAGIC, VERSION, kind, len(body)) + body


def _encode_body(frame: Control) -> tuple[Kind, bytes]:
    match frame:
        case Challenge(nonce):
            return Kind.CHALLENGE, nonce
        case Hello(role, session, nonce, proof):
            return Kind.HELLO, _HELLO.pack(role, session, nonce, proof)
        case Welcome(proof, max_payload_bytes):
            return Kind.WELCOME, _WELCOME.pack(proof, max_payload_bytes)
        case Offer(room, layer_bytes, meta, dtype, prefix_tokens, flags, transfer, attempt):
            if dtype not in DTYPES:
                raise WireError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
            head = _OFFER.pack(
                *(room, transfer, attempt, flags, len(layer_bytes)),
                *(DTYPES.index(dtype), prefix_tokens, len(meta)),
            )
            return Kind.OFFER, head + struct.pack(f"!{len(layer_bytes)}Q", *layer_bytes) + meta
        case Credit(room, limit_bytes, transfer):
            return Kind.CREDIT, _COUNTED.pack(room, transfer, limit_bytes)
        case LayerDone(room, layer, payload_bytes, transfer):
            return Kind.LAYER_DONE, _LAYER_DONE.pack(room, transfer, layer, payload_bytes)
        case Done(room, payload_bytes, meta, transfer):
            return Kind.DONE, _COUNTED.pack(room, transfer, payload_bytes) + meta
        case Ack(room, payload_bytes, transfer):
            return Kind.ACK, _COUNTED.pack(room, transfer, payload_bytes)
        case Error(room, code, message, transfer):
            text = message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore").encode()
            return Kind.ERROR, _ERROR.pack(room, transfer, code) + text
        case Resume(room, transfer, attempt):
            return Kind.RESUME, _RESUME.pack(room, transfer, attempt)
        case Progress(frames):
            return Kind.PROGRESS, _PROGRESS.pack(frames)
        case Arrived(room, pieces, transfer):
            packed = b"".join(_PIECE.pack(*piece) for piece in pieces)
            return Kind.ARRIVED, _ARRIVED.pack(room, transfer) + packed


def parse_body(kind: int, body: memoryview) -> Control:
    """Body to frame, of any kind but DATA; its length is within the bounds of its kind."""
    match kind:
        case Kind.CHALLENGE:
            return Challenge(bytes(body))
        case Kind.HELLO:
            return Hello(*_HELLO.unpack(body))
        case Kind.WELCOME:
            return Welcome(*_WELCOME.unpack(body))
        case Kind.OFFER:
            return _parse_offer(body)
        case Kind.CREDIT:
            room, transfer, limit_bytes = _parse_counted(body)
            return Credit(room, limit_bytes, transfer)
        case Kind.LAYER_DONE:
            room, transfer, layer, payload_bytes = _LAYER_DONE.unpack(body)
            if layer >= MAX_LAYERS or payload_bytes > MAX_TRANSFER_BYTES:
                raise WireError(f"layer {layer} of {payload_bytes} bytes is out of range")
            return LayerDone(_room(room), layer, payload_bytes, transfer)
        case Kind.DONE:
            room, transfer, payload_bytes = _parse_counted(body)
            return Done(room, payload_bytes, bytes(body[_COUNTED.size :]), transfer)
        case Kind.ACK:
            room, transfer, payload_bytes = _parse_counted(body)
            return Ack(room, payload_bytes, transfer)
        case Kind.ERROR:
            return _parse_error(body)
        case Kind.RESUME:
            room, transfer, attempt = _RESUME.unpack(body)
            return Resume(_room(room), transfer, attempt)
        case Kind.ARRIVED:
            return _parse_arrived(body)
        case _:
            return Progress(*_PROGRESS.unpack(body))


def parse_data_head(body: memoryview, length: int) -> DataHead:
    """The fixed fields that begin a data frame's body of ``length`` bytes, payload included."""
    room, transfer, layer, flags, offset, digest = DATA_HEAD.unpack_from(body)
    if flags & ~_FLAG_CHECKSUM:
        raise WireError(f"data frame with unknown flags {flags:#x}")
    payload_bytes = length - DATA_HEAD.size
    if layer >= MAX_LAYERS or offset + payload_bytes > MAX_TRANSFER_BYTES:
        raise WireError(f"data frame for layer {layer} at byte {offset} is out of range")
    checksum = digest if flags else None
    return DataHead(_room(room), layer, offset, payload_bytes, checksum, transfer)


def _room(room: int) -> int:
    if room > MAX_ROOM:
        raise WireError(f"room {room} is beyond {MAX_ROOM}")
    return room


def _parse_counted(body: memoryview) -> tuple[int, int, int]:
    room, transfer, count_bytes = _COUNTED.unpack_from(body)
    if count_bytes > MAX_TRANSFER_BYTES:
        raise WireError(f"{count_bytes} bytes are beyond the bound of {MAX_TRANSFER_BYTES}")
    return _room(room), transfer, count_bytes


def _parse_offer(body: memoryview) -> Offer:
    head = _OFFER.unpack_from(body)
    room, transfer, attempt, flags, layers, dtype, prefix_tokens, meta_bytes = head
    if layers > MAX_LAYERS or meta_bytes > MAX_META_BYTES or dtype >= len(DTYPES):
        raise WireError(
            f"offer of {layers} layers, dtype {dtype}, {meta_bytes} bytes of meta is out of range"
        )
    meta_at = _OFFER.size + 8 * layers
    if len(body) != meta_at + meta_bytes:
        raise WireError(f"offer of {layers} layers has {len(body)} bytes")
    layer_bytes = struct.unpack_from(f"!{layers}Q", body, _OFFER.size)
    if sum(layer_bytes) > MAX_TRANSFER_BYTES:
        raise WireError(f"offer of {sum(layer_bytes)} bytes is beyond {MAX_TRANSFER_BYTES}")
    meta = bytes(body[meta_at:])
    return Offer(
        _room(room), layer_bytes, meta, DTYPES[dtype], prefix_tokens, flags, transfer, attempt
    )


def _parse_arrived(body: memoryview) -> Arrived:
    room, transfer = _ARRIVED.unpack_from(body)
    if (len(body) - _ARRIVED.size) % _PIECE.size:
        raise WireError(f"arrived frame of {len(body)} bytes")
    pieces = tuple(_PIECE.iter_unpack(body[_ARRIVED.size :]))
    if any(not start < end <= MAX_TRANSFER_BYTES for start, end in pieces):
        raise WireError("arrived frame with a piece out of range")
    return Arrived(_room(room), pieces, transfer)


def _parse_error(body: memoryview) -> Error:
    room, transfer, code = _ERROR.unpack_from(body)
    try:
        message = bytes(body[_ERROR.size :]).decode()
        return Error(room if room == NO_ROOM else _room(room), Code(code), message, transfer)
    except ValueError as error:
        raise WireError(f"malformed error frame: {error}") from error


def header_fault(
    magic: int, version: int, kind: int, length: int, max_payload_bytes: int
) -> str | None:
    """What is wrong with a frame's header, if anything; before the handshake ended
    ``max_payload_bytes`` is 0."""
    if magic != MAGIC:
        return f"bytes {magic:#06x} where a frame should begin"
    if version != VERSION:
        return f"wire version {version}; this side speaks version {VERSION}"
    if kind not in _BODY_BOUNDS:
        return f"unknown kind of frame {kind}"
    if not max_payload_bytes and kind not in _HANDSHAKE_KINDS:
        return f"{Kind(kind).name} frame before the handshake ended"
    least, most = _BODY_BOUNDS[kind]
    if kind == Kind.DATA:
        most = min(most, DATA_HEAD.size + max_payload_bytes)
    if least <= length <= most:
        return None
    return f"{Kind(kind).name} frame of {length} bytes; allowed are {least} to {most}"
