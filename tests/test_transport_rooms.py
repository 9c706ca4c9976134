"""Landing buffers: the interval set against a plain set of bytes, and frames against an offer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.transport.frames import Code, Data, Done, Offer, checksum_of
from harness.transport.rooms import Coverage, Landing, RoomError


def data(layer: int, offset: int, payload: bytes, room: int = 1) -> Data:
    view = memoryview(payload)
    return Data(room, layer, offset, view, checksum_of(room, layer, offset, view))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12))))
def test_coverage_agrees_with_a_set_of_bytes(intervals: list[tuple[int, int]]) -> None:
    coverage, known = Coverage(), set[int]()
    for start, length in intervals:
        new = set(range(start, start + length))
        assert coverage.add(start, start + length) == (not new & known)
        if not new & known:
            known |= new
        runs = sum(1 for byte in known if byte - 1 not in known)
        assert len(coverage) == runs


@given(st.data())
def test_pieces_in_any_order_give_the_layers(draw: st.DataObject) -> None:
    layers = draw.draw(st.lists(st.binary(max_size=40), max_size=6))
    pieces = []
    for index, layer in enumerate(layers):
        at = 0
        while at < len(layer):
            length = draw.draw(st.integers(1, len(layer) - at))
            pieces.append(data(index, at, layer[at : at + length]))
            at += length
    landing = Landing(Offer(1, tuple(map(len, layers)), b"offer"), b"session", "peer")
    done_at = draw.draw(st.integers(0, len(pieces)))
    for position, piece in enumerate(draw.draw(st.permutations(pieces))):
        if position == done_at:
            landing.finish(Done(1, landing.total_bytes))
        assert not landing.landed
        landing.write(piece)
    if done_at == len(pieces):
        landing.finish(Done(1, landing.total_bytes))
    assert landing.landed
    released: list[int] = []
    received = landing.deliver(released.append)
    assert [bytes(received.layer(k)) for k in range(received.layers)] == layers
    assert bytes(received.buffer) == b"".join(layers)
    assert (received.payload_bytes, received.meta) == (sum(map(len, layers)), b"offer")
    received.release()
    received.release()
    assert released == [1]


@pytest.mark.parametrize(
    ("frames", "code", "message"),
    [
        ([data(2, 0, b"x")], Code.PROTOCOL, "layer 2 of 2"),
        ([data(0, 3, b"xx")], Code.PROTOCOL, "bytes 3 to 5 of layer 0, which has 4"),
        ([data(0, 0, b"xx"), data(0, 1, b"x")], Code.PROTOCOL, "byte 1 of layer 0 or after"),
        ([data(0, 0, b"x", room=2)], Code.CHECKSUM, "wrong checksum in layer 0 at byte 0"),
    ],
)
def test_frames_that_do_not_fit_are_refused(frames: list[Data], code: Code, message: str) -> None:
    landing = Landing(Offer(1, (4, 4)), b"session", "peer")
    *good, bad = frames
    for frame in good:
        landing.write(frame)
    if code == Code.CHECKSUM:
        bad = Data(1, bad.layer, bad.offset, bad.payload, bad.checksum)
    before = landing.payload_bytes
    with pytest.raises(RoomError, match=message) as caught:
        landing.write(bad)
    assert caught.value.code == code
    assert landing.payload_bytes == before


def test_the_end_must_agree_with_the_offer_and_come_once() -> None:
    landing = Landing(Offer(1, (4,)), b"session", "peer")
    with pytest.raises(RoomError, match="ends after 3 bytes; it offered 4"):
        landing.finish(Done(1, 3))
    landing.finish(Done(1, 4))
    with pytest.raises(RoomError, match="twice"):
        landing.finish(Done(1, 4))
