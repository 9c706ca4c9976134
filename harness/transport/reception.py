"""Every room of a receiver: offered, waiting for memory, receiving, landed, delivered.

Safe to call from any lane and from the user's loop: one lock, held for microseconds, never over a
checksum or a system call; what is to be said is said after it.

Whatever goes wrong with one room is told to its sender and to whoever expects it, and touches no
other. A sender that loses all its connections has ``resume_s`` to come back.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from harness.transport.frames import (
    NO_ROOM,
    REPORT_LAYERS,
    Ack,
    Code,
    Control,
    Credit,
    DataHead,
    Done,
    Error,
    LayerDone,
    Offer,
    TransferError,
)
from harness.transport.grants import Grants, Room
from harness.transport.inbound import Inbound
from harness.transport.limits import ReceiverLimits
from harness.transport.rooms import Claim, Landing, Received, RoomError

#: Rooms that are over and remembered, so that late frames are known and late users are told.
_REMEMBERED_ROOMS = 4096
Value = TypeVar("Value")
Says = list[tuple[Inbound, Control]]


@dataclass(slots=True)
class _Expectation:
    future: asyncio.Future[Received]
    timer: asyncio.TimerHandle


class Reception:
    """The rooms of one receiver. ``loop`` is its user's: futures and timers belong there."""

    def __init__(
        self, limits: ReceiverLimits, loop: asyncio.AbstractEventLoop, address: str
    ) -> None:
        self._limits, self._loop = limits, loop
        self._lock = threading.RLock()
        self._grants = Grants(limits)
        self._rooms: dict[int, Room] = {}
        self._expected: dict[int, _Expectation] = {}
        self._failed: OrderedDict[int, str] = OrderedDict()
        self._acked: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        self._sessions: dict[bytes, set[Inbound]] = {}
        self._gone: dict[bytes, object] = {}
        self._address = address

    @property
    def buffered_bytes(self) -> int:
        """Bytes of all buffers, from the acceptance of an offer to the release of its buffer."""
        return self._grants.granted_bytes

    @property
    def rooms(self) -> int:
        """Rooms that hold a buffer."""
        with self._lock:
            return sum(entry.state != "waiting" for entry in self._rooms.values())

    # The user's side

    def expect(self, room: int, deadline_mono_s: float) -> asyncio.Future[Received]:
        """See ``KvReceiver.expect``; on the user's loop."""
        with self._lock:
            entry = self._rooms.get(room)
            if room in self._expected or (entry is not None and entry.state == "delivered"):
                raise self._error(room, "expect", "it is already expected")
            future: asyncio.Future[Received] = self._loop.create_future()
            if room in self._failed:
                future.set_exception(self._error(room, "expect", self._failed[room]))
                return future
            if entry is not None and entry.state == "landed":
                future.set_result(self._deliver(entry))
                return future
            left_s = max(0.0, deadline_mono_s - time.monotonic())
            timer = self._loop.call_later(left_s, self._expired, room)
            self._expected[room] = _Expectation(future, timer)
        future.add_done_callback(lambda done: self._if_cancelled(room, done))
        return future

    def discard(self, room: int, reason: str) -> None:
        """Drop a room in whatever state it is: fail it, or release its delivered buffer."""
        with self._lock:
            entry = self._rooms.get(room)
            received = entry.received if entry is not None else None
        if received is not None:
            received.release()
        else:
            self._fail(room, Code.ABORTED, "transfer", reason)

    def close(self, reason: str) -> None:
        """Fail every room and expectation."""
        with self._lock:
            rooms = [*self._rooms, *self._expected]
        for room in rooms:
            self.discard(room, reason)

    # What senders say, in any lane

    def joined(self, peer: Inbound) -> None:
        assert peer.session is not None
        with self._lock:
            self._sessions.setdefault(peer.session, set()).add(peer)
            self._gone.pop(peer.session, None)

    def left(self, peer: Inbound) -> None:
        assert peer.session is not None
        with self._lock:
            session, peers = peer.session, self._sessions[peer.session]
            peers.discard(peer)
            if not peers:
                del self._sessions[session]
                absence = self._gone[session] = object()
                self._later(self._limits.resume_s, lambda: self._stayed_away(session, absence))

    def offered(self, peer: Inbound, offer: Offer) -> None:
        with self._lock:
            known = self._mine(peer, offer.room)
            if known is not None and known.landing.layer_bytes == offer.layer_bytes:
                known.control = peer  # the same offer again, over another connection
                says = self._state(known)
            elif (refusal := self._refusal(offer)) is not None:
                says = [(peer, Error(offer.room, *refusal))]
            else:
                says = self._accept(peer, offer)
        self._say(says)

    def resumed(self, peer: Inbound, room: int) -> None:
        with self._lock:
            entry = self._mine(peer, room)
            if entry is None:
                says = self._unknown(peer, room)
            else:
                entry.control = peer
                says = self._state(entry)
        self._say(says)

    def done(self, peer: Inbound, done: Done) -> None:
        says: Says = []
        with self._lock:
            entry = self._mine(peer, done.room)
            if entry is None:
                says = self._unknown(peer, done.room)
            elif entry.state in ("landed", "delivered"):
                says = self._state(entry)
            else:
                try:
                    entry.landing.finish(done)
                    says = self._if_landed(entry)
                except RoomError as error:
                    says = self._failing(done.room, error.code, "transfer", str(error))
        self._say(says)

    def given_up(self, peer: Inbound, room: int, message: str) -> None:
        with self._lock:
            entry = self._mine(peer, room) if room != NO_ROOM else None
            if entry is None or entry.state in ("landed", "delivered"):
                return
        self._fail(room, Code.ABORTED, "transfer", f"the sender gave up: {message}")

    def claim(self, peer: Inbound, head: DataHead) -> Claim | None:
        """Where a payload goes; None drops it: it is late, or wrong, which the sender is told."""
        says: Says = []
        claim = None
        with self._lock:
            entry = self._mine(peer, head.room)
            if entry is None or entry.state == "waiting":
                says = self._unknown(peer, head.room, ack=False)
            elif entry.state == "receiving":
                try:
                    claim = entry.landing.claim(peer, head)
                except RoomError as error:
                    says = self._failing(head.room, error.code, "transfer", str(error))
            first = None
            if claim is not None and claim.aside:
                first = claim.landing.under_way(claim.start, claim.end)
        if first is not None:
            first.owner.abort("a frame under way on it came again over another connection")
        self._say(says)
        return claim

    def take(self, claim: Claim) -> None:
        """The claim's payload is whole: check it and count it."""
        sound = claim.head.intact(claim.view)
        with self._lock:
            landing = claim.landing
            landing.claims.remove(claim)
            if landing.closed:
                says = self._granted(self._grants.give_back(landing))
            elif not sound:
                head = claim.head
                problem = f"wrong checksum in layer {head.layer} at byte {head.offset}"
                says = self._failing(landing.room, Code.CHECKSUM, "transfer", problem)
            else:
                says = self._taken(claim)
        self._say(says)

    def drop(self, claim: Claim) -> None:
        """The claim's connection ended in the middle of its payload."""
        says: Says = []
        with self._lock:
            landing = claim.landing
            landing.claims.remove(claim)
            if landing.closed:
                says = self._granted(self._grants.give_back(landing))
            elif claim.successor is not None:
                says = self._taken(claim.successor)
        self._say(says)

    # With the lock held

    def _mine(self, peer: Inbound, room: int) -> Room | None:
        entry = self._rooms.get(room)
        if entry is None or entry.landing.session != peer.session:
            return None
        return entry

    def _unknown(self, peer: Inbound, room: int, ack: bool = True) -> Says:
        """Late frames of a room that is over are expected; others are the sender's fault."""
        session, payload_bytes = self._acked.get(room, (None, 0))
        if session == peer.session and room not in self._rooms:
            return [(peer, Ack(room, payload_bytes))] if ack else []
        if room in self._failed:
            return [(peer, Error(room, Code.ABORTED, self._failed[room]))] if ack else []
        return [(peer, Error(room, Code.UNKNOWN_ROOM, "no transfer of yours has this room"))]

    def _state(self, entry: Room) -> Says:
        landing = entry.landing
        match entry.state:
            case "waiting":
                return []
            case "receiving":
                return [(entry.control, Credit(landing.room, landing.total_bytes))]
        return [(entry.control, Ack(landing.room, landing.total_bytes))]

    def _refusal(self, offer: Offer) -> tuple[Code, str] | None:
        limits, total_bytes = self._limits, sum(offer.layer_bytes)
        if offer.room in self._rooms:
            return Code.DUPLICATE_ROOM, "another transfer has this room"
        if offer.room in self._failed:
            return Code.DUPLICATE_ROOM, f"the room has failed already: {self._failed[offer.room]}"
        if offer.flags & ~REPORT_LAYERS:
            return Code.UNSUPPORTED, f"offer flags {offer.flags:#x} are not known here"
        if total_bytes > limits.max_buffer_bytes:
            return Code.NO_BUFFER, (
                f"{total_bytes} bytes never fit: the receive buffers have "
                f"{limits.max_buffer_bytes} bytes in all"
            )
        if len(self._rooms) >= limits.max_rooms:
            return Code.NO_BUFFER, f"all {limits.max_rooms} rooms are in use"
        if offer.room not in self._expected:
            held = sum(
                entry.state != "delivered" and room not in self._expected
                for room, entry in self._rooms.items()
            )
            if held >= limits.max_held_rooms:
                return Code.NO_BUFFER, f"{held} rooms wait for a request already"
        return None

    def _accept(self, peer: Inbound, offer: Offer) -> Says:
        assert peer.session is not None
        self._acked.pop(offer.room, None)
        entry = Room(Landing(offer, peer.session, peer.name), peer)
        self._rooms[offer.room] = entry
        if offer.room not in self._expected:
            self._later(self._limits.hold_s, lambda: self._hold_expired(entry))
        return self._granted(self._grants.ask(entry))

    def _granted(self, rooms: list[Room]) -> Says:
        return [said for room in rooms for said in self._state(room)]

    def _taken(self, claim: Claim) -> Says:
        landing = claim.landing
        entry = self._rooms[landing.room]
        try:
            completes = landing.take(claim, time.monotonic_ns())
        except RoomError as error:
            return self._failing(landing.room, error.code, "transfer", str(error))
        says: Says = []
        if completes and landing.flags & REPORT_LAYERS:
            layer = claim.head.layer
            says.append((entry.control, LayerDone(landing.room, layer, landing.layer_bytes[layer])))
        return says + self._if_landed(entry)

    def _if_landed(self, entry: Room) -> Says:
        landing = entry.landing
        if entry.state != "receiving" or not landing.landed:
            return []
        entry.state = "landed"
        _remember(self._acked, landing.room, (landing.session, landing.payload_bytes))
        expectation = self._expected.pop(landing.room, None)
        if expectation is not None:
            received = self._deliver(entry)
            self._to_loop(lambda: _hand_over(expectation, received))
        return [(entry.control, Ack(landing.room, landing.payload_bytes))]

    def _deliver(self, entry: Room) -> Received:
        entry.state = "delivered"
        entry.received = entry.landing.deliver(lambda: self._released(entry))
        return entry.received

    def _failing(self, room: int, code: Code, phase: str, problem: str) -> Says:
        """Free the room, remember why, and tell both its sender and its user."""
        entry, expectation = self._rooms.pop(room, None), self._expected.pop(room, None)
        if entry is None and expectation is None:
            return []
        _remember(self._failed, room, problem)
        says: Says = []
        peer = "its sender"
        if entry is not None:
            peer = entry.landing.peer
            says = [(entry.control, Error(room, code, problem))]
            says += self._granted(self._grants.withdraw(entry))
        if expectation is not None:
            error = TransferError(room, peer, phase, problem)
            self._to_loop(lambda: _refuse(expectation, error))
        return says

    # Without it

    def _fail(self, room: int, code: Code, phase: str, problem: str) -> None:
        with self._lock:
            says = self._failing(room, code, phase, problem)
        self._say(says)

    def _released(self, entry: Room) -> None:
        with self._lock:
            del self._rooms[entry.landing.room]
            says = self._granted(self._grants.withdraw(entry))
        self._say(says)

    def _say(self, says: Says) -> None:
        for peer, frame in says:
            peer.send(frame)

    def _to_loop(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def _later(self, after_s: float, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, after_s, call)

    def _expired(self, room: int) -> None:
        with self._lock:
            entry = self._rooms.get(room)
        if entry is None:
            arrived = "no offer"
        elif entry.state == "waiting":
            arrived = f"no memory was free for {entry.landing.total_bytes} bytes; none"
        else:
            arrived = f"{entry.landing.payload_bytes} bytes"
        self._fail(room, Code.DEADLINE, "transfer", f"{arrived} had arrived by the deadline")

    def _hold_expired(self, entry: Room) -> None:
        room = entry.landing.room
        with self._lock:
            gone = self._rooms.get(room) is not entry or entry.state == "delivered"
            if gone or room in self._expected:
                return
        problem = f"nobody expected it within {self._limits.hold_s:g} s"
        self._fail(room, Code.DEADLINE, "hold", problem)

    def _stayed_away(self, session: bytes, absence: object) -> None:
        with self._lock:
            if self._gone.get(session) is not absence:
                return  # it came back
            del self._gone[session]
            lost = [
                entry.landing
                for entry in self._rooms.values()
                if entry.landing.session == session and entry.state in ("waiting", "receiving")
            ]
        for landing in lost:
            problem = (
                f"the connection was lost after {landing.payload_bytes} of "
                f"{landing.total_bytes} bytes, and did not come back within "
                f"{self._limits.resume_s:g} s"
            )
            self._fail(landing.room, Code.PEER_LOST, "transfer", problem)

    def _if_cancelled(self, room: int, future: asyncio.Future[Received]) -> None:
        if future.cancelled():
            self.discard(room, "the receiver's user cancelled it")

    def _error(self, room: int, phase: str, problem: str) -> TransferError:
        return TransferError(room, f"the receiver on {self._address}", phase, problem)


def _hand_over(expectation: _Expectation, received: Received) -> None:
    expectation.timer.cancel()
    if expectation.future.done():
        received.release()  # cancelled a moment ago
    else:
        expectation.future.set_result(received)


def _refuse(expectation: _Expectation, error: TransferError) -> None:
    expectation.timer.cancel()
    if not expectation.future.done():
        expectation.future.set_exception(error)


def _remember(memory: OrderedDict[int, Value], room: int, value: Value) -> None:
    memory[room] = value
    memory.move_to_end(room)
    if len(memory) > _REMEMBERED_ROOMS:
        memory.popitem(last=False)
