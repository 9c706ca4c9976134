"""The two ends of a prefill-to-decode handoff, around a compute backend.

Prefill: wait for the room's registration, open the transfer when compute starts, send each layer
when it is final, finish with the first token. Decode: take the room's KV, compare the
receiver-counted bytes with the geometry, wait for a slot, stream. Two admission rules:
``push_then_admit`` grants the slot once the KV lies in the receive buffer; ``reserve_first``
grants it before the registration, so that prefill waits for decode (as SGLang does).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp

from harness.core import EngineError, TransportError
from harness.engine.config import EngineConfig
from harness.engine.emulated import (
    EmulatedDecode,
    EmulatedPrefill,
    KvBytes,
    PrefillJob,
    token_at,
)
from harness.surface.generate import (
    DecodeSpan,
    GenerateBody,
    GenerateChunk,
    MetaInfo,
    PrefillSpan,
    Prompt,
    Registration,
    Spans,
    encode,
)
from harness.transport.receiver import KvReceiver
from harness.transport.sender import KvSender, Receipt
from harness.transport.tcp_info import TcpSample

Send = Callable[[GenerateChunk], Awaitable[None]]

#: Requests and registrations open at one prefill instance; more is a peer out of its mind.
MAX_ROOMS = 10_000
STOP = {"type": "length"}


class PrefillEnd:
    """A prefill instance's requests. ``prefill_started`` and the first token are told at once."""

    def __init__(
        self, engine: EmulatedPrefill, kv: KvBytes, sender: KvSender, config: EngineConfig
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._sender = sender
        self._config = config
        self._rooms: dict[int, asyncio.Future[Registration]] = {}
        self._opened_mono_s: dict[int, float] = {}
        self._serving: set[int] = set()

    @property
    def queued(self) -> int:
        return self._engine.queued

    @property
    def running(self) -> int:
        return int(self._engine.running is not None)

    @property
    def busy_s(self) -> float:
        return self._engine.busy_s

    def samples(self) -> list[TcpSample]:
        """TCP_INFO of the connections that this instance sends KV over."""
        return self._sender.samples()

    def register(self, room: int, where: Registration) -> None:
        """A decode instance says where the KV of ``room`` goes."""
        future = self._room(room)
        if future.done():
            raise EngineError(f"room {room} is registered already")
        future.set_result(where)

    def _room(self, room: int) -> asyncio.Future[Registration]:
        if room not in self._rooms:
            self._forget_stale()
            if len(self._rooms) >= MAX_ROOMS:
                raise EngineError(f"{MAX_ROOMS} rooms are open at this prefill instance already")
            self._rooms[room] = asyncio.get_running_loop().create_future()
            self._opened_mono_s[room] = time.monotonic()
        return self._rooms[room]

    def _forget_stale(self) -> None:
        """Drop registrations whose prefill request never came, or was over before them."""
        horizon_s = time.monotonic() - self._config.transfer_deadline_wall_s
        for room in list(self._opened_mono_s):
            if self._opened_mono_s[room] > horizon_s:
                break  # oldest first
            if room not in self._serving:
                self._close(room)

    def _close(self, room: int) -> None:
        self._rooms.pop(room, None)
        self._opened_mono_s.pop(room, None)
        self._serving.discard(room)

    async def serve(self, body: GenerateBody, prompt: Prompt, received_ns: int, send: Send) -> None:
        """Prefill one request and push its KV; raises TransportError when the KV did not arrive."""
        assert body.bootstrap_room is not None
        room = body.bootstrap_room
        registration = self._room(room)
        if room in self._serving:
            raise EngineError(f"room {room} is being prefilled already")
        self._serving.add(room)
        layer_bytes = self._kv.layer_bytes(prompt.tokens)
        layers: asyncio.Queue[int] = asyncio.Queue()
        started = asyncio.Event()
        first_token = token_at(prompt.digest, 0)
        sending: asyncio.Task[Receipt] | None = None
        try:
            if self._config.admission == "reserve_first":
                await self._registered(registration, room)
            sending = asyncio.create_task(
                self._push(room, registration, started, layer_bytes, layers, first_token)
            )
            job = PrefillJob(
                tokens=prompt.tokens,
                received_mono_ns=received_ns,
                ready_mono_ns=time.monotonic_ns(),
                num_layers=len(layer_bytes),
                emit=layers.put_nowait,
                on_start=started.set,
            )
            prefilling = asyncio.create_task(self._engine.prefill(job))
            await self._tell_start(started, prefilling, sending, body, prompt, send)
            span = await prefilling
            await send(_prefill_chunk(body, prompt, "prefill_done", span, [first_token]))
            receipt = await sending
            span.kv_acked_mono_ns = receipt.acked_mono_ns
            span.kv_wire_bytes_sent = receipt.payload_bytes
            span.kv_retransmits = receipt.retransmits
            await send(_prefill_chunk(body, prompt, "transfer_done", span, []))
        finally:
            if sending is not None and not sending.done():
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            self._close(room)

    async def _tell_start(
        self,
        started: asyncio.Event,
        prefilling: "asyncio.Task[PrefillSpan]",
        sending: "asyncio.Task[Receipt]",
        body: GenerateBody,
        prompt: Prompt,
        send: Send,
    ) -> None:
        """Report the start; a transfer that fails first ends the request and frees its turn."""
        starting = asyncio.create_task(started.wait())
        try:
            await asyncio.wait({starting, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            await send(_prefill_chunk(body, prompt, "prefill_started", None, []))
            await asyncio.wait({prefilling, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not prefilling.done():
                sending.result()
        except BaseException:
            prefilling.cancel()
            raise
        finally:
            starting.cancel()

    async def _registered(
        self, registration: asyncio.Future[Registration], room: int
    ) -> Registration:
        deadline_s = self._config.transfer_deadline_wall_s
        try:
            return await asyncio.wait_for(asyncio.shield(registration), deadline_s)
        except TimeoutError as error:
            raise TransportError(
                f"room {room}: no decode instance registered within {deadline_s:g} s of wall time"
            ) from error

    async def _push(
        self,
        room: int,
        registration: asyncio.Future[Registration],
        started: asyncio.Event,
        layer_bytes: tuple[int, ...],
        layers: "asyncio.Queue[int]",
        first_token: int,
    ) -> Receipt:
        where = await self._registered(registration, room)
        await started.wait()
        transfer = await self._sender.open(where.host, where.port, room, layer_bytes, b"")
        try:
            for _ in layer_bytes:
                layer = await layers.get()
                transfer.send_layer(layer, self._kv.layer(layer_bytes[layer]))
            return await transfer.finish(first_token.to_bytes(4, "little"))
        except asyncio.CancelledError:
            transfer.abort("the request was cancelled at the prefill instance")
            raise


class DecodeEnd:
    """A decode instance's requests."""

    def __init__(
        self,
        engine: EmulatedDecode,
        kv: KvBytes,
        receiver: KvReceiver,
        session: aiohttp.ClientSession,
        config: EngineConfig,
        route: Callable[[str], tuple[str, int]],
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._receiver = receiver
        self._session = session
        self._config = config
        self._route = route

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
        assert body.bootstrap_room is not None
        room = body.bootstrap_room
        slots = self._engine.slots
        reserved_ns: int | None = None
        if self._config.admission == "reserve_first":
            reserved_ns = await self._admit(received_ns)
        try:
            deadline_s = time.monotonic() + self._config.transfer_deadline_wall_s
            arriving = self._receiver.expect(room, deadline_s)
            try:
                await self._register(body, room)
                got = await arriving
            except BaseException:
                self._receiver.discard(room, "the request ended at the decode instance")
                raise
            try:
                self._check(got.payload_bytes, prompt.tokens, room)
                first_token = int.from_bytes(got.meta, "little")
                landed_ns, wire_bytes, layers = (
                    got.last_byte_mono_ns,
                    got.payload_bytes,
                    got.layers,
                )
                if reserved_ns is None:
                    granted_ns = reserved_ns = await self._admit(landed_ns)
                else:
                    granted_ns = landed_ns
            finally:
                # The transfer-cache blocks are given back once the KV has its place.
                got.release()
        except BaseException:
            if reserved_ns is not None:
                slots.release(time.monotonic_ns())
            raise
        span = DecodeSpan(received_ns, landed_ns, granted_ns, 0, None, wire_bytes, layers, 0, 0.0)
        await self._stream(body, prompt, first_token, span, send)

    async def _stream(
        self,
        body: GenerateBody,
        prompt: Prompt,
        first_token: int,
        span: DecodeSpan,
        send: Send,
    ) -> None:
        output_tokens = body.sampling_params.max_new_tokens
        sent = 0

        async def emit(total: int) -> None:
            nonlocal sent
            tokens = [token_at(prompt.digest, position) for position in range(sent, total)]
            if sent == 0:
                tokens[0] = first_token
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

        span.late_s = await self._engine.decode(span.granted_mono_ns, output_tokens, emit)
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

    def _check(self, payload_bytes: int, tokens: int, room: int) -> None:
        expected = sum(self._kv.layer_bytes(tokens))
        if payload_bytes != expected:
            raise TransportError(
                f"room {room}: {payload_bytes} KV bytes arrived for a prompt of {tokens} tokens, "
                f"whose geometry is {expected} bytes on the wire: the two ends disagree"
            )

    async def _admit(self, ready_ns: int) -> int:
        deadline_s = self._config.admission_deadline_s / self._config.time_scale
        try:
            return await asyncio.wait_for(self._engine.slots.grant(ready_ns), deadline_s)
        except TimeoutError as error:
            raise EngineError(
                "decode_admission: no slot became free within "
                f"{self._config.admission_deadline_s:g} s (scheduling.admission_deadline)"
            ) from error

    async def _register(self, body: GenerateBody, room: int) -> None:
        bootstrap = f"{body.bootstrap_host}:{body.bootstrap_port}"
        host, port = self._route(bootstrap)
        try:
            async with self._session.put(
                f"http://{bootstrap}/kv/{room}", data=encode(Registration(host, port))
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


def _prefill_chunk(
    body: GenerateBody,
    prompt: Prompt,
    event: str,
    span: PrefillSpan | None,
    tokens: list[int],
) -> GenerateChunk:
    meta = MetaInfo(
        id=body.rid or "",
        prompt_tokens=prompt.tokens,
        completion_tokens=int(event != "prefill_started"),
        prfaas=Spans(event=event, prefill=span),
    )
    if event == "transfer_done":
        meta.finish_reason = STOP
    return GenerateChunk("".join(f" {token}" for token in tokens), tokens, meta)
