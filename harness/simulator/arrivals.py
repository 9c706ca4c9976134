"""A schedule's requests in time order, and what a run of them does not need meanwhile."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from harness.core import Request
from harness.schedule import Schedule
from harness.simulator.rows import CHUNK


@contextmanager
def no_collector() -> Iterator[None]:
    """Without the cycle collector: a run makes millions of objects and no cycle, and looking for
    one goes through all that are in flight again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def arrivals(schedule: Sequence[Request]) -> Iterator[tuple[int, float, int, int]]:
    """(place in the schedule, planned_s, input_tokens, output_tokens) of each request in time
    order, ties in the order of the schedule."""
    if not isinstance(schedule, Schedule):
        rows = enumerate(schedule)
        yield from sorted(
            ((n, one.planned_s, one.input_tokens, one.output_tokens) for n, one in rows),
            key=lambda row: row[1],
        )
        return
    order = np.argsort(schedule.planned_s, kind="stable")
    for start in range(0, len(order), CHUNK):
        part = order[start : start + CHUNK]
        columns = (schedule.planned_s, schedule.input_tokens, schedule.output_tokens)
        yield from zip(part.tolist(), *(one[part].tolist() for one in columns), strict=True)


def first_s(schedule: Sequence[Request]) -> float:
    """When the first request leaves."""
    if isinstance(schedule, Schedule):
        return float(schedule.planned_s.min())
    return min(request.planned_s for request in schedule)
