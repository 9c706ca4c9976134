"""The scheduler's costs with those of the schedule's lengths computed beforehand, all at once.

A request asks for its prefill time on each hardware and for its KV bytes several times, and every
schedule has a bounded number of distinct lengths. What is cached of a prompt varies with every
request, so costs with a cached prefix are computed when they are asked for.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from harness.architecture import Architecture
from harness.core import Request
from harness.profile import Profile
from harness.schedule import Schedule
from harness.scheduling.scheduler_config import SchedulerConfig

IntArray = npt.NDArray[np.int64]

#: Lengths up to here are tabulated: 32 MiB a hardware.
_LONGEST = 2**22


def input_tokens(schedule: Sequence[Request]) -> IntArray:
    """# [requests]"""
    if isinstance(schedule, Schedule):
        return schedule.input_tokens
    return np.fromiter((one.input_tokens for one in schedule), np.int64, len(schedule))


def tabulated(
    config: SchedulerConfig,
    schedule: Sequence[Request],
    profiles: dict[str, Profile],
    architecture: Architecture,
) -> SchedulerConfig:
    """The configuration for one schedule; the same costs to rounding."""
    lengths = np.unique(input_tokens(schedule))
    return replace(
        config,
        prefill_s={
            name: _prefill_s(cost, profiles[name], lengths)
            for name, cost in config.prefill_s.items()
        },
        moved_bytes=_moved_bytes(architecture),
    )


def _prefill_s(
    cost: Callable[[int, int], float], profile: Profile, lengths: IntArray
) -> Callable[[int, int], float]:
    low, high = profile.covered_tokens
    inside = lengths[(lengths >= low) & (lengths <= high)]
    if not len(inside) or inside[-1] > _LONGEST:
        return cost
    table = np.zeros(int(inside[-1]) + 1)
    table[inside] = profile.prefill_s_array(inside)
    # Close together in memory: a dictionary of as many floats is a cache miss or two a look.
    known_s, end = array("d", table.tobytes()), len(table)

    def prefill_s(new_tokens: int, cached_tokens: int) -> float:
        if not cached_tokens and 0 < new_tokens < end:
            known = known_s[new_tokens]
            if known:
                return known
        return cost(new_tokens, cached_tokens)

    return prefill_s


def _moved_bytes(architecture: Architecture) -> Callable[[int, int], int]:
    """``Architecture.moved_bytes`` without its checks, where no layer has a window."""
    growing = architecture.moved_bytes(1, 0) - architecture.moved_bytes(1, 1)
    fixed = architecture.moved_bytes(0, 0)
    if architecture.moved_bytes(_LONGEST, _LONGEST) != fixed:
        return architecture.moved_bytes
    return lambda total_tokens, resident_tokens: growing * (total_tokens - resident_tokens) + fixed
