"""The plan report's charts: frames from the planner's document, titles that say what they show.

Rates of links are Gbit/s (10^9 bits). A chart is None where the document lacks its section.
"""

from itertools import groupby
from typing import Any

import pandas as pd

from harness.planning.variants import BASELINE, OFFLOADING
from harness.planning.wording import (
    GBIT_BYTES,
    STAGES,
    THROUGHPUT,
    instances,
    length_text,
    listed,
    rate_text,
    share_text,
    tokens_text,
    value_text,
)
from reports.document import Axis, Chart, Mark

_LAMBDA_MAX = "Lambda_max (req/s)"
_OBJECTIVES = {"paper": "paper, T(E[l])", "exact": "exact, E[T(l)]"}
_PARTS = {"chip": "the chip", "threshold": "the threshold", "bandwidth": "bandwidth-awareness"}


def capacity_curve(document: dict[str, Any]) -> Chart | None:
    """Lambda_max over the threshold at the split found, by both sets of equations."""
    curve, objective = document["curve"], document["objective"]
    if curve is None:
        return None
    one = document["deployments"][OFFLOADING]
    other = "exact" if objective == "paper" else "paper"
    parts = [
        pd.DataFrame(
            {
                "threshold_tokens": curve["threshold_tokens"],
                "req_per_s": curve[f"{equations}_req_per_s"],
                "stage": [STAGES[stage] for stage in curve[f"{equations}_stage"]],
                "other": equations == other,
            }
        )
        for equations in (objective, other)
    ]
    best, threshold = one[THROUGHPUT[objective]], one["threshold_tokens"]
    said = f"{best:.2f} req/s at t = {tokens_text(threshold)}"
    order = [STAGES[stage] for stage, _ in groupby(curve[f"{objective}_stage"])]
    peak = f"Lambda_max peaks at {best:.2f} req/s with t = {tokens_text(threshold)}"
    if document["kept"]:
        peak = f"The scenario's t = {tokens_text(threshold)} carries {best:.2f} req/s"
    title = f"{peak}; as t grows, what binds is {', then '.join(order)}"
    return Chart(
        "segments",
        pd.concat(parts, ignore_index=True),
        title,
        f"{_LAMBDA_MAX} over the threshold for {instances(one)}. {title}.",
        Axis("threshold_tokens", "threshold t (uncached tokens)", log=True),
        Axis("req_per_s", _LAMBDA_MAX),
        series="stage",
        order=tuple(STAGES.values()),
        series_title="binds",
        dashed="other",
        dashed_labels=(_OBJECTIVES[objective], _OBJECTIVES[other]),
        marks=() if threshold == 0 else (Mark(threshold, best, said),),  # the axis has no 0
    )


def split_map(document: dict[str, Any]) -> Chart | None:
    """Lambda_max over the threshold and the split of the PD cluster."""
    grid = document["grid"]
    if grid is None:
        return None
    frame = pd.DataFrame(
        [
            (threshold, num_prefill, rate, STAGES[stage])
            for num_prefill, rates, stages in zip(
                grid["num_prefill"], grid["lambda_max_req_per_s"], grid["stage"], strict=True
            )
            for threshold, rate, stage in zip(grid["threshold_tokens"], rates, stages, strict=True)
        ],
        columns=["threshold_tokens", "num_prefill", "req_per_s", "stage"],
    )
    one = document["deployments"][OFFLOADING]
    best, threshold = one[THROUGHPUT[document["objective"]]], one["threshold_tokens"]
    rows = frame.groupby("num_prefill")["req_per_s"].max()
    second = rows.drop(one["num_prefill"]).nlargest(1)
    next_best = "".join(
        f"; with N_p = {count} it is at most {rate:.2f}" for count, rate in second.items()
    )
    said = f"{instances(one)}: {best:.2f}"
    title = (
        f"{best:.2f} req/s at N_p = {one['num_prefill']} and t = {tokens_text(threshold)}"
        f"{next_best}"
    )
    return Chart(
        "heat_map",
        frame,
        title,
        f"{_LAMBDA_MAX} over the threshold and the number of PD prefill instances. {title}.",
        Axis("threshold_tokens", "threshold t (uncached tokens)", log=True),
        Axis("num_prefill", "PD prefill instances N_p"),
        series="stage",
        order=tuple(STAGES.values()),
        series_title="binds",
        value=Axis("req_per_s", _LAMBDA_MAX),
        marks=() if threshold == 0 else (Mark(threshold, one["num_prefill"], said),),
    )


def ttft_over_load(document: dict[str, Any]) -> Chart | None:
    """Mean and P90 TTFT over the offered load, with queueing."""
    rows = [
        (name, panel, point["rate_req_per_s"], point[key])
        for panel, key in (("mean", "ttft_mean_s"), ("P90", "ttft_p90_s"))
        for name, one in document["deployments"].items()
        for point in one["load_curve"]
        if point[key] is not None
    ]
    if not rows:
        return None
    rate = document["rate_req_per_s"]
    known = {
        name: one["ttft"]["ttft_mean_s"]
        for name, one in document["deployments"].items()
        if one["ttft"]["ttft_mean_s"] is not None
    }
    title = f"No deployment carries the scenario's {rate:g} req/s"
    if known:
        said = listed(f"{value_s:.2f} s with {name}" for name, value_s in known.items())
        title = f"At {rate:g} req/s mean TTFT is {said}"
    return Chart(
        "lines",
        pd.DataFrame(rows, columns=["deployment", "statistic", "rate_req_per_s", "ttft_s"]),
        title,
        f"Modelled time to first token over the offered load, mean and P90. {title}.",
        Axis("rate_req_per_s", "offered load (req/s)"),
        Axis("ttft_s", "TTFT (s)", log=True),
        series="deployment",
        order=tuple(document["deployments"]),
        panel="statistic",
        x_reference=(rate, f"scenario: {rate:g} req/s"),
    )


def attribution_steps(document: dict[str, Any]) -> Chart | None:
    """From the homogeneous deployment to the whole, in both orders and by Shapley shares."""
    if document["attribution"] is None:
        return None
    shares = document["attribution"][document["objective"]]
    start = shares["chain"][0]["throughput_req_per_s"]
    chains = {
        f"{shares['chain'][1]['added']} first": shares["chain"][1:],
        f"{shares['reverse_chain'][1]['added']} first": shares["reverse_chain"][1:],
    }
    rows = []
    for panel, steps in chains.items():
        rows.append((panel, "homogeneous", start))
        rows += [(panel, f"+ {step['added']}", step["throughput_req_per_s"]) for step in steps]
    level = start
    rows.append(("Shapley shares", "homogeneous", start))
    for share in shares["shapley"]:
        level += share["gain_req_per_s"]
        rows.append(("Shapley shares", f"+ {share['member']}", level))
    parts = listed(
        f"{share['gain_req_per_s']:+.3f} from {_PARTS[share['member']]}"
        for share in shares["shapley"]
    )
    title = f"Of {shares['gain_req_per_s']:+.3f} req/s over homogeneous, {parts}"
    return Chart(
        "waterfall",
        pd.DataFrame(rows, columns=["order", "step", "req_per_s"]),
        title,
        f"{_LAMBDA_MAX} as chip, threshold and bandwidth-awareness are added, in two orders and "
        f"by Shapley shares. {title}.",
        Axis("step", ""),
        Axis("req_per_s", _LAMBDA_MAX),
        series="step",
        order=("homogeneous",),
        panel="order",
    )


def sensitivity_bars(document: dict[str, Any]) -> Chart | None:
    """Lambda_max with one input lower and higher, the plan solved anew at each end."""
    found = document["sensitivity"]
    if found is None or found["base_req_per_s"] is None:
        return None
    ends = ("low end", "high end")
    frame = pd.DataFrame(
        [
            (bar["label"], name, bar[f"{end}_req_per_s"], value_text(bar[end], bar["unit"]))
            for bar in found["bars"]
            for name, end in zip(ends, ("low", "high"), strict=True)
            if bar[f"{end}_req_per_s"] is not None
        ],
        columns=["input", "end", "req_per_s", "value"],
    )
    if frame.empty:
        return None
    known = frame.groupby("input", sort=False)["req_per_s"]
    low, high = known.min(), known.max()
    widest = str((high - low).idxmax())
    title = f"What moves Lambda_max most is {widest}: {low[widest]:.2f} to {high[widest]:.2f} req/s"
    base = found["base_req_per_s"]
    return Chart(
        "tornado",
        frame,
        title,
        f"{_LAMBDA_MAX} with each input lower and higher. {title}; as planned {base:.2f}.",
        Axis("req_per_s", _LAMBDA_MAX),
        Axis("input", ""),
        series="end",
        order=ends,
        text="value",
        x_reference=(base, f"as planned: {base:.2f}"),
    )


def agent_share_lines(document: dict[str, Any]) -> Chart | None:
    """Lambda_max of the best plans over the share of requests that find a prefix cached."""
    points = _solved(document, "agent_share")
    if not points:
        return None
    rows = [
        (name, 100 * point["agent_share"], point[key])
        for name, key in (
            (OFFLOADING, "throughput_req_per_s"),
            (BASELINE, "homogeneous_req_per_s"),
        )
        for point in points
        if point[key] is not None
    ]
    first, last = points[0], points[-1]
    title = "Cached prefixes raise what is carried"
    if first["ratio"] is not None and last["ratio"] is not None:
        title = (
            f"{OFFLOADING} carries {first['ratio']:.2f} times the homogeneous deployment at "
            f"{share_text(first['agent_share'])} agent traffic, {last['ratio']:.2f} times at "
            f"{share_text(last['agent_share'])}"
        )
    return Chart(
        "lines",
        pd.DataFrame(rows, columns=["deployment", "share", "req_per_s"]),
        title,
        f"{_LAMBDA_MAX} over the share of agent traffic. {title}.",
        Axis("share", "requests that find a prefix cached (%)"),
        Axis("req_per_s", _LAMBDA_MAX),
        series="deployment",
        order=tuple(dict.fromkeys(row[0] for row in rows)),
    )


def bandwidth_line(document: dict[str, Any]) -> Chart | None:
    """Lambda_max of the best plan over the link's rate."""
    sweeps = document["sweeps"]
    if sweeps is None:
        return None
    points = [one for one in sweeps["bandwidth"]["points"] if one["reason"] is None]
    if not points:
        return None
    limit = sweeps["bandwidth"]["hard_limit_bytes_per_s"]
    title = "The link is no limit at any rate"
    if limit is None:
        title = "More link always carries more: a reserved slot is held through the transfer"
    elif limit > 0:
        title = f"Below {rate_text(limit)} no plan of {OFFLOADING} carries what it does with more"
    homogeneous = points[0]["homogeneous_req_per_s"]
    return Chart(
        "lines",
        pd.DataFrame(
            [
                (OFFLOADING, one["link_bytes_per_s"] / GBIT_BYTES, one["throughput_req_per_s"])
                for one in points
            ],
            columns=["deployment", "gbit_per_s", "req_per_s"],
        ),
        title,
        f"{_LAMBDA_MAX} of the best plan over the rate of the link. {title}.",
        Axis("gbit_per_s", "link rate (Gbit/s)", log=True),
        Axis("req_per_s", _LAMBDA_MAX),
        series="deployment",
        order=(OFFLOADING,),
        reference=None if homogeneous is None else (homogeneous, f"homogeneous {homogeneous:.2f}"),
        x_reference=(limit / GBIT_BYTES, f"limit {rate_text(limit)}") if limit else None,
    )


def egress_dots(document: dict[str, Any]) -> Chart | None:
    """What a cluster of so many GPUs sends when all of them prefill, by model and length."""
    wall = document["bandwidth_wall"]
    if wall is None or not wall["rows"]:
        return None
    rows = sorted(wall["rows"], key=lambda one: (one["tokens"], one["gpus"]))
    several = len({one["hardware"] for one in rows}) > 1
    frame = pd.DataFrame(
        [
            (
                f"{one['model']}, {one['hardware']}" if several else one["model"],
                f"{length_text(one['tokens'])} tokens",
                f"{one['gpus']:,} GPUs",
                one["egress_bytes_per_s"] / GBIT_BYTES,
            )
            for one in rows
        ],
        columns=["model", "tokens", "gpus", "gbit_per_s"],
    )
    most = frame.groupby("model")["gbit_per_s"].max().sort_values()
    frame = frame.sort_values("model", key=lambda names: names.map(most), kind="stable")
    lengths = tuple(dict.fromkeys(f"{length_text(one['tokens'])} tokens" for one in rows))
    few = f"{min(one['gpus'] for one in rows):,} GPUs"
    least = frame[frame["gpus"] == few].groupby("model")["gbit_per_s"].max().sort_values()
    ends = dict.fromkeys((least.index[0], least.index[-1]))
    said = listed(f"{rate_text(least[name] * GBIT_BYTES)} with {name}" for name in ends)
    title = f"{few} send at most {said}"
    link = document["link_bytes_per_s"]
    return Chart(
        "dots",
        frame,
        title,
        f"KV that leaves a cluster of prefilling GPUs by model and prompt length. {title}.",
        Axis("gbit_per_s", "egress (Gbit/s)", log=True),
        Axis("model", ""),
        series="tokens",
        order=lengths,
        panel="gpus",
        x_reference=(link / GBIT_BYTES, f"link {rate_text(link)}"),
    )


def _solved(document: dict[str, Any], sweep: str) -> list[dict[str, Any]]:
    """The points of a sweep that were not refused."""
    if document["sweeps"] is None:
        return []
    return [one for one in document["sweeps"][sweep] if one["reason"] is None]
