"""Scenarios made from another one: with a trace in place of its workload, or with another plan."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.core import ScenarioError
from harness.resolution import wrong
from harness.scenario import Scenario, check_scenario
from harness.trace import TraceFormat, read_trace
from harness.workload_resolution import traced


def with_trace(
    scenario: Scenario,
    path: Path | str,
    duration_s: float | None = None,
    trace_format: TraceFormat | None = None,
) -> Scenario:
    """The scenario with a trace's lengths and arrivals; its ``workload.rate_scale`` applies.

    Takes the first ``duration_s`` of trace time, all of it where None. Raises ScenarioError for a
    trace that cannot be read or holds lengths that the profiles do not cover.
    """
    trace = read_trace(Path(path), trace_format)
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise ScenarioError(f"The duration must be positive and finite, not {duration_s:g} s.")
    workload, load = traced(
        trace, scenario.workload.rate_scale, duration_s, None, scenario.load.seed
    )
    changed = replace(scenario, workload=workload, load=load)
    check_scenario(changed, f"the scenario file {scenario.path} with the trace {path}")
    return changed


def with_plan(scenario: Scenario, plan: Mapping[str, tuple[int | None, int, int]]) -> Scenario:
    """The scenario with deployments' (threshold_tokens, num_prefill, num_decode) replaced."""
    where = f"the plan for the scenario file {scenario.path}"
    deployments = dict(scenario.deployments)
    for name, (threshold_tokens, num_prefill, num_decode) in plan.items():
        if name not in deployments:
            raise ScenarioError(
                f"There is no deployment {name!r} in {where}; it has {', '.join(deployments)}."
            )
        deployments[name] = replace(
            deployments[name],
            threshold_tokens=threshold_tokens,
            num_prefill=num_prefill,
            num_decode=num_decode,
        )
        if fault := deployments[name].fault():
            raise wrong(f"deployments.{name}.{fault[0]}", where, fault[1])
    changed = replace(scenario, deployments=deployments)
    check_scenario(changed, where)
    return changed
