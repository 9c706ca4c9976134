"""How far the closed form was from simulation, by arrivals and load.

Measured with ``benchmarks/queueing_accuracy.py`` on the deployments of
``scenarios/paper-case-study.toml`` (9; 4; 4 and 3 prefill instances):

    --cv 0.5 1 1.5 2 3 --loads 0.5 0.6 0.7 0.8 --requests 400000 --seeds 5
    --cv 0.5 1 1.5 2 3 --loads 0.85 0.9 0.95 --requests 1000000 --seeds 8
    --cv --on-off 2,6,3 10,30,3 60,60,1.5 300,300,1.3 --requests 400000 --seeds 8
    --cv --trace AzureLLMInferenceTrace_conv.csv --seeds 3
    --cv --trace mooncake_conversation_trace.jsonl --seeds 3

and where prefill is not what limits, ``--simulator --cv 1 2 --requests 25000 --seeds 4`` with

    --loads 0.7 0.85 0.9 --deployments homogeneous_pd \\
        --set deployments.homogeneous_pd.num_prefill=10 deployments.homogeneous_pd.num_decode=2
    --loads 0.7 0.85 0.9 --deployments naive_heterogeneous --set link.rate=11gbit
    --loads 0.7 0.85 0.9 --deployments naive_heterogeneous \\
        --set link.rate=11gbit transport.layerwise=false
    --loads 0.7 0.85 --deployments prfaas_pd homogeneous_pd \\
        --set scheduling.admission=reserve_first

A figure is the largest |model / simulation - 1| over the deployments and, of on-off arrivals and
traces, over the cases; the noise of the simulation is in it. Beyond what is listed here (other
instance counts and spreads of service, longer bursts, a stage that limits by far) nothing was
measured, and no figure is given.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from harness.burstiness import OnOff, Recorded
from harness.queueing import STABLE_LOAD, Arrivals, Renewal
from harness.utilisation import Utilisation

#: What is promised of the mean up to a load: the error by CV of the gaps.
PROMISED_LOAD = 0.85
PROMISED = {1.0: 0.05, 2.0: 0.15}

#: What the deployments of the measurement span: prefill instances, and scv of service times.
MEASURED_INSTANCES = (3, 10)
MEASURED_SERVICE_SCV = (0.05, 0.75)
#: Bursts of the on-off cases: seconds in each state, and the rate in the on state over the mean.
MEASURED_STATE_S = (2.0, 300.0)
MEASURED_ON_RATE = 3.0
#: By how much the stage that limited was busier than prefill, with some room.
MEASURED_LEAD = {"pd_decode": 1.6, "link": 1.25}

#: A load of 0.85 comes back from its rate as 0.8500000001.
_ROUNDING = 1e-3
#: Below it hardly anything waits, whichever stage is the busiest.
_LEAST_LOAD = 0.5


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest errors found, as shares of what was simulated."""

    mean: float
    p50: float
    p90: float
    p99: float


#: By CV of gamma gaps and load.
GAMMA: dict[float, dict[float, Errors]] = {
    0.5: {
        0.5: Errors(0.005, 0.006, 0.009, 0.004),
        0.6: Errors(0.006, 0.005, 0.013, 0.005),
        0.7: Errors(0.006, 0.004, 0.014, 0.004),
        0.8: Errors(0.005, 0.006, 0.012, 0.008),
        0.85: Errors(0.004, 0.004, 0.01, 0.007),
        0.9: Errors(0.003, 0.003, 0.008, 0.002),
        0.95: Errors(0.002, 0.002, 0.005, 0.008),
    },
    1.0: {
        0.5: Errors(0.001, 0.002, 0.007, 0.003),
        0.6: Errors(0.001, 0.005, 0.006, 0.004),
        0.7: Errors(0.002, 0.006, 0.005, 0.008),
        0.8: Errors(0.003, 0.009, 0.005, 0.012),
        0.85: Errors(0.004, 0.01, 0.003, 0.008),
        0.9: Errors(0.005, 0.01, 0.004, 0.007),
        0.95: Errors(0.015, 0.01, 0.014, 0.047),
    },
    1.5: {
        0.5: Errors(0.005, 0.005, 0.005, 0.007),
        0.6: Errors(0.006, 0.007, 0.007, 0.015),
        0.7: Errors(0.007, 0.01, 0.006, 0.016),
        0.8: Errors(0.01, 0.013, 0.009, 0.013),
        0.85: Errors(0.004, 0.009, 0.004, 0.018),
        0.9: Errors(0.004, 0.006, 0.002, 0.008),
        0.95: Errors(0.018, 0.01, 0.022, 0.043),
    },
    2.0: {
        0.5: Errors(0.006, 0.007, 0.009, 0.02),
        0.6: Errors(0.006, 0.01, 0.007, 0.017),
        0.7: Errors(0.007, 0.011, 0.009, 0.011),
        0.8: Errors(0.005, 0.011, 0.006, 0.016),
        0.85: Errors(0.003, 0.008, 0.002, 0.019),
        0.9: Errors(0.005, 0.008, 0.004, 0.014),
        0.95: Errors(0.031, 0.011, 0.027, 0.102),
    },
    3.0: {
        0.5: Errors(0.013, 0.014, 0.018, 0.022),
        0.6: Errors(0.017, 0.02, 0.018, 0.015),
        0.7: Errors(0.019, 0.024, 0.019, 0.016),
        0.8: Errors(0.011, 0.02, 0.016, 0.029),
        0.85: Errors(0.01, 0.013, 0.011, 0.012),
        0.9: Errors(0.016, 0.017, 0.02, 0.014),
        0.95: Errors(0.038, 0.032, 0.041, 0.061),
    },
}
#: Two-state arrivals, by load.
ON_OFF: dict[float, Errors] = {
    0.5: Errors(0.024, 0.028, 0.035, 0.057),
    0.6: Errors(0.023, 0.036, 0.029, 0.048),
    0.7: Errors(0.023, 0.032, 0.026, 0.025),
    0.8: Errors(0.023, 0.262, 0.075, 0.122),
    0.85: Errors(0.032, 0.192, 0.091, 0.096),
    0.9: Errors(0.066, 0.102, 0.086, 0.163),
}
#: The two public traces, by load.
RECORDED: dict[float, Errors] = {
    0.5: Errors(0.006, 0.004, 0.013, 0.033),
    0.6: Errors(0.009, 0.02, 0.025, 0.022),
    0.7: Errors(0.014, 0.034, 0.024, 0.029),
    0.8: Errors(0.047, 0.173, 0.033, 0.046),
    0.85: Errors(0.045, 0.016, 0.053, 0.051),
    0.9: Errors(0.104, 0.229, 0.1, 0.092),
    0.95: Errors(0.009, 0.04, 0.021, 0.066),
}
#: Where something else limits, by CV and load; one or two deployments each.
OTHERWISE: dict[str, dict[float, dict[float, Errors]]] = {
    "pd_decode": {
        1.0: {
            0.7: Errors(0.002, 0.004, 0.007, 0.004),
            0.85: Errors(0.014, 0.004, 0.032, 0.02),
            0.9: Errors(0.02, 0.004, 0.032, 0.037),
        },
        2.0: {
            0.7: Errors(0.013, 0.027, 0.038, 0.064),
            0.85: Errors(0.017, 0.028, 0.049, 0.024),
            0.9: Errors(0.028, 0.011, 0.001, 0.149),
        },
    },
    "link": {
        1.0: {
            0.7: Errors(0.035, 0.025, 0.055, 0.022),
            0.85: Errors(0.014, 0.065, 0.011, 0.112),
            0.9: Errors(0.043, 0.104, 0.019, 0.109),
        },
        2.0: {
            0.7: Errors(0.015, 0.066, 0.048, 0.137),
            0.85: Errors(0.102, 0.167, 0.015, 0.035),
            0.9: Errors(0.17, 0.218, 0.067, 0.17),
        },
    },
    "reserve_first": {
        1.0: {
            0.7: Errors(0.008, 0.009, 0.009, 0.009),
            0.85: Errors(0.046, 0.03, 0.06, 0.114),
        },
        2.0: {
            0.7: Errors(0.065, 0.089, 0.058, 0.034),
            0.85: Errors(0.036, 0.057, 0.02, 0.094),
        },
    },
}


_LIMITED = {
    "pd_decode": "limited by pd_decode",
    "link": "limited by link",
    "reserve_first": "with reserve_first",
}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """``measured`` are the larger errors of the measured loads on both sides, ``measured_loads``,
    at the least measured CV that is not below the one asked for. Below the least load that was
    measured they are those of that one, where more waits. ``promised`` is the error of the mean
    that the project stands for. None where there is none. ``note`` says what to mind, if
    anything."""

    promised: float | None
    measured: Errors | None
    note: str | None
    measured_loads: tuple[float, float] | None = None


def accuracy(
    arrivals: Arrivals,
    utilisation: Utilisation,
    otherwise: str | None,
    beyond: str | None = None,
) -> Accuracy:
    """For a deployment that is used so. ``otherwise``: what sets it apart from those of the
    measurement, if anything does; ``beyond``: what of it no measurement has."""
    stage, load = utilisation.busiest()
    if load >= STABLE_LOAD:
        why = f"No TTFT: {stage} is offered {load:.3g} of what it can do, so its queue only grows."
        return Accuracy(None, None, why)
    if otherwise is None and load > _LEAST_LOAD and stage not in ("prfaas_prefill", "pd_prefill"):
        otherwise = stage
    if otherwise is not None and otherwise not in OTHERWISE:
        beyond = otherwise
    beyond = beyond or _beyond_bursts(arrivals) or _beyond_lead(utilisation, stage, otherwise)
    if beyond is not None:
        return Accuracy(None, None, f"Accuracy not measured here: {beyond}.")
    found = _measured(arrivals, load, otherwise)
    said = f"{_named(arrivals)}{f', {_LIMITED[otherwise]},' if otherwise in _LIMITED else ''}"
    said += f" at a load of {load:.0%}"
    if found is None:
        return Accuracy(None, None, f"Accuracy not measured here: {said}.")
    measured, loads = found
    promised = _promised(arrivals, load) if otherwise is None else None
    if promised is not None:
        return Accuracy(promised, measured, None, loads)
    if load < loads[0] - _ROUNDING:
        said += f" (the least measured, {loads[0]:.0%})"
    return Accuracy(
        None,
        measured,
        f"Measured on the paper's case study with {said}: the mean within {measured.mean:.1%} of "
        f"simulation, P99 within {measured.p99:.1%}. No bound is promised.",
        loads,
    )


def beyond_instances(routes: Iterable[tuple[int, float]]) -> str | None:
    """What no measurement has of prefill, by (instances, scv of service times) of each cluster."""
    for count, scv in routes:
        least, most = MEASURED_INSTANCES
        if not least <= count <= most:
            return f"{count} prefill instances in a cluster, where {least} to {most} were"
        least_scv, most_scv = MEASURED_SERVICE_SCV
        if not least_scv <= scv <= most_scv:
            return (
                f"prefill times with a squared coefficient of variation of {scv:.2g}, where "
                f"{least_scv:g} to {most_scv:g} were"
            )
    return None


def _beyond_bursts(arrivals: Arrivals) -> str | None:
    if not isinstance(arrivals, OnOff):
        return None
    least_s, most_s = MEASURED_STATE_S
    states = (arrivals.on_duration_s, arrivals.off_duration_s)
    slow_or_fast = any(not least_s <= state_s <= most_s for state_s in states)
    if not slow_or_fast and arrivals.on_rate_multiple <= MEASURED_ON_RATE:
        return None
    return (
        f"on-off arrivals of {states[0]:g} s and {states[1]:g} s with {arrivals.on_rate_multiple:g}"
        f" times the mean rate, where {least_s:g} to {most_s:g} s and up to {MEASURED_ON_RATE:g} "
        "times were"
    )


def _beyond_lead(utilisation: Utilisation, stage: str, otherwise: str | None) -> str | None:
    """Whether the stage that limits leaves prefill idler than was measured."""
    most = MEASURED_LEAD.get(stage) if otherwise == stage else None
    loads = utilisation.by_stage()
    prefill = max(loads.get("prfaas_prefill", 0.0), loads.get("pd_prefill", 0.0))
    if most is None or loads[stage] <= most * prefill:
        return None
    return (
        f"{stage} used at {loads[stage]:.0%} where prefill is at {prefill:.0%}; up to {most:g} "
        "times as much was"
    )


def _promised(arrivals: Arrivals, load: float) -> float | None:
    if not isinstance(arrivals, Renewal) or load > PROMISED_LOAD + _ROUNDING:
        return None
    cv = _at_least(PROMISED, math.sqrt(arrivals.gap_scv))
    return None if cv is None else PROMISED[cv]


def _measured(
    arrivals: Arrivals, load: float, otherwise: str | None
) -> tuple[Errors, tuple[float, float]] | None:
    """The errors, and between which measured loads they are taken."""
    table: dict[float, Errors] = {}
    if isinstance(arrivals, Renewal):
        by_cv = GAMMA if otherwise is None else OTHERWISE.get(otherwise, {})
        cv = _at_least(by_cv, math.sqrt(arrivals.gap_scv))
        table = {} if cv is None else by_cv[cv]
    elif otherwise is None and isinstance(arrivals, OnOff) and arrivals.gap_scv <= 1:
        table = ON_OFF
    elif otherwise is None and isinstance(arrivals, Recorded):
        table = RECORDED
    above = _at_least(table, load)
    if above is None:
        return None
    below = max((known for known in table if known <= load + _ROUNDING), default=above)
    pairs = zip(astuple(table[below]), astuple(table[above]), strict=True)
    return Errors(*(max(pair) for pair in pairs)), (below, above)


def _at_least(keys: Iterable[float], value: float) -> float | None:
    """The least key that is not below the value."""
    known = sorted(keys)
    place = bisect_left(known, value - _ROUNDING)
    return known[place] if place < len(known) else None


def _named(arrivals: Arrivals) -> str:
    if isinstance(arrivals, Renewal):
        return f"gaps of CV {math.sqrt(arrivals.gap_scv):.3g}"
    return "on-off arrivals" if isinstance(arrivals, OnOff) else "a trace's arrivals"
