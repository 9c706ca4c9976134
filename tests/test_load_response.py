"""A response from its bytes: phases, refusals, and when its connection may be used again."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.completion import CompletionStream, StreamError
from harness.load.response import Response
from harness.load.truth import Truth
from harness.load.truth_answer import answer_to

BODY = (
    b'{"model":"m","prompt":[1,2,3],"max_tokens":5,"stream":true,"stream_options":'
    b'{"include_usage":true,"continuous_usage_stats":true},"rid":"r"}'
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def answer() -> list[bytes]:
    """The known-truth server's chunks, head first."""
    told = answer_to(b"POST /v1/completions HTTP/1.1\r\n\r\n", BODY, Truth(ttft_s=0, chunk_s=0))
    assert not isinstance(told, str)
    chunks = [STREAM + b"Transfer-Encoding: chunked\r\n\r\n"]
    while not told.over:
        chunks.append(told.chunk)
        told.advance(0)
    return chunks


def response() -> tuple[Response, CompletionStream]:
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("Host", "x")]))
    stream = CompletionStream(3, 5)
    return Response(stream, reader), stream


def fed(*pieces: bytes) -> Response:
    read, _ = response()
    for mono_ns, piece in enumerate(pieces, 1):
        read.feed(piece, mono_ns)
    return read


@given(st.data())
def test_any_cut_gives_the_same_tokens(data: st.DataObject) -> None:
    whole = b"".join(answer())
    cuts = sorted(data.draw(st.lists(st.integers(1, len(whole) - 1), max_size=30)))
    read, stream = response()
    for at, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(whole)], strict=True), 1):
        if start < end:
            read.feed(whole[start:end], at)
    read.check()
    assert stream.chunk_tokens == [1] * 5
    assert read.reusable
    assert read.end_mono_ns == stream.chunk_mono_ns[-1] or read.end_mono_ns is not None


def test_every_chunk_has_its_instant() -> None:
    read, stream = response()
    phases = []
    for mono_ns, chunk in enumerate(answer(), 1):
        read.feed(chunk, mono_ns)
        phases.append(read.phase)
    assert stream.chunk_mono_ns == [2, 3, 4, 5, 6]
    assert (read.first_byte_mono_ns, read.end_mono_ns, read.over) == (1, 6, True)
    assert phases == ["first_token", *["stream"] * 5]


def test_a_connection_is_used_again_only_where_nothing_is_left() -> None:
    assert fed(*answer()).reusable
    assert not fed(*answer()[:-1], answer()[-1] + b"HTTP").reusable
    assert not fed(*answer()[:-1]).reusable
    closing = answer()[0].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert not fed(closing, *answer()[1:]).reusable
    old = answer()[0].replace(b"HTTP/1.1", b"HTTP/1.0")
    assert not fed(old, *answer()[1:]).reusable


def test_hints_may_come_before_the_head() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    fed(early, *answer()).check()
    with pytest.raises(StreamError, match="heads before"):
        fed(early * 100)


def test_a_body_to_the_connections_end() -> None:
    events = (
        b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n'
    )
    read = fed(STREAM + b"\r\n", events + b"data: [DONE]\n\n", b"")
    read.check()
    assert read.over
    assert not read.reusable


@pytest.mark.parametrize(
    ("pieces", "phase", "words"),
    [
        ([b""], "headers", "closed the connection early"),
        ([b"HTTP/1.1 200 OK\r\nCont", b""], "headers", "closed the connection early"),
        ([b"SSH-2.0-OpenSSH_9\r\n\r\n"], "protocol", "not HTTP/1.1"),
        ([STREAM + b"X: " + b"y" * 70_000], "protocol", "not HTTP/1.1"),
        ([STREAM + b"Transfer-Encoding: gzip\r\n\r\n"], "protocol", "not HTTP/1.1"),
        ([answer()[0], b"ffffffffff\r\n"], "protocol", "a chunk of 1099511627775 bytes"),
        ([*answer()[:1], b""], "first_token", "closed the connection early"),
        ([*answer()[:3], b""], "stream", "closed the connection early"),
        (
            [b"HTTP/1.1 429 Slow Down\r\nContent-Length: 4\r\n\r\nbusy"],
            "headers",
            "429 Slow Down: busy",
        ),
        ([b"HTTP/1.1 500 No\r\n\r\nha", b"lf", b""], "headers", "HTTP 500 No: half"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"], "protocol", "an event stream"),
    ],
)
def test_what_is_wrong_has_a_phase(pieces: list[bytes], phase: str, words: str) -> None:
    with pytest.raises(StreamError, match=words) as caught:
        fed(*pieces).check()
    assert caught.value.phase == phase


def test_an_endless_refusal_is_read_to_a_bound() -> None:
    read = fed(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 40_000, b"x" * 40_000)
    assert read.over
    assert not read.reusable
