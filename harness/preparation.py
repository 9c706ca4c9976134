"""What is settled before a run: plan, exact schedule, and what model and simulation say of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from harness.core import ScenarioError
from harness.deployment import Deployment
from harness.faults import check_faults, fault_notes
from harness.record.run_directory import DeploymentModel
from harness.scenario import Scenario, extrapolated_hardware
from harness.scenario_change import with_plan
from harness.schedule import Schedule
from harness.simulator import Simulation, Sink, simulate
from harness.throughput import (
    DEFAULT_OBJECTIVE,
    Objective,
    deployment_model,
    left_out,
    solve,
)
from harness.utilisation import predict_utilisation
from harness.workload import (
    Burstiness,
    build_schedule,
    burstiness,
    length_distribution,
    schedule_notes,
)

#: Above this a queue's mean depends on the run's length more than on what is measured.
MAX_UTILISATION = 0.95


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before anything runs."""

    scenario: Scenario
    schedule: Schedule
    models: dict[str, DeploymentModel]
    simulations: dict[str, Simulation]
    burstiness: Burstiness
    notes: tuple[str, ...]

    def described_schedule(self) -> dict[str, Any]:
        """The schedule's hash and burstiness, as a manifest and ``prfaas simulate`` have them."""
        return {
            "num_requests": len(self.schedule),
            "sha256": self.schedule.sha256(),
            "arrivals": self.burstiness.document(),
        }


def replan(
    scenario: Scenario, objective: Objective = DEFAULT_OBJECTIVE
) -> tuple[Scenario, tuple[str, ...]]:
    """Thresholds and splits solved anew for the workload's lengths, as ``prfaas plan`` solves them;
    says what changed."""
    lengths = length_distribution(scenario)
    solved = {
        name: solve(scenario, one, objective, lengths) for name, one in scenario.deployments.items()
    }
    notes = [
        f"{name}: re-solved for this workload by the {objective} equations: {_plan_text(old)} -> "
        f"{_plan_text(solved[name])}"
        for name, old in scenario.deployments.items()
        if solved[name] != old
    ]
    plan = {
        name: (one.threshold_tokens, one.num_prefill, one.num_decode)
        for name, one in solved.items()
    }
    more_pd = {name: one.more_pd for name, one in solved.items()}
    return with_plan(scenario, plan, more_pd), tuple(notes)


def refuse_planned_only(scenario: Scenario) -> None:
    """ScenarioError where a scenario asks for what neither a run nor a simulation has."""
    if scenario.prefix.model != "none":
        raise ScenarioError(
            f"'prefix.model' in the scenario file {scenario.path} asks for cached prefixes, which "
            'only prfaas plan takes into account. Set prefix.model = "none"; the caches of a run '
            "are those of prefix_cache.enabled, over requests with hash ids (a trace, sessions)."
        )


def refuse_several_clusters(scenario: Scenario) -> None:
    """ScenarioError for a live run of what has no testbed."""
    for name, one in scenario.deployments.items():
        if one.more_prfaas or one.more_pd:
            raise ScenarioError(
                f"'deployments.{name}' in the scenario file {scenario.path} has several clusters "
                "of a kind, which prfaas plan and simulate know and no testbed. Remove more_prfaas "
                "and more_pd."
            )


def _plan_text(deployment: Deployment) -> str:
    t = deployment.threshold_tokens
    threshold = "" if t is None else f", t = {t} tokens"
    counts = (deployment.num_prfaas, deployment.num_prefill, deployment.num_decode)
    more = "".join(f" and {one.num_prefill}/{one.num_decode}" for one in deployment.more_pd)
    return "/".join(map(str, counts)) + more + threshold


def prepare(
    scenario: Scenario,
    notes: tuple[str, ...] = (),
    *,
    transfer: bool = True,
    sinks: Callable[[str], Sink] | None = None,
) -> Prepared:
    """Schedule, models and simulations of a scenario as it is planned.

    Without ``transfer`` simulated KV moves in no time. ``sinks`` give each deployment what takes
    its rows, which the simulations then do not keep.
    ScenarioError where it asks for what only the planner knows.
    """
    refuse_planned_only(scenario)
    # Again, since a new plan may have taken an instance away.
    check_faults(scenario.faults, f"the scenario file {scenario.path}", scenario.deployments)
    schedule = build_schedule(scenario.workload, scenario.load)
    lengths = length_distribution(scenario)
    models, simulations = {}, {}
    for name, deployment in scenario.deployments.items():
        model = deployment_model(scenario, deployment, lengths)
        models[name] = DeploymentModel(
            lambda_max_req_per_s=model.lambda_max_req_per_s,
            lambda_max_exact_req_per_s=model.lambda_max_exact_req_per_s,
        )
        if scenario.load.concurrency is None:  # a closed loop offers no load of its own
            utilisation = predict_utilisation(scenario, name, schedule)
            models[name] = replace(
                models[name],
                utilisation=utilisation.by_stage(),
                fitting_load_scale=utilisation.load_scale_for(MAX_UTILISATION),
            )
        sink = None if sinks is None else sinks(name)
        simulations[name] = simulate(scenario, name, schedule, transfer=transfer, sink=sink)
    notes = (
        *notes,
        *schedule_notes(scenario.workload, scenario.load),
        *left_out(scenario),
        *fault_notes(scenario.faults),
        *extrapolated_hardware(scenario),
    )
    bursts = burstiness(scenario.workload, scenario.load, schedule)
    return Prepared(scenario, schedule, models, simulations, bursts, notes)
