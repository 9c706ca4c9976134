"""Offsets between the clocks of load workers and of their master, and how sure they are.

Processes of one host share CLOCK_MONOTONIC, which is seen by its boot id and time namespace; then
the offset is 0. Else it is measured as NTP does (RFC 5905): the master reads its clock, the worker
answers with its own, the master reads again,

    offset = worker - (sent + received) / 2,    |error| <= (received - sent) / 2

and of many round trips the shortest counts. An instant of the worker less the offset is an instant
of the master. Measured before the run and after it, so that a drift shows.
"""

import os
from dataclasses import dataclass

ROUND_TRIPS = 32
#: Wall time. A worker whose clock is not known as well as this is refused: its requests would be
#: late or early by as much, and so would every latency.
MAX_BOUND_S = 0.005
#: Crystals part by tens of microseconds a second at the most; a step is more.
MAX_DRIFT_S = 0.001


@dataclass(frozen=True, slots=True)
class Offset:
    """worker's clock less the master's; ``bound_ns`` is the most that the offset can be off."""

    offset_ns: int
    bound_ns: int


SHARED = Offset(0, 0)


def offset_of(round_trips: list[tuple[int, int, int]]) -> Offset:
    """Of (sent by the master, read by the worker, received by the master), all in ns."""
    sent_ns, worker_ns, received_ns = min(round_trips, key=lambda one: one[2] - one[0])
    bound_ns = -(-(received_ns - sent_ns) // 2)
    return Offset(worker_ns - (sent_ns + received_ns) // 2, bound_ns)


def drift_fault(before: Offset, after: Offset) -> str | None:
    """What is wrong where two measurements exclude each other, or the clocks moved apart."""
    moved_ns = abs(after.offset_ns - before.offset_ns)
    if moved_ns <= before.bound_ns + after.bound_ns or moved_ns <= MAX_DRIFT_S * 1e9:
        return None
    return (
        f"its clock moved {moved_ns / 1e6:.2f} ms against the master's during the run, bound "
        f"{MAX_DRIFT_S * 1e3:g} ms"
    )


def clock_identity() -> str | None:
    """Equal where CLOCK_MONOTONIC is the same clock; None where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = file.read().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return None
