"""The prefill end of a handoff, around a compute backend.

Wait for the room's registration, open the transfer when compute starts, send each layer when it is
final, finish with the first token. With a prefix cache the request first finds out at its turn what
of its prompt is cached, and has room for the rest; what it computed is kept, and its memory is held
until the KV has been acknowledged.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from harness.core import EngineError, TransportError
from harness.engine.compute import Begin, Piece, PrefillBackend, PrefillJob, Work
from harness.engine.config import EngineConfig
from harness.engine.emulated import KvBytes
from harness.engine.memory import Lease
from harness.engine.prefixes import Cache, Hit
from harness.surface.generate import (
    GenerateBody,
    GenerateChunk,
    MetaInfo,
    PrefillSpan,
    Prompt,
    Registration,
    Spans,
    prompt_ids,
)
from harness.transport.sender import KvSender, Receipt, Transfer
from harness.transport.tcp_info import TcpSample

Send = Callable[[GenerateChunk], Awaitable[None]]

#: Requests and registrations open at one prefill instance; more is a peer out of its mind.
MAX_ROOMS = 10_000
STOP = {"type": "length"}


class _Computing:
    """One request's use of the cache while it is prefilled and sent."""

    def __init__(
        self,
        cache: Cache,
        keys: Sequence[int],
        tokens: int,
        stack: ExitStack,
        deadline_s: float,
        *,
        computes: bool = False,
    ) -> None:
        self._computes = computes
        self._cache, self._keys, self._tokens = cache, keys, tokens
        self._stack, self._deadline_s = stack, deadline_s
        self._lease = stack.enter_context(cache.memory.lease())
        self._fetching: Lease | None = None
        self._hit: Hit | None = None

    @property
    def keys(self) -> Sequence[int]:
        """Of the prompt's full blocks."""
        return self._keys

    @property
    def cached_tokens(self) -> int:
        """The prefix that is not computed; known once the prefill has begun."""
        return 0 if self._hit is None else self._hit.cached_tokens

    async def begin(self, prefill_s: Callable[[int, int], float]) -> Work:
        """At the request's turn: what is cached, room for the rest, and what both take."""
        hit = self._find(prefill_s)
        self._lease.acquire(self._keys, hit.own_tokens)
        # Room also for what is fetched. Only its own prefix is pinned while it waits, so that no
        # two instances can wait for each other.
        nbytes = self._cache.prefixes.architecture.moved_bytes(self._tokens, hit.own_tokens)
        ready_ns = 0
        if await self._lease.reserve(nbytes, self._deadline_s):
            pinned_tokens = hit.own_tokens
            hit, ready_ns = self._find(prefill_s), time.monotonic_ns()
            if hit.own_tokens > pinned_tokens:  # what others have left here meanwhile
                kept = self._stack.enter_context(self._cache.memory.lease())
                kept.acquire(self._keys, hit.own_tokens)
        if hit.holder is not None:
            self._fetching = self._stack.enter_context(hit.holder.lease())
            self._fetching.acquire(self._keys, hit.cached_tokens)
        self._hit = hit
        fetched = hit.fetched_tokens if hit.holder is not None else 0
        return Work(hit.service_s, hit.fetch_s, hit.cached_tokens, fetched, ready_ns)

    def _find(self, prefill_s: Callable[[int, int], float]) -> Hit:
        cache = self._cache
        return cache.prefixes.best_hit(cache.memory, self._keys, self._tokens, prefill_s)

    def _kept_tokens(self, full_tokens: int) -> int:
        """As far as there is room. A model's state is real at checkpoints and at the end alone, so
        what does not fit as a whole ends at a checkpoint."""
        assert self._hit is not None
        if not self._computes:
            return full_tokens  # as many as fit, with a state wherever they end
        fitting = self._lease.fitting(self._keys, full_tokens)
        if fitting == full_tokens:
            return full_tokens
        checkpoint_tokens = self._cache.memory.pool.geometry.checkpoint_tokens
        return max(self._hit.cached_tokens, fitting // checkpoint_tokens * checkpoint_tokens)

    def computed(self) -> None:
        """All layers are final: the prefix is kept; the tail and the state are left to be sent."""
        assert self._hit is not None
        block_tokens = self._cache.memory.pool.geometry.block_tokens
        full_tokens = len(self._keys) * block_tokens
        tail_bytes = self._cache.prefixes.architecture.moved_bytes(self._tokens, full_tokens)
        self._lease.shrink(tail_bytes)
        self._lease.receive(self._keys, self._hit.cached_tokens, state=self._hit.holder is not None)
        self._lease.insert(self._keys, self._kept_tokens(full_tokens))
        self._cache.memory.grant()
        if self._fetching is not None:
            self._fetching.end()


@dataclass(eq=False, slots=True)
class _Push:
    """A request's KV on its way: what is sent, and what its sending waits for."""

    room: int
    tokens: int
    computing: _Computing | None
    first_token: asyncio.Future[int]
    started: asyncio.Event = field(default_factory=asyncio.Event)
    pieces: "asyncio.Queue[Piece]" = field(default_factory=asyncio.Queue)

    def hear(self, token: int) -> None:
        """The first token is known."""
        if not self.first_token.done():  # cancelled with the sending
            self.first_token.set_result(token)

    async def meta(self) -> bytes:
        """What comes with the end of the KV: the first token, and what was cached of the prompt."""
        words = [await self.first_token]
        if self.computing is not None:
            words.append(self.computing.cached_tokens)
        return b"".join(word.to_bytes(4, "little") for word in words)


class PrefillEnd:
    """A prefill instance's requests. ``prefill_started`` and the first token are told at once."""

    def __init__(
        self,
        engine: PrefillBackend,
        kv: KvBytes,
        sender: KvSender,
        config: EngineConfig,
        cache: Cache | None,
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._sender = sender
        self._config = config
        self._cache = cache
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
    def open_requests(self) -> int:
        """Requests between their arrival and their last word."""
        return len(self._serving)

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
        with ExitStack() as stack:
            stack.callback(self._close, room)
            computing = None
            if self._cache is not None:
                keys = self._cache.keys(body)
                deadline_s = self._config.transfer_deadline_wall_s
                computes = self._config.reference is not None
                computing = _Computing(
                    self._cache, keys, prompt.tokens, stack, deadline_s, computes=computes
                )
            if self._config.admission == "reserve_first":
                await self._registered(registration, room)
            first_token: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            push = _Push(room, prompt.tokens, computing, first_token)
            job = self._job(push, body, prompt, received_ns)
            # After the sending has ended: its bytes are the job's.
            stack.callback(self._engine.release, job)
            sending = asyncio.create_task(self._push(push, registration))
            try:
                prefilling = asyncio.create_task(self._engine.prefill(job))
                await self._tell_start(push.started, prefilling, sending, body, prompt, send)
                span = await prefilling
                if not self._config.report_layers:
                    span.layer_final_mono_ns = []
                if computing is not None:
                    assert self._cache is not None, "computing is of a cache"
                    computing.computed()
                    self._engine.keep(job, self._cache.memory.pool)
                token = first_token.result()
                await send(_prefill_chunk(body, prompt, "prefill_done", span, [token]))
                receipt = await sending
                span.kv_acked_mono_ns = receipt.acked_mono_ns
                span.kv_wire_bytes_sent = receipt.payload_bytes
                span.kv_retransmits = receipt.retransmits
                await send(_prefill_chunk(body, prompt, "transfer_done", span, []))
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def _job(self, push: _Push, body: GenerateBody, prompt: Prompt, received_ns: int) -> PrefillJob:
        begin: Begin | None = None if push.computing is None else push.computing.begin
        return PrefillJob(
            tokens=push.tokens,
            received_mono_ns=received_ns,
            ready_mono_ns=time.monotonic_ns(),
            num_layers=self._kv.num_layers,
            emit=push.pieces.put_nowait,
            on_start=push.started.set,
            begin=begin,
            shares=self._engine.release_shares(push.tokens, self._kv.layer_bytes(push.tokens)),
            digest=prompt.digest,
            keys=() if push.computing is None else push.computing.keys,
            read_ids=lambda: prompt_ids(body),
            on_token=push.hear,
        )

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
            first = {starting, sending, prefilling}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            if prefilling.done() and not started.is_set():
                prefilling.result()
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
            # Not wait_for, which in Python 3.11 drops a cancellation that comes with the result.
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(registration)
        except TimeoutError as error:
            raise TransportError(
                f"room {room}: no decode instance registered within {deadline_s:g} s of wall time"
            ) from error

    async def _push(self, push: _Push, registration: asyncio.Future[Registration]) -> Receipt:
        where = await self._registered(registration, push.room)
        if not 0 <= where.resident_tokens <= push.tokens:
            raise TransportError(
                f"room {push.room}: {where.resident_tokens} tokens are said to be resident, of a "
                f"prompt of {push.tokens}"
            )
        layer_bytes = self._kv.layer_bytes(push.tokens, where.resident_tokens)
        await push.started.wait()
        transfer = await self._sender.open(where.host, where.port, push.room, layer_bytes, b"")
        try:
            whole_bytes = self._kv.layer_bytes(push.tokens)
            layers_left = len(layer_bytes)
            while layers_left:
                piece = await push.pieces.get()
                size = layer_bytes[piece.layer]
                if piece.data is None:
                    transfer.send_layer(piece.layer, self._kv.layer(size))
                else:
                    _send_piece(transfer, piece, piece.data, whole_bytes[piece.layer] - size)
                layers_left -= piece.is_last
            return await transfer.finish(await push.meta())
        except asyncio.CancelledError:
            transfer.abort("the request was cancelled at the prefill instance")
            raise


def _send_piece(transfer: Transfer, piece: Piece, data: memoryview, resident_bytes: int) -> None:
    """What of a piece lies beyond the growing KV that is at the destination already."""
    begin = max(piece.first_byte, resident_bytes)
    transfer.send_part(piece.layer, begin - resident_bytes, data[begin - piece.first_byte :])


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
        cached_tokens=0 if span is None else span.cached_tokens,
        prfaas=Spans(event=event, prefill=span),
    )
    if event == "transfer_done":
        meta.finish_reason = STOP
    return GenerateChunk("".join(f" {token}" for token in tokens), tokens, meta)
