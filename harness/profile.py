"""Costs of one (engine, hardware, model): T_prefill(new, cached) and T_decode(batch, context).

T_prefill is interpolated linearly in (log new tokens, log seconds) between points of the same
``cached_tokens``, and linearly in ``cached_tokens`` between such curves, since attention over a
cached prefix costs in proportion to it. T_decode is bilinear in (batch, context tokens). Nothing is
extrapolated: a length outside the points is refused. Each point says how it is known.

A file without a cached axis (all ``cached_tokens`` 0) gives the cost of the new tokens whatever is
cached: it knows no better, and ``has_cached_axis`` says so.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from harness.core import ScenarioError

Provenance = Literal["published", "derived", "stand_in", "measured", "modelled"]
FloatArray = npt.NDArray[np.float64]


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
class Profile:
    """Costs of one instance of ``gpus_per_instance`` GPUs; points sorted, grids complete.

    ``harness.profile_file.load_profile`` builds it from a file.
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
    decode_max_batch: int
    decode_max_batch_provenance: Provenance
    decode_max_batch_source: str
    _curves: "tuple[_Curve, ...]" = field(init=False, repr=False, compare=False)
    _levels: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _covered: tuple[int, int, float] = field(init=False, repr=False, compare=False)
    _grid: "_Grid" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        levels = tuple(sorted({point.cached_tokens for point in self.prefill_points}))
        curves = tuple(_curve(self.prefill_points, level) for level in levels)
        low = max(curve.tokens[0] for curve in curves)
        high = min(curve.tokens[-1] for curve in curves)
        max_cached = levels[-1] if len(levels) > 1 else math.inf
        object.__setattr__(self, "_curves", curves)
        object.__setattr__(self, "_levels", levels)
        object.__setattr__(self, "_covered", (low, high, max_cached))
        object.__setattr__(self, "_grid", _grid(self.decode_points))

    @property
    def has_cached_axis(self) -> bool:
        """False where no point has a cached prefix: ``cached_tokens`` then changes no cost."""
        return len(self._curves) > 1

    @property
    def covered_tokens(self) -> tuple[int, int]:
        """Shortest and longest ``new_tokens`` that have a cost at every cached length."""
        return self._covered[0], self._covered[1]

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """T_prefill of one request. ScenarioError outside the covered range."""
        low, high, max_cached = self._covered
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
        low, high, max_cached = self._covered
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

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        """T_decode: one step of ``batch`` requests of ``context_tokens`` tokens each."""
        grid = self._grid
        value = grid.value(batch, context_tokens)
        if value is None:
            raise ScenarioError(
                f"The profile file {self.path} covers decode batches of {grid.batches[0]} to "
                f"{grid.batches[-1]} and contexts of {grid.contexts[0]} to {grid.contexts[-1]} "
                f"tokens, but batch {batch:g} at {context_tokens:g} tokens is needed; costs are "
                "not extrapolated. Add decode points or lower the load's lengths."
            )
        return value

    def decode_req_per_s(self, output_tokens: float, context_tokens: float) -> float:
        """BS_max / (T_decode * L_out): an instance's decode rate with all slots taken (Eq. 5)."""
        step_s = self.decode_step_s(self.decode_max_batch, context_tokens)
        return self.decode_max_batch / (step_s * output_tokens)

    def _outside(self, new_tokens: float, cached_tokens: float) -> ScenarioError:
        low, high, max_cached = self._covered
        cached = f" and cached prefixes of 0 to {max_cached:.0f}"
        return ScenarioError(
            f"The profile file {self.path} covers prefill of {low} to {high} new tokens"
            f"{cached if self.has_cached_axis else ''}, but a request of {new_tokens:g} new and "
            f"{cached_tokens:g} cached tokens needs a cost; costs are not extrapolated. Add points "
            "to the profile, or keep the workload's lengths inside it."
        )


@dataclass(frozen=True, slots=True)
class _Curve:
    """log seconds = offset[i] + slope[i] * log tokens between tokens[i] and tokens[i + 1]."""

    cached_tokens: int
    tokens: tuple[int, ...]
    offset: tuple[float, ...]
    slope: tuple[float, ...]

    def at(self, new_tokens: float, log_new: float) -> float:
        i = bisect_right(self.tokens, new_tokens, 1, len(self.tokens) - 1) - 1
        return math.exp(self.offset[i] + self.slope[i] * log_new)

    def seconds(self, new_tokens: FloatArray) -> FloatArray:
        inner = np.array(self.tokens[1:-1], dtype=np.float64)
        i = np.searchsorted(inner, new_tokens, side="right")
        logs = np.array(self.offset)[i] + np.array(self.slope)[i] * np.log(new_tokens)
        return np.asarray(np.exp(logs))


def _curve(points: tuple[PrefillPoint, ...], cached_tokens: int) -> _Curve:
    own = sorted(
        (point.new_tokens, point.prefill_s)
        for point in points
        if point.cached_tokens == cached_tokens
    )
    slopes = [math.log(t2 / t1) / math.log(n2 / n1) for (n1, t1), (n2, t2) in pairwise(own)]
    offsets = [
        math.log(t) - slope * math.log(n) for (n, t), slope in zip(own, slopes, strict=False)
    ]
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


def _bracket(axis: tuple[int, ...], value: float) -> tuple[int, float]:
    """Index of the cell that holds ``value`` and how far into it, 0 to 1."""
    i = bisect_right(axis, value, 1, len(axis) - 1) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


def _grid(points: tuple[DecodePoint, ...]) -> _Grid:
    batches = tuple(sorted({point.batch for point in points}))
    contexts = tuple(sorted({point.context_tokens for point in points}))
    at = {(point.batch, point.context_tokens): point.step_s for point in points}
    return _Grid(batches, contexts, tuple(tuple(at[b, c] for c in contexts) for b in batches))
