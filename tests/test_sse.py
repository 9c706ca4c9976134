"""The SSE parser against the standard's own rules, a naive reference and any chunking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.surface.sse import MAX_LINE_BYTES, Event, SseError, SseParser

#: Pieces that meet every rule, among them characters of one to four bytes and lone ends of line.
PIECES = st.sampled_from(
    [
        "data:",
        "data: ",
        "data",
        ":",
        "event: error",
        "id: 4",
        "retry: 10",
        "x: y",
        "\r",
        "\n",
        "\r\n",
        "{}",
        "[DONE]",
        "é",
        "日本",
        "\U0001f600",
        " ",
        "\ufeff",
        "\0",
        "\u2028",
        "\x85",
        "\n\n",
    ]
)


def parse(chunks: list[bytes]) -> list[Event]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def reference(text: str) -> list[Event]:
    """The whole stream at once, line by line, as the standard words it."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]
    events: list[Event] = []
    data: list[str] = []
    name = ""
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append(Event("\n".join(data), name or "message"))
            data, name = [], ""
        elif field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return events


@given(st.lists(PIECES, max_size=40), st.data())
def test_any_chunking_gives_the_events_of_the_whole(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    stream = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert parse(chunks) == reference(text)
    assert parse([stream[at : at + 1] for at in range(len(stream))]) == reference(text)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [Event("a")]),
        (b"data:a\r\rdata:  b\r\n\r\n", [Event("a"), Event(" b")]),
        (b"data: a\ndata: b\n\n", [Event("a\nb")]),
        (b"data\n\n", [Event("")]),
        (b": comment\n\nevent: ping\n\n", []),
        (b"event: error\ndata: {}\n\ndata: x\n\n", [Event("{}", "error"), Event("x")]),
        (b"data: cut off", []),
        (b"data: cut off\n", []),
        (b"data: \xff\n\n", [Event("\ufffd")]),
        (b"\xef\xbb\xbfdata: a\n\n", [Event("a")]),
    ],
)
def test_rules(stream: bytes, events: list[Event]) -> None:
    assert parse([stream]) == events


def test_id_and_retry_are_kept() -> None:
    parser = SseParser()
    parser.feed(b"id: 7\nretry: 250\n\nid: a\0b\nretry: soon\nretry: \xc2\xb2\n\n")
    assert (parser.last_event_id, parser.retry_ms) == ("7", 250)


@pytest.mark.parametrize("chunk_bytes", [1 << 12, 1 << 22])
def test_a_line_beyond_the_bound_is_refused(chunk_bytes: int) -> None:
    stream = b"data: " + b"x" * (MAX_LINE_BYTES + 1) + b"\n\n"
    with pytest.raises(SseError, match="a line"):
        parse([stream[at : at + chunk_bytes] for at in range(0, len(stream), chunk_bytes)])


def test_an_event_of_many_lines_is_bounded_too() -> None:
    parser = SseParser()
    line = b"data: " + b"x" * 65536 + b"\n"
    for _ in range(15):
        parser.feed(line)
    with pytest.raises(SseError, match="the data of an event"):
        parser.feed(line)


def test_a_line_at_the_bound_passes() -> None:
    text = "x" * (MAX_LINE_BYTES - len("data: "))
    assert parse([b"data: " + text.encode() + b"\n\n"]) == [Event(text)]
