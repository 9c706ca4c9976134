"""S_kv as it moved, against the geometry, and Phi_kv = S_kv / T_prefill by geometry.

Moved bytes are counted by whoever moves them: our transport a request, SGLang in all
(``kv_transfer_total_mb``, byte-exact and rounded to pages, fixed state included; versions before
it have none). With tp > 1 SGLang's counter is by default of one rank (``replication``), so that
Phi_kv never takes its bytes; what differs is a note. A server that does both phases moves nothing.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

from harness.architecture import Architecture, paged_kv_bytes, wire_layer_bytes
from harness.profile_measurement import KvFile
from harness.profiler.prompts import Prompts
from harness.profiler.samples import Sample
from harness.profiler.target import Pair

#: The counter is written after the answer.
COUNTED_WITHIN_S, POLL_S = 5.0, 0.1
#: How long nothing is added where the requests that were cut off before have been counted.
SETTLED_S = 1.0


def moved_by_samples(
    samples: Sequence[Sample], architecture: Architecture, byte_scale: float
) -> tuple[dict[int, float], tuple[str, ...]]:
    """Scenario bytes by length as our transport counted them, and what differs from geometry.

    On the wire a layer has its bytes divided by the byte scale and rounded, so the comparison is
    exact there."""
    moved: dict[int, float] = {}
    faults = []
    for one in samples:
        if one.kind != "prefill" or one.cached_tokens or one.kv_wire_bytes is None:
            continue
        tokens, resident = one.new_tokens, one.resident_tokens or 0
        layers = architecture.layer_kv_bytes(tokens, resident)
        planned = sum(wire_layer_bytes(layers, byte_scale))
        if one.kv_wire_bytes != planned:
            faults.append(
                f"{one.kv_wire_bytes} KV bytes moved for {tokens} tokens, {resident} of them "
                f"resident, instead of {planned}"
            )
        if not resident:
            moved[tokens] = one.kv_wire_bytes * byte_scale
    return moved, tuple(dict.fromkeys(faults))


async def moved_by_counter(
    pair: Pair, prompts: Prompts, lengths: Sequence[int]
) -> dict[int, float]:
    """Bytes of one request of each length by SGLang's counter; empty where it has none."""
    moved: dict[int, float] = {}
    await _settle(pair)
    for tokens in lengths:
        before = await pair.kv_counter_bytes()
        await pair.prefill(prompts.fresh(tokens))
        after, deadline_s = before, time.monotonic() + COUNTED_WITHIN_S
        while after == before and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
            after = await pair.kv_counter_bytes()
        if after is None or after == before:
            continue
        moved[tokens] = after - (before or 0.0)
    return moved


async def _settle(pair: Pair) -> None:
    """Wait for what is under way: traffic beside a measurement ends in the middle of a request."""
    counted, since_s = await pair.kv_counter_bytes(), time.monotonic()
    deadline_s = since_s + COUNTED_WITHIN_S
    while time.monotonic() < min(since_s + SETTLED_S, deadline_s):
        await asyncio.sleep(POLL_S)
        now_counted = await pair.kv_counter_bytes()
        if now_counted != counted:
            counted, since_s = now_counted, time.monotonic()


def kv_rows(
    architecture: Architecture,
    page_tokens: int | None,
    prefill_s: Mapping[int, float],
    moved: Mapping[int, float],
) -> list[KvFile]:
    """The table by length. ``page_tokens`` None: KV moves to the byte, not in pages."""
    rows = []
    for tokens, time_s in sorted(prefill_s.items()):
        geometry_bytes = float(_geometry_bytes(architecture, tokens, page_tokens))
        rows.append(
            KvFile(
                tokens=tokens,
                moved_bytes=moved.get(tokens),
                geometry_bytes=geometry_bytes,
                phi_bytes_per_s=geometry_bytes / time_s,
            )
        )
    return rows


def counter_faults(
    architecture: Architecture, page_tokens: int | None, moved: Mapping[int, float], tp: int
) -> list[str]:
    """A note of each length of which SGLang counted other bytes than the geometry has; ``tp`` is
    how many ranks share the attention."""
    why = (
        "by default one rank of a group counts, and heads may be on several ranks"
        if tp > 1
        else "is this the architecture of the model that the engine serves?"
    )
    notes = []
    for tokens, counted_bytes in sorted(moved.items()):
        geometry_bytes = _geometry_bytes(architecture, tokens, page_tokens)
        if counted_bytes != geometry_bytes:
            notes.append(
                f"KV of {tokens:,} tokens: the engine counted {counted_bytes:,.0f} bytes, the "
                f"geometry has {geometry_bytes:,}, of which Phi_kv is (tp {tp}: {why})"
            )
    return notes


def _geometry_bytes(architecture: Architecture, tokens: int, page_tokens: int | None) -> int:
    if page_tokens is None:
        return architecture.kv_bytes(tokens)
    return paged_kv_bytes(architecture, tokens, page_tokens)
