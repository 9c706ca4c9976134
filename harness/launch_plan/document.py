"""The dry run of a scenario on its nodes, as one document: ``prfaas bench --dry-run``.

Deployments run one after another, each ``repeats`` times, on the same schedule. What is said of
Lambda_max is modelled from the profiles, and is put beside the nodes and the price that carry it.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from harness.core import ScenarioError
from harness.deployment import Deployment
from harness.engine_traffic import check_sharding, crossing, traffic_notes
from harness.launch_plan.commands import attach_tables, canaries, launches, profilings
from harness.launch_plan.hours import Hours, hours
from harness.launch_plan.links import described_in_part, node_links, unshaped
from harness.launch_plan.placement import Placement, place
from harness.scenario import Scenario, extrapolated_hardware, scenario_hash
from harness.throughput import DeploymentModel, deployment_model
from harness.workload import build_schedule, length_distribution

#: A link outlasts the run that it is for by at most that, should nobody take it down.
_LINK_MARGIN_HOURS = 1
_SECONDS_PER_HOUR = 3600.0


def dry_run(scenario: Scenario, repeats: int) -> dict[str, Any]:
    """Placements, launches, links, attach tables and GPU-hours of every deployment.

    ScenarioError where the scenario names no nodes, or they do not suffice.
    """
    if scenario.engine.sglang is None or not scenario.nodes:
        raise ScenarioError(
            f"--dry-run places real servers on nodes, but the scenario file {scenario.path} has "
            f"{_lacks(scenario)}; see scenarios/h200-h20.toml and docs/gpu-nodes.md."
        )
    check_sharding(scenario)
    deployments = scenario.deployments
    placements = {name: place(scenario, one) for name, one in deployments.items()}
    lengths = length_distribution(scenario)
    models = {name: deployment_model(scenario, d, lengths) for name, d in deployments.items()}
    load_s = _load_s(scenario)
    found = {
        name: _deployment(scenario, one, placements[name], models[name], load_s, repeats)
        for name, one in deployments.items()
    }
    return {
        "scenario": scenario.name,
        "scenario_sha256": scenario_hash(scenario),
        "model": scenario.model.name,
        "nodes": {name: asdict(node) for name, node in scenario.nodes.items()},
        "gateway": _gateway(scenario),
        "profiling": [asdict(one) for one in profilings(scenario, placements)],
        "deployments": found,
        "total": _total([one["hours"] for one in found.values()]),
        "notes": [*traffic_notes(scenario, deployments, models), *_notes(scenario, placements)],
        "warnings": list(extrapolated_hardware(scenario)),
    }


def attach_text(document: dict[str, Any], deployment: str) -> str:
    """The attach tables of one deployment of the dry run. ScenarioError names those there are."""
    if deployment not in document["deployments"]:
        there = ", ".join(document["deployments"])
        raise ScenarioError(f"There is no deployment {deployment!r}; the dry run has {there}.")
    text: str = document["deployments"][deployment]["attach"]
    return text


def _deployment(
    scenario: Scenario,
    deployment: Deployment,
    placements: tuple[Placement, ...],
    model: DeploymentModel,
    load_s: float | None,
    repeats: int,
) -> dict[str, Any]:
    spent = None if load_s is None else hours(scenario, placements, load_s, repeats)
    traffic = crossing(scenario, deployment, model)
    link_hours = _LINK_MARGIN_HOURS + math.ceil((spent.most_s if spent else 0) / _SECONDS_PER_HOUR)
    return {
        "placements": [_placement(one) for one in placements],
        "launches": [asdict(one) for one in launches(scenario, deployment, placements)],
        "attach": attach_tables(placements),
        "links": [asdict(one) for one in node_links(scenario, placements, link_hours)],
        "canaries": [asdict(one) for one in canaries(placements)],
        "hours": None if spent is None else asdict(spent),
        "modelled": _modelled(scenario, model, placements, spent),
        "crossing": None
        if traffic is None
        else {
            "tokens": traffic.replication.tokens,
            "copies": {kind: float(n) for kind, n in traffic.replication.copies.items()},
            "factor": traffic.replication.factor,
            "geometry_bytes_per_s": traffic.geometry_bytes_per_s,
            "wire_bytes_per_s": traffic.wire_bytes_per_s,
            "link_bytes_per_s": traffic.link_bytes_per_s,
        },
    }


def _placement(one: Placement) -> dict[str, Any]:
    return {
        "instance": one.instance.name,
        "cluster": one.instance.cluster,
        "role": one.instance.role,
        "hardware": one.instance.hardware,
        "ranks": [
            {"node": r.node.name, "first_gpu": r.first_gpu, "gpus": r.gpus} for r in one.ranks
        ],
        "port": one.port,
        "bootstrap_port": one.bootstrap_port,
        "group_port": one.group_port,
    }


def _modelled(
    scenario: Scenario,
    model: DeploymentModel,
    placements: tuple[Placement, ...],
    spent: Hours | None,
) -> dict[str, Any]:
    """Lambda_max by both sets of equations, and per node and price of the nodes in use."""
    nodes = {rank.node.name for one in placements for rank in one.ranks}
    cost = None
    if spent is not None and spent.least_cost is not None:
        cost = spent.least_cost / (spent.least_s / _SECONDS_PER_HOUR)
    carried = model.lambda_max_exact_req_per_s
    return {
        "lambda_max_req_per_s": model.lambda_max_req_per_s,
        "lambda_max_exact_req_per_s": carried,
        "nodes": len(nodes),
        "exact_req_per_s_per_node": carried / len(nodes),
        "price_per_hour": cost,
        "exact_req_per_s_per_price": None if cost is None else carried / cost,
        "offered_req_per_s": None
        if math.isinf(scenario.load.rate_req_per_s)
        else scenario.load.rate_req_per_s,
    }


def _load_s(scenario: Scenario) -> float | None:
    """From the first to the last planned request; None for a closed loop without a duration."""
    if scenario.load.concurrency is not None:
        return scenario.load.duration_s
    return max(float(one) for one in build_schedule(scenario.workload, scenario.load).planned_s)


def _gateway(scenario: Scenario) -> dict[str, Any]:
    return {
        "place": "the machine that runs prfaas bench, best one of the PD cluster's network: tokens "
        "stream to it from decode servers",
        "load_place": "the same machine, in processes of its own (--load-processes for several)",
        "port": scenario.testbed.gateway_port or None,
        "reaches": [node.address for node in scenario.nodes.values()],
    }


def _total(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    known = [one for one in parts if one is not None]
    if len(known) < len(parts):
        return None
    keys = ("least_s", "most_s", "least_gpu_hours", "most_gpu_hours", "least_cost", "most_cost")
    total: dict[str, Any] = {}
    for key in keys:
        values = [one[key] for one in known]
        total[key] = None if None in values else sum(values)
    return total


def _notes(scenario: Scenario, placements: dict[str, tuple[Placement, ...]]) -> Iterator[str]:
    if scenario.load.concurrency is not None and scenario.load.duration_s is None:
        yield "a closed loop without load.duration ends when it ends: no GPU-hours are given"
    bare = dict.fromkeys(name for one in placements.values() for name in unshaped(one))
    if bare:
        yield (
            f"nodes without kv_interface ({', '.join(bare)}) are not shaped: KV crosses at what "
            "the network gives"
        )
    if described_in_part(scenario.link):
        yield (
            "the options of prfaas link up give the rate, round trip, jitter and loss of this "
            "link; what else it has takes its link file: copy it to the nodes and use --file"
        )
    yield (
        "links by per_node_share give each sender an even part of the rate; what one leaves unused "
        "no other can use"
    )


def _lacks(scenario: Scenario) -> str:
    lacks = []
    if scenario.engine.sglang is None:
        lacks.append('no engine.kind = "sglang"')
    if not scenario.nodes:
        lacks.append("no [nodes.NAME] tables")
    return " and ".join(lacks)
