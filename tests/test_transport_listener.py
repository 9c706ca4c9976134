"""A receiver without descriptors, and one under a flood of connections: bounded, and works on."""

import asyncio
import os
import resource
import secrets
import socket
import time

import pytest
from transport_peer import SECRET, run, soon

from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender


async def transferred(sender: KvSender, receiver: KvReceiver, port: int, room: int) -> None:
    payload = secrets.token_bytes(50_000)
    transfer = await sender.open("127.0.0.1", port, room, (50_000,))
    transfer.send_layer(0, payload)
    await transfer.finish()
    received = await receiver.expect(room, soon())
    assert received.buffer == payload
    received.release()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_without_descriptors_the_listener_waits_and_does_not_spin(loop: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET, 1) as sender:
            port = await receiver.start("127.0.0.1")
            await transferred(sender, receiver, port, 1)
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
            free = os.dup(0)
            os.close(free)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
                before_s = time.process_time()
                await asyncio.sleep(0.3)
                assert time.process_time() - before_s < 0.2
                assert receiver.connections == 1
                await transferred(sender, receiver, port, 2)  # those that are open work on
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            while receiver.connections < 6:
                await asyncio.sleep(0.01)
            for client in clients:
                client.close()

    run(main(), loop)


def test_a_flood_of_connections_is_bounded_and_passes() -> None:
    async def main() -> None:
        limits = ReceiverLimits(max_connections=40, max_pending_connections=20, auth_timeout_s=0.3)
        async with KvReceiver(SECRET, limits) as receiver, KvSender(SECRET, 2) as sender:
            port = await receiver.start("127.0.0.1")
            await sender.connect("127.0.0.1", port)
            clients = []
            for _ in range(10):
                for _ in range(30):
                    client = socket.socket()
                    client.setblocking(False)
                    client.connect_ex(("127.0.0.1", port))
                    clients.append(client)
                await asyncio.sleep(0)
                assert receiver.connections <= 22
            await transferred(sender, receiver, port, 1)
            while receiver.connections > 2:
                await asyncio.sleep(0.01)
            async with KvSender(SECRET, 4) as newcomer:
                await transferred(newcomer, receiver, port, 2)
            for client in clients:
                client.close()

    run(main())
