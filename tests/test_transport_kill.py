"""Kill -9 of either end at random moments: nothing hangs, nothing wrong arrives, survivors go on.

A process a kill. Each transfer says what its bytes are, so whatever lands can be judged.
"""

import asyncio
import random
import signal
import sys
import time
from pathlib import Path

from transport_peer import SECRET, run

from harness.core import TransportError
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender

KILLS = 25  # of each end
MOST_ROOMS, IN_FLIGHT = 30, 6
DEADLINE_S = 10.0
LIMITS = ReceiverLimits(max_buffer_bytes=2**23, resume_s=0.1, hold_s=1.0)

#: Both programs import this file. A sender takes its port, then sends until it is killed.
PROGRAM = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_transport_kill as both
asyncio.run(asyncio.wait_for(both.{{name}}(sys.stdin.readline()), 60))
"""


def payload_of(room: int) -> bytes:
    return random.Random(room).randbytes(random.Random(-room).randrange(1, 300_000))


async def receive(receiver: KvReceiver, room: int, within_s: float = DEADLINE_S) -> int:
    """1 when it landed, right to the last byte; 0 when it failed."""
    try:
        received = await receiver.expect(room, time.monotonic() + within_s)
    except TransportError:
        return 0
    assert received.buffer == payload_of(room)
    received.release()
    return 1


async def send(sender: KvSender, port: int, room: int) -> int:
    """1 when it was acknowledged, 0 when it failed."""
    payload = payload_of(room)
    half = len(payload) // 2
    try:
        transfer = await sender.open("127.0.0.1", port, room, (half, len(payload) - half))
        transfer.send_layer(0, payload[:half])
        await asyncio.sleep(0)
        transfer.send_layer(1, payload[half:])
        await transfer.finish()
    except TransportError:
        return 0
    return 1


def a_sender() -> KvSender:
    return KvSender(
        SECRET,
        3,
        chunk_bytes=32_768,
        offer_timeout_s=DEADLINE_S,
        ack_timeout_s=DEADLINE_S,
        resume_timeout_s=0.3,
    )


async def send_all(line: str) -> None:
    """MOST_ROOMS rooms from the given one on, IN_FLIGHT at a time; then idle."""
    port, first = map(int, line.split())
    async with a_sender() as sender:

        async def slot(start: int) -> None:
            for room in range(first + start, first + MOST_ROOMS, IN_FLIGHT):
                await send(sender, port, room)

        await asyncio.gather(*map(slot, range(IN_FLIGHT)))
        await asyncio.sleep(60)


async def receive_for_ever(_line: str) -> None:
    """Say the port, then take rooms 0, 1, 2 and so on."""
    async with KvReceiver(SECRET, LIMITS) as receiver:
        print(await receiver.start("127.0.0.1"), flush=True)

        async def slot(room: int) -> None:
            while True:
                await receive(receiver, room)
                room += IN_FLIGHT

        await asyncio.gather(*map(slot, range(IN_FLIGHT)))


async def start(name: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM.format(name=name)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def begin(process: asyncio.subprocess.Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()


async def kill(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


def test_senders_killed_at_random_moments() -> None:
    async def main() -> None:
        rng = random.Random(9)
        ends: list[asyncio.Task[int]] = []
        async with KvReceiver(SECRET, LIMITS) as receiver:
            port = await receiver.start("127.0.0.1")
            upcoming = asyncio.create_task(start("send_all"))
            for number in range(KILLS):
                process = await upcoming
                if number + 1 < KILLS:
                    upcoming = asyncio.create_task(start("send_all"))
                rooms = range(100 * number, 100 * number + MOST_ROOMS)
                await begin(process, f"{port} {rooms[0]}")
                # From the first transfer on, at any moment of those that follow.
                assert await receive(receiver, rooms[0]) == 1
                ends += [asyncio.create_task(receive(receiver, room, 1.0)) for room in rooms[1:]]
                await asyncio.sleep(rng.random() * 0.05)
                await kill(process)
            landed = sum(await asyncio.gather(*ends))
            assert 0 < landed < len(ends)
            await gone(receiver)
            async with a_sender() as survivor:
                end = asyncio.create_task(receive(receiver, 1_000_000))
                assert await send(survivor, port, 1_000_000) == 1
                assert await end == 1

    run(main())


async def gone(receiver: KvReceiver) -> None:
    """Until all that the dead have left is given back."""
    while receiver.rooms or receiver.buffered_bytes or receiver.connections:
        await asyncio.sleep(0.01)


def test_receivers_killed_at_random_moments() -> None:
    async def main() -> None:
        rng = random.Random(10)
        acknowledged: list[int] = []
        async with a_sender() as sender:
            upcoming = asyncio.create_task(start("receive_for_ever"))
            for number in range(KILLS):
                process = await upcoming
                if number + 1 < KILLS:
                    upcoming = asyncio.create_task(start("receive_for_ever"))
                await begin(process, "")
                assert process.stdout is not None
                port = int(await process.stdout.readline())
                assert await send(sender, port, 0) == 1
                rooms = range(1, MOST_ROOMS)
                ends = [asyncio.create_task(send(sender, port, room)) for room in rooms]
                await asyncio.sleep(rng.random() * 0.05)
                await kill(process)
                acknowledged.append(sum(await asyncio.gather(*ends)))
            async with KvReceiver(SECRET, LIMITS) as receiver:
                port = await receiver.start("127.0.0.1")
                end = asyncio.create_task(receive(receiver, 1))
                assert await send(sender, port, 1) == 1
                assert await end == 1
                await asyncio.sleep(0)
        assert 0 < sum(acknowledged) < KILLS * (MOST_ROOMS - 1)

    run(main())
