"""Which part of a trace is replayed, how fast, and what becomes of lengths outside bounds.

In this order: from ``start_s`` on, for the load's duration, both in trace time; lengths outside the
bounds dropped or clipped; a share of the requests kept, each on its own draw, where the time scale
is more than the rate scale; the load's number of requests. Times are divided by the time scale.
What is left out or clipped is counted in the part.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from harness.block_keys import HASH_ID_TOKENS
from harness.core import ScenarioError
from harness.trace.record import FloatArray, Trace

Outside = Literal["drop", "clip"]
THINNED = "drawn to keep the rate (trace_time_scale over rate_scale)"
#: Child of the seed whose draws say which requests stay; 0 to 4 are those of ``harness.workload``.
_THINNING = 5


@dataclass(frozen=True, slots=True)
class Selection:
    """Bounds in whole tokens; None: none. ``time_scale`` divides the trace's times, and
    ``rate_scale`` multiplies its rate; equal, they keep every request."""

    start_s: float = 0.0
    time_scale: float = 1.0
    rate_scale: float = 1.0
    min_input_tokens: int | None = None
    max_input_tokens: int | None = None
    min_output_tokens: int | None = None
    max_output_tokens: int | None = None
    outside: Outside = "drop"

    def __post_init__(self) -> None:
        assert self.rate_scale <= self.time_scale, "a trace has no more requests than it has"


def select(
    trace: Trace,
    selection: Selection,
    duration_s: float | None,
    num_requests: int | None,
    seed: int,
) -> Trace:
    """The part, in trace time, counted from ``start_s``. ScenarioError where nothing is left."""
    part = trace
    if selection.start_s > 0:
        part = _from(part, selection.start_s)
    part = part.part(duration_s, None)
    part = _bounded(part, selection)
    if selection.rate_scale < selection.time_scale:
        sequence = np.random.SeedSequence(seed, spawn_key=(_THINNING,))
        draws = np.random.Generator(np.random.PCG64(sequence)).random(len(part.arrival_s))
        part = part.kept(draws < selection.rate_scale / selection.time_scale, THINNED)
    part = part.part(None, num_requests)
    if len(part.arrival_s) == 0:
        raise ScenarioError(
            f"Nothing is left of the trace {trace.path} ({len(trace.arrival_s)} requests): "
            f"{told(part) or 'no request lies in the part asked for'}. Widen workload.min_tokens, "
            "max_tokens, output_min_tokens and output_max_tokens, or change workload.trace_start "
            "and the duration."
        )
    return part


def planned_s(part: Trace, selection: Selection, rng: np.random.Generator) -> FloatArray:
    """When each request of a part is planned, spread inside its quantum. # (requests,)"""
    return part.spread_arrivals(rng) / selection.time_scale


def rate_req_per_s(part: Trace, selection: Selection) -> float:
    """Mean rate of the part as replayed."""
    return part.rate_req_per_s * selection.time_scale


def told(part: Trace) -> str:
    """What is not as in the file, in words; empty where all is."""
    parts = [f"{count} requests left out: {why}" for why, count in part.left_out.items()]
    parts += [f"{count} lengths clipped: {why}" for why, count in part.clipped.items()]
    return "; ".join(parts)


def _from(trace: Trace, start_s: float) -> Trace:
    """What comes before is not of the part, so it is not counted as left out of it."""
    first = int(np.searchsorted(trace.arrival_s, start_s, side="left"))
    return replace(
        trace,
        arrival_s=trace.arrival_s[first:] - start_s,
        input_tokens=trace.input_tokens[first:],
        output_tokens=trace.output_tokens[first:],
        hash_ids=trace.hash_ids[first:],
        end_s=max(0.0, trace.end_s - start_s),
    )


def _bounded(part: Trace, selection: Selection) -> Trace:
    bounds = (
        ("input", "input_tokens", selection.min_input_tokens, selection.max_input_tokens),
        ("output", "output_tokens", selection.min_output_tokens, selection.max_output_tokens),
    )
    for name, column, low, high in bounds:
        found = getattr(part, column)
        if low is not None:
            part = _side(part, column, found >= low, low, f"{name} below {low}", selection.outside)
        found = getattr(part, column)
        if high is not None:
            part = _side(
                part, column, found <= high, high, f"{name} above {high}", selection.outside
            )
    return part


def _side(
    part: Trace,
    column: str,
    inside: npt.NDArray[np.bool_],
    bound: int,
    why: str,
    outside: Outside,
) -> Trace:
    if outside == "drop":
        return part.kept(inside, f"{why} tokens")
    touched = len(inside) - int(inside.sum())
    if not touched:
        return part
    clipped = {**part.clipped, f"{why} tokens": touched}
    if column == "output_tokens":
        return replace(
            part, clipped=clipped, output_tokens=np.where(inside, part.output_tokens, bound)
        )
    inputs = np.where(inside, part.input_tokens, bound)
    hash_ids = tuple(
        chain[: math.ceil(int(new) / HASH_ID_TOKENS)]
        for chain, new in zip(part.hash_ids, inputs, strict=True)
    )
    return replace(part, clipped=clipped, input_tokens=inputs, hash_ids=hash_ids)
