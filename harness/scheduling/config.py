"""The scheduler's configuration, read off a scenario and one of its deployments.

Expected exposed transfer of a request alone on its path (seconds after the end of prefill):

    layer-wise:  max_k (T_prefill (k + 1) / L + sum_{j >= k} b_j / R) - T_prefill + delay
    at the end:  S_kv / R + delay

with L layers of b_j bytes and R the path's rate. It equals the queue of ``harness.kv_path`` for a
request alone, and only guides the choice of a decode instance.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from harness.architecture import Architecture, FloatArray
from harness.attention import Layer
from harness.core import PRFAAS, Instance, ScenarioError
from harness.deployment import Balancing, Deployment
from harness.profile import Profile
from harness.scenario import Scenario
from harness.scheduling.scheduler_config import Decoding, Link, SchedulerConfig, TransferTail
from harness.settings import PrefixCache, Scheduling, Workload

#: Rounding must not make a layer look shorter than the step between two.
_SURELY = 1 + 1e-9


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
    links = {PRFAAS: Link(link_bytes_per_s, 0.0, link_delay_s)}
    tail_s = tail_function(
        architecture, layerwise=layerwise, links=links, fabric_bytes_per_s=fabric_bytes_per_s
    )
    return lambda tokens, prefill_s, crosses: tail_s(
        tokens, 0, prefill_s, PRFAAS if crosses else None
    )


def tail_function(
    architecture: Architecture,
    *,
    layerwise: bool,
    links: Mapping[str, Link],
    fabric_bytes_per_s: float,
) -> TransferTail:
    """The same over any of several links, for the part of the KV that is not resident."""
    layers, windows = architecture.layers, {one.window_tokens for one in architecture.layers}
    growing_left = _from_each_on(layer.growing_bytes_per_token for layer in layers)
    fixed_left = _from_each_on(layer.fixed_bytes for layer in layers)
    window_left = {
        tokens: _from_each_on(
            layer.window_bytes_per_token if layer.window_tokens == tokens else 0 for layer in layers
        )
        for tokens in windows - {0}
    }
    shares = np.arange(1.0, len(layers) + 1) / len(layers)
    rates = {None: fabric_bytes_per_s} | {name: link.bytes_per_s for name, link in links.items()}
    delays = {None: 0.0} | {name: link.kv_delay_s for name, link in links.items()}

    @lru_cache(maxsize=1)  # a placement asks for one prompt on several paths
    def left_bytes(input_tokens: int, resident_tokens: int) -> FloatArray:
        left = growing_left * float(input_tokens - resident_tokens) + fixed_left
        for tokens, of_window in window_left.items():
            left = left + of_window * float(min(input_tokens, tokens))
        return left

    last_layer, most_of_layer = layers[-1], _most_of_layer(layers)

    def tail_s(
        input_tokens: int, resident_tokens: int, prefill_s: float, link: str | None
    ) -> float:
        if layerwise:
            # Where each layer is gone before the next is ready the last one is what is left.
            most = most_of_layer(input_tokens, resident_tokens)
            if most * len(layers) * _SURELY <= prefill_s * rates[link]:
                last = last_layer.kv_bytes(input_tokens, resident_tokens)
                return (prefill_s + last / rates[link]) - prefill_s + delays[link]
        left = left_bytes(input_tokens, resident_tokens)
        if layerwise:
            left_s = left / rates[link]
            sending_s = float((shares * prefill_s + left_s).max()) - prefill_s
        else:
            sending_s = float(left[0]) / rates[link]
        return sending_s + delays[link]

    return tail_s


def _most_of_layer(layers: Sequence[Layer]) -> Callable[[int, int], int]:
    """(input_tokens, resident_tokens) -> bytes that no layer exceeds."""
    growing = max(one.growing_bytes_per_token for one in layers)
    fixed = max(one.fixed_bytes for one in layers)
    window = max(one.window_bytes_per_token for one in layers)
    longest = max(one.window_tokens for one in layers)
    if not window:
        return lambda tokens, resident: growing * (tokens - resident) + fixed
    return lambda tokens, resident: (
        growing * (tokens - resident) + fixed + window * min(tokens, longest)
    )


def _from_each_on(sizes_bytes: Iterable[int]) -> FloatArray:
    """What is left from each layer on, itself included: whole numbers, so exact."""  # [layers]
    left: FloatArray = np.cumsum(np.array(list(sizes_bytes), dtype=np.float64)[::-1])[::-1]
    return np.ascontiguousarray(left)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a scheduler is built from, in plain values, so that another process can be told it.

    ``dispatch_delay_s`` is the link's way from the gateway to PrfaaS, ``kv_delay_s`` the way back.
    ``egress_bytes_per_s`` are the rates of further PrfaaS clusters' links, by cluster, whose delays
    are the same; ``ingress_bytes_per_s`` and ``more_decoding`` are those of ``SchedulerConfig``.
    ``max_tokens`` is the longest prompt of the workload. ``link_silence_s``: after so long without
    movement or word a link is down; it must be longer than the time between two reports.
    """

    instances: tuple[Instance, ...]
    threshold_tokens: int | None
    balancing: Balancing
    decode_step_s: float
    decode_max_batch: int
    max_tokens: int
    layerwise: bool
    link_bytes_per_s: float
    fabric_bytes_per_s: float
    dispatch_delay_s: float
    kv_delay_s: float
    link_silence_s: float
    scheduling: Scheduling
    prefix_cache: PrefixCache
    egress_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    ingress_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    more_decoding: Mapping[str, Decoding] = field(default_factory=dict)


def policy_of(scenario: Scenario, deployment: Deployment) -> Policy:
    """The policy of a deployment over the link that the scenario asks for."""
    link_bytes_per_s = scenario.link.rate_bytes_per_s
    egress = deployment.egress_bytes_per_s(link_bytes_per_s)
    return Policy(
        instances=deployment.instances(),
        threshold_tokens=deployment.threshold_tokens,
        balancing=deployment.balancing,
        decode_step_s=decode_step_s(scenario, deployment),
        decode_max_batch=decode_batch(scenario, deployment),
        max_tokens=scenario.workload.max_tokens,
        layerwise=scenario.transport.layerwise,
        link_bytes_per_s=link_bytes_per_s,
        fabric_bytes_per_s=scenario.fabric.rate_bytes_per_s,
        dispatch_delay_s=scenario.link.near_to_far.delay_s,
        kv_delay_s=scenario.link.far_to_near.delay_s,
        link_silence_s=scenario.scheduling.control_period_s,
        scheduling=scenario.scheduling,
        prefix_cache=scenario.prefix_cache,
        egress_bytes_per_s={name: rate for name, rate in egress.items() if name != PRFAAS},
        ingress_bytes_per_s=deployment.ingress_bytes_per_s(link_bytes_per_s),
        more_decoding=_more_decoding(scenario, deployment),
    )


def _more_decoding(scenario: Scenario, deployment: Deployment) -> dict[str, Decoding]:
    """By hardware that further PD clusters decode on and the first one does not."""
    names = {one.hardware for one in deployment.more_pd} - {deployment.pd_hardware}
    own = {name: replace(deployment, pd_hardware=name) for name in sorted(names)}
    return {
        name: Decoding(decode_step_s(scenario, one), decode_batch(scenario, one))
        for name, one in own.items()
    }


def configure(
    policy: Policy,
    profiles: Mapping[str, Profile],
    architecture: Architecture,
    *,
    transfer: bool = True,
) -> SchedulerConfig:
    """The scheduler's configuration, with the costs by hardware name; without ``transfer`` KV
    moves, and the link is crossed, in no time."""
    near = {one.cluster for one in policy.instances if one.role == "decode"}
    links = {
        name: Link(
            bytes_per_s=rate if transfer else math.inf,
            dispatch_delay_s=policy.dispatch_delay_s if transfer else 0.0,
            kv_delay_s=policy.kv_delay_s if transfer else 0.0,
        )
        for name in dict.fromkeys(one.cluster for one in policy.instances)
        if name not in near
        for rate in [policy.egress_bytes_per_s.get(name, policy.link_bytes_per_s)]
    }
    fabric_bytes_per_s = policy.fabric_bytes_per_s if transfer else math.inf
    used = {one.hardware for one in policy.instances if one.role == "prefill"}
    if policy.scheduling.role_conversion:
        used |= {one.hardware for one in policy.instances}
    return SchedulerConfig(
        instances=policy.instances,
        prefill_s={name: profiles[name].prefill_s for name in sorted(used)},
        decode_step_s=policy.decode_step_s,
        decode_max_batch=policy.decode_max_batch,
        threshold_tokens=policy.threshold_tokens,
        balancing=policy.balancing,
        scheduling=policy.scheduling,
        prefix_cache=policy.prefix_cache,
        links=links,
        fabric_bytes_per_s=fabric_bytes_per_s,
        moved_bytes=architecture.moved_bytes,
        transfer_tail_s=tail_function(
            architecture,
            layerwise=policy.layerwise,
            links=links,
            fabric_bytes_per_s=fabric_bytes_per_s,
        ),
        max_tokens=policy.max_tokens,
        link_silence_s=policy.link_silence_s,
        ingress_bytes_per_s=policy.ingress_bytes_per_s if transfer else {},
        more_decoding=policy.more_decoding,
    )


def scheduler_config(
    scenario: Scenario, deployment_name: str, *, transfer: bool = True
) -> SchedulerConfig:
    """Configuration of the scheduler for a deployment; without ``transfer`` KV moves in no time."""
    profiles = {name: hardware.profile for name, hardware in scenario.hardware.items()}
    policy = policy_of(scenario, scenario.deployments[deployment_name])
    return configure(policy, profiles, scenario.model.architecture, transfer=transfer)
