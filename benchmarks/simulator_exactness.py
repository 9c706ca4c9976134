"""The simulator where theory or a reference is exact, each case in a process of its own.

    python -m benchmarks.simulator_exactness --json
    python -m benchmarks.simulator_exactness --only queues saturation
    python -m benchmarks.simulator_exactness --case "table 1.8 cv 2 homogeneous_pd"

queues      mean waits of M/M/1, M/D/1, M/G/1 and M/M/c at utilisation 0.7, a million requests
table       mean and P90 of TTFT of the case study without transfer, 5 seeds of 200,000 requests,
            beside a queue that was simulated apart from this one (first come first served, G/G/c)
saturation  throughput at twice the load that fits beside Eq. 6 with E[T(l)], the plan held

``error`` is found / expected - 1, ``standard_error`` that of the found figure as a share of the
expected one: by 40 batch means of one run, else over the seeds. ``within`` says whether the error
is inside ``tolerance``; chance alone is no excuse. Every run asserts Little's law and that each
request has one outcome (``harness.simulator``). Exit status 1 where a case is not within.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.profile import PrefillPoint
from harness.saturation.trial import OVERLOAD, Trial, run_overloaded
from harness.scenario import Scenario, load_scenario
from harness.schedule import Schedule
from harness.simulator import simulate
from harness.statistics import nearest_rank, seed_interval
from harness.throughput import deployment_model
from harness.workload import build_schedule

FloatArray = npt.NDArray[np.float64]

PAPER = Path(__file__).parents[1] / "scenarios" / "paper-case-study.toml"
NAMES = ("prfaas_pd", "homogeneous_pd", "naive_heterogeneous")
UTILISATION = 0.7
BATCHES = 40
SEEDS = 5
#: Prefill of one token; a service of a second is so many.
TOKEN_S = 1e-3

#: Draws services of mean 1 s; their squared coefficient of variation.
SERVICES: dict[str, tuple[Callable[[np.random.Generator, int], FloatArray], float]] = {
    "deterministic": (lambda _rng, n: np.ones(n), 0.0),
    "exponential": (lambda rng, n: rng.exponential(1.0, n), 1.0),
    "uniform": (lambda rng, n: rng.uniform(0.0, 2.0, n), 1 / 3),
}
#: (servers, law of the services) of each queue.
QUEUES = {
    "M/M/1": (1, "exponential"),
    "M/D/1": (1, "deterministic"),
    "M/G/1 uniform": (1, "uniform"),
    "M/M/3": (3, "exponential"),
    "M/M/9": (9, "exponential"),
}
#: Mean and P90 of TTFT in s by (load, CV), in the order of NAMES: 5 x 200,000 requests of a queue
#: apart from this one.
REFERENCE: dict[tuple[float, int], tuple[tuple[float, float], ...]] = {
    (1.27, 1): ((2.35, 3.73), (4.70, 10.00), (1.87, 3.77)),
    (1.5, 1): ((2.41, 3.89), (5.10, 10.67), (2.04, 4.10)),
    (1.8, 1): ((2.55, 4.22), (7.56, 15.4), (2.51, 5.08)),
    (1.27, 2): ((2.75, 4.78), (5.79, 12.18), (2.73, 5.63)),
    (1.5, 2): ((2.95, 5.23), (7.20, 15.10), (3.30, 6.83)),
    (1.8, 2): ((3.33, 6.05), (14.5, 30.5), (4.81, 10.19)),
}
KINDS = ("queues", "table", "saturation")


def linear(servers: int) -> Scenario:
    """One cluster whose prefill takes a millisecond a token, and decode that never limits."""
    scenario = load_scenario(PAPER)
    h20 = scenario.hardware["h20"]
    points = tuple(
        PrefillPoint(tokens, 0, TOKEN_S * tokens, "stand_in", "") for tokens in (1, 1_000_000)
    )
    deployment = replace(scenario.deployments["homogeneous_pd"], num_prefill=servers)
    return replace(
        scenario,
        hardware={
            **scenario.hardware,
            "h20": replace(h20, profile=replace(h20.profile, prefill_points=points)),
        },
        deployments={"queue": replace(deployment, name="queue", num_decode=20)},
    )


def mean_wait(servers: int, services_s: FloatArray, seed: int) -> tuple[float, float]:
    """Simulated mean wait and its standard error by batch means; Poisson arrivals, load 0.7."""
    rate = UTILISATION * servers / services_s.mean()
    rng = np.random.default_rng(seed)
    count = len(services_s)
    at_s = np.cumsum(rng.exponential(1 / rate, count))
    tokens = np.maximum(1, np.rint(services_s / TOKEN_S)).astype(np.int64)
    schedule = Schedule(np.arange(count), at_s, tokens, np.ones(count, dtype=np.int64), None)
    found = simulate(linear(servers), "queue", schedule, transfer=False, sink=lambda _rows: None)
    assert found.num_completed == count, "nobody is refused at this load"
    waits = found.ttft_s - tokens * TOKEN_S
    batches = waits[: count // BATCHES * BATCHES].reshape(BATCHES, -1).mean(axis=1)
    return float(waits.mean()), float(batches.std(ddof=1) / math.sqrt(BATCHES))


def erlang_c(servers: int, offered: float) -> float:
    """Probability of waiting in M/M/c."""
    terms = [offered**k / math.factorial(k) for k in range(servers)]
    last = offered**servers / math.factorial(servers) / (1 - offered / servers)
    return last / (sum(terms) + last)


def expected_wait(servers: int, scv: float) -> float:
    """Pollaczek and Khinchine's of one server, Erlang's of several; services of mean 1 s."""
    if servers == 1:
        return UTILISATION * (1 + scv) / (2 * (1 - UTILISATION))
    assert scv == 1.0, "several servers have a closed form for exponential services alone"
    return erlang_c(servers, UTILISATION * servers) / (servers * (1 - UTILISATION))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--cv", nargs="+", type=int, default=[1, 2], help="rows of the table")
    parser.add_argument("--case", metavar="NAME", help="run this one, in here")
    parser.add_argument("--requests", type=int, help="of each run, in place of a case's own number")
    options = parser.parse_args(arguments)
    every = _cases()
    if options.case is not None:
        if options.case not in every:
            parser.error(f"no case {options.case!r}; there are {', '.join(every)}")
        print(json.dumps(_timed(options.case, every[options.case], options.requests)))
        return 0
    chosen = [
        name
        for name in every
        if any(name.startswith(f"{kind} ") for kind in options.only)
        and (not name.startswith("table") or any(f" cv {cv} " in name for cv in options.cv))
    ]
    cases = []
    for name in chosen:
        cases.append(_in_a_process(name, options.requests))
        if not options.json:
            _tell(cases[-1])
    if options.json:
        print(json.dumps({"cases": cases}, indent=2))
    return 0 if all(one["within"] for case in cases for one in case["figures"]) else 1


#: Takes the number of requests, or None for a case's own.
Case = Callable[[int | None], list[dict[str, Any]]]


def _cases() -> dict[str, Case]:
    queues = {f"queues {name}": _queue(*QUEUES[name]) for name in QUEUES}
    table = {
        f"table {load} cv {cv} {name}": _row(load, cv, name)
        for load, cv in REFERENCE
        for name in NAMES
    }
    saturation = {f"saturation {name}": _saturation(name) for name in NAMES}
    return {**queues, **table, **saturation}


def _in_a_process(name: str, requests: int | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.simulator_exactness", "--case", name]
    if requests is not None:
        command += ["--requests", str(requests)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _timed(name: str, case: Case, requests: int | None) -> dict[str, Any]:
    begun_s = time.process_time()
    figures = case(requests)
    return {"name": name, "figures": figures, "cpu_s": time.process_time() - begun_s}


def _tell(case: dict[str, Any]) -> None:
    for one in case["figures"]:
        print(
            f"{case['name']:<36}{one['figure']:<18}{one['expected']:>9.4g}{one['found']:>9.4g}"
            f"{100 * one['error']:>+8.2f} % +-{100 * one['standard_error']:.2f}"
            f"{'' if one['within'] else '  NOT within'}",
            flush=True,
        )


def _figure(
    name: str, expected: float, found: float, error_of: float, tolerance: float, requests: int
) -> dict[str, Any]:
    """``error_of``: the standard error of ``found``, in its unit."""
    error = found / expected - 1
    return {
        "figure": name,
        "num_requests": requests,
        "expected": expected,
        "found": found,
        "error": error,
        "standard_error": error_of / expected,
        "tolerance": tolerance,
        "within": abs(error) <= tolerance,
    }


def _queue(servers: int, law: str) -> Case:
    def run(requests: int | None) -> list[dict[str, Any]]:
        count = requests or 1_000_000
        draw, scv = SERVICES[law]
        found_s, error_s = mean_wait(servers, draw(np.random.default_rng(7), count), seed=1)
        expected_s = expected_wait(servers, scv)
        return [_figure("mean wait, s", expected_s, found_s, error_s, 0.02, count)]

    return run


def _row(load: float, cv: int, name: str) -> Case:
    def run(requests: int | None) -> list[dict[str, Any]]:
        count = requests or 200_000
        scenario = load_scenario(
            PAPER,
            [
                f"load.rate_req_per_s={load}",
                f"workload.cv={cv}",
                f"load.num_requests={count}",
            ],
        )
        runs = [_ttft_s(scenario, name, seed) for seed in range(1, SEEDS + 1)]
        references = dict(zip(NAMES, REFERENCE[load, cv], strict=True))[name]
        tolerance = 0.03 if load < 1.8 else 0.08
        rows = []
        for what, expected_s, values in zip(
            ("TTFT mean, s", "TTFT P90, s"), references, zip(*runs, strict=True), strict=True
        ):
            error_s = float(np.std(values, ddof=1)) / math.sqrt(SEEDS)
            found_s = float(np.mean(values))
            row = _figure(what, expected_s, found_s, error_s, tolerance, SEEDS * count)
            inside = seed_interval(values, 0.95)
            rows.append({**row, "interval": [inside.low, inside.high]})
        return rows

    return run


def _ttft_s(scenario: Scenario, name: str, seed: int) -> tuple[float, float]:
    """Mean and P90 of one seed."""
    schedule = build_schedule(scenario.workload, replace(scenario.load, seed=seed))
    found = simulate(scenario, name, schedule, transfer=False, sink=lambda _rows: None)
    assert found.num_completed == len(schedule), "every load of the table is carried"
    p90_s = nearest_rank(found.ttft_s, 0.9)
    assert p90_s is not None
    return float(found.ttft_s.mean()), p90_s


def _saturation(name: str) -> Case:
    def run(requests: int | None) -> list[dict[str, Any]]:
        count = requests or 50_000
        scenario = load_scenario(PAPER)
        model = deployment_model(scenario, scenario.deployments[name])
        exact = model.lambda_max_exact_req_per_s
        rates = [
            run_overloaded(Trial(scenario, name, OVERLOAD * exact, seed, count, transfer=False))
            for seed in range(1, SEEDS + 1)
        ]
        error = float(np.std(rates, ddof=1)) / math.sqrt(SEEDS)
        found = float(np.mean(rates))
        return [_figure("throughput, req/s", exact, found, error, 0.02, SEEDS * count)]

    return run


if __name__ == "__main__":
    sys.exit(main())
