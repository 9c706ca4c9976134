"""For the transport's tests: TCP proxies between a sender and a receiver that cut and stall.

``FrameProxy`` reads the protocol and cuts at a chosen frame; ``ByteProxy`` counts bytes, so it
works with TLS too. A cut aborts both halves: either end sees its connection reset.
"""

import asyncio
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, Self

from wire_reader import Data, WireReader

from harness.transport.frames import MAX_PAYLOAD_BYTES, Control
from harness.transport.wire import encode_control, encode_data_head

#: What becomes of a frame: it passes; or the connection is cut before it, in it, or after it.
Fate = Literal["pass", "lose", "truncate", "last"]
Side = Literal["sender", "receiver"]


def encoded(frame: Control | Data) -> bytes:
    """The frame as it came."""
    if not isinstance(frame, Data):
        return encode_control(frame)
    return (
        encode_data_head(
            *(frame.room, frame.layer, frame.offset, memoryview(frame.payload)),
            *(frame.checksum is not None, frame.transfer),
        )
        + frame.payload
    )


class Pair:
    """One connection through the proxy: the sender's half and the receiver's."""

    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self._writers = writers
        self.pumps: list[asyncio.Task[None]] = []

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def end(self) -> None:
        """Let what was forwarded arrive, then cut."""
        for writer in self._writers:
            writer.close()


class Proxy:
    """Listens before a receiver; ``open`` false accepts connections and forwards nothing."""

    def __init__(self, receiver_port: int) -> None:
        self.port = 0
        self.connections = self.cuts = 0
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._receiver_port = receiver_port
        self._server: asyncio.Server | None = None
        self.pairs: list[Pair] = []
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.refuse()
        self.cut_all()
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def refuse(self) -> None:
        """Nobody listens any more."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def cut_all(self) -> None:
        """Cut every connection now."""
        for pair in self.pairs:
            pair.cut()
        self.cuts += len(self.pairs)
        self.pairs = []

    def pump(
        self, index: int, side: Side, data: bytes
    ) -> tuple[bytes, Literal["pass", "cut", "end"]]:
        """What to forward of bytes that a side sent, and what to do then."""
        raise NotImplementedError

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        index, self.connections = self.connections, self.connections + 1
        try:
            await self.flowing.wait()
            there = await asyncio.open_connection("127.0.0.1", self._receiver_port)
        except OSError:
            writer.transport.abort()
            return
        pair = Pair((writer, there[1]))
        self.pairs.append(pair)
        try:
            await asyncio.gather(
                self._pump(index, pair, "sender", reader, there[1]),
                self._pump(index, pair, "receiver", there[0], writer),
            )
        finally:
            pair.cut()

    async def _pump(
        self,
        index: int,
        pair: Pair,
        side: Side,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            while data := await reader.read(65_536):
                await self.flowing.wait()
                forward, then = self.pump(index, side, data)
                if forward:
                    writer.write(forward)
                    await writer.drain()
                if then != "pass":
                    self.cuts += 1
                    if pair in self.pairs:
                        self.pairs.remove(pair)
                    pair.end() if then == "end" else pair.cut()
                    return
            writer.close()
        except (OSError, RuntimeError):  # uvloop's word for a transport that was aborted meanwhile
            pair.cut()


class FrameProxy(Proxy):
    """``fate`` of each frame: connection, the side that sent it, the frame."""

    def __init__(
        self, receiver_port: int, fate: Callable[[int, Side, Control | Data], Fate]
    ) -> None:
        super().__init__(receiver_port)
        self._fate = fate
        self._readers: dict[tuple[int, Side], WireReader] = {}

    def pump(
        self, index: int, side: Side, data: bytes
    ) -> tuple[bytes, Literal["pass", "cut", "end"]]:
        reader = self._readers.get((index, side))
        if reader is None:
            reader = self._readers[index, side] = WireReader(65_536)
            reader.unlock(MAX_PAYLOAD_BYTES)
        forward = b""
        for frame in reader.feed(data):
            fate = self._fate(index, side, frame)
            raw = encoded(frame)
            if fate == "lose":
                return forward, "end" if forward else "cut"
            if fate == "truncate":
                return forward + raw[: len(raw) // 2], "end"
            forward += raw
            if fate == "last":
                return forward, "end"
        return forward, "pass"


class ByteProxy(Proxy):
    """Cuts each connection after the next number of bytes, both ways together; 0 is never."""

    def __init__(self, receiver_port: int, cut_after: Iterator[int]) -> None:
        super().__init__(receiver_port)
        self._cut_after = cut_after
        self._left: dict[int, int] = {}

    def pump(
        self,
        index: int,
        side: Side,  # noqa: ARG002 - both count together
        data: bytes,
    ) -> tuple[bytes, Literal["pass", "cut", "end"]]:
        if index not in self._left:
            self._left[index] = next(self._cut_after)
        left = self._left[index]
        if left == 0:
            return data, "pass"
        if len(data) < left:
            self._left[index] = left - len(data)
            return data, "pass"
        return data[:left], "cut"
