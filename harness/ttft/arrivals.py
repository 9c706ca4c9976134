"""A scenario's arrivals as a stream of ``harness.queueing``, and how outputs vary."""

import numpy as np
import numpy.typing as npt

from harness.burstiness import OnOff, Recorded
from harness.queueing import Arrivals, Renewal
from harness.scenario import Scenario
from harness.workload import build_schedule
from harness.workload_resolution import output_law

_STRATA = 512


def workload_stream(scenario: Scenario) -> tuple[Arrivals, float]:
    """Arrivals at the load's rate; squared coefficient of variation of the decode steps.

    A trace's requests are marked by length, the longest first: the low marks are those that cross.
    """
    workload, load = scenario.workload, scenario.load
    if workload.trace is not None:
        schedule = build_schedule(workload, load)
        tokens = np.array([request.input_tokens for request in schedule])
        rank = np.empty(len(tokens))
        rank[np.argsort(-tokens, kind="stable")] = np.arange(len(tokens))
        recorded = Recorded.of(
            np.array([request.planned_s for request in schedule]), (rank + 0.5) / len(tokens)
        )
        return recorded, _scv(np.array([request.output_tokens - 1.0 for request in schedule]))
    outputs = np.rint(output_law(workload).quantile((np.arange(_STRATA) + 0.5) / _STRATA))
    rate, gap_scv = load.rate_req_per_s, workload.cv**2
    if workload.arrivals == "gamma":
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
