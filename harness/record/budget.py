"""The TTFT budget of a request (law 7 of the design) and its token times.

    ttft = send_lag + gateway + prefill_queue + prefill + transfer + decode_admission
           + first_token + return + residual

Every term is a difference of two instants of one process, wall seconds here; nothing is inferred
by subtracting the clocks of two processes, so the residual checks the rest. ``transfer`` is the
part that prefill does not hide: from the end of prefill to the receiver's acknowledgement, one
return hop included. TTFT counts from the planned send. Missing is None.

A real engine tells durations, not instants of this host's clock; they take the place of the
differences, and hops between its servers are in the residual.
"""

import itertools
import statistics
from dataclasses import dataclass
from typing import Literal

from harness.core import BUDGET_TERMS
from harness.record.spool import (
    ClientRow,
    DecodeSpan,
    DecodeTimes,
    GatewayRow,
    PrefillSpan,
    PrefillTimes,
)

TtftSource = Literal["decode", "prefill"]
#: With ``ttft_source = "prefill"`` the first token overtakes its KV: these are not on its path.
_HIDDEN_FROM_PREFILL = ("transfer", "decode_admission", "first_token")


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When tokens reached the client, wall seconds.

    ``itl_*`` are per token: the tokens of one chunk share the gap before it evenly.
    ``chunk_gap_*`` are the silences between chunks, whatever they carried, and ``token_chunks``
    counts the chunks that carried tokens.
    """

    tpot_s: float | None = None
    itl_p50_s: float | None = None
    itl_max_s: float | None = None
    chunk_gap_p50_s: float | None = None
    chunk_gap_max_s: float | None = None
    token_chunks: int | None = None
    second_token_mono_ns: int | None = None


def between_s(earlier_ns: int | None, later_ns: int | None) -> float | None:
    """Wall seconds from one instant to another; None when either is missing."""
    if earlier_ns is None or later_ns is None:
        return None
    return (later_ns - earlier_ns) / 1e9


def budget_terms(
    client: ClientRow | None, gateway: GatewayRow, ttft_source: TtftSource
) -> dict[str, float | None]:
    """The terms in wall seconds by name, in the order of ``BUDGET_TERMS``."""
    prefill = gateway.prefill or PrefillSpan()
    decode = gateway.decode or DecodeSpan()
    of_prefill = gateway.prefill_times or PrefillTimes()
    of_decode = gateway.decode_times or DecodeTimes()
    # Where a slot was reserved before the transfer, nothing waits for it after landing.
    slot_ns = decode.granted_mono_ns
    if slot_ns is not None and decode.landed_mono_ns is not None:
        slot_ns = max(slot_ns, decode.landed_mono_ns)
    terms = {
        "send_lag": between_s(client.planned_mono_ns, client.sent_mono_ns) if client else None,
        "gateway": between_s(gateway.received_mono_ns, gateway.dispatched_mono_ns),
        "prefill_queue": between_s(prefill.received_mono_ns, prefill.start_mono_ns),
        "prefill": between_s(prefill.start_mono_ns, prefill.end_mono_ns),
        "transfer": between_s(prefill.end_mono_ns, prefill.kv_acked_mono_ns),
        "decode_admission": between_s(decode.landed_mono_ns, slot_ns),
        "first_token": between_s(slot_ns, decode.first_written_mono_ns),
        "return": between_s(gateway.first_chunk_mono_ns, gateway.first_written_mono_ns),
    }
    assert tuple(terms) == BUDGET_TERMS
    told = {
        "prefill_queue": of_prefill.queue_s,
        "prefill": of_prefill.prefill_s,
        "transfer": of_prefill.transfer_s,
        "decode_admission": of_decode.admission_s,
        "first_token": of_decode.first_token_s,
    }
    terms.update({name: value for name, value in told.items() if value is not None})
    if ttft_source == "prefill":
        terms.update(dict.fromkeys(_HIDDEN_FROM_PREFILL))
    return terms


def residual_s(
    ttft_s: float | None, terms: dict[str, float | None], ttft_source: TtftSource
) -> float | None:
    """What the terms leave unexplained; None unless every term on the path was measured."""
    hidden = _HIDDEN_FROM_PREFILL if ttft_source == "prefill" else ()
    total = 0.0
    for name, value in terms.items():
        if name in hidden:
            continue
        if value is None:
            return None
        total += value
    return None if ttft_s is None else ttft_s - total


def token_times(client: ClientRow) -> TokenTimes:
    """Token times from the chunks that carried tokens; chunks without tokens are passed over."""
    chunks = [
        (at_ns, tokens)
        for at_ns, tokens in zip(client.chunk_mono_ns, client.chunk_tokens, strict=True)
        if tokens > 0
    ]
    total = sum(tokens for _, tokens in chunks)
    if total < 2:
        return TokenTimes(token_chunks=len(chunks) or None)
    seen, second_ns = 0, chunks[-1][0]
    for at_ns, tokens in chunks:
        seen += tokens
        if seen >= 2:
            second_ns = at_ns
            break
    # Tokens that came together with the first one have no gap of their own.
    first_ns, last_ns = chunks[0][0], chunks[-1][0]
    gaps: list[float] = [0.0] * (chunks[0][1] - 1)
    silences: list[float] = []
    for (before_ns, _), (at_ns, tokens) in itertools.pairwise(chunks):
        gap_s = (at_ns - before_ns) / 1e9
        silences.append(gap_s)
        gaps.extend([gap_s / tokens] * tokens)
    tpot_s = (last_ns - first_ns) / 1e9 / (total - 1)
    return TokenTimes(
        tpot_s=tpot_s,
        itl_p50_s=statistics.median(gaps),
        itl_max_s=max(gaps),
        chunk_gap_p50_s=statistics.median(silences) if silences else None,
        chunk_gap_max_s=max(silences, default=0.0),
        token_chunks=len(chunks),
        second_token_mono_ns=second_ns,
    )
