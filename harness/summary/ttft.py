"""TTFT and token times of a deployment at the offered load, with their intervals.

TTFT counts from the planned send. Quantiles are over all planned requests, one that failed or was
never sent being +inf; ``*_success_s`` leaves those out. ``itl_*`` are per token, the tokens of one
chunk sharing the gap before it; ``chunk_gap_*`` are per chunk, whatever it carried.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from harness.statistics import (
    P99_MIN_EFFECTIVE,
    Blocks,
    Floats,
    Interval,
    effective_samples,
    mean_interval,
    nearest_rank,
    quantile_interval,
    resampled_quantiles,
    seed_interval,
)
from harness.summary.frames import (
    LEVEL,
    by_repeat,
    completed,
    finite,
    floats,
    in_arrival_order,
    interval_of,
    mean,
    present,
    served,
)

QUANTILES = {"ttft_p50": 0.5, "ttft_p90": 0.9, "ttft_p99": 0.99}


def drawn_quantiles(frame: pd.DataFrame, blocks: Blocks) -> dict[str, Floats | None]:
    """Each quantile of TTFT in every resample, failures included."""
    table = by_repeat(frame, served(frame, "ttft_s", math.inf))  # [repeats, requests]
    drawn = resampled_quantiles(table, blocks, tuple(QUANTILES.values()))
    return {key: None if drawn is None else drawn[:, place] for place, key in enumerate(QUANTILES)}


def ttft(frame: pd.DataFrame, blocks: Blocks, drawn: dict[str, Floats | None]) -> dict[str, Any]:
    """Mean and quantiles of TTFT with intervals, effective samples, and the repeats apart."""
    ttft_s = present(completed(frame), "ttft_s")
    failures = len(frame) - len(ttft_s)
    series = in_arrival_order(frame, "ttft_s")
    effective = effective_samples(series[~np.isnan(series)])
    summary: dict[str, Any] = {"ttft_mean_s": mean(ttft_s)}
    for key, q in QUANTILES.items():
        value = nearest_rank(ttft_s, q, failures)
        summary[f"{key}_s"] = finite(value)
        if value is not None and math.isinf(value):
            summary[f"{key}_reason"] = f"{failures} of {len(frame)} requests were not completed"
        summary[f"{key}_success_s"] = nearest_rank(ttft_s, q)
        summary[f"{key}_interval"] = interval_of(quantile_interval(drawn[key], blocks, LEVEL))
    if effective < P99_MIN_EFFECTIVE:
        reason = f"{effective:.0f} effective samples; a P99 takes {P99_MIN_EFFECTIVE}"
        summary["ttft_p99_s"] = summary["ttft_p99_success_s"] = None
        summary["ttft_p99_reason"] = reason
        summary["ttft_p99_interval"] = interval_of(Interval(None, None, LEVEL, reason))
    summary["effective_samples"] = effective
    summary["ttft_mean_interval"] = interval_of(mean_interval(series, blocks, LEVEL))
    return {**summary, "repeats": _repeats(frame)}


def token_times(done: pd.DataFrame) -> dict[str, Any]:
    """Medians over the completed requests."""
    medians = {
        "time_to_second_token_p50_s": "time_to_second_token_s",
        "tpot_p50_s": "tpot_s",
        "itl_p50_s": "itl_p50_s",
        "itl_max_p50_s": "itl_max_s",
        "chunk_gap_p50_s": "chunk_gap_p50_s",
        "chunk_gap_max_p50_s": "chunk_gap_max_s",
        "e2e_p50_s": "e2e_s",
    }
    known = done.dropna(subset=["token_chunks", "completion_tokens"])
    chunks = float(floats(known, "token_chunks").sum())
    return {
        **{key: nearest_rank(present(done, column), 0.5) for key, column in medians.items()},
        "tokens_per_chunk": float(floats(known, "completion_tokens").sum()) / chunks
        if chunks
        else None,
    }


def modelled(done: pd.DataFrame) -> dict[str, Any]:
    """The simulation's figures for the same requests, and how far the measured mean is off."""
    both = done.dropna(subset=["ttft_s", "modelled_ttft_s"])
    measured, simulated = mean(floats(both, "ttft_s")), mean(floats(both, "modelled_ttft_s"))
    return {
        "modelled_ttft_mean_s": simulated,
        "modelled_ttft_p50_s": nearest_rank(floats(both, "modelled_ttft_s"), 0.5),
        "modelled_ttft_p90_s": nearest_rank(floats(both, "modelled_ttft_s"), 0.9),
        "ttft_mean_error": measured / simulated - 1.0 if measured and simulated else None,
    }


def _repeats(frame: pd.DataFrame) -> dict[str, Any]:
    """Mean TTFT of each repeat. Their spread is the machine's: all replay the same arrivals."""
    means: list[float | None] = []
    for _, rows in frame.groupby("repeat", sort=True):
        values = present(completed(rows), "ttft_s")
        means.append(mean(values) if len(values) == len(rows) else None)
    return {
        "count": len(means),
        "arrivals": "the same in every repeat",
        "ttft_mean_s": means,
        "ttft_mean_interval": interval_of(seed_interval(means, LEVEL, "repeats")),
    }
