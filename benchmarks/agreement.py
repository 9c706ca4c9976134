"""Live emulated runs beside simulations of the same schedules: how far TTFT is off.

    python -m benchmarks.agreement --json
    python -m benchmarks.agreement --loads 0.6 --requests 120 --repeats 3

For each deployment of the case study and each load, a share of what it carries by Eq. 6 with
E[T(l)], the deployment runs live on this machine as ``prfaas bench`` runs it: real gateway, KV
bytes over TCP and the link, Locust; only the compute is emulated. The same schedule was simulated
before. ``mean_ratio`` and ``p90_ratio`` are live / simulated over the same requests, the median of
the repeats with its least and most; the repeats replay one schedule, so that their spread is the
machine's. A case is within where both are at most 7 % off. A run that failed a gate says so in
``reasons``: on a machine that is too busy to keep the schedule the ratio says nothing.

Takes requests / rate / 10 s a run (time scale 10). Exit status 1 where a case is not within.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from harness.bench import bench
from harness.preparation import prepare
from harness.record.tables import read_table
from harness.scenario import Scenario, load_scenario
from harness.statistics import nearest_rank
from harness.throughput import deployment_model

PAPER = Path(__file__).parents[1] / "scenarios" / "paper-case-study.toml"
TOLERANCE = 0.07


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.6, 0.85], metavar="SHARE")
    parser.add_argument("--requests", type=int, default=360, help="of a run (default 360)")
    parser.add_argument("--repeats", type=int, default=3, help="of each case (default 3)")
    parser.add_argument("--deployments", nargs="+", metavar="NAME", help="default: all three")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the run directories there")
    options = parser.parse_args(arguments)
    scenario = load_scenario(PAPER, [*options.set, f"load.num_requests={options.requests}"])
    names = options.deployments or list(scenario.deployments)
    for name in names:
        if name not in scenario.deployments:
            parser.error(f"no deployment {name!r}; there are {', '.join(scenario.deployments)}")
    cases = []
    with tempfile.TemporaryDirectory(prefix="prfaas-agreement-") as folder:
        runs = options.runs or Path(folder)
        for share in options.loads:
            for name in names:
                cases.append(_case(_alone(scenario, name, share), share, runs, options.repeats))
                if not options.json:
                    print(_line(cases[-1]), flush=True)
    if options.json:
        print(json.dumps({"tolerance": TOLERANCE, "cases": cases}, indent=2))
    return 0 if all(one["within"] for one in cases) else 1


def _alone(scenario: Scenario, name: str, share: float) -> Scenario:
    """One deployment at a share of what it carries."""
    deployment = scenario.deployments[name]
    exact = deployment_model(scenario, deployment).lambda_max_exact_req_per_s
    load = replace(scenario.load, rate_req_per_s=share * exact)
    return replace(scenario, load=load, deployments={name: deployment})


def _case(scenario: Scenario, share: float, runs: Path, repeats: int) -> dict[str, Any]:
    (name,) = scenario.deployments
    case: dict[str, Any] = {
        "deployment": name,
        "load": share,
        "rate_req_per_s": scenario.load.rate_req_per_s,
        "num_requests": scenario.load.num_requests,
        "repeats": repeats,
    }
    result = bench(prepare(scenario), runs, repeats, _say, lambda *_: None)
    if result.error is not None:
        return {**case, "within": False, "error": str(result.error)}
    found = list(_compared(read_table(result.run, "requests")))
    ratios = {key: [one[f"{key}_ratio"] for one in found] for key in ("mean", "p90")}
    medians = {f"{key}_ratio": statistics.median(values) for key, values in ratios.items()}
    return {
        **case,
        **medians,
        **{f"{key}_ratio_spread": [min(values), max(values)] for key, values in ratios.items()},
        "within": all(abs(value - 1) <= TOLERANCE for value in medians.values()),
        "by_repeat": found,
        "reasons": list(result.verdict.reasons),
    }


def _compared(requests: pd.DataFrame) -> Iterator[dict[str, float]]:
    """Live and simulated TTFT of each repeat, over the requests that have both."""
    for _, rows in requests.groupby("repeat", sort=True):
        both = rows.dropna(subset=["ttft_s", "modelled_ttft_s"])
        live, simulated = (
            both[column].to_numpy(dtype=float) for column in ("ttft_s", "modelled_ttft_s")
        )
        live_p90_s, simulated_p90_s = nearest_rank(live, 0.9), nearest_rank(simulated, 0.9)
        assert live_p90_s is not None
        assert simulated_p90_s is not None
        yield {
            "num_compared": float(len(both)),
            "mean_s": float(live.mean()),
            "p90_s": live_p90_s,
            "simulated_mean_s": float(simulated.mean()),
            "simulated_p90_s": simulated_p90_s,
            "mean_ratio": float(live.mean() / simulated.mean()),
            "p90_ratio": live_p90_s / simulated_p90_s,
        }


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _line(case: dict[str, Any]) -> str:
    head = f"{case['deployment']:<20} at {case['load']:<5g}"
    if "error" in case:
        return f"{head} failed: {case['error']}"
    parts = []
    for key in ("mean", "p90"):
        low, high = case[f"{key}_ratio_spread"]
        parts.append(f"{key} x{case[f'{key}_ratio']:.3f} ({low:.3f}-{high:.3f})")
    verdict = "within" if case["within"] else "NOT within"
    reasons = f"; {'; '.join(case['reasons'])}" if case["reasons"] else ""
    return f"{head} {', '.join(parts)}: {verdict} {100 * TOLERANCE:g} %{reasons}"


if __name__ == "__main__":
    sys.exit(main())
