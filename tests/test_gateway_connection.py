"""Kept connections to a worker: used again, replaced once, given up by name, held back."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from harness.core import EngineError
from harness.gateway.config import WorkerAddress
from harness.gateway.connection import HEAD_BYTES, MAX_HELD_BYTES, Connections
from harness.gateway.upstream import (
    AnsweredError,
    InstanceLostError,
    InstanceUnreachableError,
    TransferFailedError,
    Upstream,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Requests:
    """What comes on one connection, request by request; heads are noted."""

    def __init__(self, reader: asyncio.StreamReader, heads: list[bytes]) -> None:
        self._reader, self._heads = reader, heads

    async def next(self) -> bytes:
        """The next request's body; b"" when none comes."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        self._heads.append(head)
        return await self._reader.readexactly(length)


Answerer = Callable[[int, Requests, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(answer: Answerer) -> AsyncIterator[tuple[Upstream, list[bytes]]]:
    """A worker ``a`` whose connections are handled by ``answer(number, reader, writer)``, and the
    heads that came."""
    heads: list[bytes] = []
    count = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        number, count = count, count + 1
        try:
            await answer(number, Requests(reader, heads), writer)
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    upstream = Upstream([WorkerAddress("a", "pd", "prefill", "h", "127.0.0.1", port)], "k", 5.0)
    async with listening:
        yield upstream, heads
        upstream.close()


def test_a_connection_is_used_again() -> None:
    numbers: list[int] = []

    async def answer(number: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        while await requests.next():
            numbers.append(number)
            writer.write(OK)

    async def main() -> None:
        async with server(answer) as (upstream, heads):
            body = b"x" * (3 * HEAD_BYTES)
            for _ in range(3):
                assert await upstream.ask("a", "POST", "/there", body) == b"ok"
            assert [head.split(b"\r\n")[0] for head in heads] == [b"POST /there HTTP/1.1"] * 3
            assert numbers == [0, 0, 0]
            assert all(b"Authorization: Bearer k\r\n" in head for head in heads)

    asyncio.run(main())


def test_one_that_was_closed_while_idle_is_replaced_once() -> None:
    bodies: list[bytes] = []

    async def answer(number: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        bodies.append(await requests.next())
        writer.write(OK)
        if number == 0:
            await requests.next()  # and it closes without a word

    async def main() -> None:
        async with server(answer) as (upstream, heads):
            assert await upstream.ask("a", "POST", "/", b"first") == b"ok"
            assert await upstream.ask("a", "POST", "/", b"second") == b"ok"
            assert (bodies, len(heads)) == ([b"first", b"second"], 3)

    asyncio.run(main())


def test_what_was_answered_with_nonsense_is_not_asked_again() -> None:
    async def answer(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(OK)
        await requests.next()
        writer.write(b"nonsense\r\n\r\n")

    async def main() -> None:
        async with server(answer) as (upstream, heads):
            assert await upstream.ask("a", "POST", "/", b"first") == b"ok"
            with pytest.raises(InstanceLostError, match="begins with"):
                await upstream.ask("a", "POST", "/", b"second")
            assert len(heads) == 2

    asyncio.run(main())


def test_what_goes_on_and_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error's body without an end, a line without one, and JSON deeper than can be read."""
    monkeypatch.setattr("harness.gateway.upstream._MAX_LINE_BYTES", 10_000)
    endless = b"HTTP/1.1 %d X\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 100_000
    deep = b"[" * 50_000
    event = b'data: {"error": ' + deep + b"\n\n"
    answers = {
        b"/error": endless % 500,
        b"/line": endless % 200,
        b"/deep": b'HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n{"x": ' % 50_006 + deep,
        b"/generate": b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n" % len(event) + event,
    }

    heads: list[bytes] = []

    async def answer(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(answers[heads[-1].split(b" ")[1]])
        await requests.next()

    async def main() -> None:
        nonlocal heads
        async with server(answer) as (upstream, heads), asyncio.timeout(10):
            for path in ("/error", "/deep"):
                with pytest.raises(AnsweredError, match=r"answered 500: (xxx|.*\[\[)"):
                    await upstream.ask("a", "GET", path)
            for chunks in (upstream.follow("a", "/line"), upstream.stream("a", b"{}")):
                async with aclosing(chunks):
                    with pytest.raises(EngineError, match=r"over 10000 bytes|outside the protocol"):
                        await anext(chunks)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (b"", InstanceUnreachableError, "without a word"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", InstanceLostError, "broke off"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nwhy", AnsweredError, "answered 500: why"),
        (b"nonsense\r\n\r\n", InstanceLostError, "begins with"),
    ],
)
def test_what_goes_wrong_is_named(said: bytes, error: type[Exception], message: str) -> None:
    async def answer(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(said)

    async def main() -> None:
        async with server(answer) as (upstream, _):
            with pytest.raises(error, match=message):
                await upstream.ask("a", "GET", "/")

    asyncio.run(main())


def test_a_transfer_that_failed_is_told_apart() -> None:
    said = b'{"error": {"message": "no KV came", "code": "transfer"}}'

    async def answer(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(b"HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))

    async def main() -> None:
        async with server(answer) as (upstream, _):
            with pytest.raises(TransferFailedError, match="no KV came"):
                await upstream.ask("a", "GET", "/")

    asyncio.run(main())


def test_nobody_at_the_address_is_unreachable() -> None:
    async def main() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        workers = [WorkerAddress("a", "pd", "prefill", "h", "127.0.0.1", port)]
        with pytest.raises(InstanceUnreachableError, match="a is not reachable"):
            await Upstream(workers, "k", 5.0).ask("a", "GET", "/health")

    asyncio.run(main())


def test_small_writes_are_not_held_back() -> None:
    async def main() -> None:
        listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            connection = await Connections("127.0.0.1", port).take()
            assert connection._transport is not None
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            connection.close()

    asyncio.run(main())


def test_what_nobody_takes_holds_the_worker_back() -> None:
    total_bytes = 64 * MAX_HELD_BYTES
    sent_bytes = 0

    async def answer(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        await requests.next()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total_bytes)
        while sent_bytes < total_bytes:
            writer.write((b"x" * 1023 + b"\n") * 64)
            sent_bytes += 2**16
            await writer.drain()

    async def main() -> None:
        async with server(answer) as (upstream, _):
            lines = upstream.follow("a", "/")
            async with aclosing(lines):
                await anext(lines)
                before = -1
                while sent_bytes > before:  # until it stands still
                    before = sent_bytes
                    await asyncio.sleep(0.05)
                assert sent_bytes < total_bytes
                count = 1
                async for _line in lines:
                    count += 1
                assert 1024 * count == sent_bytes == total_bytes

    asyncio.run(main())
