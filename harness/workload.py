"""The exact schedule of a run: arrivals and lengths, fixed by the seed before anything runs.

Arrivals are a renewal process of gamma gaps with mean 1 and coefficient of variation ``cv`` (1 is
Poisson, 0 is evenly spaced) in operational time, brought to the clock by the inverse of the
integrated rate. With ``arrivals = "gamma"`` the rate is constant. With ``"on_off"`` it alternates
between two states of exponential length (means ``on_duration_s``, ``off_duration_s``), starting
from the stationary state: ``on_rate_multiple`` times the mean rate in the on state, and in the off
state what keeps the mean. With cv = 1 that is a two-state Markov-modulated Poisson process.

Lengths, outputs, gaps and states each draw from their own child of ``SeedSequence(seed)`` with
PCG64: changing one law leaves the draws of the others, and a longer run begins like a shorter one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.core import Request, ScenarioError
from harness.lognormal import TruncatedLogNormal
from harness.scenario import Scenario
from harness.settings import Load, Prefix, Workload
from harness.trace import Trace, read_trace
from harness.workload_resolution import output_law

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Midpoints that stand for a continuous law in ``length_distribution``, in every search alike; few
#: enough that each is tried as a threshold (``harness.throughput``).
STRATA = 4000
#: Below it gaps differ by less than the nanosecond that planned times keep.
_EVEN_CV = 1e-6
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Uncached prompt lengths, the cached prefix with each, their probabilities. # (points,)"""

    lengths: FloatArray
    weights: FloatArray
    mean_output_tokens: float
    cached_tokens: FloatArray


@dataclass(frozen=True, slots=True)
class _Streams:
    """One generator for each thing that is drawn; new ones go to the end."""

    lengths: np.random.Generator
    outputs: np.random.Generator
    gaps: np.random.Generator
    states: np.random.Generator
    spread: np.random.Generator

    @staticmethod
    def of(seed: int) -> "_Streams":
        children = np.random.SeedSequence(seed).spawn(5)
        return _Streams(*(np.random.Generator(np.random.PCG64(child)) for child in children))


def build_schedule(workload: Workload, load: Load) -> tuple[Request, ...]:
    """Every request of a run in order of ``planned_s``, which counts from the start of the load.

    Raises ScenarioError where a trace cannot be read or the load's bounds leave no request.
    """
    streams = _Streams.of(load.seed)
    if workload.trace is not None:
        return _replayed(workload, load, streams)
    arrivals_s = _arrivals_s(workload, load, streams)
    count = len(arrivals_s)
    if count == 0:
        raise ScenarioError(
            f"No request arrives: {load.rate_req_per_s:g} req/s over load.duration "
            f"{load.duration_s} s with seed {load.seed} is an empty schedule. Raise the rate or "
            "the duration."
        )
    inputs = _whole(input_law(workload).quantile(streams.lengths.random(count)), workload)
    outputs = np.rint(output_law(workload).quantile(streams.outputs.random(count)))
    return _requests(arrivals_s, inputs, outputs.astype(np.int64), ((),) * count)


def input_law(workload: Workload) -> TruncatedLogNormal:
    """Law of the prompt lengths of a workload without a trace."""
    assert workload.mu is not None, "a trace has lengths, not a law"
    assert workload.sigma is not None
    return TruncatedLogNormal(workload.mu, workload.sigma, workload.min_tokens, workload.max_tokens)


def length_distribution(scenario: Scenario, strata: int = STRATA) -> LengthDistribution:
    """What lengths the workload has: midpoint quantiles of its law, or those of its trace.

    ``strata`` midpoints stand for a law. Cached prefixes as ``scenario.prefix`` says; at least one
    token of a prompt is always new.
    """
    prefix = scenario.prefix
    if scenario.workload.trace is not None:
        return _of_trace(_part(scenario.workload, scenario.load), prefix)
    if prefix.model == "trace":
        raise ScenarioError(
            f"The value of 'prefix.model' in the scenario file {scenario.path} is wrong: there is "
            'no trace whose prefixes could be counted; give workload.trace or --trace, or "share".'
        )
    midpoints = (np.arange(strata) + 0.5) / strata
    total = input_law(scenario.workload).quantile(midpoints)
    output_tokens = float(output_law(scenario.workload).quantile(midpoints).mean())
    sides = _prefix_sides(total, prefix)
    return LengthDistribution(
        lengths=np.concatenate([total - cached for _, cached in sides]),
        weights=np.concatenate([np.full(strata, share / strata) for share, _ in sides]),
        mean_output_tokens=output_tokens,
        cached_tokens=np.concatenate([cached for _, cached in sides]),
    )


def _of_trace(part: Trace, prefix: Prefix) -> LengthDistribution:
    """Each distinct (new, cached) once, by new tokens; with a share of agents both variants."""
    total = part.input_tokens.astype(np.float64)
    if prefix.model == "trace" and not any(part.hash_ids):
        raise ScenarioError(
            "The value of 'prefix.model' is wrong: \"trace\" counts cached prefixes by hash ids, "
            f"of which the trace file {part.path} has none; give a trace that has them (Mooncake), "
            'or prefix.model = "share".'
        )
    if prefix.model == "trace":
        sides = [(1.0, np.minimum(part.unlimited_cache_tokens(), total - 1))]
    else:
        sides = _prefix_sides(total, prefix)
    pairs = np.concatenate([(total - cached) + 1j * cached for _, cached in sides])
    weights = np.concatenate([np.full(len(total), share / len(total)) for share, _ in sides])
    distinct, place = np.unique(pairs, return_inverse=True)
    return LengthDistribution(
        lengths=distinct.real,
        weights=np.bincount(place, weights).astype(np.float64),
        mean_output_tokens=float(part.output_tokens.mean()),
        cached_tokens=distinct.imag,
    )


def _prefix_sides(total: FloatArray, prefix: Prefix) -> list[tuple[float, FloatArray]]:
    """(share of the requests, their cached tokens), only of sides that there are."""
    agents = prefix.agent_share if prefix.model == "share" else 0.0
    cached = np.minimum(total * prefix.cached_fraction, total - 1)
    sides = [(1 - agents, np.zeros(len(total))), (agents, cached)]
    return [(share, found) for share, found in sides if share > 0]


def arrival_cv(schedule: Sequence[Request]) -> float | None:
    """Coefficient of variation of the planned gaps; None below three requests or without time."""
    gaps = np.diff([request.planned_s for request in schedule])
    if len(gaps) < 2 or gaps.mean() == 0:
        return None
    return float(gaps.std(ddof=1) / gaps.mean())


def index_of_dispersion(schedule: Sequence[Request], window_s: float) -> float | None:
    """Var / mean of the arrivals in whole windows from time 0; 1 for Poisson, None below two."""
    if not window_s > 0:
        raise ValueError(f"window_s must be positive, got {window_s}")
    planned_s = np.array([request.planned_s for request in schedule])
    windows = int(planned_s.max() // window_s) if len(planned_s) else 0
    if windows < 2:
        return None
    whole = planned_s[planned_s < windows * window_s]
    counts = np.bincount((whole // window_s).astype(np.int64), minlength=windows)
    return float(counts.var(ddof=1) / counts.mean())


def _whole(lengths: FloatArray, workload: Workload) -> IntArray:
    """Whole tokens; the bounds are whole, so that rounding stays inside them."""
    rounded = np.rint(lengths).astype(np.int64)
    assert workload.min_tokens <= rounded.min()
    assert rounded.max() <= workload.max_tokens
    return rounded


def _requests(
    arrivals_s: FloatArray,
    inputs: IntArray,
    outputs: IntArray,
    hash_ids: Sequence[tuple[int, ...]],
) -> tuple[Request, ...]:
    # Nanoseconds: the last bits of a logarithm differ between machines, a schedule must not.
    planned = np.round(arrivals_s, 9).tolist()
    rows = zip(planned, inputs.tolist(), outputs.tolist(), hash_ids, strict=True)
    return tuple(
        Request(f"{index:06d}", index, planned_s, new, out, hashes)
        for index, (planned_s, new, out, hashes) in enumerate(rows)
    )


def _part(workload: Workload, load: Load) -> Trace:
    assert workload.trace is not None
    trace = read_trace(workload.trace, workload.trace_format)
    if trace.sha256 != workload.trace_sha256:
        raise ScenarioError(
            f"The trace file {workload.trace} has changed since the scenario was loaded; start "
            "again with a file that nobody writes to."
        )
    return trace.part(load.duration_s, load.num_requests)


def _replayed(workload: Workload, load: Load, streams: _Streams) -> tuple[Request, ...]:
    part = _part(workload, load)
    arrivals_s = part.spread_arrivals(streams.spread) / workload.rate_scale
    return _requests(arrivals_s, part.input_tokens, part.output_tokens, part.hash_ids)


def _arrivals_s(workload: Workload, load: Load, streams: _Streams) -> FloatArray:
    """Arrival times before ``duration_s``, else the first ``num_requests``, ascending."""
    rate, cv = load.rate_req_per_s, workload.cv
    if load.duration_s is None:
        assert load.num_requests is not None, "a load is bounded by time or by number"
        ticks = np.cumsum(_gaps(cv, load.num_requests, streams.gaps))
        if workload.arrivals == "gamma":
            return np.asarray(ticks / rate)
        path = _rate_path(workload, rate, streams.states, math.inf, float(ticks[-1]))
        return np.interp(ticks, path.ticks, path.time_s)
    if workload.arrivals == "gamma":
        path = _RatePath(np.array([0, load.duration_s]), np.array([0, load.duration_s * rate]))
    else:
        path = _rate_path(workload, rate, streams.states, load.duration_s, math.inf)
    end = float(np.interp(load.duration_s, path.time_s, path.ticks))
    gaps = _gaps(cv, _CHUNK, streams.gaps)
    while gaps.sum() < end:
        gaps = np.concatenate([gaps, _gaps(cv, len(gaps), streams.gaps)])
    ticks = np.cumsum(gaps)
    return np.interp(ticks[ticks < end], path.ticks, path.time_s)


def _gaps(cv: float, count: int, rng: np.random.Generator) -> FloatArray:
    """Gamma gaps of mean 1: shape 1 / cv^2, scale cv^2."""
    if cv < _EVEN_CV:
        return np.ones(count)
    return np.asarray(rng.standard_gamma(1 / cv**2, count) * cv**2)


@dataclass(frozen=True, slots=True)
class _RatePath:
    """Integrated rate at the instants where the rate changes: ``ticks[i]`` at ``time_s[i]``."""

    time_s: FloatArray
    ticks: FloatArray


def _rate_path(
    workload: Workload, rate: float, rng: np.random.Generator, until_s: float, until_ticks: float
) -> _RatePath:
    """States drawn until the time or the integrated rate is reached."""
    on_s, off_s, multiple = (
        workload.on_duration_s,
        workload.off_duration_s,
        workload.on_rate_multiple,
    )
    assert on_s is not None, "on_off arrivals have their states"
    assert off_s is not None
    assert multiple is not None
    on_share = on_s / (on_s + off_s)
    off_multiple = max(0.0, (1 - on_share * multiple) / (1 - on_share))
    on = bool(rng.random() < on_share)
    time_s, ticks = [0.0], [0.0]
    while time_s[-1] < until_s and ticks[-1] <= until_ticks:
        lasts_s = float(rng.standard_exponential()) * (on_s if on else off_s)
        time_s.append(time_s[-1] + lasts_s)
        ticks.append(ticks[-1] + lasts_s * rate * (multiple if on else off_multiple))
        on = not on
    return _RatePath(np.array(time_s), np.array(ticks))
