"""Numbered datagrams across a link, sent and received by sockets of one process in both sites.

A socket stays in the namespace it was made in, so no second process is needed. Arrivals carry the
receiving kernel's time (SO_TIMESTAMPNS), in seconds of CLOCK_REALTIME.
"""

import math
import os
import select
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from netem.link import LinkSpec
from netem.site import Path
from netem.variation_run import Changeable

#: An emulated processor (tests/qemu.py) is many times slower than this machine's: what takes
#: processor time takes that much more.
EMULATED = "PRFAAS_EMULATED" in os.environ
#: Of a difference between delays measured in turns, in which what the host takes cancels.
DELAY_TOLERANCE_S = 3e-3 if EMULATED else 0.5e-3
#: No host makes a packet early; the clocks of sending and of arrival differ by less.
EARLY_S = 0.05e-3

#: As SO_RCVBUF, beyond the system's limit; needs CAP_NET_ADMIN (linux/asm/socket.h).
_SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 33, 35
_UDP_SEGMENT = 103  # linux/udp.h
_TIMESPEC = struct.Struct("=qq")
_NUMBER = struct.Struct("=I")
_BUFFER_BYTES = 1 << 28
#: UDP_MAX_SEGMENTS of linux/udp.h, and what an IPv4 datagram holds.
_MAX_SEGMENTS, _MAX_OFFLOAD_BYTES = 64, 65_000
#: Far beyond every delay of the tests: a silence of so long means that nothing comes any more.
_SILENCE_S = 0.5
_WINDOW, _PAUSE_S = 256, 0.05


@dataclass(frozen=True)
class Arrival:
    number: int
    time_s: float
    tos: int


@dataclass(frozen=True)
class Stream:
    """A sender at near and a receiver at far, connected."""

    sender: socket.socket
    receiver: socket.socket

    def send(self, numbers: Sequence[int], size: int = _NUMBER.size) -> None:
        """One datagram of ``size`` bytes for each number, each a system call."""
        for number in numbers:
            self.sender.send(_NUMBER.pack(number).ljust(size, b"\0"))

    def send_offloaded(self, numbers: Sequence[int], size: int = _NUMBER.size) -> None:
        """The same, but as many datagrams as fit in each offload packet, for the kernel to cut."""
        self.sender.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, size)
        together = min(_MAX_SEGMENTS, _MAX_OFFLOAD_BYTES // size)
        for first in range(0, len(numbers), together):
            some = numbers[first : first + together]
            self.sender.send(b"".join(_NUMBER.pack(one).ljust(size, b"\0") for one in some))

    def arrivals(self, most: float = math.inf) -> list[Arrival]:
        """What has arrived, until there are ``most`` or nothing comes any more."""
        arrived: list[Arrival] = []
        while len(arrived) < most and select.select([self.receiver], [], [], _SILENCE_S)[0]:
            data, ancillary, _, _ = self.receiver.recvmsg(1 << 16, 256)
            (tos,) = (value[0] for _, kind, value in ancillary if kind == socket.IP_TOS)
            arrived.append(Arrival(_NUMBER.unpack_from(data)[0], _arrival_s(ancillary), tos))
        return arrived

    def lost(self, count: int) -> list[bool]:
        """Of the numbers below ``count``, sent in offload packets, which were lost."""
        lost = [True] * count
        self.receiver.setblocking(False)
        for first in range(0, count, _WINDOW):
            # No more on the way than the kernel's queue between two interfaces holds (1000).
            numbers = range(first, min(first + _WINDOW, count))
            self.send_offloaded(numbers)
            while lost[numbers[-1]] and self._note_arrivals(lost, _PAUSE_S):
                pass
        while self._note_arrivals(lost, _SILENCE_S):
            pass
        self.receiver.setblocking(True)
        return lost

    def _note_arrivals(self, lost: list[bool], wait_s: float) -> bool:
        """Clear the marks of what arrives; False when nothing does."""
        if not select.select([self.receiver], [], [], wait_s)[0]:
            return False
        with suppress(BlockingIOError):
            while True:
                lost[_NUMBER.unpack(self.receiver.recv(64))[0]] = False
        return True


@contextmanager
def stream(path: Path) -> Iterator[Stream]:
    near, far = path.near.namespace, path.far.namespace
    assert near is not None
    assert far is not None

    def receiver() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        made.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        made.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        made.bind((path.far.address, 0))
        return made

    def sender() -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    with far.run(receiver) as there, near.run(sender) as here:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        here.connect(there.getsockname())
        there.connect(here.getsockname())
        yield Stream(here, there)


def medians_s(
    path: Changeable, specs: Sequence[LinkSpec], trips_s: Callable[[], list[float]]
) -> list[float]:
    """The least of three median round trips under each description, taken in turns.

    The host only ever adds, for a while or always: the least is the least disturbed, and what it
    always adds is in all of them.
    """
    found: list[list[float]] = [[] for _ in specs]
    for _ in range(3):
        for spec, medians in zip(specs, found, strict=True):
            path.apply(spec)
            medians.append(statistics.median(trips_s()))
    return [min(medians) for medians in found]


def pings_s(path: Path, count: int) -> list[float]:
    """Round trips as ping has them: far's kernel answers, near's kernel notes the arrival."""
    near = path.near.namespace
    assert near is not None
    trips_s = []
    with near.run(
        lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    ) as pinger:
        pinger.settimeout(_SILENCE_S)
        pinger.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        pinger.connect((path.far.address, 0))
        for number in range(count):
            start_s = time.time()
            pinger.send(_echo_request(number))
            trips_s.append(_answered_s(pinger, number) - start_s)
    return trips_s


def _echo_request(number: int) -> bytes:
    """Type 8, code 0, checksum, identifier 0, sequence number (RFC 792)."""
    checksum = ~(0x0800 + number) & 0xFFFF
    return struct.pack("!BBHHH", 8, 0, checksum, 0, number)


def _answered_s(pinger: socket.socket, number: int) -> float:
    while True:
        packet, ancillary, _, _ = pinger.recvmsg(256, 256)
        header_bytes = (packet[0] & 0x0F) * 4
        kind, _, _, _, sequence = struct.unpack_from("!BBHHH", packet, header_bytes)
        if (kind, sequence) == (0, number):
            return _arrival_s(ancillary)


def _arrival_s(ancillary: list[tuple[int, int, bytes]]) -> float:
    (value,) = (v for level, kind, v in ancillary if kind == _SO_TIMESTAMPNS)
    seconds, nanoseconds = _TIMESPEC.unpack(value)
    return float(seconds + nanoseconds / 1e9)
