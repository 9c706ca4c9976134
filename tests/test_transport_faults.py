"""KV transfers that go wrong: dead and killed ends, deadlines, cancellations, lost connections."""

import asyncio
import itertools
import os
import signal
import socket
import sys
import time

import pytest
from cutting_proxy import ByteProxy
from transport_peer import LOOPS, SECRET, run, soon

from harness.core import TransportError
from harness.transport.frames import TransferError
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender, Transfer

#: Sends half of room 1 and says so; then waits to be killed.
SENDER = """
import asyncio, sys
from harness.transport.sender import KvSender
async def main():
    async with KvSender(sys.argv[1].encode(), 2) as sender:
        transfer = await sender.open("127.0.0.1", int(sys.argv[2]), 1, (300_000, 300_000))
        transfer.send_layer(0, bytes(300_000))
        print("half", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
#: Prints its port, then receives until it is killed.
RECEIVER = """
import asyncio, sys
from harness.transport.receiver import KvReceiver
async def main():
    async with KvReceiver(sys.argv[1].encode()) as receiver:
        print(await receiver.start("127.0.0.1"), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def start(program: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, SECRET.decode(), *arguments, stdout=asyncio.subprocess.PIPE
    )


async def kill(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def half_sent(sender: KvSender, port: int, room: int) -> Transfer:
    transfer = await sender.open("127.0.0.1", port, room, (1000, 1000))
    transfer.send_layer(0, bytes(1000))
    return transfer


async def failed(transfer: Transfer) -> None:
    """Until the sender has heard of it."""
    while transfer.failure is None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_sender_fails_the_expectation(loop: str) -> None:
    async def main() -> None:
        async with KvReceiver(SECRET, ReceiverLimits(resume_s=0.2)) as receiver:
            port = await receiver.start("127.0.0.1")
            process = await start(SENDER, str(port))
            assert await line(process) == "half"
            expected = receiver.expect(1, time.monotonic() + 25)
            await kill(process)
            with pytest.raises(TransferError, match=r"room 1 .* lost after .* of 600000") as caught:
                await expected
            assert (caught.value.room, caught.value.phase) == (1, "transfer")
            assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)

    run(main(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_receiver_fails_the_transfer(loop: str) -> None:
    async def main() -> None:
        async with KvSender(SECRET, 2) as sender:
            process = await start(RECEIVER)
            port = int(await line(process))
            waiting, handing = [await half_sent(sender, port, room) for room in (1, 2)]
            waiting.send_layer(1, bytes(1000))
            handing.send_layer(1, bytes(1000))
            await waiting.finish()
            await kill(process)
            with pytest.raises(TransferError, match=f"room 2 with 127.0.0.1:{port}"):
                await handing.finish()
            with pytest.raises(TransferError, match="phase connect"):
                await sender.connect("127.0.0.1", port)

    run(main(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_receiver_closed_in_mid_transfer_is_named(loop: str) -> None:
    async def main() -> None:
        async with KvSender(SECRET) as sender:
            receiver = KvReceiver(SECRET)
            port = await receiver.start("127.0.0.1")
            transfer = await half_sent(sender, port, 1)
            idle = await half_sent(sender, port, 2)
            transfer.send_layer(1, bytes(1000))
            idle.send_layer(1, bytes(1000))
            expected = receiver.expect(7, soon())
            await receiver.close()
            with pytest.raises(TransferError, match=rf"room 1 with 127.0.0.1:{port}"):
                await transfer.finish()
            with pytest.raises(TransferError, match="the receiver is closing"):
                await expected
            assert receiver.buffered_bytes == 0

    run(main(), loop)


def test_lost_connections_are_replaced_at_the_next_open() -> None:
    async def main() -> None:
        async with KvSender(SECRET, 3) as sender:
            first = KvReceiver(SECRET)
            port = await first.start("127.0.0.1")
            lost = await half_sent(sender, port, 1)
            await first.close()
            with pytest.raises(TransferError):
                await lost.finish()
            async with KvReceiver(SECRET) as second:
                await second.start("127.0.0.1", port)
                transfer = await half_sent(sender, port, 1)
                transfer.send_layer(1, bytes(1000))
                assert (await transfer.finish()).payload_bytes == 2000
                async with asyncio.timeout(20):  # a transfer goes on while they are dialled
                    while len(sender.samples()) != 3:
                        await asyncio.sleep(0.01)

    run(main())


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_sender_that_gives_up_tells_the_receiver(how: str) -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            expected = receiver.expect(1, time.monotonic() + 25)
            transfer = await half_sent(sender, port, 1)
            if how == "abort":
                transfer.abort("prefill was preempted")
            else:
                await sender.close()
            reason = "preempted" if how == "abort" else "the sender is closing"
            with pytest.raises(TransferError, match=f"the sender gave up: .*{reason}"):
                await expected
            assert receiver.buffered_bytes == 0
            with pytest.raises(TransferError, match=reason):
                transfer.send_layer(1, bytes(1000))

    run(main())


def test_a_cancelled_finish_gives_the_transfer_up() -> None:
    async def main() -> None:
        server, port = silent_server()
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
            receiving = await receiver.start("127.0.0.1")
            opening = asyncio.create_task(sender.connect("127.0.0.1", port))
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            async with ByteProxy(receiving, itertools.repeat(0)) as proxy:
                transfer = await half_sent(sender, proxy.port, 1)
                proxy.flowing.clear()  # or the acknowledgement might come first
                transfer.send_layer(1, bytes(1000))
                finishing = asyncio.create_task(transfer.finish())
                await asyncio.sleep(0)
                finishing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await finishing
                with pytest.raises(TransferError, match="gave it up"):
                    await transfer.finish()
        server.close()

    run(main())


def silent_server() -> tuple[socket.socket, int]:
    """Accepts connections in the kernel only: nobody ever answers."""
    server = socket.create_server(("127.0.0.1", 0))
    return server, server.getsockname()[1]


def test_a_silent_peer_is_given_up_at_the_deadline() -> None:
    async def main() -> None:
        server, port = silent_server()
        async with KvSender(SECRET, connect_timeout_s=0.1) as sender:
            with pytest.raises(TransferError, match=r"phase handshake: no answer within 0\.1 s"):
                await sender.connect("127.0.0.1", port)
        server.close()
        with pytest.raises(TransferError, match="phase connect"):
            async with KvSender(SECRET) as sender:
                await sender.connect("127.0.0.1", port)

    run(main())


def test_what_never_comes_fails_at_the_deadline() -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            with pytest.raises(TransferError, match="no offer had arrived by the deadline"):
                await receiver.expect(1, time.monotonic() + 0.05)
            with pytest.raises(TransferError, match="room has failed already"):
                await half_sent(sender, port, 1)
            transfer = await half_sent(sender, port, 2)
            with pytest.raises(TransferError, match="1000 bytes had arrived by the deadline"):
                await receiver.expect(2, time.monotonic() + 0.5)
            await failed(transfer)
            with pytest.raises(TransferError, match="DEADLINE"):
                transfer.send_layer(1, bytes(1000))
            assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)

    run(main())


def test_rooms_that_nobody_expects_are_dropped() -> None:
    async def main() -> None:
        limits = ReceiverLimits(hold_s=1.0, max_held_rooms=2)
        async with KvReceiver(SECRET, limits) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            landed = await half_sent(sender, port, 1)
            landed.send_layer(1, bytes(1000))
            await landed.finish()
            waiting = await half_sent(sender, port, 2)
            with pytest.raises(TransferError, match="2 rooms wait for a request"):
                await half_sent(sender, port, 3)
            waiting_for_expected = receiver.expect(4, soon())
            expected = await half_sent(sender, port, 4)  # does not count as held
            while receiver.rooms > 1:
                await asyncio.sleep(0.01)
            with pytest.raises(TransferError, match=r"nobody expected it within 1 s"):
                await receiver.expect(1, soon())
            await failed(waiting)
            with pytest.raises(TransferError, match="nobody expected it"):
                await waiting.finish()
            expected.send_layer(1, bytes(1000))
            await expected.finish()
            (await waiting_for_expected).release()
            assert receiver.buffered_bytes == 0

    run(main())


@pytest.mark.parametrize("landed", [False, True])
def test_a_cancelled_expectation_frees_the_room(landed: bool) -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
            port = await receiver.start("127.0.0.1")
            expected = receiver.expect(1, soon())
            transfer = await half_sent(sender, port, 1)
            assert receiver.buffered_bytes == 2000
            if landed:
                transfer.send_layer(1, bytes(1000))
                await transfer.finish()
                await asyncio.wait({expected})  # its thread says so after the acknowledgement
                assert not expected.cancel()  # too late: the buffer is the user's
                receiver.discard(1)
            else:
                expected.cancel()
                await asyncio.sleep(0)
            assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)

    run(main())


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in /proc")
def test_closing_leaves_no_descriptor_behind() -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            async with KvReceiver(SECRET) as receiver, KvSender(SECRET) as sender:
                port = await receiver.start("127.0.0.1")
                await half_sent(sender, port, 1)
        with pytest.raises(TransportError, match="has been closed"):
            await sender.connect("127.0.0.1", port)
        assert len(os.listdir("/proc/self/fd")) <= before + 1

    run(main(), "asyncio")
