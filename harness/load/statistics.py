"""What Locust's own statistics and web UI show of a run.

One request event a request, fired when it has ended, with its TTFT as response time: Locust's
totals are then the run's requests and failures, which are checked against the spool. Beside it are
entries of their own type that no total counts: ``TTFT``, ``E2E`` and ``TPOT`` (one value a
request), ``ITL`` (one value a chunk, its gap shared by its tokens), all from the planned send or
between chunks, in milliseconds as Locust has it, and ``FAILED``, one entry a phase. Locust keeps
rounded values in buckets: the figures of a verdict come from the records, never from here.
"""

import itertools

from locust.env import Environment
from locust.stats import RequestStats

from harness.core import LoadError
from harness.load.completion import StreamError
from harness.load.spool import Row

METHOD = "POST"


def tell_locust(environment: Environment, name: str, row: Row) -> None:
    """Fire the request event of a request that has ended, and log its entries."""
    assert row.planned_mono_ns is not None
    ttft_ms = _since_ms(row.planned_mono_ns, row.first_token_mono_ns)
    exception = None
    if row.failure_phase is not None:
        # Locust keeps one entry for each distinct text: the phase, never the message.
        exception = StreamError(row.failure_phase, f"failed in phase {row.failure_phase}")
    environment.events.request.fire(
        request_type=METHOD,
        name=name,
        response_time=ttft_ms,
        response_length=row.completion_tokens or 0,
        exception=exception,
        context={"rid": row.rid, "ttft_ms": ttft_ms, "outcome": row.outcome},
    )
    _log_entries(environment.stats, name, row, ttft_ms)


def check_statistics(stats: RequestStats, name: str, completed: int, failed: int) -> None:
    """Locust counted the same requests and failures as the spools. Raises LoadError."""
    entry, total = stats.get(name, METHOD), stats.total
    seen = (entry.num_requests, entry.num_failures)
    written = (completed + failed, failed)
    if seen != written or (total.num_requests, total.num_failures) != written:
        raise LoadError(
            f"Locust counted {seen[0]} requests with {seen[1]} failures "
            f"({total.num_requests} and {total.num_failures} in all), the spool has "
            f"{written[0]} with {written[1]}."
        )


def _log_entries(stats: RequestStats, name: str, row: Row, ttft_ms: float | None) -> None:
    if row.failure_phase is not None:
        stats.entries[(row.failure_phase, "FAILED")].log(
            _since_ms(row.planned_mono_ns, row.end_mono_ns), 0
        )
        return
    stats.entries[(name, "TTFT")].log(ttft_ms, 0)
    stats.entries[(name, "E2E")].log(_since_ms(row.planned_mono_ns, row.end_mono_ns), 0)
    tokens = sum(row.chunk_tokens)
    if tokens < 2:
        return
    between_ms = (row.chunk_mono_ns[-1] - row.chunk_mono_ns[0]) / 1e6
    stats.entries[(name, "TPOT")].log(between_ms / (tokens - 1), 0)
    itl = stats.entries[(name, "ITL")]
    pairs = itertools.pairwise(zip(row.chunk_mono_ns, row.chunk_tokens, strict=True))
    for (before_ns, _), (at_ns, num_tokens) in pairs:
        if num_tokens:
            itl.log((at_ns - before_ns) / 1e6 / num_tokens, 0)


def _since_ms(planned_mono_ns: int | None, at_mono_ns: int | None) -> float | None:
    if planned_mono_ns is None or at_mono_ns is None:
        return None
    return (at_mono_ns - planned_mono_ns) / 1e6
