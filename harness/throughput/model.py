"""A deployment's plan and what the equations say of it."""

from dataclasses import dataclass

import numpy as np

from harness.deployment import Deployment
from harness.scenario import Scenario
from harness.throughput.costs import Costs, IntArray, local_rate, remote_rate, stage_rates
from harness.throughput.rates import Objective, StageRates
from harness.utilisation import Utilisation
from harness.workload import LengthDistribution, length_distribution


@dataclass(frozen=True, slots=True)
class DeploymentModel:
    """None where a term does not apply.

    The three thetas and ``lambda_max_req_per_s`` are the paper's, ``lambda_max_exact_req_per_s``
    and ``bottleneck`` the exact ones. ``egress_bytes_per_s`` crosses the links at the paper's
    Lambda_max. The residuals say how far the plan is from the balance of Eqs. 7 and 8, as shares
    of Lambda_max: (Th_prfaas / p - Th_pd_p / (1 - p)) and (Th_prfaas + Th_pd_p - Th_pd_d). They are
    not 0, since instances are whole.
    """

    name: str
    threshold_tokens: int | None
    num_prfaas: int | None
    num_prefill: int | None
    num_decode: int
    theta_prfaas_req_per_s: float | None
    theta_pd_prefill_req_per_s: float | None
    theta_pd_decode_req_per_s: float
    lambda_max_req_per_s: float
    lambda_max_exact_req_per_s: float
    offload_fraction: float | None
    long_mean_tokens: float | None
    short_mean_tokens: float | None
    egress_bytes_per_s: float | None
    bottleneck: str
    eq7_residual: float | None
    eq8_residual: float
    paper_rates: StageRates
    exact_rates: StageRates

    def utilisation(self, rate_req_per_s: float) -> Utilisation:
        """Exact utilisation of each stage at an offered rate."""
        return self.exact_rates.utilisation(rate_req_per_s)

    def load_scale_for(self, max_utilisation: float, rate_req_per_s: float) -> float:
        """Factor on the offered rate that brings the busiest stage to ``max_utilisation``."""
        return self.utilisation(rate_req_per_s).load_scale_for(max_utilisation)


def deployment_model(
    scenario: Scenario, deployment: Deployment, lengths: LengthDistribution | None = None
) -> DeploymentModel:
    """What the equations say of a deployment as it is planned.

    ``lengths`` of uncached input and the mean output default to the scenario's. ScenarioError where
    a profile does not cover them.
    """
    costs = Costs(scenario, deployment, lengths or length_distribution(scenario))
    splits = costs.planned(deployment)
    paper, exact = (stage_rates(costs, splits, objective) for objective in ("paper", "exact"))
    p, long_tokens, short_tokens = (float(values[0]) for values in costs.shares(splits))
    lambda_max = _lambda_max(costs, splits, "paper")
    remote = float(remote_rate(costs, costs.remote, splits, "paper")[0]) if costs.remote else None
    theta_prfaas = p * remote if remote is not None and np.isfinite(remote) else None
    theta_prefill = paper.pd_prefill and (1 - p) * paper.pd_prefill
    crossing = float(costs.crossing_bytes(splits, "paper")[0]) if costs.remote else 0.0
    carried = (theta_prfaas or 0.0) + (theta_prefill or 0.0)
    return DeploymentModel(
        name=deployment.name,
        threshold_tokens=deployment.threshold_tokens,
        num_prfaas=deployment.num_prfaas or None,
        num_prefill=deployment.num_prefill or None,
        num_decode=deployment.num_decode,
        theta_prfaas_req_per_s=theta_prfaas,
        theta_pd_prefill_req_per_s=theta_prefill,
        theta_pd_decode_req_per_s=paper.pd_decode,
        lambda_max_req_per_s=lambda_max,
        lambda_max_exact_req_per_s=_lambda_max(costs, splits, "exact"),
        offload_fraction=p if costs.remote else None,
        long_mean_tokens=long_tokens if costs.remote and p > 0 else None,
        short_mean_tokens=short_tokens if deployment.num_prefill > 0 and p < 1 else None,
        egress_bytes_per_s=lambda_max * crossing if costs.remote else None,
        bottleneck=exact.bottleneck()[0],
        eq7_residual=(
            (remote - paper.pd_prefill) / lambda_max
            if theta_prfaas is not None and remote is not None and paper.pd_prefill is not None
            else None
        ),
        eq8_residual=(carried - paper.pd_decode) / lambda_max,
        paper_rates=paper,
        exact_rates=exact,
    )


def carried(costs: Costs, deployment: Deployment, objective: Objective) -> tuple[float, str]:
    """Lambda_max by one of the two sets of equations and the stage that saturates first.

    ``costs`` are those of the deployment's clusters, however they are divided.
    """
    costs = costs.divided_as(deployment)
    splits = costs.planned(deployment)
    stage, _ = stage_rates(costs, splits, objective).bottleneck()
    return _lambda_max(costs, splits, objective), stage


def _lambda_max(costs: Costs, splits: IntArray, objective: Objective) -> float:
    total = sum(float(local_rate(costs, one, splits, objective)[0]) for one in costs.local)
    return min(float(remote_rate(costs, costs.remote, splits, objective)[0]), total)
