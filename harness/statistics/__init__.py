"""Statistics of queues (law 10 of the design).

Samples in a queue are correlated: a request that waits stands behind one that waited. Therefore
- quantiles are nearest-rank over all requests that should have been served, a failure being +inf,
  and stand beside the figure over successes alone;
- the effective sample size is n / tau, tau being the integrated autocorrelation time;
- intervals come from seeds where there are runs of several, else from a moving-block bootstrap
  whose blocks are longer than the longest busy period, since only what lies in different busy
  periods is independent, and are the same for every deployment, so that ratios between
  deployments keep the pairing of their arrivals.
"""

from harness.statistics.correlation import (
    autocorrelation_time,
    effective_samples,
    saturated_requests,
)
from harness.statistics.intervals import (
    MIN_BLOCKS,
    Blocks,
    Interval,
    mean_interval,
    moving_blocks,
    quantile_interval,
    quantile_ratio_interval,
    ratio_interval,
    resampled_quantiles,
)
from harness.statistics.occupancy import Occupancy, in_system, mean_levels, occupancy
from harness.statistics.quantiles import P99_MIN_EFFECTIVE, Floats, Indices, nearest_rank
from harness.statistics.replicates import seed_interval, seed_ratio_interval
from harness.statistics.steady import SteadyWindow, mser_start, steady_window

__all__ = [
    "MIN_BLOCKS",
    "P99_MIN_EFFECTIVE",
    "Blocks",
    "Floats",
    "Indices",
    "Interval",
    "Occupancy",
    "SteadyWindow",
    "autocorrelation_time",
    "effective_samples",
    "in_system",
    "mean_interval",
    "mean_levels",
    "moving_blocks",
    "mser_start",
    "nearest_rank",
    "occupancy",
    "quantile_interval",
    "quantile_ratio_interval",
    "ratio_interval",
    "resampled_quantiles",
    "saturated_requests",
    "seed_interval",
    "seed_ratio_interval",
    "steady_window",
]
