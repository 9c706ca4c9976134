"""What a mean request costs each stage, for every split of the lengths into short and long.

A split is the number k of shortest lengths that stay local; running sums over the sorted lengths
give each expectation in O(1). "exact" costs are expectations over the lengths, "paper" costs those
of the mean length (see ``harness.throughput``).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from harness.architecture import Architecture
from harness.deployment import Deployment, PdCluster, PrfaasCluster
from harness.profile import Profile
from harness.scenario import Scenario
from harness.scheduling.config import decode_batch, decode_step_s
from harness.throughput.rates import Objective, StageRates
from harness.workload import LengthDistribution

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_THRESHOLDS = 4096


class Costs:
    """Costs of one deployment's stages over a length distribution. # arrays (splits,)"""

    def __init__(
        self, scenario: Scenario, deployment: Deployment, given: LengthDistribution
    ) -> None:
        order = np.argsort(given.lengths, kind="stable")
        self.lengths = np.asarray(given.lengths, dtype=np.float64)[order]  # (points,)
        self._whole = np.rint(self.lengths)  # a law's points are not whole, requests are
        self._cached = np.asarray(given.cached_tokens, dtype=np.float64)[order]
        weights = np.asarray(given.weights, dtype=np.float64)[order]
        self._weights = weights / weights.sum()
        self._architecture = scenario.model.architecture
        self._profiles = {name: one.profile for name, one in scenario.hardware.items()}
        self._share = _running(self._weights)
        self._new_tokens = _running(self._weights * self.lengths)
        self._cached_tokens = _running(self._weights * self._cached)
        moved = _moved_bytes(self._architecture, self.lengths, self._cached)
        self._moved_bytes = _running(self._weights * moved)
        self._running_s: dict[str, FloatArray] = {}
        self._output_tokens = given.mean_output_tokens
        self.remote = deployment.prfaas_clusters(scenario.link.rate_bytes_per_s)
        self.local = deployment.pd_clusters(scenario.link.rate_bytes_per_s)
        # One decode batch and step time a kind of hardware, for each PD cluster.
        self._slot_s = {
            name: decode_step_s(scenario, one) / decode_batch(scenario, one)
            for name in sorted({cluster.hardware for cluster in self.local})
            for one in [replace(deployment, pd_hardware=name)]
        }

    def candidates(self) -> IntArray:
        """Splits worth trying: after each distinct length, evenly thinned to MAX_THRESHOLDS."""
        if not self.remote:
            return np.array([len(self.lengths)])
        last = self._after_each_length()
        if len(last) > MAX_THRESHOLDS:
            last = last[np.linspace(0, len(last) - 1, MAX_THRESHOLDS).round().astype(np.int64)]
        return last

    def between(self, low: int, high: int) -> IntArray:
        """Every split from ``low`` to ``high``."""
        last = self._after_each_length()
        return last[(last >= low) & (last <= high)]

    def planned(self, deployment: Deployment) -> IntArray:
        """The split of a deployment as planned. # (1,)"""
        if not self.remote:
            return np.array([len(self.lengths)])
        if deployment.num_prefill == 0:
            return np.array([0])
        assert deployment.threshold_tokens is not None, "two clusters prefill without a threshold"
        return np.array([np.searchsorted(self._whole, deployment.threshold_tokens, "right")])

    def thresholds(self, splits: IntArray) -> FloatArray:
        """The threshold that makes each split: the longest length that stays local, else 0."""
        return np.where(splits > 0, self._whole[np.maximum(splits, 1) - 1], 0.0)

    def shares(self, splits: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """p, l_long and l_short; the means are nan where that side is empty."""
        p = np.where(splits == len(self.lengths), 0.0, 1.0 - self._share[splits])
        long_tokens, short_tokens = self._means(self._new_tokens, self.lengths, splits)
        return p, long_tokens, short_tokens

    def remote_s(self, hardware: str, splits: IntArray, objective: Objective) -> FloatArray:
        """p T(l_long): seconds of a PrfaaS instance that a mean request takes."""
        if objective == "exact":
            running = self._prefill_s(hardware)
            return self._beyond(running, splits)
        p, long_tokens, _ = self.shares(splits)
        cached, _ = self._means(self._cached_tokens, self._cached, splits)
        return _times_mean_cost(p, self._profiles[hardware], long_tokens, cached)

    def local_s(self, hardware: str, splits: IntArray, objective: Objective) -> FloatArray:
        """(1 - p) T(l_short): seconds of a local prefill instance that a mean request takes."""
        if objective == "exact":
            return self._prefill_s(hardware)[splits]
        p, _, short_tokens = self.shares(splits)
        _, cached = self._means(self._cached_tokens, self._cached, splits)
        return _times_mean_cost(1 - p, self._profiles[hardware], short_tokens, cached)

    def crossing_bytes(self, splits: IntArray, objective: Objective) -> FloatArray:
        """p S_kv(l_long): bytes that a mean request sends across the link."""
        if objective == "exact":
            return self._beyond(self._moved_bytes, splits)
        p, long_tokens, _ = self.shares(splits)
        cached, _ = self._means(self._cached_tokens, self._cached, splits)
        moved = _moved_bytes(self._architecture, np.nan_to_num(long_tokens), np.nan_to_num(cached))
        return np.where(p > 0, p * moved, 0.0)

    def slots_s(self, hardware: str, objective: Objective) -> float:
        """Seconds of a decode instance that a mean request takes: its share of BS_max slots."""
        steps = self._output_tokens - (objective == "exact")
        # One-token outputs take no step; a slot still turns over.
        return float(max(steps, 1.0) * self._slot_s[hardware])

    def _prefill_s(self, hardware: str) -> FloatArray:
        """Running sums of T_prefill, made once a kind of hardware."""
        if hardware not in self._running_s:
            cost_s = self._profiles[hardware].prefill_s_array(self.lengths, self._cached)
            self._running_s[hardware] = _running(self._weights * cost_s)
        return self._running_s[hardware]

    def _beyond(self, running: FloatArray, splits: IntArray) -> FloatArray:
        # Differences of running sums leave rounding where the far side is empty.
        return np.where(splits == len(self.lengths), 0.0, running[-1] - running[splits])

    def _means(
        self, running: FloatArray, values: FloatArray, splits: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Means of ``values`` over the long and the short side; nan where one is empty."""
        with np.errstate(invalid="ignore", divide="ignore"):
            beyond = (running[-1] - running[splits]) / (1.0 - self._share[splits])
            beyond = np.where(splits == len(self.lengths), np.nan, beyond)
            within = running[splits] / self._share[splits]
        # A mean of equal values may round beyond them, and so beyond what a profile covers.
        low, high = values.min(), values.max()
        return np.clip(beyond, low, high), np.clip(within, low, high)

    def _after_each_length(self) -> IntArray:
        return np.flatnonzero(np.append(np.diff(self._whole) > 0, True)) + 1


def remote_rate(
    costs: Costs, clusters: tuple[PrfaasCluster, ...], splits: IntArray, objective: Objective
) -> FloatArray:
    """Th_prfaas / p: requests a second that the PrfaaS clusters and their egress carry; infinite
    where nothing is offloaded. # (splits,)"""
    crossing = costs.crossing_bytes(splits, objective)
    total = np.zeros(len(splits))
    with np.errstate(divide="ignore"):
        for cluster in clusters:
            prefill = cluster.num_instances / costs.remote_s(cluster.hardware, splits, objective)
            total = total + np.minimum(prefill, cluster.link_bytes_per_s / crossing)
    return total if clusters else np.full(len(splits), np.inf)


def local_rates(
    costs: Costs, divisions: Sequence[PdCluster], splits: IntArray, objective: Objective
) -> tuple[FloatArray, FloatArray]:
    """Requests a second that one PD cluster carries, divided as each of ``divisions`` says: its
    prefill and ingress, its decode. # (divisions, splits), (divisions, 1)"""
    cluster = divisions[0]
    prefill_counts = np.array([[one.num_prefill] for one in divisions], dtype=np.float64)
    decode_counts = np.array([[one.num_decode] for one in divisions], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        local_s = costs.local_s(cluster.hardware, splits, objective)
        prefill = np.where(local_s > 0, prefill_counts / local_s, np.inf)
        if costs.remote:
            crossing = costs.crossing_bytes(splits, objective)
            prefill = np.minimum(prefill, cluster.link_bytes_per_s / crossing)
    return prefill, decode_counts / costs.slots_s(cluster.hardware, objective)


def local_rate(
    costs: Costs, cluster: PdCluster, splits: IntArray, objective: Objective
) -> FloatArray:
    """lambda_i: what one PD cluster carries as it is divided. # (splits,)"""
    return np.asarray(np.minimum(*local_rates(costs, (cluster,), splits, objective))[0])


def stage_rates(costs: Costs, splits: IntArray, objective: Objective) -> StageRates:
    """Saturating rates at one split, summed over the clusters. ``splits`` # (1,)"""
    crossing = float(costs.crossing_bytes(splits, objective)[0]) if costs.remote else 0.0
    remote = sum(
        _rate(c.num_instances, float(costs.remote_s(c.hardware, splits, objective)[0]))
        for c in costs.remote
    )
    local = sum(
        _rate(c.num_prefill, float(costs.local_s(c.hardware, splits, objective)[0]))
        for c in costs.local
    )
    egress = sum(c.link_bytes_per_s for c in costs.remote)
    ingress = sum(c.link_bytes_per_s for c in costs.local)
    return StageRates(
        prfaas_prefill=_finite(remote) if costs.remote else None,
        pd_prefill=_finite(local) if any(c.num_prefill for c in costs.local) else None,
        pd_decode=sum(c.num_decode / costs.slots_s(c.hardware, objective) for c in costs.local),
        link=min(egress, ingress) / crossing if crossing > 0 else None,
    )


def _rate(count: int, cost_s: float) -> float:
    return count / cost_s if cost_s > 0 else np.inf


def _finite(rate: float) -> float | None:
    return rate if np.isfinite(rate) else None


def _running(values: FloatArray) -> FloatArray:
    """Sum of the first k values at index k. # (points + 1,)"""
    return np.concatenate(([0.0], np.cumsum(values)))


def _moved_bytes(
    architecture: Architecture, new_tokens: FloatArray, cached_tokens: FloatArray
) -> FloatArray:
    """S_kv of what has to move, whole tokens. # (points,)"""
    new, cached = np.rint(new_tokens), np.rint(cached_tokens)
    return architecture.moved_bytes_array(new + cached, cached)


def _times_mean_cost(
    share: FloatArray, profile: Profile, mean_new: FloatArray, mean_cached: FloatArray
) -> FloatArray:
    """share x T(E[l]); 0 where there is no such side."""
    cost = np.zeros(len(share))
    some = share > 0
    cost[some] = share[some] * profile.prefill_s_array(mean_new[some], mean_cached[some])
    return cost
