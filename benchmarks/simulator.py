"""How many requests a second the simulator carries on one core, and what memory it takes.

    python -m benchmarks.simulator --json     # every case, each in a process of its own
    python -m benchmarks.simulator --case paper --requests 100000

Rates are requests over CPU seconds of the simulating process, from the first event to the last,
the schedule built before; memory is the process's peak, schedule included. SimPy's bare G/G/c queue
(no policy, no transfer, no decode) stands beside it for scale where simpy is installed.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness.scenario import Scenario, load_scenario
from harness.simulator import simulate
from harness.workload import build_schedule

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
#: 1,250 instances of 8 GPUs, as busy as the case study at 1.5 req/s.
LARGE = (
    "load.rate_req_per_s=250",
    "deployments.prfaas_pd.num_prfaas=400",
    "deployments.prfaas_pd.num_prefill=300",
    "deployments.prfaas_pd.num_decode=550",
    "link.rate='10tbit'",
)
CACHED = ("prefix_cache.enabled=true", "prefix_cache.memory='16GiB'")
SMALL = ("load.rate_req_per_s=1.5",)
#: (requests, settings, with transfer) of each case.
CASES: dict[str, tuple[int, tuple[str, ...], bool]] = {
    "paper_no_transfer": (200_000, SMALL, False),
    "paper": (200_000, SMALL, True),
    "instances_1250": (200_000, LARGE, True),
    "instances_1250_prefix_cache": (100_000, (*LARGE, *CACHED), True),
    "million_1250": (1_000_000, LARGE, True),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--case", choices=(*CASES, "simpy_ggc"), help="run this one, in here")
    parser.add_argument("--requests", type=int, help="in place of the case's own number")
    parser.add_argument("--repeats", type=int, default=1, help="of each case; the median is told")
    options = parser.parse_args(arguments)
    if options.case is not None:
        print(json.dumps(_run(options.case, options.requests)))
        return 0
    cases = [_repeated(name, options.requests, options.repeats) for name in _names()]
    if options.json:
        print(json.dumps({"cases": cases}, indent=2))
    else:
        for one in cases:
            rate, peak = one["requests_per_s"], one["peak_rss_bytes"] / 2**20
            print(f"{one['name']:<28}{rate:>10,.0f} req/s {peak:>8,.0f} MiB")
    return 0


def _names() -> Iterator[str]:
    yield from CASES
    try:
        import simpy  # noqa: F401  # only whether it is there
    except ImportError:
        print("simpy is not installed: no bare queue for scale", file=sys.stderr)
    else:
        yield "simpy_ggc"


def _repeated(name: str, requests: int | None, repeats: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.simulator", "--case", name]
    if requests is not None:
        command += ["--requests", str(requests)]
    runs = []
    for _ in range(repeats):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout))
    rates = [one["requests_per_s"] for one in runs]
    return {
        **runs[0],
        "requests_per_s": statistics.median(rates),
        "spread_req_per_s": [min(rates), max(rates)],
        "peak_rss_bytes": max(one["peak_rss_bytes"] for one in runs),
    }


def _run(name: str, requests: int | None) -> dict[str, Any]:
    if name == "simpy_ggc":
        count, run = requests or 200_000, _bare_queue
    else:
        count, settings, transfer = CASES[name]
        count = requests or count
        scenario = load_scenario(PAPER, [*settings, f"load.num_requests={count}"])
        run = _simulation(scenario, transfer=transfer)
    cpu_s, wall_s = run(count)
    return {
        "name": name,
        "num_requests": count,
        "requests_per_s": count / cpu_s,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _simulation(scenario: Scenario, *, transfer: bool) -> Callable[[int], tuple[float, float]]:
    schedule = build_schedule(scenario.workload, scenario.load)

    def run(count: int) -> tuple[float, float]:
        begun = time.process_time(), time.monotonic()
        found = simulate(
            scenario, "prfaas_pd", schedule, transfer=transfer, sink=lambda _rows: None
        )
        assert found.num_completed == count, "a load that fits completes"
        return time.process_time() - begun[0], time.monotonic() - begun[1]

    return run


def _bare_queue(count: int) -> tuple[float, float]:
    """SimPy: arrivals, a resource of nine servers, service times drawn beforehand."""
    import simpy

    rng = np.random.default_rng(1)
    gaps, services = rng.exponential(1 / 1.5, count).tolist(), rng.exponential(4.5, count).tolist()
    world = simpy.Environment()
    servers = simpy.Resource(world, capacity=9)

    def request(service_s: float) -> Iterator[Any]:
        with servers.request() as turn:
            yield turn
            yield world.timeout(service_s)

    def source() -> Iterator[Any]:
        for gap_s, service_s in zip(gaps, services, strict=True):
            yield world.timeout(gap_s)
            world.process(request(service_s))

    begun = time.process_time(), time.monotonic()
    world.process(source())
    world.run()
    return time.process_time() - begun[0], time.monotonic() - begun[1]


if __name__ == "__main__":
    sys.exit(main())
