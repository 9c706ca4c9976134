"""One accepted connection: the receiver's half of the handshake, then frames to the rooms.

State runs from challenged (only a Hello is taken, within a deadline) to open, to closed. A frame
that breaks the protocol ends this connection and nothing else. After each read the peer is told how
many data frames have been taken, so that it knows what to send again should the connection be lost.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol

from harness.transport.channel import Channel
from harness.transport.connection import Connection
from harness.transport.frames import (
    NO_ROOM,
    Code,
    Control,
    DataHead,
    Done,
    Error,
    Offer,
    Progress,
    Resume,
    WireError,
)
from harness.transport.handshake import Accepting
from harness.transport.intake import DataEnd
from harness.transport.lane import Lane
from harness.transport.rooms import Claim

_MAX_UNREAD_BYTES = 1 << 20
#: Frames that would be sent again in vain if the connection were lost right after them.
_TOLD_FRAMES = 8


class Rooms(Protocol):
    """Where the frames of an authenticated peer go; all of it from any lane."""

    def joined(self, peer: "Inbound") -> None: ...
    def left(self, peer: "Inbound") -> None: ...
    def offered(self, peer: "Inbound", offer: Offer) -> None: ...
    def resumed(self, peer: "Inbound", resume: Resume) -> None: ...
    def done(self, peer: "Inbound", done: Done) -> None: ...
    def given_up(self, peer: "Inbound", error: Error) -> None: ...
    def faulted(self, peer: "Inbound", claim: Claim | None, reason: str) -> None: ...
    def claim(self, peer: "Inbound", head: DataHead) -> Claim | None: ...
    def take(self, claim: Claim) -> None: ...
    def drop(self, claim: Claim) -> None: ...


class Inbound:
    """Server side of one connection. ``session`` is None until the peer has proven the secret."""

    def __init__(
        self,
        channel: Channel,
        lane: Lane,
        name: str,
        rooms: Rooms,
        secret: bytes,
        max_payload_bytes: int,
        auth_timeout_s: float,
        on_lost: Callable[["Inbound"], None],
    ) -> None:
        self.name = name
        self.session: bytes | None = None
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # whoever waits for it must not cancel it
        self._rooms = rooms
        self._max_payload_bytes, self._auth_timeout_s = max_payload_bytes, auth_timeout_s
        self._on_lost = on_lost
        self._handshake = Accepting(secret)
        self._lane = lane
        self._auth_timer: asyncio.TimerHandle | None = None
        self._claim: Claim | None = None
        self._frames = self._told_frames = 0
        self._connection = Connection(channel, lane, self, _MAX_UNREAD_BYTES)

    def start(self) -> None:
        """From any thread."""
        self._lane.submit(self._limit_authentication)
        self._connection.start()

    def send(self, frame: Control) -> None:
        """Answer the peer, unless the connection is closing; from any thread."""
        self._connection.send(frame)

    def refuse(self, code: Code, message: str) -> None:
        """Tell the peer what was wrong and close; from any thread."""
        self._connection.send(Error(NO_ROOM, code, message))
        self._connection.close(message)

    def abort(self, reason: str) -> None:
        """Close at once; from any thread."""
        self._connection.abort(reason)

    def let_go(self, claim: Claim) -> None:
        """Drop the rest of the claim's payload: its room is over; from any thread."""
        self._connection.in_lane(lambda: self._let_go(claim))

    # As the connection's end, in its lane

    def opened(self) -> None:
        self._connection.send(self._handshake.challenge)

    def received(self, event: Control | DataHead | DataEnd) -> None:
        if self.session is None:
            self._authenticate(event)
            return
        match event:
            case DataHead():
                self._claim = self._rooms.claim(self, event)
                self._connection.intake.place(None if self._claim is None else self._claim.view)
            case DataEnd():
                claim, self._claim = self._claim, None
                self._frames += 1
                if claim is not None:
                    self._rooms.take(claim)
            case Offer():
                self._rooms.offered(self, event)
            case Done():
                self._rooms.done(self, event)
            case Resume():
                self._rooms.resumed(self, event)
            case Error():
                self._rooms.given_up(self, event)
            case _:
                raise WireError(f"a sender has no {type(event).__name__} frame")

    def drained(self) -> None:
        untold = self._frames - self._told_frames
        # In a steady stream every few frames are told at once; before a pause, all of them.
        if untold >= _TOLD_FRAMES or (untold and not self._connection.intake.left_bytes):
            self._told_frames = self._frames
            self._connection.send(Progress(self._frames))

    def broke(self, error: WireError) -> None:
        self.refuse(Code.PROTOCOL, str(error))

    def pull(self) -> Iterable[memoryview | bytes]:
        return ()

    def faulted(self, reason: str) -> None:
        if self.session is not None:
            self._rooms.faulted(self, self._claim, reason)

    def ending(self) -> None:
        """Nothing is asked of the socket."""

    def lost(self, reason: str) -> None:  # noqa: ARG002 - the peer is told, the rooms need not be
        try:
            if self._auth_timer is not None:
                self._auth_timer.cancel()
            if self._claim is not None:
                self._let_go(self._claim)
            if self.session is not None:
                self._rooms.left(self)
        finally:
            self._on_lost(self)
            self.ended.set_result(None)

    def _let_go(self, claim: Claim) -> None:
        if self._claim is claim:
            self._claim = None
            self._connection.intake.place(None)
            self._rooms.drop(claim)

    def _limit_authentication(self) -> None:
        self._auth_timer = self._lane.loop.call_later(self._auth_timeout_s, self._auth_expired)

    def _auth_expired(self) -> None:
        if self.session is None:
            problem = f"no valid hello within {self._auth_timeout_s:g} s"
            self.refuse(Code.UNAUTHENTICATED, problem)

    def _authenticate(self, event: object) -> None:
        answer = self._handshake.answer(event, self._max_payload_bytes)
        if isinstance(answer, Error):
            self.refuse(answer.code, answer.message)
            return
        self.session, welcome = answer
        self._connection.intake.unlock(self._max_payload_bytes)
        self._rooms.joined(self)
        self._connection.send(welcome)
