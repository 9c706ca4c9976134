"""``report.html``: what a run says, what it rests on, and how far it may be believed.

Sections: verdict; TTFT at the offered load, measured beside modelled; goodput; the steady window;
requests in flight; capacity, apart from it, since an open-loop run at one rate gives every
deployment the same throughput; distributions; input lengths; budget; agreement with the
simulation; link; scaling; overheads; manifest.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import figures
from harness.core import BUDGET_TERMS, ScenarioError
from harness.perfetto import write_trace
from harness.phrases import (
    flat,
    milliseconds,
    percent,
    tolerances,
)
from harness.record.run_directory import RunDirectory
from harness.record.tables import read_table
from harness.report.blocks import Run, by_deployment, figure, table
from harness.report.load import goodput, in_flight, lengths, offered, steady
from harness.verdict import OVERHEADS
from reports.document import (
    Block,
    Document,
    Facts,
    Items,
    Notice,
    Prose,
    Section,
    Table,
)
from reports.render import render

#: The deployment whose capacity the others are compared with, where the scenario has it.
BASELINE = "homogeneous_pd"
_VERDICT_KEYS = {
    "verdict",
    "reasons",
    "notes",
    "deployments",
    "ratios",
    "bootstrap_blocks",
    "gates",
}


def write_report(run: RunDirectory) -> Path:
    """Write ``report.html``, and ``trace.json`` beside it, of a run that has been judged."""
    manifest = run.read_manifest()
    data = Run(
        manifest,
        _read_verdict(run),
        read_table(run, "requests"),
        read_table(run, "simulated"),
        read_table(run, "link"),
    )
    write_trace(run)
    sections = (
        Section("Verdict", tuple(_verdict(data))),
        Section("Time to first token at the offered load", tuple(offered(data))),
        Section("Goodput", tuple(goodput(data))),
        Section("Steady window", tuple(steady(data))),
        Section("Requests in flight", tuple(in_flight(data))),
        Section("Capacity", tuple(_capacity(data))),
        Section("Distribution of time to first token", tuple(_distribution(data))),
        Section("By input length", tuple(lengths(data))),
        Section("Where time to first token goes", tuple(_budget(data))),
        Section("Measured against modelled", tuple(_agreement(data))),
        Section("Link", tuple(_link(data))),
        Section("What the scaling keeps", tuple(_scaling(data))),
        Section("Overheads of the harness", tuple(_overheads(data))),
        Section("Manifest", tuple(_manifest(data))),
    )
    name = str(manifest.scenario.get("name", manifest.run_id))
    subtitle = (
        f"{', '.join(data.names)} on the same arrivals. Run {manifest.run_id}, "
        f"started {manifest.started_utc}, link by {manifest.link_backend or 'nothing (not built)'}."
    )
    return render(Document(f"prfaas-bench: {name}", subtitle, sections), run.report_path)


def _read_verdict(run: RunDirectory) -> dict[str, Any]:
    try:
        verdict: dict[str, Any] = json.loads(run.verdict_path.read_text())
        if not isinstance(verdict, dict) or not verdict.keys() >= _VERDICT_KEYS:
            raise ValueError(f"it lacks one of {', '.join(sorted(_VERDICT_KEYS))}")
    except (OSError, ValueError, RecursionError) as error:
        raise ScenarioError(
            f"cannot read {run.verdict_path}: {error}; `prfaas report` judges the run anew"
        ) from error
    return verdict


def _verdict(data: Run) -> Iterator[Block]:
    reasons, notes = tuple(data.verdict["reasons"]), tuple(data.verdict["notes"])
    if data.verdict["verdict"] == "supported":
        text = "Supported: every gate passed, so the figures below may be compared."
        yield Notice("good", text)
    else:
        yield Notice("bad", "Not supported: the figures below do not carry a claim.", reasons)
    if notes:
        yield Prose("Worth knowing, though no reason to refuse:")
        yield Items(notes)


def _capacity(data: Run) -> Iterator[Block]:
    base_name = BASELINE if BASELINE in data.summaries else next(iter(data.summaries), "")
    base = data.summaries.get(base_name, {}).get("lambda_max_req_per_s")

    def ratio(one: dict[str, Any]) -> str | None:
        rate = one["lambda_max_req_per_s"]
        return f"{rate / base:.2f}" if rate and base else None

    def busiest(one: dict[str, Any]) -> str | None:
        stages = one["modelled_utilisation"].items()
        stage, used = max(stages, key=lambda item: item[1] or 0.0, default=("", None))
        return f"{stage.replace('_', ' ')}, {percent(used, sign=False)}" if stage else None

    yield by_deployment(
        data,
        "Modelled capacity (Lambda_max): with service times at the mean length, T(E[l]), as the "
        "paper has it, and with mean service times, E[T(l)].",
        {
            "Lambda_max with T(E[l]) (req/s)": lambda one: one["lambda_max_req_per_s"],
            "Lambda_max with E[T(l)] (req/s)": lambda one: one["lambda_max_exact_req_per_s"],
            f"over {base_name}, T(E[l])": ratio,
            "busiest stage at the offered load": busiest,
        },
    )
    yield Prose(
        "This capacity is modelled. A measured one takes a saturation search over loads, which "
        "comes with the studies; a run at one offered load cannot show it."
    )


def _distribution(data: Run) -> Iterator[Block]:
    yield figure(
        figures.ttft_distribution(data.requests, data.simulated, data.names),
        "Solid: measured. Dashed: simulation of the same schedule. A line that ends below 100 % "
        "leaves out requests that were never answered.",
    )


def _budget(data: Run) -> Iterator[Block]:
    yield figure(
        figures.budget(data.requests, data.names),
        "Mean over the completed requests of each length bin. Transfer is the part that prefill "
        "does not hide, up to the receiver's acknowledgement; harness overhead is send lag, "
        "gateway, first token and return; the residual is what the terms, each measured inside "
        "one process, leave unexplained.",
    )
    yield by_deployment(
        data,
        "Mean of every term in milliseconds of scenario time, all lengths together.",
        {term.replace("_", " "): _mean_of(term) for term in (*BUDGET_TERMS, "residual")},
    )


def _agreement(data: Run) -> Iterator[Block]:
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


def _link(data: Run) -> Iterator[Block]:
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


def _scaling(data: Run) -> Iterator[Block]:
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


def _overheads(data: Run) -> Iterator[Block]:
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


def _manifest(data: Run) -> Iterator[Block]:
    manifest = data.manifest
    facts: list[tuple[str, str]] = [
        ("run", manifest.run_id),
        ("status", manifest.status + (f": {manifest.error}" if manifest.error else "")),
        ("started (UTC)", manifest.started_utc),
        ("scenario hash", manifest.scenario_hash),
        ("time scale", f"{manifest.time_scale:g}"),
        ("byte scale", f"{manifest.byte_scale:g}"),
        ("order", ", ".join(cell.name for cell in manifest.deployments)),
    ]
    groups = {
        "seed": manifest.seeds,
        "version": manifest.versions,
        "machine": manifest.machine,
        "clock": manifest.clocks,
    }
    for title, values in groups.items():
        facts += [(f"{title}: {name}", text) for name, text in flat(values)]
    # Profiles and layers are long; manifest.json holds them.
    short = {
        key: value
        for key, value in manifest.scenario.items()
        if key not in ("model", "hardware", "path", "name")
    }
    facts += [(f"scenario: {name}", text) for name, text in flat(short)]
    yield Facts(tuple(facts))
    yield Prose(
        "The whole scenario as resolved, profiles included, is in manifest.json; trace.json shows "
        "every request on its instances' tracks (open it at a Perfetto viewer)."
    )


def _mean_of(term: str) -> Callable[[dict[str, Any]], object]:
    return lambda one: milliseconds(one["budget_mean_s"][term])
