"""Tokens and times from a completion stream, and what is refused in one."""

import json
from typing import Any

import pytest

from harness.load.completion import EXCERPT_CHARS, CompletionStream, StreamError, excerpt


def chunk(text: str | None, completed: int | None = None, prompt: int = 10) -> bytes:
    value: dict[str, Any] = {"choices": [] if text is None else [{"index": 0, "text": text}]}
    if completed is not None:
        value["usage"] = {"prompt_tokens": prompt, "completion_tokens": completed}
    return f"data: {json.dumps(value)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def fed(*pieces: bytes, output_tokens: int = 8) -> CompletionStream:
    stream = CompletionStream(10, output_tokens)
    for mono_ns, piece in enumerate(pieces, 1):
        stream.feed(piece, mono_ns)
    return stream


def failure(*pieces: bytes, output_tokens: int = 8) -> StreamError:
    with pytest.raises(StreamError) as caught:
        fed(*pieces, output_tokens=output_tokens).check_complete()
    return caught.value


def test_tokens_are_the_growth_of_usage() -> None:
    stream = fed(chunk("", 0), chunk(" a", 1), chunk(" b c", 4), chunk("", 8), chunk(None, 8), DONE)
    stream.check_complete()
    assert stream.first_token_mono_ns == 2
    assert stream.chunk_mono_ns == [2, 3, 4]
    assert stream.chunk_tokens == [1, 3, 4]
    assert (stream.prompt_tokens, stream.completion_tokens) == (10, 8)


def test_a_counted_token_without_text_is_the_first() -> None:
    assert fed(chunk(""), chunk("", 1), chunk(" a", 2)).first_token_mono_ns == 2


def test_text_before_its_count_is_the_first() -> None:
    stream = fed(chunk(" a", 0), chunk(" b", 8), DONE)
    stream.check_complete()
    assert stream.first_token_mono_ns == 1
    assert (stream.chunk_mono_ns, stream.chunk_tokens) == ([1, 2], [0, 8])


def chat(delta: dict[str, Any], completed: int | None) -> bytes:
    value: dict[str, Any] = {"choices": [{"index": 0, "delta": delta}]}
    if completed is not None:
        value["usage"] = {"prompt_tokens": 10, "completion_tokens": completed}
    return f"data: {json.dumps(value)}\n\n".encode()


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "hi"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "content": None},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_the_first_token_of_a_chat_is_of_any_kind(delta: dict[str, Any]) -> None:
    """The first chunk says whose turn it is, the second is empty; usage lags behind by one."""
    empty = {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": []}
    stream = fed(chat({"role": "assistant"}, 0), chat(empty, 0), chat(delta, 0), chat({}, 8), DONE)
    stream.check_complete()
    assert stream.first_token_mono_ns == 3
    assert (stream.chunk_mono_ns, stream.chunk_tokens) == ([3, 4], [0, 8])


def test_a_chat_without_counts_is_refused() -> None:
    assert failure(chat({"role": "assistant"}, None), chat({"reasoning": "a"}, None)).phase == (
        "protocol"
    )


def native(text: str, completed: int) -> bytes:
    meta = {"id": "x", "prompt_tokens": 10, "completion_tokens": completed, "cached_tokens": 0}
    return f"data: {json.dumps({'text': text, 'output_ids': [], 'meta_info': meta})}\n\n".encode()


def test_the_engines_own_stream_counts_in_meta_info() -> None:
    stream = fed(native("", 0), native("a", 1), native("a b", 8), DONE)
    stream.check_complete()
    assert stream.first_token_mono_ns == 2
    assert (stream.chunk_mono_ns, stream.chunk_tokens) == ([2, 3], [1, 7])


def test_unknown_fields_pass() -> None:
    fed(b'data: {"id":"x","object":"c","usage":null,"choices":[{"text":"","logprobs":[1]}]}\n\n')


@pytest.mark.parametrize(
    ("pieces", "phase", "words"),
    [
        ([DONE], "first_token", "without a generated token"),
        ([chunk("", 0), DONE], "first_token", "without a generated token"),
        ([chunk(" a", 8)], "protocol", r"without \[DONE\]"),
        ([chunk(" a")], "protocol", "continuous_usage_stats"),
        ([chunk(None, 8)], "protocol", "8 tokens that no streamed chunk carried"),
        ([chunk(" a", 3), chunk(" a", 2)], "protocol", "went back from 3 to 2"),
        ([chunk(" a", -1)], "protocol", "negative"),
        ([chunk(" a", 9)], "usage_mismatch", "asked for 8 tokens, the server generated 9"),
        ([chunk(" a", 7), DONE], "usage_mismatch", "generated 7"),
        ([chunk(" a", 8, prompt=11), DONE], "usage_mismatch", "sent 10 .* counted 11"),
        ([chunk(" a", 8), DONE, chunk(" b", 8)], "protocol", r"data after \[DONE\]"),
        ([b'data: {"error":{"message":"lost"}}\n\n'], "stream", "lost"),
        ([b"event: error\ndata: overloaded\n\n"], "stream", "overloaded"),
        ([b"data: nonsense\n\n"], "protocol", "not a completion chunk"),
        ([b'data: {"choices":{}}\n\n'], "protocol", "not a completion chunk"),
        ([b'data: {"usage":{"prompt_tokens":1.5}}\n\n'], "protocol", "not a completion chunk"),
        ([b'data: {"x":' + b"[" * 100_000 + b"\n\n"], "protocol", "not a completion chunk"),
        ([chunk(" a", 1, prompt=2**64)], "protocol", "not a completion chunk"),
        ([b"data: " + b"x" * (2 << 20)], "protocol", "longer than"),
    ],
)
def test_failures_have_a_phase(pieces: list[bytes], phase: str, words: str) -> None:
    caught = failure(*pieces)
    assert caught.phase == phase
    with pytest.raises(StreamError, match=words):
        raise caught


def test_lists_stay_bounded_by_the_tokens_asked_for() -> None:
    stream = fed(chunk(" a", 1), *[chunk(" more", 1)] * 1000)
    assert len(stream.chunk_mono_ns) == 1


def test_excerpts_are_one_bounded_line() -> None:
    assert excerpt("a\r\n b") == "a b"
    assert len(excerpt("x" * 10_000_000)) == EXCERPT_CHARS
