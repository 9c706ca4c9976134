"""KV transfers over real loopback sockets: exact bytes, fairness, memory, TCP samples."""

import asyncio
import random
import secrets
import sys
import time

import pytest
from transport_peer import LOOPS, SECRET, run, soon

from harness.core import TransportError
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender


def random_layers(rng: random.Random, layers: int, largest: int) -> list[bytes]:
    return [rng.randbytes(rng.choice((0, 1, rng.randrange(largest)))) for _ in range(layers)]


async def send(
    sender: KvSender, port: int, room: int, layers: list[bytes], meta: bytes = b""
) -> int:
    transfer = await sender.open("127.0.0.1", port, room, tuple(map(len, layers)))
    for index, layer in enumerate(layers):
        transfer.send_layer(index, layer)
    return (await transfer.finish(meta)).payload_bytes


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("checksum", [True, False])
def test_the_bytes_arrive_exactly(loop: str, connections: int, checksum: bool) -> None:
    async def main() -> None:
        rng = random.Random(connections)
        async with (
            KvReceiver(SECRET) as receiver,
            KvSender(SECRET, connections, checksum, chunk_bytes=7001) as sender,
        ):
            port = await receiver.start("127.0.0.1")
            for room in range(8):
                layers = random_layers(rng, rng.randrange(57), 90_000)
                start_ns = time.monotonic_ns()
                expected = receiver.expect(room, soon())
                transfer = await sender.open(
                    "127.0.0.1", port, room, tuple(map(len, layers)), b"offer"
                )
                for index in rng.sample(range(len(layers)), len(layers)):
                    transfer.send_layer(index, memoryview(layers[index]))
                    await asyncio.sleep(0)
                receipt = await transfer.finish(b"first token 42")
                received = await expected
                assert [bytes(received.layer(k)) for k in range(received.layers)] == layers
                assert receipt.payload_bytes == received.payload_bytes == sum(map(len, layers))
                assert (received.meta, received.offer_meta) == (b"first token 42", b"offer")
                assert start_ns < received.last_byte_mono_ns <= receipt.acked_mono_ns
                assert receiver.buffered_bytes == received.payload_bytes
                received.release()
                assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)
                with pytest.raises(TransportError, match="released"):
                    received.layer(0)

    run(main(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_hundred_transfers_at_once(loop: str) -> None:
    async def main() -> None:
        rng = random.Random(1)
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET, chunk_bytes=32_768) as sender:
            port = await receiver.start("127.0.0.1")

            async def one(room: int, layers: list[bytes]) -> None:
                sent, received = await asyncio.gather(
                    send(sender, port, room, layers, str(room).encode()),
                    receiver.expect(room, soon()),
                )
                assert bytes(received.buffer) == b"".join(layers)
                assert (received.payload_bytes, received.meta) == (sent, str(room).encode())
                received.release()

            sizes = [10 ** rng.randrange(2, 6) for _ in range(100)]
            work = [(room, random_layers(rng, 19, size)) for room, size in enumerate(sizes)]
            await asyncio.gather(*(one(room, layers) for room, layers in work))
            assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)

    run(main(), loop)


def test_kv_may_land_before_it_is_expected() -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            assert await send(sender, port, 5, [b"first", b"", b"second"]) == 11
            await sender.close()  # what has been acknowledged outlives its sender
            received = await receiver.expect(5, soon())
            assert bytes(received.buffer) == b"firstsecond"
            received.release()
            assert receiver.buffered_bytes == 0

    run(main())


@pytest.mark.parametrize("layers", [[], [b""], [b"", b"", b""]])
def test_a_transfer_of_no_bytes(layers: list[bytes]) -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            transfer = await sender.open("127.0.0.1", port, 9, tuple(map(len, layers)), b"meta")
            receipt = await transfer.finish()  # empty layers need not be handed over
            received = await receiver.expect(9, soon())
            assert (receipt.payload_bytes, received.payload_bytes) == (0, 0)
            assert (received.layers, received.meta) == (len(layers), b"meta")
            received.release()

    run(main())


def test_a_room_may_be_used_again_after_its_release() -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            for payload in (b"once", b"again"):
                await send(sender, port, 3, [payload])
                received = await receiver.expect(3, soon())
                assert bytes(received.buffer) == payload
                received.release()

    run(main())


def test_chunks_are_spread_over_every_connection() -> None:
    async def main() -> None:
        layer = secrets.token_bytes(4_000_000)
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET, 4, True, 65_536) as sender:
            port = await receiver.start("127.0.0.1")
            await sender.connect("127.0.0.1", port)
            await send(sender, port, 1, [layer])
            received = await receiver.expect(1, soon())
            assert received.layer(0) == layer
            samples = sender.samples()
            assert [sample.connection for sample in samples] == [0, 1, 2, 3]
            assert {sample.peer for sample in samples} == {f"127.0.0.1:{port}"}
            if sys.platform != "linux":
                assert {sample.bytes_acked for sample in samples} == {None}
                return
            acked = [sample.bytes_acked or 0 for sample in samples]
            assert sum(acked) >= len(layer)
            assert min(acked) >= 65_536
            for sample in samples:
                assert sample.rtt_s is not None
                assert 0 < sample.rtt_s < 10
                assert sample.cwnd is not None
                assert sample.cwnd > 0
                assert sample.retransmits is not None
                assert sample.unsent_bytes == 0

    run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="SO_MAX_PACING_RATE is Linux's")
def test_pacing_bounds_the_rate_and_short_transfers_pass_long_ones() -> None:
    async def main() -> None:
        long, short = secrets.token_bytes(6_000_000), secrets.token_bytes(10_000)
        async with (
            KvReceiver(SECRET) as receiver,
            KvSender(SECRET, 2, True, 32_768, pacing_bytes_per_s=20e6) as sender,
        ):
            port = await receiver.start("127.0.0.1")
            order: list[int] = []

            async def one(room: int, layer: bytes) -> None:
                await send(sender, port, room, [layer])
                order.append(room)

            await sender.connect("127.0.0.1", port)
            started_s = time.monotonic()
            long_task = asyncio.create_task(one(1, long))
            while receiver.rooms == 0:
                await asyncio.sleep(0)
            await asyncio.gather(long_task, one(2, short))
            assert order == [2, 1]
            # 0.3 s at the paced rate; TCP lets the first packets of a connection through unpaced.
            assert time.monotonic() - started_s > 0.2

    run(main())


def test_an_offer_waits_for_memory_and_a_smaller_one_may_pass() -> None:
    async def main() -> None:
        limits = ReceiverLimits(max_buffer_bytes=1000)
        async with KvReceiver(SECRET, limits) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            await send(sender, port, 1, [bytes(600)])
            waiting = asyncio.create_task(send(sender, port, 2, [bytes(401)]))
            await send(sender, port, 3, [bytes(400)])
            assert not waiting.done()
            assert receiver.buffered_bytes == 1000
            (await receiver.expect(3, soon())).release()
            (await receiver.expect(1, soon())).release()
            assert await waiting == 401
            receiver.discard(2)
            await send(sender, port, 4, [bytes(1000)])
            receiver.discard(4)
            assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)
            with pytest.raises(TransportError, match=r"room 5 .* offer: .*1001 bytes never fit"):
                await send(sender, port, 5, [bytes(1001)])

    run(main())


def test_an_offer_that_waits_in_vain_is_given_up_on_both_ends() -> None:
    async def main() -> None:
        limits = ReceiverLimits(max_buffer_bytes=1000)
        async with (
            KvReceiver(SECRET, limits) as receiver,
            KvSender(SECRET, offer_timeout_s=0.1) as sender,
        ):
            port = await receiver.start("127.0.0.1")
            await send(sender, port, 1, [bytes(600)])
            expected = receiver.expect(2, soon())
            with pytest.raises(TransportError, match=r"room 2 .* offer: no answer by the deadline"):
                await send(sender, port, 2, [bytes(500)])
            with pytest.raises(TransportError, match="the sender gave up: no answer"):
                await expected
            (await receiver.expect(1, soon())).release()
            await send(sender, port, 3, [bytes(1000)])
            receiver.discard(3)

    run(main())


def test_mistakes_of_the_caller_are_named() -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            transfer = await sender.open("127.0.0.1", port, 1, (4, 4))
            with pytest.raises(TransportError, match="already"):
                await sender.open("127.0.0.1", port, 1, (4, 4))
            with pytest.raises(TransportError, match="layer 2 of 2"):
                transfer.send_layer(2, b"1234")
            with pytest.raises(TransportError, match="layer 1 has 3 bytes; 4 were offered"):
                transfer.send_layer(1, b"123")
            transfer.send_layer(1, b"1234")
            with pytest.raises(TransportError, match="handed over twice"):
                transfer.send_layer(1, b"1234")
            with pytest.raises(TransportError, match="1 layers were never handed over"):
                await transfer.finish()
            with pytest.raises(TransportError, match="never handed over"):
                await receiver.expect(1, soon())
            with pytest.raises(TransportError, match="every address"):
                await KvReceiver(SECRET).start("0.0.0.0")
            with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{port}"):
                await KvReceiver(SECRET).start("127.0.0.1", port)

    run(main())
    with pytest.raises(TransportError, match="at least 16"):
        KvSender(b"guess me")
    with pytest.raises(TransportError, match="65 connections"):
        KvSender(SECRET, connections=65)
