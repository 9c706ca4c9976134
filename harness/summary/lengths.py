"""Figures by input length.

Two sets of bins: fixed ones in units of 1,024 tokens, for charts and profiles; and those of
``by_length``, at the routing threshold t times powers of two, so that t divides two of them and
all are as wide on a logarithmic axis. What is longer than t goes over the link, so a bin of
``by_length`` holds (low, high].
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.core import BUDGET_TERMS
from harness.statistics import Floats, nearest_rank
from harness.summary.frames import completed, finite, floats, mean, present

#: Lower edges of the input-length bins, tokens; the last bin is open.
LENGTH_EDGES_TOKENS = (0, 4096, 8192, 16384, 32768, 65536)
LENGTH_BINS = ("< 4K", "4K-8K", "8K-16K", "16K-32K", "32K-64K", ">= 64K")
#: Where a run has no threshold.
_MIDDLE_TOKENS = 16384
_OCTAVES = 3
#: A P90 of fewer requests is their maximum.
_P90_MIN = 10


def length_bins(input_tokens: Sequence[int] | Floats) -> list[str]:
    """The fixed bin of each input length."""
    places = np.digitize(np.asarray(input_tokens), LENGTH_EDGES_TOKENS[1:])
    return list(np.asarray(LENGTH_BINS, dtype=object)[places])


def length_edges(threshold_tokens: int | None) -> tuple[int, ...]:
    """Edges between the bins of ``by_length``: t / 8 to 8 t."""
    middle = threshold_tokens or _MIDDLE_TOKENS
    edges = {round(middle * 2.0**power) for power in range(-_OCTAVES, _OCTAVES + 1)}
    return tuple(sorted(edges - {0}))


def by_length(
    frame: pd.DataFrame, edges_tokens: tuple[int, ...], meets: "pd.Series[bool]", whole_s: float
) -> list[dict[str, Any]]:
    """Figures of each bin that has requests; ``meets`` says which rows keep the SLO.

    ``high_tokens`` is inclusive, null for the last bin; rates are over the whole run, ``whole_s``.
    """
    places = np.digitize(floats(frame, "input_tokens"), edges_tokens, right=True)
    bounds = (0, *edges_tokens)
    found = []
    for place in np.unique(places):
        inside = places == place
        bin_of = {
            "over_tokens": bounds[place],
            "high_tokens": bounds[place + 1] if place + 1 < len(bounds) else None,
        }
        within = int(meets.to_numpy()[inside].sum())
        found.append({**bin_of, **_figures(frame[inside], within, whole_s)})
    return found


def _figures(rows: pd.DataFrame, within: int, whole_s: float) -> dict[str, Any]:
    done = completed(rows)
    ttft_s = present(done, "ttft_s")
    failures = len(rows) - len(ttft_s)
    figures: dict[str, Any] = {
        "num_planned": len(rows),
        "num_completed": len(done),
        "num_failed": int((rows["outcome"] == "failed").sum()),
    }
    for key, q in (("ttft_p50", 0.5), ("ttft_p90", 0.9)):
        value = nearest_rank(ttft_s, q, failures)
        reason = None
        if q > 0.5 and len(rows) < _P90_MIN:
            value, reason = None, f"{len(rows)} requests; a P90 takes {_P90_MIN}"
        elif value is not None and finite(value) is None:
            reason = f"{failures} of {len(rows)} requests were not completed"
        figures[f"{key}_s"], figures[f"{key}_reason"] = finite(value), reason
    return {
        **figures,
        "goodput_req_per_s": within / whole_s if whole_s else None,
        "slo_share_of_planned": within / len(rows),
        "offload_fraction": mean(present(done, "crosses")),
        "budget_mean_s": {
            term: mean(present(done, f"{term}_s")) for term in (*BUDGET_TERMS, "residual")
        },
    }


def prefill_errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Median of measured / profile prefill time - 1, by hardware and length bin (those with any).

    Columns: hardware, length_bin, requests, median_error.
    """
    rows = completed(frame).dropna(subset=["prefill_s", "profile_prefill_s", "prefill_hardware"])
    columns = ["hardware", "length_bin", "requests", "median_error"]
    if rows.empty:
        return pd.DataFrame(columns=columns)
    table = pd.DataFrame(
        {
            "hardware": rows["prefill_hardware"].astype(str),
            "length_bin": pd.Categorical(
                length_bins(floats(rows, "input_tokens")), categories=LENGTH_BINS, ordered=True
            ),
            "error": floats(rows, "prefill_s") / floats(rows, "profile_prefill_s") - 1.0,
        }
    )
    grouped = table.groupby(["hardware", "length_bin"], observed=True)["error"]
    result = grouped.agg(["size", "median"]).reset_index()
    result.columns = pd.Index(columns)
    result["length_bin"] = result["length_bin"].astype(str)
    return result
