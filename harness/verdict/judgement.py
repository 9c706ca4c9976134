"""Judges a run: every gate of every deployment, and ``verdict.json``.

A simulated run is not judged: its document says ``simulated`` and holds its figures.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from harness import real_engine
from harness.record.run_directory import Manifest, RunDirectory, json_bytes, write_atomically
from harness.record.tables import read_table
from harness.summary import Shared, compare, residual_over_bound, share_out, summarise
from harness.verdict import simulated
from harness.verdict.gates import GATES, Gates, View, accounts
from harness.verdict.notes import missed_slo, overheads, run_notes

Supported = Literal["supported", "not_supported", "simulated"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``deployments`` holds the figures by name; ``ratios`` compares them with the first one.
    ``simulated`` is no verdict; its ``reasons`` say why it is not of the whole schedule."""

    verdict: Supported
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    deployments: dict[str, dict[str, Any]]
    ratios: dict[str, dict[str, Any]] = field(default_factory=dict)
    blocks: dict[str, Any] = field(default_factory=dict)
    gates: Gates | None = field(default_factory=Gates)

    @property
    def exit_status(self) -> int:
        return 0 if self.verdict != "not_supported" and not self.reasons else 1


def judge(run: RunDirectory, gates: Gates | None = None) -> Verdict:
    """Judge the run by its tables and manifest, and write ``verdict.json``."""
    bounds = gates or Gates()
    manifest = run.read_manifest()
    verdict = (
        _simulated(run, manifest) if manifest.kind == "simulated" else _live(run, manifest, bounds)
    )
    write_atomically(run.verdict_path, json_bytes(document(run, manifest, verdict)))
    return verdict


def _simulated(run: RunDirectory, manifest: Manifest) -> Verdict:
    requests = simulated.read_requests(run)
    summaries, ratios, shared = simulated.figures(requests, manifest)
    return Verdict(
        "simulated",
        tuple(simulated.reasons(requests, manifest)),
        manifest.notes,
        summaries,
        ratios,
        _blocks(shared),
        None,
    )


def _blocks(shared: Shared) -> dict[str, Any]:
    blocks = shared.blocks
    return {
        "length_requests": blocks.length,
        "resamples": 0 if blocks.starts is None else len(blocks.starts),
        "quantile_resamples": shared.quantile_resamples,
        "reason": blocks.reason,
    }


def _live(run: RunDirectory, manifest: Manifest, bounds: Gates) -> Verdict:
    schedule = run.read_schedule()
    requests, engines = read_table(run, "requests"), read_table(run, "engines")
    is_real = real_engine.is_real(manifest)
    names = manifest.deployment_names()
    shared = share_out(requests, manifest, len(schedule))
    reasons, notes = [*_run_reasons(manifest)], [*run_notes(run, manifest)]
    summaries: dict[str, dict[str, Any]] = {}
    for name in names:
        frame = requests[requests["deployment"] == name]
        summary = summarise(frame, name, manifest, schedule, shared)
        summary["budget_residual_over_bound"] = residual_over_bound(
            frame, manifest.time_scale, bounds.residual_of_ttft, bounds.residual_wall_s
        )
        if is_real:
            summary |= real_engine.figures(frame, engines, name)
            notes += [f"{name}: {note}" for note in real_engine.notes(frame, manifest)]
        summaries[name] = summary
        view = View(name, frame, summary, manifest, schedule, bounds, engines)
        # What a run that was cut short lacks elsewhere follows from that, and would bury it.
        for gate in GATES if manifest.status == "finished" else (accounts,):
            reasons += [f"{name}: {reason}" for reason in gate(view)]
        notes += [f"{name}: {note}" for note in (*overheads(view), *missed_slo(view))]
    if real_engine.computes(manifest) and manifest.status == "finished":
        reasons += real_engine.token_reasons(requests, names)
    return Verdict(
        "not_supported" if reasons else "supported",
        tuple(reasons),
        tuple(notes),
        summaries,
        compare(requests, names, shared),
        _blocks(shared),
        bounds,
    )


def document(run: RunDirectory, manifest: Manifest, verdict: Verdict) -> dict[str, Any]:
    """What ``--json`` prints and ``verdict.json`` holds."""
    return {
        "run_dir": str(run.path),
        "verdict": verdict.verdict,
        "reasons": list(verdict.reasons),
        "notes": list(verdict.notes),
        "status": manifest.status,
        "link_backend": manifest.link_backend,
        "time_scale": manifest.time_scale,
        "byte_scale": manifest.byte_scale,
        "deployments": verdict.deployments,
        "ratios": verdict.ratios,
        "bootstrap_blocks": verdict.blocks,
        "gates": None if verdict.gates is None else asdict(verdict.gates),
    }


def _run_reasons(manifest: Manifest) -> Iterator[str]:
    if manifest.status != "finished":
        why = f": {manifest.error}" if manifest.error else ""
        word = "did not end" if manifest.status == "running" else f"was {manifest.status}"
        yield f"the run {'failed' if manifest.status == 'failed' else word}{why}"
    if manifest.link_check is None:
        yield "the link was not checked against what was asked for"
    for failure in manifest.link_failures:
        yield f"link: {failure}"
    for lost in manifest.load_workers_lost:
        yield f"load: a worker was lost, and with it its part of the offered load: {lost}"
    for fault in manifest.load_clock_faults:
        yield f"load: {fault}"
