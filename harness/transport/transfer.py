"""One transfer as its sender sees it: offered, accepted, layers handed over, acknowledged.

The phases that an error names: offer (until the receiver's first credit), transfer (until
``finish``), acknowledge (until the receiver's Ack).
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from harness.transport.frames import MAX_META_BYTES, Code, Done, Error, Offer, TransferError
from harness.transport.outbound import Outbound
from harness.transport.wire import encode_data_head

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receiver's word that every byte arrived; the moment is when the sender read it."""

    payload_bytes: int
    acked_mono_ns: int


class Pool(Protocol):
    """The connections that a transfer shares with others."""

    peer: str

    def enqueue(self, transfer: "Transfer") -> None: ...
    def forget(self, transfer: "Transfer") -> None: ...


class Transfer:
    """Made by ``KvSender.open``. Ends with ``finish``, ``abort`` or a failure, which raises."""

    def __init__(
        self, pool: Pool, control: Outbound, offer: Offer, chunk_bytes: int, ack_timeout_s: float
    ) -> None:
        self.room = offer.room
        self.layer_bytes = offer.layer_bytes
        self.total_bytes = sum(offer.layer_bytes)
        self.sent_bytes = 0
        self._pool, self._control = pool, control
        self._chunk_bytes, self._ack_timeout_s = chunk_bytes, ack_timeout_s
        self._unsent_layers = {k for k, length in enumerate(offer.layer_bytes) if length > 0}
        self._pieces: deque[tuple[int, int, memoryview]] = deque()  # layer, offset, bytes to go
        self._credit_bytes: int | None = None
        self._queued = False
        self._used = {control}
        self._phase = "offer"
        self._receipt: Receipt | None = None
        self._failure: TransferError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def failure(self) -> TransferError | None:
        """Why the transfer has failed, which its next call will raise; None while it has not."""
        return self._failure

    def send_layer(self, layer: int, data: Buffer) -> None:
        """Hand over one whole layer; it is sent as soon as connections take it.

        ``data`` is not copied and must not change until the transfer has ended. A layer of no bytes
        need not be handed over.
        """
        self._raise_failure()
        view = memoryview(data).cast("B")
        if not 0 <= layer < len(self.layer_bytes):
            raise self._error(f"layer {layer} of {len(self.layer_bytes)}")
        if len(view) != self.layer_bytes[layer]:
            raise self._error(
                f"layer {layer} has {len(view)} bytes; {self.layer_bytes[layer]} were offered"
            )
        if not len(view):
            return
        if layer not in self._unsent_layers:
            raise self._error(f"layer {layer} was handed over twice")
        self._unsent_layers.discard(layer)
        self._pieces.append((layer, 0, view))
        self._enqueue()

    async def finish(self, meta: bytes = b"", deadline_mono_s: float | None = None) -> Receipt:
        """Wait for the receiver's acknowledgement that every byte arrived with a right checksum."""
        self._raise_failure()
        if self._phase != "transfer":
            raise self._error("finish was called twice")
        problem = None
        if self._unsent_layers:
            layers = sorted(self._unsent_layers)
            problem = f"{len(layers)} layers were never handed over, the first is {layers[0]}"
        elif len(meta) > MAX_META_BYTES:
            problem = f"meta of {len(meta)} bytes; at most {MAX_META_BYTES} are allowed"
        if problem is not None:
            self.abort(problem)
            raise self._error(problem)
        self._phase = "acknowledge"
        self._control.send(Done(self.room, self.total_bytes, meta))
        if deadline_mono_s is None:
            deadline_mono_s = time.monotonic() + self._ack_timeout_s
        await self._wait(deadline_mono_s)
        assert self._receipt is not None
        return self._receipt

    def abort(self, reason: str) -> None:
        """Give the transfer up and tell the receiver; does nothing once it has ended."""
        self.fail(reason, tell=Code.ABORTED)

    # Called by the pool

    async def accepted(self, deadline_mono_s: float) -> None:
        """Wait for the first credit."""
        await self._wait(deadline_mono_s)

    def uses(self, connection: Outbound) -> bool:
        """Whether bytes of the transfer may be on that connection."""
        return connection in self._used

    def send_chunk(self, connection: Outbound, checksum: bool) -> bool:
        """Send the next chunk; whether there is another one that the credit covers."""
        self._queued = False
        if self._failure is not None or not self._sendable():
            return False
        assert self._credit_bytes is not None
        layer, offset, view = self._pieces.popleft()
        length = min(len(view), self._chunk_bytes, self._credit_bytes - self.sent_bytes)
        chunk = view[:length]
        if length < len(view):
            self._pieces.appendleft((layer, offset + length, view[length:]))
        connection.send_data(encode_data_head(self.room, layer, offset, chunk, checksum), chunk)
        self._used.add(connection)
        self.sent_bytes += length
        self._queued = self._sendable()
        return self._queued

    def credit(self, limit_bytes: int) -> None:
        """The receiver takes payload up to this total; the first credit accepts the offer."""
        first = self._credit_bytes is None
        self._credit_bytes = max(limit_bytes, self._credit_bytes or 0)
        if first:
            self._phase = "transfer"
            self._wake()
        self._enqueue()

    def acknowledge(self, payload_bytes: int) -> None:
        """The receiver has everything."""
        if self._phase != "acknowledge" or payload_bytes != self.total_bytes:
            self.fail(
                f"the receiver acknowledged {payload_bytes} bytes; {self.sent_bytes} of "
                f"{self.total_bytes} have been sent",
                tell=Code.PROTOCOL,
            )
            return
        self._receipt = Receipt(payload_bytes, time.monotonic_ns())
        self._end()

    def fail(self, problem: str, tell: Code | None = None) -> None:
        """End the transfer with an error, which the next or the waiting call raises."""
        if self._failure is not None or self._receipt is not None:
            return
        self._failure = self._error(problem)
        if tell is not None:
            self._control.send(Error(self.room, tell, problem))
        self._pieces.clear()
        self._end()

    # Internal

    def _sendable(self) -> bool:
        return bool(self._pieces) and self.sent_bytes < (self._credit_bytes or 0)

    def _enqueue(self) -> None:
        if not self._queued and self._sendable():
            self._queued = True
            self._pool.enqueue(self)

    def _end(self) -> None:
        self._pool.forget(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, deadline_mono_s: float) -> None:
        """Until the phase is over; the deadline and a cancellation end the transfer."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(0.0, deadline_mono_s - time.monotonic())):
                await self._waiter
        except TimeoutError:
            self.abort(
                f"no answer by the deadline; {self.sent_bytes} of {self.total_bytes} bytes had "
                "been handed to TCP"
            )
        except BaseException:
            self.abort("the sender's user gave it up")
            raise
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _error(self, problem: str) -> TransferError:
        return TransferError(self.room, self._pool.peer, self._phase, problem)
