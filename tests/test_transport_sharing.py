"""Many transfers over one pair: exact bytes, short ones served in time, memory bounded."""

import asyncio
import itertools
import random
import secrets
import signal
import sys
import time

import pytest
import xxhash
from cutting_proxy import ByteProxy
from hypothesis import given
from hypothesis import strategies as st
from transport_peer import SECRET, run, soon

from benchmarks.transport_sharing import Sharing, measure
from harness.transport.frames import Offer, TransferError
from harness.transport.grants import Grants, Room
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.rooms import Landing
from harness.transport.sender import KvSender

#: Takes rooms 0 to 5, of which two fit at a time; prints the checksum of each.
RECEIVER = """
import asyncio, sys, time
import xxhash
from harness.transport.receiver import KvReceiver, ReceiverLimits
async def main():
    limits = ReceiverLimits(max_buffer_bytes=2**23)
    async with KvReceiver(sys.argv[1].encode(), limits) as receiver:
        port = await receiver.start("127.0.0.1")
        futures = [receiver.expect(room, time.monotonic() + 25) for room in range(6)]
        print(port, flush=True)
        async def take(future):
            received = await future
            digest = xxhash.xxh3_64_hexdigest(received.buffer)
            received.release()
            return digest
        print(*await asyncio.gather(*map(take, futures)))
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read in /proc")
def test_a_thousand_transfers_share_one_pair() -> None:
    result = asyncio.run(measure(Sharing()))
    assert result["wrong_rooms"] == []
    assert result["left_buffered_bytes"] == 0
    assert result["payload_bytes"] > 10 * result["credit_window_bytes"]
    assert result["most_buffered_bytes"] <= result["credit_window_bytes"]
    # What is not the window: a thousand rooms, futures and tasks, and the interpreter's own.
    assert result["memory_growth_bytes"] < result["credit_window_bytes"] + 48 * 2**20
    # Served in the order of their offers, the last small one would take as long as all.
    assert result["small_share_of_run_p99"] < 0.8
    assert result["small_share_of_run_p50"] < result["largest_tenth_share_of_run_p50"]
    assert result["small_slowdown_p99"] > 1


class Nobody:
    """A connection, as far as grants know one."""


def room_of(nbytes: int) -> Room:
    return Room(Landing(Offer(1, (nbytes,)), b"session", "peer"), Nobody())  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 1000), max_size=200), st.randoms(use_true_random=False))
def test_the_smallest_goes_first_and_nobody_is_passed_for_ever(
    sizes: list[int], rng: random.Random
) -> None:
    grants = Grants(ReceiverLimits(max_buffer_bytes=1000, max_rooms=256))
    rooms = [room_of(size) for size in sizes]
    held: list[Room] = []
    order: list[Room] = []
    for room in rooms:
        granted = grants.ask(room)
        held += granted
        order += granted
        assert sum(each.landing.total_bytes for each in held) == grants.granted_bytes <= 1000
    while held:
        granted = grants.withdraw(held.pop(rng.randrange(len(held))))
        held += granted
        order += granted
        assert sum(each.landing.total_bytes for each in held) == grants.granted_bytes <= 1000
    assert sorted(map(id, order)) == sorted(map(id, rooms))
    assert grants.granted_bytes == 0
    for at, room in enumerate(rooms):
        passed_by = [each for each in rooms[at + 1 :] if order.index(each) < order.index(room)]
        # As the oldest it is passed 64 times; before that, by who passes those before it.
        assert len(passed_by) <= 64 * (at + 1)


def test_a_user_that_does_not_release_makes_offers_wait() -> None:
    async def main() -> None:
        limits = ReceiverLimits(max_buffer_bytes=2**20)
        async with (
            KvReceiver(SECRET, limits) as receiver,
            KvSender(SECRET, 2, offer_timeout_s=0.2) as sender,
        ):
            port = await receiver.start("127.0.0.1")
            payload = secrets.token_bytes(2**18)

            async def send(room: int) -> None:
                transfer = await sender.open("127.0.0.1", port, room, (len(payload),))
                transfer.send_layer(0, payload)
                await transfer.finish()

            for room in range(4):
                await send(room)
            held = [await receiver.expect(room, soon()) for room in range(4)]
            assert receiver.buffered_bytes == limits.max_buffer_bytes
            with pytest.raises(TransferError, match="phase offer: no answer by the deadline"):
                await send(4)
            assert receiver.buffered_bytes == limits.max_buffer_bytes
            held.pop().release()
            await send(5)
            held.append(await receiver.expect(5, soon()))
            for each in held:
                assert each.buffer == payload
                each.release()
            assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)

    run(main())


def test_a_receiver_that_is_stopped_holds_the_sender_back() -> None:
    """Nothing piles up at the sender but what was handed over; it goes on after SIGCONT."""

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RECEIVER, SECRET.decode()), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            port = int(await process.stdout.readline())
            payloads = [secrets.token_bytes(2**22) for _ in range(6)]
            async with KvSender(SECRET, 2, chunk_bytes=2**18, offer_timeout_s=25) as sender:
                await sender.connect("127.0.0.1", port)
                process.send_signal(signal.SIGSTOP)

                async def send(room: int) -> None:
                    transfer = await sender.open("127.0.0.1", port, room, (2**22,))
                    transfer.send_layer(0, payloads[room])
                    await transfer.finish()

                sends = [asyncio.create_task(send(room)) for room in range(6)]
                done, _ = await asyncio.wait(sends, timeout=0.5)
                assert not done
                assert max(each.unsent_bytes for each in sender.samples()) < 2**20
                process.send_signal(signal.SIGCONT)
                await asyncio.gather(*sends)
            digests = (await process.stdout.readline()).decode().split()
            assert digests == [xxhash.xxh3_64_hexdigest(each) for each in payloads]
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    run(main())


def test_a_link_that_stands_still_fills_no_memory_at_the_sender() -> None:
    async def main() -> None:
        async with (
            KvReceiver(SECRET) as receiver,
            ByteProxy(await receiver.start("127.0.0.1"), itertools.repeat(0)) as proxy,
            KvSender(SECRET, 2, chunk_bytes=2**18) as sender,
        ):
            size = 2**25
            transfer = await sender.open("127.0.0.1", proxy.port, 1, (size, size))
            proxy.flowing.clear()
            layer = bytes(size)
            transfer.send_layer(0, layer)
            transfer.send_layer(1, layer)
            with pytest.raises(TransferError, match="phase acknowledge: no answer by the dead"):
                await transfer.finish(deadline_mono_s=time.monotonic() + 0.3)
            # At most a chunk of each connection is in this process; the rest is in the kernel's
            # buffers, or has not been taken from the layers.
            assert transfer.sent_bytes < 2 * size
            assert max(sample.unsent_bytes for sample in sender.samples()) < 2**20
            proxy.flowing.set()

    run(main())
