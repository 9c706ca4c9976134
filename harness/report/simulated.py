"""The report of a simulated run: the sections that its columns allow, and what it lacks and why.

It says first that nothing was run. Then as of a live run: TTFT at the offered load, goodput, steady
window, requests in flight, capacity, distributions, input lengths, where TTFT goes, manifest; and
of the simulation alone where requests went, how much of each stage was used, and what the
scheduler changed meanwhile. Agreement, link, scaling and overheads only a live run has.
"""

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from harness.core import ScenarioError
from harness.phrases import percent
from harness.record.run_directory import Manifest, RunDirectory
from harness.record.tables import COLUMNS, read_table
from harness.report.blocks import Run, table
from harness.report.load import goodput, in_flight, lengths, offered, steady
from harness.report.provenance import manifest
from harness.report.service import budget, capacity, distribution
from harness.verdict.simulated import read_requests
from reports.document import Block, Items, Notice, Prose, Section

_LEFT_OUT = (
    "Send lag, gateway and return, and with them the residual: no process was there to take time.",
    "The link as measured, TCP and retransmissions: the link is a path of the rate that was asked.",
    "Gaps between chunks, and tokens a chunk: each token is there at the end of its step.",
    "Measured against modelled, what the scaling keeps, overheads, and trace.json.",
)


def read_simulated(run: RunDirectory, told: Manifest, verdict: dict[str, Any]) -> Run:
    """What the sections are written from."""
    names = {name for name, _ in COLUMNS["simulated"]}
    nothing = pd.DataFrame({name: [] for name in names})
    links = pd.DataFrame({name: [] for name, _ in COLUMNS["link"]})
    return Run(told, verdict, read_requests(run), nothing, links)


def simulated_sections(run: RunDirectory, data: Run) -> tuple[Section, ...]:
    """All of the report; of a run without any row its beginning and its manifest."""
    first = Section("Simulated run", tuple(_simulated(data)))
    last = Section("Manifest", tuple(manifest(data)))
    if not data.names:
        return first, last
    return (
        first,
        Section("Time to first token at the offered load", tuple(offered(data))),
        Section("Goodput", tuple(goodput(data))),
        Section("Steady window", tuple(steady(data))),
        Section("Requests in flight", tuple(in_flight(data))),
        Section("Capacity", tuple(capacity(data))),
        Section("Use of each stage", tuple(_stages(run))),
        Section("Distribution of time to first token", tuple(distribution(data))),
        Section("By input length", tuple(lengths(data))),
        Section("Where time to first token goes", tuple(budget(data))),
        Section("Routes", tuple(_routes(data))),
        Section("Failures and faults", tuple(_failures(data))),
        Section("Decisions", tuple(_decisions(run, data))),
        last,
    )


def _simulated(data: Run) -> Iterator[Block]:
    reasons = tuple(data.verdict["reasons"])
    text = (
        "Simulated: nothing was run. The scheduler, the profiles and the schedule are those of a "
        "live run; every time below is the model's, and there is no verdict."
    )
    if reasons:
        text += " The simulation did not end, so the figures are of a part of the schedule alone."
    yield Notice("bad" if reasons else "plain", text, reasons)
    notes = tuple(data.verdict["notes"])
    if notes:
        yield Prose("Worth knowing:")
        yield Items(notes)
    yield Prose("Left out, since only a live run has it:")
    yield Items(_LEFT_OUT)


def _stages(run: RunDirectory) -> Iterator[Block]:
    document = _document(run)
    if document is None:
        yield Prose("The simulation did not end, so that nothing is known of it.")
        return
    used = {name: one["utilisation"] for name, one in document["deployments"].items()}
    stages = list(dict.fromkeys(stage for one in used.values() for stage in one))
    columns: dict[str, list[object]] = {"stage": [stage.replace("_", " ") for stage in stages]}
    for name, one in used.items():
        columns[name] = [percent(one.get(stage), sign=False) for stage in stages]
    yield table(
        pd.DataFrame(columns, dtype=object),
        "Work served over what the stage could do in the time of the load; above 100 % a backlog "
        "was left at its end.",
    )


def _document(run: RunDirectory) -> dict[str, Any] | None:
    """What ``prfaas simulate`` said; None where it did not come to it."""
    path = run.simulation_path
    if not path.is_file():
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if not all(
            isinstance(one["utilisation"], dict) for one in document["deployments"].values()
        ):
            raise ValueError("a deployment has no utilisation")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ScenarioError(f"cannot read {path}: {error!r}; simulate the run again") from error
    return document


def _routes(data: Run) -> Iterator[Block]:
    rows = []
    for name in data.names:
        here = data.requests[data.requests["deployment"] == name]
        for cluster, group in here.dropna(subset=["prefill_cluster"]).groupby("prefill_cluster"):
            row = {"deployment": name, "prefilled in": str(cluster)}
            rows.append(row | _route_figures(group, len(here)))
    yield table(
        pd.DataFrame(rows, dtype=object),
        "Where requests were prefilled, and how evenly over the instances that prefilled any; of "
        "one that was placed again, the last place.",
    )


def _route_figures(group: pd.DataFrame, planned: int) -> dict[str, object]:
    counts = group["prefill_instance"].value_counts()
    return {
        "requests": len(group),
        "share": percent(len(group) / planned, sign=False),
        "mean prompt (tokens)": round(float(group["input_tokens"].mean())),
        "prefill (s)": round(float(group["prefill_s"].sum())),
        "KV (GB)": round(float(group["kv_bytes"].sum()) / 1e9, 1),
        "instances": len(counts),
        "fewest requests": int(counts.min()),
        "most": int(counts.max()),
    }


def _failures(data: Run) -> Iterator[Block]:
    rows = []
    for name in data.names:
        here = data.requests[data.requests["deployment"] == name]
        phases = here["failure_phase"].dropna().value_counts()
        again = here[here["retries"] > 0]
        rows.append(
            {
                "deployment": name,
                "failed": int(phases.sum()),
                "in which phase": ", ".join(f"{n} {phase}" for phase, n in phases.items()) or None,
                "placed again": len(again),
                "of these completed": int((again["outcome"] == "completed").sum()),
            }
        )
    yield table(
        pd.DataFrame(rows, dtype=object),
        "Requests that failed, and such that were placed again after their instance died.",
    )
    faults = data.manifest.scenario.get("faults", {}).get("instances", ())
    if faults:
        yield table(
            pd.DataFrame([_fault_row(one) for one in faults], dtype=object),
            "What was to go wrong, in scenario time since the load began.",
        )


def _fault_row(fault: dict[str, Any]) -> dict[str, object]:
    lasts_s, factor = fault.get("lasts_s"), fault.get("factor")
    return {
        "instance": fault["instance"],
        "what": f"slow, {factor:g} times as long" if factor else "dies",
        "from (s)": fault["at_s"],
        "to (s)": "the end" if lasts_s is None else fault["at_s"] + lasts_s,
        "in": ", ".join(fault.get("deployments") or ()) or "every deployment that has it",
    }


def _decisions(run: RunDirectory, data: Run) -> Iterator[Block]:
    if not run.table_path("decisions").is_file():
        yield Prose("The simulation did not end, so that no decision was written.")
        return
    decisions = read_table(run, "decisions")
    rows = []
    for name in data.names:
        here = decisions[decisions["deployment"] == name]
        steps = here[here["action"] == "set_threshold"]["threshold_tokens"].dropna()
        roles = here[here["action"] == "convert"]
        rows.append(
            {
                "deployment": name,
                "thresholds set": len(steps),
                "least (tokens)": int(steps.min()) if len(steps) else None,
                "most (tokens)": int(steps.max()) if len(steps) else None,
                "roles taken": ", ".join(
                    f"{row.instance}: {row.reason} at {row.now_s:.0f} s"
                    for row in roles.itertuples()
                )
                or None,
            }
        )
    yield table(
        pd.DataFrame(rows, dtype=object),
        "What the scheduler changed during the run. Every placement is in requests.parquet; its "
        "inputs only a live run writes down.",
    )
