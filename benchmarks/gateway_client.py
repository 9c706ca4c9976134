"""A client as light as one can be: raw HTTP over kept connections, for benchmarks/gateway.py.

TTFT is from the send to the first ``data:`` of an answer's stream; on the direct way both halves of
the pair are posted by the client itself, prefill first, and the decode half answers. A stream is
over at its last chunk. Nothing is parsed beyond that, so that what is measured is the way and not
the client. Seconds are wall seconds.
"""

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, cast

from harness.core import LoadError

#: What no answer of the measured path comes near; a client that waits longer has found a fault.
PATIENCE_S = 30.0
_OK = b"HTTP/1.1 200"
_END = b"0\r\n\r\n"


class Way(Protocol):
    """How a request reaches its first token."""

    async def ttft_s(self, prompt: bytes, output_tokens: int) -> float: ...


class _Stream(asyncio.Protocol):
    """One kept connection: a request, the instants of its answer, and so on."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._tail = b""
        self._first: asyncio.Future[int] | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(
        self, head: bytes, body: bytes
    ) -> tuple["asyncio.Future[int]", "asyncio.Future[None]"]:
        """Post; gives the instants of the first event (monotonic ns) and of the end."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._head = self._tail = b""
        self._first, self._done = loop.create_future(), loop.create_future()
        self._transport.writelines((head, body))
        return self._first, self._done

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        assert self._first is not None
        assert self._done is not None
        if not self._first.done():
            self._head += data
            if b"data: " in self._head:
                self._first.set_result(now_ns)
            elif b"\r\n\r\n" in self._head and not self._head.startswith(_OK):
                self._fail(LoadError(f"the answer is {self._head[:500]!r}"))
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END and not self._done.done():
            if self._head.startswith(_OK) and b'"error"' not in self._head:
                self._done.set_result(None)
            else:
                self._fail(LoadError(f"the answer is {self._head[:500]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(LoadError(f"the connection was closed ({exc}) after {self._head[:500]!r}"))

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def _fail(self, error: LoadError) -> None:
        for future in (self._first, self._done):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits for the other one is told


@dataclass(frozen=True, slots=True)
class Address:
    """A server and the key it wants."""

    host: str
    port: int
    key: str

    def head(self, body_bytes: int) -> bytes:
        return (
            f"POST /generate HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {body_bytes}\r\n\r\n"
        ).encode()


class _Pool:
    """Kept connections to one server: a request takes an idle one, or opens one."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[_Stream] = []

    async def take(self) -> _Stream:
        if self._idle:
            return self._idle.pop()
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(_Stream, self.address.host, self.address.port)
        return stream

    def give_back(self, stream: _Stream) -> None:
        self._idle.append(stream)

    def close(self) -> None:
        for stream in self._idle:
            stream.close()


def body_of(prompt: bytes, output_tokens: int, bootstrap: tuple[str, int] | None = None) -> bytes:
    """A ``/generate`` body around the JSON text of the prompt's ids; with the pair's bootstrap
    where the client does what a gateway would do."""
    pair = b""
    if bootstrap is not None:
        pair = b',"bootstrap_host":"%b","bootstrap_port":%d,"bootstrap_room":%d' % (
            bootstrap[0].encode(),
            bootstrap[1],
            secrets.randbits(60),
        )
    return (
        b'{"input_ids":%b,"sampling_params":{"max_new_tokens":%d,"ignore_eos":true},'
        b'"stream":true%b}' % (prompt, output_tokens, pair)
    )


@asynccontextmanager
async def through(address: Address) -> AsyncIterator[Way]:
    """By way of one front, which picks the pair."""
    pool = _Pool(address)

    class Through:
        async def ttft_s(self, prompt: bytes, output_tokens: int) -> float:
            body = body_of(prompt, output_tokens)
            stream = await pool.take()
            sent_ns = time.monotonic_ns()
            first, done = stream.send(address.head(len(body)), body)
            await asyncio.wait_for(done, PATIENCE_S)
            pool.give_back(stream)
            return (first.result() - sent_ns) / 1e9

    try:
        yield Through()
    finally:
        pool.close()


@asynccontextmanager
async def direct(prefill: Address, decode: Address) -> AsyncIterator[Way]:
    """To the pair itself: both halves at once, the decode half answers."""
    pools = _Pool(prefill), _Pool(decode)

    class Direct:
        async def ttft_s(self, prompt: bytes, output_tokens: int) -> float:
            body = body_of(prompt, output_tokens, (prefill.host, prefill.port))
            streams = [await pool.take() for pool in pools]
            sent_ns = time.monotonic_ns()
            sent = [
                stream.send(pool.address.head(len(body)), body)
                for pool, stream in zip(pools, streams, strict=True)
            ]
            await asyncio.wait_for(asyncio.gather(*(done for _, done in sent)), PATIENCE_S)
            for pool, stream in zip(pools, streams, strict=True):
                pool.give_back(stream)
            return (sent[1][0].result() - sent_ns) / 1e9

    try:
        yield Direct()
    finally:
        for pool in pools:
            pool.close()


async def one_at_a_time(
    ways: dict[str, Way], prompt: Callable[[int], bytes], count: int
) -> dict[str, list[float]]:
    """``count`` requests by every way, one in flight at any time, the ways taking turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for index in range(count):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            found[name].append(await ways[name].ttft_s(prompt(index), 2))
    return found


async def open_loop(
    way: Way, prompt: Callable[[int], bytes], planned_s: list[float], output_tokens: int
) -> list[float]:
    """Requests at their planned instants whatever became of the others; TTFT from the send."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def one(index: int, at_s: float) -> float:
        await asyncio.sleep(start_s + at_s - loop.time())
        return await way.ttft_s(prompt(index), output_tokens)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, at_s)) for index, at_s in enumerate(planned_s)]
    return [task.result() for task in tasks]
