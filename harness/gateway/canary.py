"""A short request through every prefill x decode pair, before anything is measured.

It shows that each pair moves KV, and opens the KV connections, so that no measured request pays
for them. Of real servers it shows more: every pair gives the same tokens, since all have the same
weights; the prefill server counts the bytes that the prompt's pages hold; and the decode server ran
no prefill of its own. SGLang gives a handshake 300 s, in which nothing is said: a pair has less.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from harness.core import EngineError, Route
from harness.gateway.engine_watch import ask_counted
from harness.gateway.upstream import Upstream
from harness.surface.generate import GenerateBody, GenerateChunk, encode

TOKENS = 2
#: A counter follows the answer within this; wall time.
COUNTED_WITHIN_S, COUNTED_POLL_S = 3.0, 0.05


async def canary(
    upstream: Upstream,
    routes: Sequence[Route],
    prompt_tokens: int,
    timeout_wall_s: float | None = None,
    real: "RealPairs | None" = None,
) -> None:
    """EngineError names a pair that fails. Pairs of one prefill instance take turns. ``real``:
    what only real servers can be asked."""
    by_prefill: dict[str, list[Route]] = {}
    for route in routes:
        by_prefill.setdefault(route.prefill.name, []).append(route)
    try:
        async with asyncio.TaskGroup() as group:
            for one in by_prefill.values():
                group.create_task(_in_turn(upstream, one, prompt_tokens, timeout_wall_s, real))
    except BaseExceptionGroup as failures:
        raise EngineError(str(failures.exceptions[0])) from failures


async def _in_turn(
    upstream: Upstream,
    routes: Sequence[Route],
    prompt_tokens: int,
    timeout_wall_s: float | None,
    real: "RealPairs | None",
) -> None:
    ids = msgspec.Raw(encode(list(range(1, prompt_tokens + 1))))
    for route in routes:
        body = GenerateBody(input_ids=ids, rid=f"canary-{route.prefill.name}-{route.decode.name}")
        body.sampling_params.max_new_tokens = TOKENS
        body.sampling_params.temperature, body.sampling_params.ignore_eos = 0.0, True
        pair = f"canary {route.prefill.name} -> {route.decode.name}"
        before = None if real is None else await real.sent_bytes(route)
        answers = _Answers(pair)
        await answers.get(upstream, route, upstream.body(body, route), timeout_wall_s)
        if len(answers.tokens) != TOKENS:
            raise EngineError(f"{pair}: {TOKENS} tokens were asked for and not answered")
        if real is None:
            answers.check_kv_arrived()
        else:
            await real.check(route, answers, before)


class _Answers:
    """What both halves of a pair said to the end."""

    def __init__(self, pair: str) -> None:
        self.pair = pair
        self.prefill: GenerateChunk | None = None
        self.decode: GenerateChunk | None = None
        self.tokens: list[int] = []

    async def get(
        self, upstream: Upstream, route: Route, body: bytes, timeout_wall_s: float | None
    ) -> None:
        try:
            async with asyncio.timeout(timeout_wall_s):
                await asyncio.gather(
                    self._prefill(upstream, route.prefill.name, body),
                    self._decode(upstream, route.decode.name, body),
                )
        except TimeoutError as error:
            raise EngineError(
                f"{self.pair}: no answer within {timeout_wall_s:g} s of wall time: {self._halves()}"
            ) from error
        except EngineError as error:
            raise EngineError(f"{self.pair}: {error}") from error

    async def _prefill(self, upstream: Upstream, instance: str, body: bytes) -> None:
        async with aclosing(upstream.prefill(instance, body)) as chunks:
            async for chunk in chunks:
                self.prefill = chunk

    async def _decode(self, upstream: Upstream, instance: str, body: bytes) -> None:
        async with aclosing(upstream.decode(instance, body)) as chunks:
            async for chunk in chunks:
                self.tokens += chunk.output_ids
                self.decode = chunk

    def _halves(self) -> str:
        if self.prefill is None and self.decode is None:
            return "neither half; does the decode server reach the prefill server's bootstrap port?"
        if self.prefill is None:
            return (
                "the decode half answered and the prefill half's KV was never taken; is the "
                "decode server in PD mode?"
            )
        return "the prefill half's KV went out and the decode half does not answer"

    def check_kv_arrived(self) -> None:
        """By our own workers' spans."""
        sent = self.prefill and self.prefill.meta_info.prfaas
        got = self.decode and self.decode.meta_info.prfaas
        if (
            not sent
            or not got
            or sent.prefill is None
            or got.decode is None
            or sent.prefill.kv_wire_bytes_sent != got.decode.kv_wire_bytes_received
        ):
            raise EngineError(f"{self.pair}: the KV that was sent is not the KV that arrived")


class RealPairs:
    """What is asked of pairs of real servers. ``kv_bytes`` is what the canary's prompt weighs, in
    pages; None where the servers' version counts no bytes."""

    def __init__(self, upstream: Upstream, kv_bytes: int | None) -> None:
        self._upstream = upstream
        self._kv_bytes = kv_bytes
        self._tokens: tuple[str, list[int]] | None = None

    async def sent_bytes(self, route: Route) -> int:
        """The bytes that a prefill server has counted so far."""
        if self._kv_bytes is None:
            return 0
        counted = await ask_counted(self._upstream, route.prefill.name)
        return counted.kv_sent_bytes or 0

    async def check(self, route: Route, answers: _Answers, before: int | None) -> None:
        """EngineError for tokens or bytes that are not those of the other pairs or of geometry."""
        assert answers.prefill is not None
        assert answers.decode is not None
        pair, tokens = answers.pair, answers.tokens
        sent, got = answers.prefill.meta_info.prfaas, answers.decode.meta_info.prfaas
        if got is not None and got.decode_times is not None and got.decode_times.prefilled:
            raise EngineError(f"{pair}: the decode server prefilled the prompt itself")
        if sent is not None and sent.prefill_times is not None:
            first = sent.prefill_times.first_token
            if first is not None and first != tokens[0]:
                raise EngineError(
                    f"{pair}: prefill sampled token {first} and decode told {tokens[0]} as the "
                    "first; have both the same weights?"
                )
        if self._tokens is None:
            self._tokens = (pair, tokens)
        elif self._tokens[1] != tokens:
            raise EngineError(
                f"{pair}: gave the tokens {tokens}, and {self._tokens[0]} gave {self._tokens[1]} "
                "for the same prompt; have all the same weights?"
            )
        await self._check_bytes(route, pair, before or 0)

    async def _check_bytes(self, route: Route, pair: str, before: int) -> None:
        if self._kv_bytes is None:
            return
        deadline_s = time.monotonic() + COUNTED_WITHIN_S
        while (moved := await self.sent_bytes(route) - before) != self._kv_bytes:
            if time.monotonic() > deadline_s:
                raise EngineError(
                    f"{pair}: the prompt's KV has {self._kv_bytes} bytes in pages and the prefill "
                    f"server counts {moved} as sent; "
                    + ("is it in PD mode?" if not moved else "is this the model of the scenario?")
                )
            await asyncio.sleep(COUNTED_POLL_S)
