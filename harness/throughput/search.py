"""The threshold and the splits of the PD clusters that maximise Lambda_max: exhaustive.

Every N_p with N_p + N_d fixed and at least one of each, in every PD cluster, and, where both sides
prefill, up to 4096 thresholds taken from the length distribution, then every length between the
neighbours of the best of them. For a given threshold the PD clusters do not depend on one another,
so that each chooses its own best split.
"""

from dataclasses import dataclass, replace

import numpy as np

from harness.deployment import Deployment, PdCluster
from harness.scenario import Scenario
from harness.throughput.costs import (
    Costs,
    FloatArray,
    IntArray,
    local_rate,
    local_rates,
    remote_rate,
)
from harness.throughput.rates import STAGES, Objective
from harness.workload import LengthDistribution, length_distribution

#: Plans whose Lambda_max differ by less than this share are told apart by their prefill capacity.
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Grid:
    """Lambda_max of the first PD cluster's splits over thresholds, the other clusters as planned.

    ``stage`` names what saturates first. # threshold_tokens (T,), num_prefill (S,), the rest (S, T)
    """

    threshold_tokens: FloatArray
    num_prefill: tuple[int, ...]
    lambda_max_req_per_s: FloatArray
    stage: tuple[tuple[str, ...], ...]


def solve(
    scenario: Scenario,
    deployment: Deployment,
    objective: Objective = "exact",
    lengths: LengthDistribution | None = None,
) -> Deployment:
    """The same instances with the threshold and the N_p / N_d that maximise Lambda_max.

    ``objective`` chooses the equations to maximise; "exact" by default, since a plan is run on a
    queue. Among equals (decode limits a whole range of t) the one with most prefill capacity wins.
    Without local prefill there is nothing to choose.
    """
    if deployment.num_prefill == 0:
        return deployment
    costs = Costs(scenario, deployment, lengths or length_distribution(scenario))
    splits = costs.candidates()
    best = _Best.of(costs, splits, objective)
    if len(splits) > 1:
        at = best.at
        low, high = splits[max(at - 1, 0)], splits[min(at + 1, len(splits) - 1)]
        splits = costs.between(int(low), int(high))
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
            options = divisions(cluster)
            prefill, decode = local_rates(costs, options, splits, objective)
            carried = np.minimum(prefill, decode)  # (divisions, splits)
            chosen = _preferred(carried, prefill)  # (splits,)
            total += np.take_along_axis(carried, chosen[np.newaxis], 0)[0]
            spare += np.take_along_axis(prefill, chosen[np.newaxis], 0)[0]
            choices.append((options, chosen))
        lambda_max = np.minimum(remote, total)
        equal = lambda_max >= lambda_max.max() * (1 - _TIE)
        at = int(np.argmax(np.where(equal, np.minimum(remote, spare), -1.0)))
        return _Best(at, tuple(options[chosen[at]] for options, chosen in choices))


def divisions(cluster: PdCluster) -> tuple[PdCluster, ...]:
    """The ways to divide a PD cluster's instances; one only where it does not prefill."""
    if cluster.num_prefill == 0:
        return (cluster,)
    total = cluster.num_prefill + cluster.num_decode
    return tuple(replace(cluster, num_prefill=n, num_decode=total - n) for n in range(1, total))


def _preferred(carried: FloatArray, prefill: FloatArray) -> IntArray:
    """The division that carries most at each split; among equals the one with most prefill."""
    equal = carried >= carried.max(axis=0) * (1 - _TIE)
    return np.asarray(np.argmax(np.where(equal, prefill, -1.0), axis=0))


def capacity_grid(
    scenario: Scenario,
    deployment: Deployment,
    objective: Objective,
    lengths: LengthDistribution | None = None,
    points: int = 200,
) -> Grid:
    """Lambda_max over t and N_p, ``points`` thresholds spread over the shares of the lengths.

    The deployment's own threshold is among them. For deployments where both sides prefill.
    """
    assert deployment.num_prfaas > 0, "a grid over t needs two clusters that prefill"
    assert deployment.num_prefill > 0, "a grid over t needs two clusters that prefill"
    costs = Costs(scenario, deployment, lengths or length_distribution(scenario))
    splits = costs.candidates()
    spread = np.linspace(0, len(splits) - 1, min(points, len(splits))).round().astype(np.int64)
    splits = np.union1d(splits[spread], costs.planned(deployment))
    splits = splits[splits > 0]
    remote = remote_rate(costs, costs.remote, splits, objective)
    rest = np.zeros(len(splits))
    for cluster in costs.local[1:]:
        rest += local_rate(costs, cluster, splits, objective)
    options = divisions(costs.local[0])
    first = np.minimum(*local_rates(costs, options, splits, objective))
    return Grid(
        threshold_tokens=costs.thresholds(splits),
        num_prefill=tuple(option.num_prefill for option in options),
        lambda_max_req_per_s=np.minimum(remote, first + rest),
        stage=tuple(_stages(costs, option, splits, objective) for option in options),
    )


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
        decode = sum(c.num_decode / costs.slots_s(c.hardware, objective) for c in clusters)
        rates = [remote, local, np.full(len(splits), decode), egress / crossing]
    return tuple(STAGES[i] for i in np.argmin(np.stack(rates), axis=0))
