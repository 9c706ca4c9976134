"""Throughput and goodput: how many requests a second were served, and served well.

A request is served well that keeps the TPOT SLO, and the TTFT SLO where the scenario has one.
TPOT = (t_last - t_first) / (n - 1); the rule is that 99 % of the planned requests keep it, and one
that failed does not. The paper has no TTFT SLO, so goodput is also given over a range of them.
Rates count what was completed: over the whole run, from the load's start to the last answer, or in
the steady window. Shares are of what was planned, so that failures count against them.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.record.run_directory import Cell, Manifest
from harness.statistics import Blocks, Interval, SteadyWindow, mean_interval, nearest_rank
from harness.statistics.steady import RULE
from harness.summary.frames import (
    LEVEL,
    by_repeat,
    completed,
    finite,
    floats,
    interval_of,
    mean,
    planned_instants_s,
    present,
    served,
)
from harness.summary.work import concurrency

#: A TPOT this close above its SLO meets it: clocks and wake-ups do not resolve less.
SLO_RELATIVE, SLO_WALL_S = 0.01, 0.002
#: So many of the requests have to keep the TPOT SLO.
TPOT_SLO_SHARE = 0.99
#: TTFT SLOs that goodput is given over, beside the scenario's own.
TTFT_SLOS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def keeps_tpot(rows: pd.DataFrame, slo: dict[str, Any], time_scale: float) -> "pd.Series[bool]":
    """Which requests keep the TPOT SLO, were they completed."""
    if slo.get("tpot_s") is None:
        return pd.Series(True, index=rows.index)
    tokens = np.maximum(np.nan_to_num(floats(rows, "output_tokens"), nan=1.0) - 1.0, 1.0)
    slack_s = np.maximum(SLO_RELATIVE * slo["tpot_s"], SLO_WALL_S * time_scale / tokens)
    tpot_s = np.nan_to_num(floats(rows, "tpot_s"), nan=0.0)  # one token has no TPOT to miss
    return pd.Series(tpot_s <= slo["tpot_s"] + slack_s, index=rows.index)


def meets_slo(rows: pd.DataFrame, slo: dict[str, Any], time_scale: float) -> "pd.Series[bool]":
    """Which requests keep the TPOT SLO, and the TTFT SLO where the scenario has one."""
    kept = keeps_tpot(rows, slo, time_scale)
    if slo.get("ttft_s") is not None:
        kept &= floats(rows, "ttft_s") <= slo["ttft_s"]
    return kept


def good(frame: pd.DataFrame, slo: dict[str, Any], time_scale: float) -> "pd.Series[bool]":
    """Which of all planned requests were completed within the SLO."""
    done = (frame["outcome"] == "completed").fillna(False).astype(bool)
    return done & meets_slo(frame, slo, time_scale)


def whole_run_s(frame: pd.DataFrame) -> float:
    """From the load's start to the last completed answer, the repeats one after another."""
    return float(completed(frame).groupby("repeat")["end_s"].max().fillna(0.0).sum())


def rates(frame: pd.DataFrame, manifest: Manifest, blocks: Blocks) -> dict[str, Any]:
    """Throughput, goodput and attainment of the whole run."""
    slo, time_scale = manifest.scenario.get("slo", {}), manifest.time_scale
    whole_s, planned = whole_run_s(frame), len(frame)
    done = (frame["outcome"] == "completed").fillna(False).astype(bool).to_numpy()
    kept = good(frame, slo, time_scale).to_numpy()
    within, num_completed = int(kept.sum()), int(done.sum())
    tpot = _share(done & keeps_tpot(frame, slo, time_scale).to_numpy())
    ttft_slo_s, ttft_s = slo.get("ttft_s"), served(frame, "ttft_s", math.inf)
    has_tpot = slo.get("tpot_s") is not None
    return {
        "throughput_req_per_s": num_completed / whole_s if whole_s else None,
        "goodput_req_per_s": within / whole_s if whole_s else None,
        "slo_attainment": within / num_completed if num_completed else None,
        "slo_share_of_planned": within / planned if planned else None,
        "slo_share_interval": interval_of(_share_interval(frame, kept, blocks)),
        "slo_ttft_share_of_planned": None if ttft_slo_s is None else _share(ttft_s <= ttft_slo_s),
        "slo_tpot_share_of_planned": tpot if has_tpot else None,
        "slo_tpot_met": tpot >= TPOT_SLO_SHARE if has_tpot and tpot is not None else None,
        "goodput_by_ttft_slo": goodput_by_ttft_slo(frame, slo, time_scale, whole_s),
        "offload_fraction": mean(present(completed(frame), "crosses")),
    }


def goodput_by_ttft_slo(
    frame: pd.DataFrame, slo: dict[str, Any], time_scale: float, whole_s: float
) -> list[dict[str, Any]]:
    """Goodput were the TTFT SLO another, the TPOT SLO staying as it is."""
    own = [] if slo.get("ttft_s") is None else [float(slo["ttft_s"])]
    kept = keeps_tpot(frame, slo, time_scale).to_numpy()
    # In order, so that each SLO is one look-up.
    ordered = np.sort(served(frame, "ttft_s", math.inf)[kept])
    counts = {
        at_s: int(np.searchsorted(ordered, at_s, side="right"))
        for at_s in sorted({*TTFT_SLOS_S, *own})
    }
    return [
        {
            "ttft_slo_s": at_s,
            "goodput_req_per_s": count / whole_s if whole_s else None,
            "share_of_planned": count / len(frame) if len(frame) else None,
        }
        for at_s, count in counts.items()
    ]


def steady_figures(
    frame: pd.DataFrame, window: SteadyWindow, cells: list[Cell], manifest: Manifest
) -> dict[str, Any]:
    """The figures of the steady window, which stand beside those of the whole run."""
    slo, time_scale = manifest.scenario.get("slo", {}), manifest.time_scale
    stated = {"start_s": window.start_s, "end_s": window.end_s, "rule": RULE}
    if window.start_s is None or window.end_s is None:
        return {**stated, "reason": window.reason, "num_requests": 0}
    planned_s, ends_s = planned_instants_s(frame, time_scale), floats(frame, "end_s")
    rows = frame[(planned_s >= window.start_s) & (planned_s <= window.end_s)]
    ran = sum(cell.start_mono_ns is not None for cell in cells)
    length_s = (window.end_s - window.start_s) * ran
    inside = (ends_s > window.start_s) & (ends_s <= window.end_s)
    done = (frame["outcome"] == "completed").fillna(False).astype(bool).to_numpy()
    kept = good(frame, slo, time_scale).to_numpy()
    ttft_s = present(completed(rows), "ttft_s")
    failures = len(rows) - len(ttft_s)
    spans = concurrency(frame, cells, time_scale, (window.start_s, window.end_s))
    return {
        **stated,
        "reason": None,
        "num_requests": len(rows),
        "ttft_mean_s": None if failures else mean(ttft_s),
        "ttft_p50_s": finite(nearest_rank(ttft_s, 0.5, failures)),
        "ttft_p90_s": finite(nearest_rank(ttft_s, 0.9, failures)),
        "ttft_reason": _failed(failures, len(rows)),
        "throughput_req_per_s": int((inside & done).sum()) / length_s if length_s else None,
        "goodput_req_per_s": int((inside & kept).sum()) / length_s if length_s else None,
        "slo_share_of_planned": _share(good(rows, slo, time_scale).to_numpy()),
        "concurrency_mean": spans["mean"],
    }


def _failed(failures: int, planned: int) -> str | None:
    if not failures:
        return None
    return (
        f"{failures} of {planned} requests were not completed: there is no mean, and a quantile "
        "that they reach is null"
    )


def _share(kept: npt.NDArray[np.bool_]) -> float | None:
    return float(kept.mean()) if len(kept) else None


def _share_interval(frame: pd.DataFrame, kept: npt.NDArray[np.bool_], blocks: Blocks) -> Interval:
    if len(kept) and kept.all() == kept.any():
        reason = "every request has the same outcome: resamples do not differ"
        return Interval(None, None, LEVEL, reason)
    series = by_repeat(frame, kept.astype(np.float64)).mean(axis=0)
    return mean_interval(series, blocks, LEVEL)
