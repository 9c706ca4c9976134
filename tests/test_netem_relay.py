"""The relay: its connections, what it refuses, and a loop that reads before it was asked to."""

import asyncio
import selectors
import socket
import time
from collections.abc import Awaitable, Callable

import psutil
import pytest
from own_children import own_children
from test_netem_testlink import Peer, spec

from netem.link import Direction, LinkError, LinkSpec, Slot, symmetric
from netem.loss import bursty
from netem.probes import probes
from netem.relay import Connection, End, Relay
from netem.relay_stream import Chunk
from netem.testlink import open_link

PATIENCE_S = 30
WAY = {"rate_bytes_per_s": 25e6, "delay_s": 0.01, "limit_bytes": 1 << 20}
CONFIGURATION = {"near_to_far": WAY, "far_to_near": WAY}


class EarlyEnd(End):
    """An end whose loop begins to read after ``connection_made``, as Python 3.11.2's does."""

    kept: tuple[Chunk, ...] = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        descriptor = transport.get_extra_info("socket").fileno()
        # No public call makes a loop read what its transport takes for paused.
        loop.call_soon(loop._add_reader, descriptor, transport._read_ready)  # type: ignore[attr-defined]

    def start_reading(self) -> None:
        self.kept = tuple(self.early or ())
        super().start_reading()


def run(scene: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
    ) as runner:
        runner.run(asyncio.wait_for(scene(), PATIENCE_S))


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 400])
def test_what_is_read_before_the_server_is_there_is_kept(payload: bytes) -> None:
    async def scene() -> None:
        relayed: list[Connection] = []

        def early(relay: Relay, server: tuple[str, int]) -> End:
            connection = Connection(relay, "far", server)
            connection.client = EarlyEnd(connection, connection.outward, connection.inward)
            connection.server = EarlyEnd(connection, connection.inward, connection.outward)
            relayed.append(connection)
            return connection.client

        async with asyncio.TaskGroup() as group:
            relay = Relay(group, CONFIGURATION)
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            address = server.sockets[0].getsockname()
            loop = asyncio.get_running_loop()
            waiting = socket.create_server(("127.0.0.1", 0))
            with socket.create_connection(waiting.getsockname(), PATIENCE_S) as client:
                client.sendall(payload)
                client.shutdown(socket.SHUT_WR)
                client.setblocking(False)
                # Accepted only now: the first look at the connection finds all that was sent.
                listener = await loop.create_server(lambda: early(relay, address), sock=waiting)
                received = b""
                while data := await loop.sock_recv(client, 1 << 16):
                    received += data
            assert received == payload
            (connection,) = relayed
            assert isinstance(connection.client, EarlyEnd)
            first = payload[: relay.directions["near_to_far"].chunk_bytes]
            assert connection.client.kept == ((first or "end"),)
            listener.close()
            server.close()

    run(scene)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    await writer.drain()
    writer.close()


def test_bytes_for_a_socket_that_is_not_there_are_a_fault() -> None:
    async def scene() -> None:
        async with asyncio.TaskGroup() as group:
            connection = Connection(Relay(group, CONFIGURATION), "far", ("127.0.0.1", 1))
            with pytest.raises(AssertionError, match="not yet connected"):
                connection.outward.arrive(b"lost")
            connection.outward.arrive("reset")  # A client may fail before its server is there.

    run(scene)


def test_the_relay_resets_a_client_whose_server_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with open_link(symmetric("test", 25e6, 0.01), "relay") as link:
        address = link.expose(link.far, port)
        with (
            socket.create_connection(address, timeout=PATIENCE_S) as client,
            pytest.raises(ConnectionResetError),
        ):
            client.recv(1)


def test_the_relay_applies_each_direction_and_names_what_it_leaves_out() -> None:
    spec = LinkSpec(
        "odd",
        Direction(5e6, 0.001, loss=bursty(0.01, 5), ecn=True),
        Direction(25e6, 0.009, 0.001, reorder=0.1, duplicate=0.01, corrupt=0.001),
        per_flow_cap_bytes_per_s=1e6,
    )
    with open_link(spec, "relay") as link:
        said = " ".join(link.notes)
        for lacking in (
            "loss of 1%",
            "ecn",
            "jitter of 1ms",
            "reorder of 10%",
            "duplicate of 1%",
            "corrupt of 0.1%",
            "a per-flow cap of 8mbit",
        ):
            assert f"{lacking} is not applied by the relay" in said
        assert link.applied.near_to_far == Direction(5e6, 0.001)
        assert link.applied.far_to_near == Direction(25e6, 0.009)
        assert link.applied.per_flow_cap_bytes_per_s is None
        with probes(link.path) as ends:
            assert min(ends.rtts_s(0.2)) >= 0.0098
            assert 2.5e6 < ends.rate("near_to_far", 2, 0.4) < 6.5e6
            assert 12e6 < ends.rate("far_to_near", 2, 0.4) < 32e6


def test_a_running_relay_changes_and_refuses_by_name_what_it_has_not() -> None:
    with open_link(symmetric("test", 25e6, 0.002), "relay") as link, probes(link.path) as ends:
        link.path.apply(symmetric("test", 2.5e6, 0.030))
        assert link.applied.rtt_s == pytest.approx(0.030)
        assert min(ends.rtts_s(0.2)) >= 0.0298
        assert 1.2e6 < ends.rate("far_to_near", 2, 0.4) < 3.3e6
        with pytest.raises(LinkError, match="the relay cannot apply loss of 5%, a slot: it ends"):
            link.path.apply(symmetric("test", 2.5e6, 0.030, loss=0.05, slot=Slot(0.001, 0.002)))
        assert link.applied.rate_bytes_per_s == 2.5e6


def test_the_relay_says_what_it_does_not_apply() -> None:
    with open_link(spec(jitter_s=0.001, loss=0.01), "relay") as link:
        assert (link.applied.jitter_s, link.applied.loss_rate) == (0.0, 0.0)
        notes = " ".join(link.notes)
        assert "jitter of 1ms is not applied" in notes
        assert "loss of 1% is not applied" in notes


def test_the_relay_passes_a_reset_on() -> None:
    with open_link(spec(), "relay") as link, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        address = link.expose(link.far, listener.getsockname()[1])
        with socket.create_connection(address, timeout=PATIENCE_S) as client:
            client.sendall(b"x")
            server, _ = listener.accept()
            with server:
                server.settimeout(PATIENCE_S)
                assert server.recv(1) == b"x"
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close()
                with pytest.raises(ConnectionResetError):
                    server.recv(1)


def test_a_receiver_that_does_not_read_stops_only_its_own_connection() -> None:
    size = 1_000_000
    with (
        open_link(spec("1gbit", "1ms"), "relay") as link,
        socket.create_server(("127.0.0.1", 0)) as stuck,
    ):
        stuck.settimeout(PATIENCE_S)
        with socket.create_connection(
            link.expose(link.far, stuck.getsockname()[1]), timeout=1.0
        ) as flood:
            with pytest.raises(TimeoutError):
                flood.sendall(bytes(500_000_000))
            # Backpressure reached the sender: in that time the link could have carried 125 MB.
            towards_far = link.counters().near_to_far
            assert towards_far.bytes + towards_far.queued_bytes < 20_000_000
            with Peer(link.far, "serve", link.far.address) as server:
                host, port = link.expose(link.far, server.says()["port"])
                with Peer(link.near, "send", host, port, size) as client:
                    assert client.says()["answer"]["bytes"] == size


def test_the_relay_forgets_connections_that_ended() -> None:
    with open_link(spec("1gbit", "1ms"), "relay") as link:
        (relay,) = own_children()
        with Peer(link.far, "serve", link.far.address) as server:
            host, port = link.expose(link.far, server.says()["port"])
            before = relay.num_fds()
            for _ in range(10):
                with Peer(link.near, "send", host, port, 1000) as client:
                    assert client.says()["answer"]["bytes"] == 1000
            deadline_s = time.monotonic() + PATIENCE_S
            while relay.num_fds() > before and time.monotonic() < deadline_s:
                link.counters()
            assert relay.num_fds() == before


def test_exposing_a_server_again_gives_the_same_address() -> None:
    with open_link(spec(), "relay") as link:
        first = link.expose(link.far, 4000)
        assert link.expose(link.far, 4000) == first
        assert link.expose(link.near, 4000) != first
        link.withdraw(link.far, 4000)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(first, timeout=PATIENCE_S)


def test_the_relay_binds_loopback_only() -> None:
    with open_link(spec(), "relay") as link:
        host, port = link.expose(link.far, 1)
        assert host == "127.0.0.1"
        (relay,) = own_children()
        listening = [c for c in relay.net_connections() if c.status == psutil.CONN_LISTEN]
        assert [tuple(c.laddr) for c in listening] == [("127.0.0.1", port)]
