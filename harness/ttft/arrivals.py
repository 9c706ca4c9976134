"""A scenario's arrivals as a stream of ``harness.queueing``, and how outputs vary."""

import numpy as np
import numpy.typing as npt

from harness.burstiness import OnOff, Recorded
from harness.core import ScenarioError
from harness.queueing import Arrivals, Renewal
from harness.scenario import Scenario
from harness.workload import build_schedule
from harness.workload_resolution import output_law

_STRATA = 512


def workload_stream(scenario: Scenario) -> tuple[Arrivals, float]:
    """Arrivals at the load's rate; squared coefficient of variation of the decode steps.

    A trace's requests, and those of sessions or of a rate with a shape or several states, which no
    stream has a formula for, are taken as their schedule has them. They are marked by length, the
    longest first: the low marks are those that cross. Weibull gaps are taken as gamma ones.
    """
    workload, load = scenario.workload, scenario.load
    if load.concurrency is not None:
        raise ScenarioError(
            f"'load.concurrency' in the scenario file {scenario.path} makes the load a closed "
            "loop, which has no offered rate to plan for. Give load.rate_req_per_s in its place; "
            "prfaas simulate and bench run closed loops."
        )
    if (
        workload.trace is not None
        or workload.sessions is not None
        or workload.shape is not None
        or workload.arrivals == "mmpp"
    ):
        schedule = build_schedule(workload, load)
        rank = np.empty(len(schedule))
        rank[np.argsort(-schedule.input_tokens, kind="stable")] = np.arange(len(schedule))
        recorded = Recorded.of(schedule.planned_s, (rank + 0.5) / len(schedule))
        return recorded, _scv(schedule.output_tokens.astype(np.float64) - 1)
    outputs = np.rint(output_law(workload).quantile((np.arange(_STRATA) + 0.5) / _STRATA))
    rate, gap_scv = load.rate_req_per_s, workload.cv**2
    if workload.arrivals != "on_off":
        return Renewal(rate, gap_scv), _scv(outputs - 1)
    assert workload.on_duration_s is not None, "on_off arrivals have their states"
    assert workload.off_duration_s is not None
    assert workload.on_rate_multiple is not None
    on_off = OnOff(
        rate, gap_scv, workload.on_duration_s, workload.off_duration_s, workload.on_rate_multiple
    )
    return on_off, _scv(outputs - 1)


def _scv(values: npt.NDArray[np.float64]) -> float:
    mean = float(values.mean())
    return float(values.var()) / mean**2 if mean > 0 else 0.0
