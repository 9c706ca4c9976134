"""100,000 hostile frames against a receiver: no crash, no leak, nothing wrong is delivered.

Members of the run that say anything in any order, and break off anywhere; their bytes, where the
checksum is right, are known from session, room and transfer, so whatever lands can be judged.
"""

import asyncio
import fcntl
import os
import random
import socket
import struct
import sys
import termios
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from transport_peer import SECRET, run, soon
from wire_reader import WireReader

from harness.core import TransportError
from harness.transport.channel import PlainChannel
from harness.transport.connection import Connection
from harness.transport.frames import (
    MAX_PAYLOAD_BYTES,
    MAX_ROOM,
    NO_ROOM,
    REPORT_LAYERS,
    ROLE_SENDER,
    Ack,
    Arrived,
    Challenge,
    Code,
    Credit,
    Done,
    Error,
    Hello,
    LayerDone,
    Offer,
    Progress,
    Resume,
    TransferError,
    Welcome,
)
from harness.transport.handshake import proof
from harness.transport.lane import Lanes
from harness.transport.receiver import KvReceiver, Received, ReceiverLimits
from harness.transport.rooms import Claim, Landing
from harness.transport.sender import KvSender
from harness.transport.wire import encode_control, encode_data_head

FRAMES, CONNECTIONS = 100_000, 400
#: Rooms in use at a time, and frames until they have moved on by one: those that failed stay so.
ROOMS, PACE = 8, 50
LAYERS = (90, 0, 200, 30)
ANSWERS = Credit | LayerDone | Ack | Error | Progress | Arrived
LIMITS = ReceiverLimits(
    max_buffer_bytes=8192, max_rooms=40, max_held_rooms=30, hold_s=0.05, resume_s=0.02
)


def payload_of(session: bytes, room: int, transfer: int) -> bytes:
    """The bytes of all layers of an honest transfer."""
    return random.Random(session + bytes([room % 256, transfer % 256])).randbytes(sum(LAYERS))


@dataclass
class Fuzzer:
    """Speaks to a receiver over blocking sockets, from a thread of its own."""

    port: int
    rng: random.Random
    sent: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    def room(self, rng: random.Random) -> int:
        """One of those in use now."""
        return self.sent // PACE + rng.randrange(ROOMS)

    def all(self) -> None:
        for _ in range(CONNECTIONS):
            self.connection(FRAMES // CONNECTIONS)

    def connection(self, frames: int) -> None:
        session = bytes([self.rng.randrange(3)]) * 16  # sessions of several connections, one by one
        reader = WireReader(65_536)
        reader.unlock(MAX_PAYLOAD_BYTES)
        with socket.create_connection(("127.0.0.1", self.port), 20) as sock:
            if self.rng.random() < 0.05:
                sock.sendall(self.rng.randbytes(self.rng.randrange(300)))  # no handshake at all
                return
            self._shake_hands(sock, reader, session)
            deaf = self.rng.random() < 0.05
            batch = b""
            for _ in range(frames):
                batch += self.frame(session)
                self.sent += 1
                if len(batch) > 4000:
                    if not self._say(sock, batch):
                        return
                    batch = b""
                    if not deaf:
                        self._hear(sock, reader)
            tail = bytearray(batch or self.frame(session))
            for _ in range(self.rng.randrange(3)):
                tail[self.rng.randrange(len(tail))] = self.rng.randrange(256)
            self._say(sock, bytes(tail[: self.rng.randrange(len(tail) + 1)]))

    def _shake_hands(self, sock: socket.socket, reader: WireReader, session: bytes) -> None:
        (challenge,) = reader.feed(self._exactly(sock, 8 + 32))
        assert isinstance(challenge, Challenge)
        nonce = self.rng.randbytes(32)
        own = proof("client", SECRET, ROLE_SENDER, session, challenge.nonce, nonce)
        sock.sendall(encode_control(Hello(ROLE_SENDER, session, nonce, own)))
        (welcome,) = reader.feed(self._exactly(sock, 8 + 36))
        assert isinstance(welcome, Welcome)

    @staticmethod
    def _exactly(sock: socket.socket, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes:
            got += sock.recv(nbytes - len(got))
        return got

    def _say(self, sock: socket.socket, batch: bytes) -> bool:
        try:
            sock.sendall(batch)
        except ConnectionError:
            return False
        return True

    def _hear(self, sock: socket.socket, reader: WireReader) -> None:
        """Whatever the receiver says is a frame that it may say."""
        sock.settimeout(0)
        try:
            while received := sock.recv(65_536):
                for frame in reader.feed(received):
                    self.answers[type(frame).__name__] += 1
                    if isinstance(frame, Error):
                        self.answers[frame.code.name] += 1
                    assert isinstance(frame, ANSWERS), frame
        except (BlockingIOError, ConnectionError):
            return
        finally:
            sock.settimeout(20)

    def frame(self, session: bytes) -> bytes:
        """Any frame of a sender, mostly sensible; a third of the data is the room's own."""
        rng = self.rng
        room, transfer = self.room(rng), rng.choice((0, 0, 0, 0, 0, 1, 2))
        if rng.random() < 0.01:
            room = rng.randrange(MAX_ROOM)
        which = rng.random()
        if which < 0.6:
            return self._data(session, room, transfer)
        if which < 0.75:
            layers = LAYERS if rng.random() < 0.95 else (rng.randrange(9000),)
            flags = rng.choice((0, REPORT_LAYERS, REPORT_LAYERS, 2))
            offer = Offer(room, layers, b"", flags=flags, transfer=transfer)
            return encode_control(offer)
        if which < 0.9:
            total = sum(LAYERS) if rng.random() < 0.95 else rng.randrange(400)
            return encode_control(Done(room, total, session + bytes([transfer]), transfer))
        if which < 0.98:
            return encode_control(Resume(room, transfer, rng.randrange(3)))
        return encode_control(
            Error(rng.choice((room, NO_ROOM)), rng.choice(list(Code)), "x", transfer)
        )

    def _data(self, session: bytes, room: int, transfer: int) -> bytes:
        """Pieces of fixed bounds, so that some transfers come to their end."""
        rng = self.rng
        layer = rng.choice((0, 2, 3)) if rng.random() < 0.99 else rng.randrange(6)
        at = rng.choice((0, 100)) if layer == 2 else 0
        length = 100 if layer == 2 else LAYERS[layer] if layer < len(LAYERS) else 7
        start = sum(LAYERS[:layer]) + at
        payload = payload_of(session, room, transfer)[start : start + (length or 1)] or b"?"
        fault = rng.random()
        if fault < 0.02:
            payload = payload[: rng.randrange(1, len(payload) + 1)]
        head = encode_data_head(room, layer, at, memoryview(payload), True, transfer)
        if fault > 0.98:
            payload = rng.randbytes(len(payload))
        return head + payload


def judge(received: Received) -> None:
    """What was delivered is what its sender meant, to the last byte."""
    assert received.payload_bytes == len(received.buffer)
    if received.payload_bytes:
        session, transfer = received.meta[:16], received.meta[16]
        payload = payload_of(session, received.room, transfer)
        assert received.buffer == payload[: received.payload_bytes]
    received.release()


async def use(receiver: KvReceiver, fuzzer: Fuzzer, over: asyncio.Event, seed: int) -> int:
    """Expect, give up, discard and judge rooms as they come; how many landed."""
    landed, rng = 0, random.Random(seed)
    while not over.is_set():
        room = fuzzer.room(rng)
        try:
            expected = receiver.expect(room, time.monotonic() + rng.choice((0.0, 0.1)))
        except TransportError:  # somebody else expects it
            await asyncio.sleep(0.001)
            continue
        try:
            if rng.random() < 0.1:
                await asyncio.sleep(0)
                expected.cancel()
            received = await expected
        except (TransportError, asyncio.CancelledError):
            await asyncio.sleep(0.001)
            if rng.random() < 0.1:
                receiver.discard(room)
            continue
        landed += 1
        if rng.random() < 0.5:
            judge(received)
        else:
            receiver.discard(room)
    return landed


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in /proc")
def test_a_hundred_thousand_hostile_frames() -> None:
    async def main() -> None:
        rng = random.Random(17)
        async with KvReceiver(SECRET, LIMITS, lanes=lanes) as receiver:
            port = await receiver.start("127.0.0.1")
            lanes.next()
            descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
            fuzzer, over = Fuzzer(port, rng), asyncio.Event()
            users = [asyncio.create_task(use(receiver, fuzzer, over, seed)) for seed in range(8)]
            await asyncio.to_thread(fuzzer.all)
            over.set()
            landed = sum(await asyncio.gather(*users))
            assert fuzzer.sent > 0.9 * FRAMES
            assert landed > 20
            for kind in ("Credit", "Ack", "LayerDone", "Progress", "Arrived", "CHECKSUM"):
                assert fuzzer.answers[kind] > 0, fuzzer.answers
            while receiver.rooms or receiver.connections:
                await asyncio.sleep(0.01)  # rooms that nobody wants are dropped in time
            assert receiver.buffered_bytes == 0
            arena = receiver._started()._table.grants._arena
            assert arena.free_bytes == arena.size_bytes
            async with KvSender(SECRET, 2, lanes=lanes) as sender:
                room = MAX_ROOM - 1
                transfer = await sender.open("127.0.0.1", port, room, (LIMITS.max_buffer_bytes,))
                transfer.send_layer(0, bytes(LIMITS.max_buffer_bytes))
                await transfer.finish()
                (await receiver.expect(room, soon())).release()
            while len(os.listdir("/proc/self/fd")) > descriptors:
                await asyncio.sleep(0.01)  # a lane lets go of the last ones; ``run`` bounds it
            assert threading.active_count() <= threads + 1  # of asyncio.to_thread

    with Lanes(2) as lanes:
        run(main())


class Faulty:
    """An end that fails at its first frame."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.over = threading.Event()

    def opened(self) -> None:
        self.told.append("opened")

    def received(self, event: object) -> None:  # noqa: ARG002 - whatever it is
        raise RuntimeError("a mistake in this program")

    def drained(self) -> None: ...

    def broke(self, error: Exception) -> None: ...

    def pull(self) -> tuple[()]:
        return ()

    def faulted(self, reason: str) -> None:
        self.told.append(reason)

    def ending(self) -> None: ...

    def lost(self, reason: str) -> None:
        self.told.append(reason)
        self.over.set()


def test_an_error_in_a_lane_ends_its_connection_and_reaches_the_users_loop() -> None:
    faults: list[dict[str, Any]] = []
    end = Faulty()

    async def main() -> None:
        ours, theirs = socket.socketpair()
        with Lanes(1) as lanes, theirs:
            Connection(PlainChannel(ours), lanes.next(), end).start()
            theirs.sendall(encode_control(Challenge(bytes(32))))
            await asyncio.to_thread(end.over.wait)
            assert theirs.recv(1) == b""
        await asyncio.sleep(0)

    run(main(), faults=faults)
    assert end.told[0] == "opened"
    assert all("a mistake in this program" in each for each in end.told[1:])
    assert len(end.told) == 3
    assert [str(each["exception"]) for each in faults] == ["a mistake in this program"]


class Listening(Faulty):
    """An end that counts frames."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = 0

    def received(self, event: object) -> None:  # noqa: ARG002 - whatever it is
        self.frames += 1


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel what has not arrived")
def test_a_reset_is_heard_after_all_that_came_before_it() -> None:
    """More than is read at once lies there when the reset comes; uvloop would stop at that."""
    end, frame = Listening(), encode_control(Error(NO_ROOM, Code.ABORTED, "x" * 1000))

    async def main() -> None:
        with Lanes(1) as lanes, socket.socket() as listener, socket.socket() as theirs:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * 2**20)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            theirs.connect(listener.getsockname())
            lane, held = lanes.next(), threading.Event()
            lane.submit(held.wait)
            Connection(PlainChannel(listener.accept()[0]), lane, end).start()
            theirs.sendall(frame * 600)
            while struct.unpack("i", fcntl.ioctl(theirs, termios.TIOCOUTQ, b"1234"))[0]:
                await asyncio.sleep(0)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()
            held.set()
            assert await asyncio.to_thread(end.over.wait, 10)

    run(main())
    assert end.frames == 600
    assert "reset" in end.told[-1]


def test_a_fault_fails_the_transfers_that_it_touched_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults: list[dict[str, Any]] = []
    whole = Landing.take

    def take(self: Landing, claim: Claim, now_ns: int) -> list[int]:
        if self.room == 1:
            raise RuntimeError("a mistake at the receiver")
        return whole(self, claim, now_ns)

    def head(room: int, *rest: Any) -> bytes:
        if room == 2:
            raise RuntimeError("a mistake at the sender")
        return encode_data_head(room, *rest)

    monkeypatch.setattr(Landing, "take", take)
    monkeypatch.setattr("harness.transport.outbound.encode_data_head", head)

    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET, 2) as sender:
            port = await receiver.start("127.0.0.1")

            async def send(room: int) -> None:
                transfer = await sender.open("127.0.0.1", port, room, (100,))
                transfer.send_layer(0, bytes(100))
                await transfer.finish()

            for room, who in ((1, "receiver"), (2, "sender")):
                expected = receiver.expect(room, soon())
                with pytest.raises(TransferError, match=f"a mistake at the {who}"):
                    await send(room)
                with pytest.raises(TransferError, match=f"a mistake at the {who}"):
                    await expected
            await send(3)
            (await receiver.expect(3, soon())).release()
            assert receiver.buffered_bytes == 0

    run(main(), faults=faults)
    assert {str(each["exception"]) for each in faults} == {
        "a mistake at the receiver",
        "a mistake at the sender",
    }
