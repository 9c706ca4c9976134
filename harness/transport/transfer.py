"""One transfer as its sender sees it: offered, accepted, layers handed over, acknowledged.

The phases that an error names: offer (until the receiver's first credit), transfer (until
``finish``), acknowledge (until the receiver's Ack). Its user calls it from one event loop; lanes
take chunks and bring answers. All state is under the lock of the pool.
"""

import asyncio
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from harness.transport.frames import (
    MAX_META_BYTES,
    Code,
    Control,
    Done,
    Error,
    Offer,
    Resume,
    TransferError,
)

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receiver's word that every byte arrived; the moment is when the sender read it.

    ``retransmits`` counts segments sent again on the connections to this receiver while the
    transfer was open, those of other transfers included; None where there is no TCP_INFO.
    """

    payload_bytes: int
    acked_mono_ns: int
    retransmits: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Bytes that go as one frame; sent again, they have the same bounds.

    They begin in ``layer`` at ``offset``; each view lies in one layer, the next in the next.
    """

    transfer: "Transfer"
    layer: int
    offset: int
    views: tuple[memoryview, ...]
    length_bytes: int


class Controller(Protocol):
    """A connection that carries what is said about a transfer."""

    def send(self, frame: Control) -> None: ...


class Pool(Protocol):
    """The connections that a transfer shares with others."""

    peer: str
    lock: threading.RLock

    def enqueue(self, transfer: "Transfer", nbytes: int) -> None: ...
    def forget(self, transfer: "Transfer", unsent_bytes: int) -> None: ...
    def detach(self) -> None: ...
    def retransmits(self) -> int | None: ...


class Transfer:
    """Made by ``KvSender.open``. Ends with ``finish``, ``abort`` or a failure, which raises."""

    def __init__(
        self,
        pool: Pool,
        control: Controller,
        offer: Offer,
        ack_timeout_s: float,
        on_layer: Callable[[int], None] | None,
    ) -> None:
        self.room = offer.room
        self.number = offer.transfer
        self.layer_bytes = offer.layer_bytes
        self.total_bytes = sum(offer.layer_bytes)
        self.sent_bytes = 0
        self.control: Controller | None = control
        self._pool, self._offer = pool, offer
        self._loop = asyncio.get_running_loop()
        self._ack_timeout_s, self._on_layer = ack_timeout_s, on_layer
        #: Of each layer that is not handed over whole, where the rest of it begins.
        self._unsent_layers = {k: 0 for k, length in enumerate(offer.layer_bytes) if length > 0}
        self._pieces: deque[tuple[int, int, memoryview]] = deque()  # layer, offset, bytes to go
        self._again: deque[Chunk] = deque()
        self._asking = False
        self._known_bytes = 0
        self._starts = tuple(accumulate(offer.layer_bytes, initial=0))
        self._credit_bytes: int | None = None
        self._arrived: set[int] = set()
        self._attempt = 0
        self._phase = "offer"
        self._done: Done | None = None
        self._receipt: Receipt | None = None
        self._failure: TransferError | None = None
        self._detached = False
        self._waiter: asyncio.Future[None] | None = None
        self._retransmits_before = pool.retransmits()

    @property
    def failure(self) -> TransferError | None:
        """Why the transfer has failed, which its next call will raise; None while it has not."""
        return self._failure

    @property
    def acknowledged(self) -> bool:
        """Whether the receiver has everything."""
        return self._receipt is not None

    def send_layer(self, layer: int, data: Buffer) -> None:
        """Hand over one whole layer; it is sent as soon as connections take it.

        ``data`` is not copied and must not change until ``finish`` or ``abort`` has returned or
        raised, or ``on_layer`` has said that this layer has arrived. A layer of no bytes need not
        be handed over.
        """
        self._raise_failure()
        view = memoryview(data).cast("B")
        with self._pool.lock:
            if self._failure is None and self._offered(layer) != len(view):
                raise self._error(
                    f"layer {layer} has {len(view)} bytes; {self.layer_bytes[layer]} were offered"
                )
            self._hand_over(layer, 0, view)

    def send_part(self, layer: int, offset: int, data: Buffer) -> None:
        """Hand over a part of a layer, as ``send_layer`` does a whole one. Parts come in the order
        in which they lie; the last one ends with the layer."""
        self._raise_failure()
        with self._pool.lock:
            self._hand_over(layer, offset, memoryview(data).cast("B"))

    async def finish(self, meta: bytes = b"", deadline_mono_s: float | None = None) -> Receipt:
        """Wait for the receiver's acknowledgement that every byte arrived with a right checksum."""
        self._raise_failure()
        with self._pool.lock:
            if self._phase != "transfer":
                raise self._error("finish was called twice")
            if self._unsent_layers:
                layers = sorted(self._unsent_layers)
                problem = f"{len(layers)} layers were never handed over, the first is {layers[0]}"
                self.fail(problem, tell=Code.ABORTED)
            elif len(meta) > MAX_META_BYTES:
                problem = f"meta of {len(meta)} bytes; at most {MAX_META_BYTES} are allowed"
                self.fail(problem, tell=Code.ABORTED)
            else:
                self._phase = "acknowledge"
                self._done = Done(self.room, self.total_bytes, meta, self.number)
                self._say(self._done)
        if deadline_mono_s is None:
            deadline_mono_s = time.monotonic() + self._ack_timeout_s
        await self._wait(deadline_mono_s, lambda: self._receipt is not None)
        assert self._receipt is not None
        return self._receipt

    def abort(self, reason: str) -> None:
        """Give the transfer up and tell the receiver; does nothing once it has ended.

        When it returns no buffer that was handed over is read any more.
        """
        self.fail(reason, tell=Code.ABORTED)
        self._detach()

    # Called by the pool

    async def accepted(self, deadline_mono_s: float) -> None:
        """Offer the transfer and wait for the first credit."""
        with self._pool.lock:
            self._say(self._offer)
        await self._wait(deadline_mono_s, lambda: self._credit_bytes is not None)

    def sendable(self) -> bool:
        """Whether there is a chunk that the credit covers."""
        return (bool(self._again) and not self._asking) or (
            bool(self._pieces) and self.sent_bytes < (self._credit_bytes or 0)
        )

    def next_chunks(self, most_bytes: int, whole: bool) -> list[Chunk]:
        """Take the next chunk, or with ``whole`` every chunk that is left of a layer."""
        if self._again and not self._asking:
            return [self._again.popleft()]
        assert self._credit_bytes is not None
        left_bytes = self._credit_bytes - self.sent_bytes
        if not whole:
            return [self._next_chunk(min(left_bytes, most_bytes))]
        layer, offset, view = self._take_piece(left_bytes)
        views = [view[at : at + most_bytes] for at in range(0, len(view), most_bytes)]
        return [
            Chunk(self, layer, offset + index * most_bytes, (each,), len(each))
            for index, each in enumerate(views)
        ]

    def send_again(self, chunk: Chunk) -> None:
        """The connection that carried it was lost; ``move`` asks whether it has arrived."""
        if self._failure is None and self._receipt is None:
            self._again.append(chunk)
            self._pool.enqueue(self, chunk.length_bytes)

    def move(self, control: Controller) -> None:
        """Go on over another connection: what was said on the lost one may not have arrived."""
        self.control = control
        self._attempt += 1
        if self._credit_bytes is None:
            self._say(replace(self._offer, attempt=self._attempt))
            return
        self._asking = True
        self._say(Resume(self.room, self.number, self._attempt))
        if self._done is not None:
            self._say(self._done)

    def credit(self, limit_bytes: int) -> None:
        """The receiver takes payload up to this total; the first credit accepts the offer."""
        first = self._credit_bytes is None
        self._credit_bytes = max(limit_bytes, self._credit_bytes or 0)
        if first:
            self._phase = "transfer"
            self._wake()
        self._pool.enqueue(self, 0)

    def arrived(self, pieces: tuple[tuple[int, int], ...]) -> bool:
        """The answer to a Resume: nothing of this is sent again. Whether it has become more."""
        starts = [start for start, _ in pieces]
        self._asking = False
        chunks, self._again = self._again, deque()
        for chunk in chunks:
            start = self._starts[chunk.layer] + chunk.offset
            at = bisect_right(starts, start) - 1
            if at < 0 or pieces[at][1] < start + chunk.length_bytes:
                self._again.append(chunk)
        left_bytes = sum(chunk.length_bytes for chunk in self._again)
        self._pool.enqueue(self, left_bytes - sum(chunk.length_bytes for chunk in chunks))
        before_bytes, self._known_bytes = self._known_bytes, sum(end - at for at, end in pieces)
        return self._known_bytes > before_bytes

    def layer_arrived(self, layer: int) -> None:
        """The receiver has a whole layer; it may say so again after a connection was lost."""
        if self._on_layer is None or layer in self._arrived:
            return
        if layer < len(self.layer_bytes) and self.layer_bytes[layer] > 0:
            self._arrived.add(layer)
            self._loop.call_soon_threadsafe(self._on_layer, layer)

    def acknowledge(self, payload_bytes: int) -> None:
        """The receiver has everything."""
        if self._receipt is not None:
            return  # said again after a connection was lost
        now_ns = time.monotonic_ns()
        if self._done is None or payload_bytes != self.total_bytes:
            self.fail(
                f"the receiver acknowledged {payload_bytes} bytes; {self.sent_bytes} of "
                f"{self.total_bytes} have been sent",
                tell=Code.PROTOCOL,
            )
            return
        after, before = self._pool.retransmits(), self._retransmits_before
        again = None if after is None or before is None else max(0, after - before)
        for layer in range(len(self.layer_bytes)):
            self.layer_arrived(layer)
        self._receipt = Receipt(payload_bytes, now_ns, again)
        self._end()

    def fail(self, problem: str, tell: Code | None = None) -> None:
        """End the transfer with an error, which the next or the waiting call raises."""
        with self._pool.lock:
            if self._failure is not None or self._receipt is not None:
                return
            self._failure = self._error(problem)
            if tell is not None:
                self._say(Error(self.room, tell, problem, self.number))
            self._end()

    # Internal, with the lock held

    def _offered(self, layer: int) -> int:
        """Bytes of a layer."""
        if not 0 <= layer < len(self.layer_bytes):
            raise self._error(f"layer {layer} of {len(self.layer_bytes)}")
        return self.layer_bytes[layer]

    def _hand_over(self, layer: int, offset: int, view: memoryview) -> None:
        if self._failure is not None or not len(view):
            return  # it failed since it was looked at; the next call raises it
        size, end = self._offered(layer), offset + len(view)
        if layer not in self._unsent_layers:
            raise self._error(f"layer {layer} was handed over twice")
        if offset != self._unsent_layers[layer] or end > size:
            raise self._error(
                f"bytes {offset} to {end} of layer {layer} were handed over; of its {size} those "
                f"from {self._unsent_layers[layer]} on come next"
            )
        self._unsent_layers[layer] = end
        if end == size:
            del self._unsent_layers[layer]
        self._pieces.append((layer, offset, view))
        self._pool.enqueue(self, len(view))

    def _next_chunk(self, most_bytes: int) -> Chunk:
        """As much as is ready, over the ends of layers: small layers do not make small frames.

        Not where layers are reported, since the report of one would wait for the next.
        """
        layer, offset, view = self._take_piece(most_bytes)
        views, length = [view], len(view)
        while length < most_bytes and self._pieces and self._on_layer is None:
            next_layer, next_offset, _ = self._pieces[0]
            if self._starts[next_layer] + next_offset != self._starts[layer] + offset + length:
                break
            view = self._take_piece(most_bytes - length)[2]
            views.append(view)
            length += len(view)
        return Chunk(self, layer, offset, tuple(views), length)

    def _take_piece(self, most_bytes: int) -> tuple[int, int, memoryview]:
        """Layer, offset and bytes of what comes next; what is left of it stays in front."""
        layer, offset, view = self._pieces.popleft()
        if most_bytes < len(view):
            self._pieces.appendleft((layer, offset + most_bytes, view[most_bytes:]))
            view = view[:most_bytes]
        self.sent_bytes += len(view)
        return layer, offset, view

    def _say(self, frame: Control) -> None:
        if self.control is not None:
            self.control.send(frame)

    def _end(self) -> None:
        unsent_bytes = sum(len(view) for _, _, view in self._pieces)
        unsent_bytes += sum(chunk.length_bytes for chunk in self._again)
        self._pieces.clear()
        self._again.clear()
        self._pool.forget(self, unsent_bytes)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            self._loop.call_soon_threadsafe(_set, waiter)

    async def _wait(self, deadline_mono_s: float, over: Callable[[], bool]) -> None:
        """Until the phase is over; the deadline and a cancellation end the transfer."""
        waiter = self._loop.create_future()
        with self._pool.lock:
            if self._failure is not None or over():
                waiter.set_result(None)
            else:
                self._waiter = waiter
        try:
            async with asyncio.timeout(max(0.0, deadline_mono_s - time.monotonic())):
                await waiter
        except TimeoutError:
            self.abort(
                f"no answer by the deadline; {self.sent_bytes} of {self.total_bytes} bytes had "
                "been handed to TCP"
            )
        except BaseException:
            self.abort("the sender's user gave it up")
            raise
        self._raise_failure()

    # Without it

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._detach()
            raise self._failure

    def _detach(self) -> None:
        """Frames of a failed transfer may wait to be written while its user reuses the buffers,
        and a receiver that has not heard of the failure could take those bytes for its KV."""
        if self._failure is not None and not self._detached and self.sent_bytes:
            self._detached = True
            self._pool.detach()

    def _error(self, problem: str) -> TransferError:
        return TransferError(self.room, self._pool.peer, self._phase, problem)


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
