"""Deployments compared with the first one, request by request, and runs of several seeds combined.

With failures means are not compared: the quantiles are, a failure being +inf.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.statistics import (
    nearest_rank,
    quantile_ratio_interval,
    ratio_interval,
    seed_interval,
    seed_ratio_interval,
)
from harness.summary.frames import (
    LEVEL,
    finite,
    in_arrival_order,
    interval_of,
    served,
)
from harness.summary.shared import Shared

_QUANTILES = {"ttft_p50": 0.5, "ttft_p90": 0.9}
#: The figures that are combined over seeds.
_COMBINED = (
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "throughput_req_per_s",
    "goodput_req_per_s",
    "slo_share_of_planned",
)


def compare(
    requests: pd.DataFrame, names: Sequence[str], shared: Shared
) -> dict[str, dict[str, Any]]:
    """Mean and quantiles of TTFT of each deployment over the first one's, with intervals."""
    frames = {name: requests[requests["deployment"] == name] for name in names}
    means = {name: in_arrival_order(frame, "ttft_s") for name, frame in frames.items()}
    all_s = {name: served(frame, "ttft_s", math.inf) for name, frame in frames.items()}
    blocks, drawn = shared.blocks, shared.drawn
    ratios: dict[str, dict[str, Any]] = {}
    for name in names[1:]:
        above, below = means[name], means[names[0]]
        whole = not (np.isnan(above).any() or np.isnan(below).any()) and len(below) > 0
        ratios[name] = {
            "over": names[0],
            "ttft_mean_ratio": float(above.mean() / below.mean()) if whole else None,
            "interval": interval_of(ratio_interval(above, below, blocks, LEVEL)),
        }
        for key, q in _QUANTILES.items():
            upper, lower = (nearest_rank(all_s[one], q) for one in (name, names[0]))
            between = quantile_ratio_interval(drawn[name][key], drawn[names[0]][key], blocks, LEVEL)
            ratio = None
            if upper is not None and lower is not None and 0 < lower < math.inf:
                ratio = finite(upper / lower)
            ratios[name][f"{key}_ratio"] = ratio
            ratios[name][f"{key}_interval"] = interval_of(between)
    return ratios


def combine_seeds(documents: Sequence[dict[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """Verdict documents of runs that differ in their seed alone, combined over the seeds.

    A value of a figure a seed, its mean over the seeds and Student's t interval; the ratio of a
    deployment to the first one is paired by seed. A seed that occurs twice is one arrival stream,
    and is refused, as are documents of other deployments.
    """
    assert len(documents) == len(seeds), "a seed a document"
    if len(set(seeds)) < len(seeds):
        raise ValueError("two runs have the same seed: they replay the same arrivals")
    names = tuple(documents[0]["deployments"]) if documents else ()
    if any(tuple(one["deployments"]) != names for one in documents):
        raise ValueError("the runs have other deployments")
    figures = {
        name: {key: [one["deployments"][name][key] for one in documents] for key in _COMBINED}
        for name in names
    }
    combined: dict[str, Any] = {name: _over_seeds(figures[name]) for name in names}
    ratios = {}
    for name in names[1:]:
        above, below = figures[name], figures[names[0]]
        ratios[name] = {"over": names[0]} | {
            key.removesuffix("_s"): interval_of(seed_ratio_interval(above[key], below[key], LEVEL))
            for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s")
        }
    return {"seeds": list(seeds), "deployments": combined, "ratios": ratios}


def _over_seeds(figures: dict[str, list[float | None]]) -> dict[str, Any]:
    found = {}
    for key, values in figures.items():
        known = [value for value in values if value is not None]
        whole = len(known) == len(values) and known
        found[key] = {
            "by_seed": values,
            "mean": float(np.mean(known)) if whole else None,
            "interval": interval_of(seed_interval(values, LEVEL)),
        }
    return found
