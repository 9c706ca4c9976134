"""Sessions: conversations and agents, whose every turn carries all that was said before it.

With p_1 drawn from the workload's law of prompt lengths, o_k from that of outputs and d_k new
tokens from the law of increments,

    prompt of turn k:  p_k = p_{k-1} + o_{k-1} + d_k

The number of turns is fixed, or geometric (no more than ten times its mean). A session ends when
it has had them, or before a turn that would exceed ``max_tokens``. Times between the planned times
of turns are gamma of a given mean and cv. Sessions start as the workload's arrivals say, at the
rate of requests over the mean number of turns that they have, which a pilot of sessions tells.

Prompts share their beginning by hash ids, one for each 512 tokens, of which the last may be part:
turn k has ceil(p_k / 512) of the session's, so that p_{k+1} literally begins with p_k. All sessions
have their first ``shared_tokens`` in common (a system prompt, tools), as far as they fill blocks.

The run is a window of the process in its steady state: sessions that began before it go on in it,
and the first turn of them that is in it finds nothing cached. Draws are by session, then by turn,
so that a longer run begins like a shorter one.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.block_keys import HASH_ID_TOKENS
from harness.core import ScenarioError
from harness.scenario_tables.offered import MAX_REQUESTS
from harness.schedule import HashChains
from harness.settings import Load, Sessions, Workload
from harness.workload.arrivals import EVEN_CV, arrivals_until
from harness.workload.draws import Streams
from harness.workload_resolution import increment_law, input_law, output_law

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Turns made for a run, its lead included.
_MAX_TURNS = 4 * MAX_REQUESTS
_MOST_TURNS = 10
_PILOT = 20_000
#: Sessions that outlive the lead are missing at the beginning of the run.
_LEAD_QUANTILE = 0.999
#: Sessions that are drawn, and whose hash ids are written, at a time: that bounds the memory.
_DRAWN = 16_384
_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of the run by planned time; arrays are (turns,).

    ``cut_sessions`` of the ``sessions`` that have a turn in the run ended before one too long.
    """

    planned_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    chains: HashChains
    sessions: int
    cut_sessions: int


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Whole sessions. Arrays are (sessions,) or (turns,), turns of a session in a row."""

    turns: IntArray
    first: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    after_ns: IntArray
    fits: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Part:
    """Turns in the run, and of every session its longest prompt and whether it was cut."""

    planned_ns: IntArray
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    session: npt.NDArray[np.int32]
    longest: IntArray
    cut: npt.NDArray[np.bool_]


def session_turns(workload: Workload, load: Load) -> Turns:
    """The turns that are planned in the run. ScenarioError where there would be too many."""
    pilot = _drawn(workload, _PILOT, Streams.of(0))
    had = pilot.fits.sum() / _PILOT
    last = pilot.first + np.add.reduceat(pilot.fits, pilot.first) - 1
    lead_s = float(f"{np.quantile(pilot.after_ns[last], _LEAD_QUANTILE) / 1e9:.3g}")
    rate = load.rate_req_per_s / float(had)
    if load.duration_s is not None:
        found = _in_run(workload, load.seed, rate, load.duration_s, lead_s)
        if found is None:
            raise ScenarioError("No session starts; raise load.rate_req_per_s or the duration.")
        return found
    assert load.num_requests is not None, "a load is bounded by time or by number"
    run_s = load.num_requests / load.rate_req_per_s
    for doubled in range(8):
        found = _in_run(workload, load.seed, rate, run_s * 1.1 * 2**doubled, lead_s)
        if found is not None and len(found.planned_s) >= load.num_requests:
            return _beginning(found, load.num_requests)
    raise ScenarioError(
        f"Fewer than load.num_requests = {load.num_requests} turns arrive in 140 times the time "
        "that they take at load.rate_req_per_s; bound the load by load.duration."
    )


def _beginning(turns: Turns, count: int) -> Turns:
    return Turns(
        turns.planned_s[:count],
        turns.input_tokens[:count],
        turns.output_tokens[:count],
        turns.chains[:count],
        turns.sessions,
        turns.cut_sessions,
    )


def _in_run(
    workload: Workload, seed: int, rate: float, run_s: float, lead_s: float
) -> Turns | None:
    """Turns planned from 0 to ``run_s``, of sessions that start at ``rate``; None without any."""
    sessions = workload.sessions
    assert sessions is not None
    streams = Streams.of(seed)
    expected = rate * (run_s + lead_s) * sessions.turns
    if expected > _MAX_TURNS:
        raise ScenarioError(
            f"workload.sessions would take about {expected:.0f} turns for the run and the "
            f"{lead_s:g} s before it, of which at most {_MAX_TURNS} are made. Shorten the run, "
            "workload.sessions.think_time or turns."
        )
    starts_s = arrivals_until(workload, rate, run_s, streams, before_s=lead_s)
    if len(starts_s) == 0:
        return None
    starts_ns = np.rint(starts_s * 1e9).astype(np.int64)
    parts = [
        _part_in_run(_drawn(workload, len(some), streams), some, at, round(run_s * 1e9))
        for at in range(0, len(starts_ns), _DRAWN)
        for some in [starts_ns[at : at + _DRAWN]]
    ]
    planned_ns = np.concatenate([part.planned_ns for part in parts])
    order = np.argsort(planned_ns, kind="stable")
    planned_s = planned_ns[order] / 1e9
    inputs = np.concatenate([part.input_tokens for part in parts])[order].astype(np.int64)
    outputs = np.concatenate([part.output_tokens for part in parts])[order].astype(np.int64)
    session = np.concatenate([part.session for part in parts])[order]
    longest = np.concatenate([part.longest for part in parts])
    cut = np.concatenate([part.cut for part in parts])
    present = np.zeros(len(starts_ns), dtype=bool)
    present[session] = True
    del parts, planned_ns, order
    chains = _chains(inputs, session, longest, present, sessions.shared_tokens // HASH_ID_TOKENS)
    return Turns(planned_s, inputs, outputs, chains, int(present.sum()), int((cut & present).sum()))


def _part_in_run(drawn: _Drawn, starts_ns: IntArray, at: int, run_ns: int) -> _Part:
    planned_ns = np.repeat(starts_ns, drawn.turns) + drawn.after_ns
    rows = np.flatnonzero(drawn.fits & (planned_ns >= 0) & (planned_ns < run_ns))
    had = np.add.reduceat(drawn.fits, drawn.first, dtype=np.int64)
    longest = drawn.input_tokens[drawn.first + np.maximum(had - 1, 0)]
    return _Part(
        planned_ns=planned_ns[rows],
        input_tokens=drawn.input_tokens[rows].astype(np.int32),
        output_tokens=drawn.output_tokens[rows].astype(np.int32),
        session=np.repeat(np.arange(at, at + len(starts_ns)), drawn.turns)[rows].astype(np.int32),
        longest=np.where(had > 0, longest, 0),
        cut=had < drawn.turns,
    )


def _drawn(workload: Workload, count: int, streams: Streams) -> _Drawn:
    sessions = workload.sessions
    assert sessions is not None
    turns = _turn_counts(sessions, count, streams.turns)
    total = int(turns.sum())
    first = np.cumsum(turns) - turns
    outputs = _whole(output_law(workload).quantile(streams.outputs.random(total)))
    grows = _whole(increment_law(sessions).quantile(streams.increments.random(total)))
    grows[1:] += outputs[:-1]
    grows[first] = _whole(input_law(workload).quantile(streams.lengths.random(count)))
    prompts = _within(grows, first, turns)
    thinks_ns = np.rint(_thinking_s(sessions, total, streams.thinking) * 1e9).astype(np.int64)
    thinks_ns[first] = 0
    after_ns = _within(thinks_ns, first, turns)
    return _Drawn(turns, first, prompts, outputs, after_ns, prompts <= workload.max_tokens)


def _turn_counts(sessions: Sessions, count: int, rng: np.random.Generator) -> IntArray:
    draws = rng.random(count)
    if sessions.turns_law == "fixed" or sessions.turns <= 1:
        return np.full(count, round(sessions.turns), dtype=np.int64)
    found = np.ceil(np.log1p(-draws) / math.log1p(-1 / sessions.turns))
    return np.clip(found, 1, math.ceil(_MOST_TURNS * sessions.turns)).astype(np.int64)


def _thinking_s(sessions: Sessions, count: int, rng: np.random.Generator) -> FloatArray:
    if sessions.think_cv < EVEN_CV:
        return np.full(count, sessions.think_time_s)
    scv = sessions.think_cv * sessions.think_cv
    return np.asarray(rng.standard_gamma(1 / scv, count) * (scv * sessions.think_time_s))


def _chains(
    inputs: IntArray,
    session: npt.NDArray[np.int32],
    longest: IntArray,
    present: npt.NDArray[np.bool_],
    shared: int,
) -> HashChains:
    """Hash ids of turns with these prompts, whose sessions have these longest ones. # (sessions,)

    Ids below ``shared`` are in all sessions; a session's own follow those of the session before.
    """
    blocks = -(-longest // HASH_ID_TOKENS)
    own = np.maximum(blocks - shared, 0)
    base = shared + np.cumsum(own) - own
    numbers = np.flatnonzero(present)
    starts = np.zeros(len(longest), dtype=np.int64)
    starts[numbers] = np.cumsum(blocks[numbers]) - blocks[numbers]
    size, most = int(blocks[numbers].sum()), int(base[-1] + own[-1])
    flat = np.empty(size, np.uint32) if most < 2**32 else np.empty(size, np.int64)
    for at in range(0, len(numbers), _CHUNK):
        part = numbers[at : at + _CHUNK]
        sizes = blocks[part]
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        begin = int(starts[part[0]])
        flat[begin : begin + len(within)] = np.where(
            within < shared, within, np.repeat(base[part] - shared, sizes) + within
        )
    return HashChains(flat, starts[session], -(-inputs // HASH_ID_TOKENS))


def _within(steps: IntArray, first: IntArray, turns: IntArray) -> IntArray:
    """Sums over the turns of each session up to each of them."""
    sums = np.cumsum(steps)
    sums -= np.repeat(sums[first] - steps[first], turns)
    return sums


def _whole(lengths: FloatArray) -> IntArray:
    return np.rint(lengths).astype(np.int64)
