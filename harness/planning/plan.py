"""How many of which, at which threshold, and does the link carry it: all that the planner says.

The threshold and the splits of every deployment are searched for (``harness.throughput``), then
TTFT, cost, attribution, sensitivity and sweeps are computed for what was found. ``Plan.document``
is the JSON; its keys are the fields of the records, in base units.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.deployment import Deployment
from harness.engine_traffic import traffic_notes
from harness.planning.attribution import attribute
from harness.planning.comparability import unequal_costs, unequal_sizes
from harness.planning.economics import equal_cost, gpus, prices
from harness.planning.sensitivity import tornado
from harness.planning.sweeps import sweep
from harness.planning.transfer import transfer_alone
from harness.planning.variants import BASELINE, OFFLOADING, throughput_req_per_s
from harness.planning.wording import instances
from harness.profile import Profile
from harness.queueing import Arrivals
from harness.scenario import Scenario, extrapolated_hardware, scenario_hash
from harness.throughput import (
    DEFAULT_OBJECTIVE,
    OBJECTIVES,
    DeploymentModel,
    Objective,
    capacity_grid,
    deployment_model,
    left_out,
    solve,
)
from harness.ttft import Ttft, TtftModel, workload_stream
from harness.workload import LengthDistribution, length_distribution

#: Loads of the TTFT curve, as shares of what the exact equations say a deployment carries.
LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
_GRID_POINTS = 120


@dataclass(frozen=True, slots=True)
class Solved:
    """A deployment with the threshold and split that were searched for, and what the equations
    say of it."""

    deployment: Deployment
    model: DeploymentModel


@dataclass(frozen=True, slots=True)
class Plan:
    """Every deployment: solved by ``objective`` or, where ``kept``, as given; solved by the exact
    equations; and as given."""

    scenario: Scenario
    objective: Objective
    lengths: LengthDistribution
    kept: bool
    solved: dict[str, Solved]
    exact: dict[str, Solved]
    given: dict[str, DeploymentModel]

    def document(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        scenario, objective = self.scenario, self.objective
        deployments = {name: one.deployment for name, one in self.solved.items()}
        models = {name: one.model for name, one in self.solved.items()}
        stream = workload_stream(scenario)
        sections = {
            "equal_cost": equal_cost(scenario, deployments, models, objective, self.lengths),
            "attribution": attribute(scenario, deployments, self.lengths),
            "sensitivity": tornado(scenario, deployments, objective, self.lengths),
            "sweeps": sweep(scenario, deployments, objective, self.lengths),
        }
        found = {name: self._deployment(name, stream) for name in self.solved}
        return {
            "scenario": scenario.name,
            "scenario_sha256": scenario_hash(scenario),
            "model": scenario.model.name,
            "objective": objective,
            "kept": self.kept,
            "rate_req_per_s": scenario.load.rate_req_per_s,
            "link_bytes_per_s": scenario.link.rate_bytes_per_s,
            "provenance": {name: _provenance(scenario, name) for name in scenario.hardware},
            "deployments": found,
            **self._grids(),
            **{key: None if one is None else asdict(one) for key, one in sections.items()},
            "notes": [*self._notes(), *unequal_costs(found), *_reasons(sections)],
            "warnings": [*extrapolated_hardware(scenario), *unequal_sizes(found)],
        }

    def _deployment(self, name: str, stream: tuple[Arrivals, float]) -> dict[str, Any]:
        deployment, model = self.solved[name].deployment, self.solved[name].model
        scenario, most = self.scenario, model.lambda_max_exact_req_per_s
        queues = TtftModel(scenario, deployment, self.lengths, stream)
        ttft = queues.predict(scenario.load.rate_req_per_s)
        baseline = self.solved.get(BASELINE)
        carried = throughput_req_per_s(model, self.objective)
        rates = model.exact_rates if self.objective == "exact" else model.paper_rates
        egress = model.egress_bytes_per_s
        return {
            **_counts(deployment),
            "theta_prfaas_req_per_s": model.theta_prfaas_req_per_s,
            "theta_pd_prefill_req_per_s": model.theta_pd_prefill_req_per_s,
            "theta_pd_decode_req_per_s": model.theta_pd_decode_req_per_s,
            "throughput_req_per_s": model.lambda_max_req_per_s,
            "throughput_exact_req_per_s": model.lambda_max_exact_req_per_s,
            "ratio": (
                carried / throughput_req_per_s(baseline.model, self.objective) if baseline else None
            ),
            "offload_fraction": model.offload_fraction,
            "long_mean_tokens": model.long_mean_tokens,
            "short_mean_tokens": model.short_mean_tokens,
            "egress_bytes_per_s": egress and egress / model.lambda_max_req_per_s * carried,
            "bottleneck": rates.bottleneck()[0],
            "eq7_residual": model.eq7_residual,
            "eq8_residual": model.eq8_residual,
            "service_ttft_mean_s": ttft.service_ttft_mean_s,
            "service_ttft_p50_s": ttft.service_ttft_p50_s,
            "service_ttft_p90_s": ttft.service_ttft_p90_s,
            "service_ttft_p99_s": ttft.service_ttft_p99_s,
            "ttft": asdict(ttft),
            "load_curve": [{"load": load, **asdict(queues.point(load * most))} for load in LOADS],
            "transfer_alone": transfer_alone(scenario, deployment, model.long_mean_tokens),
            "exact_optimum": _optimum(self.exact[name]),
            "as_planned": {
                **_optimum(Solved(scenario.deployments[name], self.given[name])),
                "ttft": asdict(self._given_ttft(name, stream) or ttft),
            },
            "gpus": gpus(scenario, deployment),
            "price_per_hour": self._price_per_hour(deployment),
        }

    def _given_ttft(self, name: str, stream: tuple[Arrivals, float]) -> Ttft | None:
        """TTFT at the scenario's load of the deployment as the scenario plans it; None where that
        is the plan found."""
        given = self.scenario.deployments[name]
        if given == self.solved[name].deployment:
            return None
        queues = TtftModel(self.scenario, given, self.lengths, stream)
        return queues.predict(self.scenario.load.rate_req_per_s)

    def _grids(self) -> dict[str, Any]:
        """Lambda_max of the offloading deployment: over t at the split found, by both sets of
        equations ("curve"), and over t and N_p by the plan's ("grid")."""
        if not self._has_threshold():
            return {"curve": None, "grid": None}
        deployment = self.solved[OFFLOADING].deployment
        grids = {
            equations: capacity_grid(
                self.scenario, deployment, equations, self.lengths, _GRID_POINTS
            )
            for equations in OBJECTIVES
        }
        grid = grids[self.objective]
        curve: dict[str, Any] = {"threshold_tokens": grid.threshold_tokens.tolist()}
        row = grid.num_prefill.index(deployment.num_prefill)
        for equations, one in grids.items():
            curve[f"{equations}_req_per_s"] = one.lambda_max_req_per_s[row].tolist()
            curve[f"{equations}_stage"] = list(one.stage[row])
        whole = {
            "threshold_tokens": grid.threshold_tokens.tolist(),
            "num_prefill": list(grid.num_prefill),
            "num_splits": deployment.num_prefill + deployment.num_decode - 1,
            "best_threshold_tokens": grid.best_threshold_tokens.tolist(),
            "lambda_max_req_per_s": grid.lambda_max_req_per_s.tolist(),
            "stage": [list(row) for row in grid.stage],
        }
        return {"curve": curve, "grid": whole}

    def _has_threshold(self) -> bool:
        solved = self.solved.get(OFFLOADING)
        return (
            solved is not None
            and solved.deployment.threshold_tokens is not None
            and solved.deployment.num_prefill > 0
        )

    def _price_per_hour(self, deployment: Deployment) -> float | None:
        """Of its GPUs, in the unit of the prices; None where one of them has none."""
        known = prices(self.scenario, [deployment])
        if known is None:
            return None
        counts = gpus(self.scenario, deployment)
        return sum(count * known[1][name] for name, count in counts.items())

    def _notes(self) -> list[str]:
        """What the figures rest on, where that is not a key of the scenario."""
        scenario = self.scenario
        notes = list(left_out(scenario))
        deployments = {name: one.deployment for name, one in self.solved.items()}
        models = {name: one.model for name, one in self.solved.items()}
        notes += traffic_notes(scenario, deployments, models)
        if scenario.prefix.model != "none" and not all(
            one.profile.has_cached_axis for one in scenario.hardware.values()
        ):
            notes.append(
                "prefix: a profile without points for cached prefixes costs its new tokens alone, "
                "so attention over the cached prefix is free."
            )
        for name, one in self.solved.items():
            if one.deployment.threshold_tokens == 0 and not one.deployment.num_prefill:
                notes.append(
                    f"{name}: it carries most with every prompt offloaded and no prefill in the PD "
                    "cluster (N_p = 0, threshold 0); a curve over t and a map of splits would have "
                    "one point, and are left out."
                )
            exact = self.exact[name]
            if one.deployment != exact.deployment and not self.kept:
                notes.append(
                    f"{name}: T(E[l]) prefers {_plan_text(one.deployment)}, E[T(l)] "
                    f"{_plan_text(exact.deployment)}, which a queue would carry "
                    f"{exact.model.lambda_max_exact_req_per_s:.2f} req/s with against "
                    f"{one.model.lambda_max_exact_req_per_s:.2f}."
                )
        return notes


def plan(
    scenario: Scenario, objective: Objective = DEFAULT_OBJECTIVE, *, keep: bool = False
) -> Plan:
    """Solve every deployment of the scenario, or ``keep`` its thresholds and splits as they are.

    ScenarioError where a profile does not cover it.
    """
    lengths = length_distribution(scenario)

    def solved(deployment: Deployment, by: Objective) -> Solved:
        found = solve(scenario, deployment, by, lengths)
        return Solved(found, deployment_model(scenario, found, lengths))

    given = scenario.deployments
    models = {name: deployment_model(scenario, one, lengths) for name, one in given.items()}
    kept = {name: Solved(one, models[name]) for name, one in given.items()}
    return Plan(
        scenario=scenario,
        objective=objective,
        lengths=lengths,
        kept=keep,
        solved=kept if keep else {name: solved(one, objective) for name, one in given.items()},
        exact={name: solved(one, "exact") for name, one in given.items()},
        given=models,
    )


def _counts(deployment: Deployment) -> dict[str, Any]:
    """The plan; null where a count or a threshold does not apply."""
    return {
        "threshold_tokens": deployment.threshold_tokens,
        "num_prfaas": deployment.num_prfaas or None,
        "num_prefill": deployment.num_prefill or None,
        "num_decode": deployment.num_decode,
        "more_prfaas": [asdict(cluster) for cluster in deployment.more_prfaas],
        "more_pd": [asdict(cluster) for cluster in deployment.more_pd],
    }


def _optimum(solved: Solved) -> dict[str, Any]:
    return {
        **_counts(solved.deployment),
        "throughput_req_per_s": solved.model.lambda_max_req_per_s,
        "throughput_exact_req_per_s": solved.model.lambda_max_exact_req_per_s,
    }


def _plan_text(deployment: Deployment) -> str:
    threshold = deployment.threshold_tokens
    at = "" if threshold is None else f" at t = {threshold}"
    return f"{instances(_counts(deployment))}{at}"


_REASONS = {
    "equal_cost": "it compares deployments with PrfaaS clusters against homogeneous_pd and needs "
    "prices of all their hardware in one unit",
    "attribution": "it takes prfaas_pd, with prefill on both sides, and homogeneous_pd",
    "sensitivity": "it takes prfaas_pd",
    "sweeps": "it takes prfaas_pd",
}


def _reasons(sections: Mapping[str, object | None]) -> list[str]:
    """Why a section is missing."""
    missing = [name for name, one in sections.items() if one is None]
    return [f"{name} is left out: {_REASONS[name]}." for name in missing]


def _provenance(scenario: Scenario, name: str) -> dict[str, Any]:
    """How many of a profile's points are known in which way."""
    profile: Profile = scenario.hardware[name].profile
    points = Counter(point.provenance for point in profile.prefill_points)
    return {
        "profile": str(profile.path),
        "points": dict(points),
        "extrapolate": scenario.hardware[name].extrapolate,
    }
