"""``report.html``: what a run says, what it rests on, and how far it may be believed.

Sections: verdict; TTFT at the offered load, measured beside modelled; goodput; the steady window;
requests in flight; capacity, apart from it, since an open-loop run at one rate gives every
deployment the same throughput; distributions; input lengths; budget; agreement with the
simulation; link; scaling; overheads; manifest.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.core import ScenarioError
from harness.perfetto import write_trace
from harness.record.run_directory import RunDirectory
from harness.record.tables import read_table
from harness.report.blocks import Run
from harness.report.load import goodput, in_flight, lengths, offered, steady
from harness.report.provenance import manifest
from harness.report.service import budget, capacity, distribution
from harness.report.simulated import read_simulated, simulated_sections
from harness.report.testbed import agreement, link, overheads, scaling
from reports.document import Block, Document, Items, Notice, Prose, Section
from reports.render import render

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
    told, verdict = run.read_manifest(), _read_verdict(run)
    if told.kind == "simulated":
        data = read_simulated(run, told, verdict)
        sections = simulated_sections(run, data)
        how = "simulated: nothing was run"
    else:
        requests, simulated = read_table(run, "requests"), read_table(run, "simulated")
        data = Run(told, verdict, requests, simulated, read_table(run, "link"))
        write_trace(run)
        sections = _live_sections(data)
        how = f"link by {told.link_backend or 'nothing (not built)'}"
    name = str(told.scenario.get("name", told.run_id))
    subtitle = (
        f"{', '.join(data.names) or 'No deployment'} on the same arrivals. Run {told.run_id}, "
        f"started {told.started_utc}, {how}."
    )
    return render(Document(f"prfaas-bench: {name}", subtitle, sections), run.report_path)


def _live_sections(data: Run) -> tuple[Section, ...]:
    return (
        Section("Verdict", tuple(_verdict(data))),
        Section("Time to first token at the offered load", tuple(offered(data))),
        Section("Goodput", tuple(goodput(data))),
        Section("Steady window", tuple(steady(data))),
        Section("Requests in flight", tuple(in_flight(data))),
        Section("Capacity", tuple(capacity(data))),
        Section("Distribution of time to first token", tuple(distribution(data))),
        Section("By input length", tuple(lengths(data))),
        Section("Where time to first token goes", tuple(budget(data))),
        Section("Measured against modelled", tuple(agreement(data))),
        Section("Link", tuple(link(data))),
        Section("What the scaling keeps", tuple(scaling(data))),
        Section("Overheads of the harness", tuple(overheads(data))),
        Section("Manifest", tuple(manifest(data))),
    )


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
