"""Whose gain it is: the chip, the threshold by length, or knowing the link.

A coalition is what the deployment that offloads has of

    chip        its PrfaaS clusters with their hardware, across the link; without it as many GPUs of
                the PD hardware serve in the PD cluster, where nothing crosses a link
    threshold   long prompts are offloaded; without it requests are split at random, as the prefill
                capacities are (``harness.planning.random_split``)
    bandwidth   threshold (or share) and N_p / N_d are chosen knowing the links; without it as if
                they carried everything, and then the links apply

and its value v is the Lambda_max of the plan so chosen. None of them is the homogeneous deployment
of as many GPUs; all of them is the deployment that offloads at its best. The Shapley share of a
member i is its marginal gain averaged over the orders in which the members can be added,

    phi_i = sum over S without i of |S|! (2 - |S|)! / 3! (v(S + i) - v(S)),

and the shares add up to v(all) - v(none). Both objectives are given: "paper" puts mean lengths into
T, so that a threshold among equal chips appears to lose or gain what only the mean hides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Literal

from harness.deployment import Deployment
from harness.planning.random_split import RandomSplit
from harness.planning.variants import (
    BASELINE,
    OFFLOADING,
    Variant,
    best_plan,
    throughput_req_per_s,
    without_link_limits,
)
from harness.scenario import Scenario
from harness.throughput import Objective, deployment_model, solve
from harness.workload import LengthDistribution

Member = Literal["chip", "threshold", "bandwidth"]
#: In the order from the homogeneous deployment to the whole system.
MEMBERS: tuple[Member, ...] = ("chip", "threshold", "bandwidth")


@dataclass(frozen=True, slots=True)
class Coalition:
    members: tuple[Member, ...]
    throughput_req_per_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """``added`` joins those of the steps before; None: where the chain begins."""

    added: Member | None
    throughput_req_per_s: float
    gain_req_per_s: float


@dataclass(frozen=True, slots=True)
class Share:
    """``share_of_gain`` is None where there is no gain to share."""

    member: Member
    gain_req_per_s: float
    share_of_gain: float | None


@dataclass(frozen=True, slots=True)
class Shares:
    """``gain_req_per_s``: of all members over none, the sum of the Shapley shares.

    ``gpus_req_per_s``: none of the members over the scenario's own homogeneous deployment, which is
    0 where that has as many GPUs.
    """

    coalitions: tuple[Coalition, ...]
    chain: tuple[Step, ...]
    reverse_chain: tuple[Step, ...]
    shapley: tuple[Share, ...]
    gain_req_per_s: float
    gpus_req_per_s: float


@dataclass(frozen=True, slots=True)
class Attribution:
    """``replaced_instances`` of the PD hardware stand for the PrfaaS clusters where there is no
    chip: as many GPUs, in whole instances."""

    replaced_instances: int
    paper: Shares
    exact: Shares


def attribute(
    scenario: Scenario, deployments: dict[str, Deployment], lengths: LengthDistribution
) -> Attribution | None:
    """Parts of the gain of ``prfaas_pd`` over ``homogeneous_pd``.

    None without both of them, and where prefill is remote alone by design (neither local prefill
    nor a threshold), so that there is nothing to balance.
    """
    offloading, baseline = deployments.get(OFFLOADING), deployments.get(BASELINE)
    if offloading is None or baseline is None:
        return None
    if not offloading.num_prfaas or offloading.threshold_tokens is None:
        return None
    variant = Variant(scenario, lengths, offloading, baseline)
    count = _replaced_instances(scenario, offloading)
    paper, exact = (_shares(variant, baseline, count, one) for one in ("paper", "exact"))
    return Attribution(count, paper, exact)


def shapley(
    members: Sequence[Member], value: dict[frozenset[Member], float]
) -> dict[Member, float]:
    """Mean marginal value of each member over all orders; ``value`` of every subset."""
    orders = list(permutations(members))
    totals = dict.fromkeys(members, 0.0)
    for order in orders:
        present: frozenset[Member] = frozenset()
        for member in order:
            totals[member] += value[present | {member}] - value[present]
            present |= {member}
    return {member: total / len(orders) for member, total in totals.items()}


def _shares(variant: Variant, baseline: Deployment, count: int, objective: Objective) -> Shares:
    value = _values(variant, count, objective)
    none, everything = value[frozenset()], value[frozenset(MEMBERS)]
    gain = everything - none
    own = best_plan(variant.scenario, baseline, objective, variant.lengths)
    subsets = [chosen for size in range(len(MEMBERS) + 1) for chosen in combinations(MEMBERS, size)]
    return Shares(
        coalitions=tuple(Coalition(chosen, value[frozenset(chosen)]) for chosen in subsets),
        chain=_chain(MEMBERS, value),
        reverse_chain=_chain(MEMBERS[::-1], value),
        shapley=tuple(
            Share(member, part, part / gain if gain else None)
            for member, part in shapley(MEMBERS, value).items()
        ),
        gain_req_per_s=gain,
        gpus_req_per_s=none - own.throughput_req_per_s,
    )


def _chain(order: Sequence[Member], value: dict[frozenset[Member], float]) -> tuple[Step, ...]:
    start = value[frozenset()]
    steps = [Step(None, start, 0.0)]
    for i, member in enumerate(order):
        reached = value[frozenset(order[: i + 1])]
        steps.append(Step(member, reached, reached - steps[-1].throughput_req_per_s))
    return tuple(steps)


def _values(variant: Variant, count: int, objective: Objective) -> dict[frozenset[Member], float]:
    """v of every coalition."""
    offloading = variant.offloading
    pooled = replace(
        offloading,
        threshold_tokens=None,
        num_prfaas=0,
        num_prefill=offloading.num_prefill + count,
        prfaas_hardware=None,
        more_prfaas=(),
    )
    apart = replace(
        offloading, num_prfaas=count, prfaas_hardware=offloading.pd_hardware, more_prfaas=()
    )
    # Without the chip all instances share a cluster, and there is no link to know.
    local = without_link_limits(replace(variant, offloading=apart))
    unlimited = without_link_limits(variant)
    by_length = _best(local, objective)
    in_one_pool = _best(replace(variant, offloading=pooled), objective)
    blind = RandomSplit(unlimited, objective).plan()
    linked = RandomSplit(variant, objective)
    found = solve(unlimited.scenario, unlimited.offloading, objective, variant.lengths)
    # The plan was made without the links' limits; its clusters have them.
    more_pd = tuple(
        replace(one, link_bytes_per_s=given.link_bytes_per_s)
        for one, given in zip(found.more_pd, offloading.more_pd, strict=True)
    )
    planned = replace(found, more_prfaas=offloading.more_prfaas, more_pd=more_pd)
    applied = deployment_model(variant.scenario, planned, variant.lengths)
    return {
        frozenset(): in_one_pool,
        frozenset({"bandwidth"}): in_one_pool,
        frozenset({"threshold"}): by_length,
        frozenset({"threshold", "bandwidth"}): by_length,
        frozenset({"chip"}): linked.throughput_req_per_s(blind),
        frozenset({"chip", "bandwidth"}): linked.throughput_req_per_s(linked.plan()),
        frozenset({"chip", "threshold"}): throughput_req_per_s(applied, objective),
        frozenset(MEMBERS): _best(variant, objective),
    }


def _best(variant: Variant, objective: Objective) -> float:
    best = best_plan(variant.scenario, variant.offloading, objective, variant.lengths)
    return best.throughput_req_per_s


def _replaced_instances(scenario: Scenario, offloading: Deployment) -> int:
    """Instances of the PD hardware that have as many GPUs as the PrfaaS clusters; at least one."""
    per_instance = {name: one.profile.gpus_per_instance for name, one in scenario.hardware.items()}
    clusters = offloading.prfaas_clusters(0.0)
    replaced = sum(one.num_instances * per_instance[one.hardware] for one in clusters)
    return max(1, replaced // per_instance[offloading.pd_hardware])
