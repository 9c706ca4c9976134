"""S_kv as it moved, against the geometry, and Phi_kv = S_kv / T_prefill.

Moved bytes are counted by whoever moves them: our transport a request, SGLang in all
(``kv_transfer_total_mb``, byte-exact and rounded to pages, fixed state included; versions before
it have none). A server that does both phases moves nothing, and Phi_kv is by geometry alone.
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


def kv_rows(
    architecture: Architecture,
    page_tokens: int | None,
    prefill_s: Mapping[int, float],
    moved: Mapping[int, float],
) -> list[KvFile]:
    """The table by length. ``page_tokens`` None: KV moves to the byte, not in pages."""
    rows = []
    for tokens, time_s in sorted(prefill_s.items()):
        geometry = (
            architecture.kv_bytes(tokens)
            if page_tokens is None
            else paged_kv_bytes(architecture, tokens, page_tokens)
        )
        kv_bytes = moved.get(tokens, float(geometry))
        rows.append(
            KvFile(
                tokens=tokens,
                moved_bytes=moved.get(tokens),
                geometry_bytes=float(geometry),
                phi_bytes_per_s=kv_bytes / time_s,
            )
        )
    return rows
