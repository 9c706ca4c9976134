"""The gateway's side of SGLang's PD protocol: one body to a prefill and to a decode instance."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

import msgspec

from harness.core import EngineError, Route
from harness.engine_settings import EngineKind
from harness.gateway import sglang
from harness.gateway.config import WorkerAddress
from harness.gateway.connection import BrokenOffError, Connection, Connections
from harness.gateway.failures import (
    AnsweredError,
    Failure,
    InstanceLostError,
    InstanceUnreachableError,
    TransferFailedError,
    failure,
    said_of,
)
from harness.surface.generate import GenerateBody, GenerateChunk, decode_chunk, encode
from harness.surface.sse import SseError, SseParser

__all__ = [
    "AnsweredError",
    "InstanceLostError",
    "InstanceUnreachableError",
    "TransferFailedError",
    "Upstream",
]

#: The whole of an error's body, and a line of a stream: a pool of a million blocks takes 42 MB.
_MAX_ERROR_BYTES, _MAX_LINE_BYTES = 1 << 16, 1 << 26


#: An instance without requests of the gateway is idle within this time; wall time, as the poll.
IDLE_WITHIN_S, IDLE_POLL_S = 10.0, 0.02


def _nothing() -> None:
    """Nobody wants to know."""


async def _some(pieces: AsyncGenerator[bytes, None]) -> bytes:
    """An error's body, or its beginning where it goes on and on."""
    said = b""
    async with aclosing(pieces):
        async for piece in pieces:
            said += piece
            if len(said) > _MAX_ERROR_BYTES:
                break
    return said


class Upstream:
    """The workers behind the gateway."""

    def __init__(
        self,
        workers: Sequence[WorkerAddress],
        key: str,
        connect_timeout_wall_s: float,
        engine: EngineKind = "emulated",
    ) -> None:
        self._engine = engine
        self._workers = {worker.name: worker for worker in workers}
        self._connections = {
            worker.name: Connections(worker.host, worker.port) for worker in workers
        }
        self._headers = {
            worker.name: (
                ("Host", f"{worker.host}:{worker.port}"),
                ("Authorization", f"Bearer {key}"),
                ("Content-Type", "application/json"),
            )
            for worker in workers
        }
        self._connect_timeout_wall_s = connect_timeout_wall_s

    def address(self, instance: str) -> str:
        """``host:port`` of an instance as the gateway reaches it."""
        connections = self._connections[instance]
        return f"{connections.host}:{connections.port}"

    def close(self) -> None:
        for connections in self._connections.values():
            connections.close()

    def body(self, body: GenerateBody, route: Route, attempt: int = 0) -> bytes:
        """The body that both halves of ``route`` get: the client's with the pair's bootstrap.

        SGLang refuses a name that it has not forgotten yet, so each attempt has its own there.
        """
        prefill = self._workers[route.prefill.name]
        again = self._engine == "sglang" and attempt > 0
        return encode(
            msgspec.structs.replace(
                body,
                stream=True,
                rid=f"{body.rid}~{attempt}" if again else body.rid,
                bootstrap_host=prefill.bootstrap_host or prefill.host,
                bootstrap_port=prefill.bootstrap_port or prefill.port,
                bootstrap_room=secrets.randbits(60),
            )
        )

    def prefill(
        self, instance: str, body: bytes, handed_over: Callable[[], None] = _nothing
    ) -> AsyncGenerator[GenerateChunk, None]:
        """What a prefill instance says of its half, as our own workers say it."""
        chunks = self.stream(instance, body, handed_over)
        return sglang.as_prefill(instance, chunks) if self._engine == "sglang" else chunks

    def decode(self, instance: str, body: bytes) -> AsyncGenerator[GenerateChunk, None]:
        """What a decode instance says of its half: what is new in each chunk."""
        chunks = self.stream(instance, body)
        return sglang.as_decode(instance, chunks) if self._engine == "sglang" else chunks

    async def stream(
        self, instance: str, body: bytes, handed_over: Callable[[], None] = _nothing
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Events of ``/generate`` at an instance; EngineError when it fails or breaks off.

        ``handed_over`` is called when the request's head has gone to the socket, connecting
        included: until then its time is the gateway's. A stream that is closed early closes its
        connection, by which the worker cancels the request.
        """
        try:
            async with aclosing(
                self._exchange(instance, "POST", "/generate", body, handed_over)
            ) as pieces:
                async for chunk in self._events(instance, pieces):
                    if chunk.error is not None:
                        said = msgspec.convert(chunk.error, Failure | str)
                        raise failure(instance, said)
                    yield chunk
        except (SseError, msgspec.ValidationError) as error:
            raise EngineError(f"the stream of {instance} broke off: {error}") from error

    async def ask(self, instance: str, method: str, path: str, body: bytes = b"") -> bytes:
        """The whole answer to a request of another kind; EngineError where it is not 200."""
        async with aclosing(self._exchange(instance, method, path, body, _nothing)) as pieces:
            return b"".join([piece async for piece in pieces])

    async def ask_when_idle(
        self, instance: str, path: str, busy_status: int, body: bytes = b""
    ) -> bytes:
        """``ask`` for what an instance does only while it has no requests, and refuses with
        ``busy_status`` else: those that the gateway has heard the end of may still be open there
        for a moment, and are waited for."""
        deadline_s = time.monotonic() + IDLE_WITHIN_S
        while True:
            try:
                return await self.ask(instance, "POST", path, body)
            except AnsweredError as error:
                if error.status != busy_status or time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(IDLE_POLL_S)

    async def follow(self, instance: str, path: str) -> AsyncGenerator[bytes, None]:
        """The lines of an answer that goes on until the instance ends."""
        rest = b""
        async with aclosing(self._exchange(instance, "GET", path, b"", _nothing)) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    raise EngineError(f"{instance}{path}: a line is over {_MAX_LINE_BYTES} bytes")
                for line in lines:
                    yield line

    async def _exchange(
        self,
        instance: str,
        method: str,
        path: str,
        body: bytes,
        handed_over: Callable[[], None],
    ) -> AsyncGenerator[bytes, None]:
        """The pieces of the body of a 200; EngineError for anything else."""
        connection = await self._connect(instance)
        try:
            try:
                await connection.send(method, path, self._headers[instance], body, handed_over)
                status = await connection.status()
            except BrokenOffError as error:
                if connection.requests == 1 or not error.unheard:
                    raise
                # It was closed while it was idle: the request reached nobody who would do it.
                connection.close()
                connection = await self._connect(instance, fresh=True)
                await connection.send(method, path, self._headers[instance], body, _nothing)
                status = await connection.status()
            if status != 200:
                said = await _some(connection.pieces())
                raise failure(instance, said_of(said), status)
            async with aclosing(connection.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        except BrokenOffError as error:
            if error.unheard:
                # A forwarder before a dead instance takes connections and closes them.
                raise InstanceUnreachableError(instance, f"{error} without a word") from error
            raise InstanceLostError(
                instance, f"the stream of {instance} broke off: {error}"
            ) from error
        finally:
            self._connections[instance].give_back(connection)

    async def _connect(self, instance: str, *, fresh: bool = False) -> Connection:
        timeout_s = self._connect_timeout_wall_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connections[instance].take(fresh=fresh)
        except TimeoutError as error:
            raise InstanceUnreachableError(
                instance, f"no connection within {timeout_s:g} s of wall time", in_time=False
            ) from error
        except OSError as error:
            raise InstanceUnreachableError(instance, error.strerror or str(error)) from error

    async def _events(
        self, instance: str, pieces: AsyncIterator[bytes]
    ) -> AsyncIterator[GenerateChunk]:
        parser = SseParser()
        done = False
        # Read to the end of the message: a connection left in the middle of one is not used again.
        async for piece in pieces:
            for event in parser.feed(piece):
                if done:
                    raise EngineError(f"the stream of {instance} went on after [DONE]")
                done = event.data == "[DONE]"
                if not done:
                    yield decode_chunk(event.data)
        if not done:
            raise InstanceLostError(instance, f"the stream of {instance} ended before [DONE]")
