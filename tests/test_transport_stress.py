"""Everything at once over several lanes: cuts, aborts, cancellations, late users, reused rooms.

Whatever lands is right to the last byte; every call ends; nothing is left behind.
"""

import asyncio
import random
import time

import pytest
from cutting_proxy import ByteProxy
from transport_peer import SECRET, run

from harness.core import TransportError
from harness.transport.lane import Lanes
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender

ROOMS = 60
LIMITS = ReceiverLimits(max_buffer_bytes=2**20, resume_s=0.5, hold_s=0.5)


def layers_of(room: int, turn: int) -> list[bytes]:
    rng = random.Random(room * 1000 + turn)
    return [rng.randbytes(rng.choice((0, 10, 5_000, 100_000))) for _ in range(rng.randrange(5))]


class Both:
    """One end of each kind, and what became of the rooms between them."""

    def __init__(self, seed: int, receiver: KvReceiver, sender: KvSender, port: int) -> None:
        self.rng = random.Random(seed)
        self.receiver, self.sender, self.port = receiver, sender, port
        self.landed = 0

    async def send(self, room: int, turn: int) -> bool:
        """Whether it was acknowledged. The buffers are spoilt as soon as the call has ended."""
        layers = [bytearray(layer) for layer in layers_of(room, turn)]
        transfer = None
        try:
            transfer = await self.sender.open("127.0.0.1", self.port, room, tuple(map(len, layers)))
            for index, layer in enumerate(layers):
                transfer.send_layer(index, layer)
                if self.rng.random() < 0.2:
                    await asyncio.sleep(self.rng.random() * 0.01)
                if self.rng.random() < 0.02:
                    transfer.abort("changed its mind")
            await transfer.finish(bytes([turn]))
        except TransportError:
            return False
        finally:
            if transfer is not None:
                transfer.abort("its task was cancelled")
            for layer in layers:
                layer[:] = bytes(len(layer))
        return True

    async def receive(self, room: int, turn: int) -> bool:
        await asyncio.sleep(self.rng.choice((0, 0, 0.05)) * self.rng.random())
        try:
            received = await self.receiver.expect(room, time.monotonic() + 1.5)
        except TransportError:
            return False
        assert [bytes(received.layer(k)) for k in range(received.layers)] == layers_of(room, turn)
        assert received.meta == bytes([turn])
        await asyncio.sleep(self.rng.choice((0, 0.02)) * self.rng.random())
        assert bytes(received.buffer) == b"".join(layers_of(room, turn))
        received.release()
        self.landed += 1
        return True

    async def room(self, room: int) -> None:
        """Used again and again until it has failed."""
        for turn in range(4):
            sending = asyncio.create_task(self.send(room, turn))
            receiving = asyncio.create_task(self.receive(room, turn))
            if self.rng.random() < 0.05:
                await asyncio.sleep(self.rng.random() * 0.05)
                self.rng.choice((sending, receiving)).cancel()
            sent, landed = await asyncio.gather(sending, receiving, return_exceptions=True)
            for each in (sent, landed):
                if isinstance(each, BaseException) and not isinstance(each, asyncio.CancelledError):
                    raise each
            self.receiver.discard(room)
            if sent is not True or landed is not True:
                return


@pytest.mark.parametrize("seed", range(2))
def test_everything_at_once(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        cuts = iter(lambda: rng.choice((0, *[rng.randrange(1000, 400_000)] * 9)), None)
        async with (
            KvReceiver(SECRET, LIMITS, lanes=lanes) as receiver,
            ByteProxy(await receiver.start("127.0.0.1"), cuts) as proxy,
            KvSender(
                SECRET,
                5,
                checksum=bool(seed % 2),
                chunk_bytes=32_768,
                offer_timeout_s=5,
                ack_timeout_s=5,
                lanes=lanes,
            ) as sender,
        ):
            both = Both(seed, receiver, sender, proxy.port)
            await asyncio.gather(*map(both.room, range(ROOMS)))
            assert proxy.cuts > 3
            assert both.landed > ROOMS
            while receiver.rooms:
                await asyncio.sleep(0.01)
            assert receiver.buffered_bytes == 0
            arena = receiver._started()._table.grants._arena
            while arena.free_bytes < arena.size_bytes:
                await asyncio.sleep(0.01)

    with Lanes(3) as lanes:
        run(main())
