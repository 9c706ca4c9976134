"""The receiving end of KV transfers: a server that lands rooms in bounded, preallocated buffers.

A room lives from its Offer to ``Received.release()``. ``expect(room)`` may come before the offer or
after the KV has landed; a room that nobody expects within the hold time is dropped. Bytes are read,
checked and placed in lanes of the receiver's own; futures belong to the loop that started it.
"""

import asyncio
import errno
import socket
import ssl
import threading
from ipaddress import ip_address
from types import TracebackType
from typing import Self

from harness.core import TransportError
from harness.transport.channel import Channel, PlainChannel, TlsChannel
from harness.transport.frames import Code
from harness.transport.handshake import check_secret
from harness.transport.inbound import Inbound
from harness.transport.lane import Lanes
from harness.transport.limits import ReceiverLimits
from harness.transport.reception import Reception
from harness.transport.rooms import Received
from harness.transport.socket_options import SocketOptions, tune_before_connect, tune_connected
from harness.transport.tls import TlsFiles

__all__ = ["KvReceiver", "Received", "ReceiverLimits"]

#: How long a peer may take to read why the receiver closes.
_FAREWELL_S = 0.5
_ACCEPTS_PER_TURN, _ACCEPT_PAUSE_S = 64, 0.1
#: accept(2) when the process or the system is at its limit.
_OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class KvReceiver:
    """Accepts KV transfers from peers that know ``secret``, in ``lanes`` or one of its own.

    With ``tls`` every peer must also show a certificate of the authority.
    """

    def __init__(
        self,
        secret: bytes,
        limits: ReceiverLimits | None = None,
        *,
        options: SocketOptions | None = None,
        tls: TlsFiles | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self._secret = check_secret(secret)
        self._limits = limits or ReceiverLimits()
        self._options = options or SocketOptions()
        self._tls: ssl.SSLContext | None = tls.server_context() if tls is not None else None
        self._lanes = lanes or Lanes(1, "kv-receiver")
        self._owns_lanes = lanes is None
        self._listener: socket.socket | None = None
        self._reception: Reception | None = None
        self._lock = threading.Lock()
        self._connections: set[Inbound] = set()
        self._address = "no address yet"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of all buffers, from an offer's acceptance to the release of its buffer."""
        return self._reception.buffered_bytes if self._reception is not None else 0

    @property
    def rooms(self) -> int:
        """Rooms that hold a buffer."""
        return self._reception.rooms if self._reception is not None else 0

    @property
    def connections(self) -> int:
        """Connections that are open, authenticated or not yet."""
        with self._lock:
            return len(self._connections)

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on one address of this machine; returns the port."""
        if self._reception is not None:
            raise TransportError(f"this KV receiver already listens on {self._address}")
        loop = asyncio.get_running_loop()
        try:
            family, _, _, _, address = (
                await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )[0]
            if ip_address(address[0]).is_unspecified:
                raise TransportError(
                    f"the KV receiver will not listen on every address ({host!r}); name one"
                )
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tune_before_connect(listener, self._options)
                listener.bind(address)
                listener.listen(self._limits.max_pending_connections)
                listener.setblocking(False)
            except BaseException:
                listener.close()
                raise
        except OSError as error:
            raise TransportError(
                f"the KV receiver cannot listen on {host}:{port}: {error}"
            ) from error
        bound = int(listener.getsockname()[1])
        self._address = f"{host}:{bound}"
        self._reception = Reception(self._limits, loop, self._address)
        self._listener = listener
        loop.add_reader(listener.fileno(), self._accept)
        return bound

    async def close(self) -> None:
        """Stop listening, end every connection, fail every room and expectation."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        if self._reception is not None:
            self._reception.close("the receiver is closing")
        with self._lock:
            connections = list(self._connections)
        ends = [asyncio.wrap_future(each.ended) for each in connections]
        for connection in connections:
            connection.refuse(Code.CLOSED, "the receiver is closing")
        if ends:
            await asyncio.wait(ends, timeout=_FAREWELL_S)
        for connection in connections:
            connection.abort("the receiver is closing")  # a peer that did not read the farewell
        await asyncio.gather(*ends)
        if self._owns_lanes:
            self._lanes.stop()

    def expect(self, room: int, deadline_mono_s: float) -> asyncio.Future[Received]:
        """The room's KV, once it has landed whole; whoever gets it must release it.

        Fails with TransportError when the transfer fails or the deadline (time.monotonic) passes.
        Cancelling the future drops the room. A user that may be cancelled between the landing and
        the await calls ``discard(room)`` afterwards.
        """
        return self._started().expect(room, deadline_mono_s)

    def discard(self, room: int, reason: str = "the receiver's user gave it up") -> None:
        """Drop a room in whatever state it is: fail it, or release its delivered buffer."""
        self._started().discard(room, reason)

    def _started(self) -> Reception:
        if self._reception is None:
            raise TransportError("this KV receiver has not been started")
        return self._reception

    def _accept(self) -> None:
        """Take the connections that wait, a bounded number a turn: the loop has other work."""
        for _ in range(_ACCEPTS_PER_TURN):
            if self._listener is None:
                return
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it was gone before it was taken
            except OSError as error:
                if error.errno not in _OUT_OF:
                    raise
                self._pause_accepting()
                return
            if not self._has_room():
                sock.close()
                continue
            try:
                self._admit(sock, f"{address[0]}:{address[1]}")
            except OSError:  # it was gone before its options were set
                sock.close()

    def _pause_accepting(self) -> None:
        """The system has no descriptor or memory left: asked again at once, it would still not."""
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        loop.remove_reader(self._listener.fileno())
        loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _has_room(self) -> bool:
        with self._lock:
            pending = sum(other.session is None for other in self._connections)
            return (
                pending < self._limits.max_pending_connections
                and len(self._connections) < self._limits.max_connections
            )

    def _admit(self, sock: socket.socket, name: str) -> None:
        tune_connected(sock, self._options)
        tls = self._tls
        channel: Channel = PlainChannel(sock) if tls is None else TlsChannel(sock, tls, None)
        inbound = Inbound(
            channel,
            self._lanes.next(),
            name,
            self._started(),
            self._secret,
            self._limits.max_payload_bytes,
            self._limits.auth_timeout_s,
            self._lost,
        )
        with self._lock:
            self._connections.add(inbound)
        inbound.start()

    def _lost(self, inbound: Inbound) -> None:
        with self._lock:
            self._connections.discard(inbound)
