"""Kept HTTP/1.1 connections to the workers, on asyncio's protocols.

A request goes out in two writes (see ``send``) and the pieces of its answer are handed over as they
come, with no reader or request object between: what stands between a first token and the client
is short. What the consumer does not take stops the reading beyond ``MAX_HELD_BYTES``, so that a
slow client holds its worker back and not the gateway's memory.
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from harness.core import EngineError
from harness.gateway.response import Response, ResponseError

#: Of the body, sent together with the head.
HEAD_BYTES = 64
MAX_HELD_BYTES = 1 << 18


class BrokenOffError(EngineError):
    """The connection ended before its answer did. ``unheard``: without a byte of it."""

    def __init__(self, reason: str, *, unheard: bool) -> None:
        super().__init__(reason)
        self.unheard = unheard


class Connection(asyncio.Protocol):
    """One connection: a request, its answer, the next request."""

    def __init__(self) -> None:
        self._response: Response | None = None
        self._transport: asyncio.Transport | None = None
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0
        self._paused = False
        self._heard = False
        self._broken: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        #: How many requests it has carried.
        self.requests = 0

    @property
    def reusable(self) -> bool:
        """Whether the answer was read to its end and the server goes on with the connection."""
        response = self._response
        if response is None or self._broken is not None or self._pieces:
            return False
        return response.ended and response.keeps_connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        # A registration must not wait for the acknowledgement of a head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        handed_over: Callable[[], None],
    ) -> None:
        """Send a request in two writes, so that its head leaves in a packet of its own.

        A worker's clock starts when it has the head. In one write with a prompt the head would
        arrive with the last byte of a segmentation-offload packet: half a millisecond later at
        1 Gbit/s. The event loop writes at the end of a turn, so ``handed_over`` is called in the
        next one. No process would account for either.
        """
        self.requests += 1
        self._response, self._heard = Response(), False
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = f"{method} {path} HTTP/1.1\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        self._write(head.encode() + body[:HEAD_BYTES])
        await asyncio.sleep(0)
        handed_over()
        if len(body) > HEAD_BYTES:
            self._write(memoryview(body)[HEAD_BYTES:])

    async def status(self) -> int:
        """The answer's status, once its head is there."""
        assert self._response is not None, "nothing was asked"
        while self._response.status is None:
            await self._news()
        return self._response.status

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The answer's body in the pieces in which it comes, to its end."""
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._held_bytes -= len(piece)
                if self._paused and not self._held_bytes and self._transport is not None:
                    self._paused = False
                    self._transport.resume_reading()
                yield piece
            if self._response is None or self._response.ended:
                return
            await self._news()

    def close(self) -> None:
        """At once: what the server still had to say is of no interest."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        response, self._heard = self._response, True
        try:
            if response is None:
                raise ResponseError("the server spoke unasked")
            pieces = response.feed(data)
        except ResponseError as error:
            self._broken = str(error)
            self.close()
            self._wake()
            return
        for piece in pieces:
            self._pieces.append(piece)
            self._held_bytes += len(piece)
        if self._held_bytes > MAX_HELD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if pieces or response.status is not None:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if exc is None and self._response is not None:
            self._response.close()
        self._broken = self._broken or str(exc or "closed by the other side")
        self._wake()

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def _news(self) -> None:
        """Wait until something came; BrokenOffError when nothing will."""
        if self._broken is not None:
            raise BrokenOffError(self._broken, unheard=not self._heard)
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connections:
    """Kept connections to one server: a request takes the warmest idle one, or opens one."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: list[Connection] = []

    async def take(self, *, fresh: bool = False) -> Connection:
        """Raises OSError where nothing answers. ``fresh``: not one that was idle."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.host, self.port)
        return connection

    def give_back(self, connection: Connection) -> None:
        """For the next request where it can carry one; closed where it cannot."""
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
