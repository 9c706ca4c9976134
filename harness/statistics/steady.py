"""The steady window of a run, by a rule that the run does not choose.

A run starts empty and ends with nothing coming. The ramp is found by MSER-5 (White 1997; Law,
"Simulation Modeling and Analysis", 9.5): of the series in batches of 5, the first d are left out
for which

    MSER(d) = sum_(i > d) (y_i - mean_d)^2 / (m - d)^2,        d <= m / 2

is least: what is left has the smallest error of its mean. A least value at d = m / 2 means that
the series has not settled in its first half, as one that grows does not: then there is no window.
The series is the number of requests in flight that each arrival finds; it knows nothing of
deployments' service. The drain is what comes after the last planned arrival.
"""

from dataclasses import dataclass

import numpy as np

from harness.statistics.quantiles import Floats

BATCH = 5
#: Fewer batches have no half worth judging.
MIN_BATCHES = 10
RULE = (
    "from the latest start that MSER-5 on the requests in flight at each arrival gives any settled "
    "deployment, to the last planned arrival"
)


@dataclass(frozen=True, slots=True)
class SteadyWindow:
    """[start_s, end_s] from the load's start, or the reason why there is none."""

    start_s: float | None
    end_s: float | None
    reason: str | None = None


def mser_start(series: Floats) -> int | None:
    """How many samples to leave out at the start; None where the series has not settled."""
    batches = len(series) // BATCH
    if batches < MIN_BATCHES:
        return None
    means = np.asarray(series[: batches * BATCH], np.float64).reshape(batches, BATCH).mean(axis=1)
    means = means - means.mean()  # so that squares of large levels do not cancel
    left = np.arange(batches, 0, -1, dtype=np.float64)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    errors = np.maximum(squares - sums**2 / left, 0.0) / left**2
    half = batches // 2
    first = int(np.argmin(errors[: half + 1]))
    return None if first == half else first * BATCH


def steady_window(arrivals_s: Floats, in_flight: Floats) -> SteadyWindow:
    """The window of one deployment; both in order of arrival, a value a request."""
    if len(arrivals_s) < BATCH * MIN_BATCHES:
        least = BATCH * MIN_BATCHES
        return SteadyWindow(None, None, f"{len(arrivals_s)} requests; a window takes {least}")
    first = mser_start(in_flight)
    if first is None:
        reason = "the number of requests in flight has not settled in the first half of the run"
        return SteadyWindow(None, None, reason)
    start_s, end_s = float(arrivals_s[first]), float(arrivals_s.max())
    if not end_s > start_s:
        return SteadyWindow(None, None, "the arrivals span no time")
    return SteadyWindow(start_s, end_s)
