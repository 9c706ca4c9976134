"""What no other point beats: the front of cost, TTFT and throughput.

    a dominates b: a is at least as good in every objective, and better in one

Points compete for the same demand only: there is one front for each set of values of the keys that
say what is asked (``workload.*``, ``prefix.*``, and ``load.*`` but for the rate, which is what
throughput follows). By means over seeds; whether a difference is more than their spread the
intervals tell.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_DEMAND = ("workload.", "prefix.", "load.")
#: Keys below those that say how much is asked for, which throughput shows.
_RATES = ("load.rate_req_per_s", "load.concurrency", "load.think_time", "workload.rate_scale")


def demand(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that say what is asked; points that differ in them do not compete."""
    return {
        key: value
        for key, value in settings.items()
        if f"{key}.".startswith(_DEMAND) and key not in _RATES
    }


def dominators(objectives: FloatArray) -> npt.NDArray[np.int64]:
    """For each point a point of the front that dominates it, -1 for those of the front.

    ``objectives`` are finite, the less the better  # [points, objectives]
    """
    found = np.full(len(objectives), -1, np.int64)
    front: list[int] = []
    # In this order whoever dominates a point comes before it, and one of the front is enough.
    for at in np.lexsort(objectives.T[::-1]).tolist():
        least, mine = objectives[front], objectives[at]
        beaten = np.flatnonzero((least <= mine).all(axis=1) & (least < mine).any(axis=1))
        if len(beaten):
            found[at] = front[beaten[0]]
        else:
            front.append(at)
    return found
