"""Where the link becomes the hard limit: the rate below which the best plan carries less.

With an unlimited link the best plan carries L* = max over thresholds and splits. A threshold that
reaches L* offloads c = p S_kv(l_long) bytes a request, so it needs

    B(t) = c (L* - what the other clusters carry)        for egress and for ingress

of the scenario's link, and the smallest B(t) is the limit: above it more bandwidth gives nothing,
below it no threshold and no split makes up for what the link does not carry.

With ``reserve_first`` a decode slot is held through the transfer, so that where decode binds every
rate of the link counts, and there is no such limit.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from harness.deployment import PdCluster
from harness.planning.variants import (
    UNLIMITED_BYTES_PER_S,
    Variant,
    best_plan,
    with_link_rate,
)
from harness.throughput import Objective
from harness.throughput.costs import Costs, local_rates, remote_rate
from harness.throughput.search import divisions

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Plans this close to the best, as a share, are as good.
_TIE = 1e-9
#: What rounding may take of the most, as a share, where the link is as the limit says.
_HELD = 1e-6


def hard_limit_bytes_per_s(base: Variant, objective: Objective) -> float | None:
    """Rate of the scenario's link, further clusters keeping theirs; 0: it is no limit at all; None:
    more of it always carries more."""
    if base.scenario.scheduling.admission == "push_then_admit":
        return _needed(base, objective)[0]
    limit, most = _needed(with_link_rate(base, UNLIMITED_BYTES_PER_S), objective)
    if limit == 0:
        return limit
    there = with_link_rate(base, limit)
    plan = best_plan(there.scenario, there.offloading, objective, there.lengths)
    return limit if plan.throughput_req_per_s >= most * (1 - _HELD) else None


def _needed(base: Variant, objective: Objective) -> tuple[float, float]:
    """The smallest B(t), and L*."""
    costs = Costs(base.scenario, base.offloading, base.lengths)
    splits = (costs.candidates if costs.divides else costs.planned)(base.offloading)
    far, *more_far = costs.remote
    near, *more_near = costs.local
    unlimited = replace(far, link_bytes_per_s=math.inf)
    other_remote = np.zeros(len(splits))
    if more_far:
        other_remote = remote_rate(costs, tuple(more_far), splits, objective)
    other_local = np.zeros(len(splits))
    for cluster in more_near:
        other_local += _best_division(costs, cluster, splits, objective)
    near = replace(near, link_bytes_per_s=math.inf)
    remote = remote_rate(costs, (unlimited,), splits, objective) + other_remote
    local = _best_division(costs, near, splits, objective) + other_local
    carried = np.minimum(remote, local)
    best = float(carried.max())
    good = carried >= best * (1 - _TIE)
    left = best - np.minimum(other_remote[good], other_local[good])
    crossing = costs.crossing_bytes(splits[good], objective)
    # Without a request that crosses other_remote is infinite, and nothing is needed.
    needed = np.where(crossing > 0, crossing * np.maximum(left, 0.0), 0.0)
    return float(needed.min()), best


def _best_division(
    costs: Costs, cluster: PdCluster, splits: IntArray, objective: Objective
) -> FloatArray:
    """What the cluster carries at each split, divided as suits that split. # (splits,)"""
    rows = np.minimum(*local_rates(costs, divisions(costs, cluster), splits, objective))
    return np.asarray(np.max(rows, axis=0))
