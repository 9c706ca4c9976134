"""Can the client keep this schedule? What it is tried with, and what it must show.

Before a run the load process replays the schedule's hardest seconds against a server whose times
are known (``harness.load.truth``): by turns the wall second with the most requests and the one with
the most prompt tokens, the first request of each with the longest prompt of the run. A closed loop
is tried with its concurrency spread over a second. Outputs are cut to ``MOST_CHUNKS`` chunks.

    lag        = sent - planned
    TTFT error = first token as the client says - the server's write of it

Both are wall time, so that time_scale multiplies them. The server's own lateness is in neither.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from harness.core import Outcome, Request
from harness.load.truth import Truth, TruthRow
from harness.statistics import nearest_rank

SECONDS = 4
TTFT_S, CHUNK_S, MOST_CHUNKS = 0.2, 0.02, 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """Wall time. The lag is what a verdict allows; on a quiet machine of two cores the client has
    lag p99 below 2 ms and TTFT error p50 and p99 below 1 and 5 ms, so each has a margin of five."""

    lag_p99_s: float = 0.010
    ttft_error_p50_s: float = 0.005
    ttft_error_p99_s: float = 0.025


class ClientRow(msgspec.Struct):
    """What matters here of a client's row."""

    rid: str
    outcome: Outcome
    planned_mono_ns: int | None = None
    sent_mono_ns: int | None = None
    first_token_mono_ns: int | None = None
    failure_phase: str | None = None
    failure_message: str | None = None


def truth_of(tokens_per_chunk: int) -> Truth:
    """How the server answers that a scenario's client is tried against."""
    return Truth(ttft_s=TTFT_S, chunk_s=CHUNK_S, tokens_per_chunk=tokens_per_chunk)


def hardest_seconds(
    schedule: Sequence[Request],
    time_scale: float,
    tokens_per_chunk: int,
    concurrency: int | None = None,
) -> tuple[Request, ...]:
    """``SECONDS`` of wall time to try the client with, planned in wall seconds from 0.

    Empty where the schedule is.
    """
    if not schedule:
        return ()
    if concurrency is not None:
        planned_s = np.arange(len(schedule)) / concurrency
    else:
        planned_s = np.array([request.planned_s for request in schedule]) / time_scale
    tokens = np.array([request.input_tokens for request in schedule])
    first_of_each = np.arange(len(schedule))
    behind = _behind_a_second(planned_s)
    totals = np.concatenate([[0], np.cumsum(tokens)])
    seconds = [
        int(np.argmax(behind - first_of_each)),
        int(np.argmax(totals[behind] - totals[:-1])),
    ]
    longest = schedule[int(np.argmax(tokens))]
    most_tokens = 1 + MOST_CHUNKS * tokens_per_chunk
    tried: list[Request] = []
    for second in range(SECONDS):
        start = seconds[second % len(seconds)]
        for at in range(start, int(behind[start])):
            like = longest if at == start else schedule[at]
            tried.append(
                replace(
                    like,
                    rid=f"self-test-{len(tried)}",
                    index=len(tried),
                    planned_s=second + float(planned_s[at] - planned_s[start]),
                    output_tokens=min(schedule[at].output_tokens, most_tokens),
                )
            )
    return tuple(tried)


def figures(
    tried: Sequence[Request], rows: Iterable[ClientRow], truth: Iterable[TruthRow]
) -> dict[str, Any]:
    """What the client did, as the manifest has it; null where nothing was measured."""
    written_ns = {row.rid: row.written_mono_ns[0] for row in truth if row.written_mono_ns}
    lags_s, errors_s, failures = [], [], []
    completed = 0
    for row in rows:
        if row.sent_mono_ns is not None and row.planned_mono_ns is not None:
            lags_s.append((row.sent_mono_ns - row.planned_mono_ns) / 1e9)
        if row.outcome != "completed":
            failures.append(f"{row.rid} in {row.failure_phase}: {row.failure_message}")
            continue
        completed += 1
        if row.first_token_mono_ns is not None and row.rid in written_ns:
            errors_s.append((row.first_token_mono_ns - written_ns[row.rid]) / 1e9)
    return {
        "requests": len(tried),
        "completed": completed,
        "first_failure": failures[0][:500] if failures else None,
        "peak_req_per_wall_s": peak_rate(np.array([request.planned_s for request in tried])),
        "longest_prompt_tokens": max((request.input_tokens for request in tried), default=None),
        "lag_p50_wall_s": nearest_rank(lags_s, 0.5),
        "lag_p99_wall_s": nearest_rank(lags_s, 0.99),
        "ttft_error_p50_wall_s": nearest_rank(errors_s, 0.5),
        "ttft_error_p99_wall_s": nearest_rank(errors_s, 0.99),
    }


def fault_of(result: dict[str, Any], bounds: Bounds) -> str | None:
    """Why a run with this client would not be worth its time; None where nothing is wrong."""
    if result["completed"] < result["requests"]:
        failed = result["requests"] - result["completed"]
        return f"{failed} of {result['requests']} requests failed, {result['first_failure']}"
    for key, words, bound_s in (
        ("lag_p99_wall_s", "send lag p99", bounds.lag_p99_s),
        ("ttft_error_p50_wall_s", "TTFT error p50", bounds.ttft_error_p50_s),
        ("ttft_error_p99_wall_s", "TTFT error p99", bounds.ttft_error_p99_s),
    ):
        value_s = result[key]
        if value_s is None or abs(value_s) > bound_s:
            said = "unknown" if value_s is None else f"{1e3 * value_s:.1f} ms"
            return f"{words} is {said}, bound {1e3 * bound_s:g} ms of wall time"
    return None


def peak_rate(planned_s: npt.NDArray[np.float64]) -> int:
    """The most requests in any second."""
    if not len(planned_s):
        return 0
    return int((_behind_a_second(planned_s) - np.arange(len(planned_s))).max())


def _behind_a_second(planned_s: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """For each request the first one that is a second later or more; in whole nanoseconds, so that
    a thousand times a millisecond is a second."""
    planned_ns = np.rint(planned_s * 1e9).astype(np.int64)
    return np.searchsorted(planned_ns, planned_ns + 1_000_000_000)
