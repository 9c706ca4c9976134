"""The rate of arrivals over time, and its integral, by which arrivals are brought to the clock.

The rate is the mean rate times the multiple of a random state times that of a shape that is fixed:

- ``on_off``: two states of exponential length, which alternate, begun in the stationary state.
- ``mmpp``: n states of exponential length; after each comes any other one, alike likely. A state i
  of mean length d_i then holds d_i / sum(d) of the time. Multiples count relative to each other and
  are scaled so that the mean is 1.
- a shape is a piecewise linear function of the time since the start of the run (steps, ramps,
  spikes, or a sine in 288 pieces a period), scaled so that its mean over the run is 1.

``RatePath`` integrates such a rate exactly: ``ticks`` is the integral at the instants ``time_s``
where the rate changes its slope. Where an arrival falls between two of them it is found by
    x = 2 d / (r_0 + sqrt(r_0^2 + 2 s d)),    d ticks and x seconds after the first, slope s,
in single operations of IEEE arithmetic, so that no compiler may fuse them: the same on any machine.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.core import ScenarioError
from harness.settings import RateShape, RateState, Workload

FloatArray = npt.NDArray[np.float64]

#: Pieces a run may be cut into by its states and its shape.
_MAX_PIECES = 4_000_000


@dataclass(frozen=True, slots=True)
class RatePath:
    """Arrays are (instants,) and (pieces, 2): the rate where a piece begins and where it ends."""

    time_s: FloatArray
    ticks: FloatArray
    rates: FloatArray | None = None

    def time_at(self, ticks: FloatArray) -> FloatArray:
        """The instants at which the integral has these values."""
        piece = np.searchsorted(self.ticks, ticks, side="right") - 1
        piece = np.clip(piece, 0, len(self.ticks) - 2)
        over = ticks - self.ticks[piece]
        if self.rates is None:
            slope = np.diff(self.time_s)[piece] / np.diff(self.ticks)[piece]
            return np.asarray(slope * over + self.time_s[piece])
        first, last = self.rates[piece, 0], self.rates[piece, 1]
        slope = (last - first) / np.diff(self.time_s)[piece]
        root = np.sqrt(np.maximum(first * first + 2 * slope * over, 0.0))
        below = first + root
        after_s = np.divide(2 * over, below, out=np.zeros_like(over), where=below > 0)
        return np.asarray(self.time_s[piece] + after_s)

    def ticks_at(self, time_s: FloatArray) -> FloatArray:
        """The integral of the rate from the path's beginning to these instants."""
        piece = np.searchsorted(self.time_s, time_s, side="right") - 1
        piece = np.clip(piece, 0, len(self.time_s) - 2)
        after_s = time_s - self.time_s[piece]
        if self.rates is None:
            slope = np.diff(self.ticks)[piece] / np.diff(self.time_s)[piece]
            return np.asarray(slope * after_s + self.ticks[piece])
        first, last = self.rates[piece, 0], self.rates[piece, 1]
        slope = (last - first) / np.diff(self.time_s)[piece]
        return np.asarray(self.ticks[piece] + after_s * (first + slope * after_s / 2))


def constant_path(rate: float, from_s: float, until_s: float) -> RatePath:
    return RatePath(np.array([from_s, until_s]), np.array([0, (until_s - from_s) * rate]))


def on_off_path(
    workload: Workload, rate: float, rng: np.random.Generator, until_s: float, until_ticks: float
) -> RatePath:
    """States drawn until the time or the integrated rate is reached."""
    on, off = on_off_states(workload)
    on_share = on.mean_duration_s / (on.mean_duration_s + off.mean_duration_s)
    state, other = (on, off) if rng.random() < on_share else (off, on)
    time_s, ticks = [0.0], [0.0]
    while time_s[-1] < until_s and ticks[-1] <= until_ticks:
        lasts_s = float(rng.standard_exponential()) * state.mean_duration_s
        time_s.append(time_s[-1] + lasts_s)
        ticks.append(ticks[-1] + lasts_s * rate * state.rate_multiple)
        state, other = other, state
    return RatePath(np.array(time_s), np.array(ticks))


def on_off_states(workload: Workload) -> tuple[RateState, RateState]:
    """The on state and the off state, whose rate is what keeps the mean."""
    on_s, off_s, multiple = (
        workload.on_duration_s,
        workload.off_duration_s,
        workload.on_rate_multiple,
    )
    assert on_s is not None, "on_off arrivals have their states"
    assert off_s is not None
    assert multiple is not None
    share = on_s / (on_s + off_s)
    off_multiple = max(0.0, (1 - share * multiple) / (1 - share))
    return RateState(multiple, on_s), RateState(off_multiple, off_s)


def mmpp_path(
    states: tuple[RateState, ...],
    rate: float,
    rng: np.random.Generator,
    until_s: float,
    until_ticks: float,
) -> RatePath:
    """As ``on_off_path``, of any number of states."""
    multiples = state_multiples(states).tolist()
    upto = np.cumsum(state_shares(states))
    at = min(int(np.searchsorted(upto, rng.random(), side="right")), len(states) - 1)
    time_s, ticks = [0.0], [0.0]
    while time_s[-1] < until_s and ticks[-1] <= until_ticks:
        lasts_s = float(rng.standard_exponential()) * states[at].mean_duration_s
        time_s.append(time_s[-1] + lasts_s)
        ticks.append(ticks[-1] + lasts_s * rate * multiples[at])
        step = 1 + int(rng.random() * (len(states) - 1))
        at = (at + step) % len(states)
    return RatePath(np.array(time_s), np.array(ticks))


def state_shares(states: tuple[RateState, ...]) -> FloatArray:
    """Share of the time in each state. # (states,)"""
    durations = np.array([state.mean_duration_s for state in states])
    return np.asarray(durations / durations.sum())


def state_multiples(states: tuple[RateState, ...]) -> FloatArray:
    """Rate of each state over the mean rate. # (states,)"""
    multiples = np.array([state.rate_multiple for state in states])
    return np.asarray(multiples / math.fsum((state_shares(states) * multiples).tolist()))


def shaped(path: RatePath, shape: RateShape, run_s: float) -> RatePath:
    """A path of constant pieces with a shape laid over it, whose mean over the run is 1.

    ``path`` may begin before the run, at a negative time: a shape without a period holds its first
    value there. ScenarioError where the run has no rate at all, or too many pieces.
    """
    scale = 1 / shape_mean(shape, run_s)
    begin_s, end_s = float(path.time_s[0]), float(path.time_s[-1])
    instants = np.unique(np.concatenate([path.time_s, _instants(shape, begin_s, end_s)]))
    instants = instants[(instants >= begin_s) & (instants <= end_s)]
    if len(instants) > _MAX_PIECES:
        raise ScenarioError(
            f"workload.shape and the states cut the run into more than {_MAX_PIECES} pieces; "
            "make the period or the run longer or shorter."
        )
    first, last = instants[:-1], instants[1:]
    piece = np.searchsorted(path.time_s, first, side="right") - 1
    constant = (np.diff(path.ticks) / np.diff(path.time_s))[piece] * scale
    rates = constant[:, None] * _multiples(shape, first, last)
    grows = (last - first) * (rates[:, 0] + rates[:, 1]) / 2
    return RatePath(instants, np.concatenate([[0.0], np.cumsum(grows)]), rates)


def shape_mean(shape: RateShape, run_s: float) -> float:
    """Mean multiple from 0 to ``run_s``, before any scaling."""
    inside = _instants(shape, 0.0, run_s)
    edges = np.unique(np.concatenate([[0.0, run_s], inside[(inside > 0) & (inside < run_s)]]))
    first, last = edges[:-1], edges[1:]
    means = _multiples(shape, first, last).sum(axis=1) / 2
    mean = math.fsum((means * (last - first)).tolist()) / run_s
    if not mean > 0:
        raise ScenarioError(
            f"workload.shape leaves the first {run_s:g} s of the run, which is all of it, without "
            "a rate. Give a multiple above 0 there."
        )
    return mean


def _multiples(shape: RateShape, first_s: FloatArray, last_s: FloatArray) -> FloatArray:
    """Multiples where each piece begins and where it ends. # (pieces, 2)"""
    at_s, multiples = np.array(shape.time_s), np.array(shape.multiples)
    middle_s = (first_s + last_s) / 2
    if shape.period_s is None:
        origin_s = np.zeros(len(first_s))
    else:  # that of the middle, since an end may be rounded to either side of a period's
        origin_s = np.floor(middle_s / shape.period_s) * shape.period_s
    if not shape.linear:
        place = np.searchsorted(at_s, middle_s - origin_s, side="right") - 1
        held = multiples[np.maximum(place, 0)]
        return np.stack([held, held], axis=1)
    ends = (first_s - origin_s, last_s - origin_s)
    return np.stack([_line(end, at_s, multiples) for end in ends], axis=1)


def _line(x: FloatArray, xs: FloatArray, ys: FloatArray) -> FloatArray:
    """Linear between points, constant outside them."""
    if len(xs) == 1:
        return np.full(x.shape, ys[0])
    place = np.clip(np.searchsorted(xs, x, side="right") - 1, 0, len(xs) - 2)
    inside = np.clip(x, xs[0], xs[-1])
    slope = np.diff(ys)[place] / np.diff(xs)[place]
    return np.asarray(slope * (inside - xs[place]) + ys[place])


def _instants(shape: RateShape, begin_s: float, end_s: float) -> FloatArray:
    """Where the shape's slope or value changes, over an interval."""
    at_s = np.array(shape.time_s)
    if shape.period_s is None:
        return at_s
    first = math.floor(begin_s / shape.period_s)
    periods = math.ceil(end_s / shape.period_s) - first + 1
    if periods * (len(at_s) + 1) > _MAX_PIECES:
        raise ScenarioError(
            f"workload.shape repeats {periods} times in the run, which is more than "
            f"{_MAX_PIECES} pieces; make its period longer."
        )
    starts = (first + np.arange(periods)) * shape.period_s
    return np.asarray((starts[:, None] + np.concatenate([[0.0], at_s])[None, :]).ravel())
