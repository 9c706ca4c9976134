"""Columns of the requests table as arrays, and values as JSON holds them."""

import math
from typing import Any

import numpy as np
import pandas as pd

from harness.statistics import Floats, Interval

#: The level of every interval.
LEVEL = 0.95


def floats(frame: pd.DataFrame, column: str) -> Floats:
    """A column as doubles, NaN for null."""
    return np.asarray(frame[column].to_numpy(dtype=np.float64, na_value=np.nan), np.float64)


def present(frame: pd.DataFrame, column: str) -> Floats:
    """A column as doubles without its nulls."""
    values = floats(frame, column)
    return values[~np.isnan(values)]


def completed(frame: pd.DataFrame) -> pd.DataFrame:
    """The requests that were answered in full."""
    return frame[frame["outcome"] == "completed"]


def served(frame: pd.DataFrame, column: str, otherwise: float) -> Floats:
    """A column of every row, ``otherwise`` where the request was not completed or has no value."""
    values = floats(frame, column)
    kept = (frame["outcome"] == "completed").to_numpy(dtype=bool, na_value=False)
    return np.where(kept & ~np.isnan(values), values, otherwise)


def planned_instants_s(frame: pd.DataFrame, time_scale: float) -> Floats:
    """When each request was to be sent, since the load's start.

    The schedule's instant; of a closed loop, where answers decide, the one that the client noted.
    """
    strayed_s = np.nan_to_num(floats(frame, "planned_error_wall_s"), nan=0.0) * time_scale
    return floats(frame, "planned_s") + strayed_s


def by_repeat(frame: pd.DataFrame, values: Floats) -> Floats:
    """A value a row of one deployment as [repeats, requests], requests in order of arrival."""
    repeats = max(1, frame["repeat"].nunique())
    order = np.argsort(floats(frame, "repeat"), kind="stable")
    return values[order].reshape(repeats, -1)


def in_arrival_order(frame: pd.DataFrame, column: str) -> Floats:
    """One value a planned request, the mean of its repeats; NaN where one was not completed.

    Repeats replay the same arrivals, so they add no independent samples.
    """
    means: Floats = by_repeat(frame, served(frame, column, math.nan)).mean(axis=0)
    return means


def mean(values: Floats) -> float | None:
    """The mean; None of nothing."""
    return float(values.mean()) if len(values) else None


def finite(value: float | None) -> float | None:
    """The value where JSON can hold it, else None."""
    return None if value is None or not math.isfinite(value) else float(value)


def share(part: float, whole: float) -> float | None:
    """part / whole; None of nothing. The sum of a window's parts may round to just above it."""
    return min(part / whole, 1.0) if whole > 0 else None


def interval_of(interval: Interval) -> dict[str, Any]:
    """An interval for JSON; an infinite end is null, and the reason says so."""
    reason = interval.reason
    if interval.low is not None and not math.isfinite(interval.low):
        reason = "infinite: failures reach this quantile"
    elif interval.high is not None and not math.isfinite(interval.high):
        reason = "no upper end: failures reach this quantile in some resamples"
    return {
        "low": finite(interval.low),
        "high": finite(interval.high),
        "level": interval.level,
        "reason": reason,
    }
