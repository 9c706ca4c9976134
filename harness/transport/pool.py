"""The connections to one receiver and the transfers that share them.

A connection that can take bytes asks for them (``take``), so each gets what it carries, not an
equal part. The transfers that have bytes ready take turns, a quantum each: a short one is not stuck
behind a long one. The quantum is an equal part of what waits, between 16 KiB and ``chunk_bytes``,
so that the last bytes do not all lie on one connection. With ``whole_layers`` a layer stays on the
connection that took it.

A lost connection is replaced while transfers are open: what was not acknowledged on it is sent
again over others. Without any connection for ``resume_timeout_s`` the transfers fail; at once when
the receiver's machine says that nobody listens there any more.
"""

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from harness.core import TransportError
from harness.transport.dialling import SenderSettings, dial
from harness.transport.frames import (
    MAX_NUMBER,
    SESSION_BYTES,
    Ack,
    Arrived,
    Code,
    Control,
    Credit,
    Error,
    LayerDone,
    Offer,
    TransferError,
    WireError,
)
from harness.transport.lane import Lanes
from harness.transport.outbound import Outbound
from harness.transport.tcp_info import TcpSample
from harness.transport.transfer import Chunk, Transfer
from harness.transport.wire import encode_control

_LEAST_QUANTUM_BYTES = 16 * 1024
_LEAST_PAUSE_S, _MOST_PAUSE_S, _LEAST_TRY_S = 0.02, 1.0, 0.05
#: How long a peer may take to read what is queued when the sender closes.
_FAREWELL_S = 0.5


class Pool:
    """Used from one event loop; ``take``, ``answered`` and ``lost`` come from lanes."""

    def __init__(self, settings: SenderSettings, lanes: Lanes, host: str, port: int) -> None:
        self.peer = f"{host}:{port}"
        self.lock = threading.RLock()
        self.checksum = settings.checksum
        self._settings, self._lanes = settings, lanes
        self._host, self._port = host, port
        self._loop = asyncio.get_running_loop()
        self._slots: list[Outbound | None] = [None] * settings.connections
        self._idle: dict[Outbound, None] = {}  # as an ordered set
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._opened = 0
        self._transfers: dict[int, Transfer] = {}
        self._ready: deque[Transfer] = deque()
        self._queued: set[Transfer] = set()
        self._backlog_bytes = 0
        self._retired_retransmits = 0
        self._dead_since_s: float | None = None  # without a connection that got data across
        self._connecting = asyncio.Lock()
        self._mending: asyncio.Task[None] | None = None
        self._closed = False

    # The user's side

    def samples(self) -> list[TcpSample]:
        """TCP_INFO of every open connection."""
        with self.lock:
            alive, backlog_bytes = self._alive(), self._backlog_bytes
        taken = [each.sample(self.peer, backlog_bytes) for each in alive]
        return [one for one in taken if one is not None]

    async def connect(self) -> None:
        """Fill the empty slots."""
        if len(self._alive()) == len(self._slots):
            return
        for error in await self._fill(self._settings.connect_timeout_s):
            raise error

    async def reach(self) -> None:
        """Have connections: all of them at first, later whatever is left of them."""
        if not self._alive():
            await self.connect()

    async def open(self, offer: Offer, on_layer: Callable[[int], None] | None) -> Transfer:
        """Offer a transfer; returns when the receiver has granted its memory."""
        try:
            encode_control(offer)
        except WireError as error:
            raise TransferError(offer.room, self.peer, "offer", str(error)) from error
        with self.lock:
            if offer.room in self._transfers:
                raise TransferError(
                    offer.room, self.peer, "offer", "this sender has it open already"
                )
            alive = self._alive()
            if not alive:
                raise TransferError(offer.room, self.peer, "offer", "every connection is lost")
            control = alive[offer.room % len(alive)]
            offer = replace(offer, transfer=self._opened & MAX_NUMBER)
            self._opened += 1
            transfer = Transfer(self, control, offer, self._settings.ack_timeout_s, on_layer)
            self._transfers[offer.room] = transfer
        self._mend("a connection was lost before")
        await transfer.accepted(time.monotonic() + self._settings.offer_timeout_s)
        return transfer

    async def close(self) -> None:
        """Give up every transfer and close every connection."""
        with self.lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.abort("the sender is closing")
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.gather(self._mending, return_exceptions=True)
        async with self._connecting:
            self._closed = True
        with self.lock:
            connections = self._alive()
        ends = [asyncio.wrap_future(each.ended) for each in connections]
        for connection in connections:
            connection.close("the sender is closing")
        if ends:
            await asyncio.wait(ends, timeout=_FAREWELL_S)
        for connection in connections:
            connection.abort("the sender is closing")
        await asyncio.gather(*ends)

    # For transfers, with the lock held

    def enqueue(self, transfer: Transfer, nbytes: int) -> None:
        """``nbytes`` more are ready, or the credit has grown."""
        self._backlog_bytes += nbytes
        if transfer not in self._queued and transfer.sendable():
            self._queued.add(transfer)
            self._ready.append(transfer)
        self._wake_one()

    def forget(self, transfer: Transfer, unsent_bytes: int) -> None:
        """The transfer has ended, well or badly."""
        self._backlog_bytes -= unsent_bytes
        if self._transfers.get(transfer.room) is transfer:
            del self._transfers[transfer.room]

    def detach(self) -> None:
        """No connection reads a user's buffer when this returns; without the lock."""
        with self.lock:
            connections = [each for each in self._slots if each is not None]
        for connection in connections:
            connection.detach()

    def retransmits(self) -> int | None:
        """Segments sent again so far, on the connections of now and before."""
        with self.lock:
            total = self._retired_retransmits
            for each in self._alive():
                count = each.retransmits
                if count is None:
                    return None
                total += count
            return total

    # For connections, in their lanes

    def take(self, connection: Outbound) -> list[Chunk]:
        """See ``Source``."""
        with self.lock:
            quantum_bytes = self._quantum_bytes()
            most_bytes = min(quantum_bytes, connection.max_payload_bytes)
            chunks: list[Chunk] = []
            taken_bytes = 0
            while taken_bytes < quantum_bytes and (more := self._next_chunks(most_bytes)):
                chunks += more
                taken_bytes += sum(chunk.length_bytes for chunk in more)
            self._backlog_bytes -= taken_bytes
            if chunks:
                self._idle.pop(connection, None)
                self._wake_one()
            else:
                self._idle[connection] = None
            return chunks

    def progressed(self) -> None:
        """See ``Source``."""
        self._dead_since_s = None

    def answered(self, frame: Control) -> None:
        """See ``Source``."""
        if not isinstance(frame, Credit | Arrived | LayerDone | Ack | Error):
            raise WireError(f"a receiver has no {type(frame).__name__} frame for this sender")
        with self.lock:
            transfer = self._transfers.get(frame.room)
            if transfer is None or transfer.number != frame.transfer:
                return  # the answer to one that has been given up
            match frame:
                case Credit(_, limit_bytes):
                    transfer.credit(limit_bytes)
                case Arrived(_, pieces):
                    if transfer.arrived(pieces):
                        self.progressed()
                case LayerDone(_, layer, _):
                    transfer.layer_arrived(layer)
                case Ack(_, payload_bytes):
                    transfer.acknowledge(payload_bytes)
                case Error(_, code, message):
                    transfer.fail(f"the receiver ended it: {message} ({code.name})")

    def faulted(self, connection: Outbound, chunks: list[Chunk], reason: str) -> None:
        """See ``Source``. Sent again, the same chunks could fail every connection in turn."""
        with self.lock:
            touched = {chunk.transfer for chunk in chunks}
            touched |= {each for each in self._transfers.values() if each.control is connection}
            for transfer in touched:
                transfer.fail(reason, tell=Code.ABORTED)

    def lost(self, connection: Outbound, chunks: list[Chunk], reason: str) -> None:
        """See ``Source``."""
        with self.lock:
            self._retired_retransmits += connection.retransmits or 0
            self._idle.pop(connection, None)
            for chunk in chunks:
                chunk.transfer.send_again(chunk)
            lost_chunks = {chunk.transfer for chunk in chunks}
            if self._slots[connection.index] is not connection:
                return  # it never got that far
            self._slots[connection.index] = None
            for transfer in list(self._transfers.values()):
                if transfer.control is connection:
                    transfer.control = None
                elif transfer in lost_chunks and transfer.control is not None:
                    transfer.move(transfer.control)
            self._move_orphans()
            now_s, resume_s = time.monotonic(), self._settings.resume_timeout_s
            if self._dead_since_s is None or now_s - connection.started_mono_s > resume_s:
                self._dead_since_s = now_s
            if not self._closed:
                self._loop.call_soon_threadsafe(self._mend, reason)

    def _alive(self) -> list[Outbound]:
        return [each for each in self._slots if each is not None and each.alive]

    def _quantum_bytes(self) -> int:
        share = -(-self._backlog_bytes // max(1, len(self._alive())))
        return min(self._settings.chunk_bytes, max(_LEAST_QUANTUM_BYTES, share))

    def _next_chunks(self, most_bytes: int) -> list[Chunk]:
        """What the transfer sends whose turn it is."""
        while self._ready:
            transfer = self._ready.popleft()
            self._queued.discard(transfer)
            if transfer.sendable():  # otherwise it has ended, or its credit is used up
                chunks = transfer.next_chunks(most_bytes, self._settings.whole_layers)
                if transfer.sendable():
                    self._queued.add(transfer)
                    self._ready.append(transfer)
                return chunks
        return []

    def _wake_one(self) -> None:
        """One that gets chunks wakes the next."""
        if self._ready and self._idle:
            connection = next(iter(self._idle))
            del self._idle[connection]
            connection.wake()

    def _move_orphans(self) -> None:
        """Have every transfer go on, if a connection is left."""
        alive = self._alive()
        if not alive:
            return
        for transfer in list(self._transfers.values()):
            if transfer.control is None:
                transfer.move(alive[transfer.room % len(alive)])
        for connection in self._idle:
            connection.wake()
        self._idle.clear()

    # Connecting, on the user's loop

    async def _fill(self, within_s: float) -> list[TransportError]:
        """Try every empty slot once; the errors."""
        async with self._connecting:
            if self._closed:
                raise TransferError(None, self.peer, "connect", "the sender has been closed")
            empty = [index for index, each in enumerate(self._slots) if each is None]
            results = await asyncio.gather(
                *(self._open_connection(index, within_s) for index in empty),
                return_exceptions=True,
            )
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, TransportError):
                raise error
        return [error for error in errors if isinstance(error, TransportError)]

    async def _open_connection(self, index: int, within_s: float) -> None:
        settings = self._settings
        phase = "connect"
        connection: Outbound | None = None
        try:
            async with asyncio.timeout(within_s):
                channel = await dial(settings, self._host, self._port)
                phase = "handshake"
                connection = Outbound(
                    channel, self._lanes.next(), index, settings.secret, self._session, self
                )
                connection.start()
                await asyncio.wrap_future(connection.welcomed)
        except (OSError, TransportError) as error:  # TimeoutError is an OSError
            if connection is not None:
                connection.abort("the handshake failed")
            problem = str(error) or f"no answer within {within_s:.3g} s"
            raise TransferError(None, self.peer, phase, problem) from error
        except BaseException:
            if connection is not None:
                connection.abort("given up")
            raise
        with self.lock:
            if connection.alive:
                self._slots[index] = connection
                self._move_orphans()
                connection.wake()

    def _mend(self, reason: str) -> None:
        """Replace what was lost, as long as somebody needs it."""
        if self._closed or self._mending is not None or not self._transfers:
            return
        if len(self._alive()) == len(self._slots):
            return
        self._mending = asyncio.create_task(self._reconnect(reason))
        self._mending.add_done_callback(self._mended)

    def _mended(self, task: "asyncio.Task[None]") -> None:
        self._mending = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._mend("a connection was lost")
        else:
            self._give_up(f"connections could not be replaced: {error!r}")
            self._loop.call_exception_handler({"message": "KV sender", "exception": error})

    async def _reconnect(self, reason: str) -> None:
        """Until every slot is filled; without any connection, for the resume timeout at most."""
        settings = self._settings
        began_s, last = time.monotonic(), "each was lost again"
        pause_s = self._pause_s(began_s)
        while self._transfers:
            await asyncio.sleep(pause_s)
            left_s = (self._dead_since_s or began_s) + settings.resume_timeout_s - time.monotonic()
            if not self._alive() and left_s < 0:
                self._give_up(f"{reason}; no connection could be made again: {last}")
                return
            errors = await self._fill(min(settings.connect_timeout_s, max(_LEAST_TRY_S, left_s)))
            if len(self._alive()) == len(self._slots):
                return
            if errors:
                last = str(errors[0])
            refused = [isinstance(each.__cause__, ConnectionRefusedError) for each in errors]
            if refused and all(refused) and not self._alive():
                self._give_up(f"{reason}; no connection could be made again: {last}")
                return
            pause_s = max(_LEAST_PAUSE_S, self._pause_s(began_s))

    def _pause_s(self, began_s: float) -> float:
        """None at first, then longer the longer it lasts, also when each try is lost at once."""
        since_s = min(began_s, self._dead_since_s or began_s)
        return min((time.monotonic() - since_s) / 2, _MOST_PAUSE_S)

    def _give_up(self, problem: str) -> None:
        with self.lock:
            for transfer in list(self._transfers.values()):
                transfer.fail(problem)
