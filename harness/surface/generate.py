"""SGLang's PD protocol, as far as the gateway and the workers here speak it.

``POST /generate`` with ``input_ids`` or ``text``, ``sampling_params``, ``stream``, ``rid`` and,
for a disaggregated pair, ``bootstrap_host``, ``bootstrap_port``, ``bootstrap_room``: the same body
goes to the prefill and to the decode server, and the decode server answers. The stream is
server-sent events whose data is ``{"text", "output_ids", "meta_info"}``. Beside SGLang's own
``meta_info`` keys the workers report their spans under ``prfaas`` (monotonic nanoseconds of the
worker's host), which is what the TTFT budget is made of.
Source: docs.sglang.ai (native API, PD disaggregation); field names of SGLang 0.5.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from harness.core import EngineError
from harness.surface.ids import count_ids

#: 1M tokens of up to 6 digits and a separator, and some room for the rest of a body.
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_OUTPUT_TOKENS = 1_000_000
WHITE_SPACES = (b" ", b"\t", b"\r", b"\n")


#: A body without ids. One object, since it is left out of an encoded body by identity.
NO_IDS = msgspec.Raw(b"")


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """``max_new_tokens`` is SGLang's default 128 unless given; other keys are passed over."""

    max_new_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 1.0


class GenerateBody(msgspec.Struct, omit_defaults=True):
    """Body of ``/generate``. ``input_ids`` stays raw so that a front can pass it through unread."""

    input_ids: msgspec.Raw = NO_IDS
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
    #: Segments sent again on the connections to the decode instance meanwhile.
    kv_retransmits: int | None = None
    #: The prefix that was not computed, and what of it came from another instance's pool.
    cached_tokens: int = 0
    fetched_tokens: int = 0
    #: When each layer was final; told by a worker that is asked to (``EngineConfig``).
    layer_final_mono_ns: list[int] = []


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
    #: The prefix whose growing KV did not have to come, since it lay in the cluster.
    resident_tokens: int = 0


class PrefillTimes(msgspec.Struct):
    """What SGLang's prefill server says of one request: seconds by its own clock, None where its
    version does not say."""

    queue_s: float | None
    prefill_s: float | None
    #: From the end of prefill until the server knows that the last KV has gone.
    transfer_s: float | None
    prompt_tokens: int
    cached_tokens: int
    first_token: int | None


class DecodeTimes(msgspec.Struct):
    """What SGLang's decode server says of one request; the same way."""

    #: From the KV's arrival until the request is in a batch.
    admission_s: float | None
    first_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    retractions: int
    #: Whether it ran a prefill itself; None where its version does not say.
    prefilled: bool | None


class Spans(msgspec.Struct, omit_defaults=True):
    """The harness' own part of ``meta_info``. The times are of engines whose clock is not ours."""

    event: str = ""
    prefill: PrefillSpan | None = None
    decode: DecodeSpan | None = None
    prefill_times: PrefillTimes | None = None
    decode_times: DecodeTimes | None = None


class MetaInfo(msgspec.Struct, omit_defaults=True):
    """SGLang's ``meta_info``: the keys used here. Those of time need ``--enable-metrics``; they are
    seconds, and what is named ``_time`` or ``_ts`` is an instant by ``time.time()``, of which only
    differences within one server mean something."""

    id: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: Any = None
    prfaas: Spans | None = None
    num_retractions: int = 0
    request_received_ts: float | None = None
    queue_time: float | None = None
    forward_entry_time: float | None = None
    prefill_finished_time: float | None = None
    request_finished_ts: float | None = None
    response_sent_to_client_ts: float | None = None
    #: As SGLang 0.5.9 has them.
    total_retractions: int = 0
    prefill_finished_ts: float | None = None
    decode_finished_ts: float | None = None
    inference_time: float | None = None


class GenerateChunk(msgspec.Struct, omit_defaults=True):
    """One event of a ``/generate`` stream, or the whole answer without streaming."""

    text: str = ""
    output_ids: list[int] = []
    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)
    error: Any = None


class Registration(msgspec.Struct, forbid_unknown_fields=True):
    """Where a decode instance takes a room's KV: ``PUT /kv/{room}`` at the prefill instance.

    Growing KV of the first ``resident_tokens`` lies there already and is not to be sent.
    """

    host: str
    port: int
    resident_tokens: int = 0


_body_decoder = msgspec.json.Decoder(GenerateBody)
_chunk_decoder = msgspec.json.Decoder(GenerateChunk)
encode = msgspec.json.encode


def decode_body(raw: bytes) -> GenerateBody:
    """Parse a ``/generate`` body; EngineError says which field is wrong."""
    try:
        return _body_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"the body of /generate is not valid: {error}") from error


def decode_chunk(raw: bytes | str) -> GenerateChunk:
    """Parse one event of a worker's stream."""
    try:
        return _chunk_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineError(f"a worker's event is outside the protocol: {error}") from error


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as an engine needs it: how many tokens, and a hash of all its ids."""

    tokens: int
    digest: int


def prompt_of_ids(raw: bytes | msgspec.Raw) -> Prompt:
    """A prompt from the JSON text of its ids, already known to be valid JSON.

    A JSON array that holds nothing but digits, commas and white space is a flat list of
    non-negative integers, and without white space its text is canonical: counting and hashing the
    text takes a tenth of what building 27,000 integers does. EngineError for anything else.
    """
    text = canonical(raw)
    tokens = count_ids(text)
    if tokens is None:
        if text == b"[]":
            raise EngineError("the prompt is empty")
        raise EngineError("the prompt must be a flat list of token ids: non-negative integers")
    return Prompt(tokens, xxhash.xxh3_64_intdigest(text))


def canonical(raw: bytes | msgspec.Raw) -> bytes:
    """JSON text of ids without white space."""
    text = bytes(raw)
    if any(space in text for space in WHITE_SPACES):
        text = text.translate(None, b"".join(WHITE_SPACES))
    return text


def prompt_of(body: GenerateBody) -> Prompt:
    """The prompt of a body, by ids or by text."""
    return prompt_of_ids(body.input_ids) if body.input_ids else prompt_of_text(body.text or "")


def prompt_of_text(text: str) -> Prompt:
    """The emulated engines' tokenizer: one token a UTF-8 byte."""
    return prompt_of_ids(_byte_ids(text))


def prompt_ids_text(body: GenerateBody) -> bytes:
    """The canonical JSON text of a body's ids, which block keys are made of."""
    return canonical(body.input_ids) if body.input_ids else _byte_ids(body.text or "")


def prompt_ids(body: GenerateBody) -> list[int]:
    """The ids of a body's prompt, which ``prompt_of`` has found to be valid."""
    return msgspec.json.decode(prompt_ids_text(body), type=list[int])


def _byte_ids(text: str) -> bytes:
    return encode(list(text.encode("utf-8", "surrogatepass")))


def sse(payload: object) -> bytes:
    """One server-sent event carrying ``payload`` as JSON."""
    return b"data: " + encode(payload) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
