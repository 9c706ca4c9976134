"""How a worker itself fared while the load ran: send lag, CPU and event-loop delay.

A row every ``PERIOD_S``. ``loop_delay_max_s`` is the most that a greenlet which sleeps
``PROBE_S`` woke late since the last row: whatever else had to run then waited as long. It includes
the loop's own timer resolution, a millisecond. ``cpu_s`` is the process' user and system time since
its start. All durations are wall time.
"""

import resource
import time
from collections.abc import Callable

import gevent
import msgspec

from harness.load.replay import Replay

PERIOD_S = 0.5
PROBE_S = 0.05
_PAGE_BYTES = resource.getpagesize()


class Sample(msgspec.Struct, kw_only=True):
    """One row. Counts are since the start; maxima since the last row, null where there is none."""

    mono_ns: int
    worker: int
    sent: int
    completed: int
    failed: int
    in_flight: int
    lag_max_s: float | None
    loop_delay_max_s: float | None
    cpu_s: float
    rss_bytes: int | None


def sample(replay: Replay, worker: int, write: Callable[[Sample], None]) -> None:
    """Write a row each period. A greenlet of its own; killed at the end of the run, for which it
    writes a last row."""
    seen = 0
    ended = False
    while not ended:
        delay_s: float | None
        try:
            delay_s = _loop_delay_max_s(time.monotonic() + PERIOD_S)
        except gevent.GreenletExit:
            ended, delay_s = True, None
        new_lags_ns = replay.lags_ns[seen:]
        seen += len(new_lags_ns)
        write(
            Sample(
                mono_ns=time.monotonic_ns(),
                worker=worker,
                sent=seen,
                completed=replay.num_completed,
                failed=replay.num_failed,
                in_flight=replay.num_in_flight,
                lag_max_s=max(new_lags_ns) / 1e9 if new_lags_ns else None,
                loop_delay_max_s=delay_s,
                cpu_s=time.process_time(),
                rss_bytes=resident_bytes(),
            )
        )


def resident_bytes() -> int | None:
    """Resident memory now; None where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return None


def _loop_delay_max_s(until_s: float) -> float:
    most_s = 0.0
    while (now_s := time.monotonic()) < until_s:
        gevent.sleep(PROBE_S)
        most_s = max(most_s, time.monotonic() - now_s - PROBE_S)
    return most_s
