"""A scenario with one input changed, and what the best plan of the changed one carries.

Every change leaves the instances alone and searches threshold and split again, for the offloading
deployment and for the baseline, so that a sensitivity is that of a plan which follows its inputs.
Link rates are those of the scenario's own link; further clusters keep theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from harness.core import ScenarioError
from harness.deployment import Deployment
from harness.profile import Profile
from harness.scenario import Scenario
from harness.settings import Hardware
from harness.throughput import DeploymentModel, Objective
from harness.throughput.costs import Costs
from harness.throughput.model import carried
from harness.throughput.search import solved
from harness.workload import LengthDistribution, length_distribution
from netem.link import LinkError

BASELINE, OFFLOADING = "homogeneous_pd", "prfaas_pd"
#: No link limits anything at this rate; a link has to be finite.
UNLIMITED_BYTES_PER_S = 1e30


@dataclass(frozen=True, slots=True)
class Variant:
    """What is solved: a scenario, its lengths and the two deployments that are compared."""

    scenario: Scenario
    lengths: LengthDistribution
    offloading: Deployment
    baseline: Deployment | None


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best plan and what it carries; the numbers are None where ``reason`` refuses the input.

    ``bottleneck`` names the stage that saturates first; a balanced plan has two that nearly tie.
    """

    threshold_tokens: int | None
    num_prefill: int | None
    num_decode: int | None
    throughput_req_per_s: float | None
    homogeneous_req_per_s: float | None
    ratio: float | None
    bottleneck: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class BestPlan:
    """What the instances carry at their best by one set of equations, and what limits them."""

    deployment: Deployment
    throughput_req_per_s: float
    bottleneck: str


Change = Callable[[Variant], Variant]


def base_variant(
    scenario: Scenario,
    deployments: dict[str, Deployment],
    lengths: LengthDistribution | None = None,
) -> Variant | None:
    """The scenario as it is; None where it has no deployment with a PrfaaS cluster to plan."""
    offloading = deployments.get(OFFLOADING)
    if offloading is None or not offloading.num_prfaas:
        return None
    lengths = lengths or length_distribution(scenario)
    return Variant(scenario, lengths, offloading, deployments.get(BASELINE))


def throughput_req_per_s(model: DeploymentModel, objective: Objective) -> float:
    """Lambda_max by the equations of ``objective``."""
    exact = objective == "exact"
    return model.lambda_max_exact_req_per_s if exact else model.lambda_max_req_per_s


def best_plan(
    scenario: Scenario, deployment: Deployment, objective: Objective, lengths: LengthDistribution
) -> BestPlan:
    """The deployment's instances at their best threshold and split."""
    costs = Costs(scenario, deployment, lengths)
    found = solved(costs, deployment, objective)
    return BestPlan(found, *carried(costs, found, objective))


def baseline_req_per_s(variant: Variant, objective: Objective) -> float | None:
    """Lambda_max of the baseline at its best split; None where there is no baseline."""
    if variant.baseline is None:
        return None
    best = best_plan(variant.scenario, variant.baseline, objective, variant.lengths)
    return best.throughput_req_per_s


def optimum(
    base: Variant, change: Change, objective: Objective, homogeneous_req_per_s: float | None = None
) -> Optimum:
    """The best plan after ``change``; the baseline's, where given, is not solved again."""
    try:
        variant = change(base)
        scenario, lengths = variant.scenario, variant.lengths
        best = best_plan(scenario, variant.offloading, objective, lengths)
        homogeneous = homogeneous_req_per_s or baseline_req_per_s(variant, objective)
    except (ScenarioError, LinkError) as refusal:
        return Optimum(None, None, None, None, None, None, None, str(refusal))
    found, most = best.deployment, best.throughput_req_per_s
    return Optimum(
        threshold_tokens=found.threshold_tokens,
        num_prefill=found.num_prefill or None,
        num_decode=found.num_decode,
        throughput_req_per_s=most,
        homogeneous_req_per_s=homogeneous,
        ratio=most / homogeneous if homogeneous else None,
        bottleneck=best.bottleneck,
        reason=None,
    )


def unchanged(base: Variant) -> Variant:
    return base


def with_output_length(base: Variant, output_tokens: int) -> Variant:
    """Outputs that long on average; a law of output lengths is stretched, bounds and all."""
    workload = base.scenario.workload
    factor = output_tokens / workload.output_tokens
    changed = replace(
        workload,
        output_tokens=output_tokens,
        output_min_tokens=max(1, round(workload.output_min_tokens * factor)),
        output_max_tokens=max(1, round(workload.output_max_tokens * factor)),
    )
    mean = max(1.0, base.lengths.mean_output_tokens * factor)
    return replace(
        base,
        scenario=replace(base.scenario, workload=changed),
        lengths=replace(base.lengths, mean_output_tokens=mean),
    )


def with_tpot(base: Variant, tpot_s: float) -> Variant:
    slo = replace(base.scenario.slo, tpot_s=tpot_s)
    return replace(base, scenario=replace(base.scenario, slo=slo))


def with_link_rate(base: Variant, rate_bytes_per_s: float) -> Variant:
    link = base.scenario.link.both(rate_bytes_per_s=rate_bytes_per_s)
    return replace(base, scenario=replace(base.scenario, link=link))


def without_link_limits(base: Variant) -> Variant:
    """Every link, those of further clusters too, carries whatever is sent."""
    unlimited = with_link_rate(base, UNLIMITED_BYTES_PER_S)
    offloading = replace(
        base.offloading,
        more_prfaas=tuple(
            replace(one, link_bytes_per_s=UNLIMITED_BYTES_PER_S)
            for one in base.offloading.more_prfaas
        ),
        more_pd=tuple(
            replace(one, link_bytes_per_s=UNLIMITED_BYTES_PER_S) for one in base.offloading.more_pd
        ),
    )
    return replace(unlimited, offloading=offloading)


def with_length_law(base: Variant, mu: float, sigma: float) -> Variant:
    """Other prompt lengths, in the same bounds; only a workload without a trace has a law."""
    workload = replace(base.scenario.workload, mu=mu, sigma=sigma)
    scenario = replace(base.scenario, workload=workload)
    return replace(base, scenario=scenario, lengths=length_distribution(scenario))


def with_agent_share(base: Variant, agent_share: float) -> Variant:
    """That share of the requests finds ``prefix.cached_fraction`` of its prompt cached.

    It takes the place of what the scenario says of prefixes; whole prompts keep their lengths.
    """
    prefix = replace(base.scenario.prefix, model="share", agent_share=agent_share)
    given = base.lengths
    # One entry a prompt length, whatever part of it was found cached; sums differ in the last bits.
    prompts = np.round(given.lengths + given.cached_tokens, 6)
    totals, place = np.unique(prompts, return_inverse=True)
    weights = np.bincount(place, given.weights)
    cached = np.minimum(totals * prefix.cached_fraction, totals - 1)  # one token is always new
    sides = [
        (share, found)
        for share, found in ((1 - agent_share, np.zeros(len(totals))), (agent_share, cached))
        if share > 0
    ]
    return replace(
        base,
        scenario=replace(base.scenario, prefix=prefix),
        lengths=replace(
            given,
            lengths=np.concatenate([totals - found for _, found in sides]),
            weights=np.concatenate([share * weights for share, _ in sides]),
            cached_tokens=np.concatenate([found for _, found in sides]),
        ),
    )


def with_chip_speed(base: Variant, speed: float) -> Variant:
    """PrfaaS hardware whose every prefill takes 1 / ``speed`` of the time; the PD hardware stays,
    also where it is of the same name."""
    offloading = base.offloading
    remote = {one.hardware for one in offloading.prfaas_clusters(0.0)}
    renamed = {name: f"{name} x {speed:g}" for name in remote}
    hardware = dict(base.scenario.hardware)
    for name, new_name in renamed.items():
        given = hardware[name]
        hardware[new_name] = _sped_up(given, new_name, speed)
    assert offloading.prfaas_hardware is not None, "a PrfaaS cluster has hardware"
    changed = replace(
        offloading,
        prfaas_hardware=renamed[offloading.prfaas_hardware],
        more_prfaas=tuple(
            replace(one, hardware=renamed[one.hardware]) for one in offloading.more_prfaas
        ),
    )
    return replace(base, scenario=replace(base.scenario, hardware=hardware), offloading=changed)


def _sped_up(hardware: Hardware, name: str, speed: float) -> Hardware:
    profile: Profile = hardware.profile
    points = tuple(
        replace(
            point,
            prefill_s=point.prefill_s / speed,
            provenance="modelled",
            source=f"{speed:g} times as fast as: {point.source}",
        )
        for point in profile.prefill_points
    )
    return replace(hardware, name=name, profile=replace(profile, prefill_points=points))
