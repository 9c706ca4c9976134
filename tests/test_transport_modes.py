"""Transfers with TLS, with whole layers, with a chosen congestion control, reported by layer."""

import asyncio
import itertools
import random
import secrets
import socket
import ssl
import sys
import threading

import pytest
from cutting_proxy import ByteProxy, Fate, FrameProxy, Side
from test_transport_tls import new_authority
from transport_peer import LOOPS, SECRET, run, soon
from wire_reader import Data

from harness.core import TransportError
from harness.transport.frames import Control, TransferError
from harness.transport.lane import Lanes
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender
from harness.transport.socket_options import SocketOptions, effective
from harness.transport.tls import TlsFiles


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    authority = new_authority(tmp_path_factory.mktemp("modes"), "testbed")
    return authority.issue("node", "IP:127.0.0.1")


async def transferred(
    sender: KvSender, receiver: KvReceiver, port: int, room: int, layers: list[bytes]
) -> None:
    expected = receiver.expect(room, soon())
    transfer = await sender.open("127.0.0.1", port, room, tuple(map(len, layers)))
    for index, layer in enumerate(layers):
        transfer.send_layer(index, layer)
    await transfer.finish(b"meta")
    received = await expected
    assert [bytes(received.layer(k)) for k in range(received.layers)] == layers
    assert received.meta == b"meta"
    received.release()
    assert (receiver.buffered_bytes, receiver.rooms) == (0, 0)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("connections", [1, 4])
def test_kv_over_tls(node: TlsFiles, loop: str, connections: int) -> None:
    async def main() -> None:
        async with (
            KvReceiver(SECRET, tls=node) as receiver,
            KvSender(SECRET, connections, chunk_bytes=100_000, tls=node) as sender,
        ):
            port = await receiver.start("127.0.0.1")
            layers = [secrets.token_bytes(length) for length in (1_000_000, 1, 0, 70_000)]
            await transferred(sender, receiver, port, 1, layers)
            if sys.platform == "linux":
                assert sum(each.bytes_acked or 0 for each in sender.samples()) > 1_070_001

    run(main(), loop)


@pytest.mark.parametrize("connections", [1, 3])
def test_kv_over_tls_goes_on_after_cuts(node: TlsFiles, connections: int) -> None:
    async def main() -> None:
        rng = random.Random(connections)
        cuts = iter(lambda: rng.randrange(60_000, 300_000), None)
        async with (
            KvReceiver(SECRET, tls=node) as receiver,
            ByteProxy(await receiver.start("127.0.0.1"), cuts) as proxy,
            KvSender(SECRET, connections, chunk_bytes=16_384, tls=node) as sender,
        ):
            layers = [secrets.token_bytes(400_000) for _ in range(2)]
            await transferred(sender, receiver, proxy.port, 1, layers)
            assert proxy.cuts > 1

    run(main())


def test_who_has_no_certificate_gets_nothing(node: TlsFiles) -> None:
    async def main() -> None:
        limits = ReceiverLimits(auth_timeout_s=0.3)
        async with KvReceiver(SECRET, limits, tls=node) as receiver:
            port = await receiver.start("127.0.0.1")
            async with KvSender(SECRET, 1, connect_timeout_s=2.0) as plain:
                with pytest.raises(TransportError, match="phase handshake"):
                    await plain.connect("127.0.0.1", port)
            assert await asyncio.to_thread(bare, node, port)
            silent = socket.create_connection(("127.0.0.1", port))  # no handshake at all
            while receiver.connections:
                await asyncio.sleep(0.01)
            silent.close()
            async with KvSender(SECRET, 2, tls=node) as member:
                await transferred(member, receiver, port, 1, [b"all is well"])

    def bare(node: TlsFiles, port: int) -> str:
        """A client that trusts the authority but shows nothing: what it is told."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(node.authority)
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            try:
                with context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped:
                    # The receiver's first words would be a Challenge.
                    assert wrapped.recv(1) == b"", "the receiver spoke to a stranger"
            except OSError as error:
                return str(error)
        return "closed"

    run(main())


def test_a_sender_with_tls_and_a_receiver_without(node: TlsFiles) -> None:
    async def main() -> None:
        async with (
            KvReceiver(SECRET) as receiver,
            KvSender(SECRET, 1, connect_timeout_s=2.0, tls=node) as sender,
        ):
            port = await receiver.start("127.0.0.1")
            with pytest.raises(TransferError, match="phase handshake: the handshake of the chan"):
                await sender.connect("127.0.0.1", port)

    run(main())


def test_whole_layers_stay_on_one_connection() -> None:
    where: dict[int, set[int]] = {}

    def note(index: int, _side: Side, frame: Control | Data) -> Fate:
        if isinstance(frame, Data):
            where.setdefault(frame.layer, set()).add(index)
        return "pass"

    async def main() -> None:
        async with (
            KvReceiver(SECRET) as receiver,
            FrameProxy(await receiver.start("127.0.0.1"), note) as proxy,
            KvSender(SECRET, 4, chunk_bytes=16_384, striping="whole") as sender,
        ):
            layers = [secrets.token_bytes(200_000) for _ in range(12)]
            await transferred(sender, receiver, proxy.port, 1, layers)

    run(main())
    assert sorted(where) == list(range(12))
    assert all(len(connections) == 1 for connections in where.values())
    assert len(set.union(*where.values())) > 1


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("reported", [True, False])
def test_small_layers_share_frames_unless_each_is_reported(checksum: bool, reported: bool) -> None:
    lengths: list[int] = []
    told: list[int] = []

    def note(_index: int, _side: Side, frame: Control | Data) -> Fate:
        if isinstance(frame, Data):
            lengths.append(len(frame.payload))
        return "pass"

    async def main() -> None:
        async with (
            KvReceiver(SECRET) as receiver,
            FrameProxy(await receiver.start("127.0.0.1"), note) as proxy,
            KvSender(SECRET, 2, checksum, chunk_bytes=20_000) as sender,
        ):
            layers = [secrets.token_bytes(0 if k % 5 == 0 else 7000) for k in range(40)]
            sizes, on_layer = tuple(map(len, layers)), told.append if reported else None
            expected = receiver.expect(1, soon())
            transfer = await sender.open("127.0.0.1", proxy.port, 1, sizes, b"", on_layer)
            (pool,) = sender._pools.values()
            with pool.lock:  # no connection takes the first before the last is there
                for index, layer in enumerate(layers):
                    transfer.send_layer(index, layer)
            await transfer.finish()
            received = await expected
            assert [bytes(received.layer(k)) for k in range(40)] == layers
            received.release()

    run(main())
    assert sum(lengths) == 32 * 7000
    if reported:
        assert lengths == [7000] * 32
        assert sorted(told) == [k for k in range(40) if k % 5]
    else:
        assert len(lengths) < 16
        assert max(lengths) == 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="a congestion control is chosen on Linux")
def test_a_congestion_control_is_used_or_refused_by_name() -> None:
    async def main() -> None:
        options = SocketOptions(congestion_control="reno")
        async with KvReceiver(SECRET, options=options) as receiver:
            port = await receiver.start("127.0.0.1")
            for name in ("reno", "cubic"):
                async with KvSender(SECRET, 2, congestion_control=name) as sender:
                    await transferred(sender, receiver, port, 1, [bytes(10_000)])
                    (pool,) = sender._pools.values()
                    for connection in pool._alive():
                        found = effective(connection._connection.sock)
                        assert found["congestion_control"] == name
            async with KvSender(SECRET, 2, congestion_control="nonesuch") as sender:
                with pytest.raises(TransportError, match="nonesuch is not in this kernel"):
                    await sender.connect("127.0.0.1", port)
        with pytest.raises(TransportError, match="nonesuch is not in this kernel"):
            await KvReceiver(SECRET, options=SocketOptions(congestion_control="nonesuch")).start(
                "127.0.0.1"
            )

    run(main())


@pytest.mark.parametrize("loop", LOOPS)
def test_each_layer_is_reported_once_in_the_callers_loop(loop: str) -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET, 2) as sender:
            port = await receiver.start("127.0.0.1")
            caller, told = threading.get_ident(), []
            arrived = asyncio.Event()

            def note(layer: int) -> None:
                assert threading.get_ident() == caller
                told.append(layer)
                arrived.set()

            transfer = await sender.open("127.0.0.1", port, 1, (500, 0, 200_000, 7), b"", note)
            for layer, length in ((2, 200_000), (0, 500), (3, 7)):
                arrived.clear()
                transfer.send_layer(layer, bytes(length))
                await asyncio.wait_for(arrived.wait(), 10)  # before the transfer has ended
            await transfer.finish()
            await asyncio.sleep(0)
            assert told == [2, 0, 3]
            receiver.discard(1)

    run(main(), loop)


def test_lanes_can_be_shared_and_more_than_one() -> None:
    async def work() -> None:
        async with (
            KvReceiver(SECRET, lanes=lanes) as receiver,
            KvSender(SECRET, 4, lanes=lanes) as sender,
            ByteProxy(await receiver.start("127.0.0.1"), itertools.repeat(0)) as proxy,
        ):
            await transferred(sender, receiver, proxy.port, 1, [secrets.token_bytes(900_000)])
            names = {thread.name for thread in threading.enumerate()}
            assert {"kv-0", "kv-1", "kv-2"} <= names

    with Lanes(3) as lanes:
        run(work())
    assert not {"kv-0", "kv-1", "kv-2"} & {thread.name for thread in threading.enumerate()}
