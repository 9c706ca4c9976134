"""Bodies of responses: what h11 makes of the same bytes, whatever way they are cut."""

from itertools import pairwise

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.surface.framing import (
    MAX_TRAILER_BYTES,
    ChunkedBody,
    FramingError,
    OpenBody,
    SizedBody,
    body_of,
)


def chunked(payloads: list[bytes], trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in payloads if data)
    return chunks + b"0\r\n" + trailer + b"\r\n"


def fed(body: ChunkedBody | SizedBody, stream: bytes, cuts: list[int]) -> bytes:
    payload = b""
    places = [0, *sorted(cuts), len(stream)]
    for start, end in pairwise(places):
        if body.over:
            body.rest += stream[start:end]
        else:
            payload += body.feed(stream[start:end])
    return payload


def by_h11(stream: bytes) -> tuple[bytes, bool] | None:
    """Payload, and whether the body is over; None for what h11 refuses."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.receive_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + stream)
    payload = b""
    try:
        while (event := client.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Data):
                payload += event.data
            elif isinstance(event, h11.EndOfMessage):
                return payload, True
    except h11.RemoteProtocolError:
        return None
    return payload, False


@given(st.lists(st.binary(max_size=40), max_size=6), st.binary(max_size=9), st.data())
def test_any_cut_gives_the_payload_and_the_rest(
    payloads: list[bytes], behind: bytes, data: st.DataObject
) -> None:
    stream = chunked(payloads, b"X-More: 1\r\n" if data.draw(st.booleans()) else b"")
    whole = stream + behind
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=12))
    body = ChunkedBody()
    assert fed(body, whole, cuts) == b"".join(payloads)
    assert (body.over, body.rest) == (True, behind)
    assert by_h11(stream) == (b"".join(payloads), True)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=12), max_size=4), st.data())
def test_what_h11_refuses_is_refused(payloads: list[bytes], data: st.DataObject) -> None:
    """A byte is changed anywhere. Nothing is read that h11 would not read, nor read otherwise."""
    stream = bytearray(chunked(payloads))
    stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    body = ChunkedBody()
    expected = by_h11(bytes(stream))
    try:
        payload = fed(body, bytes(stream), [])
    except FramingError:
        return
    if expected is not None:
        # h11 ends a trailer at a bare LF too; here it is none, and the body is not over.
        assert payload == expected[0]
        assert expected[1] or not body.over
    else:
        # h11 looks at the trailer's lines, which are passed over here.
        assert payload == b"".join(payloads)


def test_a_bare_line_feed_ends_no_trailer() -> None:
    stream = b"2\r\nab\r\n0\r\n\n\n"
    body = ChunkedBody()
    assert (fed(body, stream, []), body.over, body.end()) == (b"ab", False, False)
    assert by_h11(stream) == (b"ab", True)


@pytest.mark.parametrize(
    "stream",
    [
        b"ffffffffffff\r\n",
        b"-1\r\n",
        b"\r\n",
        b"5\nhello\r\n",
        b"g\r\n",
        b"x" * 2000,
        b"5\r\nhelloXX",
        b"11111111111111111\r\n",
        b"0\r\n" + b"X: " + b"y" * (MAX_TRAILER_BYTES + 1),
        b"0\r\n" + b"X: y\r\n" * MAX_TRAILER_BYTES,
    ],
)
def test_other_framing_is_refused(stream: bytes) -> None:
    with pytest.raises(FramingError):
        fed(ChunkedBody(), stream, [])
    with pytest.raises(FramingError):
        fed(ChunkedBody(), stream, list(range(len(stream))))


def test_a_sized_body_ends_with_its_last_byte() -> None:
    body = body_of({b"content-length": b"5"})
    assert body.feed(b"hel") == b"hel"
    assert not body.end()
    assert body.feed(b"lo!") == b"lo"
    assert (body.over, body.rest, body.end()) == (True, b"!", True)
    assert body_of({b"content-length": b"0"}).over


def test_an_open_body_ends_with_the_connection() -> None:
    body = body_of({})
    assert isinstance(body, OpenBody)
    assert body.feed(b"all of it") == b"all of it"
    assert not body.over
    assert body.end()
    assert body.over
