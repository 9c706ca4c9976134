"""The OpenAI surface over ``/generate``: completions and chat completions, streamed and whole.

A body becomes a :class:`Call`; chunks of a ``/generate`` stream become OpenAI chunks. Token ids in
``prompt`` are passed through untouched. ``usage`` rides on every chunk where
``stream_options.continuous_usage_stats`` asks for it, so that a client never has to count tokens
by chunks or tokenise text. Source: the OpenAI API reference and the ``continuous_usage_stats``
option that vLLM and SGLang share.
"""

import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from harness.core import EngineError
from harness.surface.generate import (
    MAX_OUTPUT_TOKENS,
    NO_IDS,
    GenerateBody,
    GenerateChunk,
    SamplingParams,
    decode_body,
    encode,
    sse,
)
from harness.surface.ids import lifted_ids

MAX_RID_CHARACTERS = 256
Surface = Literal["generate", "completions", "chat"]


class StreamOptions(msgspec.Struct):
    """Which usage figures a stream carries."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatMessage(msgspec.Struct):
    """One turn; content is text, or text parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class OpenAIBody(msgspec.Struct):
    """The keys of both OpenAI bodies that this front acts on; sampling keys are passed over."""

    model: str = ""
    prompt: msgspec.Raw = NO_IDS
    messages: list[ChatMessage] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    rid: str | None = None
    n: int = 1
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A request as the front understood it, whatever surface it came by."""

    surface: Surface
    model: str
    body: GenerateBody
    usage_at_end: bool
    usage_always: bool
    #: Where reading the body has counted them on its way.
    prompt_tokens: int | None = None

    @property
    def output_tokens(self) -> int:
        return self.body.sampling_params.max_new_tokens


_openai_decoder = msgspec.json.Decoder(OpenAIBody)
_text_decoder = msgspec.json.Decoder(str)


def parse_generate(raw: bytes) -> Call:
    """``/generate`` as a call."""
    lifted = lifted_ids(raw, b"input_ids")
    body = decode_body(raw if lifted is None else lifted.rest)
    if lifted is not None:
        if bytes(body.input_ids) == lifted.placeholder:
            body.input_ids = msgspec.Raw(lifted.ids)
        else:  # they stood elsewhere
            body, lifted = decode_body(raw), None
    if not body.input_ids and body.text is None:
        raise EngineError("/generate needs input_ids (token ids) or text")
    _check_output(body.sampling_params.max_new_tokens, "sampling_params.max_new_tokens")
    check_rid(body.rid)
    tokens = None if lifted is None else lifted.tokens
    return Call("generate", "", body, usage_at_end=True, usage_always=True, prompt_tokens=tokens)


def parse_openai(raw: bytes, surface: Literal["completions", "chat"]) -> Call:
    """A completions or chat completions body as a call; EngineError names what is wrong."""
    lifted = lifted_ids(raw, b"prompt") if surface == "completions" else None
    try:
        given = _openai_decoder.decode(raw if lifted is None else lifted.rest)
        if lifted is not None:
            if bytes(given.prompt) == lifted.placeholder:
                given.prompt = msgspec.Raw(lifted.ids)
            else:  # they stood elsewhere
                given, lifted = _openai_decoder.decode(raw), None
        text = _text_decoder.decode(given.prompt) if _is_text(given.prompt) else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"the body is not valid: {error}") from error
    if given.n != 1:
        raise EngineError(f"n = {given.n}: one choice a request is what this front serves")
    ids = NO_IDS
    if surface == "chat":
        if not given.messages:
            raise EngineError("messages is missing or empty")
        text = _chat_text(given.messages)
    elif bytes(given.prompt).lstrip()[:1] == b"[":
        ids = given.prompt
    elif text is None:
        raise EngineError("prompt must be a string or a list of token ids")
    limit = given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens
    output_tokens = 16 if limit is None else limit  # the default of the OpenAI API
    _check_output(output_tokens, "max_tokens")
    check_rid(given.rid)
    options = given.stream_options or StreamOptions()
    body = GenerateBody(
        input_ids=ids,
        text=text,
        sampling_params=SamplingParams(output_tokens, given.ignore_eos, given.temperature),
        stream=given.stream,
        rid=given.rid,
        bootstrap_host=given.bootstrap_host,
        bootstrap_port=given.bootstrap_port,
        bootstrap_room=given.bootstrap_room,
    )
    return Call(
        surface,
        given.model,
        body,
        options.include_usage,
        options.continuous_usage_stats,
        None if lifted is None else lifted.tokens,
    )


def _is_text(prompt: msgspec.Raw) -> bool:
    return bytes(prompt).lstrip()[:1] == b'"'


def _check_output(tokens: int, name: str) -> None:
    if not 1 <= tokens <= MAX_OUTPUT_TOKENS:
        raise EngineError(f"{name} is {tokens}; it must be from 1 to {MAX_OUTPUT_TOKENS}")


def check_rid(rid: str | None) -> None:
    """A request's name travels through every record: it has a bound."""
    if rid is not None and not 1 <= len(rid) <= MAX_RID_CHARACTERS:
        raise EngineError(f"rid must have from 1 to {MAX_RID_CHARACTERS} characters")


def _chat_text(messages: list[ChatMessage]) -> str:
    lines = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        lines.append(f"<|{message.role}|>{content or ''}")
    return "\n".join(lines) + "\n<|assistant|>"


def usage_of(chunk: GenerateChunk) -> dict[str, object]:
    """OpenAI's usage from a chunk's ``meta_info``."""
    meta = chunk.meta_info
    return {
        "prompt_tokens": meta.prompt_tokens,
        "completion_tokens": meta.completion_tokens,
        "total_tokens": meta.prompt_tokens + meta.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": meta.cached_tokens},
    }


def render_chunk(call: Call, chunk: GenerateChunk) -> bytes:
    """One event of the client's stream for one event of the worker's."""
    if call.surface == "generate":
        return sse(chunk)
    payload = _envelope(call, chunk, streamed=True)
    if call.usage_always:
        payload["usage"] = usage_of(chunk)
    return sse(payload)


def render_usage(call: Call, chunk: GenerateChunk) -> bytes:
    """The chunk without choices that closes a stream when ``include_usage`` was asked for."""
    if call.surface == "generate" or not call.usage_at_end:
        return b""
    payload = _envelope(call, chunk, streamed=True)
    payload["choices"] = []
    payload["usage"] = usage_of(chunk)
    return sse(payload)


def render_whole(call: Call, chunk: GenerateChunk) -> bytes:
    """The answer to a request without streaming; ``chunk`` holds the whole text."""
    if call.surface == "generate":
        return encode(chunk)
    payload = _envelope(call, chunk, streamed=False)
    payload["usage"] = usage_of(chunk)
    return encode(payload)


def render_error(message: str, kind: str, phase: str | None = None) -> bytes:
    """OpenAI's error object; ``phase`` says where a request failed."""
    return encode({"error": {"message": message, "type": kind, "code": phase}})


def _envelope(call: Call, chunk: GenerateChunk, *, streamed: bool) -> dict[str, Any]:
    finish = chunk.meta_info.finish_reason
    reason = finish.get("type") if isinstance(finish, dict) else finish
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if call.surface == "completions":
        choice["text"] = chunk.text
        kind = "text_completion"
    elif streamed:
        choice["delta"] = {"role": "assistant", "content": chunk.text}
        kind = "chat.completion.chunk"
    else:
        choice["message"] = {"role": "assistant", "content": chunk.text}
        kind = "chat.completion"
    return {
        "id": chunk.meta_info.id,
        "object": kind,
        # OpenAI's field is a calendar time; no duration is taken from it.
        "created": int(time.time()),
        "model": call.model,
        "choices": [choice],
    }
