"""Whether a load meets an SLO, from runs of several seeds at that load.

A load meets the SLO when the P90 of TTFT is at most its bound and at least 99 % of the requests
keep the TPOT bound; a request that failed has an infinite TTFT and keeps no bound. Over k seeds,
which are independent whatever happens inside a run, with r = ln(P90 / bound) and m = the share
that misses TPOT,

    meets    where  mean + t_(k-1, 1 - alpha) s / sqrt(k) <= bound      for r (bound 0) and m (0.01)
    misses   where  mean - t_(k-1, 1 - alpha) s / sqrt(k) >  bound      for r or m

and is undecided else. ``alpha`` is what a wrong verdict may have of probability. |r| counts up to
ln 10: a seed that is ten times over, or whose requests failed, says no more than that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

Outcome = Literal["meets", "misses", "undecided"]

QUANTILE = 0.9
#: So many of the requests may miss the TPOT bound.
TPOT_MISS_SHARE = 0.01
#: How far from its bound, as a factor, the P90 of one seed counts.
MOST_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class Replicate:
    """One seed at one load: P90 of TTFT, infinite where failures reach it, and the share of the
    requests that missed the TPOT bound or failed. ``num_requests`` were simulated."""

    ttft_p90_s: float
    tpot_missed: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the seeds say of one load. ``ttft_ratio``: geometric mean of P90 / bound, each within a
    factor of ten of 1; ``tpot_missed`` the mean share."""

    outcome: Outcome
    num_seeds: int
    ttft_ratio: float
    tpot_missed: float


def judge(replicates: Sequence[Replicate], ttft_s: float, alpha: float) -> Judgement:
    """The verdict on a load whose P90 of TTFT may be ``ttft_s``, from two seeds or more."""
    most = math.log(MOST_RATIO)
    ratios = [
        max(-most, min(most, math.log(one.ttft_p90_s / ttft_s)))
        if math.isfinite(one.ttft_p90_s)
        else most
        for one in replicates
    ]
    missed = [one.tpot_missed for one in replicates]
    sides = (compared(ratios, 0.0, alpha), compared(missed, TPOT_MISS_SHARE, alpha))
    outcome: Outcome = "undecided"
    if "above" in sides:
        outcome = "misses"
    elif sides == ("within", "within"):
        outcome = "meets"
    return Judgement(
        outcome, len(replicates), math.exp(float(np.mean(ratios))), float(np.mean(missed))
    )


def compared(
    values: Sequence[float], bound: float, alpha: float
) -> Literal["within", "above", "open"]:
    """Whether the mean that ``values`` are samples of is at most ``bound``, each answer being
    wrong with probability ``alpha`` at most."""
    assert len(values) >= 2, "one seed says nothing of the spread"
    series = np.asarray(values, dtype=np.float64)
    t = float(stdtrit(len(series) - 1.0, 1.0 - alpha))
    half = t * float(series.std(ddof=1)) / math.sqrt(len(series))
    mean = float(series.mean())
    if mean + half <= bound:
        return "within"
    return "above" if mean - half > bound else "open"
