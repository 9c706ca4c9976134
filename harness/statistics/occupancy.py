"""How many requests were somewhere at once, from their spans.

    mean = sum of the spans' parts inside the window / window        max = highest level reached

A span is [start, end): who leaves at the instant at which another comes was not there with it. By
Little's law the mean is the arrival rate times the mean stay, over a window that holds all spans.
"""

from dataclasses import dataclass

import numpy as np

from harness.statistics.quantiles import Floats, Indices


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Time-weighted mean and maximum of a number of requests."""

    mean: float
    most: int


def occupancy(starts_s: Floats, ends_s: Floats, from_s: float, to_s: float) -> Occupancy | None:
    """Over [from_s, to_s); None where the window is empty. NaN marks a span that is not known."""
    if not to_s > from_s:
        return None
    begins, over = np.clip(starts_s, from_s, to_s), np.clip(ends_s, from_s, to_s)
    inside = over > begins  # false of NaN too
    begins, over = np.sort(begins[inside]), np.sort(over[inside])
    # At the k-th start k have begun; those that ended by then are gone.
    level = np.arange(1, len(begins) + 1) - np.searchsorted(over, begins, side="right")
    mean = float((over - begins).sum()) / (to_s - from_s)
    return Occupancy(mean, int(level.max(initial=0)))


def mean_levels(starts_s: Floats, ends_s: Floats, edges_s: Floats) -> Floats:
    """The time-weighted mean of each stretch between neighbouring edges, [edges - 1]."""
    known = ~(np.isnan(starts_s) | np.isnan(ends_s)) & (ends_s > starts_s)
    gone = _past(np.sort(ends_s[known]), edges_s)
    levels: Floats = np.diff(_past(np.sort(starts_s[known]), edges_s) - gone) / np.diff(edges_s)
    return levels


def _past(ordered_s: Floats, at_s: Floats) -> Floats:
    """sum of max(at - t, 0) over the instants t, for each ``at``."""
    sums = np.concatenate([[0.0], np.cumsum(ordered_s)])
    count = np.searchsorted(ordered_s, at_s)
    past: Floats = count * at_s - sums[count]
    return past


def in_system(starts_s: Floats, ends_s: Floats, at_s: Floats) -> Indices:
    """How many spans hold each instant, one that starts there not counted; NaN as in occupancy."""
    known = ~(np.isnan(starts_s) | np.isnan(ends_s))
    begun = np.searchsorted(np.sort(starts_s[known]), at_s, side="left")
    over = np.searchsorted(np.sort(ends_s[known]), at_s, side="right")
    found: Indices = np.maximum(begun - over, 0).astype(np.int64)
    return found
