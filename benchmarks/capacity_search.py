"""The search for Lambda_max at an SLO where the answer is known. JSON with --json.

    python -m benchmarks.capacity_search --json
    python -m benchmarks.capacity_search --budget 300000 --slo 4

M/D/1 of service 1 s: P90 of wait + service is the SLO at a load that Erlang's series gives. The
case study's deployments without transfer, plan held, at an SLO of 50 s: what fails it is a queue
that grows, so Lambda_max comes near to Eq. 6 with E[T(l)]. ``holds``: whether the bracket has the
known value; ``width``: high / low; ``estimate_ratio``: the estimate over it. Exit status 1 where a
bracket of M/D/1 does not hold it.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.cores import Cores
from harness.profile import PrefillPoint
from harness.saturation.lambda_max import Effort, lambda_max
from harness.scenario import Scenario, load_scenario
from harness.throughput import deployment_model

PAPER = Path(__file__).parents[1] / "scenarios" / "paper-case-study.toml"
LOOSE_SLO_S = 50.0
NAMES = ("prfaas_pd", "homogeneous_pd", "naive_heterogeneous")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--slo", nargs="+", type=float, default=[2.0, 4.0, 8.0], metavar="S")
    parser.add_argument("--budget", type=int, default=1_500_000, help="requests of one search")
    options = parser.parse_args(arguments)
    effort = Effort(budget_requests=options.budget)
    cases = []
    with Cores() as cores:
        for slo_s in options.slo:
            known = md1_lambda_max(slo_s)
            cases.append(_case("M/D/1", constant(), "queue", slo_s, known, effort, cores))
        scenario = load_scenario(PAPER, ["scheduling.bandwidth_aware=false"])
        for name in NAMES:
            exact = deployment_model(scenario, scenario.deployments[name])
            known = exact.lambda_max_exact_req_per_s
            cases.append(_case("case study", scenario, name, LOOSE_SLO_S, known, effort, cores))
    if options.json:
        print(json.dumps({"cases": cases}, indent=2))
    else:
        for one in cases:
            print(
                f"{one['system']:<11}{one['deployment']:<20} P90 <= {one['slo_ttft_s']:g} s: "
                f"[{one['low']}, {one['high']}], {one['ended']}; known {one['known']:.4f}"
            )
    return 0 if all(one["holds"] for one in cases if one["system"] == "M/D/1") else 1


def constant(service_s: float = 1.0, output_tokens: int = 1) -> Scenario:
    """M/D/1: one prefill instance, prompts of one length, decode that does not limit it."""
    scenario = load_scenario(
        PAPER,
        [
            "workload.mu=6.907755278982137",
            "workload.sigma=0",
            f"workload.output_tokens={output_tokens}",
            "slo.ttft='4s'",
        ],
    )
    h20 = scenario.hardware["h20"]
    points = tuple(PrefillPoint(n, 0, service_s, "stand_in", "") for n in (1, 1_000_000))
    deployment = replace(scenario.deployments["homogeneous_pd"], num_prefill=1, num_decode=20)
    return replace(
        scenario,
        hardware={
            **scenario.hardware,
            "h20": replace(h20, profile=replace(h20.profile, prefill_points=points)),
        },
        deployments={"queue": replace(deployment, name="queue")},
    )


def md1_wait_cdf(rate: float, t_s: float) -> float:
    """P(W <= t) of M/D/1 with a service of 1 s (Erlang 1909)."""
    terms = [
        (rate * (k - t_s)) ** k / math.factorial(k) * math.exp(-rate * (k - t_s))
        for k in range(math.floor(t_s) + 1)
    ]
    return (1 - rate) * math.fsum(terms)


def md1_lambda_max(ttft_s: float) -> float:
    """The load at which P90 of wait plus service is ``ttft_s``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if md1_wait_cdf(rate, ttft_s - 1) >= 0.9 else (low, rate)
    return low


def _case(
    system: str,
    scenario: Scenario,
    name: str,
    slo_s: float,
    known: float,
    effort: Effort,
    cores: Cores,
) -> dict[str, Any]:
    begun_s = time.monotonic()
    found = lambda_max(scenario, name, slo_s, effort, cores, transfer=False)
    low, high = found.bracket.low, found.bracket.high
    both = low is not None and high is not None
    return {
        "system": system,
        "deployment": name,
        "slo_ttft_s": slo_s,
        "known": known,
        "low": low,
        "high": high,
        "ended": found.bracket.ended,
        "holds": low is not None and high is not None and low <= known <= high,
        "width": high / low if both and low and high else None,
        "estimate_ratio": found.estimate_req_per_s and found.estimate_req_per_s / known,
        "saturated_req_per_s": found.saturated_req_per_s,
        "wall_s": time.monotonic() - begun_s,
    }


if __name__ == "__main__":
    sys.exit(main())
