"""A short request through every prefill x decode pair, before anything is measured.

It shows that each pair moves KV, and opens the KV connections, so that no measured request pays
for them.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from harness.core import EngineError, Route
from harness.gateway.upstream import Upstream
from harness.surface.generate import GenerateBody, GenerateChunk, encode


async def canary(upstream: Upstream, routes: Sequence[Route], prompt_tokens: int) -> None:
    """EngineError names a pair that fails. Pairs of one prefill instance take turns."""
    by_prefill: dict[str, list[Route]] = {}
    for route in routes:
        by_prefill.setdefault(route.prefill.name, []).append(route)
    try:
        async with asyncio.TaskGroup() as group:
            for one in by_prefill.values():
                group.create_task(_in_turn(upstream, one, prompt_tokens))
    except BaseExceptionGroup as failures:
        raise EngineError(str(failures.exceptions[0])) from failures


async def _in_turn(upstream: Upstream, routes: Sequence[Route], prompt_tokens: int) -> None:
    ids = msgspec.Raw(encode(list(range(1, prompt_tokens + 1))))
    for route in routes:
        body = GenerateBody(input_ids=ids, rid=f"canary-{route.prefill.name}")
        body.sampling_params.max_new_tokens = 2
        raw = upstream.body(body, route)
        pair = f"{route.prefill.name} -> {route.decode.name}"
        prefill, decode = await asyncio.gather(
            _last(upstream, route.prefill.name, raw), _last(upstream, route.decode.name, raw)
        )
        sent = prefill.meta_info.prfaas and prefill.meta_info.prfaas.prefill
        got = decode.meta_info.prfaas and decode.meta_info.prfaas.decode
        if not sent or not got or sent.kv_wire_bytes_sent != got.kv_wire_bytes_received:
            raise EngineError(f"canary {pair}: the KV that was sent is not the KV that arrived")
        if decode.meta_info.completion_tokens != 2:
            raise EngineError(f"canary {pair}: 2 tokens were asked for and not answered")


async def _last(upstream: Upstream, instance: str, body: bytes) -> GenerateChunk:
    last: GenerateChunk | None = None
    async with aclosing(upstream.stream(instance, body)) as chunks:
        async for chunk in chunks:
            last = chunk
    if last is None:
        raise EngineError(f"{instance} answered without a single event")
    return last
