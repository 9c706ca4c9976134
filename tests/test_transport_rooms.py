"""Landing blocks: the interval set against a plain set of bytes, and frames against an offer."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.transport.arena import Arena, Block
from harness.transport.frames import Code, DataHead, Done, Offer
from harness.transport.rooms import Claim, Coverage, Landing, RoomError


class Line:
    """A connection, as far as a landing knows one."""

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def let_go(self, claim: Claim) -> None:
        raise AssertionError(claim)


def landing_of(*layer_bytes: int, meta: bytes = b"") -> Landing:
    landing = Landing(Offer(1, layer_bytes, meta), b"session", "peer")
    landing.block = Arena(65_536).take(landing.total_bytes)
    return landing


def begin(landing: Landing, layer: int, offset: int, length: int) -> Claim | None:
    return landing.claim(Line(), DataHead(1, layer, offset, length, None))


def end(landing: Landing, claim: Claim, payload: bytes) -> list[int]:
    claim.view[:] = payload
    landing.claims.remove(claim)
    return landing.take(claim, 7)


def land(landing: Landing, layer: int, offset: int, payload: bytes) -> list[int]:
    claim = begin(landing, layer, offset, len(payload))
    assert claim is not None
    return end(landing, claim, payload)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12))))
def test_coverage_agrees_with_a_set_of_bytes(intervals: list[tuple[int, int]]) -> None:
    coverage, known = Coverage(), set[int]()
    for start, length in intervals:
        new = set(range(start, start + length))
        assert coverage.add(start, start + length) == (not new & known)
        if not new & known:
            known |= new
            assert coverage.covers(start, start + length)
        assert coverage.covers(start, start + length) == (new <= known)
        runs = sum(1 for byte in known if byte - 1 not in known)
        assert len(coverage) == runs


@given(st.data())
def test_pieces_in_any_order_give_the_layers(draw: st.DataObject) -> None:
    """A piece may begin in any layer and go on in those after it."""
    layers = draw.draw(st.lists(st.binary(max_size=40), max_size=6))
    whole = b"".join(layers)
    places = [(index, at) for index, layer in enumerate(layers) for at in range(len(layer))]
    pieces, start = [], 0
    while start < len(whole):
        length = draw.draw(st.integers(1, len(whole) - start))
        pieces.append((*places[start], whole[start : start + length]))
        start += length
    landing = landing_of(*map(len, layers), meta=b"offer")
    done_at = draw.draw(st.integers(0, len(pieces)))
    completed = []
    for position, piece in enumerate(draw.draw(st.permutations(pieces))):
        if position == done_at:
            landing.finish(Done(1, landing.total_bytes))
        assert not landing.landed
        completed += land(landing, *piece)
    landing.finish(Done(1, landing.total_bytes))
    assert landing.landed
    assert sorted(completed) == [index for index, layer in enumerate(layers) if layer]
    released: list[int] = []
    received = landing.deliver(lambda: released.append(1))
    assert [bytes(received.layer(k)) for k in range(received.layers)] == layers
    assert bytes(received.buffer) == whole
    assert (received.payload_bytes, received.meta) == (sum(map(len, layers)), b"offer")
    received.release()
    received.release()
    assert released == [1]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([(2, 0, b"x")], "layer 2 of 2"),
        ([(1, 3, b"xx")], "bytes 3 to 5 of layer 1, which has 4, with 0 bytes after it"),
        ([(0, 3, b"123456")], "bytes 3 to 9 of layer 0, which has 4, with 4 bytes after it"),
        ([(0, 4, b"x")], "bytes 4 to 5 of layer 0, which has 4"),
        ([(0, 0, b"xx"), (0, 1, b"xx")], "byte 1 of layer 0 or after"),
    ],
)
def test_frames_that_do_not_fit_are_refused(
    frames: list[tuple[int, int, bytes]], message: str
) -> None:
    landing = landing_of(4, 4)
    *good, bad = frames
    for frame in good:
        land(landing, *frame)
    before = landing.payload_bytes
    with pytest.raises(RoomError, match=message) as caught:
        land(landing, *bad)
    assert caught.value.code == Code.PROTOCOL
    assert landing.payload_bytes == before


def test_what_has_arrived_is_not_taken_again() -> None:
    landing = landing_of(4)
    assert land(landing, 0, 0, b"true")
    assert begin(landing, 0, 0, 4) is None
    assert begin(landing, 0, 1, 2) is None


@pytest.mark.parametrize("first_lost", [False, True])
def test_a_frame_sent_again_lands_aside_while_its_first_copy_is_under_way(
    first_lost: bool,
) -> None:
    landing = landing_of(4)
    first, second = begin(landing, 0, 0, 4), begin(landing, 0, 0, 4)
    assert first is not None
    assert second is not None
    assert (first.aside, second.aside) == (False, True)
    with pytest.raises(RoomError, match="overlap"):
        begin(landing, 0, 1, 3)
    assert not end(landing, second, b"true")
    assert landing.payload_bytes == 0
    first.view[:2] = b"tr"
    if first_lost:
        landing.claims.remove(first)
        assert first.successor is second
        assert landing.take(second, 7)
    else:
        assert end(landing, first, b"true")
        assert not landing.take(second, 8)
    assert landing.payload_bytes == 4
    landing.finish(Done(1, 4))
    assert bytes(landing.deliver(lambda: None).buffer) == b"true"


def test_the_end_must_agree_with_the_offer_and_may_be_repeated() -> None:
    landing = landing_of(4)
    with pytest.raises(RoomError, match="ends after 3 bytes; it offered 4"):
        landing.finish(Done(1, 3))
    landing.finish(Done(1, 4))
    landing.finish(Done(1, 4))
    with pytest.raises(RoomError, match="twice, with other words"):
        landing.finish(Done(1, 4, b"other"))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=40))
def test_blocks_never_overlap_and_all_memory_comes_back(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(100_000)
    held: list[Block] = []
    for take, number in steps:
        if take:
            block = arena.take(number)
            if block is not None:
                assert len(block.view) == number
                held.append(block)
        elif held:
            arena.give_back(held.pop(number % len(held)))
        spans = sorted((block.start, block.length_bytes) for block in held if block.length_bytes)
        assert all(a + length <= b for (a, length), (b, _) in pairwise(spans))
        assert arena.free_bytes == arena.size_bytes - sum(length for _, length in spans)
    for block in held:
        arena.give_back(block)
    whole = arena.take(arena.size_bytes)
    assert whole is not None
