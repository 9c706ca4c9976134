"""Closed-form TTFT against long simulations of the same queues, as JSON on standard output.

    python benchmarks/queueing_accuracy.py --cv 1 2 --loads 0.5 0.85
    python benchmarks/queueing_accuracy.py --cv --on-off 10,30,3
    python benchmarks/queueing_accuracy.py --cv --trace conversations.jsonl
    python benchmarks/queueing_accuracy.py --cv 1 --simulator --requests 25000 --set slo.tpot=50ms

Loads are shares of what each deployment carries (``lambda_max_exact_req_per_s``). The simulation is
apart from ``harness.simulator``: a central queue, first come first served, for the prefill of each
cluster; exposed transfer as of a request alone; one queue of all decode slots in the order of
landing. With ``--simulator`` it is ``harness.simulator``. A cell is ``--seeds`` runs of
``--requests`` requests from an empty system. Errors are model / simulation - 1; ``noise`` is the
standard error of the simulated mean over the seeds, as a share of it. ``allen_cunneen`` and, with
``--on-off``, ``dispersion_rule`` are the errors of mean TTFT with simpler prefill waits: Allen and
Cunneen's formula, and gamma gaps whose scv is the index of dispersion over the time
x = S (I(x) + C_s^2) rho / (2 c (1 - rho)^2).
"""

import argparse
import heapq
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.burstiness import OnOff
from harness.deployment import Deployment
from harness.queueing import Arrivals, Renewal, exponential_service_wait
from harness.scenario import Scenario, load_scenario
from harness.scenario_change import with_trace
from harness.scheduling.config import decode_batch, decode_step_s, transfer_tail_function
from harness.simulator import simulate
from harness.throughput import deployment_model
from harness.ttft import Ttft, TtftModel
from harness.ttft.stages import Route, prefill_routes
from harness.workload import LengthDistribution, build_schedule, length_distribution

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

PAPER = Path(__file__).parents[1] / "scenarios" / "paper-case-study.toml"
LOADS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
CVS = (0.5, 1.0, 1.5, 2.0, 3.0)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
STATISTICS = ("mean", *QUANTILES)


def fcfs_waits(arrival_s: FloatArray, service_s: FloatArray, servers: int) -> FloatArray:
    """Waits at one queue with ``servers`` servers, first come first served."""
    free_s = [0.0] * servers  # a heap: when each server is free
    waits = []
    for arrives_s, lasts_s in zip(arrival_s.tolist(), service_s.tolist(), strict=True):
        start_s = max(arrives_s, free_s[0])
        heapq.heapreplace(free_s, start_s + lasts_s)
        waits.append(start_s - arrives_s)
    return np.array(waits)


@dataclass(frozen=True, slots=True)
class Costs:
    """What each length of a distribution costs in one deployment. # (points,) each"""

    crosses: npt.NDArray[np.bool_]
    prefill_s: FloatArray
    rest_s: FloatArray  # exposed transfer and hops
    num_prefill: dict[bool, int]  # by crossing
    slots: int
    step_s: float


def costs_of(scenario: Scenario, deployment: Deployment, lengths: FloatArray) -> Costs:
    tail_s = transfer_tail_function(
        scenario.model.architecture,
        layerwise=scenario.transport.layerwise,
        link_bytes_per_s=scenario.link.rate_bytes_per_s,
        fabric_bytes_per_s=scenario.fabric.rate_bytes_per_s,
        link_delay_s=scenario.link.far_to_near.delay_s,
    )
    hop_s = scenario.link.near_to_far.delay_s
    crosses, prefill_s, rest_s = [], [], []
    threshold = deployment.threshold_tokens
    for length in np.rint(lengths).astype(int).tolist():
        far = bool(deployment.num_prfaas) and (threshold is None or length > threshold)
        name = deployment.prfaas_hardware if far else deployment.pd_hardware
        assert name is not None, "PrfaaS instances have a hardware"
        cost_s = scenario.hardware[name].profile.prefill_s(length)
        crosses.append(far)
        prefill_s.append(cost_s)
        rest_s.append(tail_s(length, cost_s, far) + (hop_s if far else 0.0))
    return Costs(
        crosses=np.array(crosses),
        prefill_s=np.array(prefill_s),
        rest_s=np.array(rest_s),
        num_prefill={True: deployment.num_prfaas, False: deployment.num_prefill},
        slots=deployment.num_decode * decode_batch(scenario, deployment),
        step_s=decode_step_s(scenario, deployment),
    )


def simulated_ttft_s(
    costs: Costs, arrival_s: FloatArray, place: IntArray, output_tokens: FloatArray
) -> FloatArray:
    """TTFT of each request; ``place`` is its length's. # (requests,) each"""
    waits = np.zeros(len(arrival_s))
    crosses, prefill_s = costs.crosses[place], costs.prefill_s[place]
    for far in (False, True):
        some = crosses == far
        if some.any():
            waits[some] = fcfs_waits(arrival_s[some], prefill_s[some], costs.num_prefill[far])
    landed_after_s = waits + prefill_s + costs.rest_s[place]
    landed_s = arrival_s + landed_after_s
    order = np.argsort(landed_s, kind="stable")
    admission = np.empty(len(order))
    hold_s = (output_tokens - 1) * costs.step_s
    admission[order] = fcfs_waits(landed_s[order], hold_s[order], costs.slots)
    return landed_after_s + admission


def arrivals_s(
    cv: float, on_off: tuple[float, float, float] | None, rate: float, count: int, seed: int
) -> FloatArray:
    """Gamma gaps at a constant rate, or at one that alternates (``harness.workload``)."""
    rng = np.random.default_rng([seed, 1])
    ticks = np.cumsum(rng.standard_gamma(1 / cv**2, count) * cv**2)
    if on_off is None:
        return ticks / rate
    on_s, off_s, multiple = on_off
    share = on_s / (on_s + off_s)
    rates = (multiple * rate, max(0.0, (1 - share * multiple) / (1 - share)) * rate)
    cycles = int(1.5 * ticks[-1] / rate / (on_s + off_s)) + 200
    first_on = bool(rng.random() < share)
    means_s, steps = (on_s, off_s), rates
    if not first_on:
        means_s, steps = means_s[::-1], steps[::-1]
    lasts_s = rng.standard_exponential((cycles, 2)) * means_s
    at_s = np.concatenate([[0.0], np.cumsum(lasts_s.ravel())])
    at_ticks = np.concatenate([[0.0], np.cumsum((lasts_s * steps).ravel())])
    assert at_ticks[-1] > ticks[-1], "too few states were drawn"
    return np.interp(ticks, at_ticks, at_s)


def statistics_of(ttft_s: FloatArray) -> FloatArray:
    return np.array([ttft_s.mean(), *np.quantile(ttft_s, list(QUANTILES.values()))])


def predicted(ttft: Ttft) -> FloatArray:
    values = (ttft.ttft_mean_s, ttft.ttft_p50_s, ttft.ttft_p90_s, ttft.ttft_p99_s)
    return np.array(values, dtype=np.float64)


def simpler_mean_s(model: Ttft, routes: tuple[Route, ...], waits_s: list[float]) -> float:
    """The model's mean TTFT with other prefill waits."""
    assert model.ttft_mean_s is not None, "the loads are below 1"
    own = [one.parts.prefill_queue_s for one in model.routes]
    shares = [route.share for route in routes]
    return model.ttft_mean_s + sum(
        share * (other - mine) for share, mine, other in zip(shares, own, waits_s, strict=True)
    )


def allen_cunneen_s(route: Route, stream: Arrivals) -> float:
    """Erlang's wait times (C_a^2 + C_s^2) / 2."""
    poisson = Renewal(stream.rate_req_per_s, 1.0)
    servers = route.station.num_instances
    erlang = exponential_service_wait(poisson, route.service.mean_s, servers)
    limit = stream.dispersion(0.0) if isinstance(stream, Renewal) else 1.0
    return erlang.mean_s * (limit + route.service.scv) / 2


def dispersion_rule_s(route: Route, stream: Arrivals) -> float:
    servers, service = route.station.num_instances, route.service
    load = stream.rate_req_per_s * service.mean_s / servers
    window_s = service.mean_s / servers
    for _ in range(200):
        spread = stream.dispersion(window_s) + service.scv
        window_s = service.mean_s * spread * load / (2 * servers * (1 - load) ** 2)
    gaps = Renewal(stream.rate_req_per_s, stream.dispersion(window_s))
    return gaps.wait(service, servers).mean_s


def cell(
    scenario: Scenario,
    name: str,
    lengths: LengthDistribution,
    load: float,
    on_off: tuple[float, float, float] | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    deployment = scenario.deployments[name]
    rate = load * deployment_model(scenario, deployment, lengths).lambda_max_exact_req_per_s
    model = TtftModel(scenario, deployment, lengths).predict(rate)
    simulate_runs = simulator_runs if options.simulator else queue_runs
    runs = simulate_runs(scenario, deployment, lengths, rate, on_off, options)
    found = compared(predicted(model), runs)
    routes, _, _ = prefill_routes(scenario, deployment, lengths)
    stream = scenario_stream(scenario, rate, on_off)
    parts = [(route, stream.part(route.low, route.high)) for route in routes]
    others = {"allen_cunneen": [allen_cunneen_s(*part) for part in parts]}
    if on_off is not None:
        others["dispersion_rule"] = [dispersion_rule_s(*part) for part in parts]
    return {
        "deployment": name,
        "cv": scenario.workload.cv,
        "on_off": on_off,
        "load": load,
        "busiest_stage": model.utilisation.busiest()[0],
        "rate_req_per_s": rate,
        **found,
        **{
            key: simpler_mean_s(model, routes, waits_s) / found["simulated_s"]["mean"] - 1
            for key, waits_s in others.items()
        },
    }


def queue_runs(
    scenario: Scenario,
    deployment: Deployment,
    lengths: LengthDistribution,
    rate: float,
    on_off: tuple[float, float, float] | None,
    options: argparse.Namespace,
) -> FloatArray:
    """# (seeds, statistics)"""
    assert not lengths.cached_tokens.any(), "cached prefixes are not simulated"
    costs = costs_of(scenario, deployment, lengths.lengths)
    cumulated = np.cumsum(lengths.weights)
    outputs = np.full(options.requests, lengths.mean_output_tokens)
    runs = []
    for seed in range(options.seeds):
        times_s = arrivals_s(scenario.workload.cv, on_off, rate, options.requests, seed)
        draws = np.random.default_rng([seed, 2]).random(options.requests) * cumulated[-1]
        place = np.minimum(np.searchsorted(cumulated, draws, "right"), len(cumulated) - 1)
        runs.append(statistics_of(simulated_ttft_s(costs, times_s, place, outputs)))
    return np.array(runs)


def simulator_runs(
    scenario: Scenario,
    deployment: Deployment,
    _lengths: LengthDistribution,
    rate: float,
    _on_off: tuple[float, float, float] | None,
    options: argparse.Namespace,
) -> FloatArray:
    """With the queue for the link and the choice of a decode instance. # (seeds, statistics)"""
    patient = replace(scenario.scheduling, admission_deadline_s=1e9)
    scenario = replace(scenario, scheduling=patient)
    runs = []
    for seed in range(options.seeds):
        load = replace(
            scenario.load,
            rate_req_per_s=rate,
            num_requests=options.requests,
            duration_s=None,
            seed=seed,
        )
        rows = simulate(scenario, deployment.name, build_schedule(scenario.workload, load)).requests
        runs.append(statistics_of(np.array([row.ttft_s for row in rows], dtype=np.float64)))
    return np.array(runs)


def scenario_stream(
    scenario: Scenario, rate: float, on_off: tuple[float, float, float] | None
) -> Arrivals:
    scv = scenario.workload.cv**2
    return Renewal(rate, scv) if on_off is None else OnOff(rate, scv, *on_off)


def trace_cell(scenario: Scenario, name: str, load: float, seeds: int) -> dict[str, Any]:
    """A trace's own requests on its own arrivals, faster or slower; seeds spread its quanta."""
    deployment = scenario.deployments[name]
    lengths = length_distribution(scenario)
    rate = load * deployment_model(scenario, deployment, lengths).lambda_max_exact_req_per_s
    model = TtftModel(scenario, deployment, lengths).predict(rate)
    runs = []
    for seed in range(seeds):
        schedule = build_schedule(scenario.workload, replace(scenario.load, seed=seed))
        tokens = np.array([request.input_tokens for request in schedule], dtype=np.float64)
        distinct, place = np.unique(tokens, return_inverse=True)
        outputs = np.array([request.output_tokens for request in schedule], dtype=np.float64)
        planned_s = np.array([request.planned_s for request in schedule])
        planned_s = planned_s - planned_s[0]
        scale = (len(planned_s) - 1) / planned_s[-1] / rate
        costs = costs_of(scenario, deployment, distinct)
        runs.append(statistics_of(simulated_ttft_s(costs, planned_s * scale, place, outputs)))
    return {
        "deployment": name,
        "trace": scenario.workload.trace.name if scenario.workload.trace else None,
        "load": load,
        "rate_req_per_s": rate,
        **compared(predicted(model), np.array(runs)),
    }


def compared(model: FloatArray, runs: FloatArray) -> dict[str, Any]:
    """``runs`` # (seeds, statistics)"""
    simulated = runs.mean(axis=0)
    noise = runs[:, 0].std(ddof=1) / len(runs) ** 0.5 / simulated[0] if len(runs) > 1 else None
    return {
        "simulated_s": dict(zip(STATISTICS, simulated.tolist(), strict=True)),
        "error": dict(zip(STATISTICS, (model / simulated - 1).tolist(), strict=True)),
        "noise": noise,
    }


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    base = load_scenario(options.scenario, options.set)
    names = options.deployments or list(base.deployments)
    if options.trace is not None:
        traced = with_trace(base, options.trace)
        for name in names:
            for load in options.loads:
                yield trace_cell(traced, name, load, options.seeds)
    for on_off in options.on_off:
        on_s, off_s, multiple = on_off
        keys = [
            "workload.arrivals='on_off'",
            f"workload.on_duration='{on_s}s'",
            f"workload.off_duration='{off_s}s'",
            f"workload.on_rate_multiple={multiple}",
        ]
        yield from _cells(options, names, keys, on_off)
    for cv in options.cv:
        yield from _cells(options, names, [f"workload.cv={cv}"], None)


def _cells(
    options: argparse.Namespace,
    names: list[str],
    keys: list[str],
    on_off: tuple[float, float, float] | None,
) -> Iterator[dict[str, Any]]:
    scenario = load_scenario(options.scenario, [*options.set, *keys])
    lengths = length_distribution(scenario)
    for name in names:
        for load in options.loads:
            yield cell(scenario, name, lengths, load, on_off, options)


def worst(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Largest errors over the deployments, by arrivals and load."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row.get("trace"), row.get("on_off"), row.get("cv"), row["load"])
        groups.setdefault(key, []).append(row)
    return [
        {
            "trace": trace,
            "on_off": on_off,
            "cv": cv,
            "load": load,
            **{s: max((row["error"][s] for row in group), key=abs) for s in STATISTICS},
            "noise": max(row["noise"] or 0.0 for row in group),
        }
        for (trace, on_off, cv, load), group in groups.items()
    ]


def _on_off(text: str) -> tuple[float, float, float]:
    on_s, off_s, multiple = (float(part) for part in text.split(","))
    return on_s, off_s, multiple


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", type=Path, default=PAPER)
    parser.add_argument("--deployments", nargs="*", default=[], help="all by default")
    parser.add_argument("--loads", nargs="*", type=float, default=LOADS)
    parser.add_argument("--cv", nargs="*", type=float, default=CVS)
    parser.add_argument(
        "--on-off", nargs="*", type=_on_off, default=[], metavar="ON_S,OFF_S,MULTIPLE"
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--simulator", action="store_true", help="against harness.simulator")
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    start_s = time.monotonic()
    rows = list(cells(options))
    document = {"worst": worst(rows), "cells": rows, "took_s": time.monotonic() - start_s}
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
