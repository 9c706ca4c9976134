"""What hostile, foreign and broken peers can do to either end: nothing beyond themselves."""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from transport_peer import SECRET, Peers, data, run, soon
from wire_reader import Data, WireReader

from harness.core import TransportError
from harness.transport.frames import (
    Ack,
    Challenge,
    Code,
    Credit,
    Done,
    Error,
    Hello,
    Offer,
    Resume,
    Welcome,
)
from harness.transport.handshake import proof
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender
from harness.transport.wire import encode_control

OTHER_SECRET = b"the secret of a run of yesterday"


@asynccontextmanager
async def listening(
    limits: ReceiverLimits | None = None,
) -> AsyncIterator[tuple[KvReceiver, int, Peers]]:
    """A receiver, its port, and raw connections to it."""
    async with KvReceiver(SECRET, limits) as receiver:
        port = await receiver.start("127.0.0.1")
        async with Peers(port) as peers:
            yield receiver, port, peers


async def transfer_works(receiver: KvReceiver, port: int, room: int) -> None:
    """A transfer by another sender arrives exactly."""
    layers = [secrets.token_bytes(5000), secrets.token_bytes(70_000)]
    async with KvSender(SECRET, 2, chunk_bytes=16_384) as sender:
        transfer = await sender.open("127.0.0.1", port, room, (5000, 70_000))
        for index, layer in enumerate(layers):
            transfer.send_layer(index, layer)
        await transfer.finish()
    received = await receiver.expect(room, soon())
    assert bytes(received.buffer) == b"".join(layers)
    received.release()


def test_a_wrong_secret_is_refused_by_both_ends() -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(OTHER_SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            with pytest.raises(TransportError, match=r"phase handshake: .*this run's secret"):
                await sender.open("127.0.0.1", port, 1, (1,))
            assert receiver.rooms == 0
            await transfer_works(receiver, port, 1)

    run(main())


def test_a_receiver_without_the_secret_gets_no_bytes() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_control(Challenge(secrets.token_bytes(32))))
        await reader.readexactly(8 + 81)
        writer.write(encode_control(Welcome(secrets.token_bytes(32), 65_536)))
        assert await reader.read() == b""
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        async with KvSender(SECRET, 1) as sender:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(TransportError, match="does not know this run's secret"):
                await sender.open("127.0.0.1", port, 1, (1,))
        server.close()

    run(main())


def test_a_replayed_hello_proves_nothing() -> None:
    async def main() -> None:
        async with listening() as (_receiver, _port, peers):
            honest = await peers.connect()
            recorded = await honest.hello(b"session of peers")
            assert isinstance(await honest.read(), Welcome)
            await honest.offer(1, 4)
            thief = await peers.connect()
            assert isinstance(await thief.read(), Challenge)
            thief.send(recorded)
            assert "secret" in await thief.refused(Code.UNAUTHENTICATED)
            honest.send(data(1, 0, 0, b"true"), Done(1, 4))
            assert await honest.read() == Ack(1, 4)
            honest.send(recorded)  # nor is it taken twice on its own connection
            assert "Hello" in await honest.refused(Code.PROTOCOL)

    run(main())


def test_nothing_is_taken_before_the_handshake() -> None:
    async def main() -> None:
        limits = ReceiverLimits(auth_timeout_s=0.5, max_pending_connections=2)
        async with listening(limits) as (receiver, port, peers):
            eager, idle = await peers.connect(), await peers.connect()
            assert isinstance(await idle.read(), Challenge)
            assert isinstance(await eager.read(), Challenge)
            third = await peers.connect()
            assert await third.read() is None  # too many that are not authenticated
            eager.send(Offer(1, (1000,)))
            assert "before the handshake" in await eager.refused(Code.PROTOCOL)
            assert "no valid hello within 0.5 s" in await idle.refused(Code.UNAUTHENTICATED)
            assert receiver.buffered_bytes == 0
            reader = await peers.connect()
            await reader.hello(b"session of peers", role=2)
            assert "role 2" in await reader.refused(Code.UNSUPPORTED)
            while receiver.connections:  # it counts one until a thread has let go of it
                await asyncio.sleep(0.001)
            await transfer_works(receiver, port, 1)

    run(main())


@pytest.mark.parametrize(
    ("bad", "code", "message"),
    [
        (data(1, 0, 0, b"good")[:-1] + b"?", Code.CHECKSUM, "wrong checksum in layer 0 at byte 0"),
        (data(1, 2, 0, b"x"), Code.PROTOCOL, "layer 2 of 2"),
        (data(1, 1, 3, b"xx"), Code.PROTOCOL, "bytes 3 to 5 of layer 1, which has 4"),
        (data(1, 0, 0, b"xx") + data(1, 0, 1, b"xx"), Code.PROTOCOL, "pieces that overlap"),
        (encode_control(Done(1, 7)), Code.PROTOCOL, "ends after 7 bytes; it offered 8"),
        (
            encode_control(Done(1, 8)) + encode_control(Done(1, 8, b"no")),
            Code.PROTOCOL,
            "came twice, with other words",
        ),
        (encode_control(Error(1, Code.ABORTED, "tired")), Code.ABORTED, "gave up: tired"),
    ],
    ids=["checksum", "layer", "offset", "overlap", "total", "ends twice", "aborted"],
)
def test_a_bad_frame_fails_its_own_room_only(bad: bytes, code: Code, message: str) -> None:
    async def main() -> None:
        async with listening() as (receiver, _port, peers):
            peer = await peers.authenticated()
            await peer.offer(1, 4, 4)
            await peer.offer(2, 4)
            expected = receiver.expect(1, soon())
            peer.send(bad)
            error = await peer.error()
            assert (error.room, error.code) == (1, code)
            assert message in error.message
            with pytest.raises(TransportError, match=message):
                await expected
            assert receiver.buffered_bytes == 4
            peer.send(data(1, 1, 0, b"late"), data(2, 0, 0, b"good"), Done(2, 4))
            assert await peer.read() == Ack(2, 4)
            received = await receiver.expect(2, soon())
            assert bytes(received.buffer) == b"good"

    run(main())


def test_unknown_rooms_and_rooms_of_others_are_refused() -> None:
    async def main() -> None:
        async with listening() as (receiver, _port, peers):
            owner, stranger = await peers.authenticated(), await peers.authenticated()
            await owner.offer(1, 4)
            for frame in (data(1, 0, 0, b"evil"), data(99, 0, 0, b"evil"), Done(1, 4)):
                stranger.send(frame)
                error = await stranger.error()
                assert error.code == Code.UNKNOWN_ROOM
            stranger.send(Error(1, Code.ABORTED, "not mine"), Resume(1))
            error = await stranger.error()
            assert error.code == Code.UNKNOWN_ROOM
            owner.send(data(1, 0, 0, b"good"), Done(1, 4))
            assert await owner.read() == Ack(1, 4)
            received = await receiver.expect(1, soon())
            assert bytes(received.buffer) == b"good"

    run(main())


def test_a_session_may_send_over_all_its_connections() -> None:
    async def main() -> None:
        async with listening() as (receiver, _port, peers):
            session = secrets.token_bytes(16)
            first = await peers.authenticated(session)
            second = await peers.authenticated(session)
            await first.offer(1, 8)
            first.send(Done(1, 8))
            second.send(data(1, 0, 4, b"half"))
            first.send(data(1, 0, 0, b"1st "))
            assert await first.read() == Ack(1, 8)
            received = await receiver.expect(1, soon())
            assert bytes(received.buffer) == b"1st half"

    run(main())


def test_a_room_belongs_to_one_transfer() -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            transfer = await sender.open("127.0.0.1", port, 1, (4,))
            async with KvSender(SECRET) as rival:
                with pytest.raises(TransportError, match="another transfer has this room"):
                    await rival.open("127.0.0.1", port, 1, (4,))
                transfer.send_layer(0, b"true")
                await transfer.finish()
                with pytest.raises(TransportError, match="DUPLICATE_ROOM"):
                    await rival.open("127.0.0.1", port, 1, (4,))
            received = await receiver.expect(1, soon())
            assert bytes(received.buffer) == b"true"
            with pytest.raises(TransportError, match="already expected"):
                receiver.expect(1, soon())

    run(main())


async def welcome(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[WireReader, Offer]:
    """A receiver's handshake by hand, up to the sender's first offer of one layer."""
    nonce = secrets.token_bytes(32)
    writer.write(encode_control(Challenge(nonce)))
    decoder = WireReader()
    (hello,) = decoder.feed(await reader.readexactly(8 + 81))
    assert isinstance(hello, Hello)
    own = proof("server", SECRET, hello.role, hello.session, nonce, hello.nonce)
    writer.write(encode_control(Welcome(own, 65_536)))
    decoder.unlock(65_536)
    (offer,) = decoder.feed(await reader.readexactly(8 + 37 + 8))
    assert isinstance(offer, Offer)
    return decoder, offer


def test_a_receiver_that_does_not_read_holds_the_sender_back() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, offer = await welcome(reader, writer)
        writer.write(encode_control(Credit(offer.room, sum(offer.layer_bytes))))
        await ended.wait()
        writer.close()

    ended = asyncio.Event()

    async def main() -> None:
        size = 100_000_000
        server = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1024)
        async with KvSender(SECRET, 1, chunk_bytes=65_536) as sender:
            port = server.sockets[0].getsockname()[1]
            transfer = await sender.open("127.0.0.1", port, 1, (size,))
            transfer.send_layer(0, bytes(size))
            with pytest.raises(TransportError, match="phase acknowledge: no answer by the dead"):
                await transfer.finish(deadline_mono_s=time.monotonic() + 0.3)
            assert transfer.sent_bytes < size / 2
            ended.set()
        server.close()

    run(main())


def test_no_more_is_sent_than_credit_was_given() -> None:
    sizes: list[int] = []

    async def thrifty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder, offer = await welcome(reader, writer)
        arrived = b""
        for limit in (10, 15, 40):
            writer.write(encode_control(Credit(offer.room, limit)))
            while len(arrived) < limit:
                received = await reader.read(65_536)
                assert received, "the sender went away"
                for frame in decoder.feed(received):
                    if isinstance(frame, Data):
                        assert (frame.offset, frame.intact()) == (len(arrived), True)
                        arrived += bytes(frame.payload)
                        sizes.append(len(frame.payload))
            assert arrived == layer[:limit]
        writer.write(encode_control(Ack(offer.room, 40)))
        writer.close()

    layer = secrets.token_bytes(40)

    async def main() -> None:
        server = await asyncio.start_server(thrifty, "127.0.0.1", 0)
        async with KvSender(SECRET, 1, chunk_bytes=16) as sender:
            port = server.sockets[0].getsockname()[1]
            transfer = await sender.open("127.0.0.1", port, 1, (40,))
            transfer.send_layer(0, layer)
            assert (await transfer.finish()).payload_bytes == 40
        server.close()

    run(main())
    assert sizes == [10, 5, 16, 9]


def test_random_and_mutated_frames_leave_the_receiver_sound() -> None:
    async def main() -> None:
        rng = random.Random(5)
        async with listening() as (receiver, port, peers):
            for attempt in range(150):
                peer = await peers.authenticated()
                room = 1000 + attempt
                stream = bytearray(
                    encode_control(Offer(room, (300, 500), b"meta"))
                    + data(room, 0, 0, rng.randbytes(300))
                    + data(room, 1, 100, rng.randbytes(400))
                    + encode_control(Resume(room))
                    + data(room, 1, 0, rng.randbytes(100))
                    + encode_control(Done(room, 800))
                )
                for _ in range(rng.randrange(1, 6)):
                    stream[rng.randrange(len(stream))] = rng.randrange(256)
                peer.send(bytes(stream[: rng.randrange(len(stream) + 1)]))
                await peer.close()
            await transfer_works(receiver, port, 1)
            await transfer_works(receiver, port, 2)

    run(main())
