"""The OpenAI surface: what it takes, what it refuses by name, and what it answers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core import EngineError
from harness.surface.generate import GenerateChunk, MetaInfo, prompt_of_ids, prompt_of_text
from harness.surface.openai import (
    parse_generate,
    parse_openai,
    render_chunk,
    render_usage,
    render_whole,
)

CHUNK = GenerateChunk(" a b", [11, 12], MetaInfo("r1", 7, 2, 3, {"type": "length"}))


def completions(**keys: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, **keys}).encode()


def event(raw: bytes) -> Any:
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    return json.loads(raw[len(b"data: ") :])


def test_token_ids_pass_through_untouched() -> None:
    call = parse_openai(b'{"prompt": [1,  2,3], "max_tokens": 5, "rid": "x"}', "completions")
    assert bytes(call.body.input_ids) == b"[1,  2,3]"
    assert call.body.text is None
    assert (call.output_tokens, call.body.rid) == (5, "x")


def test_text_becomes_one_token_a_byte() -> None:
    call = parse_openai(completions(prompt="h\u00e9"), "completions")
    assert call.body.text == "h\u00e9"
    assert prompt_of_text(call.body.text) == prompt_of_ids(b"[104, 195, 169]")


def test_chat_joins_turns_and_text_parts() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    raw = json.dumps({"messages": messages, "max_completion_tokens": 9}).encode()
    call = parse_openai(raw, "chat")
    assert call.body.text == "<|system|>be brief\n<|user|>ab\n<|assistant|>"
    assert call.output_tokens == 9


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "not valid"),
        (b"[]", "not valid"),
        (completions(prompt=None), "prompt must be"),
        (completions(prompt={"a": 1}), "prompt must be"),
        (completions(max_tokens=0), "max_tokens is 0"),
        (completions(max_tokens=10**9), "max_tokens is 1000000000"),
        (completions(max_tokens="4"), "max_tokens"),
        (completions(n=2), "n = 2"),
        (completions(stream="yes"), "stream"),
    ],
)
def test_a_wrong_body_is_refused_by_name(raw: bytes, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        parse_openai(raw, "completions")


@pytest.mark.parametrize("ids", [b"[1.5]", b"[-1]", b'["a"]', b"[[1]]", b"[null]", b"[]", b"{}"])
def test_ids_that_are_no_token_ids_are_refused(ids: bytes) -> None:
    with pytest.raises(EngineError, match="prompt"):
        prompt_of_ids(ids)


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(raw: bytes) -> None:
    for parse in (
        parse_generate,
        lambda r: parse_openai(r, "completions"),
        lambda r: parse_openai(r, "chat"),
    ):
        try:
            parse(raw)
        except EngineError:
            continue


@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), other=st.integers(0, 9))
def test_a_prompt_is_counted_and_hashed_whatever_its_white_space(
    ids: list[int], other: int
) -> None:
    prompt = prompt_of_ids(json.dumps(ids).encode())
    assert prompt.tokens == len(ids)
    assert prompt_of_ids(json.dumps(ids, indent=1, separators=(" ,\t", ":")).encode()) == prompt
    assert prompt_of_ids(json.dumps([*ids, other]).encode()).digest != prompt.digest


def test_usage_rides_on_every_chunk_where_asked() -> None:
    asked = completions(stream_options={"include_usage": True, "continuous_usage_stats": True})
    call = parse_openai(asked, "completions")
    payload = event(render_chunk(call, CHUNK))
    assert payload["choices"][0] == {"index": 0, "finish_reason": "length", "text": " a b"}
    assert payload["usage"]["completion_tokens"] == 2
    assert payload["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    closing = event(render_usage(call, CHUNK))
    assert closing["choices"] == []
    assert closing["usage"]["total_tokens"] == 9


def test_usage_stays_away_where_not_asked() -> None:
    call = parse_openai(completions(), "completions")
    assert "usage" not in event(render_chunk(call, CHUNK))
    assert render_usage(call, CHUNK) == b""


def test_whole_answers_have_each_surfaces_shape() -> None:
    chat = parse_openai(b'{"messages": [{"role": "user", "content": "x"}]}', "chat")
    answer = json.loads(render_whole(chat, CHUNK))
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": " a b"}
    generate = parse_generate(b'{"input_ids": [1]}')
    answer = json.loads(render_whole(generate, CHUNK))
    assert answer["output_ids"] == [11, 12]
    assert answer["meta_info"]["completion_tokens"] == 2
