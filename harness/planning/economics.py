"""What a request costs: deployments compared at equal cost, and what the link may cost.

    gain = (Lambda_x / cost_x) / (Lambda_h / cost_h) - 1      cost: price x GPUs, per hour

scales the homogeneous deployment h linearly to the budget of x. Whole instances are the other view:
as many homogeneous instances as the budget of x buys, their split searched anew. With every other
price as it is, the gain reaches g at the price of the PrfaaS hardware for which

    Lambda_x cost_h = (1 + g) Lambda_h cost_x,      linear in that price.

The link is paid for by the GB that crosses, by the Gbit/s of its rate and month of 730 hours, or by
both; in the unit of the hardware's prices. The homogeneous deployment needs none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.deployment import Deployment
from harness.planning.variants import (
    BASELINE,
    best_plan,
    throughput_req_per_s,
)
from harness.scenario import Scenario
from harness.throughput import DEFAULT_OBJECTIVE, DeploymentModel, Objective
from harness.workload import LengthDistribution, length_distribution

HOURS_PER_MONTH = 730
#: Whole instances are told apart up to here.
MAX_INSTANCES = 4096
TARGET_GAINS = (0.0, 0.15)
_SECONDS_PER_HOUR = 3600
_BYTES_PER_GB = 1e9
_BYTES_PER_S_PER_GBPS = 1e9 / 8


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The price ratio, PrfaaS to PD hardware per GPU, that gives ``gain``; None: no price does.

    ``with_link`` pays for the link at the scenario's prices, at Lambda_max.
    """

    gain: float
    price_ratio: float | None
    price_ratio_with_link: float | None


@dataclass(frozen=True, slots=True)
class WholeInstances:
    """Homogeneous instances that the same budget buys, split anew, and the gain over them: from 2
    to MAX_INSTANCES, beyond which a whole one makes no difference."""

    num_instances: int
    num_prefill: int
    num_decode: int
    unspent_per_hour: float
    throughput_req_per_s: float
    gain: float


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What the link costs at Lambda_max and at the offered rate (``offered_*``).

    ``break_even_*``: the price at which the gain at equal cost is 0, that of the other kind being
    0; None where there is no gain to spend, or nothing that crosses.
    """

    rate_bytes_per_s: float
    egress_bytes_per_month: float
    offered_egress_bytes_per_month: float
    cost_per_hour: float
    offered_cost_per_hour: float
    gain: float
    break_even_price_per_gb: float | None
    break_even_price_per_gbps_month: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One deployment against the homogeneous one; ``throughput_per_cost`` in requests a second per
    unit of price an hour."""

    deployment: str
    gpus: dict[str, int]
    price_ratio: float
    cost_per_hour: float
    throughput_req_per_s: float
    throughput_per_cost: float
    gain_at_equal_cost: float
    whole_instances: WholeInstances | None
    break_even: tuple[BreakEven, ...]
    link: LinkCost


@dataclass(frozen=True, slots=True)
class EqualCost:
    """``currency``: "USD" or "relative"; ``price_per_gpu_hour`` by hardware in it."""

    objective: Objective
    currency: str
    price_per_gpu_hour: dict[str, float]
    link_price_per_gb: float
    link_price_per_gbps_month: float
    homogeneous_gpus: dict[str, int]
    homogeneous_cost_per_hour: float
    homogeneous_req_per_s: float
    homogeneous_per_cost: float
    comparisons: tuple[Comparison, ...]


def equal_cost(
    scenario: Scenario,
    deployments: Mapping[str, Deployment],
    models: Mapping[str, DeploymentModel],
    objective: Objective = DEFAULT_OBJECTIVE,
    lengths: LengthDistribution | None = None,
) -> EqualCost | None:
    """Every deployment with a PrfaaS cluster against ``homogeneous_pd``; both as solved.

    None where there is nothing to compare or ``prices`` finds no common unit. ``lengths`` for the
    budget in whole instances; the scenario's by default.
    """
    others = [one for one in deployments.values() if one.num_prfaas and one.name != BASELINE]
    baseline = deployments.get(BASELINE)
    if baseline is None or not others:
        return None
    found = prices(scenario, [baseline, *others])
    if found is None:
        return None
    currency, price = found
    budget = _Budget(
        scenario,
        objective,
        price,
        baseline,
        throughput_req_per_s(models[BASELINE], objective),
        lengths or length_distribution(scenario),
    )
    cost = budget.cost_per_hour(baseline)
    return EqualCost(
        objective=objective,
        currency=currency,
        price_per_gpu_hour=price,
        link_price_per_gb=scenario.cost.link_price_per_gb,
        link_price_per_gbps_month=scenario.cost.link_price_per_gbps_month,
        homogeneous_gpus=gpus(scenario, baseline),
        homogeneous_cost_per_hour=cost,
        homogeneous_req_per_s=budget.baseline_req_per_s,
        homogeneous_per_cost=budget.baseline_req_per_s / cost,
        comparisons=tuple(budget.compare(one, models[one.name]) for one in others),
    )


def prices(
    scenario: Scenario, deployments: Sequence[Deployment]
) -> tuple[str, dict[str, float]] | None:
    """The unit and the price per GPU and hour of all hardware used; None without a common unit."""
    names = dict.fromkeys(name for one in deployments for name in gpus(scenario, one))
    used = [scenario.hardware[name] for name in names]
    for currency, given in (
        ("USD", {one.name: one.price_usd_per_gpu_hour for one in used}),
        ("relative", {one.name: one.relative_price for one in used}),
    ):
        known = {name: price for name, price in given.items() if price is not None}
        if len(known) == len(used):
            return currency, known
    return None


def gpus(scenario: Scenario, deployment: Deployment) -> dict[str, int]:
    """GPUs of each hardware over all clusters."""
    counts = [(one.hardware, one.num_instances) for one in deployment.prfaas_clusters(0.0)]
    counts += [(c.hardware, c.num_prefill + c.num_decode) for c in deployment.pd_clusters(0.0)]
    found: dict[str, int] = {}
    for name, count in counts:
        each = scenario.hardware[name].profile.gpus_per_instance
        found[name] = found.get(name, 0) + count * each
    return found


@dataclass(frozen=True, slots=True)
class _Budget:
    """The homogeneous deployment that others are held against, and the prices."""

    scenario: Scenario
    objective: Objective
    price: dict[str, float]
    baseline: Deployment
    baseline_req_per_s: float
    lengths: LengthDistribution

    def cost_per_hour(self, deployment: Deployment) -> float:
        counted = gpus(self.scenario, deployment)
        return sum(self.price[name] * count for name, count in counted.items())

    def compare(self, deployment: Deployment, model: DeploymentModel) -> Comparison:
        carried = throughput_req_per_s(model, self.objective)
        cost = self.cost_per_hour(deployment)
        link = self._link_cost(deployment, model, carried, cost)
        remote = deployment.prfaas_hardware
        assert remote is not None, "a PrfaaS cluster has hardware"
        return Comparison(
            deployment=deployment.name,
            gpus=gpus(self.scenario, deployment),
            price_ratio=self.price[remote] / self.price[deployment.pd_hardware],
            cost_per_hour=cost,
            throughput_req_per_s=carried,
            throughput_per_cost=carried / cost,
            gain_at_equal_cost=self._gain(carried, cost),
            whole_instances=self._whole_instances(carried, cost + link.cost_per_hour),
            break_even=tuple(
                BreakEven(
                    gain=gain,
                    price_ratio=self._price_ratio(deployment, carried, gain, 0.0),
                    price_ratio_with_link=self._price_ratio(
                        deployment, carried, gain, link.cost_per_hour
                    ),
                )
                for gain in TARGET_GAINS
            ),
            link=link,
        )

    def _gain(self, carried: float, cost: float) -> float:
        return carried / cost / (self.baseline_req_per_s / self.cost_per_hour(self.baseline)) - 1

    def _price_ratio(
        self, deployment: Deployment, carried: float, gain: float, link_per_hour: float
    ) -> float | None:
        """carried (b_h + n_h p) = (1 + gain) baseline (b_x + n_x p) for the price p."""
        remote = deployment.prfaas_hardware
        assert remote is not None, "a PrfaaS cluster has hardware"
        pd_price = self.price[deployment.pd_hardware]
        if remote == deployment.pd_hardware:
            return None
        wanted = (1 + gain) * self.baseline_req_per_s
        own, others = gpus(self.scenario, deployment), gpus(self.scenario, self.baseline)
        fixed = link_per_hour + self.cost_per_hour(deployment) - own[remote] * self.price[remote]
        kept = self.cost_per_hour(self.baseline) - others.get(remote, 0) * self.price[remote]
        slope = wanted * own[remote] - carried * others.get(remote, 0)
        if slope <= 0:
            return None
        price = (carried * kept - wanted * fixed) / slope
        return price / pd_price if price > 0 else None

    def _whole_instances(self, carried: float, cost: float) -> WholeInstances | None:
        """Further clusters of the homogeneous deployment stay; its first grows or shrinks."""
        baseline = self.baseline
        hardware = self.scenario.hardware[baseline.pd_hardware]
        each = self.price[hardware.name] * hardware.profile.gpus_per_instance
        own = baseline.num_prefill + baseline.num_decode
        budget = cost - (self.cost_per_hour(baseline) - own * each)
        count = int(budget / each * (1 + 1e-12))  # a whole number must not fall short by rounding
        if not 2 <= count <= MAX_INSTANCES:
            return None
        resized = replace(baseline, num_prefill=count - 1, num_decode=1)
        best = best_plan(self.scenario, resized, self.objective, self.lengths)
        alternative = best.throughput_req_per_s
        return WholeInstances(
            num_instances=count,
            num_prefill=best.deployment.num_prefill,
            num_decode=best.deployment.num_decode,
            unspent_per_hour=budget - count * each,
            throughput_req_per_s=alternative,
            gain=carried / alternative - 1,
        )

    def _link_cost(
        self, deployment: Deployment, model: DeploymentModel, carried: float, cost: float
    ) -> LinkCost:
        prices = self.scenario.cost
        links = deployment.prfaas_clusters(self.scenario.link.rate_bytes_per_s)
        rate = sum(one.link_bytes_per_s for one in links)
        gbps = rate / _BYTES_PER_S_PER_GBPS
        assert model.egress_bytes_per_s is not None, "a PrfaaS cluster has egress"
        per_request = model.egress_bytes_per_s / model.lambda_max_req_per_s
        offered = self.scenario.load.rate_req_per_s * per_request
        standing = gbps * prices.link_price_per_gbps_month / HOURS_PER_MONTH

        def per_hour(egress_bytes_per_s: float) -> float:
            crossing_gb = egress_bytes_per_s * _SECONDS_PER_HOUR / _BYTES_PER_GB
            return crossing_gb * prices.link_price_per_gb + standing

        # What may be spent on the link before a request costs what it costs without one.
        spare = carried * self.cost_per_hour(self.baseline) / self.baseline_req_per_s - cost
        gb_per_hour = carried * per_request * _SECONDS_PER_HOUR / _BYTES_PER_GB
        pays = spare >= 0 and per_request > 0
        return LinkCost(
            rate_bytes_per_s=rate,
            egress_bytes_per_month=carried * per_request * _SECONDS_PER_HOUR * HOURS_PER_MONTH,
            offered_egress_bytes_per_month=offered * _SECONDS_PER_HOUR * HOURS_PER_MONTH,
            cost_per_hour=per_hour(carried * per_request),
            offered_cost_per_hour=per_hour(offered),
            gain=self._gain(carried, cost + per_hour(carried * per_request)),
            break_even_price_per_gb=spare / gb_per_hour if pays else None,
            break_even_price_per_gbps_month=spare * HOURS_PER_MONTH / gbps if pays else None,
        )
