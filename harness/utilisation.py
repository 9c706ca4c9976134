"""Offered utilisation of each stage: work that a schedule brings over what the stage can do.

    prefill    sum of T_prefill / (instances x window)
    decode     sum of (output_tokens - 1) T_decode / (slots x window); with reserve_first a slot is
               also held through prefill, exposed transfer and both hops
    link       sum of S_kv of what crosses / (rate x window)
    fabric     sum of S_kv of what stays / (local prefill instances x rate x window)

Above 1 a queue grows for as long as the load lasts; near 1 a finite run says little about it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from harness.core import PD, PRFAAS, Request, ScenarioError
from harness.deployment import Deployment
from harness.scenario import Scenario
from harness.scheduling.config import (
    decode_batch,
    decode_step_s,
    no_transfer,
    transfer_tail_function,
)
from harness.scheduling.router import preferred_cluster


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
    """
    if not schedule:
        raise ScenarioError("The schedule holds no request; raise num_requests or the duration.")
    planned = [request.planned_s for request in schedule]
    spread_s = max(planned) - min(planned)
    if spread_s > 0:
        return spread_s * len(planned) / (len(planned) - 1)
    return scenario.load.duration_s or len(planned) / scenario.load.rate_req_per_s


def predict_utilisation(
    scenario: Scenario, deployment_name: str, schedule: Sequence[Request]
) -> Utilisation:
    """Offered utilisation of each stage of a deployment under a concrete schedule.

    Every request goes where the threshold sends it, with every instance up; balanced by capacity,
    each is shared out so that all prefill instances are equally busy.
    """
    deployment = scenario.deployments[deployment_name]
    window = window_s(scenario, schedule)
    step_s = decode_step_s(scenario, deployment)
    instances = deployment.instances()
    hardware = {i.cluster: i.hardware for i in instances if i.role == "prefill"}
    count = {c: sum(i.role == "prefill" and i.cluster == c for i in instances) for c in hardware}
    prefill_s = {c: scenario.hardware[name].profile.prefill_s for c, name in hardware.items()}
    busy_s = dict.fromkeys(hardware, 0.0)
    kv_bytes = scenario.model.architecture.kv_bytes
    held_s = _held_before_decode(scenario)
    crossing_bytes, staying_bytes, slots_s = 0.0, 0.0, 0.0
    parts_of = _parts_function(schedule, deployment, prefill_s, count)
    for request in schedule:
        uncached = request.input_tokens - request.cached_tokens
        slots_s += (request.output_tokens - 1) * step_s
        for cluster, part in parts_of(uncached).items():
            own_s = prefill_s[cluster](uncached, request.cached_tokens)
            busy_s[cluster] += part * own_s
            if cluster == PRFAAS:
                crossing_bytes += part * kv_bytes(request.input_tokens)
            else:
                staying_bytes += part * kv_bytes(request.input_tokens)
            slots_s += part * held_s(request.input_tokens, own_s, cluster == PRFAAS)
    share = {c: busy_s[c] / (count[c] * window) for c in hardware}
    slots = deployment.num_decode * decode_batch(scenario, deployment)
    link = crossing_bytes / (scenario.link.rate_bytes_per_s * window)
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


def _parts_function(
    schedule: Sequence[Request],
    deployment: Deployment,
    prefill_s: Mapping[str, Callable[[int, int], float]],
    count: Mapping[str, int],
) -> Callable[[int], Mapping[str, float]]:
    """(uncached_tokens) -> the share of such a request that each cluster prefills."""
    if deployment.balancing == "threshold":
        wholly = {cluster: {cluster: 1.0} for cluster in prefill_s}
        threshold = deployment.threshold_tokens
        return lambda tokens: wholly[preferred_cluster(tokens, threshold, prefill_s)]
    capacity = {
        cluster: count[cluster]
        / sum(cost(one.input_tokens - one.cached_tokens, one.cached_tokens) for one in schedule)
        for cluster, cost in prefill_s.items()
    }
    parts = {cluster: own / sum(capacity.values()) for cluster, own in capacity.items()}
    return lambda _tokens: parts


def _held_before_decode(scenario: Scenario) -> Callable[[int, float, bool], float]:
    """(input_tokens, prefill_s, crosses) -> seconds that a slot is held before decoding begins,
    neither prefill nor the path being busy; 0 unless slots are reserved."""
    if scenario.scheduling.admission != "reserve_first":
        return no_transfer
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
