"""A packet forwarder between two TUN devices, one in each site: its own process.

    python -m netem.forwarder NEAR_FD FAR_FD < {"seed", "near_to_far", "far_to_near"} + requests

Both descriptors are TUN devices with IFF_VNET_HDR and TCP segmentation offload, so that one
``read`` carries up to 64 KiB (see ``netem.segments``). Each direction is a ``Way``. The first line
of standard input is the configuration, with the settings of both directions; every later line is
a request that is answered by one JSON line (see ``netem.control``): ``{"op": "counters"}``, and
``{"op": "apply", "near_to_far", "far_to_near"}``, which changes the running link. End of file ends
the process, and the devices with it, because they are not persistent.

Precision: the loop sleeps in ``select`` until the next event. The kernel's timer slack is set
to 1 ns (50 us by default) and, where allowed, the process runs at real-time priority, so a wake-up
is late by the scheduling latency of the machine, typically 0.02 to 0.1 ms. It sleeps without a
timeout when nothing is held: no traffic, no CPU.
"""

import errno
import gc
import json
import os
import select
import sys
import time
from collections.abc import Mapping
from typing import Any

from netem.direction_json import settings_from_json
from netem.segments import MAX_FRAME_BYTES
from netem.wakeup import wake_precisely
from netem.way import Way

#: Frames taken from one device before the other is served.
_BATCH = 32
#: Write failures that lose the packet, as a full or closed interface does, or one that finds fault
#: with the packet (EINVAL); others are faults.
_LOSES_PACKET = {
    errno.ENOBUFS, errno.ENOMEM, errno.EIO, errno.EAGAIN, errno.ENETDOWN, errno.EINVAL,
}  # fmt: skip


class Carrier:
    """Frames read from one device, written to the other when they arrive."""

    def __init__(self, source: int, target: int, way: Way) -> None:
        self.source, self.target, self.way = source, target, way

    def take(self) -> None:
        """Read what the source has, at most one batch."""
        for _ in range(_BATCH):
            try:
                frame = os.read(self.source, MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            self.way.offer(frame, time.monotonic())

    def deliver(self) -> None:
        """Write what has arrived."""
        while (packet := self.way.pop(time.monotonic())) is not None:
            try:
                os.write(self.target, packet.frame)
            except OSError as error:
                if error.errno not in _LOSES_PACKET:
                    raise
                self.way.refused(packet)


def forward(near: int, far: int, configuration: Mapping[str, Any], requests: int) -> None:
    """Forward between two non-blocking descriptors until ``requests`` ends."""
    carriers = {
        name: Carrier(
            source,
            target,
            Way(settings_from_json(configuration[name]), f"{configuration['seed']} {name}"),
        )
        for name, source, target in (("near_to_far", near, far), ("far_to_near", far, near))
    }
    by_source = {carrier.source: carrier for carrier in carriers.values()}
    watched = [near, far, requests]
    pending = b""
    while True:
        readable, _, _ = select.select(watched, [], [], _timeout_s(carriers))
        for carrier in carriers.values():
            carrier.deliver()
        for descriptor in readable:
            if descriptor != requests:
                by_source[descriptor].take()
                continue
            received = os.read(requests, 65536)
            if not received:
                return
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                print(json.dumps(_answer(json.loads(line), carriers)), flush=True)


def _timeout_s(carriers: dict[str, Carrier]) -> float | None:
    events = [carrier.way.next_event_s() for carrier in carriers.values()]
    waiting = [event for event in events if event is not None]
    return max(0.0, min(waiting) - time.monotonic()) if waiting else None


def _answer(request: dict[str, Any], carriers: dict[str, Carrier]) -> dict[str, Any]:
    match request:
        case {"op": "counters"}:
            answer: dict[str, Any] = {name: one.way.counters() for name, one in carriers.items()}
            answer["malformed"] = sum(one.way.malformed_total for one in carriers.values())
            answer["marked"] = sum(one.way.marked_total for one in carriers.values())
            return answer | {"mono_ns": time.monotonic_ns()}
        case {"op": "apply"}:
            settings = {name: settings_from_json(request[name]) for name in carriers}
            for name, carrier in carriers.items():
                carrier.way.change(settings[name], time.monotonic())
            return {"mono_ns": time.monotonic_ns()}
    raise ValueError(f"unknown request {request!r}")


def main() -> None:
    # The inherited numbers are the parent's and may be too large for select.
    near, far = (os.dup(int(argument)) for argument in sys.argv[1:3])
    for argument in sys.argv[1:3]:
        os.close(int(argument))
    os.set_blocking(near, False)
    os.set_blocking(far, False)
    # Nothing here makes reference cycles, and a collection would stop the packets.
    gc.disable()
    # Unbuffered, so that select finds the requests that follow on the pipe itself.
    configuration = json.loads(os.fdopen(0, "rb", buffering=0, closefd=False).readline())
    print(json.dumps({"event": "ready", "priority": wake_precisely()}), flush=True)
    forward(near, far, configuration, sys.stdin.fileno())


if __name__ == "__main__":
    main()
