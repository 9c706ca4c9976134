"""One simulated run of a search: a load, a seed, and what became of its TTFT and TPOT.

Common random numbers: a seed has the same lengths and the same gaps at every load and for every
plan, the gaps scaled by the rate (arrivals with a rate of their own, such as on_off, keep the times
of their states). A longer run begins like a shorter one.

A run starts empty. The first fifth of its requests is simulated and not counted; that share is
fixed, so that no run chooses its own. In an overloaded run TTFT grows for as long as the load
lasts, so its P90 depends on the length: a run lasts 100 times the TTFT bound at least. With
lambda / mu = 1 + x the P90 of the rest is about 0.92 x T after a time T: from x = 1.1 % on it is
past the bound.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.core import ScenarioError
from harness.preparation import refuse_planned_only
from harness.saturation.judging import QUANTILE, Replicate
from harness.scenario import Scenario
from harness.simulator import SimulatedRows, simulate
from harness.statistics import nearest_rank
from harness.summary.service import SLO_RELATIVE
from harness.workload import build_schedule

FloatArray = npt.NDArray[np.float64]

WARM_UP_SHARE = 0.2
#: A run lasts so many times the TTFT bound.
HORIZON = 100.0
#: Least requests of a run, where nobody asks for another number: 800 lie beyond its P90.
LEAST_REQUESTS = 10_000
#: Offered in an overloaded run, as a multiple of what Eq. 6 says.
OVERLOAD = 2.0
_PATIENCE_S, _MOST_QUEUED = 1e9, 1_000_000


@dataclass(frozen=True, slots=True)
class Trial:
    """What one process is asked for."""

    scenario: Scenario
    deployment: str
    rate_req_per_s: float
    seed: int
    num_requests: int
    transfer: bool


def check_searchable(scenario: Scenario) -> None:
    """ScenarioError where a load cannot be scaled, or a seed gives no other run."""
    refuse_planned_only(scenario)
    where = f"in the scenario file {scenario.path}"
    if scenario.load.concurrency is not None:
        raise ScenarioError(
            f"'load.concurrency' {where} makes the load a closed loop, which has no rate to search "
            "over. Give load.rate_req_per_s in its place."
        )
    if scenario.workload.trace is not None:
        raise ScenarioError(
            f"'workload.trace' {where} is one run of arrivals, and a search needs one a seed. "
            "Describe the workload by its lengths and arrivals."
        )


def num_requests(rate_req_per_s: float, ttft_s: float, least: int) -> int:
    """How many requests a run at a load takes."""
    return max(least, math.ceil(HORIZON * ttft_s * rate_req_per_s))


def run_trial(trial: Trial) -> Replicate:
    """P90 of TTFT and the share that misses TPOT, the first fifth not counted."""
    scenario = _loaded(trial)
    schedule = build_schedule(scenario.workload, scenario.load)
    ttft_s = np.full(len(schedule), math.inf)
    missed = np.ones(len(schedule), dtype=np.bool_)
    bound_s = scenario.slo.tpot_s * (1 + SLO_RELATIVE)

    def note(rows: SimulatedRows) -> None:
        done = ~rows.failed
        number = rows.whole("number")[done]
        ttft_s[number] = rows.column("ttft_s")[done]
        missed[number] = _tpot_s(rows, schedule.output_tokens)[done] > bound_s

    simulate(scenario, trial.deployment, schedule, transfer=trial.transfer, sink=note)
    first = int(WARM_UP_SHARE * len(schedule))
    p90_s = nearest_rank(ttft_s[first:], QUANTILE)
    assert p90_s is not None
    return Replicate(p90_s, float(missed[first:].mean()), len(schedule))


def _tpot_s(rows: SimulatedRows, output_tokens: npt.NDArray[np.int64]) -> FloatArray:
    """(t_last - t_first) / (n - 1); 0 of one token, which has no TPOT to miss. # [rows]"""
    steps = output_tokens[rows.whole("number")] - 1
    lasted_s = rows.column("finish_s") - rows.column("first_s")
    return np.where(steps > 0, lasted_s / np.maximum(steps, 1), 0.0)


def run_overloaded(trial: Trial) -> float:
    """Completed requests over the time from the first arrival to the last end, at a load that
    saturates. The plan is held, and nobody is refused or gives up."""
    scenario = held(_loaded(trial))
    patient = replace(
        scenario.scheduling,
        admission_deadline_s=_PATIENCE_S,
        max_wait_s=None,
        max_queue_requests=_MOST_QUEUED,
    )
    scenario = replace(scenario, scheduling=patient)
    schedule = build_schedule(scenario.workload, scenario.load)
    found = simulate(
        scenario, trial.deployment, schedule, transfer=trial.transfer, sink=lambda _rows: None
    )
    return found.throughput_req_per_s


def held(scenario: Scenario) -> Scenario:
    """The scenario with its plan as it stands: neither threshold nor roles follow the queues."""
    scheduling = replace(scenario.scheduling, bandwidth_aware=False, role_conversion=False)
    return replace(scenario, scheduling=scheduling)


def seeded(trial: Trial, first: int, count: int) -> list[Trial]:
    """The trial with ``count`` seeds from the ``first``-th on, counted from its own."""
    seeds = range(trial.seed + first, trial.seed + first + count)
    return [replace(trial, seed=seed) for seed in seeds]


def _loaded(trial: Trial) -> Scenario:
    load = replace(
        trial.scenario.load,
        rate_req_per_s=trial.rate_req_per_s,
        num_requests=trial.num_requests,
        duration_s=None,
        seed=trial.seed,
    )
    return replace(trial.scenario, load=load)
