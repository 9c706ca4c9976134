"""When requests, or sessions, arrive: gaps of mean 1 in operational time, brought to the clock by
the integrated rate (``harness.workload.rate``).

- gamma gaps of coefficient of variation cv: shape 1 / cv^2, scale cv^2. cv = 1 is Poisson.
- Weibull gaps of the same cv: shape k solves Gamma(1 + 2/k) / Gamma(1 + 1/k)^2 - 1 = cv^2. Its tail
  is heavier than gamma's for cv > 1.
"""

import copy
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from harness.core import ScenarioError
from harness.settings import Workload
from harness.workload.draws import Streams
from harness.workload.rate import RatePath, constant_path, mmpp_path, on_off_path, shaped

FloatArray = npt.NDArray[np.float64]

#: Below it gaps differ by less than the nanosecond that planned times keep.
EVEN_CV = 1e-6
_CHUNK = 4096
_DIGITS = 10
#: Doublings of the time in which a shape must let the requests arrive.
_MOST_DOUBLED = 8


def arrivals_until(
    workload: Workload, rate: float, run_s: float, streams: Streams, before_s: float = 0.0
) -> FloatArray:
    """Arrival times from ``-before_s`` to ``run_s``, ascending. The shape is over the run alone."""
    path = _path(workload, rate, streams, before_s + run_s, math.inf, before_s, run_s)
    end = float(path.ticks_at(np.array([run_s]))[0])
    ticks = _ticks_until(workload, end, streams.gaps)
    return path.time_at(ticks)


def first_arrivals(workload: Workload, rate: float, count: int, streams: Streams) -> FloatArray:
    """The first ``count`` arrival times, ascending; a shape has mean 1 over count / rate."""
    ticks = np.cumsum(gaps_of_mean_1(workload, count, streams.gaps))
    if workload.arrivals in _STEADY and workload.shape is None:
        return np.asarray(ticks / rate)
    last, run_s = float(ticks[-1]), count / rate
    if workload.shape is None:
        return _path(workload, rate, streams, math.inf, last, 0.0, run_s).time_at(ticks)
    for doubled in range(_MOST_DOUBLED):
        again = replace(streams, states=copy.deepcopy(streams.states))
        path = _path(workload, rate, again, 2 * run_s * 2**doubled, math.inf, 0.0, run_s)
        if path.ticks[-1] > last:
            return path.time_at(ticks)
    raise ScenarioError(
        f"workload.shape has too little rate for load.num_requests = {count} to arrive at all. End "
        "it with a multiple above 0, make it repeat, or bound the load by load.duration."
    )


def gaps_of_mean_1(workload: Workload, count: int, rng: np.random.Generator) -> FloatArray:
    """Gaps in operational time. # (count,)"""
    cv = workload.cv
    if cv < EVEN_CV:
        return np.ones(count)
    if workload.arrivals == "weibull":
        shape = weibull_shape(cv)
        return np.asarray(rng.weibull(shape, count) * _rounded(1 / math.gamma(1 + 1 / shape)))
    scv = cv * cv
    return np.asarray(rng.standard_gamma(1 / scv, count) * scv)


def weibull_shape(cv: float) -> float:
    """The shape whose coefficient of variation is ``cv``, from 1e-6 to 20."""
    from scipy.optimize import brentq  # a quarter of a second that other laws need not wait for

    def excess(log_shape: float) -> float:
        k = math.exp(log_shape)
        return float(gammaln(1 + 2 / k) - 2 * gammaln(1 + 1 / k)) - math.log1p(cv**2)

    # ln k: cv is about pi / sqrt(6) / k where k is large, and 20 at k = 0.19.
    if cv < 1e-3:
        return _rounded(math.pi / math.sqrt(6) / cv)
    return _rounded(math.exp(brentq(excess, math.log(0.1), math.log(1e4), xtol=1e-13)))


def _rounded(value: float) -> float:
    """So far that no machine's library finds another one."""
    return float(f"{value:.{_DIGITS}g}")


#: Laws whose rate has no states.
_STEADY = ("gamma", "weibull")


def _path(
    workload: Workload,
    rate: float,
    streams: Streams,
    lasts_s: float,
    until_ticks: float,
    before_s: float,
    run_s: float,
) -> RatePath:
    """The integrated rate from ``-before_s`` on, for ``lasts_s`` or until it reaches a value."""
    if workload.arrivals in _STEADY:
        path = constant_path(rate, 0.0, lasts_s)
    elif workload.arrivals == "on_off":
        path = on_off_path(workload, rate, streams.states, lasts_s, until_ticks)
    else:
        path = mmpp_path(workload.states, rate, streams.states, lasts_s, until_ticks)
    if before_s:
        path = RatePath(path.time_s - before_s, path.ticks)
    return path if workload.shape is None else shaped(path, workload.shape, run_s)


def _ticks_until(workload: Workload, end: float, rng: np.random.Generator) -> FloatArray:
    gaps = gaps_of_mean_1(workload, _CHUNK, rng)
    while gaps.sum() < end:
        gaps = np.concatenate([gaps, gaps_of_mean_1(workload, len(gaps), rng)])
    ticks = np.cumsum(gaps)
    return np.asarray(ticks[ticks < end])
