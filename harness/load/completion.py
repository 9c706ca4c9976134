"""What an OpenAI completion stream says about tokens and time, without I/O.

Each chunk carries ``usage`` (``stream_options.continuous_usage_stats``), so tokens are counted by
the server and never guessed from text: a chunk's new tokens are the growth of
``usage.completion_tokens``. The first token is in the first chunk that carries a generated one:
``completion_tokens`` > 0 or text. The stream is complete only with ``[DONE]`` and with the counts
that were asked for; anything else raises StreamError with the phase to blame.
"""

from typing import Literal

import msgspec

from harness.surface.sse import Event, SseError, SseParser

FailurePhase = Literal[
    "connect",
    "send",
    "headers",
    "first_token",
    "stream",
    "aborted",
    "timeout",
    "protocol",
    "usage_mismatch",
]

#: What is quoted of a server's answer.
EXCERPT_CHARS = 300


class StreamError(Exception):
    """A request failed, and ``phase`` is where."""

    def __init__(self, phase: FailurePhase, message: str) -> None:
        super().__init__(message)
        self.phase: FailurePhase = phase


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Chunk).decode


class CompletionStream:
    """One response body: feed bytes with the time they arrived, read tokens and timestamps."""

    def __init__(self, input_tokens: int, output_tokens: int) -> None:
        self._input_tokens = input_tokens
        self._output_tokens = output_tokens
        self._parser = SseParser()
        self.done = False
        self.first_token_mono_ns: int | None = None
        self.chunk_mono_ns: list[int] = []
        self.chunk_tokens: list[int] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def feed(self, data: bytes | bytearray, mono_ns: int) -> None:
        """Take ``data`` that arrived at ``mono_ns``. Raises StreamError."""
        try:
            events = self._parser.feed(data)
        except SseError as error:
            raise StreamError("protocol", str(error)) from error
        for event in events:
            self._event(event, mono_ns)

    def check_complete(self) -> None:
        """Raise StreamError unless the stream ended with the counts that were asked for."""
        if self.first_token_mono_ns is None:
            raise StreamError("first_token", "the stream ended without a generated token")
        if not self.done:
            raise StreamError("protocol", "the stream ended without [DONE]")
        if self.completion_tokens is None or self.prompt_tokens is None:
            raise StreamError("protocol", "the stream carried no usage")
        if self.completion_tokens != self._output_tokens:
            raise StreamError(
                "usage_mismatch",
                f"asked for {self._output_tokens} tokens, the server generated "
                f"{self.completion_tokens}",
            )
        if self.prompt_tokens != self._input_tokens:
            raise StreamError(
                "usage_mismatch",
                f"sent {self._input_tokens} prompt tokens, the server counted {self.prompt_tokens}",
            )

    def _event(self, event: Event, mono_ns: int) -> None:
        if self.done:
            raise StreamError("protocol", f"data after [DONE]: {excerpt(event.data)}")
        if event.data == "[DONE]":
            self.done = True
            return
        try:
            chunk = _decode(event.data)
        except msgspec.DecodeError as error:
            if event.name == "error":
                raise StreamError("stream", f"error event: {excerpt(event.data)}") from error
            raise StreamError(
                "protocol", f"not a completion chunk ({error}): {excerpt(event.data)}"
            ) from error
        if chunk.error is not None or event.name == "error":
            raise StreamError("stream", f"error event: {excerpt(event.data)}")
        self._chunk(chunk, mono_ns)

    def _chunk(self, chunk: _Chunk, mono_ns: int) -> None:
        has_text = any(choice.text for choice in chunk.choices)
        if chunk.usage is None:
            if has_text:
                raise StreamError(
                    "protocol",
                    "a chunk with text carries no usage: the server does not honour "
                    "stream_options.continuous_usage_stats, so its tokens cannot be timed",
                )
            return
        new_tokens = self._new_tokens(chunk.usage)
        if new_tokens > 0 and not chunk.choices:
            raise StreamError(
                "protocol",
                f"the summary chunk counts {new_tokens} tokens that no streamed chunk carried",
            )
        if self.first_token_mono_ns is None and (new_tokens > 0 or has_text):
            self.first_token_mono_ns = mono_ns
        elif new_tokens == 0:
            return
        self.chunk_mono_ns.append(mono_ns)
        self.chunk_tokens.append(new_tokens)

    def _new_tokens(self, usage: _Usage) -> int:
        new_tokens = usage.completion_tokens - (self.completion_tokens or 0)
        if new_tokens < 0 or usage.prompt_tokens < 0:
            raise StreamError(
                "protocol",
                f"usage went back from {self.completion_tokens} to {usage.completion_tokens} "
                f"completion tokens, or is negative (prompt_tokens {usage.prompt_tokens})",
            )
        self.completion_tokens = usage.completion_tokens
        self.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens > self._output_tokens:
            raise StreamError(
                "usage_mismatch",
                f"asked for {self._output_tokens} tokens, the server generated "
                f"{usage.completion_tokens} and went on",
            )
        return new_tokens


def excerpt(text: str) -> str:
    """``text`` on one line and bounded, for a message."""
    line = " ".join(text[: 4 * EXCERPT_CHARS].split())
    return line if len(line) <= EXCERPT_CHARS else line[: EXCERPT_CHARS - 3] + "..."
