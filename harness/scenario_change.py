"""Scenarios made from another one: with a trace in place of its workload, or with another plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.core import ScenarioError
from harness.deployment import PdCluster
from harness.resolution import wrong
from harness.scenario import Scenario, check_scenario
from harness.scenario_file import read_workload_settings
from harness.trace import TraceFormat, read_trace
from harness.workload_resolution import check_selection, resolve_selection, traced


def with_trace(
    scenario: Scenario,
    path: Path | str,
    duration_s: float | None = None,
    trace_format: TraceFormat | None = None,
    settings: Sequence[str] = (),
) -> Scenario:
    """The scenario with a trace's lengths and arrivals; its ``workload.rate_scale`` applies.

    Takes the first ``duration_s`` of trace time, all of it where None. ``settings`` are the
    ``KEY=VALUE`` of workload keys that are of a trace alone. Raises ScenarioError for a trace that
    cannot be read or holds lengths that the profiles do not cover.
    """
    table = read_workload_settings(settings)
    check_selection(table, scenario.workload.rate_scale, "the settings of the trace")
    selection = resolve_selection(table, scenario.workload.rate_scale)
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise ScenarioError(f"The duration must be positive and finite, not {duration_s:g} s.")
    trace = read_trace(
        Path(path),
        trace_format or table.trace_format,
        seed=scenario.load.seed,
        start_s=selection.start_s,
        duration_s=duration_s,
    )
    asked = replace(scenario.load, duration_s=duration_s, num_requests=None)
    workload, load = traced(trace, selection, asked)
    changed = replace(scenario, workload=workload, load=load)
    check_scenario(changed, f"the scenario file {scenario.path} with the trace {path}")
    return changed


def with_plan(
    scenario: Scenario,
    plan: Mapping[str, tuple[int | None, int, int]],
    more_pd: Mapping[str, tuple[PdCluster, ...]] | None = None,
) -> Scenario:
    """The scenario with deployments' (threshold_tokens, num_prefill, num_decode) replaced, and
    their further PD clusters where given."""
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
            more_pd=(more_pd or {}).get(name, deployments[name].more_pd),
        )
        if fault := deployments[name].fault():
            raise wrong(f"deployments.{name}.{fault[0]}", where, fault[1])
    changed = replace(scenario, deployments=deployments)
    check_scenario(changed, where)
    return changed
