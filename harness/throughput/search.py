"""The threshold and the splits of the PD clusters that maximise Lambda_max: exhaustive.

Every N_p with N_p + N_d fixed and at least one N_d, in every PD cluster, and, where there is a
PrfaaS cluster, up to 4096 thresholds taken from the length distribution, from 0 (everything
crosses) to the workload's longest prompt (nothing does), then every length between the neighbours
of the best of them. The deployment's own threshold is among them, so that what is found carries no
less than what was given. For a given threshold the PD clusters do not depend on one another, so
that each chooses its own best split. N_p = 0 leaves nobody to prefill what stays, and so goes with
threshold 0.

Ties, by the order in which they are told apart: Lambda_max within 1e-9 of the most; then the most
prefill capacity, that of the smaller side of the threshold (decode limits a whole range of t, and
the middle of it has the shorter queues); then the lower threshold. At one threshold: the most
prefill capacity, then the smaller N_p.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.deployment import Deployment, PdCluster
from harness.scenario import Scenario
from harness.throughput.costs import (
    Costs,
    FloatArray,
    IntArray,
    local_rates,
    remote_rate,
)
from harness.throughput.rates import DEFAULT_OBJECTIVE, OBJECTIVES, STAGES, Objective
from harness.workload import LengthDistribution, length_distribution

#: Plans whose Lambda_max differ by less than this share are told apart by their prefill capacity.
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Grid:
    """Lambda_max of the first PD cluster's splits over thresholds, the other clusters as planned.

    ``stage`` names what saturates first; ``best_threshold_tokens`` are the search's for each split.
    # threshold_tokens (T,), num_prefill and best_threshold_tokens (S,), the rest (S, T)
    """

    threshold_tokens: FloatArray
    num_prefill: tuple[int, ...]
    best_threshold_tokens: FloatArray
    lambda_max_req_per_s: FloatArray
    stage: tuple[tuple[str, ...], ...]


def solve(
    scenario: Scenario,
    deployment: Deployment,
    objective: Objective = DEFAULT_OBJECTIVE,
    lengths: LengthDistribution | None = None,
) -> Deployment:
    """The same instances with the threshold and the N_p / N_d that maximise Lambda_max.

    ``objective`` chooses the equations to maximise. A deployment without local prefill and without
    a threshold leaves nothing to choose; one that came out of a search without local prefill has
    threshold 0, and is searched again like any other. Ties as said above.
    """
    costs = Costs(scenario, deployment, lengths or length_distribution(scenario))
    return solved(costs, deployment, objective)


def solved(costs: Costs, deployment: Deployment, objective: Objective) -> Deployment:
    """``solve`` with the deployment's costs, which may serve for more than the search."""
    if not costs.divides:
        return deployment
    splits = _refined(costs, deployment, lambda at: np.array([_Best.of(costs, at, objective).at]))
    best = _Best.of(costs, splits, objective)
    threshold = int(costs.thresholds(splits)[best.at]) if costs.remote else None
    first, *more = best.clusters
    return replace(
        deployment,
        threshold_tokens=threshold,
        num_prefill=first.num_prefill,
        num_decode=first.num_decode,
        more_pd=tuple(more),
    )


def _refined(
    costs: Costs, deployment: Deployment, best_of: Callable[[IntArray], IntArray]
) -> IntArray:
    """Every split between the neighbours of the best candidates, of which ``best_of`` says the
    places."""
    splits = costs.candidates(deployment)
    best = best_of(splits)
    windows = [splits[best]]  # what was given need not end at a length
    for at in best.tolist():
        low, high = splits[max(at - 1, 0)], splits[min(at + 1, len(splits) - 1)]
        windows.append(costs.between(int(low), int(high)))
    return np.unique(np.concatenate(windows))


@dataclass(frozen=True, slots=True)
class _Best:
    """The index of the best threshold among the splits, and the PD clusters with it."""

    at: int
    clusters: tuple[PdCluster, ...]

    @staticmethod
    def of(costs: Costs, splits: IntArray, objective: Objective) -> "_Best":
        remote = remote_rate(costs, costs.remote, splits, objective)
        total, spare = np.zeros(len(splits)), np.zeros(len(splits))
        choices = []
        for cluster in costs.local:
            options = divisions(costs, cluster)
            prefill, decode = local_rates(costs, options, splits, objective)
            carried = np.minimum(prefill, decode)  # (divisions, splits)
            chosen = _preferred(carried, prefill)  # (splits,)
            total += np.take_along_axis(carried, chosen[np.newaxis], 0)[0]
            spare += np.take_along_axis(prefill, chosen[np.newaxis], 0)[0]
            choices.append((options, chosen))
        at = int(_preferred(np.minimum(remote, total), np.minimum(remote, spare)))
        return _Best(at, tuple(options[chosen[at]] for options, chosen in choices))


def divisions(costs: Costs, cluster: PdCluster) -> tuple[PdCluster, ...]:
    """The ways to divide a PD cluster's instances; one only where there is no split to choose."""
    if not costs.divides:
        return (cluster,)
    total = cluster.num_prefill + cluster.num_decode
    # Without a PrfaaS cluster somebody has to prefill here.
    return tuple(
        replace(cluster, num_prefill=n, num_decode=total - n)
        for n in range(0 if costs.remote else 1, total)
    )


def _preferred(carried: FloatArray, prefill: FloatArray) -> IntArray:
    """Along the first axis the place that carries most; among equals the one with most prefill,
    and the first of those."""
    equal = carried >= carried.max(axis=0) * (1 - _TIE)
    return np.asarray(np.argmax(np.where(equal, prefill, -1.0), axis=0))


def capacity_grid(
    scenario: Scenario,
    deployment: Deployment,
    objective: Objective,
    lengths: LengthDistribution | None = None,
    points: int = 200,
    most_splits: int = 64,
) -> Grid:
    """Lambda_max over t > 0 and N_p > 0, ``points`` thresholds spread over the shares of lengths.

    The deployment's own threshold is among them, and the best of each N_p by either objective, as
    the search finds it. Of more than ``most_splits`` an even choice, the deployment's own among
    them. For deployments where both sides prefill.
    """
    assert deployment.num_prfaas > 0, "a grid over t needs two clusters that prefill"
    assert deployment.num_prefill > 0, "a grid over t needs two clusters that prefill"
    costs = Costs(scenario, deployment, lengths or length_distribution(scenario))
    options = tuple(one for one in divisions(costs, costs.local[0]) if one.num_prefill)
    if len(options) > most_splits:
        chosen = set(np.linspace(0, len(options) - 1, most_splits).round().astype(int).tolist())
        chosen.add(deployment.num_prefill - 1)
        options = tuple(options[at] for at in sorted(chosen))

    def best_splits(equations: Objective) -> IntArray:
        def best_of(splits: IntArray) -> IntArray:
            carried, prefill = _grid_rates(costs, options, splits, equations)
            carried = np.where(splits > 0, carried, -1.0)  # with t = 0 N_p has nothing to do
            return _preferred(carried.T, prefill.T)

        fine = _refined(costs, deployment, best_of)
        return fine[best_of(fine)]

    best = {equations: best_splits(equations) for equations in OBJECTIVES}
    coarse = costs.candidates(deployment)
    spread = np.linspace(0, len(coarse) - 1, min(points, len(coarse))).round().astype(np.int64)
    # By either objective, so that grids of both have the same thresholds.
    splits = np.unique(np.concatenate([coarse[spread], *best.values(), costs.planned(deployment)]))
    splits = splits[splits > 0]
    return Grid(
        threshold_tokens=costs.thresholds(splits),
        num_prefill=tuple(option.num_prefill for option in options),
        best_threshold_tokens=costs.thresholds(best[objective]),
        lambda_max_req_per_s=_grid_rates(costs, options, splits, objective)[0],
        stage=tuple(_stages(costs, option, splits, objective) for option in options),
    )


def _grid_rates(
    costs: Costs, options: Sequence[PdCluster], splits: IntArray, objective: Objective
) -> tuple[FloatArray, FloatArray]:
    """Lambda_max, and what prefill alone would carry, with the first PD cluster divided in each
    way. # (divisions, splits) both"""
    remote = remote_rate(costs, costs.remote, splits, objective)
    rest, rest_prefill = np.zeros(len(splits)), np.zeros(len(splits))
    for cluster in costs.local[1:]:
        prefill, decode = local_rates(costs, (cluster,), splits, objective)
        rest += np.minimum(prefill, decode)[0]
        rest_prefill += prefill[0]
    prefill, decode = local_rates(costs, options, splits, objective)
    carried = np.minimum(remote, np.minimum(prefill, decode) + rest)
    return carried, np.minimum(remote, prefill + rest_prefill)


def _stages(
    costs: Costs, first: PdCluster, splits: IntArray, objective: Objective
) -> tuple[str, ...]:
    """The stage with the smallest summed rate at each split."""
    clusters = (first, *costs.local[1:])
    crossing = costs.crossing_bytes(splits, objective)
    with np.errstate(divide="ignore", invalid="ignore"):
        remote = sum(
            c.num_instances / costs.remote_s(c.hardware, splits, objective) for c in costs.remote
        )
        local = sum(c.num_prefill / costs.local_s(c.hardware, splits, objective) for c in clusters)
        egress = min(
            sum(c.link_bytes_per_s for c in costs.remote),
            sum(c.link_bytes_per_s for c in clusters),
        )
        decode = sum(c.num_decode / costs.slots_s(c.hardware, splits, objective) for c in clusters)
        senders = sum(c.num_prefill for c in clusters)
        fabric = senders * costs.fabric_bytes_per_s / costs.staying_bytes(splits, objective)
        rates = [remote, local, decode, egress / crossing, fabric]
    return tuple(STAGES[i] for i in np.argmin(np.stack(rates), axis=0))
