"""The exact schedule of a run: arrivals and lengths, fixed by the seed before anything runs.

Arrivals are a renewal process of gamma or Weibull gaps with mean 1 and coefficient of variation
``cv`` (1 is Poisson, 0 is evenly spaced) in operational time, brought to the clock by the inverse
of the integrated rate. That rate is constant, or random (``on_off``, ``mmpp``: with cv = 1 a
Markov-modulated Poisson process), with a fixed shape laid over either (``harness.workload.rate``).
In a closed loop (``load.concurrency``) nothing arrives by itself: every ``planned_s`` is 0.

Lengths are drawn from truncated log-normal laws, grow with the turns of sessions
(``harness.workload.sessions``), or are a trace's (``harness.trace``).

The same seed is meant to give the same schedule on any machine (``Schedule.sha256``): PCG64,
one draw after another, single operations of IEEE arithmetic, and times rounded to nanoseconds, so
that the last bits in which mathematical libraries differ do not show.
"""

from harness.workload.dispersion import (
    Burstiness,
    arrival_cv,
    burstiness,
    index_of_dispersion,
    intended_dispersion,
    planned_times_s,
)
from harness.workload.generation import build_schedule, trace_part
from harness.workload.lengths import STRATA, LengthDistribution, length_distribution
from harness.workload.notes import schedule_notes
from harness.workload_resolution import input_law

__all__ = [
    "STRATA",
    "Burstiness",
    "LengthDistribution",
    "arrival_cv",
    "build_schedule",
    "burstiness",
    "index_of_dispersion",
    "input_law",
    "intended_dispersion",
    "length_distribution",
    "planned_times_s",
    "schedule_notes",
    "trace_part",
]
