"""The bytes of one connection: a socket as it is, or with TLS over it. Neither ever blocks.

``receive`` and ``send`` return None where they would have blocked. TLS takes and gives one buffer
at a time (OpenSSL has no scatter and gather).
"""

import socket
import ssl
import sys
from collections.abc import Sequence
from typing import Protocol

Buffers = Sequence[memoryview | bytes]
#: Fewer are not worth the system call that asks to wait for them.
_LEAST_AWAITED_BYTES = 64 * 1024
_NO_LOWAT_BYTES = 2**31 - 1


class Channel(Protocol):
    """What a connection asks of its bytes."""

    #: Whether ``send`` takes of the first buffer only.
    one_at_a_time: bool

    @property
    def sock(self) -> socket.socket:
        """The socket, to wait for and to ask about."""

    def wake_at(self, nbytes: int) -> None:
        """Be readable only when so many bytes have come (or the stream has ended), where it can."""

    def shake_hands(self) -> bool:
        """Go on with the channel's own handshake; whether it is over. OSError if it fails."""

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        """Read into the buffers in turn; 0 at the end of the stream."""

    def send(self, buffers: Buffers, nbytes: int) -> int | None:
        """Bytes taken of all these, from the front of the first buffer on."""

    def pending(self) -> bool:
        """Whether bytes wait that the socket's readiness does not tell of."""

    def close(self) -> None:
        """Close the socket."""


class PlainChannel:
    """TCP as it is.

    A socket with ``notsent_lowat_bytes`` (its TCP_NOTSENT_LOWAT) is writable while less than half
    of that is unsent, and a call then takes about the other half. A larger batch is taken whole in
    one call, which is one wake in place of two or three.
    """

    one_at_a_time = False

    def __init__(self, sock: socket.socket, notsent_lowat_bytes: int | None = None) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._wakes_at = 1
        self._lowat_bytes = notsent_lowat_bytes if sys.platform == "linux" else None

    def wake_at(self, nbytes: int) -> None:
        # The kernel wakes earlier when its buffer or the window is full, so nothing can wait for
        # what cannot come.
        nbytes = nbytes if nbytes >= _LEAST_AWAITED_BYTES else 1
        if nbytes != self._wakes_at and sys.platform == "linux":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes_at = nbytes

    def shake_hands(self) -> bool:
        return True

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        try:
            return self.sock.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return None

    def send(self, buffers: Buffers, nbytes: int) -> int | None:
        lowat_bytes = self._lowat_bytes
        try:
            if lowat_bytes is None or 2 * nbytes <= lowat_bytes:
                return self.sock.sendmsg(buffers)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NO_LOWAT_BYTES)
            try:
                return self.sock.sendmsg(buffers)
            finally:
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, lowat_bytes)
        except BlockingIOError:
            return None

    def pending(self) -> bool:
        return False

    def close(self) -> None:
        self.sock.close()


class TlsChannel:
    """TLS over TCP; the peer's certificate has been checked when ``shake_hands`` returns true."""

    one_at_a_time = True

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None
    ) -> None:
        sock.setblocking(False)
        self.sock: ssl.SSLSocket = context.wrap_socket(
            sock,
            server_side=server_name is None,
            server_hostname=server_name,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=True,
        )

    def shake_hands(self) -> bool:
        try:
            self.sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        return True

    def receive(self, buffers: Sequence[memoryview]) -> int | None:
        try:
            return self.sock.recv_into(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def send(self, buffers: Buffers, nbytes: int) -> int | None:  # noqa: ARG002 - one at a time
        try:
            return self.sock.send(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def wake_at(self, nbytes: int) -> None:
        """Of records, which are what the kernel has, no one knows how many make ``nbytes``."""

    def pending(self) -> bool:
        return self.sock.pending() > 0

    def close(self) -> None:
        self.sock.close()
