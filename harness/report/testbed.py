"""The sections of a report on the testbed: agreement with simulation, link, scaling, overheads."""

from collections.abc import Callable, Iterator
from typing import Any

from harness import figures
from harness.phrases import milliseconds, percent, tolerances
from harness.report.blocks import Run, by_deployment, figure, table
from harness.verdict import OVERHEADS
from reports.document import Block, Items, Prose, Table


def agreement(data: Run) -> Iterator[Block]:
    yield figure(
        figures.agreement(data.requests, data.names),
        "One mark a request, or a group of them where there are many. On the dashed line the "
        "simulation is right.",
    )
    yield table(
        figures.agreement_by_bin(data.requests, data.names),
        "Mean TTFT by input length: measured / simulated in seconds, and the difference.",
    )
    yield table(
        figures.prefill_by_bin(data.requests, data.names),
        "Measured prefill time off the profile's, median of each input length and hardware.",
    )


def link(data: Run) -> Iterator[Block]:
    asked, applied = data.manifest.link_requested or {}, data.manifest.link_applied or {}
    capacity = applied.get("rate_bytes_per_s", asked.get("rate_bytes_per_s"))
    yield figure(
        figures.link_rate(data.link, data.names, capacity),
        "From the PrfaaS to the PD cluster, as the link counted it, headers included, in scenario "
        "units. The other way carries prompts, whose bytes are not scaled.",
    )
    backend = data.manifest.link_backend or "nothing: it was not built"
    yield Table(
        figures.link_table(data.manifest),
        f"The link, made by {backend}, in scenario units, and in the last two columns as it is on "
        "the wire (rate x time scale / byte scale, round trip / time scale). Measured before the "
        "run by real probes: the rate is TCP payload." + tolerances(data.manifest.link_check or {}),
    )


def scaling(data: Run) -> Iterator[Block]:
    time_scale, byte_scale = data.manifest.time_scale, data.manifest.byte_scale
    yield Prose(
        f"Durations ran {time_scale:g} times faster than the scenario's and KV was "
        f"{byte_scale:g} times smaller, over a link scaled to match "
        f"(rate x {time_scale / byte_scale:g}, delay / {time_scale:g})."
    )
    yield Items(
        (
            "Kept: utilisation of every stage, queueing, the ratio of transfer to prefill time, "
            "and of KV bytes to link rate.",
            "Not kept: the bandwidth-delay product in packets, and with it how TCP meets loss "
            "and delay. Claims about TCP take time and byte scale 1.",
            "Not kept: the size of prompts and headers beside the KV; they are sent whole.",
            f"Multiplied by {time_scale:g}: every overhead of the harness, since it takes wall "
            "time; see below.",
        )
    )


def overheads(data: Run) -> Iterator[Block]:
    def worded(term: str) -> Callable[[dict[str, Any]], str | None]:
        def words(one: dict[str, Any]) -> str | None:
            value_s, mean_s = one["budget_mean_s"][term], one["ttft_mean_s"]
            if value_s is None or not mean_s:
                return None
            wall_ms = 1e3 * value_s / data.manifest.time_scale
            return f"{wall_ms:.2f} ms ({percent(value_s / mean_s, sign=False)})"

        return words

    gates = data.verdict["gates"]
    limit = percent(gates["residual_share"], sign=False)

    def over_bound(one: dict[str, Any]) -> str | None:
        share = percent(one["budget_residual_over_bound"], sign=False)
        return None if share is None else f"{share} (at most {limit})"

    yield by_deployment(
        data,
        "What the harness itself adds to TTFT: mean wall time, and the share of mean TTFT that it "
        "takes once multiplied by the time scale. The last row is the share of requests whose "
        f"residual exceeds both {percent(gates['residual_of_ttft'], sign=False)} of TTFT and "
        f"{milliseconds(gates['residual_wall_s'])} ms of wall time.",
        {
            **{term.replace("_", " "): worded(term) for term in OVERHEADS},
            "requests with a residual over its bound": over_bound,
        },
    )
