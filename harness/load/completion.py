"""What a completion stream says about tokens and time, without I/O.

Three shapes are read: OpenAI's completions (``choices[].text``) and chat completions
(``choices[].delta``), and SGLang's own ``/generate`` (``text`` and ``meta_info``). Each chunk
carries the server's counts: ``usage`` (``stream_options.continuous_usage_stats``) or
``meta_info``. So tokens are counted by the server and never guessed from text: a chunk's new tokens
are the growth of ``completion_tokens``. The first token is in the first chunk that carries a
generated one of any kind: ``completion_tokens`` > 0, or text, reasoning, a part of a tool call or
of a refusal; a chunk that only says whose turn it is carries none. The stream is complete only with
``[DONE]`` and with the counts that were asked for; anything else raises StreamError with the phase
to blame.
"""

from typing import Annotated, Literal

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


class _Delta(msgspec.Struct, gc=False):
    """Servers name the model's reasoning in either of two ways."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    def has_token(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.tool_calls
            or self.refusal
        )


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None


#: No count of tokens comes near it, and a larger one would not fit the tables.
_Count = Annotated[int, msgspec.Meta(le=2**53)]


class _Counts(msgspec.Struct, gc=False):
    prompt_tokens: _Count
    completion_tokens: _Count


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Counts | None = None
    text: str | None = None
    meta_info: _Counts | None = None
    error: object = None

    def has_token(self) -> bool:
        """Whether it carries anything generated, as far as text says."""
        for choice in self.choices or ():
            if choice.text or (choice.delta is not None and choice.delta.has_token()):
                return True
        return bool(self.text)


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
        except (msgspec.DecodeError, RecursionError) as error:  # the latter of deep nesting
            if event.name == "error":
                raise StreamError("stream", f"error event: {excerpt(event.data)}") from error
            raise StreamError(
                "protocol", f"not a completion chunk ({error}): {excerpt(event.data)}"
            ) from error
        if chunk.error is not None or event.name == "error":
            raise StreamError("stream", f"error event: {excerpt(event.data)}")
        self._chunk(chunk, mono_ns)

    def _chunk(self, chunk: _Chunk, mono_ns: int) -> None:
        counts = chunk.usage or chunk.meta_info
        if counts is None:
            if chunk.has_token():
                raise StreamError(
                    "protocol",
                    "a chunk with text carries no usage: the server does not honour "
                    "stream_options.continuous_usage_stats, so its tokens cannot be timed",
                )
            return
        new_tokens = self._new_tokens(counts)
        if new_tokens > 0 and not chunk.choices and chunk.meta_info is None:
            raise StreamError(
                "protocol",
                f"the summary chunk counts {new_tokens} tokens that no streamed chunk carried",
            )
        if new_tokens == 0 and (self.first_token_mono_ns is not None or not chunk.has_token()):
            return
        if self.first_token_mono_ns is None:
            self.first_token_mono_ns = mono_ns
        self.chunk_mono_ns.append(mono_ns)
        self.chunk_tokens.append(new_tokens)

    def _new_tokens(self, usage: _Counts) -> int:
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
