"""What the known-truth server answers a request, without I/O: its chunks, and when each is due.

Bodies are read by the gateway's own reader, and chunks look like the gateway's.
"""

import time

import msgspec

from harness.core import EngineError
from harness.load.truth import Truth, TruthRow
from harness.surface.openai import Call, parse_openai

PATH = "/v1/completions"
#: What a client may ask before it sends anything.
HEALTH_PATH = "/health"


class Answer:
    """One request's stream: ``chunk`` is the next to write, due at ``due_mono_ns``."""

    def __init__(self, call: Call, row: TruthRow, truth: Truth) -> None:
        self.row = row
        self.due_mono_ns = 0
        self._written_tokens = 0
        self._call = call
        self._per_chunk = truth.tokens_per_chunk
        self._first_ns = round(truth.ttft_s * 1e9)
        self._chunk_ns = round(truth.chunk_s * 1e9)
        start = {"id": row.rid, "object": "text_completion", "created": int(time.time())}
        envelope = msgspec.json.encode({**start, "model": call.model})[:-1]
        self._envelope = b"data: " + envelope + b',"choices":['
        self._usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":' % row.prompt_tokens
        self.chunk = self._next_chunk()

    @property
    def over(self) -> bool:
        """Every chunk is written."""
        return self._written_tokens == self.row.output_tokens

    def begin(self, first_byte_mono_ns: int, read_mono_ns: int) -> None:
        """The request's first and last bytes were read then, which fixes the timeline."""
        self.row.first_byte_mono_ns = first_byte_mono_ns
        self.row.read_mono_ns = read_mono_ns
        self.due_mono_ns = read_mono_ns + self._first_ns

    def advance(self, written_mono_ns: int) -> None:
        """The chunk was handed over; format the next one, unless it was the last."""
        self.row.due_mono_ns.append(self.due_mono_ns)
        self.row.written_mono_ns.append(written_mono_ns)
        self._written_tokens = self._next_tokens()
        self.due_mono_ns += self._chunk_ns
        if not self.over:
            self.chunk = self._next_chunk()

    def _next_tokens(self) -> int:
        more = self._per_chunk if self._written_tokens else 1
        return min(self._written_tokens + more, self.row.output_tokens)

    def _next_chunk(self) -> bytes:
        tokens, call = self._next_tokens(), self._call
        last = tokens == self.row.output_tokens
        event = b'%b{"index":0,"finish_reason":%b,"text":"%b"}]' % (
            self._envelope,
            b'"length"' if last else b"null",
            b" ok" * (tokens - self._written_tokens),
        )
        if call.usage_always:
            event += b"," + self._counts(tokens)
        if not last:
            return _framed(event + b"}\n\n")
        end = b"data: [DONE]\n\n"
        if call.usage_at_end:
            end = self._envelope + b"]," + self._counts(tokens) + b"}\n\n" + end
        return _framed(event + b"}\n\n") + _framed(end) + b"0\r\n\r\n"

    def _counts(self, tokens: int) -> bytes:
        return b'%b%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}}' % (
            self._usage,
            tokens,
            self.row.prompt_tokens + tokens,
        )


def answer_to(head: bytes, body: bytes, truth: Truth) -> Answer | str:
    """The stream that a request gets, or the status line's code and reason without a body."""
    method, target = head.decode("latin-1").split(" ", 2)[:2]
    if target == HEALTH_PATH:
        return "200 OK"
    if method != "POST" or target != PATH:
        return "404 Not Found"
    if truth.api_key is not None and header(head, "authorization") != f"Bearer {truth.api_key}":
        return "401 Unauthorized"
    try:
        call = parse_openai(body, "completions")
        if not call.body.stream:
            raise EngineError("only streams are served here")
        prompt_tokens = _prompt_tokens(call)
    except EngineError as error:
        return f"400 {error}".replace("\n", " ")
    row = TruthRow(
        rid=call.body.rid,
        request_id=header(head, "x-request-id"),
        prompt_tokens=prompt_tokens,
        output_tokens=call.output_tokens,
        first_byte_mono_ns=0,
        read_mono_ns=0,
        due_mono_ns=[],
        written_mono_ns=[],
        whole=False,
    )
    return Answer(call, row, truth)


def header(head: bytes, name: str) -> str | None:
    """The value of a header by its lower-case name; ``head`` ends with its empty line."""
    at = head.lower().find(b"\r\n%b:" % name.encode())
    if at < 0:
        return None
    start = at + len(name) + 3
    return head[start : head.index(b"\r\n", start)].strip().decode("latin-1")


def _prompt_tokens(call: Call) -> int:
    """Of a prompt of text, which this server has no tokenizer for, the words."""
    if call.prompt_tokens is not None:
        return call.prompt_tokens
    if call.body.text is not None:
        return len(call.body.text.split())
    try:
        return len(msgspec.json.decode(call.body.input_ids, type=list[int]))
    except msgspec.DecodeError as error:
        raise EngineError(f"prompt: {error}") from error


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
