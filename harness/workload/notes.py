"""What is worth saying of a schedule beside its requests: what was left out, cut or scaled."""

from collections.abc import Iterator

from harness.settings import Load, Workload
from harness.workload.rate import shape_mean
from harness.workload.sessions import session_turns


def schedule_notes(workload: Workload, load: Load) -> tuple[str, ...]:
    """Sentences; empty where the schedule is all that was asked for, as it was asked for."""
    return tuple(_notes(workload, load))


def _notes(workload: Workload, load: Load) -> Iterator[str]:
    for why, count in workload.left_out.items():
        yield f"workload.trace: {count} requests left out: {why}"
    for why, count in workload.clipped.items():
        yield f"workload.trace: {count} lengths clipped to their bound: {why}"
    if workload.shape is not None and load.concurrency is None:
        run_s = load.duration_s
        if run_s is None:
            assert load.num_requests is not None, "a load is bounded by time or by number"
            run_s = load.num_requests / load.rate_req_per_s
        base = load.rate_req_per_s / shape_mean(workload.shape, run_s)
        yield (
            f"workload.shape: its multiple 1 is {base:.6g} req/s, so that the mean over "
            f"{run_s:g} s is {load.rate_req_per_s:g} req/s"
        )
    if workload.sessions is not None:
        turns = session_turns(workload, load)
        if turns.cut_sessions:
            yield (
                f"workload.sessions: {turns.cut_sessions} of {turns.sessions} sessions ended "
                f"before a turn that would have exceeded workload.max_tokens, {workload.max_tokens}"
            )
