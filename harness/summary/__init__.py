"""A deployment's figures at the offered load, from the requests table. Scenario units.

TTFT counts from the planned send. Quantiles are over all planned requests, one that failed or was
never sent being +inf; ``*_success_s`` leaves those out. Throughput is completed requests over the
time from the start of the load to the last answer; ``steady`` is over a window found by rule. The
arrival rate is n - 1 over the time between the first and the last of n planned sends, since n
arrivals span n - 1 gaps. Utilisation is busy time of the prefill instances over instances x (0 to
the last planned send).
"""

from harness.summary.comparison import combine_seeds, compare
from harness.summary.deployment import arrival_rate, residual_over_bound, summarise
from harness.summary.frames import (
    completed,
    floats,
    in_arrival_order,
    interval_of,
    mean,
    planned_instants_s,
    present,
)
from harness.summary.lengths import LENGTH_BINS, length_bins, length_edges, prefill_errors
from harness.summary.service import SLO_RELATIVE, SLO_WALL_S, TPOT_SLO_SHARE, meets_slo
from harness.summary.shared import Shared, share_out
from harness.summary.ttft import QUANTILES
from harness.summary.work import concurrency, instance_busy_s, phase_spans_s, service_ends_s

__all__ = [
    "LENGTH_BINS",
    "QUANTILES",
    "SLO_RELATIVE",
    "SLO_WALL_S",
    "TPOT_SLO_SHARE",
    "Shared",
    "arrival_rate",
    "combine_seeds",
    "compare",
    "completed",
    "concurrency",
    "floats",
    "in_arrival_order",
    "instance_busy_s",
    "interval_of",
    "length_bins",
    "length_edges",
    "mean",
    "meets_slo",
    "phase_spans_s",
    "planned_instants_s",
    "prefill_errors",
    "present",
    "residual_over_bound",
    "service_ends_s",
    "share_out",
    "summarise",
]
