"""The KV wire format: round trips under any chunking, bounds, mutations, and its bytes by hand."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from wire_reader import Data, WireReader

from harness.core import TransportError
from harness.transport.frames import (
    DTYPES,
    MAX_LAYERS,
    MAX_META_BYTES,
    MAX_NUMBER,
    MAX_PAYLOAD_BYTES,
    MAX_ROOM,
    MAX_TRANSFER_BYTES,
    NO_ROOM,
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
    LayerDone,
    Offer,
    Progress,
    Resume,
    Welcome,
    WireError,
)
from harness.transport.handshake import proof
from harness.transport.intake import DataEnd, Intake
from harness.transport.wire import encode_control, encode_data_head

ROOMS = st.integers(0, MAX_ROOM)
NUMBERS = st.integers(0, MAX_NUMBER)
COUNTS = st.integers(0, MAX_TRANSFER_BYTES)
LAYERS = st.integers(0, MAX_LAYERS - 1)
META = st.binary(max_size=300)
SHORT_TEXT = st.text(max_size=200)

CONTROLS: st.SearchStrategy[Control] = st.one_of(
    st.builds(Challenge, st.binary(min_size=32, max_size=32)),
    st.builds(
        Hello,
        st.integers(0, 255),
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=32, max_size=32),
        st.binary(min_size=32, max_size=32),
    ),
    st.builds(Welcome, st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1)),
    st.builds(
        Offer,
        ROOMS,
        st.lists(st.integers(0, 2**32), max_size=70).map(tuple),
        META,
        st.sampled_from(DTYPES),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        NUMBERS,
        NUMBERS,
    ),
    st.builds(Credit, ROOMS, COUNTS, NUMBERS),
    st.builds(LayerDone, ROOMS, LAYERS, COUNTS, NUMBERS),
    st.builds(Done, ROOMS, COUNTS, META, NUMBERS),
    st.builds(Ack, ROOMS, COUNTS, NUMBERS),
    st.builds(
        Error, st.one_of(ROOMS, st.just(NO_ROOM)), st.sampled_from(Code), SHORT_TEXT, NUMBERS
    ),
    st.builds(Resume, ROOMS, NUMBERS, NUMBERS),
    st.builds(
        Arrived,
        ROOMS,
        st.lists(st.tuples(st.integers(0, 9), st.integers(10, MAX_TRANSFER_BYTES))).map(tuple),
        NUMBERS,
    ),
    st.builds(Progress, st.integers(0, 2**64 - 1)),
)
#: room, layer, offset, payload, checksum on or off, transfer
DATA = st.tuples(
    ROOMS,
    LAYERS,
    st.integers(0, 2**43),
    st.binary(min_size=1, max_size=500),
    st.booleans(),
    NUMBERS,
)
Item = Control | tuple[int, int, int, bytes, bool, int]
#: What a decoded frame is compared by: views die with the decoder's next read.
Plain = Control | tuple[int, int, int, bytes, bool, int, bool]


def encode(item: Item) -> bytes:
    if isinstance(item, tuple):
        room, layer, offset, payload, checksum, transfer = item
        head = encode_data_head(room, layer, offset, memoryview(payload), checksum, transfer)
        return head + payload
    return encode_control(item)


def plain(frame: Control | Data) -> Plain:
    if isinstance(frame, Data):
        payload = bytes(frame.payload)
        has_checksum = frame.checksum is not None
        place = (frame.room, frame.layer, frame.offset)
        return *place, payload, has_checksum, frame.transfer, frame.intact()
    return frame


def unlocked(stage_bytes: int = 1024) -> WireReader:
    decoder = WireReader(stage_bytes)
    decoder.unlock(MAX_PAYLOAD_BYTES)
    return decoder


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(stream) + 1) for cut in cuts} | {len(stream)})
    starts = [0, *ends[:-1]]
    return [stream[start:end] for start, end in zip(starts, ends, strict=True)]


@given(st.lists(st.one_of(CONTROLS, DATA), max_size=12), st.lists(st.integers(0, 10**6)))
def test_any_chunking_gives_the_frames_back(items: list[Item], cuts: list[int]) -> None:
    decoder = unlocked()
    decoded = [
        plain(frame)
        for piece in pieces(b"".join(map(encode, items)), cuts)
        for frame in decoder.feed(piece)
    ]
    assert decoded == [(*item, True) if isinstance(item, tuple) else item for item in items]


@given(
    st.lists(st.one_of(CONTROLS, DATA), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
    st.lists(st.integers(0, 10**6), max_size=10),
)
def test_mutated_frames_raise_nothing_but_wire_errors(
    items: list[Item],
    mutations: list[tuple[int, int]],
    cuts: list[int],
) -> None:
    stream = bytearray(b"".join(map(encode, items)))
    for at, value in mutations:
        stream[at % len(stream)] = value
    sent = {item for item in items if isinstance(item, tuple)}
    decoder = unlocked()
    try:
        for piece in pieces(bytes(stream), cuts):
            for frame in decoder.feed(piece):
                result = plain(frame)
                if isinstance(result, tuple) and result[4] and result[6]:
                    assert result[:6] in sent  # what still has a right checksum is what was sent
    except WireError:
        with pytest.raises(WireError):
            decoder.feed(b"")


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_errors(stream: bytes) -> None:
    try:
        assert unlocked().feed(stream) == [] or stream[:2] == b"KV"
    except WireError:
        assert len(stream) >= 8


@given(st.lists(CONTROLS, max_size=4))
def test_frames_before_a_violation_are_decoded(items: list[Control]) -> None:
    decoder, stream = unlocked(), b"".join(map(encode, items)) + b"garbage!"
    frames = decoder.frames(stream)
    assert [next(frames) for _ in items] == items
    with pytest.raises(WireError, match="where a frame should begin"):
        next(frames)


def test_bytes_of_a_data_frame_by_hand() -> None:
    payload = b"attention state"
    seed = xxhash.xxh3_64(struct.pack("!QIIQ", 7, 2, 3, 4096)).intdigest()
    digest = xxhash.xxh3_64(payload, seed=seed).intdigest()
    body = struct.pack("!QIHHQQ", 7, 2, 3, 1, 4096, digest) + payload
    expected = b"KV\x03\x06" + struct.pack("!I", len(body)) + body
    assert encode((7, 3, 4096, payload, True, 2)) == expected
    assert encode_control(Credit(7, 9, 2)) == bytes.fromhex(
        "4b560305000000140000000000000007000000020000000000000009"
    )


@pytest.mark.parametrize(
    "moved", [(8, 2, 3, 4096), (7, 1, 3, 4096), (7, 2, 2, 4096), (7, 2, 3, 4097)]
)
def test_a_payload_in_the_wrong_place_fails_its_checksum(moved: tuple[int, int, int, int]) -> None:
    frame = bytearray(encode((7, 3, 4096, b"payload", True, 2)))
    room, transfer, layer, offset = moved
    struct.pack_into("!QIH", frame, 8, room, transfer, layer)
    struct.pack_into("!Q", frame, 24, offset)
    (data,) = unlocked().feed(frame)
    assert isinstance(data, Data)
    assert (data.room, data.transfer, data.layer, data.offset) == moved
    assert not data.intact()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (("GE", 1, 9, 16), "where a frame should begin"),
        (("KV", 1, 9, 20), "wire version 1; this side speaks version 3"),
        (("KV", 3, 99, 16), "unknown kind"),
        (("KV", 3, 9, 21), "ACK frame of 21 bytes"),
        (("KV", 3, 6, 32), "DATA frame of 32 bytes"),
        (("KV", 3, 6, 2**32 - 1), "allowed are 33"),
        (("KV", 3, 4, 2**31), "OFFER frame of"),
        (("KV", 3, 11, 2**31), "RESUME frame of"),
        (("KV", 3, 13, 2**31), "ARRIVED frame of"),
    ],
)
def test_a_bad_header_is_refused_before_its_body_is_awaited(
    header: tuple[str, int, int, int], message: str
) -> None:
    magic, version, kind, length = header
    with pytest.raises(WireError, match=message):
        unlocked().feed(struct.pack("!2sBBI", magic.encode(), version, kind, length))


@pytest.mark.parametrize(
    "item", [Offer(1, (2,)), Credit(1, 2), Done(1, 2), (1, 0, 0, b"x", True, 0)]
)
def test_only_the_handshake_is_accepted_before_it_ends(
    item: Item,
) -> None:
    with pytest.raises(WireError, match="before the handshake"):
        WireReader().feed(encode(item))


def test_payloads_beyond_the_agreed_size_are_refused() -> None:
    decoder = WireReader()
    decoder.unlock(100)
    assert len(decoder.feed(encode((1, 0, 0, bytes(100), False, 0)))) == 1
    with pytest.raises(WireError, match="allowed are 33 to 132"):
        decoder.feed(encode((1, 0, 0, bytes(101), False, 0)))


def test_a_payload_passes_the_stage_only_with_the_frame_before_it() -> None:
    decoder, frame = unlocked(), encode((1, 0, 0, bytes(300_000), True, 0))
    for start in range(0, len(frame) - 1, 1000):
        assert decoder.feed(frame[start : min(start + 1000, len(frame) - 1)]) == []
    place, stage = decoder.intake.buffers()
    assert (len(place), len(stage)) == (1, 1024)
    assert len(decoder.feed(frame[-1:])) == 1


@given(st.binary(min_size=1, max_size=5000), st.integers(0, 10**6), st.booleans())
def test_a_dropped_payload_leaves_the_next_frame_whole(
    payload: bytes, cut: int, at_once: bool
) -> None:
    stream = encode((1, 0, 0, payload, True, 0)) + encode(Credit(7, 9))
    cut = 40 + cut % len(payload)
    intake, seen = Intake(64), []
    intake.unlock(MAX_PAYLOAD_BYTES)
    for part in (stream[:cut], stream[cut:]):
        while part:
            buffer = intake.buffers()[0]
            taken = part[: len(buffer)]
            buffer[: len(taken)] = taken
            part = part[len(taken) :]
            for event in intake.received(len(taken)):
                seen.append(event)
                if isinstance(event, DataHead) and not at_once:
                    intake.place(memoryview(bytearray(len(payload))))
        if not at_once and len(seen) == 1:
            intake.place(None)
    head, end, credit = seen
    assert isinstance(end, DataEnd)
    assert (end.head, end.placed) == (head, False)
    assert credit == Credit(7, 9)


@pytest.mark.parametrize(
    "frame",
    [
        Offer(1, (0,) * (MAX_LAYERS + 1)),
        Offer(1, (2**43, 2**43, 1)),
        Offer(1, (1,), meta=bytes(MAX_META_BYTES + 1)),
        Offer(1, (1,), dtype="int3"),
        Offer(1, (-1,)),
        Offer(MAX_ROOM + 1, (1,)),
        Done(1, 2, bytes(MAX_META_BYTES + 1)),
        Credit(NO_ROOM, 1),
        Ack(1, MAX_TRANSFER_BYTES + 1),
        Challenge(b"short"),
        Arrived(1, ((2, 2),)),
        LayerDone(1, MAX_LAYERS, 1),
    ],
)
def test_what_the_peer_would_refuse_is_not_encoded(frame: Control) -> None:
    with pytest.raises(WireError):
        encode_control(frame)


def test_wire_errors_are_transport_errors() -> None:
    assert issubclass(WireError, TransportError)


def test_a_long_message_is_cut_between_characters() -> None:
    (frame,) = unlocked().feed(encode_control(Error(1, Code.ABORTED, "é" * 1000)))
    assert frame == Error(1, Code.ABORTED, "é" * 512)


@given(st.integers(0, 4), st.binary(min_size=1, max_size=1))
def test_a_proof_depends_on_every_field(which: int, flip: bytes) -> None:
    fields = [b"k" * 32, b"s" * 16, b"n" * 32, b"c" * 32]
    changed = list(fields)
    role = 1
    if which < 4:
        changed[which] = bytes([changed[which][0] ^ (flip[0] or 1)]) + changed[which][1:]
    else:
        role = 2
    first = proof("client", fields[0], 1, *fields[1:])
    assert first != proof("client", changed[0], role, *changed[1:])
    assert first != proof("server", fields[0], 1, *fields[1:])
