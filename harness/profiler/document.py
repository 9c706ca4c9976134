"""The profile file of what was measured: points with intervals, and the rest of what was found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from pydantic import ValidationError

from harness.core import ScenarioError
from harness.datafile import explain
from harness.profile_file import ProfileFile
from harness.profile_measurement import (
    BatchFile,
    InterferenceFile,
    MissingFile,
    OverheadFile,
    QuantilesFile,
)
from harness.profiler.campaign import visit_means
from harness.profiler.estimate import QUANTILES, Estimate, estimate, never_falling, ratio
from harness.profiler.plan import Cell
from harness.profiler.samples import Sample


@dataclass(frozen=True, slots=True)
class Findings:
    """Every cell's estimate, by what the samples say; cells without a sample are not in it."""

    estimates: Mapping[Cell, Estimate]
    samples: Sequence[Sample]
    source: str

    @classmethod
    def of(
        cls, cells: Sequence[Cell], samples: Sequence[Sample], bound: float, source: str
    ) -> "Findings":
        """From raw samples."""
        means = visit_means(samples, cells)
        found = {cell: estimate(values, bound) for cell, values in means.items() if values}
        return cls(found, [one for one in samples if one.used and one.cell in means], source)

    def of_kind(self, kind: str) -> dict[Cell, Estimate]:
        """Sorted cells of one kind."""
        return {cell: one for cell, one in sorted(self.estimates.items()) if cell.kind == kind}

    def prefill_s(self) -> dict[int, float]:
        """T_prefill without a cached prefix, by length."""
        found = self.of_kind("prefill")
        return {cell.new_tokens: one.mean for cell, one in found.items() if not cell.cached_tokens}


def prefill_points(findings: Findings) -> list[dict[str, Any]]:
    """Points of every cached length of which two were measured. Where noise has made a curve fall
    it is evened out, and the source says so."""
    found = findings.of_kind("prefill")
    points = []
    for cached in sorted({cell.cached_tokens for cell in found}):
        curve = {cell: one for cell, one in found.items() if cell.cached_tokens == cached}
        if len(curve) < 2:
            continue
        even = never_falling(
            [one.mean for one in curve.values()], [one.samples for one in curve.values()]
        )
        for (cell, one), value in zip(curve.items(), even, strict=True):
            source = findings.source
            if value != one.mean:
                source += f"; {one.mean:.6g} s evened out, since a curve may not fall"
            points.append(
                {
                    "new_tokens": cell.new_tokens,
                    "cached_tokens": cached,
                    "prefill_s": value,
                    "provenance": "measured",
                    "source": source,
                    **_known(one),
                }
            )
    return points


def decode_section(findings: Findings, max_running: int | None) -> dict[str, Any] | None:
    """The largest complete grid; None where there are not two batches and two contexts of it."""
    found = findings.of_kind("decode")
    batches, contexts = _complete(found)
    if len(batches) < 2 or len(contexts) < 2:
        return None
    points = [
        {
            "batch": cell.batch,
            "context_tokens": cell.context_tokens,
            "step_s": one.mean,
            "provenance": "measured",
            "source": findings.source,
            **_known(one),
            "step_quantiles_s": step_quantiles(findings.samples, cell),
        }
        for cell, one in found.items()
        if cell.batch in batches and cell.context_tokens in contexts
    ]
    largest = batches[-1]
    source = f"{findings.source}: the largest batch measured"
    if max_running is not None and max_running <= largest:
        largest, source = max_running, f"{findings.source}: the engine runs no more at once"
    return {"max_batch": largest, "provenance": "measured", "source": source, "points": points}


def _known(one: Estimate) -> dict[str, Any]:
    interval = None if one.low is None or one.high is None else [one.low, one.high]
    return {"interval_s": interval, "samples": one.samples, "is_tight": one.is_tight}


def _complete(found: Mapping[Cell, Estimate]) -> tuple[list[int], list[int]]:
    """Batches and contexts of which every pair is there; lines with most holes go first."""
    have = {(cell.batch, cell.context_tokens) for cell in found}
    batches, contexts = sorted({b for b, _ in have}), sorted({c for _, c in have})
    while True:
        holes = [(b, c) for b in batches for c in contexts if (b, c) not in have]
        if not holes:
            return batches, contexts
        by_batch = {b: sum(hole[0] == b for hole in holes) / len(contexts) for b in batches}
        by_context = {c: sum(hole[1] == c for hole in holes) / len(batches) for c in contexts}
        batch, context = (
            max(by_batch, key=lambda b: (by_batch[b], b)),
            max(by_context, key=lambda c: (by_context[c], c)),
        )
        if by_batch[batch] >= by_context[context]:
            batches.remove(batch)
        else:
            contexts.remove(context)


def step_quantiles(samples: Sequence[Sample], cell: Cell) -> QuantilesFile | None:
    """Of all times between tokens of a point's used batches."""
    gaps = [gap for one in samples if one.cell == cell for gap in one.steps_s]
    if not gaps:
        return None
    values = np.percentile(gaps, QUANTILES)
    return QuantilesFile(**{f"p{q}": float(v) for q, v in zip(QUANTILES, values, strict=True)})


def overhead(findings: Findings) -> list[OverheadFile]:
    """Outside against inside, by point; empty where the engine tells no inside."""
    rows = []
    for cell in findings.of_kind("prefill"):
        told = [
            (one.outside_s, one.inside_s, one.parts_s)
            for one in findings.samples
            if one.cell == cell and one.inside_s is not None and one.outside_s is not None
        ]
        if not told:
            continue
        names = sorted({name for _, _, parts_s in told for name in parts_s} - {"prefill"})
        rows.append(
            OverheadFile(
                new_tokens=cell.new_tokens,
                cached_tokens=cell.cached_tokens,
                outside_s=fmean(outside_s for outside_s, _, _ in told),
                inside_s=fmean(inside_s for _, inside_s, _ in told),
                median_difference_s=median(outside_s - inside_s for outside_s, inside_s, _ in told),
                parts_s={
                    name: fmean(parts_s[name] for _, _, parts_s in told if name in parts_s)
                    for name in names
                },
            )
        )
    return rows


def interference(findings: Findings) -> list[InterferenceFile]:
    """Points beside traffic against the same without."""
    rows = []
    for cell, one in findings.estimates.items():
        if cell.kind == "prefill_under_egress":
            quiet = findings.estimates.get(Cell("prefill", cell.new_tokens))
        elif cell.kind == "decode_under_ingress":
            at = {"batch": cell.batch, "context_tokens": cell.context_tokens}
            quiet = findings.estimates.get(Cell("decode", **at))
        else:
            continue
        if quiet is None:
            continue
        value, low, high = ratio(one, quiet)
        rates = [
            sample.egress_bytes_per_s
            for sample in findings.samples
            if sample.cell == cell and sample.used and sample.egress_bytes_per_s is not None
        ]
        if not rates:
            continue  # how much went beside it is not known, so that the ratio says nothing
        rows.append(
            InterferenceFile(
                kind=cell.kind,
                new_tokens=cell.new_tokens,
                batch=cell.batch,
                context_tokens=cell.context_tokens,
                ratio=value,
                interval=None if low is None or high is None else [low, high],
                kv_bytes_per_s=fmean(rates),
            )
        )
    return rows


def slo_batches(findings: Findings, tpot_s: float) -> list[BatchFile]:
    """BS_max at the SLO by context: between two measured batches the step is linear."""
    found = findings.of_kind("decode")
    rows = []
    for context in sorted({cell.context_tokens for cell in found}):
        line = [(c.batch, e.mean) for c, e in found.items() if c.context_tokens == context]
        largest = None
        for (b0, s0), (b1, s1) in zip(line, [*line[1:], line[-1]], strict=True):
            if s0 <= tpot_s:
                largest = b0
                if s1 > tpot_s and b1 > b0:
                    largest = int(b0 + (b1 - b0) * (tpot_s - s0) / (s1 - s0))
        rows.append(BatchFile(context_tokens=context, max_batch=largest))
    return rows


def memory_batches(cells: Sequence[Cell], capacity_tokens: int | None) -> list[BatchFile]:
    """BS_max by the engine's KV memory, for each context that a decode point has."""
    if capacity_tokens is None:
        return []
    contexts = sorted({one.context_tokens for one in cells if one.kind == "decode"})
    return [BatchFile(context_tokens=one, max_batch=capacity_tokens // one) for one in contexts]


def missing(
    cells: Sequence[Cell], findings: Findings, given_up: Mapping[Cell, str]
) -> list[MissingFile]:
    """Points that are not there, or not tight, and why."""
    rows = []
    for cell in cells:
        found = findings.estimates.get(cell)
        if found is not None and found.is_tight:
            continue
        reason = given_up.get(cell)
        if reason is None:
            of = 0 if found is None else found.samples
            needed = "" if found is None else f" of {found.needed}"
            reason = f"the budget ended after {of}{needed} visits"
        rows.append(MissingFile(point=cell.label, reason=reason[:1000]))
    return rows


def profile_file(content: dict[str, Any]) -> ProfileFile:
    """The file's content, checked; ScenarioError names the key that does not fit."""
    try:
        return ProfileFile.model_validate(content)
    except ValidationError as error:
        raise ScenarioError(explain(error, ProfileFile, "the profile to write")) from error
