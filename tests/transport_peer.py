"""For the transport's tests: run a coroutine on either loop, and a peer that speaks by hand."""

import asyncio
import gc
import secrets
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import uvloop
from wire_reader import Data, WireReader

from harness.transport.frames import (
    MAX_PAYLOAD_BYTES,
    NO_ROOM,
    ROLE_SENDER,
    Challenge,
    Code,
    Control,
    Credit,
    Error,
    Hello,
    Offer,
    Progress,
    Welcome,
)
from harness.transport.handshake import proof
from harness.transport.wire import encode_control, encode_data_head

SECRET = b"a secret of this test run only.."
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def run(
    main: Coroutine[Any, Any, None],
    loop: str = "uvloop",
    faults: list[dict[str, Any]] | None = None,
) -> None:
    """Run to the end within 30 s; an error in any callback, of lanes too, or unread future fails it
    too, unless ``faults`` is there to take it."""
    errors: list[dict[str, Any]] = [] if faults is None else faults

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with asyncio.timeout(30):
            await main
        gc.collect()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(bounded())
    assert faults is not None or errors == [], [str(each.get("exception", each)) for each in errors]


def soon() -> float:
    """A deadline that is met unless something is broken."""
    return time.monotonic() + 10


def data(room: int, layer: int, offset: int, payload: bytes, transfer: int = 0) -> bytes:
    """A whole data frame with its checksum."""
    return encode_data_head(room, layer, offset, memoryview(payload), True, transfer) + payload


class Peer:
    """A raw connection to a receiver; it can speak the protocol wrongly."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.acknowledged_frames = 0
        self._decoder = WireReader()
        self._decoder.unlock(MAX_PAYLOAD_BYTES)
        self._frames: list[Control | Data] = []

    async def hello(self, session: bytes, role: int = ROLE_SENDER) -> Hello:
        """Answer the receiver's challenge with a right proof."""
        challenge = await self.read()
        assert isinstance(challenge, Challenge)
        nonce = secrets.token_bytes(32)
        own = proof("client", SECRET, role, session, challenge.nonce, nonce)
        hello = Hello(role, session, nonce, own)
        self.send(hello)
        return hello

    def send(self, *frames: Control | bytes) -> None:
        for frame in frames:
            self._writer.write(frame if isinstance(frame, bytes) else encode_control(frame))

    async def read(self) -> Control | Data | None:
        """The next frame that is no Progress, None when the receiver has closed the connection."""
        while not self._frames:
            try:
                received = await self._reader.read(65_536)
            except ConnectionError:
                received = b""
            if not received:
                return None
            for frame in self._decoder.feed(received):
                if isinstance(frame, Progress):
                    self.acknowledged_frames = frame.frames
                else:
                    self._frames.append(frame)
        return self._frames.pop(0)

    async def error(self) -> Error:
        """The next frame, which must be an error."""
        frame = await self.read()
        assert isinstance(frame, Error)
        return frame

    async def refused(self, code: Code) -> str:
        """The message of the error that ends this connection."""
        error = await self.error()
        assert (error.room, error.code) == (NO_ROOM, code)
        assert await self.read() is None
        return error.message

    async def offer(self, room: int, *layer_bytes: int) -> None:
        """Offer a room and have it accepted."""
        self.send(Offer(room, layer_bytes))
        assert await self.read() == Credit(room, sum(layer_bytes))

    async def gone(self) -> None:
        """Until the receiver has ended the connection."""
        assert await self.read() is None

    async def flushed(self) -> None:
        """Until the kernel has all that was sent."""
        while self._writer.transport.get_write_buffer_size():
            await asyncio.sleep(0)

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # the receiver was faster


class Peers:
    """Raw connections to one receiver, closed together."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._peers: list[Peer] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for peer in self._peers:
            await peer.close()

    async def connect(self) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self._port))
        self._peers.append(peer)
        return peer

    async def authenticated(self, session: bytes | None = None) -> Peer:
        """A connection after the handshake, in its own session unless one is given."""
        peer = await self.connect()
        await peer.hello(session or secrets.token_bytes(16))
        assert isinstance(await peer.read(), Welcome)
        return peer
