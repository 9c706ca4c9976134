"""What senders and their user say to a receiver, in any lane and on the user's loop.

One lock covers the table of rooms, held for microseconds, never over a checksum or a system call.
What is to be said or done to connections is listed under the lock and
done after it. A decision and what it rests on are under one hold of the lock: between two, a lane
may deliver the room, after which only its user may end it.

Whatever goes wrong with one room is told to its sender and to whoever expects it, and touches no
other. A sender that loses all its connections has ``resume_s`` to come back.
"""

import asyncio
from functools import partial

from harness.transport.deadlines import Deadlines
from harness.transport.expectations import Expectation
from harness.transport.frames import (
    MAX_NUMBER,
    NO_ROOM,
    Code,
    DataHead,
    Done,
    Error,
    Offer,
    Resume,
    TransferError,
)
from harness.transport.grants import Room
from harness.transport.inbound import Inbound
from harness.transport.limits import ReceiverLimits
from harness.transport.rooms import Claim, Received, RoomError
from harness.transport.table import Acts, RoomTable, do


class Reception:
    """The rooms of one receiver. ``loop`` is its user's: futures and timers belong there."""

    def __init__(
        self, limits: ReceiverLimits, loop: asyncio.AbstractEventLoop, address: str
    ) -> None:
        self._limits, self._address = limits, address
        table = RoomTable(limits, loop, self._expired, self._cancelled, self._hold_expired)
        self._table, self._lock = table, table.lock
        self._sessions: dict[bytes, set[Inbound]] = {}
        #: Sessions that have lost every connection.
        self._away = Deadlines(limits.resume_s, loop, table.lock, self._stayed_away)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of all buffers, from the acceptance of an offer to the release of its buffer."""
        return self._table.grants.granted_bytes

    @property
    def rooms(self) -> int:
        """Rooms that hold a buffer."""
        with self._lock:
            return sum(entry.state != "waiting" for entry in self._table.rooms.values())

    # The user's side

    def expect(self, room: int, deadline_mono_s: float) -> asyncio.Future[Received]:
        """See ``KvReceiver.expect``; on the user's loop."""
        with self._lock:
            entry = self._table.rooms.get(room)
            if self._table.closed:
                raise self._error(room, "the receiver has been closed")
            if room in self._table.expected or (entry is not None and entry.state == "delivered"):
                raise self._error(room, "it is already expected")
            failure = self._table.ended.failure(room)
            if failure is None and (entry is None or entry.state != "landed"):
                if entry is not None:
                    self._table.held.discard(entry)
                return self._table.expectations.add(room, deadline_mono_s)
            future: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
            if failure is not None:
                future.set_exception(self._error(room, failure))
            else:
                assert entry is not None
                future.set_result(self._table.deliver(entry))
            return future

    def discard(self, room: int, reason: str) -> None:
        """Drop a room in whatever state it is: fail it, or release its delivered buffer."""
        with self._lock:
            acts = self._table.discarding(room, reason)
        do(acts)

    def close(self, reason: str) -> None:
        """Fail every room and expectation; no room is taken any more."""
        with self._lock:
            self._table.closed = True
            acts = [
                act
                for room in {*self._table.rooms, *self._table.expected}
                for act in self._table.discarding(room, reason)
            ]
            self._table.held.stop()
            self._away.stop()
        do(acts)

    # What senders say, in any lane

    def joined(self, peer: Inbound) -> None:
        assert peer.session is not None
        with self._lock:
            self._sessions.setdefault(peer.session, set()).add(peer)
            self._away.discard(peer.session)

    def left(self, peer: Inbound) -> None:
        assert peer.session is not None
        with self._lock:
            peers = self._sessions[peer.session]
            peers.discard(peer)
            if not peers:
                del self._sessions[peer.session]
                if not self._table.closed:
                    self._away.add(peer.session)

    def faulted(self, peer: Inbound, claim: Claim | None, reason: str) -> None:
        with self._lock:
            touched = {entry for entry in self._table.rooms.values() if entry.control is peer}
            if claim is not None and not claim.landing.closed:
                touched.add(self._table.rooms[claim.landing.room])
            acts = self._table.failing_open(touched, Code.CLOSED, reason)
        do(acts)

    def offered(self, peer: Inbound, offer: Offer) -> None:
        with self._lock:
            ack = self._table.ended.acknowledgement(peer.session, offer.room, offer.transfer)
            known = self._table.rooms.get(offer.room)
            mine = known is not None and known.landing.session == peer.session
            acts: Acts = []
            if mine and known is not None and known.landing.transfer == offer.transfer:
                acts = self._table.goes_on(known, peer, offer.attempt)
            elif ack is not None:
                acts = [partial(peer.send, ack)]  # an old offer that a lost connection held
            elif mine and known is not None and _older(offer.transfer, known.landing.transfer):
                acts = []
            else:
                if mine and known is not None:  # what gave the last one up was lost
                    problem = "its sender gave it up and offered the room again"
                    acts = self._table.failing_open({known}, Code.ABORTED, problem)
                acts += self._table.accepting(peer, offer)
        do(acts)

    def resumed(self, peer: Inbound, resume: Resume) -> None:
        with self._lock:
            entry = self._table.mine(peer, resume.room, resume.transfer)
            if entry is None:
                answer = self._table.ended.answer(peer.session, resume.room, resume.transfer)
                acts: Acts = [partial(peer.send, answer)]
            else:
                acts = self._table.goes_on(entry, peer, resume.attempt)
        do(acts)

    def done(self, peer: Inbound, done: Done) -> None:
        with self._lock:
            entry = self._table.mine(peer, done.room, done.transfer)
            if entry is None:
                answer = self._table.ended.answer(peer.session, done.room, done.transfer)
                acts: Acts = [partial(peer.send, answer)]
            elif entry.state in ("landed", "delivered"):
                acts = self._table.state(entry)
            else:
                try:
                    entry.landing.finish(done)
                    acts = self._table.if_landed(entry)
                except RoomError as error:
                    acts = self._table.failing(done.room, error.code, "transfer", str(error))
        do(acts)

    def given_up(self, peer: Inbound, error: Error) -> None:
        if error.room == NO_ROOM:
            return  # the connection is closing
        with self._lock:
            entry = self._table.mine(peer, error.room, error.transfer)
            problem = f"the sender gave up: {error.message}"
            acts = self._table.failing_open(
                set() if entry is None else {entry}, Code.ABORTED, problem
            )
        do(acts)

    def claim(self, peer: Inbound, head: DataHead) -> Claim | None:
        """Where a payload goes; None drops it: it is late, or wrong, which the sender is told."""
        acts: Acts = []
        claim = None
        with self._lock:
            entry = self._table.mine(peer, head.room, head.transfer)
            if entry is None or entry.state == "waiting":
                answer = self._table.ended.answer(peer.session, head.room, head.transfer)
                if isinstance(answer, Error) and answer.code == Code.UNKNOWN_ROOM:
                    acts = [partial(peer.send, answer)]  # the others are merely late
            elif entry.state == "receiving":
                try:
                    claim = entry.landing.claim(peer, head)
                except RoomError as error:
                    acts = self._table.failing(head.room, error.code, "transfer", str(error))
            if claim is not None and claim.aside:
                first = claim.landing.under_way(claim.start, claim.end)
                assert first is not None
                reason = "a frame under way on it came again over another connection"
                acts.append(partial(first.owner.abort, reason))
        do(acts)
        return claim

    def take(self, claim: Claim) -> None:
        """The claim's payload is whole: check it and count it."""
        sound = claim.head.intact(claim.view)
        with self._lock:
            landing = claim.landing
            landing.claims.remove(claim)
            if landing.closed:
                acts = self._table.granted(self._table.grants.give_back(landing))
            elif not sound:
                head = claim.head
                problem = f"wrong checksum in layer {head.layer} at byte {head.offset}"
                acts = self._table.failing(landing.room, Code.CHECKSUM, "transfer", problem)
            else:
                acts = self._table.taken(claim)
        do(acts)

    def drop(self, claim: Claim) -> None:
        """The rest of the claim's payload does not come, or is not wanted."""
        acts: Acts = []
        with self._lock:
            landing = claim.landing
            landing.claims.remove(claim)
            if landing.closed:
                acts = self._table.granted(self._table.grants.give_back(landing))
            elif claim.successor is not None:
                acts = self._table.taken(claim.successor)
        do(acts)

    # On the user's loop

    def _expired(self, expectation: Expectation) -> None:
        room = expectation.room
        with self._lock:
            if self._table.expected.get(room) is not expectation:
                return  # it is being told what has come of it
            entry = self._table.rooms.get(room)
            if entry is None:
                arrived = "no offer"
            elif entry.state == "waiting":
                arrived = f"no memory was free for {entry.landing.total_bytes} bytes; none"
            else:
                arrived = f"{entry.landing.payload_bytes} bytes"
            problem = f"{arrived} had arrived by the deadline"
            acts = self._table.failing(room, Code.DEADLINE, "transfer", problem)
        do(acts)

    def _cancelled(self, expectation: Expectation) -> None:
        with self._lock:
            if self._table.expected.get(expectation.room) is not expectation:
                return  # what it would have got is released when it is handed over
            acts = self._table.discarding(expectation.room, "the receiver's user cancelled it")
        do(acts)

    def _hold_expired(self, entry: Room) -> None:
        room = entry.landing.room
        with self._lock:
            if self._table.rooms.get(room) is not entry or room in self._table.expected:
                return
            problem = f"nobody expected it within {self._limits.hold_s:g} s"
            acts = self._table.failing(room, Code.DEADLINE, "hold", problem)
        do(acts)

    def _stayed_away(self, session: bytes) -> None:
        with self._lock:
            if session in self._sessions:
                return
            acts: Acts = []
            for entry in list(self._table.rooms.values()):
                landing = entry.landing
                if landing.session == session:
                    problem = (
                        f"the connection was lost after {landing.payload_bytes} of "
                        f"{landing.total_bytes} bytes, and did not come back within "
                        f"{self._limits.resume_s:g} s"
                    )
                    acts += self._table.failing_open({entry}, Code.PEER_LOST, problem)
        do(acts)

    def _error(self, room: int, problem: str) -> TransferError:
        return TransferError(room, f"the receiver on {self._address}", "expect", problem)


def _older(number: int, than: int) -> bool:
    """Transfers are numbered in a ring."""
    return 0 < ((than - number) & MAX_NUMBER) <= MAX_NUMBER // 2
