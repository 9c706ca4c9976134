"""Load balancing that ignores length: each request goes to PrfaaS with the same probability q.

With T and S_kv of the mean request on either side (E[T(l)] in "exact", T(E[l]) in "paper"):

    lambda_i      = min(N_p,i min(1 / T_i, R / S_kv) / (1 - q), N_d,i BS_max / (T_decode L_out),
                        B_i / (S_kv q))                                R: the fabric, per instance
    Lambda_max(q) = min(sum_j min(N_j / T_j, B_j / S_kv) / q, sum_i lambda_i)

With one PD cluster and links that carry it, the best q is the remote share of prefill capacity.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.deployment import PdCluster
from harness.planning.variants import Variant
from harness.throughput import Objective
from harness.throughput.costs import Costs
from harness.throughput.search import divisions

FloatArray = NDArray[np.float64]

#: Shares tried in each pass; a pass looks between the neighbours of the best of the one before.
_PASSES = (4097, 257, 257)
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class RandomPlan:
    """The share q that is offloaded, and how each PD cluster is divided."""

    offloaded_share: float
    clusters: tuple[PdCluster, ...]


class RandomSplit:
    """Capacities of a variant's offloading deployment when requests are split at random."""

    def __init__(self, variant: Variant, objective: Objective) -> None:
        self._costs = Costs(variant.scenario, variant.offloading, variant.lengths)
        self._objective = objective
        self._all_remote, self._all_local = np.array([0]), np.array([len(self._costs.lengths)])
        self._crossing_bytes = float(self._costs.crossing_bytes(self._all_remote, objective)[0])

    def plan(self) -> RandomPlan:
        """The share and the divisions that carry most; among equals most prefill capacity."""
        low, high, best = 0.0, 1.0, 0.5
        for count in _PASSES:
            shares = np.union1d(np.linspace(low, high, count), best)
            at, clusters = self._best(shares)
            low, best = float(shares[max(at - 1, 0)]), float(shares[at])
            high = float(shares[min(at + 1, len(shares) - 1)])
        return RandomPlan(best, clusters)

    def throughput_req_per_s(self, plan: RandomPlan) -> float:
        """Lambda_max of a plan, which may have been made for other links."""
        share = np.array([plan.offloaded_share])
        links = [cluster.link_bytes_per_s for cluster in self._costs.local]
        local = sum(
            np.minimum(*self._local(cluster, link, share))
            for cluster, link in zip(plan.clusters, links, strict=True)
        )
        return float(np.minimum(self._remote(share), local)[0])

    def _best(self, shares: FloatArray) -> tuple[int, tuple[PdCluster, ...]]:
        total, spare = np.zeros(len(shares)), np.zeros(len(shares))
        choices = []
        for cluster in self._costs.local:
            options = divisions(self._costs, cluster)
            rates = [self._local(one, one.link_bytes_per_s, shares) for one in options]
            prefill = np.stack([rate for rate, _ in rates])  # (divisions, shares)
            carried = np.stack([np.minimum(*rate) for rate in rates])
            equal = carried >= carried.max(axis=0) * (1 - _TIE)
            chosen = np.argmax(np.where(equal, prefill, -1.0), axis=0)[np.newaxis]
            total += np.take_along_axis(carried, chosen, 0)[0]
            spare += np.take_along_axis(prefill, chosen, 0)[0]
            choices.append((options, chosen[0]))
        remote = self._remote(shares)
        carried = np.minimum(remote, total)
        equal = carried >= carried.max() * (1 - _TIE)
        at = int(np.argmax(np.where(equal, np.minimum(remote, spare), -1.0)))
        return at, tuple(options[chosen[at]] for options, chosen in choices)

    def _remote(self, shares: FloatArray) -> FloatArray:
        total = 0.0
        for one in self._costs.remote:
            seconds = self._costs.remote_s(one.hardware, self._all_remote, self._objective)
            total += min(
                one.num_instances / float(seconds[0]), one.link_bytes_per_s / self._crossing_bytes
            )
        with np.errstate(divide="ignore"):
            return np.asarray(total / shares)

    def _local(
        self, cluster: PdCluster, link_bytes_per_s: float, shares: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """(prefill, fabric and ingress, decode) of one PD cluster. # (shares,) both"""
        costs, objective = self._costs, self._objective
        seconds = costs.local_s(cluster.hardware, self._all_local, objective)
        sending = costs.staying_bytes(self._all_local, objective) / costs.fabric_bytes_per_s
        capacity = cluster.num_prefill / float(max(seconds[0], sending[0]))
        with np.errstate(divide="ignore", invalid="ignore"):
            prefill = np.where(shares < 1, capacity / (1 - shares), np.inf)
            ingress = link_bytes_per_s / (self._crossing_bytes * shares)
        ends = np.concatenate([self._all_local, self._all_remote])
        near_s, far_s = costs.slots_s(cluster.hardware, ends, objective)
        decode = cluster.num_decode / ((1 - shares) * near_s + shares * far_s)
        return np.minimum(prefill, ingress), decode
