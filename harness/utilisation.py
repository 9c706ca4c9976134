"""Offered utilisation of each stage: work that a schedule brings over what the stage can do.

    prefill    sum of T_prefill / (instances x window)
    decode     sum of (output_tokens - 1) T_decode / (slots x window); with reserve_first a slot is
               also held through prefill, exposed transfer and both hops
    link       sum of S_kv of what crosses / (rate x window)
    fabric     sum of S_kv of what stays / (local prefill instances x rate x window)

Above 1 a queue grows for as long as the load lasts; near 1 a finite run says little about it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from harness.core import PD, PRFAAS, Request, ScenarioError
from harness.deployment import Deployment
from harness.scenario import Scenario
from harness.schedule import Schedule
from harness.scheduling.config import decode_batch, decode_step_s, transfer_tail_function

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Offered work over capacity, by stage; None where the deployment has no such stage."""

    prfaas_prefill: float | None
    pd_prefill: float | None
    pd_decode: float | None
    link: float | None
    fabric: float | None = None

    def by_stage(self) -> dict[str, float]:
        """The stages that there are."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def busiest(self) -> tuple[str, float]:
        """Name and utilisation of the stage that saturates first."""
        stages = self.by_stage()
        name = max(stages, key=stages.__getitem__)
        return name, stages[name]

    def load_scale_for(self, max_utilisation: float) -> float:
        """Factor on the load that would bring the busiest stage to ``max_utilisation``."""
        return max_utilisation / self.busiest()[1]


def window_s(scenario: Scenario, schedule: Sequence[Request]) -> float:
    """How long the load lasts: first to last planned arrival and one mean gap more.

    n arrivals span n - 1 gaps. Where they span nothing (one request, or all at one instant) it is
    the scenario's duration, else the time that n requests take at the scenario's rate.
    ScenarioError for a closed loop, whose end no plan knows.
    """
    if not schedule:
        raise ScenarioError("The schedule holds no request; raise num_requests or the duration.")
    if scenario.load.concurrency is not None:
        raise ScenarioError(
            f"'load.concurrency' in the scenario file {scenario.path} makes the load a closed "
            "loop, whose length completions decide and no plan. Give load.rate_req_per_s in its "
            "place."
        )
    planned_s = _column(schedule, "planned_s")
    spread_s = float(planned_s.max() - planned_s.min())
    if spread_s > 0:
        return spread_s * len(planned_s) / (len(planned_s) - 1)
    return scenario.load.duration_s or len(planned_s) / scenario.load.rate_req_per_s


def _column(schedule: Sequence[Request], name: str) -> FloatArray:
    """A field of every request; those of a ``Schedule`` are columns. # [requests]"""
    if isinstance(schedule, Schedule):
        zeros = np.zeros(len(schedule))
        return zeros if name == "cached_tokens" else np.asarray(getattr(schedule, name), np.float64)
    return np.fromiter((getattr(one, name) for one in schedule), np.float64, len(schedule))


def predict_utilisation(
    scenario: Scenario, deployment_name: str, schedule: Sequence[Request]
) -> Utilisation:
    """Offered utilisation of each stage of a deployment under a concrete schedule.

    Every request goes where the threshold sends it, with every instance up; balanced by capacity,
    each is shared out so that all prefill instances are equally busy. Clusters of a kind, and their
    links, count together.
    """
    deployment = scenario.deployments[deployment_name]
    window = window_s(scenario, schedule)
    step_s = decode_step_s(scenario, deployment)
    instances = deployment.instances()
    near = {i.cluster for i in instances if i.role == "decode"}
    hardware: dict[str, Counter[str]] = {}
    for one in instances:
        if one.role == "prefill":
            hardware.setdefault(PD if one.cluster in near else PRFAAS, Counter())[one.hardware] += 1
    count = {side: of.total() for side, of in hardware.items()}
    cost = {side: _side_prefill_s(scenario, of) for side, of in hardware.items()}
    total, cached = _column(schedule, "input_tokens"), _column(schedule, "cached_tokens")
    kv_bytes = scenario.model.architecture.kv_bytes_array(total)
    held_s = _held_before_decode(scenario)
    slots_s = float((_column(schedule, "output_tokens") - 1).sum()) * step_s
    busy_s, sent_bytes = dict.fromkeys(hardware, 0.0), dict.fromkeys(hardware, 0.0)
    for cluster, part in _parts(total - cached, cached, deployment, cost, count).items():
        own_s = np.zeros(len(total))
        taken = part > 0
        own_s[taken] = cost[cluster]((total - cached)[taken], cached[taken])
        busy_s[cluster] = float(np.dot(part, own_s))
        sent_bytes[cluster] = float(np.dot(part, kv_bytes))
        if held_s is not None:
            rows = zip(part.tolist(), total.astype(int).tolist(), own_s.tolist(), strict=True)
            slots_s += sum(
                share * held_s(tokens, one_s, cluster == PRFAAS) for share, tokens, one_s in rows
            )
    crossing_bytes, staying_bytes = sent_bytes.get(PRFAAS, 0.0), sent_bytes.get(PD, 0.0)
    share = {c: busy_s[c] / (count[c] * window) for c in hardware}
    slots = _slots(scenario, deployment, step_s)
    link = crossing_bytes / (_crossing_bytes_per_s(scenario, deployment) * window)
    return Utilisation(
        prfaas_prefill=share.get(PRFAAS),
        pd_prefill=share.get(PD),
        pd_decode=slots_s / (slots * window),
        link=link if PRFAAS in share else None,
        fabric=(
            staying_bytes / (count[PD] * scenario.fabric.rate_bytes_per_s * window)
            if PD in share
            else None
        ),
    )


def _side_prefill_s(
    scenario: Scenario, hardware: Mapping[str, int]
) -> Callable[[FloatArray, FloatArray], FloatArray]:
    """Seconds of an instance of either of the kinds that a cluster's or several clusters' instances
    are of, shared out so that all of them are equally busy. # [requests]"""
    costs = {name: scenario.hardware[name].profile.prefill_s_array for name in hardware}
    if len(costs) == 1:
        return next(iter(costs.values()))

    def prefill_s(uncached: FloatArray, cached: FloatArray) -> FloatArray:
        each_s = {name: of(uncached, cached) for name, of in costs.items()}
        carried = {name: hardware[name] / float(one.sum()) for name, one in each_s.items()}
        whole = sum(carried.values())
        shared = [carried[name] / whole * one for name, one in each_s.items()]
        return np.asarray(np.sum(shared, axis=0))

    return prefill_s


def _slots(scenario: Scenario, deployment: Deployment, step_s: float) -> float:
    """Decode slots, those of PD clusters on other hardware by how many of ``step_s`` do as much."""
    if all(one.hardware == deployment.pd_hardware for one in deployment.more_pd):
        count = sum(one.num_decode for one in deployment.pd_clusters(0.0))
        return count * decode_batch(scenario, deployment)
    total = 0.0
    for one in deployment.pd_clusters(0.0):
        own = replace(deployment, pd_hardware=one.hardware)
        steps = step_s / decode_step_s(scenario, own)
        total += one.num_decode * decode_batch(scenario, own) * steps
    return total


def _crossing_bytes_per_s(scenario: Scenario, deployment: Deployment) -> float:
    """What may leave the PrfaaS clusters, or enter the PD clusters where that is less."""
    rate = scenario.link.rate_bytes_per_s
    if not deployment.more_prfaas and not deployment.more_pd:
        return rate
    leaves = sum(deployment.egress_bytes_per_s(rate).values())
    return min(leaves or rate, sum(deployment.ingress_bytes_per_s(rate).values()))


def _parts(
    uncached: FloatArray,
    cached: FloatArray,
    deployment: Deployment,
    cost: Mapping[str, Callable[[FloatArray, FloatArray], FloatArray]],
    count: Mapping[str, int],
) -> dict[str, FloatArray]:
    """The share of each request that each cluster prefills. # [requests] each"""
    if len(cost) == 1:
        return {cluster: np.ones(len(uncached)) for cluster in cost}
    if deployment.balancing == "threshold":
        assert deployment.threshold_tokens is not None, "two clusters prefill without a threshold"
        crosses = (uncached > deployment.threshold_tokens).astype(np.float64)
        return {PRFAAS: crosses, PD: 1 - crosses}
    capacity = {
        cluster: count[cluster] / float(of(uncached, cached).sum()) for cluster, of in cost.items()
    }
    whole = sum(capacity.values())
    return {cluster: np.full(len(uncached), own / whole) for cluster, own in capacity.items()}


def _held_before_decode(scenario: Scenario) -> Callable[[int, float, bool], float] | None:
    """(input_tokens, prefill_s, crosses) -> seconds that a slot is held before decoding begins,
    neither prefill nor the path being busy; None unless slots are reserved."""
    if scenario.scheduling.admission != "reserve_first":
        return None
    link = scenario.link
    tail_s = transfer_tail_function(
        scenario.model.architecture,
        layerwise=scenario.transport.layerwise,
        link_bytes_per_s=link.rate_bytes_per_s,
        fabric_bytes_per_s=scenario.fabric.rate_bytes_per_s,
        link_delay_s=link.far_to_near.delay_s,
    )
    out_s = {True: link.near_to_far.delay_s, False: 0.0}
    return lambda tokens, prefill_s, crosses: (
        out_s[crosses] + prefill_s + tail_s(tokens, prefill_s, crosses)
    )
