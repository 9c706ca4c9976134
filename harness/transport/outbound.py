"""One connection to a receiver: the sender's half of the handshake, then frames handed upwards.

Writing is bounded: once more than ``high_bytes`` wait in this process the connection is not
``writable`` until most of them are gone. Payloads are passed on as views, not copied (asyncio's
own loop before Python 3.12 copies what the kernel does not take at once).
"""

import asyncio
import time
from collections.abc import Callable
from typing import cast

from harness.core import TransportError
from harness.transport.frames import (
    NO_ROOM,
    ROLE_SENDER,
    Challenge,
    Control,
    Error,
    Frame,
    Hello,
    Welcome,
    WireError,
)
from harness.transport.handshake import new_nonce, proof, proofs_match
from harness.transport.tcp_info import SocketLike, TcpSample, sample, set_pacing, tune_sender
from harness.transport.wire import Decoder, encode_control


class Outbound(asyncio.Protocol):
    """Client side of one connection. ``welcomed`` ends when both have proven the secret."""

    def __init__(
        self,
        index: int,
        secret: bytes,
        session: bytes,
        on_frame: Callable[[Frame], None],
        on_writable: Callable[[], None],
        on_lost: Callable[["Outbound", str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.index = index
        self.writable = True
        self.alive = True
        self.max_payload_bytes = 0
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._secret, self._session = secret, session
        self._on_frame, self._on_writable, self._on_lost = on_frame, on_writable, on_lost
        self._nonce = new_nonce()
        self._expected_proof: bytes | None = None
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._reason = "the connection was closed by the peer"

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait in this process for the kernel to take them."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def tune(self, high_bytes: int, dead_after_s: float, pacing_bytes_per_s: float | None) -> None:
        """Set the bounds of writing and the socket's options."""
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=high_bytes, low=high_bytes // 4)
        sock: SocketLike = self._transport.get_extra_info("socket")
        tune_sender(sock, high_bytes, dead_after_s)
        if pacing_bytes_per_s is not None:
            set_pacing(sock, pacing_bytes_per_s)

    def sample(self, peer: str) -> TcpSample:
        """This connection's TCP_INFO now."""
        assert self._transport is not None
        sock: SocketLike = self._transport.get_extra_info("socket")
        return sample(sock, time.monotonic_ns(), peer, self.index, self.queued_bytes)

    def send(self, frame: Control) -> None:
        if self.alive and self._transport is not None:
            self._transport.write(encode_control(frame))

    def send_data(self, head: bytes, payload: memoryview) -> None:
        """Queue one data frame; ``payload`` must not change until the transfer is acknowledged."""
        assert self._transport is not None
        self._transport.writelines((head, payload))

    def close(self, reason: str) -> None:
        """Write what is queued, then close."""
        self._retire(reason)
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once."""
        self._retire(reason)
        if self._transport is not None:
            self._transport.abort()

    def _retire(self, reason: str) -> None:
        if self.alive:
            self._reason = reason
        self.alive = self.writable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                if isinstance(frame, Error) and frame.room == NO_ROOM:
                    self.abort(f"refused: {frame.message} ({frame.code.name})")
                    return
                if self.welcomed.done():
                    self._on_frame(frame)
                else:
                    self._shake_hands(frame)
        except WireError as error:
            self.abort(f"the peer broke the protocol: {error}")

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = self.alive
        self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self.alive:
            self._reason = f"the connection was lost: {exc}"
        self.alive = self.writable = False
        if not self.welcomed.done():
            self.welcomed.set_exception(TransportError(self._reason))
            self.welcomed.exception()  # whoever awaits it still gets it; nobody may be
        self._on_lost(self, self._reason)
        self.lost.set_result(None)

    def _shake_hands(self, frame: Frame) -> None:
        match frame:
            case Challenge(nonce) if self._expected_proof is None:
                fields = (self._secret, ROLE_SENDER, self._session, nonce, self._nonce)
                self._expected_proof = proof("server", *fields)
                own = proof("client", *fields)
                self.send(Hello(ROLE_SENDER, self._session, self._nonce, own))
            case Welcome(given, max_payload_bytes) if self._expected_proof is not None:
                if not proofs_match(self._expected_proof, given):
                    raise WireError("it does not know this run's secret")
                if max_payload_bytes == 0:
                    raise WireError("it takes no payload")
                self.max_payload_bytes = max_payload_bytes
                self._decoder.unlock(max_payload_bytes)
                self.welcomed.set_result(None)
            case _:
                raise WireError(f"{type(frame).__name__} in the handshake")
