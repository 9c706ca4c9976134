"""How bursty arrivals are: what a workload is meant to have, and what its schedule has.

Two figures, since neither tells all: the coefficient of variation of the gaps, which knows nothing
of their order, and the index of dispersion of counts in windows, I(w) = Var(N) / E[N], which is 1
for Poisson at every w. Intended, of gaps of mean 1 and scv C^2 in operational time (exact for
C = 1, for others where w is many gaps), with Q the generator of the states, a their shares, r their
rates, m = a r, and D = (1 a - Q)^-1 - 1 a,

    I(w) = C^2 + 2 / (m w) a r (w D - (1 - exp(Q w)) D^2) (r - m)

and a shape without states adds the spread of its mean counts: their variance over the windows over
their mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core import Request
from harness.schedule import Schedule
from harness.settings import Load, RateState, Workload
from harness.workload.rate import (
    constant_path,
    on_off_states,
    shaped,
    state_multiples,
    state_shares,
)

FloatArray = npt.NDArray[np.float64]

#: Windows that are looked at, as far as a run has this many of them.
WINDOWS_S = (1.0, 10.0, 60.0)
_LEAST_WINDOWS = 10


@dataclass(frozen=True, slots=True)
class Dispersion:
    window_s: float
    intended: float | None
    achieved: float | None


@dataclass(frozen=True, slots=True)
class Burstiness:
    """None where a figure has no meaning: of a closed loop, of too few requests, or intended of a
    trace, whose arrivals are what they are, of sessions, whose turns depend on each other, and of a
    shape laid over states, whose windows are not alike."""

    rate_req_per_s: float | None
    intended_cv: float | None
    achieved_cv: float | None
    dispersion: tuple[Dispersion, ...]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "rate_req_per_s": self.rate_req_per_s,
            "intended_cv": self.intended_cv,
            "achieved_cv": self.achieved_cv,
            "index_of_dispersion": [
                {"window_s": d.window_s, "intended": d.intended, "achieved": d.achieved}
                for d in self.dispersion
            ],
        }


def burstiness(
    workload: Workload,
    load: Load,
    schedule: Sequence[Request],
    windows_s: Sequence[float] = WINDOWS_S,
) -> Burstiness:
    """Intended and achieved burstiness, over windows of which the schedule has at least ten."""
    times_s = planned_times_s(schedule)
    if load.concurrency is not None or len(times_s) < 3 or times_s[-1] <= times_s[0]:
        return Burstiness(None, None, None, ())
    span_s = float(times_s[-1] - times_s[0])
    steady = workload.arrivals in ("gamma", "weibull") and workload.shape is None
    known = workload.trace is None and workload.sessions is None
    return Burstiness(
        rate_req_per_s=(len(times_s) - 1) / span_s,
        intended_cv=workload.cv if known and steady else None,
        achieved_cv=arrival_cv(schedule),
        dispersion=tuple(
            Dispersion(
                window_s,
                intended_dispersion(workload, load, window_s, float(times_s[-1])),
                index_of_dispersion(schedule, window_s),
            )
            for window_s in windows_s
            if times_s[-1] >= _LEAST_WINDOWS * window_s
        ),
    )


def planned_times_s(schedule: Sequence[Request]) -> FloatArray:
    """(requests,)"""
    if isinstance(schedule, Schedule):
        return schedule.planned_s
    return np.array([request.planned_s for request in schedule])


def arrival_cv(schedule: Sequence[Request]) -> float | None:
    """Coefficient of variation of the planned gaps; None below three requests or without time."""
    gaps = np.diff(planned_times_s(schedule))
    if len(gaps) < 2 or gaps.mean() == 0:
        return None
    return float(gaps.std(ddof=1) / gaps.mean())


def index_of_dispersion(schedule: Sequence[Request], window_s: float) -> float | None:
    """Var / mean of the arrivals in whole windows from time 0; 1 for Poisson, None below two."""
    if not window_s > 0:
        raise ValueError(f"window_s must be positive, got {window_s}")
    planned_s = planned_times_s(schedule)
    windows = int(planned_s.max() // window_s) if len(planned_s) else 0
    if windows < 2:
        return None
    whole = planned_s[planned_s < windows * window_s]
    counts = np.bincount((whole // window_s).astype(np.int64), minlength=windows)
    return float(counts.var(ddof=1) / counts.mean())


def intended_dispersion(
    workload: Workload, load: Load, window_s: float, until_s: float
) -> float | None:
    """I(w) over the whole windows of ``until_s``; None where no law says it."""
    if workload.trace is not None or workload.sessions is not None:
        return None
    rate = load.rate_req_per_s
    found = workload.cv**2
    if states := _states(workload):
        if workload.shape is not None:
            return None
        return found + _of_states(states, rate, window_s)
    if workload.shape is None:
        return found
    run_s = load.duration_s or until_s
    if load.duration_s is None and load.num_requests is not None:
        run_s = load.num_requests / rate
    path = shaped(constant_path(rate, 0.0, max(run_s, until_s)), workload.shape, run_s)
    edges = np.arange(int(until_s // window_s) + 1) * window_s
    means = np.diff(path.ticks_at(edges.astype(np.float64)))
    return float(found + means.var(ddof=1) / means.mean())


def _states(workload: Workload) -> tuple[RateState, ...]:
    if workload.arrivals == "mmpp":
        return workload.states
    return on_off_states(workload) if workload.arrivals == "on_off" else ()


def _of_states(states: tuple[RateState, ...], rate: float, window_s: float) -> float:
    from scipy.linalg import expm  # slow to load, and only rates with states need it

    leaving = np.array([1 / state.mean_duration_s for state in states])
    size = len(states)
    q = np.repeat(leaving[:, None] / (size - 1), size, axis=1)  # (states, states)
    np.fill_diagonal(q, -leaving)
    share = state_shares(states)
    rates = state_multiples(states) * rate
    stationary = np.outer(np.ones(size), share)
    d = np.linalg.inv(stationary - q) - stationary
    excess = rates - rate
    inner = window_s * d - (np.eye(size) - expm(q * window_s)) @ d @ d
    return float(2 / (rate * window_s) * (share * rates) @ inner @ excess)
