"""A packet forwarder between two TUN devices, one in each site: its own process.

    python -m netem.forwarder NEAR_FD FAR_FD < {"rate_bytes_per_s": ..., ...} + requests

Both descriptors are TUN devices with IFF_VNET_HDR and TCP segmentation offload, so that one
``read`` carries up to 64 KiB (see ``netem.segments``). Frames pass through one ``DelayLine`` per
direction. The first line of standard input is the configuration; every later line is a request
that is answered by one JSON line (see ``netem.control``); end of file ends the process, and the
devices with it, because they are not persistent.

Precision: the loop sleeps in ``select`` until the next arrival. The kernel's timer slack is set
to 1 ns (50 us by default) and, where allowed, the process runs at real-time priority, so a wake-up
is late by the scheduling latency of the machine, typically 0.02 to 0.1 ms. It sleeps without a
timeout when nothing is held: no traffic, no CPU.
"""

import errno
import json
import os
import select
import sys
import time
from typing import Any

from netem.delayline import DelayLine
from netem.segments import MAX_FRAME_BYTES, measure, without
from netem.wakeup import wake_precisely

#: Frames taken from one device before the other is served.
_BATCH = 32
#: Write failures that lose the packet, as a full or closed interface does; others are faults.
_LOSES_PACKET = {errno.ENOBUFS, errno.ENOMEM, errno.EIO, errno.EAGAIN, errno.ENETDOWN}


class Direction:
    """Frames read from one device, written to the other when they arrive."""

    def __init__(self, source: int, target: int, configuration: dict[str, Any], seed: int) -> None:
        self.source, self.target = source, target
        self.line: DelayLine[bytes] = DelayLine(**configuration, seed=seed)

    def take(self) -> None:
        """Read what the source has, at most one batch."""
        for _ in range(_BATCH):
            try:
                frame = os.read(self.source, MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            wire_bytes, packets = measure(frame)
            now_s = time.monotonic()
            lost = self.line.lost(packets)
            if not lost:
                self.line.push(frame, wire_bytes, packets, now_s)
                continue
            for part in without(frame, lost):
                self.line.push(part, *measure(part), now_s)

    def deliver(self) -> None:
        """Write what has arrived."""
        while (frame := self.line.pop(time.monotonic())) is not None:
            try:
                os.write(self.target, frame)
            except OSError as error:
                if error.errno not in _LOSES_PACKET:
                    raise
                self.line.dropped_total += measure(frame)[1]


def forward(near: int, far: int, configuration: dict[str, Any]) -> None:
    """Forward until standard input ends."""
    seed = configuration.pop("seed")
    directions = {
        "near_to_far": Direction(near, far, configuration, seed),
        "far_to_near": Direction(far, near, configuration, seed + 1),
    }
    by_source = {direction.source: direction for direction in directions.values()}
    requests = sys.stdin.fileno()
    watched = [near, far, requests]
    pending = b""
    while True:
        readable, _, _ = select.select(watched, [], [], _timeout_s(directions))
        for direction in directions.values():
            direction.deliver()
        for descriptor in readable:
            if descriptor != requests:
                by_source[descriptor].take()
                continue
            received = os.read(requests, 65536)
            if not received:
                return
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                _answer(line, directions)


def _timeout_s(directions: dict[str, Direction]) -> float | None:
    arrivals = [direction.line.next_arrival_s() for direction in directions.values()]
    waiting = [arrival for arrival in arrivals if arrival is not None]
    return max(0.0, min(waiting) - time.monotonic()) if waiting else None


def _answer(line: bytes, directions: dict[str, Direction]) -> None:
    request = json.loads(line)
    if request != {"op": "counters"}:
        raise ValueError(f"unknown request {request!r}")
    answer: dict[str, Any] = {name: d.line.counters() for name, d in directions.items()}
    print(json.dumps(answer | {"mono_ns": time.monotonic_ns()}), flush=True)


def main() -> None:
    # The inherited numbers are the parent's and may be too large for select.
    near, far = (os.dup(int(argument)) for argument in sys.argv[1:3])
    for argument in sys.argv[1:3]:
        os.close(int(argument))
    os.set_blocking(near, False)
    os.set_blocking(far, False)
    # Unbuffered, so that select finds the requests that follow on the pipe itself.
    configuration = json.loads(os.fdopen(0, "rb", buffering=0, closefd=False).readline())
    print(json.dumps({"event": "ready", "priority": wake_precisely()}), flush=True)
    forward(near, far, configuration)


if __name__ == "__main__":
    main()
