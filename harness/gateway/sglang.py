"""What SGLang's servers stream, put as our own workers put it.

A prefill server of a disaggregated pair says one thing, when the last KV of the prompt has gone to
the decode server: the token that it sampled, and when things happened. So nothing is known of a
prefill before its end, and "prefill done" and "transfer done" are heard together. A decode server
streams text and ids from the beginning each time, unless ``--incremental-streaming-output`` is on.

Both say instants by ``time.time()`` of their host, made of a monotonic clock and an offset, so only
differences within one server are taken:

    prefill queue      request_received_ts -> forward_entry_time      tokenising, handshake, queue
    prefill            forward_entry_time -> prefill_finished_time
    transfer           prefill_finished_time -> request_finished_ts   what prefill does not hide
    decode admission   queue_time of the decode server
    first token        forward_entry_time -> response_sent_to_client_ts

0.5.9 names some otherwise (``prefill_finished_ts``, ``decode_finished_ts``), and has the start of
prefill only as ``inference_time`` before its end. Source: SGLang 0.5.23 and 0.5.9,
``observability/req_time_stats.py``, ``metrics/collector.py``, ``managers/tokenizer_manager.py``.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from harness.core import EngineError
from harness.gateway.failures import TransferFailedError
from harness.surface.generate import DecodeTimes, GenerateChunk, MetaInfo, PrefillTimes, Spans

Chunks = AsyncGenerator[GenerateChunk, None]
#: What an abort speaks of when the KV did not get from one server to the other.
_OF_TRANSFER = ("transfer failed", "bootstrap failed", "handshake failed", "bootstrap timeout")


async def as_prefill(instance: str, chunks: Chunks) -> Chunks:
    """The end of prefill and of the transfer, as two events. EngineError for an abort."""
    last: GenerateChunk | None = None
    async with aclosing(chunks):
        async for chunk in chunks:
            _check_abort(instance, chunk.meta_info)
            last = chunk
    if last is None:
        raise EngineError(f"{instance} ended without saying that it had prefilled")
    times = prefill_times(last.meta_info, last.output_ids)
    last.meta_info.prfaas = Spans("prefill_done", prefill_times=times)
    yield last
    last.meta_info.prfaas = Spans("transfer_done", prefill_times=times)
    yield last


async def as_decode(instance: str, chunks: Chunks) -> Chunks:
    """Each chunk with what is new in it; the last one with the server's times."""
    seen, text = 0, ""
    first: MetaInfo | None = None
    async with aclosing(chunks):
        async for chunk in chunks:
            meta = chunk.meta_info
            _check_abort(instance, meta)
            first = first or meta
            new = meta.completion_tokens - seen
            is_whole = len(chunk.output_ids) == meta.completion_tokens
            if not (is_whole or len(chunk.output_ids) == new) or new < 0:
                raise EngineError(
                    f"{instance} streamed {len(chunk.output_ids)} ids with "
                    f"{meta.completion_tokens} tokens completed and {seen} told before"
                )
            if is_whole and seen:
                # One text that grows; a character cut in two may hold it back for a token.
                chunk.text, text = chunk.text[len(text) :], chunk.text
            else:
                text += chunk.text
            chunk.output_ids = chunk.output_ids[len(chunk.output_ids) - new :]
            seen = meta.completion_tokens
            if meta.finish_reason is not None:
                meta.prfaas = Spans(decode_times=decode_times(meta, first))
            yield chunk


def prefill_times(meta: MetaInfo, output_ids: list[int]) -> PrefillTimes:
    """What the last chunk of a prefill server holds."""
    prefilled_ts = _either(meta.prefill_finished_time, meta.prefill_finished_ts)
    ended_ts = _either(meta.request_finished_ts, meta.decode_finished_ts)
    transfer_s = _between(prefilled_ts, ended_ts)
    began_ts = meta.forward_entry_time
    if began_ts is None and meta.inference_time is not None and ended_ts is not None:
        began_ts = ended_ts - meta.inference_time
    return PrefillTimes(
        queue_s=_between(meta.request_received_ts, began_ts),
        prefill_s=_between(began_ts, prefilled_ts),
        transfer_s=transfer_s,
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
        first_token=output_ids[0] if output_ids else None,
    )


def decode_times(last: MetaInfo, first: MetaInfo) -> DecodeTimes:
    """What the last chunk of a decode server holds, and the first."""
    began_ts = _either(last.forward_entry_time, first.forward_entry_time)
    prefilled: bool | None = None
    if began_ts is not None:  # the version that says when a batch began says so of a prefill too
        prefilled = last.prefill_finished_time is not None
    return DecodeTimes(
        admission_s=_either(first.queue_time, last.queue_time),
        first_token_s=_between(
            began_ts, _either(first.response_sent_to_client_ts, last.response_sent_to_client_ts)
        ),
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        retractions=max(last.num_retractions, last.total_retractions),
        prefilled=prefilled,
    )


def _check_abort(instance: str, meta: MetaInfo) -> None:
    """An abort comes as a chunk like any other."""
    reason: Any = meta.finish_reason
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return
    message = str(reason.get("message") or "it did not say why")
    words = f"{instance} aborted it: {message}"
    if any(of_transfer in message.lower() for of_transfer in _OF_TRANSFER):
        raise TransferFailedError(instance, words)
    raise EngineError(words)


def _either(one: float | None, other: float | None) -> float | None:
    return other if one is None else one


def _between(earlier_ts: float | None, later_ts: float | None) -> float | None:
    return None if earlier_ts is None or later_ts is None else later_ts - earlier_ts
