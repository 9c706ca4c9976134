"""Numbered datagrams across a path: round trips, and what was lost, copied or moved out of order.

Loss is by number, not by counters: what was sent and did not come. Reordering is the least count
of packets that must be taken out for the rest to be in order, that is, those outside the longest
increasing run of numbers; a packet that overtakes a hundred counts once, as in the link's
description. What the receiving socket itself dropped (SO_MEMINFO, linux/sock_diag.h) arrived.

A round trip is the path's and not that of the processes at its ends, which a busy machine makes
wait: it ends when the kernel took the echo in (SO_TIMESTAMPNS, linux/socket.h), and what the
echoing process held it for, which the echo says, is taken off. It begins before the datagram is
handed to the kernel, so that it is never shorter than the path.
"""

import bisect
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

DATAGRAM_BYTES = 64
#: With the IP and the UDP header.
WIRE_BYTES = DATAGRAM_BYTES + 28
#: The number, and in an echo the seconds it was held.
_PAYLOAD = struct.Struct("!Id52x")
_BUFFER_BYTES = 1 << 24
#: Sent at once; more would need a queue, fewer a wake-up each.
_BATCH = 4
_ECHO_PATIENCE_S, _FEWEST = 10.0, 3
# linux/asm/socket.h
_SO_RCVBUFFORCE, _SO_TIMESTAMPNS, _SO_MEMINFO = 33, 35, 55
_MEMINFO_DROPS, _MEMINFO = 8, struct.Struct("=9I")
_TIMESPEC, _ANCILLARY_BYTES = struct.Struct("@ll"), 64

#: Host and port; for IPv6 what the system adds to them.
Address = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of ``sent`` numbered datagrams; ``reordered`` counts those to take out."""

    sent: int
    lost: int
    duplicated: int
    reordered: int


def family(host: str) -> socket.AddressFamily:
    """Of an address as text."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def receiver(host: str) -> socket.socket:
    """A bound, non-blocking socket with the largest receive buffer that can be had."""
    opened = socket.socket(family(host), socket.SOCK_DGRAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    with suppress(PermissionError):  # beyond the system's limit only with CAP_NET_ADMIN
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    opened.bind((host, 0))
    opened.setblocking(False)
    return opened


def send(address: Address, count: int, per_s: float) -> None:
    """``count`` datagrams numbered from 0, in small batches at a steady pace."""
    with socket.socket(family(address[0]), socket.SOCK_DGRAM) as sender:
        sender.connect(address)
        start_s = time.monotonic()
        for number in range(count):
            if number % _BATCH == 0:
                time.sleep(max(0.0, start_s + number / per_s - time.monotonic()))
            sender.send(_PAYLOAD.pack(number, 0.0))


def tally(source: socket.socket, sent: int) -> Tally:
    """Judge what a receiver holds, in the order of its arrival."""
    meminfo = source.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    dropped = _MEMINFO.unpack(meminfo)[_MEMINFO_DROPS]
    return judge(sent, [_PAYLOAD.unpack(data)[0] for data, _, _ in received(source)], dropped)


def judge(sent: int, numbers: Sequence[int], receiver_dropped: int = 0) -> Tally:
    """Of the numbers that came, in the order of their arrival."""
    first = list(dict.fromkeys(numbers))
    return Tally(
        sent=sent,
        lost=max(0, sent - len(first) - receiver_dropped),
        duplicated=len(numbers) - len(first),
        reordered=len(first) - _longest_increasing(first),
    )


def echo(source: socket.socket) -> None:
    """Send every datagram back to where it came from, for as long as the socket is open."""
    while True:
        select.select([source], [], [])
        return_echoes(source)


def return_echoes(source: socket.socket) -> None:
    """Send back what has come, each datagram with the time since its arrival."""
    for data, arrival_s, sender in received(source):
        number, _ = _PAYLOAD.unpack(data)
        with suppress(BlockingIOError):  # a full socket loses the echo, as a full queue would
            source.sendto(_PAYLOAD.pack(number, time.monotonic() - arrival_s), sender)


def round_trips_s(
    address: Address, every_s: float, span_s: float, patience_s: float = _ECHO_PATIENCE_S
) -> list[float]:
    """Of a datagram every ``every_s`` for ``span_s``, those that came back; three at least.

    Datagrams that are late do not catch up: they would queue behind each other. TimeoutError when
    fewer than three have come back ``patience_s`` after the span.
    """
    sent_s: list[float] = []
    trips_s: dict[int, float] = {}
    with socket.socket(family(address[0]), socket.SOCK_DGRAM) as pinger:
        pinger.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        pinger.connect(address)
        pinger.setblocking(False)
        start_s = due_s = time.monotonic()
        while time.monotonic() < start_s + span_s or len(trips_s) < _FEWEST:
            if time.monotonic() > start_s + span_s + patience_s:
                raise TimeoutError("too few echoes came back")
            _take_echoes(pinger, due_s, sent_s, trips_s)
            sent_s.append(time.monotonic())
            pinger.send(_PAYLOAD.pack(len(sent_s) - 1, 0.0))
            due_s = sent_s[-1] + every_s
        _take_echoes(pinger, time.monotonic() + 2 * max(trips_s.values()), sent_s, trips_s)
    return list(trips_s.values())


def _take_echoes(
    pinger: socket.socket, until_s: float, sent_s: Sequence[float], trips_s: dict[int, float]
) -> None:
    """Note the round trip of each echo that comes until ``until_s``, of copies that of the first.

    What has come is taken also when it is later than that.
    """
    while True:
        left_s = until_s - time.monotonic()
        if select.select([pinger], [], [], max(0.0, left_s))[0]:
            for data, arrival_s, _ in received(pinger):
                number, held_s = _PAYLOAD.unpack(data)
                trips_s.setdefault(number, arrival_s - held_s - sent_s[number])
        if left_s <= 0:
            return


def received(source: socket.socket) -> Iterator[tuple[bytes, float, Address]]:
    """What has come since the last look: payload, arrival by time.monotonic(), where from."""
    with suppress(BlockingIOError):
        while True:
            data, ancillary, _, sender = source.recvmsg(DATAGRAM_BYTES, _ANCILLARY_BYTES)
            age_s = _age_s(ancillary)
            if len(data) == DATAGRAM_BYTES:  # or it is a stranger's
                yield data, time.monotonic() - age_s, sender


def _age_s(ancillary: list[tuple[int, int, bytes]]) -> float:
    """Since the kernel's stamp, which is of CLOCK_REALTIME and only good for so short a time."""
    now_ns = time.time_ns()
    ((_, _, stamp),) = ancillary
    seconds, nanoseconds = _TIMESPEC.unpack(stamp)
    age_ns: int = now_ns - seconds * 10**9 - nanoseconds
    return max(0, age_ns) / 1e9


def _longest_increasing(numbers: Sequence[int]) -> int:
    """Length of the longest increasing subsequence, by patience sorting."""
    tops: list[int] = []
    for number in numbers:
        place = bisect.bisect_left(tops, number)
        tops[place : place + 1] = [number]
    return len(tops)
