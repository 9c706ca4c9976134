"""One request to an engine, streamed, with a timestamp of our own for every chunk.

The time of a token is when the chunk that carries it was read from the socket (CLOCK_MONOTONIC);
how many tokens a chunk carries is the server's count, never guessed from text. ``TTFT`` counts from
before the request is written. Connections are kept and never pooled below the number of requests in
flight, so no request waits for another's connection.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from harness.core import EngineError
from harness.profiler.prompts import Prompt
from harness.surface.generate import GenerateChunk, MetaInfo, decode_chunk
from harness.surface.sse import SseError, SseParser

SurfaceName = Literal["sglang", "openai"]
EXCERPT_CHARS = 300


def _nothing() -> None:
    """Nobody waits for a token."""


@dataclass(slots=True)
class Tokens:
    """Arrivals of one stream, as they happen: when a chunk came and how many tokens there were."""

    mono_ns: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    on_token: Callable[[], None] = _nothing

    @property
    def total(self) -> int:
        return self.totals[-1] if self.totals else 0

    def saw(self, mono_ns: int, total: int) -> None:
        """A chunk that brings the stream to ``total`` tokens; one without new tokens is no news."""
        if total > self.total:
            self.mono_ns.append(mono_ns)
            self.totals.append(total)
            self.on_token()


@dataclass(slots=True)
class Answer:
    """One request, answered. ``metas`` are the chunks' ``meta_info`` of SGLang's surface by event:
    "" is the last one's. Counts are None where the server does not give them."""

    sent_mono_ns: int
    tokens: Tokens
    end_mono_ns: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    metas: dict[str, MetaInfo] = field(default_factory=dict)

    @property
    def ttft_wall_s(self) -> float:
        return (self.tokens.mono_ns[0] - self.sent_mono_ns) / 1e9


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_openai_chunk = msgspec.json.Decoder(_Chunk).decode


def _generate_body(prompt: Prompt, output_tokens: int, more: Mapping[str, Any]) -> str:
    rest = msgspec.json.encode(
        {
            "sampling_params": {
                "max_new_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
            },
            "stream": True,
            **more,
        }
    ).decode()
    return f'{{"input_ids":[{prompt.text}],{rest[1:]}'


def _completion_body(prompt: Prompt, output_tokens: int, more: Mapping[str, Any]) -> str:
    rest = msgspec.json.encode(
        {
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **more,
        }
    ).decode()
    return f'{{"prompt":[{prompt.text}],{rest[1:]}'


def _read_generate(data: str, mono_ns: int, answer: Answer) -> None:
    chunk: GenerateChunk = decode_chunk(data)
    if chunk.error is not None:
        raise EngineError(f"the engine failed: {str(chunk.error)[:EXCERPT_CHARS]}")
    meta = chunk.meta_info
    reason: Any = meta.finish_reason
    if isinstance(reason, dict) and reason.get("type") == "abort":  # a chunk like any other
        message = str(reason.get("message") or "it did not say why")
        raise EngineError(f"the engine aborted the request: {message[:EXCERPT_CHARS]}")
    answer.prompt_tokens, answer.cached_tokens = meta.prompt_tokens, meta.cached_tokens
    answer.metas["" if meta.prfaas is None else meta.prfaas.event] = answer.metas[""] = meta
    answer.tokens.saw(mono_ns, meta.completion_tokens)


def _read_completion(data: str, mono_ns: int, answer: Answer) -> None:
    try:
        chunk = _openai_chunk(data)
    except msgspec.MsgspecError as error:
        raise EngineError(f"not a completion chunk ({error}): {data[:EXCERPT_CHARS]}") from error
    if chunk.error is not None:
        raise EngineError(f"the engine failed: {str(chunk.error)[:EXCERPT_CHARS]}")
    if chunk.usage is None:
        if any(choice.text for choice in chunk.choices):
            raise EngineError(
                "a chunk with text carries no usage: the server does not honour "
                "stream_options.continuous_usage_stats, so its tokens cannot be timed"
            )
        return
    answer.prompt_tokens = chunk.usage.prompt_tokens
    if chunk.usage.prompt_tokens_details is not None:
        answer.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
    answer.tokens.saw(mono_ns, chunk.usage.completion_tokens)


@dataclass(frozen=True, slots=True)
class Surface:
    """How an engine is asked and how its events are read."""

    path: str
    body: Callable[[Prompt, int, Mapping[str, Any]], str]
    read: Callable[[str, int, Answer], None]


SURFACES: dict[SurfaceName, Surface] = {
    "sglang": Surface("/generate", _generate_body, _read_generate),
    "openai": Surface("/v1/completions", _completion_body, _read_completion),
}


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Without a limit of connections or time: a request has its own (``Probe``), and a long one may
    take longer than aiohttp's five minutes."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None),
    )


class Probe:
    """A server's address and the way to ask it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        surface: SurfaceName,
        timeout_wall_s: float,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.more: dict[str, Any] = dict(more or {})
        self._session = session
        self._surface = SURFACES[surface]
        self._timeout_wall_s = timeout_wall_s

    async def ask(
        self,
        prompt: Prompt,
        output_tokens: int,
        more: Mapping[str, Any] | None = None,
        tokens: Tokens | None = None,
    ) -> Answer:
        """Send one request and read its stream to the end. Cancelling the caller closes the
        connection, on which an engine aborts the request. EngineError names what went wrong."""
        surface = self._surface
        body = surface.body(prompt, output_tokens, {**self.more, **(more or {})}).encode()
        headers = {"Content-Type": "application/json"}
        answer = Answer(time.monotonic_ns(), tokens or Tokens())
        parser, is_done = SseParser(), False
        try:
            async with (
                _within(self._timeout_wall_s, self.url),
                self._session.post(self.url + surface.path, data=body, headers=headers) as response,
            ):
                if response.status != 200:
                    said = (await response.text())[:EXCERPT_CHARS]
                    raise EngineError(f"{self.url} answered {response.status}: {said}")
                async for piece in response.content.iter_any():
                    now_ns = time.monotonic_ns()
                    for event in parser.feed(piece):
                        is_done = event.data == "[DONE]"
                        if not is_done:
                            surface.read(event.data, now_ns, answer)
        except (aiohttp.ClientError, SseError) as error:
            raise EngineError(f"{self.url} broke off: {error or type(error).__name__}") from error
        answer.end_mono_ns = time.monotonic_ns()
        if not is_done or not answer.tokens.total:
            raise EngineError(f"{self.url} ended its stream without a token or without [DONE]")
        return answer

    async def get(self, path: str) -> Any:
        """A JSON document, or None where the server does not have it."""
        text = await self.text(path)
        try:
            return None if text is None else msgspec.json.decode(text)
        except msgspec.MsgspecError:
            return None

    async def text(self, path: str) -> str | None:
        """What lies at a path, None where the server answers otherwise than 200."""
        try:
            async with (
                _within(self._timeout_wall_s, self.url),
                self._session.get(self.url + path) as response,
            ):
                return await response.text() if response.status == 200 else None
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.url} is not reachable: {error}") from error


@asynccontextmanager
async def _within(wall_s: float, url: str) -> AsyncIterator[None]:
    """EngineError after ``wall_s``."""
    try:
        async with asyncio.timeout(wall_s):
            yield
    except TimeoutError as error:
        raise EngineError(f"{url} did not answer within {wall_s:g} s") from error
