"""A prompt's ids taken out of a body before it is read: the same call as by reading all of it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core import EngineError
from harness.surface import ids as surface_ids
from harness.surface.generate import decode_body
from harness.surface.ids import MIN_BODY_BYTES, count_ids, lifted_ids
from harness.surface.openai import parse_generate, parse_openai

IDS = list(range(10_000, 12_000))


@pytest.fixture(autouse=True)
def short_bodies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for long bodies is tried on short ones."""
    monkeypatch.setattr(surface_ids, "MIN_BODY_BYTES", 0)


def is_canonical(text: bytes) -> int | None:
    """The plain way: what JSON makes of it, written again."""
    try:
        values = json.loads(text)
    except ValueError:
        return None
    if not isinstance(values, list) or not values:
        return None
    if not all(type(value) is int and value >= 0 for value in values):
        return None
    return len(values) if json.dumps(values, separators=(",", ":")).encode() == text else None


@given(st.text("0123456789,[]- .", max_size=12).map(str.encode))
def test_only_canonical_lists_are_counted(text: bytes) -> None:
    for candidate in (text, b"[%b]" % text):
        assert count_ids(candidate) == is_canonical(candidate)


@pytest.mark.parametrize("tokens", [1, 5_461, 5_462, 10_922, 16_384, 32_768, 70_000])
@pytest.mark.parametrize("token", [0, 7, 10, 12345, 2**40])
def test_long_lists_are_counted_across_pieces(tokens: int, token: int) -> None:
    text = json.dumps([token] * tokens, separators=(",", ":")).encode()
    assert count_ids(text) == tokens
    for wrong in (text[:-1] + b",]", text.replace(b",", b",,", 1), text[:-1] + b",01]"):
        assert count_ids(wrong) is None or wrong == text


def bodies(key: str) -> list[bytes]:
    """Bodies in which ``key`` stands where it should, twice, deeper, in a string, or not at all."""
    dense = (",", ":")
    written: list[Any] = [
        {key: [1, 2, 3], "max_tokens": 4},
        {"max_tokens": 4, key: [0, 10]},
        {"deeper": {key: [5, 6]}, key: [7]},
        {"deeper": {key: [5, 6]}},
        {"text": f'"{key}":[1,2]', key: [9]},
        {"text": f'\\"{key}":[1,2]'},
        {key: [1, -2]},
        {key: [1.5]},
        {key: []},
        {key: "a text"},
        {key: [[1]]},
    ]
    raw = [json.dumps(one, separators=dense).encode() for one in written]
    twice = b'{"%b":[1],"%b":[2,3]}' % (key.encode(), key.encode())
    return [*raw, twice, twice.replace(b"[2,3]", b'"x"'), b'{"%b":[1,2}' % key.encode(), b"[1]"]


def outcome(parse: Any, raw: bytes) -> tuple[str, Any]:
    try:
        call = parse(raw)
    except EngineError:
        return "refused", None
    assert call.prompt_tokens in (None, bytes(call.body.input_ids).count(b",") + 1)
    return "taken", msgspec.to_builtins(call.body, builtin_types=(msgspec.Raw,))


@pytest.mark.parametrize("raw", bodies("input_ids") + bodies("prompt"))
def test_a_body_is_read_as_if_nothing_had_been_taken_out(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers = (parse_generate, lambda body: parse_openai(body, "completions"))
    quick = [outcome(parse, raw) for parse in parsers]
    monkeypatch.setattr(surface_ids, "MIN_BODY_BYTES", 10**9)
    assert quick == [outcome(parse, raw) for parse in parsers]


def test_a_long_prompt_is_counted_on_the_way() -> None:
    raw = json.dumps({"rid": "r", "input_ids": IDS, "stream": True}, separators=(",", ":")).encode()
    assert len(raw) > MIN_BODY_BYTES
    call = parse_generate(raw)
    assert call.prompt_tokens == len(IDS)
    assert (call.body.rid, call.body.stream) == ("r", True)
    assert bytes(call.body.input_ids) == bytes(decode_body(raw).input_ids)


def test_white_space_is_left_to_the_reader() -> None:
    raw = json.dumps({"prompt": IDS}).encode()
    assert lifted_ids(raw, b"prompt") is None
    assert parse_openai(raw, "completions").prompt_tokens is None
