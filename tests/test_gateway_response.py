"""HTTP responses from bytes: framing, whatever the cuts, against h11; what is no response."""

from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.gateway.response import MAX_HEAD_BYTES, Response, ResponseError

#: Bodies that hold what frames look like, too.
BODY = st.binary(max_size=60) | st.sampled_from([b"0\r\n\r\n", b"\r\n", b"a\r\n", b"data: x\n\n"])


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def read(pieces: list[bytes], *, closes: bool = False) -> tuple[Response, bytes]:
    response = Response()
    body = b"".join(piece for data in pieces for piece in response.feed(data))
    if closes:
        response.close()
    return response, body


def by_h11(data: bytes, *, closes: bool = False) -> tuple[int, bytes, bool]:
    """Status, body and whether the connection goes on."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    if closes:
        connection.receive_data(b"")
    status, body = 0, b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
    return status, body, connection.our_state is h11.DONE


@given(
    chunks=st.lists(BODY.filter(bool), max_size=5),
    extension=st.sampled_from([b"", b";a=b"]),
    trailer=st.sampled_from([b"", b"X-Sum: 1\r\n"]),
    interim=st.booleans(),
    closes=st.booleans(),
    cuts=st.lists(st.integers(0, 500), max_size=8),
)
def test_chunks_are_what_h11_makes_of_them(
    chunks: list[bytes],
    extension: bytes,
    trailer: bytes,
    interim: bool,
    closes: bool,
    cuts: list[int],
) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b""
    data += b"HTTP/1.1 200 OK\r\ntransfer-ENCODING: Chunked\r\n"
    data += b"Connection: close\r\n\r\n" if closes else b"\r\n"
    data += b"".join(b"%x%b\r\n%b\r\n" % (len(one), extension, one) for one in chunks)
    data += b"0\r\n" + trailer + b"\r\n"
    response, body = read(cut(data, cuts))
    assert response.ended
    assert (response.status, body, response.keeps_connection) == by_h11(data)
    assert body == b"".join(chunks)


@given(body=BODY, status=st.sampled_from([200, 429, 503]), cuts=st.lists(st.integers(0, 200)))
def test_a_length_is_what_h11_makes_of_it(body: bytes, status: int, cuts: list[int]) -> None:
    data = b"HTTP/1.1 %d Why\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
    response, got = read(cut(data, cuts))
    assert response.ended
    assert (response.status, got, response.keeps_connection) == by_h11(data) == (status, body, True)


@given(body=BODY, version=st.sampled_from([b"1.0", b"1.1"]), cuts=st.lists(st.integers(0, 200)))
def test_a_body_without_a_length_ends_with_the_connection(
    body: bytes, version: bytes, cuts: list[int]
) -> None:
    data = b"HTTP/%b 200 OK\r\nServer: x\r\n\r\n%b" % (version, body)
    response, got = read(cut(data, cuts))
    assert not response.ended
    response.close()
    assert response.ended
    assert not response.keeps_connection
    assert (response.status, got) == by_h11(data, closes=True)[:2]


def test_a_body_that_breaks_off_has_not_ended() -> None:
    for head in (b"Content-Length: 9\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n9\r\n"):
        response, body = read([b"HTTP/1.1 200 OK\r\n" + head + b"abc"], closes=True)
        assert body == b"abc"
        assert not response.ended


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"SSH-2.0-x\r\n\r\n", "begins with"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "begins with"),
        (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "the line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", "length"),
        # Whoever took the other one would take the rest for the next answer.
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 3\r\n\r\nabc", "twice"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
            "twice",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length : 3\r\n\r\nabc", "the line"),
        (b"HTTP/1.1 200 OK\r\nX: a\r\n Content-Length: 3\r\n\r\nabc", "the line"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "gzip"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "chunk's size"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
            "longer than it says",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nmore", "went on"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * MAX_HEAD_BYTES, "longer than"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 2000, "longer than"),
    ],
)
def test_what_is_no_response_is_named(data: bytes, said: str) -> None:
    with pytest.raises(ResponseError, match=said):
        Response().feed(data)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_garbage_never_raises_anything_else(pieces: list[bytes]) -> None:
    response = Response()
    try:
        for piece in (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *pieces):
            response.feed(piece)
    except ResponseError:
        pass


HEADS = st.lists(
    st.sampled_from(
        [
            b"Content-Length: 3",
            b"content-length: 99999999999999999999",
            b"Transfer-Encoding: chunked",
            b"Connection: close",
            b": 1",
            b"X: \xff\x00",
        ]
    ),
    max_size=4,
)


@given(
    lines=HEADS,
    body=BODY,
    flips=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=3),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_a_damaged_answer_is_read_or_named_whatever_the_cuts(
    lines: list[bytes], body: bytes, flips: list[tuple[int, int]], cuts: list[int]
) -> None:
    data = bytearray(
        b"\r\n".join((b"HTTP/1.1 200 OK", *lines, b"", b"3\r\nabc\r\n0\r\n\r\n")) + body
    )
    for at, value in flips:
        data[at % len(data)] = value

    def outcome(pieces: list[bytes]) -> object:
        response, got = Response(), b""
        try:
            for piece in pieces:
                for part in response.feed(piece):
                    got += part
        except ResponseError:
            return None
        return response.status, got, response.ended, response.keeps_connection

    assert outcome(cut(bytes(data), cuts)) == outcome([bytes(data)])
