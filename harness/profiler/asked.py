"""What a session is asked for, and which points that comes to on the engine it meets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.architecture import Architecture
from harness.core import ScenarioError
from harness.profiler.decode import STEPS
from harness.profiler.plan import (
    BATCHES,
    CACHED_SHARES,
    CONTEXTS,
    SHORTEST_TOKENS,
    Cell,
    decode_cells,
    doubling,
    prefill_cells,
)
from harness.profiler.target import Info

#: Where the engine does not say how many requests it runs at once.
DEFAULT_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """What a session is asked for; None and empty: chosen by what the engine says."""

    out: Path
    architecture: Architecture
    hardware: str
    gpus: int
    bound: float
    budget_s: float
    seed: int
    lengths: tuple[int, ...] = ()
    cached: tuple[int, ...] | None = None
    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    steps: int = STEPS
    wants_decode: bool = True
    slo_tpot_s: float | None = None
    wants_capture: bool = False
    token_ids: tuple[int, int] | None = None
    limit_tokens: int | None = None
    noise_cv: float | None = None
    is_emulated: bool = False
    notes: str = ""
    #: What is measured beside the points, at the end, and said in words.
    measured_notes: Callable[[], Sequence[str]] = tuple
    identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """The cells of a session, and what is not among them and why."""

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def asked_cells(settings: Settings, info: Info, *, is_pair: bool, from_inside: bool) -> Asked:
    """Which points; ScenarioError where neither the engine nor a flag says up to which length, and
    where fewer than two lengths fit."""
    notes: list[str] = []
    limit = info.limit_tokens or settings.limit_tokens
    if limit is None and not settings.lengths:
        raise ScenarioError("The engine does not say how long a prompt may be: give --lengths.")
    limit = (limit or max(settings.lengths)) - (info.limit_tokens is not None)
    lengths = _lengths(settings, limit, notes)
    cached = settings.cached
    if cached is None:
        cached = tuple(limit // share for share in CACHED_SHARES) if info.has_cache else ()
    page = info.page_tokens
    cached = tuple(sorted({one // page * page for one in cached} - {0}))
    if not info.has_cache:
        notes.append("cached prefixes: not measured, the engine keeps no prefix")
    prefill = prefill_cells(lengths, cached, limit)
    notes += [
        f"cached prefix {one:,}: not measured, fewer than two lengths fit behind it"
        for one in set(cached) - {cell.cached_tokens for cell in prefill}
    ]
    grid = _grid(settings, info, limit, notes) if settings.wants_decode else ((), ())
    decode, dropped = decode_cells(*grid, info.capacity_tokens)
    notes += [f"{cell.label}: memory holds {info.capacity_tokens:,} tokens" for cell in dropped]
    beside = _beside(prefill, decode, info, from_inside=from_inside) if is_pair else ()
    if not is_pair:
        notes.append("KV traffic beside compute: not measured, that needs a disaggregated pair")
    return Asked((*prefill, *decode, *beside), tuple(notes))


def _lengths(settings: Settings, limit: int, notes: list[str]) -> tuple[int, ...]:
    """Those within the limit; of the others there is a note."""
    if not settings.lengths:
        if limit < 2:
            raise ScenarioError(
                f"The engine takes prompts of up to {limit:,} tokens; a curve needs two lengths."
            )
        return doubling(min(SHORTEST_TOKENS, limit // 2), limit)
    asked = sorted(set(settings.lengths))
    fitting = tuple(one for one in asked if one <= limit)
    if len(fitting) < 2:
        given = ",".join(map(str, asked))
        raise ScenarioError(
            f"--lengths {given}: a curve needs two lengths or more, and the limit here is "
            f"{limit:,} tokens. Give two that fit, or leave the flag out."
        )
    notes += [
        f"prefill {one:,}: not measured, the limit is {limit:,} tokens"
        for one in asked[len(fitting) :]
    ]
    return fitting


def _grid(
    settings: Settings, info: Info, limit: int, notes: list[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    contexts = settings.contexts or tuple(one for one in CONTEXTS if one <= 0.9 * limit)
    if len(contexts) < 2:
        contexts = settings.contexts or (max(limit // 8, 64), max(limit // 2, 128))
    most = info.max_running
    usual = tuple(one for one in BATCHES if one <= (most or DEFAULT_BATCHES))
    if most is not None and most <= BATCHES[-1]:
        usual = tuple(sorted({*usual, most}))
    if most is None and not settings.batches:
        notes.append(
            f"decode: batches up to {DEFAULT_BATCHES}, since the engine does not say how many "
            "requests it runs at once; --batches measures others"
        )
    batches = settings.batches or usual
    kept = tuple(b for b in batches if most is None or b <= most)
    notes += [
        f"decode batch {one}: not measured, the engine runs {most} requests at once"
        for one in batches
        if one not in kept
    ]
    return kept, contexts


def _beside(
    prefill: tuple[Cell, ...], decode: tuple[Cell, ...], info: Info, *, from_inside: bool
) -> tuple[Cell, ...]:
    """One point each beside traffic: the middle of the lengths, the largest batch that leaves the
    arriving requests a place."""
    plain = [cell.new_tokens for cell in prefill if not cell.cached_tokens]
    middle = plain[len(plain) // 2]
    cells: list[Cell] = [Cell("prefill_under_egress", middle)] if from_inside else []
    fitting = [c for c in decode if info.max_running is None or c.batch < info.max_running]
    if fitting:
        batch = max(cell.batch for cell in fitting)
        context = sorted({c.context_tokens for c in fitting if c.batch == batch})[0]
        cells.append(Cell("decode_under_ingress", middle, 0, batch, context))
    return tuple(cells)
