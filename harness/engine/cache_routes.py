"""What the scheduler's side asks of an instance's prefix cache, over HTTP.

``GET /cache_deltas`` streams the pool's changes as JSON lines, from now on, and ``/cache_snapshot``
gives all of it with the number of the last change. A prefix is copied between clusters in two
calls: ``POST /expect_prefix`` at the destination sets room aside and answers where KV is taken;
``POST /copy_prefix`` at the source sends the growing KV that the destination lacks and the state at
the prefix's end, over the transport like any other KV, and answers when all has arrived. A copy is
a shortcut: what cannot be had at once is refused with 409, and the request computes instead; by
``POST /forget_prefix`` the destination hears that a source refused, and gives the room back.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from harness.core import EngineError, TransportError
from harness.engine.emulated import KvBytes
from harness.engine.memory import Lease
from harness.engine.prefixes import Cache
from harness.server import read_body
from harness.surface.generate import MAX_BODY_BYTES, encode
from harness.transport.receiver import KvReceiver, Received
from harness.transport.sender import KvSender

#: Wall time between two looks for changes.
DELTAS_PERIOD_S = 0.05
#: Of 64 bits each, which msgspec cannot say; at most those of a million tokens, one a block.
_Key = Annotated[int, Meta(ge=0)]
_Keys = Annotated[tuple[_Key, ...], Meta(min_length=1, max_length=1_000_000)]
_Tokens = Annotated[int, Meta(ge=1)]
_Room = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ExpectPrefix(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/expect_prefix``: the first ``tokens`` of a prompt with these ``keys`` will come.
    ``source`` is "host:port" of the source's HTTP server."""

    room: _Room
    keys: _Keys
    tokens: _Tokens
    source: str


class ForgetPrefix(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/forget_prefix``: what was to come in this room will not."""

    room: _Room


class CopyPrefix(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/copy_prefix``: as told to the destination, and as it answered."""

    room: _Room
    keys: _Keys
    tokens: _Tokens
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    resident_tokens: Annotated[int, Meta(ge=0)]


Body = TypeVar("Body", ExpectPrefix, ForgetPrefix, CopyPrefix)


class CacheRoutes:
    """Of one instance. ``tasks`` outlive their request and end with the worker. Without ``copies``
    an instance neither sends nor takes prefixes: what it holds are tensors."""

    def __init__(
        self,
        cache: Cache,
        kv: KvBytes,
        sender: KvSender,
        receiver: KvReceiver,
        route: Callable[[str], tuple[str, int]],
        tasks: set[asyncio.Task[None]],
        patience_s: float,
        *,
        copies: bool = True,
    ) -> None:
        self._cache, self._kv, self._copies = cache, kv, copies
        self._sender, self._receiver = sender, receiver
        self._route, self._tasks, self._patience_s = route, tasks, patience_s
        #: Copies that are expected, by room.
        self._landing: dict[int, asyncio.Task[None]] = {}

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/cache_deltas", self._deltas)
        app.router.add_get("/cache_snapshot", self._snapshot)
        if not self._copies:
            return
        app.router.add_post("/expect_prefix", self._expect)
        app.router.add_post("/forget_prefix", self._forget)
        app.router.add_post("/copy_prefix", self._copy)

    def settings(self) -> dict[str, int]:
        """The pool's sizes, for ``/get_server_info``."""
        pool = self._cache.memory.pool
        return asdict(pool.geometry) | {"capacity_blocks": pool.capacity_blocks}

    async def _deltas(self, request: web.Request) -> web.StreamResponse:
        memory = self._cache.memory
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        memory.deltas_after(None)
        seq = memory.seq
        await response.prepare(request)
        while True:
            lines = []
            for delta in memory.deltas_after(seq):
                lines.append(encode(delta) + b"\n")
                seq = delta.seq
            if lines:
                await response.write(b"".join(lines))
            await asyncio.sleep(DELTAS_PERIOD_S)

    async def _snapshot(self, _request: web.Request) -> web.Response:
        seq, blocks, states = self._cache.memory.snapshot()
        body = encode({"seq": seq, "blocks": blocks, "states": states})
        return web.Response(body=body, content_type="application/json")

    async def _expect(self, request: web.Request) -> web.Response:
        wanted = await _read(request, ExpectPrefix)
        memory = self._cache.memory
        keys, tokens = self._prefix(wanted)
        resident_tokens = memory.pool.held_blocks(keys) * memory.pool.geometry.block_tokens
        lease = memory.lease()
        try:
            lease.acquire(keys, resident_tokens)
            nbytes = self._cache.prefixes.architecture.moved_bytes(tokens, resident_tokens)
            if not lease.open(nbytes):
                raise web.HTTPConflict(text=f"no room for a prefix of {tokens} tokens now")
            arriving = self._receiver.expect(wanted.room, time.monotonic() + self._patience_s)
            landing = asyncio.create_task(self._land(lease, wanted, resident_tokens, arriving))
            self._tasks.add(landing)
            landing.add_done_callback(self._tasks.discard)
            self._landing[wanted.room] = landing
            landing.add_done_callback(lambda _: self._landing.pop(wanted.room, None))
        except BaseException:
            lease.end()
            raise
        host, port = self._route(wanted.source)
        return web.json_response({"host": host, "port": port, "resident_tokens": resident_tokens})

    async def _forget(self, request: web.Request) -> web.Response:
        """Give the room back that was set aside; nothing happens where none is."""
        landing = self._landing.get((await _read(request, ForgetPrefix)).room)
        if landing is not None:
            landing.cancel()
        return web.Response()

    async def _land(
        self,
        lease: Lease,
        wanted: ExpectPrefix,
        resident_tokens: int,
        arriving: asyncio.Future[Received],
    ) -> None:
        """Keep the prefix when it has come whole; otherwise nothing has happened."""
        keys, tokens = self._prefix(wanted)
        with lease:
            try:
                got = await arriving
            except TransportError:
                return  # the source says it to who asked for the copy
            except BaseException:
                self._receiver.discard(wanted.room, "the worker is closing")
                raise
            got.release()
            expected = sum(self._kv.layer_bytes(tokens, resident_tokens))
            if got.payload_bytes != expected:
                # Nobody waits for this end, and the prefix is computed; but somebody is wrong.
                print(
                    f"room {wanted.room}: {got.payload_bytes} bytes came of a prefix of {tokens} "
                    f"tokens with {resident_tokens} resident, whose geometry is {expected} bytes",
                    file=sys.stderr,
                )
                return
            lease.end_transfer()
            lease.receive(keys, tokens, state=True)

    async def _copy(self, request: web.Request) -> web.Response:
        wanted = await _read(request, CopyPrefix)
        keys, tokens = self._prefix(wanted)
        if self._cache.memory.pool.match(keys, len(keys)) != tokens:
            raise web.HTTPConflict(text=f"{self._cache.memory.name} holds this prefix no more")
        layer_bytes = self._kv.layer_bytes(tokens, min(tokens, wanted.resident_tokens))
        with self._cache.memory.lease() as lease:
            lease.acquire(keys, tokens)
            try:
                transfer = await self._sender.open(
                    wanted.host, wanted.port, wanted.room, layer_bytes, b""
                )
                try:
                    for layer, size in enumerate(layer_bytes):
                        transfer.send_layer(layer, self._kv.layer(size))
                    receipt = await transfer.finish()
                except asyncio.CancelledError:
                    transfer.abort("the copy was cancelled at the source")
                    raise
            except TransportError as error:
                raise web.HTTPBadGateway(text=f"the prefix did not arrive: {error}") from error
        return web.json_response({"kv_wire_bytes": receipt.payload_bytes})

    def _prefix(self, wanted: ExpectPrefix | CopyPrefix) -> tuple[tuple[int, ...], int]:
        """Keys of the full blocks of what is to be copied, and their tokens."""
        block_tokens = self._cache.memory.pool.geometry.block_tokens
        blocks = wanted.tokens // block_tokens
        if not 1 <= blocks <= len(wanted.keys):
            raise EngineError(
                f"{wanted.tokens} tokens are {blocks} full blocks of {block_tokens}; there are "
                f"keys of {len(wanted.keys)}"
            )
        keys = wanted.keys[:blocks]
        if len(set(keys)) < blocks:
            raise EngineError("a prompt's blocks have different keys: each stands for all before")
        return keys, blocks * block_tokens


async def _read(request: web.Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await read_body(request, MAX_BODY_BYTES), type=kind)
    except msgspec.MsgspecError as error:
        raise EngineError(f"{request.path}: the body is not valid: {error}") from error
