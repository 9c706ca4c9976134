"""Frames of the KV transfer protocol, version 1. Sans-I/O: bytes in, frames out.

Every frame is an 8-byte header and a body, all integers big-endian:

    magic u16 | version u8 | kind u8 | body length u32

    Challenge   receiver -> sender   nonce[32]
    Hello       sender -> receiver   role u8, session[16], nonce[32], proof[32]
    Welcome     receiver -> sender   proof[32], largest data payload u32
    Offer       sender -> receiver   room u64, flags u32, layers u32, dtype u8, prefix tokens u64,
                                     meta length u32, layers x u64 bytes, meta
    Credit      receiver -> sender   room u64, limit u64: payload bytes of the room that may be sent
                                     since its start; the first one accepts the offer
    Data        sender -> receiver   room u64, layer u32, flags u32, offset u64,
                                     checksum u64, payload
    LayerDone   receiver -> sender   room u64, layer u32, bytes u64: the layer has arrived whole
    Done        sender -> receiver   room u64, bytes u64, meta: everything has been handed over
    Ack         receiver -> sender   room u64, bytes u64: everything has arrived
    Error       either way           room u64 (2^64 - 1: the connection), code u16, UTF-8 text
    Resume      sender -> receiver   room u64, 0 u32: what is missing?
                receiver -> sender   room u64, gaps u32, gaps x (layer u32, offset u64, length u64)

A data frame's checksum is the xxh3-64 of its payload, seeded with the xxh3-64 of (room u64, layer
u32, offset u64), so bytes that come with the wrong place fail it too. Data of one transfer may use
any connection of the session once its Credit has arrived; Offer, Done and the answers use the
connection of the Offer.
"""

import struct
from collections.abc import Iterator

from harness.transport.frames import (
    DTYPES,
    MAGIC,
    MAX_GAPS,
    MAX_LAYERS,
    MAX_MESSAGE_BYTES,
    MAX_META_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_ROOM,
    MAX_TRANSFER_BYTES,
    NO_ROOM,
    NONCE_BYTES,
    VERSION,
    Ack,
    Challenge,
    Code,
    Control,
    Credit,
    Data,
    Done,
    Error,
    Frame,
    Hello,
    Kind,
    LayerDone,
    Offer,
    Resume,
    Welcome,
    WireError,
    checksum_of,
)

_READ_BYTES = 64 * 1024
_FLAG_CHECKSUM = 1

_HEADER = struct.Struct("!HBBI")
_HELLO = struct.Struct("!B16s32s32s")
_WELCOME = struct.Struct("!32sI")
_OFFER = struct.Struct("!QIIBQI")
_PAIR = struct.Struct("!QQ")
_DATA = struct.Struct("!QIIQQ")
_LAYER_DONE = struct.Struct("!QIQ")
_ERROR = struct.Struct("!QH")
_RESUME = struct.Struct("!QI")
_GAP = struct.Struct("!IQQ")
_HEADED_DATA = struct.Struct("!HBBIQIIQQ")

#: Least and greatest body length of each kind, checked before the body is awaited.
_BODY_BOUNDS: dict[int, tuple[int, int]] = {
    Kind.CHALLENGE: (NONCE_BYTES, NONCE_BYTES),
    Kind.HELLO: (_HELLO.size, _HELLO.size),
    Kind.WELCOME: (_WELCOME.size, _WELCOME.size),
    Kind.OFFER: (_OFFER.size, _OFFER.size + 8 * MAX_LAYERS + MAX_META_BYTES),
    Kind.CREDIT: (_PAIR.size, _PAIR.size),
    Kind.DATA: (_DATA.size + 1, _DATA.size + MAX_PAYLOAD_BYTES),
    Kind.LAYER_DONE: (_LAYER_DONE.size, _LAYER_DONE.size),
    Kind.DONE: (_PAIR.size, _PAIR.size + MAX_META_BYTES),
    Kind.ACK: (_PAIR.size, _PAIR.size),
    Kind.ERROR: (_ERROR.size, _ERROR.size + MAX_MESSAGE_BYTES),
    Kind.RESUME: (_RESUME.size, _RESUME.size + _GAP.size * MAX_GAPS),
}
_HANDSHAKE_KINDS = frozenset({Kind.CHALLENGE, Kind.HELLO, Kind.WELCOME, Kind.ERROR})


def encode_data_head(
    room: int, layer: int, offset: int, payload: memoryview, checksum: bool
) -> bytes:
    """Header and fixed fields of a data frame (40 bytes); the payload follows it on the wire."""
    assert 0 < len(payload) <= MAX_PAYLOAD_BYTES, len(payload)
    digest = checksum_of(room, layer, offset, payload) if checksum else 0
    flags = _FLAG_CHECKSUM if checksum else 0
    length = _DATA.size + len(payload)
    return _HEADED_DATA.pack(MAGIC, VERSION, Kind.DATA, length, room, layer, flags, offset, digest)


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
    _parse(kind, memoryview(body))  # what this side sends, the other must be able to read
    return _HEADER.pack(MAGIC, VERSION, kind, len(body)) + body


def _encode_body(frame: Control) -> tuple[Kind, bytes]:
    match frame:
        case Challenge(nonce):
            return Kind.CHALLENGE, nonce
        case Hello(role, session, nonce, proof):
            return Kind.HELLO, _HELLO.pack(role, session, nonce, proof)
        case Welcome(proof, max_payload_bytes):
            return Kind.WELCOME, _WELCOME.pack(proof, max_payload_bytes)
        case Offer(room, layer_bytes, meta, dtype, prefix_tokens, flags):
            if dtype not in DTYPES:
                raise WireError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
            head = _OFFER.pack(
                room, flags, len(layer_bytes), DTYPES.index(dtype), prefix_tokens, len(meta)
            )
            return Kind.OFFER, head + struct.pack(f"!{len(layer_bytes)}Q", *layer_bytes) + meta
        case Credit(room, limit_bytes):
            return Kind.CREDIT, _PAIR.pack(room, limit_bytes)
        case LayerDone(room, layer, payload_bytes):
            return Kind.LAYER_DONE, _LAYER_DONE.pack(room, layer, payload_bytes)
        case Done(room, payload_bytes, meta):
            return Kind.DONE, _PAIR.pack(room, payload_bytes) + meta
        case Ack(room, payload_bytes):
            return Kind.ACK, _PAIR.pack(room, payload_bytes)
        case Error(room, code, message):
            text = message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore").encode()
            return Kind.ERROR, _ERROR.pack(room, code) + text
        case Resume(room, gaps):
            return Kind.RESUME, _RESUME.pack(room, len(gaps)) + b"".join(
                _GAP.pack(*gap) for gap in gaps
            )


def _parse(kind: int, body: memoryview) -> Frame:
    """Body to frame; its length is within the bounds of its kind."""
    match kind:
        case Kind.DATA:
            room, layer, flags, offset, digest = _DATA.unpack_from(body)
            if flags & ~_FLAG_CHECKSUM:
                raise WireError(f"data frame with unknown flags {flags:#x}")
            payload = body[_DATA.size :]
            if layer >= MAX_LAYERS or offset + len(payload) > MAX_TRANSFER_BYTES:
                raise WireError(f"data frame for layer {layer} at byte {offset} is out of range")
            return Data(_room(room), layer, offset, payload, digest if flags else None)
        case Kind.CHALLENGE:
            return Challenge(bytes(body))
        case Kind.HELLO:
            return Hello(*_HELLO.unpack(body))
        case Kind.WELCOME:
            return Welcome(*_WELCOME.unpack(body))
        case Kind.OFFER:
            return _parse_offer(body)
        case Kind.CREDIT:
            return Credit(*_parse_count(body))
        case Kind.LAYER_DONE:
            room, layer, payload_bytes = _LAYER_DONE.unpack(body)
            if layer >= MAX_LAYERS or payload_bytes > MAX_TRANSFER_BYTES:
                raise WireError(f"layer {layer} of {payload_bytes} bytes is out of range")
            return LayerDone(_room(room), layer, payload_bytes)
        case Kind.DONE:
            return Done(*_parse_count(body), bytes(body[_PAIR.size :]))
        case Kind.ACK:
            return Ack(*_parse_count(body))
        case Kind.ERROR:
            return _parse_error(body)
        case _:
            return _parse_resume(body)


def _room(room: int) -> int:
    if room > MAX_ROOM:
        raise WireError(f"room {room} is beyond {MAX_ROOM}")
    return room


def _parse_count(body: memoryview) -> tuple[int, int]:
    room, count_bytes = _PAIR.unpack_from(body)
    if count_bytes > MAX_TRANSFER_BYTES:
        raise WireError(f"{count_bytes} bytes are beyond the bound of {MAX_TRANSFER_BYTES}")
    return _room(room), count_bytes


def _parse_offer(body: memoryview) -> Offer:
    room, flags, layers, dtype, prefix_tokens, meta_bytes = _OFFER.unpack_from(body)
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
    return Offer(_room(room), layer_bytes, meta, DTYPES[dtype], prefix_tokens, flags)


def _parse_error(body: memoryview) -> Error:
    room, code = _ERROR.unpack_from(body)
    try:
        message = bytes(body[_ERROR.size :]).decode()
        return Error(room if room == NO_ROOM else _room(room), Code(code), message)
    except ValueError as error:
        raise WireError(f"malformed error frame: {error}") from error


def _parse_resume(body: memoryview) -> Resume:
    room, gaps = _RESUME.unpack_from(body)
    if len(body) != _RESUME.size + _GAP.size * gaps:
        raise WireError(f"resume frame of {gaps} gaps has {len(body)} bytes")
    return Resume(_room(room), tuple(_GAP.iter_unpack(body[_RESUME.size :])))


class Decoder:
    """Cuts a byte stream into frames, at most one frame and one read ahead.

    Either ``feed(data)``, or without a copy: read into ``buffer()``, then iterate
    ``received(nbytes)``. Before ``unlock()`` only frames of the handshake are accepted.
    """

    def __init__(self, buffer_bytes: int = 2 * _READ_BYTES) -> None:
        self._view = memoryview(bytearray(buffer_bytes))
        self._start = self._end = 0
        self._needed_bytes = _HEADER.size
        self._max_payload_bytes = 0
        self._violation: str | None = None

    def unlock(self, max_payload_bytes: int) -> None:
        """The handshake is over: accept every kind, and data frames up to this payload."""
        self._max_payload_bytes = max_payload_bytes

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that ``data`` completes; WireError at the first that breaks the protocol."""
        self.buffer(len(data))[: len(data)] = data
        return list(self.received(len(data)))

    def buffer(self, least_bytes: int = _READ_BYTES) -> memoryview:
        """Writable space of at least ``least_bytes``; views of earlier frames become invalid."""
        pending = self._end - self._start
        if pending == 0:
            self._start = self._end = 0
        capacity = max(self._needed_bytes, pending + least_bytes)
        if len(self._view) - self._start < capacity:
            target = self._view
            if len(target) < capacity:
                target = memoryview(bytearray(capacity + _READ_BYTES))
            target[:pending] = self._view[self._start : self._end]
            self._view, self._start, self._end = target, 0, pending
        return self._view[self._end :]

    def received(self, nbytes: int) -> Iterator[Frame]:
        """Iterate the frames completed by ``nbytes`` written into ``buffer()``."""
        self._end += nbytes
        while self._violation is None and self._end - self._start >= _HEADER.size:
            magic, version, kind, length = _HEADER.unpack_from(self._view, self._start)
            self._check_header(magic, version, kind, length)
            self._needed_bytes = _HEADER.size + length
            if self._end - self._start < self._needed_bytes:
                return
            body = self._view[self._start + _HEADER.size : self._start + self._needed_bytes]
            self._start += self._needed_bytes
            self._needed_bytes = _HEADER.size
            try:
                frame = _parse(kind, body)
            except WireError as error:
                self._violation = str(error)
                raise
            yield frame
        if self._violation is not None:
            raise WireError(self._violation)

    def _check_header(self, magic: int, version: int, kind: int, length: int) -> None:
        if magic != MAGIC:
            self._violation = f"bytes {magic:#06x} where a frame should begin"
        elif version != VERSION:
            self._violation = f"wire version {version}; this side speaks version {VERSION}"
        elif kind not in _BODY_BOUNDS:
            self._violation = f"unknown kind of frame {kind}"
        elif not self._max_payload_bytes and kind not in _HANDSHAKE_KINDS:
            self._violation = f"{Kind(kind).name} frame before the handshake ended"
        else:
            least, most = _BODY_BOUNDS[kind]
            if kind == Kind.DATA:
                most = min(most, _DATA.size + self._max_payload_bytes)
            if least <= length <= most:
                return
            self._violation = (
                f"{Kind(kind).name} frame of {length} bytes; allowed are {least} to {most}"
            )
        raise WireError(self._violation)
