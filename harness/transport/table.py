"""The table of a receiver's rooms: what each step does to one, and what is to be said then.

Rooms run from waiting to receiving, landed and delivered. Every method wants the lock held, and
returns what is to be said or done to connections once it is not.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

from harness.transport.deadlines import Deadlines
from harness.transport.ended import Ended
from harness.transport.expectations import Expectation, Expectations
from harness.transport.frames import (
    REPORT_LAYERS,
    Ack,
    Arrived,
    Code,
    Credit,
    Error,
    LayerDone,
    Offer,
    TransferError,
)
from harness.transport.grants import Grants, Room
from harness.transport.inbound import Inbound
from harness.transport.limits import ReceiverLimits
from harness.transport.rooms import Claim, Landing, Received, RoomError

#: To be done without the lock, in this order.
Acts = list[Callable[[], None]]


class RoomTable:
    """``lock`` covers all of it, and everything that hangs on it."""

    def __init__(
        self,
        limits: ReceiverLimits,
        loop: asyncio.AbstractEventLoop,
        expired: Callable[[Expectation], None],
        cancelled: Callable[[Expectation], None],
        hold_expired: Callable[[Room], None],
    ) -> None:
        self.lock = threading.RLock()
        self.rooms: dict[int, Room] = {}
        self.grants = Grants(limits)
        self.ended = Ended()
        self.expectations = Expectations(loop, expired, cancelled)
        #: Rooms that nobody expects yet.
        self.held = Deadlines(limits.hold_s, loop, self.lock, hold_expired)
        self.closed = False
        self._limits = limits

    @property
    def expected(self) -> dict[int, Expectation]:
        return self.expectations.waiting

    def mine(self, peer: Inbound, room: int, transfer: int) -> Room | None:
        entry = self.rooms.get(room)
        if entry is None:
            return None
        landing = entry.landing
        return entry if (landing.session, landing.transfer) == (peer.session, transfer) else None

    def goes_on(self, entry: Room, peer: Inbound, attempt: int) -> Acts:
        """The room's answers go to this connection, unless it has moved on since."""
        if attempt < entry.attempt:
            return []
        entry.control, entry.attempt = peer, attempt
        acts = self.state(entry)
        if entry.state == "receiving":
            landing = entry.landing
            arrived = Arrived(landing.room, landing.pieces, landing.transfer)
            acts.append(partial(peer.send, arrived))
        return acts

    def state(self, entry: Room) -> Acts:
        landing, send = entry.landing, entry.control.send
        if entry.state == "waiting":
            return []
        if entry.state != "receiving":
            return [partial(send, Ack(landing.room, landing.total_bytes, landing.transfer))]
        acts: Acts = [partial(send, Credit(landing.room, landing.total_bytes, landing.transfer))]
        if landing.flags & REPORT_LAYERS:
            acts += [self.whole_layer(entry, layer) for layer in landing.whole_layers]
        return acts

    def whole_layer(self, entry: Room, layer: int) -> Callable[[], None]:
        landing = entry.landing
        length = landing.layer_bytes[layer]
        return partial(entry.control.send, LayerDone(landing.room, layer, length, landing.transfer))

    def accepting(self, peer: Inbound, offer: Offer) -> Acts:
        refusal = self.refusal(offer)
        if refusal is not None:
            return [partial(peer.send, Error(offer.room, *refusal, offer.transfer))]
        assert peer.session is not None
        self.ended.begin(offer.room)
        entry = Room(Landing(offer, peer.session, peer.name), peer, offer.attempt)
        self.rooms[offer.room] = entry
        if offer.room not in self.expected:
            self.held.add(entry)
        return self.granted(self.grants.ask(entry))

    def refusal(self, offer: Offer) -> tuple[Code, str] | None:
        limits, total_bytes = self._limits, sum(offer.layer_bytes)
        failure = self.ended.failure(offer.room)
        if self.closed:
            return Code.CLOSED, "the receiver is closing"
        if offer.room in self.rooms:
            return Code.DUPLICATE_ROOM, "another transfer has this room"
        if failure is not None:
            return Code.DUPLICATE_ROOM, f"the room has failed already: {failure}"
        if offer.flags & ~REPORT_LAYERS:
            return Code.UNSUPPORTED, f"offer flags {offer.flags:#x} are not known here"
        if total_bytes > limits.max_buffer_bytes:
            return Code.NO_BUFFER, (
                f"{total_bytes} bytes never fit: the receive buffers have "
                f"{limits.max_buffer_bytes} bytes in all"
            )
        if len(self.rooms) >= limits.max_rooms:
            return Code.NO_BUFFER, f"all {limits.max_rooms} rooms are in use"
        held = len(self.held)
        if offer.room not in self.expected and held >= limits.max_held_rooms:
            return Code.NO_BUFFER, f"{held} rooms wait for a request already"
        return None

    def granted(self, rooms: list[Room]) -> Acts:
        return [act for room in rooms for act in self.state(room)]

    def taken(self, claim: Claim) -> Acts:
        landing = claim.landing
        entry = self.rooms[landing.room]
        try:
            completed = landing.take(claim, time.monotonic_ns())
        except RoomError as error:
            return self.failing(landing.room, error.code, "transfer", str(error))
        acts: Acts = []
        if landing.flags & REPORT_LAYERS:
            acts += [self.whole_layer(entry, layer) for layer in completed]
        return acts + self.if_landed(entry)

    def if_landed(self, entry: Room) -> Acts:
        landing = entry.landing
        if entry.state != "receiving" or not landing.landed:
            return []
        entry.state = "landed"
        self.ended.acknowledge(
            landing.room, landing.session, landing.transfer, landing.payload_bytes
        )
        expectation = self.expected.pop(landing.room, None)
        if expectation is not None:
            self.expectations.fulfil(expectation, self.deliver(entry))
        return self.state(entry)

    def deliver(self, entry: Room) -> Received:
        entry.state = "delivered"
        self.held.discard(entry)
        entry.received = entry.landing.deliver(partial(self.released, entry))
        return entry.received

    def discarding(self, room: int, reason: str) -> Acts:
        entry = self.rooms.get(room)
        if entry is not None and entry.received is not None:
            return [entry.received.release]
        return self.failing(room, Code.ABORTED, "transfer", reason)

    def failing_open(self, entries: set[Room], code: Code, problem: str) -> Acts:
        """Fail those whose sender has not been told that all is well."""
        return [
            act
            for entry in entries
            if entry.state in ("waiting", "receiving")
            for act in self.failing(entry.landing.room, code, "transfer", problem)
        ]

    def failing(self, room: int, code: Code, phase: str, problem: str) -> Acts:
        """Free the room, remember why, and tell both its sender and its user."""
        entry = self.rooms.get(room)
        if entry is not None and entry.state == "delivered":
            return []  # its memory is its user's
        expectation = self.expected.pop(room, None)
        if entry is None and expectation is None:
            return []
        self.ended.fail(room, problem)
        acts: Acts = []
        peer = "its sender"
        if entry is not None:
            del self.rooms[room]
            self.held.discard(entry)
            landing = entry.landing
            peer = landing.peer
            acts.append(partial(entry.control.send, Error(room, code, problem, landing.transfer)))
            acts += [partial(claim.owner.let_go, claim) for claim in landing.claims]
            acts += self.granted(self.grants.withdraw(entry))
        if expectation is not None:
            error = TransferError(room, peer, phase, problem)
            self.expectations.refuse(expectation, error)
        return acts

    def released(self, entry: Room) -> None:
        with self.lock:
            del self.rooms[entry.landing.room]
            acts = self.granted(self.grants.withdraw(entry))
        do(acts)


def do(acts: Acts) -> None:
    """Without the lock."""
    for act in acts:
        act()
