"""Connections that are cut or stalled in the middle: the transfer goes on, with the right bytes."""

import asyncio
import itertools
import random
import secrets
import time
from typing import Any

import pytest
from cutting_proxy import ByteProxy, Fate, FrameProxy, Side
from transport_peer import SECRET, Peers, data, run, soon
from wire_reader import Data

from harness.core import TransportError
from harness.transport.frames import (
    REPORT_LAYERS,
    Ack,
    Arrived,
    Code,
    Control,
    Credit,
    Done,
    Error,
    LayerDone,
    Offer,
    Progress,
    Resume,
    TransferError,
)
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender, Transfer

#: Few pages beside the buffer, so that a block that is not given back shows.
LIMITS = ReceiverLimits(max_buffer_bytes=2**21, max_rooms=4, resume_s=5.0)


async def transferred(
    sender: KvSender, receiver: KvReceiver, port: int, room: int, layers: list[bytes]
) -> list[int]:
    """Send the layers, compare what arrives; the layers that were reported."""
    reported: list[int] = []
    expected = receiver.expect(room, soon())
    transfer = await sender.open(
        "127.0.0.1", port, room, tuple(map(len, layers)), b"offer", reported.append
    )
    for index, layer in enumerate(layers):
        transfer.send_layer(index, layer)
        await asyncio.sleep(0)
    receipt = await transfer.finish(str(room).encode())
    received = await expected
    assert [bytes(received.layer(k)) for k in range(received.layers)] == layers
    assert received.payload_bytes == receipt.payload_bytes == sum(map(len, layers))
    assert received.meta == str(room).encode()
    received.release()
    return reported


async def memory_is_whole(receiver: KvReceiver, port: int) -> None:
    """All of the buffer can be had at once."""
    assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)
    async with KvSender(SECRET, 1) as sender:
        transfer = await sender.open("127.0.0.1", port, 999, (LIMITS.max_buffer_bytes,))
        transfer.abort("enough")
    while receiver.rooms:
        await asyncio.sleep(0)


POINTS: list[tuple[type[Any], Side]] = [
    (Offer, "sender"),
    (Credit, "receiver"),
    (Data, "sender"),
    (Progress, "receiver"),
    (LayerDone, "receiver"),
    (Arrived, "receiver"),
    (Done, "sender"),
    (Ack, "receiver"),
]


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize(("kind", "side"), POINTS, ids=[kind.__name__ for kind, _ in POINTS])
def test_a_cut_at_any_point_loses_nothing(kind: type[Any], side: Side, connections: int) -> None:
    """Before the frame, within it, after it; at its first and at a later one."""
    fates: list[tuple[Fate, int]] = [("lose", 0), ("truncate", 0), ("last", 0), ("lose", 3)]

    async def main() -> None:
        left, first = -1, False
        wanted: Fate = "pass"

        def fate(_index: int, at: Side, frame: Control | Data) -> Fate:
            nonlocal left, first
            if first and isinstance(frame, Data):
                first = False
                return "last"
            if not isinstance(frame, kind) or at != side or left < 0:
                return "pass"
            left -= 1
            return wanted if left < 0 else "pass"

        layers = [secrets.token_bytes(length) for length in (150_000, 0, 70_000, 1)]
        async with (
            KvReceiver(SECRET, LIMITS) as receiver,
            FrameProxy(await receiver.start("127.0.0.1"), fate) as proxy,
            KvSender(SECRET, connections, chunk_bytes=32_768) as sender,
        ):
            for room, (chosen, skipped) in enumerate(fates):
                wanted = chosen
                first = kind is Arrived  # which is only told after a loss
                left = skipped if kind is Data else 0
                reported = await transferred(sender, receiver, proxy.port, room, layers)
                assert sorted(reported) == [0, 2, 3]  # each once
            assert proxy.cuts >= len(fates)
            await memory_is_whole(receiver, proxy.port)

    run(main())


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("seed", range(2))
def test_cuts_again_and_again_lose_nothing(connections: int, seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        cuts = iter(lambda: rng.randrange(20_000, 200_000), None)
        async with (
            KvReceiver(SECRET, LIMITS) as receiver,
            ByteProxy(await receiver.start("127.0.0.1"), cuts) as proxy,
            KvSender(SECRET, connections, chunk_bytes=16_384, resume_timeout_s=20.0) as sender,
        ):
            sizes = [rng.randrange(600_000) for _ in range(3)]
            await asyncio.gather(
                *(
                    transferred(sender, receiver, proxy.port, room, [rng.randbytes(size)] * 2)
                    for room, size in enumerate(sizes)
                )
            )
            assert proxy.cuts > 2
        assert receiver.buffered_bytes == 0

    run(main())


def test_a_stall_is_waited_out() -> None:
    async def main() -> None:
        async with (
            KvReceiver(SECRET, LIMITS) as receiver,
            ByteProxy(await receiver.start("127.0.0.1"), itertools.repeat(0)) as proxy,
            KvSender(SECRET, 2) as sender,
        ):
            layer = secrets.token_bytes(400_000)
            transfer = await sender.open("127.0.0.1", proxy.port, 1, (400_000, 400_000))
            transfer.send_layer(0, layer)
            proxy.flowing.clear()
            transfer.send_layer(1, layer)
            finishing = asyncio.create_task(transfer.finish())
            done, _ = await asyncio.wait({finishing}, timeout=0.5)
            assert not done
            proxy.flowing.set()
            await finishing
            received = await receiver.expect(1, soon())
            assert received.buffer == layer + layer
            received.release()
            assert proxy.cuts == 0
            await memory_is_whole(receiver, proxy.port)

    run(main())


async def half_sent(sender: KvSender, port: int) -> Transfer:
    transfer = await sender.open("127.0.0.1", port, 1, (100_000, 100_000))
    transfer.send_layer(0, bytes(100_000))
    return transfer


@pytest.mark.parametrize("how", ["refused", "silent", "lost again"])
@pytest.mark.parametrize("phase", ["transfer", "acknowledge"])
def test_all_connections_dead_for_too_long_fail_the_transfer(how: str, phase: str) -> None:
    async def main() -> None:
        # "lost again": each connection ends right after its Welcome
        cuts = itertools.chain([0, 0], itertools.repeat(250))
        limits = ReceiverLimits(resume_s=0.3)
        async with (
            KvReceiver(SECRET, limits) as receiver,
            ByteProxy(await receiver.start("127.0.0.1"), cuts) as proxy,
            KvSender(SECRET, 2, resume_timeout_s=0.3) as sender,
        ):
            expected = receiver.expect(1, soon())
            transfer = await half_sent(sender, proxy.port)
            if phase == "acknowledge":
                transfer.send_layer(1, bytes(100_000))
                proxy.flowing.clear()  # nothing comes back
                finishing = asyncio.create_task(transfer.finish())
                await asyncio.sleep(0)
            if how == "refused":
                proxy.refuse()
            if how == "silent":
                proxy.flowing.clear()
            else:
                proxy.flowing.set()
            proxy.cut_all()
            while transfer.failure is None:
                await asyncio.sleep(0.01)
            with pytest.raises(TransferError, match="no connection could be made again") as caught:
                await (finishing if phase == "acknowledge" else transfer.finish())
            assert (caught.value.room, caught.value.phase) == (1, phase)
            with pytest.raises(TransferError, match=r"lost after .* of 200000 bytes|gave up"):
                await expected
            assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)

    run(main())


def test_one_connection_that_is_left_is_enough() -> None:
    """Three of four cannot be replaced; open transfers and new ones go on over the fourth."""

    async def main() -> None:
        limits = ReceiverLimits(max_connections=4)
        async with (
            KvReceiver(SECRET, limits) as receiver,
            ByteProxy(await receiver.start("127.0.0.1"), itertools.repeat(0)) as proxy,
            KvSender(SECRET, 4) as sender,
        ):
            transfer = await half_sent(sender, proxy.port)
            proxy.refuse()
            for pair in proxy.pairs[:3]:
                pair.cut()
            transfer.send_layer(1, bytes(100_000))
            await transfer.finish()
            receiver.discard(1)
            await transferred(sender, receiver, proxy.port, 2, [secrets.token_bytes(50_000)])

    run(main())


def test_late_frames_of_a_transfer_that_is_over_touch_nothing() -> None:
    """A lost connection may still deliver: into the room's next use it must not."""

    async def main() -> None:
        async with (
            KvReceiver(SECRET) as receiver,
            Peers(await receiver.start("127.0.0.1")) as peers,
        ):
            session = secrets.token_bytes(16)
            old, new = [await peers.authenticated(session) for _ in range(2)]
            await old.offer(1, 4)
            old.send(data(1, 0, 0, b"past"), Done(1, 4, b"old"))
            assert await old.read() == Ack(1, 4)
            (await receiver.expect(1, soon())).release()
            expected = receiver.expect(1, soon())
            new.send(Offer(1, (4,), transfer=1, attempt=1))
            assert await new.read() == Credit(1, 4, 1)
            late = (data(1, 0, 0, b"past"), Done(1, 4, b"old"), Resume(1), Offer(1, (4,)))
            old.send(*late, Error(1, Code.ABORTED, "old"), Offer(1, (4,), transfer=1))
            new.send(Resume(1, 1, 2))
            assert await new.read() == Credit(1, 4, 1)
            assert await new.read() == Arrived(1, (), 1)  # what came before has been read
            assert (await old.error()).transfer == 0
            new.send(Done(1, 4, b"new", 1), data(1, 0, 0, b"true", 1))
            assert await new.read() == Ack(1, 4, 1)
            received = await expected
            assert (bytes(received.buffer), received.meta) == (b"true", b"new")

    run(main())


def test_a_transfer_that_was_given_up_unheard_is_not_merged_with_the_next() -> None:
    async def main() -> None:
        async with (
            KvReceiver(SECRET) as receiver,
            Peers(await receiver.start("127.0.0.1")) as peers,
        ):
            peer = await peers.authenticated()
            expected = receiver.expect(1, soon())
            await peer.offer(1, 4, 4)
            peer.send(data(1, 0, 0, b"half"), Offer(1, (4, 4), transfer=1))
            assert (await peer.error()).transfer == 0
            error = await peer.error()
            assert (error.code, error.transfer) == (Code.DUPLICATE_ROOM, 1)
            with pytest.raises(TransportError, match="offered the room again"):
                await expected
            assert receiver.buffered_bytes == 0

    run(main())


def test_a_frame_that_comes_again_ends_the_connection_that_holds_its_first_copy() -> None:
    async def main() -> None:
        async with (
            KvReceiver(SECRET) as receiver,
            Peers(await receiver.start("127.0.0.1")) as peers,
        ):
            session = secrets.token_bytes(16)
            slow, fast = [await peers.authenticated(session) for _ in range(2)]
            await fast.offer(1, 100_000)
            payload = secrets.token_bytes(100_000)
            slow.send(data(1, 0, 0, payload)[:50_000])
            fast.send(Resume(1, 0, 0))
            assert await fast.read() == Credit(1, 100_000)
            assert await fast.read() == Arrived(1, ())
            fast.send(data(1, 0, 0, payload), Done(1, 100_000))
            assert await fast.read() == Ack(1, 100_000)
            received = await receiver.expect(1, soon())
            assert bytes(received.buffer) == payload
            received.release()
            await slow.gone()

    run(main())


def test_layers_are_reported_again_to_a_room_that_moved() -> None:
    async def main() -> None:
        async with (
            KvReceiver(SECRET) as receiver,
            Peers(await receiver.start("127.0.0.1")) as peers,
        ):
            session = secrets.token_bytes(16)
            first, second = [await peers.authenticated(session) for _ in range(2)]
            first.send(Offer(1, (4, 0, 4), flags=REPORT_LAYERS))
            assert await first.read() == Credit(1, 8)
            first.send(data(1, 0, 0, b"full"))
            assert await first.read() == LayerDone(1, 0, 4)
            second.send(Resume(1, 0, 1))
            assert await second.read() == Credit(1, 8)
            assert await second.read() == LayerDone(1, 0, 4)
            assert await second.read() == Arrived(1, ((0, 4),))

    run(main())


def test_a_room_that_failed_gives_its_memory_back_though_a_frame_is_under_way() -> None:
    async def main() -> None:
        async with KvReceiver(SECRET, LIMITS) as receiver:
            port = await receiver.start("127.0.0.1")
            async with Peers(port) as peers:
                peer = await peers.authenticated()
                await peer.offer(1, 2_000_000)
                peer.send(data(1, 0, 0, bytes(500_000))[:100_000])
                await peer.flushed()
                receiver.discard(1, "not wanted")
                assert "not wanted" in (await peer.error()).message
                await memory_is_whole(receiver, port)
                peer.send(data(1, 0, 0, bytes(500_000))[100_000:])  # the rest is dropped
                await peer.offer(2, 4)

    run(main())


def test_a_deadline_that_passes_as_the_kv_lands_takes_nothing_from_its_user() -> None:
    """The lanes deliver while the user's loop is busy: its timer rings before it is told."""

    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET, 1) as sender:
            port = await receiver.start("127.0.0.1")
            payload = secrets.token_bytes(1000)
            transfer = await sender.open("127.0.0.1", port, 1, (1000,))
            transfer.send_layer(0, payload)
            deadline_s = time.monotonic() + 0.05
            expected = receiver.expect(1, deadline_s)
            finishing = asyncio.create_task(transfer.finish())
            await asyncio.sleep(0)
            while not transfer.acknowledged or time.monotonic() < deadline_s + 0.01:
                time.sleep(0.001)
            received = await expected
            await finishing
            other = await sender.open("127.0.0.1", port, 2, (1000,))
            other.send_layer(0, bytes(1000))
            await other.finish()
            assert bytes(received.buffer) == payload
            received.release()
            receiver.discard(2)
            assert receiver.buffered_bytes == 0

    run(main(), "uvloop")


@pytest.mark.parametrize("checksum", [True, False])
def test_a_buffer_may_be_used_again_once_its_transfer_has_failed(checksum: bool) -> None:
    """What waits to be written is copied, so a receiver that has not heard cannot land rubbish."""

    async def main() -> None:
        async with (
            KvReceiver(SECRET) as receiver,
            ByteProxy(await receiver.start("127.0.0.1"), itertools.repeat(0)) as proxy,
            KvSender(SECRET, 1, checksum, chunk_bytes=2**22) as sender,
        ):
            size = 2**25
            buffer = bytearray(b"\x01") * size
            transfer = await sender.open("127.0.0.1", proxy.port, 1, (size,))
            expected = receiver.expect(1, soon())
            proxy.flowing.clear()
            transfer.send_layer(0, buffer)
            with pytest.raises(TransferError, match="no answer by the deadline"):
                await transfer.finish(deadline_mono_s=time.monotonic() + 0.2)
            assert sender.samples()[0].unsent_bytes > 0
            buffer[:] = b"\x02" * size
            proxy.flowing.set()
            with pytest.raises(TransferError, match="the sender gave up"):
                await expected

    run(main())
