"""The sections of a report on what the load met: TTFT, goodput, steady window, levels, lengths."""

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from harness import figures
from harness.phrases import (
    interval_text,
    length_text,
    listed_text,
    milliseconds,
    percent,
    quantile_text,
    rate_text,
    rounded,
    scaled,
    yes_text,
)
from harness.report.blocks import Run, by_deployment, figure
from reports.document import Block, Items, Prose, Table

_PHASES = ("in_flight", "prefill_queue", "prefill", "transfer", "decode_admission", "decode")
#: The terms of the budget that change with the length of the input.
_TERMS = ("prefill_queue", "prefill", "transfer", "decode_admission")


def offered(data: Run) -> Iterator[Block]:
    """TTFT under the offered load, measured beside modelled, and what was served."""
    rate = data.manifest.scenario.get("load", {}).get("rate_req_per_s")
    load = f" of {rate:g} req/s" if isinstance(rate, int | float) else ""
    beside = "" if data.is_simulated else "; modelled is a simulation of the same schedule"
    yield by_deployment(
        data,
        f"TTFT under the offered load{load}, from the planned send, in scenario seconds{beside}. "
        "Quantiles are nearest-rank over all planned requests, one that was not completed being "
        "infinite.",
        {
            "completed": lambda one: f"{one['num_completed']} of {one['num_planned']}",
            "mean TTFT (s)": lambda one: one["ttft_mean_s"],
            "95 % interval of the mean (s)": lambda one: interval_text(one["ttft_mean_interval"]),
            "95 % interval of P50 (s)": lambda one: interval_text(one["ttft_p50_interval"]),
            "95 % interval of P90 (s)": lambda one: interval_text(one["ttft_p90_interval"]),
            "modelled mean (s)": lambda one: one["modelled_ttft_mean_s"],
            "measured mean off the modelled by": lambda one: percent(one["ttft_mean_error"]),
            "P50 (s)": lambda one: quantile_text(one, "ttft_p50"),
            "P90 (s)": lambda one: quantile_text(one, "ttft_p90"),
            "modelled P90 (s)": lambda one: one["modelled_ttft_p90_s"],
            "P99 (s)": lambda one: quantile_text(one, "ttft_p99"),
            "effective samples": lambda one: rounded(one["effective_samples"]),
        },
    )
    blocks = data.verdict["bootstrap_blocks"]
    yield Prose(
        "Samples of a queue are correlated. The intervals come from a bootstrap of blocks of "
        f"{blocks['length_requests']} consecutive requests, longer than the longest busy period, "
        "the same blocks for every deployment. A P99 takes 1,000 effective samples."
        + (f" No intervals: {blocks['reason']}." if blocks["reason"] else "")
    )
    yield from _ratios(data)
    yield by_deployment(
        data,
        "Service, work and load. Throughput at a given load is that load's: it does not tell "
        "deployments apart. Over the whole run it counts up to the last answer, and so includes "
        "the drain after the last arrival, in which nothing new comes: it lies below the arrival "
        "rate even where every request is served in time. Tokens of one chunk share the gap before "
        "it in the gap per token (ITL); the gap per chunk is the silence between chunks.",
        {
            "arrival rate, as planned (req/s)": lambda one: one["arrival_rate_req_per_s"],
            "throughput, steady window (req/s)": lambda one: one["throughput_steady_req_per_s"],
            "throughput, whole run with drain (req/s)": lambda one: one["throughput_req_per_s"],
            "TPOT P50 (ms)": lambda one: scaled(one["tpot_p50_s"], 1e3),
            "gap per token, ITL P50 (ms)": lambda one: scaled(one["itl_p50_s"], 1e3),
            "gap per chunk P50 (ms)": lambda one: scaled(one["chunk_gap_p50_s"], 1e3),
            "tokens a chunk": lambda one: one["tokens_per_chunk"],
            "offloaded to PrfaaS": lambda one: percent(one["offload_fraction"], sign=False),
            "prefill instances busy": lambda one: percent(one["prefill_utilisation"], sign=False),
            "KV moved (GB)": lambda one: scaled(one["kv_bytes_sent"], 1e-9),
            "KV over the link (GB)": lambda one: scaled(one["kv_bytes_cross"], 1e-9),
            "send lag P99 (wall ms)": lambda one: scaled(one["send_lag_p99_wall_s"], 1e3),
        },
    )


def _ratios(data: Run) -> Iterator[Block]:
    words = {"ttft_mean_ratio": "Mean", "ttft_p50_ratio": "P50", "ttft_p90_ratio": "P90"}
    intervals = {"ttft_mean_ratio": "interval"}
    lines = []
    for name, one in data.verdict["ratios"].items():
        for key, word in words.items():
            interval = one[intervals.get(key, key.replace("ratio", "interval"))]
            if one[key] is not None:
                lines.append(
                    f"{word} TTFT of {name} is {one[key]:.2f} times that of {one['over']} "
                    f"(95 % interval {interval_text(interval) or 'not known'})."
                )
    if lines:
        yield Items(tuple(lines))
    if any(one["repeats"]["count"] > 1 for one in data.summaries.values()):
        yield by_deployment(
            data,
            "The repeats apart. All replay the same arrivals, so that their spread is the "
            "machine's, and says nothing of other arrivals.",
            {
                "repeats": lambda one: one["repeats"]["count"],
                "mean TTFT of each (s)": lambda one: listed_text(one["repeats"]["ttft_mean_s"]),
                "95 % interval over repeats (s)": lambda one: interval_text(
                    one["repeats"]["ttft_mean_interval"]
                ),
            },
        )


def goodput(data: Run) -> Iterator[Block]:
    """Requests a second within the SLO, and over other TTFT SLOs."""
    slo = data.manifest.scenario.get("slo", {})
    words = [
        f"TPOT {1e3 * slo['tpot_s']:g} ms" if slo.get("tpot_s") is not None else "no TPOT SLO",
        f"TTFT {slo['ttft_s']:g} s" if slo.get("ttft_s") is not None else "no TTFT SLO",
    ]
    yield by_deployment(
        data,
        f"Goodput under the scenario's SLO ({', '.join(words)}). Shares are of all planned "
        "requests, so that failures count against them. TPOT is (last - first token) / "
        "(tokens - 1), and 99 % of the requests have to keep its SLO.",
        {
            "goodput, whole run with drain (req/s)": lambda one: one["goodput_req_per_s"],
            "goodput, steady window (req/s)": lambda one: one["steady"].get("goodput_req_per_s"),
            "within the SLO": lambda one: percent(one["slo_share_of_planned"], sign=False),
            "95 % interval (% of planned)": lambda one: interval_text(
                one["slo_share_interval"], 100.0
            ),
            "within the TPOT SLO": lambda one: percent(
                one["slo_tpot_share_of_planned"], sign=False
            ),
            "within the TTFT SLO": lambda one: percent(
                one["slo_ttft_share_of_planned"], sign=False
            ),
            "99 % keep the TPOT SLO": lambda one: yes_text(one["slo_tpot_met"]),
        },
    )
    columns: dict[str, list[object]] = {}
    for name, one in data.summaries.items():
        rows = one["goodput_by_ttft_slo"]
        columns.setdefault("TTFT SLO (s)", [f"{row['ttft_slo_s']:g}" for row in rows])
        columns[name] = [
            rate_text(row["goodput_req_per_s"], row["share_of_planned"]) for row in rows
        ]
    if columns:
        yield Table(
            pd.DataFrame(columns, dtype=object),
            "Goodput were the TTFT SLO another: req/s over the whole run, and the share of the "
            "planned requests.",
        )


def steady(data: Run) -> Iterator[Block]:
    """The window, and its figures beside the whole run's."""
    yield by_deployment(
        data,
        "The steady window, by rule: "
        + next((one["steady"]["rule"] for one in data.summaries.values()), "no deployment")
        + ". Its figures stand beside those of the whole run, never in their place.",
        {
            "from (s)": lambda one: one["steady"]["start_s"],
            "to (s)": lambda one: one["steady"]["end_s"],
            "requests planned in it": lambda one: one["steady"]["num_requests"],
            "mean TTFT (s)": lambda one: one["steady"].get("ttft_mean_s"),
            "mean TTFT, whole run (s)": lambda one: one["ttft_mean_s"],
            "P50 (s)": lambda one: one["steady"].get("ttft_p50_s"),
            "P50, whole run (s)": lambda one: quantile_text(one, "ttft_p50"),
            "P90 (s)": lambda one: one["steady"].get("ttft_p90_s"),
            "P90, whole run (s)": lambda one: quantile_text(one, "ttft_p90"),
            "throughput (req/s)": lambda one: one["throughput_steady_req_per_s"],
            "throughput, whole run (req/s)": lambda one: one["throughput_req_per_s"],
        },
    )
    lacking = [
        f"{name}: {reason}."
        for name, one in data.summaries.items()
        for reason in (one["steady"]["reason"], one["steady"].get("ttft_reason"))
        if reason is not None
    ]
    if lacking:
        yield Items(tuple(lacking))


def in_flight(data: Run) -> Iterator[Block]:
    """Requests at once, over time and by phase."""
    starts = {one["steady"]["start_s"] for one in data.summaries.values()} - {None}
    yield figure(
        figures.in_flight(
            data.requests, data.names, max(starts, default=None), data.manifest.time_scale
        ),
        "Planned sends without an end yet, the mean of each stretch of time.",
    )

    def level(which: str, phase: str) -> Callable[[dict[str, Any]], object]:
        return lambda one: one["concurrency"][which][phase]

    rows = {
        f"{phase.replace('_', ' ')}, {word}": level(which, phase)
        for phase in _PHASES
        for which, word in (("mean", "mean"), ("max", "most"))
    }
    yield by_deployment(
        data,
        "Requests at once, weighted by time, from the load's start to the last answer; in flight "
        "is from the planned send to the end, transfer what prefill does not hide of it.",
        rows,
    )


def lengths(data: Run) -> Iterator[Block]:
    """A table a deployment, a row a bin of input length."""
    yield Prose(
        "Bins lie at the routing threshold times powers of two and hold (low, high]. Quantiles "
        "are over all planned requests of the bin, one that was not completed being infinite."
    )
    for name, one in data.summaries.items():
        rows = [_length_row(row) for row in one["by_length"]]
        if rows:
            yield Table(pd.DataFrame(rows, dtype=object), f"{name}, by input length.")


def _length_row(row: dict[str, Any]) -> dict[str, object]:
    failed = row["num_planned"] - row["num_completed"]
    return {
        "input tokens": length_text(row["over_tokens"], row["high_tokens"]),
        "requests": row["num_planned"],
        "not completed": failed,
        "TTFT P50 (s)": row["ttft_p50_s"],
        "TTFT P90 (s)": row["ttft_p90_s"],
        "goodput (req/s)": row["goodput_req_per_s"],
        "within SLO": percent(row["slo_share_of_planned"], sign=False),
        **{
            f"{term.replace('_', ' ')} (ms)": milliseconds(row["budget_mean_s"][term])
            for term in _TERMS
        },
    }
