"""The decode end of a handoff, around a compute backend.

Take the room's KV, compare the receiver-counted bytes with the geometry, wait for a slot, stream.
Two admission rules: ``push_then_admit`` grants the slot once the KV lies in the receive buffer;
``reserve_first`` grants it before the registration, so that prefill waits for decode (as SGLang
does). With a prefix cache the registration says what of the prompt's growing KV lies in the cluster
already, and room for the rest is waited for before it. What the instance lacks of that part comes
over the fabric meanwhile, on planned time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import aiohttp

from harness.core import EngineError, TransportError
from harness.engine.compute import Arrival, DecodeBackend, Placed
from harness.engine.config import EngineConfig
from harness.engine.emulated import KvBytes
from harness.engine.memory import Lease
from harness.engine.prefixes import Cache
from harness.surface.generate import (
    DecodeSpan,
    GenerateBody,
    GenerateChunk,
    MetaInfo,
    Prompt,
    Registration,
    Spans,
    encode,
)
from harness.transport.receiver import KvReceiver, Received

Send = Callable[[GenerateChunk], Awaitable[None]]
STOP = {"type": "length"}


class _Landing:
    """One request's use of the cache while its KV comes and is decoded from."""

    def __init__(self, cache: Cache, keys: Sequence[int], tokens: int, stack: ExitStack) -> None:
        self._cache, self.keys, self._tokens, self._stack = cache, keys, tokens, stack
        self._lease = stack.enter_context(cache.memory.lease())
        self._fetching: Lease | None = None
        self.resident_tokens = 0
        #: When the part that the instance fetches from its cluster is there.
        self.fetched_mono_ns = 0

    async def make_room(self, deadline_s: float, time_scale: float) -> None:
        """Room for what will come; what is resident is known and pinned afterwards."""
        memory, prefixes = self._cache.memory, self._cache.prefixes
        own_tokens = prefixes.longest_run(memory, self.keys, self._tokens).own_tokens
        self._lease.acquire(self.keys, own_tokens)
        nbytes = prefixes.architecture.moved_bytes(self._tokens, own_tokens)
        await self._lease.reserve(nbytes, deadline_s)
        run = prefixes.longest_run(memory, self.keys, self._tokens)
        self.resident_tokens = run.tokens
        if run.holder is memory and run.tokens > own_tokens:  # what others have left here meanwhile
            kept = self._stack.enter_context(memory.lease())
            kept.acquire(self.keys, run.tokens)
        if run.holder is not memory:
            self._fetching = self._stack.enter_context(run.holder.lease())
            self._fetching.acquire(self.keys, run.tokens)
            fetch_s = prefixes.fetch_s(run.tokens, run.own_tokens) / time_scale
            self.fetched_mono_ns = time.monotonic_ns() + round(fetch_s * 1e9)

    def landed(self) -> None:
        """All KV is at the instance; nothing of it is needed elsewhere."""
        if self._fetching is not None:
            self._fetching.end()

    def placed(self) -> None:
        """The transfer's memory is given back; full blocks are kept. The state that came is of the
        whole prompt, so it can be used again only where that ends with a block."""
        block_tokens = self._cache.memory.pool.geometry.block_tokens
        full_tokens = len(self.keys) * block_tokens
        self._lease.end_transfer()
        self._lease.receive(self.keys, full_tokens, state=full_tokens == self._tokens)


class DecodeEnd:
    """A decode instance's requests."""

    def __init__(
        self,
        engine: DecodeBackend,
        kv: KvBytes,
        receiver: KvReceiver,
        session: aiohttp.ClientSession,
        config: EngineConfig,
        route: Callable[[str], tuple[str, int]],
        cache: Cache | None,
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._receiver = receiver
        self._session = session
        self._config = config
        self._route = route
        self._cache = cache
        self.open_requests = 0

    @property
    def queued(self) -> int:
        return self._engine.slots.queued

    @property
    def running(self) -> int:
        return self._engine.slots.running

    @property
    def busy_s(self) -> float:
        return self._engine.busy_s

    async def serve(self, body: GenerateBody, prompt: Prompt, received_ns: int, send: Send) -> None:
        """Take the KV of one request, admit it and stream its tokens."""
        self.open_requests += 1
        try:
            with ExitStack() as stack:
                landing = None
                if self._cache is not None:
                    keys = self._cache.keys(body)
                    landing = _Landing(self._cache, keys, prompt.tokens, stack)
                await self._serve(body, prompt, received_ns, send, landing)
        finally:
            self.open_requests -= 1

    async def _serve(
        self,
        body: GenerateBody,
        prompt: Prompt,
        received_ns: int,
        send: Send,
        landing: _Landing | None,
    ) -> None:
        reserved_ns: int | None = None
        placed: Placed | None = None
        tokens = prompt.tokens + body.sampling_params.max_new_tokens
        if self._config.admission == "reserve_first":
            reserved_ns = await self._admit(received_ns, tokens)
        try:
            got = await self._take(body, prompt.tokens, landing)
            try:
                span = await self._landed(got, received_ns, landing)
                resident: object = None
                if landing is not None:
                    resident = self._engine.resident(landing.keys, landing.resident_tokens)
                    landing.landed()
                if reserved_ns is None:
                    reserved_ns = await self._admit(span.landed_mono_ns, tokens)
                    span.granted_mono_ns = reserved_ns
                arrival = _arrival(body, prompt, got, landing, resident)
                placed = await self._engine.place(arrival)
            finally:
                # The transfer-cache blocks are given back once the KV has its place.
                got.release()
            if landing is not None:
                assert self._cache is not None, "landing is of a cache"
                landing.placed()
                placed.keep(self._cache.memory.pool)
        except BaseException:
            if placed is not None:
                placed.drop()
            if reserved_ns is not None:
                self._engine.slots.release(time.monotonic_ns(), tokens)
            raise
        await self._stream(body, prompt, placed, span, send)

    async def _landed(
        self, got: Received, received_ns: int, landing: _Landing | None
    ) -> DecodeSpan:
        """What is known of a request whose KV is there, what its cluster had of it too."""
        landed_ns, resident_tokens = got.last_byte_mono_ns, 0
        if landing is not None:
            resident_tokens = landing.resident_tokens
            if landing.fetched_mono_ns > landed_ns:
                landed_ns = landing.fetched_mono_ns
                await self._engine.until(landed_ns)
        return DecodeSpan(
            received_mono_ns=received_ns,
            landed_mono_ns=landed_ns,
            granted_mono_ns=landed_ns,
            first_written_mono_ns=0,
            end_mono_ns=None,
            kv_wire_bytes_received=got.payload_bytes,
            kv_layers=got.layers,
            cached_tokens=int.from_bytes(got.meta[4:], "little"),
            late_s=0.0,
            resident_tokens=resident_tokens,
        )

    async def _take(self, body: GenerateBody, tokens: int, landing: _Landing | None) -> Received:
        """The room's KV, whole and of the right size; to be released."""
        assert body.bootstrap_room is not None
        room, resident_tokens = body.bootstrap_room, 0
        patience_s = self._config.transfer_deadline_wall_s
        if landing is not None:
            await landing.make_room(patience_s, self._config.time_scale)
            resident_tokens = landing.resident_tokens
        arriving = self._receiver.expect(room, time.monotonic() + patience_s)
        try:
            await self._register(body, room, resident_tokens)
            got = await arriving
            self._check(got.payload_bytes, tokens, resident_tokens, room)
        except BaseException:
            self._receiver.discard(room, "the request ended at the decode instance")
            raise
        return got

    async def _stream(
        self,
        body: GenerateBody,
        prompt: Prompt,
        placed: Placed,
        span: DecodeSpan,
        send: Send,
    ) -> None:
        output_tokens = body.sampling_params.max_new_tokens
        sent = 0

        async def emit(total: int) -> None:
            nonlocal sent
            tokens = placed.tokens(sent, total)
            sent = total
            meta = MetaInfo(
                id=body.rid or "",
                prompt_tokens=prompt.tokens,
                completion_tokens=total,
                cached_tokens=span.cached_tokens,
            )
            text = "".join(f" {token}" for token in tokens)
            await send(GenerateChunk(text, tokens, meta))
            if not span.first_written_mono_ns:
                await asyncio.sleep(0)  # the event loop writes at the end of a turn
                span.first_written_mono_ns = time.monotonic_ns()

        span.late_s = await placed.decode(span.granted_mono_ns, output_tokens, emit, prompt.tokens)
        span.end_mono_ns = time.monotonic_ns()
        meta = MetaInfo(
            id=body.rid or "",
            prompt_tokens=prompt.tokens,
            completion_tokens=output_tokens,
            cached_tokens=span.cached_tokens,
            finish_reason=STOP,
            prfaas=Spans(event="finished", decode=span),
        )
        await send(GenerateChunk("", [], meta))

    def _check(self, payload_bytes: int, tokens: int, resident_tokens: int, room: int) -> None:
        expected = sum(self._kv.layer_bytes(tokens, resident_tokens))
        if payload_bytes != expected:
            resident = f" with {resident_tokens} resident" if resident_tokens else ""
            raise TransportError(
                f"room {room}: {payload_bytes} KV bytes arrived for a prompt of {tokens} tokens"
                f"{resident}, whose geometry is {expected} bytes on the wire: the two ends disagree"
            )

    async def _admit(self, ready_ns: int, tokens: int) -> int:
        deadline_s = self._config.admission_deadline_s / self._config.time_scale
        try:
            async with asyncio.timeout(deadline_s):
                return await self._engine.slots.grant(ready_ns, tokens)
        except TimeoutError as error:
            raise EngineError(
                "decode_admission: no slot became free within "
                f"{self._config.admission_deadline_s:g} s (scheduling.admission_deadline)"
            ) from error

    async def _register(self, body: GenerateBody, room: int, resident_tokens: int) -> None:
        bootstrap = f"{body.bootstrap_host}:{body.bootstrap_port}"
        where = Registration(*self._route(bootstrap), resident_tokens)
        try:
            async with self._session.put(
                f"http://{bootstrap}/kv/{room}", data=encode(where)
            ) as answer:
                if answer.status != 200:
                    raise TransportError(
                        f"room {room}: {bootstrap} refused the registration "
                        f"({answer.status}): {(await answer.text())[:300]}"
                    )
        except aiohttp.ClientError as error:
            raise TransportError(
                f"room {room}: the prefill instance at {bootstrap} is not reachable: {error}"
            ) from error


def _arrival(
    body: GenerateBody,
    prompt: Prompt,
    got: Received,
    landing: _Landing | None,
    resident: object,
) -> Arrival:
    return Arrival(
        prompt.tokens,
        body.sampling_params.max_new_tokens,
        prompt.digest,
        int.from_bytes(got.meta[:4], "little"),
        got,
        0 if landing is None else landing.resident_tokens,
        resident,
        () if landing is None else landing.keys,
    )
