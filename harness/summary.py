"""A deployment's figures at the offered load, from the requests table. Scenario units.

TTFT counts from the planned send. Quantiles are over all planned requests, one that failed or was
never sent being +inf; ``*_success_s`` leaves those out. Throughput is completed requests over the
time from the start of the load to the last answer; ``steady`` leaves out as much of the start as
the slowest request took, and everything after the last planned send. The arrival rate is n - 1
over the time between the first and the last of n planned sends, since n arrivals span n - 1 gaps.
Utilisation is busy time of the prefill instances over instances x (0 to the last planned send); a
service ends when it was planned to (start + service time), not when the process woke up.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.core import BUDGET_TERMS, Request
from harness.record.run_directory import Cell, DeploymentModel, Manifest
from harness.statistics import (
    P99_MIN_EFFECTIVE,
    Blocks,
    Floats,
    Interval,
    effective_samples,
    mean_interval,
    moving_blocks,
    nearest_rank,
    ratio_interval,
    saturated_requests,
)

#: Lower edges of the input-length bins, tokens; the last bin is open.
LENGTH_EDGES_TOKENS = (0, 4096, 8192, 16384, 32768, 65536)
LENGTH_BINS = ("< 4K", "4K-8K", "8K-16K", "16K-32K", "32K-64K", ">= 64K")
LEVEL = 0.95
#: A span that starts this soon (wall) after another on the same instance follows it directly.
_DIRECTLY_WALL_S = 0.001
#: A TPOT this close above its SLO meets it: clocks and wake-ups do not resolve less.
SLO_RELATIVE, SLO_WALL_S = 0.01, 0.002


def length_bins(input_tokens: Sequence[int] | Floats) -> list[str]:
    """The bin of each input length."""
    places = np.digitize(np.asarray(input_tokens), LENGTH_EDGES_TOKENS[1:])
    return [LENGTH_BINS[place] for place in places]


def floats(frame: pd.DataFrame, column: str) -> Floats:
    """A column as doubles, NaN for null."""
    return np.asarray(frame[column].to_numpy(dtype=np.float64, na_value=np.nan), np.float64)


def present(frame: pd.DataFrame, column: str) -> Floats:
    """A column as doubles without its nulls."""
    values = floats(frame, column)
    return values[~np.isnan(values)]


def completed(frame: pd.DataFrame) -> pd.DataFrame:
    """The requests that were answered in full."""
    return frame[frame["outcome"] == "completed"]


def mean(values: Floats) -> float | None:
    """The mean; None of nothing."""
    return float(values.mean()) if len(values) else None


def finite(value: float | None) -> float | None:
    """The value where JSON can hold it, else None."""
    return None if value is None or not math.isfinite(value) else float(value)


def in_arrival_order(frame: pd.DataFrame, column: str) -> Floats:
    """One value a planned request, the mean of its repeats; NaN where one was not completed.

    Repeats replay the same arrivals, so they add no independent samples.
    """
    values = frame[column].where(frame["outcome"] == "completed")
    by_index = values.astype("float64").groupby(frame["index"].astype("int64"), sort=True)
    return np.asarray(by_index.apply(lambda group: group.mean(skipna=False)), np.float64)


def shared_blocks(requests: pd.DataFrame, manifest: Manifest, n: int) -> Blocks:
    """Blocks longer than the longest busy period of any prefill cluster in any cell."""
    longest = 0
    gap_s = _DIRECTLY_WALL_S * manifest.time_scale
    spans = requests.dropna(subset=["prefill_start_s", "prefill_end_s", "prefill_cluster"])
    for (deployment, _, cluster), group in spans.groupby(
        ["deployment", "repeat", "prefill_cluster"]
    ):
        servers = sum(
            instance.role == "prefill" and instance.cluster == cluster
            for instance in manifest.instances[str(deployment)]
        )
        same_cell = (requests["deployment"] == deployment) & (
            requests["repeat"] == group["repeat"].iloc[0]
        )
        busy = saturated_requests(
            floats(group, "prefill_start_s"),
            service_ends_s(group, manifest.time_scale),
            servers,
            floats(requests[same_cell], "planned_s"),
            gap_s,
        )
        longest = max(longest, busy)
    return moving_blocks(n, longest)


def summarise(
    frame: pd.DataFrame,
    name: str,
    manifest: Manifest,
    schedule: tuple[Request, ...],
    blocks: Blocks,
) -> dict[str, Any]:
    """Every figure of one deployment; ``frame`` holds its rows of the requests table."""
    done = completed(frame)
    outcomes = frame["outcome"].value_counts()
    cells = [cell for cell in manifest.deployments if cell.deployment == name]
    model = manifest.models.get(name, DeploymentModel())
    return {
        "num_planned": len(frame),
        "num_completed": int(outcomes.get("completed", 0)),
        "num_failed": int(outcomes.get("failed", 0)),
        "num_unsent": int(outcomes.get("unsent", 0)),
        "arrival_rate_req_per_s": arrival_rate(schedule),
        **_ttft(frame, done, blocks),
        **_modelled(done),
        **_rates(done, cells, manifest, schedule),
        **_kv(done),
        "budget_residual_p95_s": nearest_rank(np.abs(present(done, "residual_s")), 0.95),
        **_prefill_utilisation(frame, name, cells, manifest, schedule),
        "send_lag_p99_wall_s": nearest_rank(present(frame, "send_lag_wall_s"), 0.99),
        "budget_mean_s": {
            term: mean(present(done, f"{term}_s")) for term in (*BUDGET_TERMS, "residual")
        },
        "lambda_max_req_per_s": finite(model.lambda_max_req_per_s),
        "lambda_max_exact_req_per_s": finite(model.lambda_max_exact_req_per_s),
        "modelled_utilisation": {key: finite(value) for key, value in model.utilisation.items()},
    }


def interval_of(interval: Interval) -> dict[str, Any]:
    """An interval for JSON."""
    return {
        "low": interval.low,
        "high": interval.high,
        "level": interval.level,
        "reason": interval.reason,
    }


def compare(
    requests: pd.DataFrame, names: Sequence[str], blocks: Blocks
) -> dict[str, dict[str, Any]]:
    """Mean TTFT of each deployment over that of the first, with the interval of the ratio."""
    series = {
        name: in_arrival_order(requests[requests["deployment"] == name], "ttft_s") for name in names
    }
    ratios: dict[str, dict[str, Any]] = {}
    for name in names[1:]:
        above, below = series[name], series[names[0]]
        whole = not (np.isnan(above).any() or np.isnan(below).any()) and len(below) > 0
        ratios[name] = {
            "over": names[0],
            "ttft_mean_ratio": float(above.mean() / below.mean()) if whole else None,
            "interval": interval_of(ratio_interval(above, below, blocks, LEVEL)),
        }
    return ratios


def _ttft(frame: pd.DataFrame, done: pd.DataFrame, blocks: Blocks) -> dict[str, Any]:
    ttft_s = present(done, "ttft_s")
    failures = len(frame) - len(ttft_s)
    series = in_arrival_order(frame, "ttft_s")
    effective = effective_samples(series[~np.isnan(series)])
    quantiles = {f"ttft_p{round(100 * q)}": q for q in (0.5, 0.9, 0.99)}
    summary: dict[str, Any] = {"ttft_mean_s": mean(ttft_s)}
    for key, q in quantiles.items():
        value = nearest_rank(ttft_s, q, failures)
        summary[f"{key}_s"] = finite(value)
        if value is not None and math.isinf(value):
            summary[f"{key}_reason"] = f"{failures} of {len(frame)} requests were not completed"
        summary[f"{key}_success_s"] = nearest_rank(ttft_s, q)
    if effective < P99_MIN_EFFECTIVE:
        summary["ttft_p99_s"] = summary["ttft_p99_success_s"] = None
        summary["ttft_p99_reason"] = (
            f"{effective:.0f} effective samples; a P99 takes {P99_MIN_EFFECTIVE}"
        )
    summary["effective_samples"] = effective
    summary["ttft_mean_interval"] = interval_of(mean_interval(series, blocks, LEVEL))
    summary["time_to_second_token_p50_s"] = nearest_rank(
        present(done, "time_to_second_token_s"), 0.5
    )
    summary["tpot_p50_s"] = nearest_rank(present(done, "tpot_s"), 0.5)
    summary["itl_p50_s"] = nearest_rank(present(done, "itl_p50_s"), 0.5)
    summary["e2e_p50_s"] = nearest_rank(present(done, "e2e_s"), 0.5)
    return summary


def _modelled(done: pd.DataFrame) -> dict[str, Any]:
    both = done.dropna(subset=["ttft_s", "modelled_ttft_s"])
    measured, modelled = mean(floats(both, "ttft_s")), mean(floats(both, "modelled_ttft_s"))
    return {
        "modelled_ttft_mean_s": modelled,
        "modelled_ttft_p50_s": nearest_rank(floats(both, "modelled_ttft_s"), 0.5),
        "modelled_ttft_p90_s": nearest_rank(floats(both, "modelled_ttft_s"), 0.9),
        "ttft_mean_error": measured / modelled - 1.0 if measured and modelled else None,
    }


def _rates(
    done: pd.DataFrame, cells: list[Cell], manifest: Manifest, schedule: tuple[Request, ...]
) -> dict[str, Any]:
    last_planned_s = max((request.planned_s for request in schedule), default=0.0)
    whole_s, steady_s, steady, within = 0.0, 0.0, 0, 0
    slo = manifest.scenario.get("slo", {})
    for cell in cells:
        rows = done[done["repeat"] == cell.repeat].dropna(subset=["end_s"])
        if rows.empty:
            continue
        ends_s = floats(rows, "end_s")
        whole_s += float(ends_s.max())
        ramp_s = float(floats(rows, "e2e_s").max())
        if ramp_s < last_planned_s:
            steady += int(((ends_s > ramp_s) & (ends_s <= last_planned_s)).sum())
            steady_s += last_planned_s - ramp_s
        within += int(meets_slo(rows, slo, manifest.time_scale).sum())
    crossing = present(done, "crosses")
    return {
        "throughput_req_per_s": len(done) / whole_s if whole_s else None,
        "throughput_steady_req_per_s": steady / steady_s if steady_s else None,
        "goodput_req_per_s": within / whole_s if whole_s else None,
        "slo_attainment": within / len(done) if len(done) else None,
        "offload_fraction": mean(crossing),
    }


def meets_slo(rows: pd.DataFrame, slo: dict[str, Any], time_scale: float) -> "pd.Series[bool]":
    """Which requests keep the TPOT SLO, and the TTFT SLO where the scenario has one."""
    kept = pd.Series(True, index=rows.index)
    if slo.get("tpot_s") is not None:
        tokens = np.maximum(floats(rows, "output_tokens") - 1.0, 1.0)
        slack_s = np.maximum(SLO_RELATIVE * slo["tpot_s"], SLO_WALL_S * time_scale / tokens)
        tpot_s = np.nan_to_num(floats(rows, "tpot_s"), nan=0.0)  # one token has no TPOT to miss
        kept &= tpot_s <= slo["tpot_s"] + slack_s
    if slo.get("ttft_s") is not None:
        kept &= floats(rows, "ttft_s") <= slo["ttft_s"]
    return kept


def arrival_rate(schedule: Sequence[Request]) -> float | None:
    """Planned arrivals a second; None where they span no time."""
    planned_s = [request.planned_s for request in schedule]
    span_s = max(planned_s, default=0.0) - min(planned_s, default=0.0)
    return (len(planned_s) - 1) / span_s if span_s > 0 else None


def residual_over_bound(
    frame: pd.DataFrame, time_scale: float, of_ttft: float, wall_s: float
) -> float | None:
    """Share of requests whose budget leaves more than ``of_ttft`` of TTFT and than ``wall_s``."""
    whole = completed(frame).dropna(subset=["residual_wall_s"])
    if whole.empty:
        return None
    left_s = np.abs(floats(whole, "residual_wall_s"))
    bound_s = np.maximum(of_ttft * floats(whole, "ttft_s") / time_scale, wall_s)
    return float((left_s > bound_s).mean())


def _kv(done: pd.DataFrame) -> dict[str, Any]:
    counted = done.dropna(subset=["kv_bytes"])
    crossing = counted[counted["crosses"].fillna(False).astype(bool)]
    return {
        "kv_bytes_sent": round(float(floats(counted, "kv_bytes").sum())),
        "kv_bytes_cross": round(float(floats(crossing, "kv_bytes").sum())),
        "kv_bytes_expected": int(present(done, "kv_bytes_expected").sum()),
    }


def service_ends_s(spans: pd.DataFrame, time_scale: float) -> Floats:
    """When each prefill was planned to end, scenario seconds; as it ended where no plan is known.

    The next service of an instance starts at that instant, so actual ends, which a late wake-up
    delays, would overlap it.
    """
    planned_s = floats(spans, "prefill_start_s") + floats(spans, "service_wall_s") * time_scale
    return np.where(np.isnan(planned_s), floats(spans, "prefill_end_s"), planned_s)


def instance_busy_s(frame: pd.DataFrame, window_s: float, time_scale: float) -> "pd.Series[float]":
    """Seconds of [0, window_s] in which each instance prefilled, by (repeat, prefill_instance).

    The length of the union of its services, so never more than the window.
    """
    spans = frame.dropna(subset=["prefill_start_s", "prefill_end_s", "prefill_instance"])
    table = pd.DataFrame(
        {
            "repeat": spans["repeat"],
            "prefill_instance": spans["prefill_instance"],
            "start_s": np.clip(floats(spans, "prefill_start_s"), 0.0, window_s),
            "end_s": np.clip(service_ends_s(spans, time_scale), 0.0, window_s),
        }
    ).sort_values("start_s", kind="stable")
    keys = ["repeat", "prefill_instance"]
    # A service adds what lies beyond the latest end of those that started before it.
    reached_s = table.groupby(keys)["end_s"].cummax().groupby([table[key] for key in keys])
    before_s = reached_s.shift(fill_value=0.0)
    table["busy_s"] = np.maximum(table["end_s"] - np.maximum(table["start_s"], before_s), 0.0)
    return table.groupby(keys)["busy_s"].sum()


def _prefill_utilisation(
    frame: pd.DataFrame,
    name: str,
    cells: list[Cell],
    manifest: Manifest,
    schedule: tuple[Request, ...],
) -> dict[str, Any]:
    window_s = max((request.planned_s for request in schedule), default=0.0)
    ran = sum(cell.start_mono_ns is not None for cell in cells)
    busy_s = instance_busy_s(frame, window_s, manifest.time_scale)
    by_instance = busy_s.groupby("prefill_instance").sum()
    prefills = [item for item in manifest.instances.get(name, ()) if item.role == "prefill"]

    def used(names: list[str]) -> float | None:
        spent_s = float(by_instance.reindex(names, fill_value=0.0).sum())
        return _share(spent_s, len(names) * window_s * ran)

    clusters = dict.fromkeys(item.cluster for item in prefills)
    return {
        "prefill_utilisation": used([item.name for item in prefills]),
        "prefill_utilisation_by_cluster": {
            cluster: used([item.name for item in prefills if item.cluster == cluster])
            for cluster in clusters
        },
    }


def _share(part: float, whole: float) -> float | None:
    # The sum of a window's parts may round to just above it.
    return min(part / whole, 1.0) if whole > 0 else None


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
