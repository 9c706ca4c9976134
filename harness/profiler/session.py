"""One session of ``prfaas profile``: what to measure, measure it, and write what was found.

The raw samples are the memory between sessions: the same command takes them up again, visits what
is not known well enough yet, and writes the profile anew.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from harness.core import EngineError, ScenarioError
from harness.machine import describe_machine
from harness.profile_file import ProfileFile, read_profile_file
from harness.profile_import.document import write_profile
from harness.profile_measurement import MeasurementFile, ReleaseFile
from harness.profiler import document, kv
from harness.profiler.asked import Asked, Settings, asked_cells
from harness.profiler.campaign import Campaign, Progress, Visit
from harness.profiler.capture import NOT_REPORTED, capture
from harness.profiler.decode import DecodeVisits
from harness.profiler.estimate import LEVEL
from harness.profiler.gpu import Gpus, elsewhere
from harness.profiler.interference import EgressVisits, IngressVisits
from harness.profiler.plan import SHORTEST_TOKENS, Kind
from harness.profiler.prefill import PrefillVisits
from harness.profiler.prompts import TOKEN_IDS, Prompts
from harness.profiler.provenance import ModelHashes, gpu_summary, model_hashes
from harness.profiler.samples import SampleFile
from harness.profiler.target import Info, Pair, Target


@dataclass(frozen=True, slots=True)
class Measured:
    """What a session wrote. ``is_whole``: every point is there and tight."""

    path: Path
    file: ProfileFile
    findings: document.Findings
    is_whole: bool


def file_stem(settings: Settings, info: Info) -> Path:
    """``<hardware>-<model>-<engine>`` in the output folder."""
    parts = (settings.hardware, settings.architecture.name, info.engine)
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-").lower() for part in parts)
    return settings.out / name


async def measure(target: Target, settings: Settings, progress: Progress) -> Measured:
    """Measure until all is known well enough or the budget ends; write samples and profile."""
    deadline_s = time.monotonic() + settings.budget_s
    info = await target.info()
    hashes = model_hashes(info.model_path)
    prompts = Prompts(f"profile {settings.seed} {datetime.now(UTC)}", _token_ids(settings, hashes))
    first = await target.prefill(prompts.fresh(SHORTEST_TOKENS // 2))
    from_inside = first.inside_s is not None
    stem = file_stem(settings, info)
    file = SampleFile(stem, _identity(target, settings, info, hashes, from_inside))
    path = stem.with_name(f"{stem.name}.json")
    _refuse_foreign(path, file)
    file.load()
    session = 1 + max((one.session for one in file.samples), default=0)
    asked = asked_cells(settings, info, is_pair=isinstance(target, Pair), from_inside=from_inside)
    with await _gpus(target, settings) as gpus:
        visits = _visits(target, settings, info, prompts, gpus, session, from_inside)
        campaign = Campaign(
            target, asked.cells, visits, file, settings.bound, settings.seed, session, deadline_s,
            progress,
        )  # fmt: skip
        try:
            await campaign.run()
            notes = [*asked.notes, *settings.measured_notes()]
            release = await _release(target, settings, asked, prompts, notes)
            moved = await _moved(target, settings, info, prompts, file, notes)
        finally:
            if file.samples:
                file.compact()
        findings = document.Findings.of(
            asked.cells, file.samples, settings.bound, f"prfaas profile, from {_side(from_inside)}"
        )
        found = _Found(info, hashes, gpus, findings, campaign, asked, release, moved, notes)
        written = _profile(target, settings, file, found, session, stem.name, from_inside)
    write_profile(written, path, overwrite=True)
    assert written.measurement is not None
    return Measured(path, written, findings, not written.measurement.missing)


async def _gpus(target: Target, settings: Settings) -> Gpus:
    """This machine's, if they are the engine's."""
    if settings.is_emulated:
        return Gpus(wanted=False)
    why = await asyncio.to_thread(elsewhere, target.urls)  # names are looked up
    return Gpus() if why is None else Gpus(wanted=False, unwanted_because=why)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a session has to write."""

    info: Info
    hashes: ModelHashes
    gpus: Gpus
    findings: document.Findings
    campaign: Campaign
    asked: Asked
    release: list[ReleaseFile]
    moved: Mapping[int, float]
    notes: list[str]


def _side(from_inside: bool) -> Literal["inside", "outside"]:
    return "inside" if from_inside else "outside"


def _token_ids(settings: Settings, hashes: ModelHashes) -> tuple[int, int]:
    """As asked; else the usual range, or what lies in a small vocabulary beyond special tokens."""
    if settings.token_ids is not None:
        return settings.token_ids
    low, high = TOKEN_IDS
    if hashes.vocab_size is None or hashes.vocab_size >= high:
        return low, high
    return hashes.vocab_size // 8, hashes.vocab_size


def _identity(
    target: Target, settings: Settings, info: Info, hashes: ModelHashes, from_inside: bool
) -> dict[str, Any]:
    """What may not change between sessions whose samples are put together."""
    return {
        "engine": info.engine,
        "version": info.version,
        "flags": dict(info.flags),
        "model": settings.architecture.name,
        "config_sha256": hashes.config_sha256,
        "weights_sha256": hashes.weights_sha256,
        "hardware": settings.hardware,
        "gpus": settings.gpus,
        "prefill_from": _side(from_inside),
        "time_scale": target.time_scale,
        "noise_cv": settings.noise_cv,
        "steps": settings.steps,
        **settings.identity,
    }


def _refuse_foreign(path: Path, file: SampleFile) -> None:
    """A profile that these samples did not make is not replaced."""
    if not path.exists():
        return
    measurement = read_profile_file(path).measurement
    has_samples = file.table_path.exists() or file.spool_path.exists()
    if measurement is None or not has_samples:
        raise ScenarioError(
            f"{path} exists and its samples are not beside it; it is not replaced: give another "
            "--out, or move it away."
        )


def _visits(
    target: Target,
    settings: Settings,
    info: Info,
    prompts: Prompts,
    gpus: Gpus,
    session: int,
    from_inside: bool,
) -> dict[Kind, Visit]:
    limit = info.limit_tokens
    prefill = PrefillVisits(target, prompts, gpus, session, from_inside=from_inside)
    decode = DecodeVisits(target, prompts, gpus, session, limit, settings.steps)
    beside = DecodeVisits(target, prompts, gpus, session, limit, settings.steps)
    return {
        "prefill": prefill,
        "decode": decode,
        "prefill_under_egress": EgressVisits(prefill, target, prompts, settings.architecture),
        "decode_under_ingress": IngressVisits(beside, target, prompts, settings.architecture),
    }


async def _release(
    target: Target, settings: Settings, asked: Asked, prompts: Prompts, notes: list[str]
) -> list[ReleaseFile]:
    if not settings.wants_capture:
        return []
    plain = (one for one in asked.cells if one.kind == "prefill" and not one.cached_tokens)
    lengths = sorted(one.new_tokens for one in plain)
    chosen = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    curves = await capture(target, prompts, settings.architecture, chosen)
    if not curves:
        notes.append(NOT_REPORTED)
    return curves


async def _moved(
    target: Target,
    settings: Settings,
    info: Info,
    prompts: Prompts,
    file: SampleFile,
    notes: list[str],
) -> dict[int, float]:
    """Bytes by length as they were counted; what differs from the geometry is a note."""
    if not isinstance(target, Pair):
        return {}
    moved, faults = kv.moved_by_samples(file.samples, settings.architecture, target.byte_scale)
    notes += faults
    if moved:
        return moved
    used = (one for one in file.samples if one.kind == "prefill" and one.used)
    lengths = sorted({one.new_tokens for one in used})
    moved = await kv.moved_by_counter(target, prompts, lengths)
    if not moved:
        notes.append("moved KV bytes: the engine does not count them")
    notes += kv.counter_faults(settings.architecture, _page(info, settings), moved, info.tp)
    return moved


def _profile(
    target: Target,
    settings: Settings,
    file: SampleFile,
    found: _Found,
    session: int,
    name: str,
    from_inside: bool,
) -> ProfileFile:
    findings, info = found.findings, found.info
    points = document.prefill_points(findings)
    if not points:
        raise EngineError(
            "No two prefill lengths could be measured: "
            + "; ".join(found.campaign.given_up.values() or ["the budget ended before"])
            + f". The samples are kept in {file.table_path}."
        )
    decode = document.decode_section(findings, info.max_running)
    if decode is None and settings.wants_decode:
        found.notes.append("decode: fewer than two batches and two contexts were measured")
    return document.profile_file(
        {
            "schema_version": 1,
            "name": name,
            "notes": settings.notes,
            "model": settings.architecture.name,
            "hardware": settings.hardware,
            "gpus_per_instance": settings.gpus,
            "engine": {"name": info.engine, "version": info.version},
            "prefill": {"interpolation": "log_log", "points": points},
            "decode": decode,
            "release": found.release or None,
            "measurement": _measurement(target, settings, file, found, session, from_inside),
        }
    )


def _measurement(
    target: Target,
    settings: Settings,
    file: SampleFile,
    found: _Found,
    session: int,
    from_inside: bool,
) -> MeasurementFile:
    findings, info, hashes, slo_s = found.findings, found.info, found.hashes, settings.slo_tpot_s
    page = _page(info, settings)
    return MeasurementFile(
        started_utc=datetime.fromtimestamp(file.samples[0].unix_s, UTC).isoformat("T", "seconds"),
        sessions=session,
        seed=settings.seed,
        level=LEVEL,
        bound=settings.bound,
        prefill_from=_side(from_inside),
        samples_file=file.table_path.name,
        time_scale=target.time_scale,
        byte_scale=target.byte_scale,
        noise_cv=settings.noise_cv,
        engine_flags=dict(info.flags),
        model_path=info.model_path,
        config_sha256=hashes.config_sha256,
        weights_sha256=hashes.weights_sha256,
        hashes_absent=hashes.absent,
        gpu=gpu_summary(found.gpus, findings.samples),
        gpu_absent=found.gpus.absent,
        machine=describe_machine(),
        overhead=document.overhead(findings),
        kv=kv.kv_rows(settings.architecture, page, findings.prefill_s(), found.moved),
        interference=document.interference(findings),
        slo_tpot_s=slo_s,
        slo_batches=[] if slo_s is None else document.slo_batches(findings, slo_s),
        memory_batches=document.memory_batches(found.asked.cells, info.capacity_tokens),
        missing=document.missing(found.asked.cells, findings, found.campaign.given_up),
        notes=[note[:1000] for note in found.notes],
    )


def _page(info: Info, settings: Settings) -> int | None:
    """Pages in which KV moves: our workers move what there is."""
    return None if settings.is_emulated else info.page_tokens
