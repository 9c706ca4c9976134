"""Costs of one (engine, hardware, model): T_prefill(new, cached) and T_decode(batch, context).

T_prefill is interpolated linearly in (log new tokens, log seconds) between points of the same
``cached_tokens``. Between points that never fall such a line never falls, meets every point
exactly, follows any power law (linear projections, quadratic attention) exactly, and a wrong point
spoils only the two segments beside it. PCHIP never falls either, but takes its slopes from the
neighbours, which with four to ten points invents curvature that nobody measured; an unconstrained
spline may fall. Where a fixed cost gives way to a linear and a quadratic one the true curve bends
upwards, and the line errs on the slow side of it.

Between the curves of two ``cached_tokens`` it is linear in cached tokens, since attention over a
cached prefix costs in proportion to it. T_decode is bilinear in (batch, context tokens).

Nothing is extrapolated unless the profile is loaded with an ``extrapolate`` method. "end_slope"
applies to new tokens only. Beyond the last point each curve goes on with the power law of its last
segment, at most quadratic: too fast where the slope still grows. Below the first point it keeps
that point's time, for a shorter prompt costs no more and what is left is fixed cost: never too
fast. Cached prefixes, batches and contexts outside the points are refused always.

A file without a cached axis (all ``cached_tokens`` 0) gives the cost of the new tokens whatever is
cached: it knows no better, and ``has_cached_axis`` says so. A file without decode points is of
hardware that only prefills (``can_decode`` is False). Each point says how it is known.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from harness.core import ScenarioError

Provenance = Literal["published", "derived", "stand_in", "measured", "modelled"]
Extrapolation = Literal["end_slope"]
FloatArray = npt.NDArray[np.float64]
#: No prompt is longer, extrapolated or not.
MAX_TOKENS = 2**31
#: No prefill grows faster than attention; two close points may say so by noise.
_STEEPEST = 2.0
#: No prefill and no decode step is shorter or longer; beyond, squares of times leave the floats.
_TIMES_S = (1e-9, 1e9)
#: Rounding of shares, sums of many layers' bytes.
_SHARE_ERROR = 1e-6
#: Rounding allowed when a step time is held against a bound that it meets exactly.
_STEP_ERROR = 1e-9


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    new_tokens: int
    cached_tokens: int
    prefill_s: float
    provenance: Provenance
    source: str


@dataclass(frozen=True, slots=True)
class DecodePoint:
    batch: int
    context_tokens: int
    step_s: float
    provenance: Provenance
    source: str


@dataclass(frozen=True, slots=True)
class ReleaseCurve:
    """What share of a prompt's KV bytes was final at what share of its prefill, as captured.

    ``byte_shares`` and ``time_shares`` ascend and end at 1; bytes up to a share are final at its
    time and not before, so the curve is a staircase of layers or chunks.
    """

    new_tokens: int
    byte_shares: tuple[float, ...]
    time_shares: tuple[float, ...]

    def at(self, byte_share: float) -> float:
        """When the first ``byte_share`` of the bytes is final, as a share of the prefill."""
        i = bisect_left(self.byte_shares, byte_share - _SHARE_ERROR)
        return self.time_shares[min(i, len(self.time_shares) - 1)]


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of one instance of ``gpus_per_instance`` GPUs; points sorted, grids complete.

    ``harness.profile_file.load_profile`` builds it from a file. ScenarioError for a time that
    nothing takes. What concerns ``decode_max_batch``
    is None where there are no ``decode_points``.
    """

    name: str
    path: Path
    model: str
    hardware: str
    gpus_per_instance: int
    engine_name: str
    engine_version: str
    prefill_points: tuple[PrefillPoint, ...]
    decode_points: tuple[DecodePoint, ...]
    decode_max_batch: int | None
    decode_max_batch_provenance: Provenance | None
    decode_max_batch_source: str | None
    extrapolate: Extrapolation | None = None
    release: tuple[ReleaseCurve, ...] = ()
    _curves: "tuple[_Curve, ...]" = field(init=False, repr=False, compare=False)
    _levels: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _covered: tuple[int, int, float] = field(init=False, repr=False, compare=False)
    _grid: "_Grid | None" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_times()
        levels = tuple(sorted({point.cached_tokens for point in self.prefill_points}))
        curves = tuple(_curve(self.prefill_points, level) for level in levels)
        low = max(curve.tokens[0] for curve in curves)
        high = min(curve.tokens[-1] for curve in curves)
        max_cached = levels[-1] if len(levels) > 1 else math.inf
        object.__setattr__(self, "_curves", curves)
        object.__setattr__(self, "_levels", levels)
        object.__setattr__(self, "_covered", (low, high, max_cached))
        grid = _grid(self.decode_points) if self.decode_points else None
        object.__setattr__(self, "_grid", grid)

    def _check_times(self) -> None:
        times_s = [("prefill_s", point.prefill_s) for point in self.prefill_points]
        times_s += [("step_s", point.step_s) for point in self.decode_points]
        low_s, high_s = _TIMES_S
        for key, time_s in times_s:
            if not low_s <= time_s <= high_s:
                raise ScenarioError(
                    f"The profile file {self.path} has a {key!r} of {time_s:g} s; a time between "
                    f"{low_s:g} and {high_s:g} s is needed. Is it in another unit?"
                )

    @property
    def has_cached_axis(self) -> bool:
        """False where no point has a cached prefix: ``cached_tokens`` then changes no cost."""
        return len(self._curves) > 1

    @property
    def can_decode(self) -> bool:
        """False for a profile of hardware that only prefills."""
        return self._grid is not None

    @property
    def covered_tokens(self) -> tuple[int, int]:
        """Shortest and longest ``new_tokens`` between points at every cached length."""
        return self._covered[0], self._covered[1]

    @property
    def _accepted(self) -> tuple[int, int, float]:
        """Least and most new tokens and most cached tokens that get a cost."""
        if self.extrapolate is None:
            return self._covered
        return 1, MAX_TOKENS, self._covered[2]

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """T_prefill of one request. ScenarioError for what is neither covered nor extrapolated."""
        low, high, max_cached = self._accepted
        if not (low <= new_tokens <= high and 0 <= cached_tokens <= max_cached):
            raise self._outside(new_tokens, cached_tokens)
        log_new = math.log(new_tokens)
        if len(self._curves) == 1:
            return self._curves[0].at(new_tokens, log_new)
        i, share = _bracket(self._levels, cached_tokens)
        below = self._curves[i].at(new_tokens, log_new)
        return below + share * (self._curves[i + 1].at(new_tokens, log_new) - below)

    def prefill_s_array(
        self, new_tokens: npt.ArrayLike, cached_tokens: npt.ArrayLike = 0
    ) -> FloatArray:
        """``prefill_s`` elementwise; the arguments broadcast. ScenarioError names one outside."""
        new, cached = np.broadcast_arrays(
            np.asarray(new_tokens, dtype=np.float64), np.asarray(cached_tokens, dtype=np.float64)
        )
        low, high, max_cached = self._accepted
        inside = (new >= low) & (new <= high) & (cached >= 0) & (cached <= max_cached)
        if not inside.all():
            where = np.argmin(inside)
            raise self._outside(float(new.flat[where]), float(cached.flat[where]))
        costs = np.stack([curve.seconds(new) for curve in self._curves])  # (curves, ...)
        if not self.has_cached_axis:
            return np.asarray(costs[0])
        levels = np.array(self._levels, dtype=np.float64)
        upper = np.clip(np.searchsorted(levels, cached, side="right"), 1, len(levels) - 1)
        share = (cached - levels[upper - 1]) / (levels[upper] - levels[upper - 1])
        below = np.take_along_axis(costs, upper[np.newaxis] - 1, axis=0)[0]
        above = np.take_along_axis(costs, upper[np.newaxis], axis=0)[0]
        return np.asarray(below + share * (above - below))

    def mean_prefill_s(self, lengths: npt.ArrayLike, weights: npt.ArrayLike) -> float:
        """E[T_prefill(l)] over a length distribution; ``weights`` sum to 1."""
        return float(np.dot(self.prefill_s_array(lengths), np.asarray(weights)))

    def release_shares(self, tokens: int, layer_bytes: Sequence[int]) -> tuple[float, ...]:
        """When each layer of a prompt is final, as a share of its prefill, by the captured release
        of the nearest length (in ratio). Empty where nothing was captured, or has no bytes."""
        total = sum(layer_bytes)
        if not self.release or not total:
            return ()
        curve = min(self.release, key=lambda one: abs(math.log(one.new_tokens / tokens)))
        return tuple(curve.at(done / total) for done in accumulate(layer_bytes))

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        """T_decode: one step of ``batch`` requests of ``context_tokens`` tokens each."""
        value = self._decode_grid().value(batch, context_tokens)
        if value is None:
            raise self._undecoded(batch, context_tokens)
        return value

    def decode_step_s_array(self, batch: float, context_tokens: FloatArray) -> FloatArray:
        """``decode_step_s`` of one batch at ascending contexts, the same to the last bit.
        # [contexts]"""
        values = self._decode_grid().values(batch, context_tokens)
        if values is None:
            raise self._undecoded(batch, float(context_tokens[-1]))
        return values

    def _undecoded(self, batch: float, context_tokens: float) -> ScenarioError:
        grid = self._decode_grid()
        return ScenarioError(
            f"The profile file {self.path} covers decode batches of {grid.batches[0]} to "
            f"{grid.batches[-1]} and contexts of {grid.contexts[0]} to {grid.contexts[-1]} "
            f"tokens, but batch {batch:g} at {context_tokens:g} tokens is needed; costs are "
            "not extrapolated. Add decode points or lower the load's lengths."
        )

    def largest_decode_batch(self, context_tokens: float, max_step_s: float) -> int | None:
        """Largest batch up to ``decode_max_batch`` whose step takes at most ``max_step_s``.

        None when no batch that the points cover does.
        """
        grid, most = self._decode_grid(), self.decode_max_batch
        assert most is not None, "a profile with decode points has a largest batch"

        def fits(batch: int) -> bool:
            return self.decode_step_s(batch, context_tokens) <= max_step_s * (1 + _STEP_ERROR)

        if fits(most):
            return most
        # Noise may make a step time fall from one batch of the grid to the next, so the largest is
        # looked for from above; between two of them it is linear and crosses the bound once.
        lines = [*(batch for batch in grid.batches if batch < most), most]
        for low, high in reversed(list(pairwise(lines))):
            if fits(low):
                return bisect_right(range(high), False, lo=low, key=lambda b: not fits(b)) - 1
        return None

    def _decode_grid(self) -> "_Grid":
        if self._grid is None:
            raise ScenarioError(
                f"The profile file {self.path} has no decode points: {self.hardware} only prefills "
                "there. Decode on other hardware, or add a 'decode' section to the file."
            )
        return self._grid

    def _outside(self, new_tokens: float, cached_tokens: float) -> ScenarioError:
        low, high, max_cached = self._covered
        cached = f" and cached prefixes of 0 to {max_cached:.0f}"
        return ScenarioError(
            f"The profile file {self.path} covers prefill of {low} to {high} new tokens"
            f"{cached if self.has_cached_axis else ''}, but a request of {new_tokens:g} new and "
            f"{cached_tokens:g} cached tokens needs a cost; {_REFUSED[self.extrapolate]}. Add "
            "points to the profile, or keep the workload's lengths inside it."
        )


_REFUSED: dict[Extrapolation | None, str] = {
    None: "costs are not extrapolated",
    "end_slope": f"only new tokens from 1 to {MAX_TOKENS} are extrapolated",
}


@dataclass(frozen=True, slots=True)
class _Curve:
    """log seconds = offset[i] + slope[i] * log tokens from tokens[i] on; the last is extrapolated.

    Below the first point it is flat.
    """

    cached_tokens: int
    tokens: tuple[int, ...]
    offset: tuple[float, ...]
    slope: tuple[float, ...]

    def at(self, new_tokens: float, log_new: float) -> float:
        if new_tokens < self.tokens[0]:
            new_tokens, log_new = self.tokens[0], math.log(self.tokens[0])
        i = bisect_right(self.tokens, new_tokens) - 1
        return math.exp(self.offset[i] + self.slope[i] * log_new)

    def seconds(self, new_tokens: FloatArray) -> FloatArray:
        i = np.searchsorted(np.array(self.tokens[1:], dtype=np.float64), new_tokens, side="right")
        reached = np.maximum(new_tokens, self.tokens[0])
        logs = np.array(self.offset)[i] + np.array(self.slope)[i] * np.log(reached)
        return np.asarray(np.exp(logs))


def _curve(points: tuple[PrefillPoint, ...], cached_tokens: int) -> _Curve:
    own = sorted(
        (point.new_tokens, point.prefill_s)
        for point in points
        if point.cached_tokens == cached_tokens
    )
    slopes = [math.log(t2 / t1) / math.log(n2 / n1) for (n1, t1), (n2, t2) in pairwise(own)]
    slopes.append(min(slopes[-1], _STEEPEST))
    offsets = [math.log(t) - slope * math.log(n) for (n, t), slope in zip(own, slopes, strict=True)]
    return _Curve(cached_tokens, tuple(n for n, _ in own), tuple(offsets), tuple(slopes))


@dataclass(frozen=True, slots=True)
class _Grid:
    """Step seconds at every (batch, context) of a complete grid; a single value is constant."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    step_s: tuple[tuple[float, ...], ...]  # [batch][context]

    def value(self, batch: float, context: float) -> float | None:
        """Bilinear between the grid's lines; None outside."""
        b, c = self.batches, self.contexts
        if not (b[0] <= batch <= b[-1] and c[0] <= context <= c[-1]):
            return None
        i, y = _bracket(b, batch)
        j, x = _bracket(c, context)
        low = self.step_s[i][j] * (1 - x) + self.step_s[i][j + 1] * x
        high = self.step_s[i + 1][j] * (1 - x) + self.step_s[i + 1][j + 1] * x
        return low * (1 - y) + high * y

    def values(self, batch: float, contexts: FloatArray) -> FloatArray | None:
        """The same at ascending contexts; None where one of them is outside."""
        b, c, first, last = self.batches, self.contexts, float(contexts[0]), float(contexts[-1])
        if not (b[0] <= batch <= b[-1] and c[0] <= first and last <= c[-1]):
            return None
        i, y = _bracket(b, batch)
        j, end = _bracket(c, first)[0], _bracket(c, last)[0] + 1
        lines = np.array(
            (c[j : end + 1], self.step_s[i][j : end + 1], self.step_s[i + 1][j : end + 1])
        )
        # Mostly all of them are in one cell.
        at = 0 if end == j + 1 else np.searchsorted(lines[0, 1:-1], contexts, side="right")
        (c0, low0, high0), (c1, low1, high1) = lines[:, at], lines[:, at + 1]
        x = (contexts - c0) / (c1 - c0)
        low, high = low0 * (1 - x) + low1 * x, high0 * (1 - x) + high1 * x
        return np.asarray(low * (1 - y) + high * y)


def _bracket(axis: tuple[int, ...], value: float) -> tuple[int, float]:
    """Index of the cell that holds ``value`` and how far into it, 0 to 1."""
    i = bisect_right(axis, value, 1, len(axis) - 1) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


def _grid(points: tuple[DecodePoint, ...]) -> _Grid:
    batches = tuple(sorted({point.batch for point in points}))
    contexts = tuple(sorted({point.context_tokens for point in points}))
    at = {(point.batch, point.context_tokens): point.step_s for point in points}
    return _Grid(batches, contexts, tuple(tuple(at[b, c] for c in contexts) for b in batches))
