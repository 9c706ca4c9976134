"""Time and memory that a schedule takes, for every law of arrivals and for sessions. Prints JSON.

    python -m benchmarks.schedule [--requests 1000000] [--repeats 3] [--scenario FILE] --json

Each case runs in a child process of its own, so that its peak resident memory is its own too:
``rss_bytes`` is that of the child once the schedule is there, ``imports_bytes`` of it before the
first draw. ``cpu_s`` is the median of the repeats, ``cpu_spread_s`` the largest less the smallest.
``sha256`` is the schedule's, which has to be the same on every machine.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_STATES = (
    '[{rate_multiple=0.2,mean_duration="60s"},{rate_multiple=1,mean_duration="30s"},'
    '{rate_multiple=5,mean_duration="10s"}]'
)
CASES: dict[str, tuple[str, ...]] = {
    "poisson": (),
    "gamma_cv_3": ("workload.cv=3",),
    "weibull_cv_3": ("workload.arrivals=weibull", "workload.cv=3"),
    "on_off": (
        "workload.arrivals=on_off",
        "workload.on_duration=20s",
        "workload.off_duration=40s",
        "workload.on_rate_multiple=2.5",
    ),
    "mmpp": ("workload.arrivals=mmpp", f"workload.states={_STATES}"),
    "steps": (
        'workload.shape.steps=[{at="0s",multiple=1},{at="100s",multiple=3}]',
        "workload.shape.repeat=200s",
    ),
    "ramps": ('workload.shape.ramps=[{at="0s",multiple=1},{at="12h",multiple=3}]',),
    "spikes": (
        'workload.shape.spikes=[{at="40s",lasts="10s",multiple=10}]',
        "workload.shape.repeat=100s",
    ),
    "diurnal": ('workload.shape.diurnal={period="24h",peak_at="15h",swing="60%"}',),
    "mmpp_diurnal": (
        "workload.arrivals=mmpp",
        f"workload.states={_STATES}",
        'workload.shape.diurnal={period="24h",peak_at="15h",swing="60%"}',
    ),
    "conversations": ('workload.sessions={turns=5,think_time="30s",increment_tokens=300}',),
    "agents": (
        'workload.sessions={turns=20,think_time="5s",increment_tokens=400,increment_sigma=1.0,'
        "increment_min_tokens=10,increment_max_tokens=8000,shared_tokens=2000}",
        "workload.min_tokens=4000",
        "workload.mu=10.5",
        "workload.output_tokens=200",
    ),
    "closed_loop": ("load.concurrency=64",),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--scenario", type=Path, default=ROOT / "scenarios" / "paper-case-study.toml"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(_measured(options.case, options)))
        return 0
    cases = []
    for name in CASES:
        print(f"{name} ...", file=sys.stderr)
        cases.append(_of_child(name, options))
    document = {"requests": options.requests, "repeats": options.repeats, "cases": cases}
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    for case in cases:
        print(f"{case['law']:14} {case['cpu_s']:6.2f} s {case['rss_bytes'] / 1e6:6.0f} MB")
    return 0


def _of_child(name: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.schedule", "--case", name]
    command += ["--requests", str(options.requests), "--repeats", str(options.repeats)]
    command += ["--scenario", str(options.scenario)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT, timeout=600)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def _measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    from harness.scenario import load_scenario
    from harness.workload import build_schedule

    overrides = [*CASES[name], f"load.num_requests={options.requests}"]
    scenario = load_scenario(options.scenario, overrides)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    taken_s = []
    schedule = None
    for _ in range(options.repeats):
        del schedule
        start_s = time.process_time()
        schedule = build_schedule(scenario.workload, scenario.load)
        taken_s.append(time.process_time() - start_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert schedule is not None
    assert len(schedule) == options.requests
    return {
        "law": name,
        "requests": len(schedule),
        "cpu_s": statistics.median(taken_s),
        "cpu_spread_s": max(taken_s) - min(taken_s),
        "rss_bytes": peak,
        "imports_bytes": before,
        "hash_ids": 0 if schedule.chains is None else int(schedule.chains.count.sum()),
        "sha256": schedule.sha256(),
    }


if __name__ == "__main__":
    sys.exit(main())
