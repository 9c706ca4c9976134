"""SGLang's PD protocol, as far as the gateway and the workers here speak it.

``POST /generate`` with ``input_ids`` or ``text``, ``sampling_params``, ``stream``, ``rid`` and,
for a disaggregated pair, ``bootstrap_host``, ``bootstrap_port``, ``bootstrap_room``: the same body
goes to the prefill and to the decode server, and the decode server answers. The stream is
server-sent events whose data is ``{"text", "output_ids", "meta_info"}``. Beside SGLang's own
``meta_info`` keys the workers report their spans under ``prfaas`` (monotonic nanoseconds of the
worker's host), which is what the TTFT budget is made of.
Source: docs.sglang.ai (native API, PD disaggregation); field names of SGLang 0.5.
"""

from array import array
from typing import Any

import msgspec

from harness.core import EngineError

#: 1M tokens of up to 6 digits and a separator, and some room for the rest of a body.
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_OUTPUT_TOKENS = 1_000_000


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """``max_new_tokens`` is SGLang's default 128 unless given; other keys are passed over."""

    max_new_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 1.0


class GenerateBody(msgspec.Struct, omit_defaults=True):
    """Body of ``/generate``. ``input_ids`` stays raw so that a front can pass it through unread."""

    input_ids: msgspec.Raw = msgspec.Raw(b"")
    text: str | None = None
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    stream: bool = False
    rid: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


class PrefillSpan(msgspec.Struct):
    """What a prefill instance measured of one request; None where it has not happened yet."""

    received_mono_ns: int
    start_mono_ns: int
    end_mono_ns: int
    service_wall_s: float
    late_s: float
    kv_acked_mono_ns: int | None
    kv_wire_bytes_sent: int


class DecodeSpan(msgspec.Struct):
    """What a decode instance measured of one request."""

    received_mono_ns: int
    landed_mono_ns: int
    granted_mono_ns: int
    first_written_mono_ns: int
    end_mono_ns: int | None
    kv_wire_bytes_received: int
    kv_layers: int
    cached_tokens: int
    late_s: float


class Spans(msgspec.Struct, omit_defaults=True):
    """The harness' own part of ``meta_info``."""

    event: str = ""
    prefill: PrefillSpan | None = None
    decode: DecodeSpan | None = None


class MetaInfo(msgspec.Struct, omit_defaults=True):
    """SGLang's ``meta_info``: the keys used here."""

    id: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: Any = None
    prfaas: Spans | None = None


class GenerateChunk(msgspec.Struct, omit_defaults=True):
    """One event of a ``/generate`` stream, or the whole answer without streaming."""

    text: str = ""
    output_ids: list[int] = []
    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)
    error: Any = None


class Registration(msgspec.Struct, forbid_unknown_fields=True):
    """Where a decode instance takes the KV of a room: ``PUT /kv/{room}`` at the prefill instance."""

    host: str
    port: int


_ids_decoder = msgspec.json.Decoder(list[int])
_body_decoder = msgspec.json.Decoder(GenerateBody)
_chunk_decoder = msgspec.json.Decoder(GenerateChunk)
encode = msgspec.json.encode


def decode_body(raw: bytes) -> GenerateBody:
    """Parse a ``/generate`` body; EngineError says which field is wrong."""
    try:
        return _body_decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the body of /generate is not valid: {error}") from error


def decode_chunk(raw: bytes | str) -> GenerateChunk:
    """Parse one event of a worker's stream."""
    try:
        return _chunk_decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise EngineError(f"a worker's event is outside the protocol: {error}") from error


def decode_ids(raw: bytes | msgspec.Raw) -> "array[int]":
    """Token ids of a prompt as unsigned 32-bit integers; EngineError when they are not ids."""
    try:
        return array("I", _ids_decoder.decode(raw))
    except (msgspec.MsgspecError, OverflowError) as error:
        raise EngineError(
            f"input_ids must be a list of token ids from 0 to 2^32 - 1: {error}"
        ) from error


def count_ids(raw: bytes | msgspec.Raw) -> int:
    """How many token ids a prompt has; that they are in range is for the worker to check."""
    try:
        return len(_ids_decoder.decode(raw))
    except msgspec.MsgspecError as error:
        raise EngineError(f"the prompt must be a list of token ids: {error}") from error


def ids_of_text(text: str) -> "array[int]":
    """The emulated engines' tokenizer: one token a UTF-8 byte."""
    # By elements: array() takes bytes for its memory image.
    return array("I", list(text.encode("utf-8", "surrogatepass")))


def sse(payload: object) -> bytes:
    """One server-sent event carrying ``payload`` as JSON."""
    return b"data: " + encode(payload) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
