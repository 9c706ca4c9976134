"""The report's sections on what the plan hangs on: the tornado and the sweeps.

``sensitivity`` and ``sweeps`` of the planner's document (``harness.planning.sensitivity``,
``harness.planning.sweeps``).
"""

from collections.abc import Iterator
from typing import Any

from harness.planning.blocks import Value, drawn, one_by_one
from harness.planning.figures import (
    agent_share_lines,
    bandwidth_line,
    sensitivity_bars,
)
from harness.planning.variants import OFFLOADING
from harness.planning.wording import (
    GBIT_BYTES,
    STAGES,
    share_text,
    tokens_text,
    value_text,
)
from reports.document import Block, Items, Prose, Table

_MEGABYTE = 1e6


def sensitivity_blocks(document: dict[str, Any]) -> Iterator[Block]:
    """The tornado, its figures, and the inputs that were refused with their reasons."""
    found = document["sensitivity"]
    yield from drawn(
        sensitivity_bars(document),
        f"{OFFLOADING} with one input lower and higher, threshold and split searched anew at each "
        "end, the instances as they are. Of the costs of the hardware only prefill of the PrfaaS "
        "cluster is varied: not of the PD cluster, and no decode step.",
    )
    yield one_by_one(
        found["bars"],
        "Lambda_max at each end of each input, and its ratio to the homogeneous deployment with "
        "the same inputs.",
        {
            "input": lambda bar: bar["label"],
            "low": _input_text("low"),
            "low: req/s": lambda bar: bar["low_req_per_s"],
            "low: ratio": lambda bar: bar["low_ratio"],
            "high": _input_text("high"),
            "high: req/s": lambda bar: bar["high_req_per_s"],
            "high: ratio": lambda bar: bar["high_ratio"],
        },
    )
    reasons = tuple(bar["reason"] for bar in found["bars"] if bar["reason"] is not None)
    if reasons:
        yield Prose("A dash stands where the input has no such value:")
        yield Items(reasons)


def sweep_blocks(document: dict[str, Any]) -> Iterator[Block]:
    """Agent traffic, link rate, round trip, output length and chip speed."""
    sweeps = document["sweeps"]
    yield from drawn(
        agent_share_lines(document),
        f"Agent traffic: requests that find {share_text(sweeps['cached_fraction'])} of "
        "their prompt cached "
        "where they are prefilled. Threshold and split searched anew at each point.",
    )
    yield _optima(
        sweeps["agent_share"],
        {"agent traffic": lambda one: share_text(one["agent_share"])},
        "The best plan by share of agent traffic.",
    )
    yield from drawn(bandwidth_line(document), "Threshold and split searched anew at each point.")
    yield _optima(
        sweeps["bandwidth"]["points"],
        {"link rate (Gbit/s)": lambda one: one["link_bytes_per_s"] / GBIT_BYTES},
        "The best plan by rate of the link. Where it is scarce the threshold rises, so that "
        "another stage binds before the link does.",
    )
    yield from _round_trips(sweeps)
    yield _optima(
        sweeps["output_tokens"],
        {"output tokens": lambda one: one["output_tokens"]},
        "The best plan by output length.",
    )
    yield _optima(
        sweeps["chip_speed"],
        {"prefill speed": lambda one: f"x {one['chip_speed']:g}"},
        "The best plan by speed of the PrfaaS hardware, every prefill divided by it.",
    )


def _input_text(end: str) -> Value:
    return lambda bar: None if bar[end] is None else value_text(bar[end], bar["unit"])


def _optima(points: list[dict[str, Any]], key: dict[str, Value], caption: str) -> Table:
    """A row a point: its key, the plan, and what it carries; the reason where it was refused."""
    columns: dict[str, Value] = {
        **key,
        "t (tokens)": lambda one: tokens_text(one["threshold_tokens"]),
        "N_p/N_d": _split,
        "Lambda_max (req/s)": lambda one: one["throughput_req_per_s"],
        "homogeneous (req/s)": lambda one: one["homogeneous_req_per_s"],
        "ratio": lambda one: one["ratio"],
        "binds": lambda one: one["reason"] or STAGES[one["bottleneck"]],
    }
    return one_by_one(points, caption, columns)


def _split(one: dict[str, Any]) -> str | None:
    if one["num_decode"] is None:
        return None
    return f"{one['num_prefill'] or '-'}/{one['num_decode']}"


def _round_trips(sweeps: dict[str, Any]) -> Iterator[Block]:
    limit = sweeps["rtt_limit"]
    yield one_by_one(
        sweeps["rtt"],
        f"Service TTFT of {OFFLOADING} by round trip: half of one to dispatch an offloaded "
        "request, half for its KV to land; *: with handshakes, "
        f"{limit['handshake_round_trips']} more for the setup of each transfer, which is assumed. "
        "+: over no distance at all. In flight: what each connection must keep under way for the "
        "link's rate.",
        {
            "round trip (ms)": lambda one: 1e3 * one["rtt_s"],
            "mean (s)": lambda one: one["ttft_mean_s"],
            "P90 (s)": lambda one: one["ttft_p90_s"],
            "+ mean (ms)": lambda one: 1e3 * one["added_mean_s"],
            "+ P90 (ms)": lambda one: 1e3 * one["added_p90_s"],
            "mean* (s)": lambda one: one["handshake_ttft_mean_s"],
            "P90* (s)": lambda one: one["handshake_ttft_p90_s"],
            "in flight (MB)": lambda one: one["bdp_bytes_per_connection"] / _MEGABYTE,
        },
    )
    if limit["homogeneous_mean_s"] is not None:
        yield Prose(
            f"Of the homogeneous deployment service TTFT is {limit['homogeneous_mean_s']:.2f} s "
            f"(P90 {limit['homogeneous_p90_s']:.2f}). The gain in the mean is gone from "
            f"{_limit(limit['mean_rtt_s'])}, with handshakes from "
            f"{_limit(limit['handshake_mean_rtt_s'])}; that in the P90 from "
            f"{_limit(limit['p90_rtt_s'])}, with handshakes from "
            f"{_limit(limit['handshake_p90_rtt_s'])}."
        )


def _limit(rtt_s: float | None) -> str:
    return "no round trip, however long" if rtt_s is None else f"a round trip of {rtt_s:.2f} s"
