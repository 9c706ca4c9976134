"""What a mean request costs each stage, for every split of the lengths into short and long.

A split is the number k of shortest lengths that stay local; running sums over the sorted lengths
give each expectation in O(1). "exact" costs are expectations over the lengths, "paper" costs those
of the mean length (see ``harness.throughput``).
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harness.architecture import Architecture
from harness.deployment import Deployment, PdCluster, PrfaasCluster
from harness.scenario import Scenario
from harness.scheduling.config import decode_batch, decode_step_s
from harness.throughput.by_capacity import on_both_sides
from harness.throughput.rates import Objective, StageRates
from harness.workload import LengthDistribution

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
#: What requests of so many new and cached tokens cost. # (points,), (points,) -> (points,)
Cost = Callable[[FloatArray, FloatArray], FloatArray]

MAX_THRESHOLDS = 4096


@dataclass(frozen=True, slots=True)
class _Sides:
    """p, and mean new and cached tokens on either side, nan where it is empty. # (splits,) each"""

    offloaded: FloatArray
    long: tuple[FloatArray, FloatArray]
    short: tuple[FloatArray, FloatArray]


class Costs:
    """Costs of one deployment's stages over a length distribution. # arrays (splits,)"""

    def __init__(
        self, scenario: Scenario, deployment: Deployment, given: LengthDistribution
    ) -> None:
        by_capacity = deployment.balancing == "capacity"
        if by_capacity:
            given = on_both_sides(scenario, deployment, given)
        #: The one split there is where no length decides.
        self._split = len(given.lengths) // 2 if by_capacity else None
        order = np.arange(len(given.lengths))
        if not by_capacity:
            order = np.argsort(given.lengths, kind="stable")
        self.lengths = np.asarray(given.lengths, dtype=np.float64)[order]  # (points,)
        self._whole = np.rint(self.lengths)  # a law's points are not whole, requests are
        self._cached = np.asarray(given.cached_tokens, dtype=np.float64)[order]
        weights = np.asarray(given.weights, dtype=np.float64)[order]
        self._weights = weights / weights.sum()
        self._scenario = scenario
        self._longest = max(float(scenario.workload.max_tokens), float(self._whole[-1]))
        self._share = _running(self._weights)
        self._new_tokens = _running(self._weights * self.lengths)
        self._cached_tokens = _running(self._weights * self._cached)
        self._sums: dict[object, FloatArray] = {}
        # Of the splits that were asked for last: every stage is asked for the same ones.
        self._asked: IntArray | None = None
        self._sides_asked: _Sides | None = None
        self._costs_asked: dict[object, FloatArray] = {}
        self._output_tokens = given.mean_output_tokens
        self.remote = deployment.prfaas_clusters(scenario.link.rate_bytes_per_s)
        self.local = deployment.pd_clusters(scenario.link.rate_bytes_per_s)
        self.fabric_bytes_per_s = scenario.fabric.rate_bytes_per_s
        # Without local prefill and without a threshold there is no split to choose, nor is there
        # one by length where requests are balanced by capacity.
        divides = deployment.num_prefill > 0 or deployment.threshold_tokens is not None
        self.divides = divides and not by_capacity
        # One decode batch and step time a kind of hardware, for each PD cluster.
        self._decode = {
            name: (decode_step_s(scenario, one), decode_batch(scenario, one))
            for name in sorted({cluster.hardware for cluster in self.local})
            for one in [replace(deployment, pd_hardware=name)]
        }

    def divided_as(self, deployment: Deployment) -> "Costs":
        """The same costs, the PD clusters divided as in another plan of the same instances."""
        other = copy(self)
        other.local = deployment.pd_clusters(self._scenario.link.rate_bytes_per_s)
        return other

    def candidates(self, deployment: Deployment) -> IntArray:
        """Splits worth trying: everything crosses, then up to each distinct length stays, the last
        of which lets nothing cross. Evenly thinned to MAX_THRESHOLDS, the deployment's own kept."""
        if not self.remote:
            return np.array([len(self.lengths)])
        places = self._after_each_length()
        if len(places) > MAX_THRESHOLDS:
            thin = np.linspace(0, len(places) - 1, MAX_THRESHOLDS).round().astype(np.int64)
            places = np.union1d(places[thin], self.planned(deployment))
        return places

    def between(self, low: int, high: int) -> IntArray:
        """Every split from ``low`` to ``high``."""
        places = self._after_each_length()
        return places[(places >= low) & (places <= high)]

    def planned(self, deployment: Deployment) -> IntArray:
        """The split of a deployment as planned. # (1,)"""
        if not self.remote:
            return np.array([len(self.lengths)])
        if deployment.num_prefill == 0:
            return np.array([0])
        if self._split is not None:
            return np.array([self._split])
        assert deployment.threshold_tokens is not None, "two clusters prefill without a threshold"
        return np.array([np.searchsorted(self._whole, deployment.threshold_tokens, "right")])

    def thresholds(self, splits: IntArray) -> FloatArray:
        """The threshold that makes each split: the longest length that stays local; 0 where none
        does, and the workload's longest where all do."""
        kept = np.where(splits > 0, self._whole[np.maximum(splits, 1) - 1], 0.0)
        return np.where(splits == len(self._whole), self._longest, kept)

    def shares(self, splits: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """p, l_long and l_short; the means are nan where that side is empty."""
        sides = self._sides(splits)
        return sides.offloaded, sides.long[0], sides.short[0]

    def remote_s(self, hardware: str, splits: IntArray, objective: Objective) -> FloatArray:
        """p T(l_long): seconds of a PrfaaS instance that a mean request takes."""
        return self._long(("prefill", hardware), self._prefill(hardware), splits, objective)

    def local_s(self, hardware: str, splits: IntArray, objective: Objective) -> FloatArray:
        """(1 - p) T(l_short): seconds of a local prefill instance that a mean request takes."""
        return self._short(("prefill", hardware), self._prefill(hardware), splits, objective)

    def crossing_bytes(self, splits: IntArray, objective: Objective) -> FloatArray:
        """p S_kv(l_long): bytes that a mean request sends across the link."""
        return self._long("bytes", self._moved_bytes, splits, objective)

    def staying_bytes(self, splits: IntArray, objective: Objective) -> FloatArray:
        """(1 - p) S_kv(l_short): bytes that a mean request sends over the fabric."""
        return self._short("bytes", self._moved_bytes, splits, objective)

    def slots_s(self, hardware: str, splits: IntArray, objective: Objective) -> FloatArray:
        """Seconds of a decode instance that a mean request takes: its share of BS_max slots."""
        step_s, batch = self._decode[hardware]
        steps = self._output_tokens - (objective == "exact")
        # One-token outputs take no step; a slot still turns over.
        held_s = np.full(len(splits), max(steps, 1.0) * step_s)
        if self._scenario.scheduling.admission == "reserve_first":
            held_s += self._before_decode_s(hardware, splits, objective)
        return held_s / batch

    def _before_decode_s(self, hardware: str, splits: IntArray, objective: Objective) -> FloatArray:
        """Seconds that a reserved slot waits for a mean request's prefill and KV, neither of which
        finds a queue. Several PrfaaS clusters count by their instances."""
        fabric, link = self.fabric_bytes_per_s, self._scenario.link
        cost = self._until_landed(hardware, fabric, 0.0)
        total_s = self._short(("landed", hardware), cost, splits, objective)
        instances = sum(one.num_instances for one in self.remote)
        for one in self.remote:
            delay_s = link.near_to_far.delay_s + link.far_to_near.delay_s
            cost = self._until_landed(one.hardware, one.link_bytes_per_s, delay_s)
            key = ("landed", one.hardware, one.link_bytes_per_s)
            share = one.num_instances / instances
            total_s = total_s + share * self._long(key, cost, splits, objective)
        return total_s

    def _until_landed(self, hardware: str, path_bytes_per_s: float, delay_s: float) -> Cost:
        """T_prefill and the exposed transfer of a request alone (``harness.ttft``)."""
        architecture = self._scenario.model.architecture

        def cost(new_tokens: FloatArray, cached_tokens: FloatArray) -> FloatArray:
            prefill_s = self._prefill(hardware)(new_tokens, cached_tokens)
            if not self._scenario.transport.layerwise:
                sending_s = self._moved_bytes(new_tokens, cached_tokens) / path_bytes_per_s
                return prefill_s + sending_s + delay_s
            new, cached = np.rint(new_tokens), np.rint(cached_tokens)
            landed_s = _landed_s(architecture, new, cached, prefill_s, path_bytes_per_s)
            return landed_s + delay_s

        return cost

    def _prefill(self, hardware: str) -> Cost:
        return self._scenario.hardware[hardware].profile.prefill_s_array

    def _moved_bytes(self, new_tokens: FloatArray, cached_tokens: FloatArray) -> FloatArray:
        """S_kv of what has to move, whole tokens."""
        new, cached = np.rint(new_tokens), np.rint(cached_tokens)
        return self._scenario.model.architecture.moved_bytes_array(new + cached, cached)

    def _long(self, key: object, cost: Cost, splits: IntArray, objective: Objective) -> FloatArray:
        """p E[cost | l > t], or p cost(l_long). ``key`` names the cost."""
        if objective == "exact":
            running = self._sum_of(key, cost)
            # Differences of running sums leave rounding where the far side is empty.
            return np.where(splits == len(self.lengths), 0.0, running[-1] - running[splits])
        sides = self._sides(splits)
        if ("long", key) not in self._costs_asked:
            found = _times_mean_cost(sides.offloaded, cost, *sides.long)
            self._costs_asked["long", key] = found
        return self._costs_asked["long", key]

    def _short(self, key: object, cost: Cost, splits: IntArray, objective: Objective) -> FloatArray:
        """(1 - p) E[cost | l <= t], or (1 - p) cost(l_short)."""
        if not splits.any():  # hardware that only decodes need not cover the lengths
            return np.zeros(len(splits))
        if objective == "exact":
            return self._sum_of(key, cost)[splits]
        sides = self._sides(splits)
        if ("short", key) not in self._costs_asked:
            found = _times_mean_cost(1 - sides.offloaded, cost, *sides.short)
            self._costs_asked["short", key] = found
        return self._costs_asked["short", key]

    def _sum_of(self, key: object, cost: Cost) -> FloatArray:
        """Running sums of a cost, made once."""
        if key not in self._sums:
            self._sums[key] = _running(self._weights * cost(self.lengths, self._cached))
        return self._sums[key]

    def _sides(self, splits: IntArray) -> _Sides:
        if self._sides_asked is None or splits is not self._asked:
            within = self._share[splits]
            everything = splits == len(self.lengths)
            tokens = ((self._new_tokens, self.lengths), (self._cached_tokens, self._cached))
            long, short = [], []
            for running, values in tokens:
                with np.errstate(invalid="ignore", divide="ignore"):
                    beyond = (running[-1] - running[splits]) / (1.0 - within)
                    inside = running[splits] / within
                # A mean of equal values may round beyond them, and beyond what a profile covers.
                low, high = values.min(), values.max()
                long.append(np.clip(np.where(everything, np.nan, beyond), low, high))
                short.append(np.clip(inside, low, high))
            offloaded = np.where(everything, 0.0, 1.0 - within)
            self._asked, self._costs_asked = splits, {}
            self._sides_asked = _Sides(offloaded, (long[0], long[1]), (short[0], short[1]))
        return self._sides_asked

    def _after_each_length(self) -> IntArray:
        """0, and the number of lengths up to each distinct one."""
        return np.flatnonzero(np.concatenate(([True], np.diff(self._whole) > 0, [True])))


def _landed_s(
    architecture: Architecture,
    new_tokens: FloatArray,
    cached_tokens: FloatArray,
    prefill_s: FloatArray,
    path_bytes_per_s: float,
) -> FloatArray:
    """When the last byte has left, layer by layer on a free path: that of
    ``harness.transfer_model`` for a prompt of one chunk, a layer at a time. # (points,)"""
    total_tokens, layers = new_tokens + cached_tokens, architecture.layers
    sizes_s = {
        kind: replace(architecture, layers=(kind,)).moved_bytes_array(total_tokens, cached_tokens)
        / path_bytes_per_s
        for kind in architecture.kind_counts
    }
    left_s, last_s = np.zeros(len(prefill_s)), np.zeros(len(prefill_s))
    for number in range(len(layers), 0, -1):
        left_s = left_s + sizes_s[layers[number - 1]]
        last_s = np.maximum(last_s, prefill_s * (number / len(layers)) + left_s)
    return last_s


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
    prefill, fabric and ingress, its decode. # (divisions, splits), (divisions, splits)"""
    cluster = divisions[0]
    prefill_counts = np.array([[one.num_prefill] for one in divisions], dtype=np.float64)
    decode_counts = np.array([[one.num_decode] for one in divisions], dtype=np.float64)
    # An instance prefills and sends at once, so the slower of the two limits it.
    local_s = np.maximum(
        costs.local_s(cluster.hardware, splits, objective),
        costs.staying_bytes(splits, objective) / costs.fabric_bytes_per_s,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        prefill = np.where(local_s > 0, prefill_counts / local_s, np.inf)
        if costs.remote:
            crossing = costs.crossing_bytes(splits, objective)
            prefill = np.minimum(prefill, cluster.link_bytes_per_s / crossing)
    return prefill, decode_counts / costs.slots_s(cluster.hardware, splits, objective)


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
    staying = float(costs.staying_bytes(splits, objective)[0])
    senders = sum(c.num_prefill for c in costs.local)
    decode = sum(
        c.num_decode / float(costs.slots_s(c.hardware, splits, objective)[0]) for c in costs.local
    )
    egress = sum(c.link_bytes_per_s for c in costs.remote)
    ingress = sum(c.link_bytes_per_s for c in costs.local)
    return StageRates(
        prfaas_prefill=_finite(remote) if costs.remote else None,
        pd_prefill=_finite(local) if senders else None,
        pd_decode=decode,
        link=min(egress, ingress) / crossing if crossing > 0 else None,
        fabric=senders * costs.fabric_bytes_per_s / staying if senders and staying > 0 else None,
    )


def _rate(count: int, cost_s: float) -> float:
    return count / cost_s if cost_s > 0 else np.inf


def _finite(rate: float) -> float | None:
    return rate if np.isfinite(rate) else None


def _running(values: FloatArray) -> FloatArray:
    """Sum of the first k values at index k. # (points + 1,)"""
    return np.concatenate(([0.0], np.cumsum(values)))


def _times_mean_cost(
    share: FloatArray, cost: Cost, mean_new: FloatArray, mean_cached: FloatArray
) -> FloatArray:
    """share x cost(E[l]); 0 where there is no such side."""
    total = np.zeros(len(share))
    some = share > 0
    total[some] = share[some] * cost(mean_new[some], mean_cached[some])
    return total
