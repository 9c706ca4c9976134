"""The scheduler's configuration, read off a scenario and one of its deployments.

Expected exposed transfer of a request alone on its path (seconds after the end of prefill):

    layer-wise:  max_k (T_prefill (k + 1) / L + sum_{j >= k} b_j / R) - T_prefill + delay
    at the end:  S_kv / R + delay

with L layers of b_j bytes and R the path's rate. It equals the queue of ``harness.kv_path`` for a
request alone, and only guides the choice of a decode instance.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np

from harness.architecture import Architecture
from harness.core import ScenarioError
from harness.deployment import Deployment
from harness.kv_path import LayerSizes
from harness.scenario import Scenario
from harness.scheduling.scheduler import SchedulerConfig, no_transfer
from harness.settings import Workload


def decode_batch(scenario: Scenario, deployment: Deployment) -> int:
    """BS_max of a decode instance: the largest batch that memory holds and the TPOT SLO allows.

    ScenarioError when even the smallest batch the profile covers takes longer than the SLO.
    """
    profile = scenario.hardware[deployment.pd_hardware].profile
    context_tokens = _decode_context_tokens(scenario.workload)
    batch = profile.largest_decode_batch(context_tokens, scenario.slo.tpot_s)
    if batch is None:
        fewest = min(point.batch for point in profile.decode_points)
        step_s = profile.decode_step_s(fewest, context_tokens)
        raise ScenarioError(
            f"Impossible SLO in the scenario file {scenario.path}: slo.tpot is "
            f"{1e3 * scenario.slo.tpot_s:g} ms, but a decode step of deployment "
            f"{deployment.name!r} on hardware {deployment.pd_hardware!r} takes {1e3 * step_s:g} ms "
            f"at batch {fewest} and {context_tokens:g} tokens of context (profile file "
            f"{profile.path}). Raise slo.tpot or name faster hardware."
        )
    return batch


def decode_step_s(scenario: Scenario, deployment: Deployment) -> float:
    """T_decode of a full batch: one step time for a whole run, as in Eq. 5 of the paper."""
    profile = scenario.hardware[deployment.pd_hardware].profile
    batch = decode_batch(scenario, deployment)
    return profile.decode_step_s(batch, _decode_context_tokens(scenario.workload))


def _decode_context_tokens(workload: Workload) -> float:
    """The middle of the workload's range of lengths, which for skewed lengths is above their mean
    and so errs on the slow side."""
    return (workload.min_tokens + workload.max_tokens + workload.output_tokens) / 2


def kv_bytes_function(architecture: Architecture) -> Callable[[int], int]:
    """S_kv(tokens) in O(kinds of layer), for callers that ask for every request."""
    counts = tuple(Counter(architecture.layers).items())
    return lambda tokens: sum(count * layer.kv_bytes(tokens) for layer, count in counts)


def transfer_tail_function(
    architecture: Architecture,
    *,
    layerwise: bool,
    link_bytes_per_s: float,
    fabric_bytes_per_s: float,
    link_delay_s: float,
) -> Callable[[int, float, bool], float]:
    """(input_tokens, prefill_s, crosses) -> expected exposed transfer of a request alone.

    ``link_delay_s``: of the direction that KV takes, from far to near.
    """
    sizes_of = LayerSizes(architecture)
    shares = np.arange(1.0, sizes_of.num_layers + 1) / sizes_of.num_layers
    rates = {True: link_bytes_per_s, False: fabric_bytes_per_s}
    delays = {True: link_delay_s, False: 0.0}

    def tail_s(input_tokens: int, prefill_s: float, crosses: bool) -> float:
        sizes_bytes = sizes_of(input_tokens)
        if layerwise:
            left_s = np.cumsum(sizes_bytes[::-1])[::-1] / rates[crosses]
            sending_s = float((shares * prefill_s + left_s).max()) - prefill_s
        else:
            sending_s = float(sizes_bytes.sum()) / rates[crosses]
        return sending_s + delays[crosses]

    return tail_s


def scheduler_config(
    scenario: Scenario, deployment_name: str, *, transfer: bool = True
) -> SchedulerConfig:
    """Configuration of the scheduler for a deployment; without ``transfer`` KV moves in no time."""
    deployment = scenario.deployments[deployment_name]
    instances = deployment.instances()
    used = {i.hardware for i in instances if i.role == "prefill"}
    tail_s = transfer_tail_function(
        scenario.model.architecture,
        layerwise=scenario.transport.layerwise,
        link_bytes_per_s=scenario.link.rate_bytes_per_s,
        fabric_bytes_per_s=scenario.fabric.rate_bytes_per_s,
        link_delay_s=scenario.link.far_to_near.delay_s,
    )
    return SchedulerConfig(
        instances=instances,
        prefill_s={name: scenario.hardware[name].profile.prefill_s for name in sorted(used)},
        decode_step_s=decode_step_s(scenario, deployment),
        decode_max_batch=decode_batch(scenario, deployment),
        threshold_tokens=deployment.threshold_tokens,
        admission=scenario.scheduling.admission,
        link_delay_s=scenario.link.near_to_far.delay_s if transfer else 0.0,
        transfer_tail_s=tail_s if transfer else no_transfer,
    )
