"""A TCP relay on loopback that delays and paces bytes: the link where nothing else can be had.

    python -m netem.relay < {"near_to_far": {"rate_bytes_per_s", "delay_s", "limit_bytes"},
                             "far_to_near": ...} + requests

A listener stands for a server of one site as the other site sees it. All connections share one
``DelayLine`` per direction (``netem.relay_stream``). Rate counts TCP payload. The relay ends TCP
twice: congestion control, loss and reordering of a real path do not exist here, and a client sees
a reset where the server refuses.

Handshake: a client's own connect is local, so the relay charges it afterwards: it connects to the
server one delay after the accept and reads the client's first bytes one round trip after it.

Bounds: a direction stops reading at ``limit_bytes`` held; a connection at what is not yet taken
by its receiver, so that one stuck receiver does not stop the others.

Requests (see ``netem.control``): ``{"op": "listen", "host", "port", "server_site"}`` answers
``{"host", "port"}``; ``{"op": "withdraw", "port", "server_site"}``; ``{"op": "counters"}``;
``{"op": "apply", "near_to_far", "far_to_near"}`` changes the running link. End of standard input
ends the process.
"""

import asyncio
import json
import os
import selectors
import socket
import sys
import time
from typing import Any

from netem.link import DIRECTIONS, DirectionName
from netem.relay_stream import Chunk, SharedLine, Stream, reset
from netem.wakeup import wake_precisely

_HOST = "127.0.0.1"
_BUFFER_BYTES = 1 << 20
#: select(2) takes descriptors below 1024 and a connection needs two.
_MAX_CONNECTIONS, _MAX_LISTENERS = 350, 256
_CONNECT_TIMEOUT_S = 10.0
#: The direction of a request and of a reply, by the site of the server.
_TOWARDS: dict[str, DirectionName] = {"near": "far_to_near", "far": "near_to_far"}
_AWAY_FROM: dict[str, DirectionName] = {"near": "near_to_far", "far": "far_to_near"}


class End(asyncio.BufferedProtocol):
    """One socket of a relayed connection.

    ``early`` keeps what was read before ``start_reading``, at most one chunk, which then enters
    the link first; it is None from there on.
    """

    def __init__(self, connection: "Connection", sends: Stream, receives: Stream) -> None:
        self.connection, self.sends, self.receives = connection, sends, receives
        self.transport: asyncio.Transport | None = None
        self.early: list[Chunk] | None = []
        self._buffer = memoryview(bytearray(sends.shared.chunk_bytes))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        transport.pause_reading()
        self.transport = self.receives.target = transport
        self.connection.opened(self)

    def start_reading(self) -> None:
        """Let the link have what was read early and what comes; nothing if the socket is gone."""
        early, self.early = self.early, None
        if self.transport is None or early is None:
            return
        _stop_reading(self.transport)
        self.sends.source = self.transport
        for chunk in early:
            self.sends.offer(chunk)
        self.sends.throttle()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the protocol's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._take(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool:
        self._take("end")
        return True  # Half-closed: the other direction stays open.

    def _take(self, chunk: Chunk) -> None:
        if self.early is None:
            self.sends.offer(chunk)
            return
        assert self.transport is not None
        assert not self.early, "a paused transport read on"
        self.early.append(chunk)
        _stop_reading(self.transport)

    def pause_writing(self) -> None:
        self.receives.receiver_is_full(True)

    def resume_writing(self) -> None:
        self.receives.receiver_is_full(False)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # see above
        self.connection.lost(self)


class Connection:
    """A client's connection and the one made for it to the server."""

    def __init__(self, relay: "Relay", server_site: str, server: tuple[str, int]) -> None:
        self.relay, self.server_address = relay, server
        self.outward = Stream(relay.directions[_TOWARDS[server_site]], self._one_ended)
        self.inward = Stream(relay.directions[_AWAY_FROM[server_site]], self._one_ended)
        self.client = End(self, self.outward, self.inward)
        self.server = End(self, self.inward, self.outward)

    def opened(self, end: End) -> None:
        if end is self.client:
            self.relay.admit(self)

    async def connect(self) -> None:
        """The rest of the handshake: see the top of the module."""
        outward_s = self.outward.shared.line.direction.delay_s
        rtt_s = outward_s + self.inward.shared.line.direction.delay_s
        accepted_s = time.monotonic()
        await asyncio.sleep(outward_s)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self.relay.loop.create_connection(lambda: self.server, *self.server_address)
        except OSError:  # TimeoutError is one
            self.inward.offer("reset")
            return
        if self.client.transport is None or self.client.transport.is_closing():
            assert self.server.transport is not None
            reset(self.server.transport)
            return
        self.server.start_reading()
        await asyncio.sleep(accepted_s + rtt_s - time.monotonic())
        self.client.start_reading()

    def _one_ended(self) -> None:
        """Both halves closed is closed; what is buffered is still sent."""
        if self.outward.ended and self.inward.ended:
            for end in (self.client, self.server):
                if end.transport is not None:
                    end.transport.close()

    def lost(self, end: End) -> None:
        """A socket is gone; unless both streams had ended, the other one learns it by a reset."""
        end.transport = None
        if not end.receives.ended or not end.sends.ended:
            end.sends.offer("reset")
        if self.client.transport is None and self.server.transport is None:
            self.relay.connections.discard(self)


class Relay:
    """All listeners and connections of one link."""

    def __init__(self, group: asyncio.TaskGroup, configuration: dict[str, Any]) -> None:
        self.loop = loop = asyncio.get_running_loop()
        self._group = group
        self.directions = {name: SharedLine(loop, configuration[name]) for name in DIRECTIONS}
        self.connections: set[Connection] = set()
        self._listeners: dict[tuple[str, int], asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, connection: Connection) -> None:
        assert connection.client.transport is not None
        if len(self.connections) >= _MAX_CONNECTIONS:
            reset(connection.client.transport)
            return
        self.connections.add(connection)
        task = self._group.create_task(connection.connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"op": "counters"}:
                counters: dict[str, Any] = {
                    n: d.line.counters() for n, d in self.directions.items()
                }
                return counters | {"mono_ns": time.monotonic_ns()}
            case {"op": "apply"}:
                for name, direction in self.directions.items():
                    direction.change(request[name])
                return {"mono_ns": time.monotonic_ns()}
            case {"op": "listen", "host": host, "port": port, "server_site": site}:
                return await self._listen(site, host, port)
            case {"op": "withdraw", "port": port, "server_site": site}:
                if (listener := self._listeners.pop((site, port), None)) is not None:
                    listener.close()
                return {}
        return {"error": f"unknown request {request!r}"}

    async def _listen(self, site: str, host: str, port: int) -> dict[str, Any]:
        """The listener for a server; the same one when it is asked for again."""
        listener = self._listeners.get((site, port))
        if listener is None:
            if len(self._listeners) >= _MAX_LISTENERS:
                return {"error": f"{_MAX_LISTENERS} servers are exposed already; withdraw some"}
            listener = await self.loop.create_server(
                lambda: Connection(self, site, (host, port)).client, _HOST, 0
            )
            self._listeners[site, port] = listener
        address, listening_port = listener.sockets[0].getsockname()
        return {"host": address, "port": listening_port}

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


async def serve(configuration: dict[str, Any], priority: str) -> None:
    """Answer requests until standard input ends."""
    requests = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(requests), sys.stdin
    )
    # An unexpected error in any connection ends the group, the process and the silence.
    async with asyncio.TaskGroup() as group:
        relay = Relay(group, configuration)
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: _on_callback_error(group, loop, context)
        )
        print(json.dumps({"event": "ready", "priority": priority}), flush=True)
        while line := await requests.readline():
            print(json.dumps(await relay.answer(json.loads(line))), flush=True)
        relay.close()


def _on_callback_error(
    group: asyncio.TaskGroup, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """The loop only logs what a callback raises; a fault must end the group instead."""
    error = context.get("exception")
    if isinstance(error, Exception) and not isinstance(error, OSError):

        async def fail() -> None:
            raise error

        group.create_task(fail())
    else:
        loop.default_exception_handler(context)


def _stop_reading(transport: asyncio.Transport) -> None:
    """Pause, also a transport that reads although it takes itself for paused.

    The loop of Python 3.11.2, for one, begins to read after ``connection_made`` whatever was asked
    for there, and a further ``pause_reading`` alone does nothing.
    """
    transport.resume_reading()
    transport.pause_reading()


def _precise_loop() -> asyncio.AbstractEventLoop:
    """select(2) sleeps to the microsecond; epoll, asyncio's default, rounds up to 1 ms."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def main() -> None:
    # Unbuffered, so that the event loop finds the requests that follow on the pipe itself.
    configuration = json.loads(os.fdopen(0, "rb", buffering=0, closefd=False).readline())
    with asyncio.Runner(loop_factory=_precise_loop) as runner:
        runner.run(serve(configuration, wake_precisely()))


if __name__ == "__main__":
    main()
