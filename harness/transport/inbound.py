"""One accepted connection: the receiver's half of the handshake, then frames handed upwards.

State runs from challenged (only a Hello is taken, within a deadline) to open, to closed. A frame
that breaks the protocol ends this connection and nothing else.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from harness.transport.frames import (
    NO_ROOM,
    ROLE_SENDER,
    Challenge,
    Code,
    Control,
    Error,
    Frame,
    Hello,
    Welcome,
    WireError,
)
from harness.transport.handshake import new_nonce, proof, proofs_match
from harness.transport.wire import Decoder, encode_control

_READ_BUFFER_BYTES = 512 * 1024
#: Answers that a peer may leave unread before it is given up.
_MAX_UNREAD_BYTES = 1 << 20


class Inbound(asyncio.BufferedProtocol):
    """Server side of one connection. ``session`` is None until the peer has proven the secret."""

    def __init__(
        self,
        secret: bytes,
        max_payload_bytes: int,
        auth_timeout_s: float,
        on_connected: Callable[["Inbound"], bool],
        on_frame: Callable[["Inbound", Frame], None],
        on_lost: Callable[["Inbound"], None],
    ) -> None:
        self.session: bytes | None = None
        self.peer = "unknown peer"
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._secret = secret
        self._max_payload_bytes = max_payload_bytes
        self._auth_timeout_s = auth_timeout_s
        self._on_connected, self._on_frame, self._on_lost = on_connected, on_frame, on_lost
        self._nonce = new_nonce()
        self._decoder = Decoder(_READ_BUFFER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._ended = False
        self._auth_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else self.peer
        if not self._on_connected(self):
            self.abort()
            return
        loop = asyncio.get_running_loop()
        self._auth_timer = loop.call_later(self._auth_timeout_s, self._auth_expired)
        self.send(Challenge(self._nonce))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._decoder.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._decoder.received(nbytes):
                if self._ended:
                    return  # closed by an earlier frame of the same read
                if self.session is None:
                    self._authenticate(frame)
                else:
                    self._on_frame(self, frame)
        except WireError as error:
            self.refuse(Code.PROTOCOL, str(error))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._ended = True
        if self._auth_timer is not None:
            self._auth_timer.cancel()
        self._on_lost(self)
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, frame: Control) -> None:
        """Answer the peer, unless the connection is closing."""
        if self._ended or self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.abort()
            return
        self._transport.write(encode_control(frame))

    def refuse(self, code: Code, message: str) -> None:
        """Tell the peer what was wrong and close."""
        self.send(Error(NO_ROOM, code, message))
        self._ended = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()

    def _auth_expired(self) -> None:
        if self.session is None:
            self.refuse(Code.UNAUTHENTICATED, f"no valid hello within {self._auth_timeout_s:g} s")

    def _authenticate(self, frame: Frame) -> None:
        if not isinstance(frame, Hello):
            self.refuse(Code.PROTOCOL, f"{type(frame).__name__} where a Hello was due")
            return
        fields = (self._secret, frame.role, frame.session, self._nonce, frame.nonce)
        if not proofs_match(proof("client", *fields), frame.proof):
            self.refuse(Code.UNAUTHENTICATED, "the peer does not know this run's secret")
        elif frame.role != ROLE_SENDER:
            self.refuse(Code.UNSUPPORTED, f"role {frame.role} is not served here")
        else:
            self.session = frame.session
            self._decoder.unlock(self._max_payload_bytes)
            self.send(Welcome(proof("server", *fields), self._max_payload_bytes))
