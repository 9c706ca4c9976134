"""Connections to one address: opened, kept if wanted, never waited for.

The socket is the standard library's own, not blocking: what arrives is read in a callback of
gevent's loop, right when it is reported, with no switch to a greenlet between the kernel and the
time stamp. A greenlet switches only where it waits: to connect, to send on, for the end.

Without ``keep_alive`` each request has a connection of its own. With it, a request takes the
connection that was given back last, or opens one when none is idle, so that none ever waits for
another. A server may close an idle connection at any time; one that was is passed over.
"""

import errno
import os
import socket as plain_socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gevent import get_hub, monkey, socket
from gevent.event import Event

#: Importing locust replaces socket.socket by a class that switches greenlets in every call.
_Socket = monkey.get_original("socket", "socket")
RECV_BYTES = 1 << 16
#: What one sendmsg takes at the most (IOV_MAX of Linux).
MAX_VIEWS = 1024
_READ = 1

#: Told what arrived and when; true when the greenlet that waits is to look.
Take = Callable[[bytes, int], bool]


class Connection:
    """One TCP connection. ``kept``: it has served a request before."""

    def __init__(self, sock: plain_socket.socket) -> None:
        self._socket = sock
        self.kept = False

    def send(self, pieces: Iterator[memoryview]) -> None:
        """Send all of ``pieces``, taken as the kernel has room for them. Raises OSError."""
        views: list[memoryview] = []
        more = True
        while True:
            while more and len(views) < MAX_VIEWS:
                piece = next(pieces, None)
                more = piece is not None
                if piece:
                    views.append(piece)
            if not views:
                return
            try:
                sent_bytes = self._socket.sendmsg(views)
            except BlockingIOError:
                socket.wait_write(self._socket.fileno())
                continue
            at = 0
            while at < len(views) and sent_bytes >= len(views[at]):
                sent_bytes -= len(views[at])
                at += 1
            del views[:at]
            if sent_bytes:
                views[0] = views[0][sent_bytes:]

    @contextmanager
    def reading(self, take: Take, buffer: memoryview) -> Iterator["Reading"]:
        """``take`` gets what arrives, in the loop, as long as the block lasts."""
        watcher = get_hub().loop.io(self._socket.fileno(), _READ)
        reading = Reading(self._socket, take, buffer, watcher.stop)
        watcher.start(reading.read)
        try:
            yield reading
        finally:
            watcher.stop()
            watcher.close()

    def is_usable(self) -> bool:
        """An idle connection: that the server has neither closed it nor said anything."""
        try:
            self._socket.recv(1, plain_socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        self._socket.close()


class Reading:
    """What arrives on a connection goes to ``take``, until that says that it has all, or raises."""

    def __init__(
        self,
        sock: plain_socket.socket,
        take: Take,
        buffer: memoryview,
        stop: Callable[[], None],
    ) -> None:
        self._socket = sock
        self._take = take
        self._buffer = buffer
        self._stop = stop
        self._woken = Event()
        self._error: BaseException | None = None

    def read(self) -> None:
        """Read once, so that a peer that always has more holds up nobody. A callback."""
        try:
            try:
                num_bytes = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            now_ns = time.monotonic_ns()
            if self._take(bytes(self._buffer[:num_bytes]), now_ns):
                self._woken.set()
        except BaseException as error:  # noqa: BLE001 - raised where the greenlet waits
            self._error = error
            self._stop()
            self._woken.set()

    def wait(self) -> None:
        """Until ``take`` was true once more. Raises what reading raised."""
        self._woken.wait()
        self._woken.clear()
        if self._error is not None:
            raise self._error


class Connections:
    """All connections to one socket address."""

    def __init__(self, family: int, address: tuple[object, ...], *, keep_alive: bool) -> None:
        self._family = family
        self._address = address
        self._keep_alive = keep_alive
        self._idle: list[Connection] = []

    def take(self) -> Connection:
        """An idle connection, the one used last first, or a new one. Raises OSError."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.close()
        return self.open()

    def open(self) -> Connection:
        """A new connection. Raises OSError."""
        sock = _Socket(self._family, plain_socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(plain_socket.IPPROTO_TCP, plain_socket.TCP_NODELAY, 1)
            error = sock.connect_ex(self._address)
            if error == errno.EINPROGRESS:
                socket.wait_write(sock.fileno())
                error = sock.getsockopt(plain_socket.SOL_SOCKET, plain_socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
        except BaseException:
            sock.close()
            raise
        return Connection(sock)

    def give_back(self, connection: Connection, *, reusable: bool) -> None:
        """The request is over."""
        if reusable and self._keep_alive:
            connection.kept = True
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().close()
