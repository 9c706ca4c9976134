"""The schedule itself: arrivals and lengths of a workload under a load, put together."""

import numpy as np
import numpy.typing as npt

from harness.core import ScenarioError
from harness.schedule import HashChains, Schedule
from harness.settings import Load, Workload
from harness.trace import Trace, planned_s, read_trace, select
from harness.workload.arrivals import arrivals_until, first_arrivals
from harness.workload.draws import Streams
from harness.workload.sessions import session_turns
from harness.workload_resolution import input_law, output_law

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def build_schedule(workload: Workload, load: Load) -> Schedule:
    """Every request of a run in order of ``planned_s``, which counts from the start of the load.

    Raises ScenarioError where a trace cannot be read or the load's bounds leave no request.
    """
    streams = Streams.of(load.seed)
    if workload.trace is not None:
        return _replayed(workload, load, streams)
    if workload.sessions is not None:
        turns = session_turns(workload, load)
        if len(turns.planned_s) == 0:
            raise _nothing(load)
        return _scheduled(turns.planned_s, turns.input_tokens, turns.output_tokens, turns.chains)
    arrivals_s = _arrivals_s(workload, load, streams)
    count = len(arrivals_s)
    if count == 0:
        raise _nothing(load)
    inputs = _whole(input_law(workload).quantile(streams.lengths.random(count)), workload)
    outputs = np.rint(output_law(workload).quantile(streams.outputs.random(count)))
    return _scheduled(arrivals_s, inputs, outputs.astype(np.int64), None)


def trace_part(workload: Workload, load: Load) -> Trace:
    """The part of its trace that a workload replays. ScenarioError where the file has changed."""
    assert workload.trace is not None
    assert workload.selection is not None, "a trace has its selection"
    selection = workload.selection
    trace = read_trace(
        workload.trace,
        workload.trace_format,
        seed=load.seed,
        start_s=selection.start_s,
        duration_s=load.duration_s,
    )
    if trace.sha256 != workload.trace_sha256:
        raise ScenarioError(
            f"The trace file {workload.trace} has changed since the scenario was loaded; start "
            "again with a file that nobody writes to."
        )
    return select(trace, selection, load.duration_s, load.num_requests, load.seed)


def _replayed(workload: Workload, load: Load, streams: Streams) -> Schedule:
    part = trace_part(workload, load)
    assert workload.selection is not None
    arrivals_s = planned_s(part, workload.selection, streams.spread)
    if load.concurrency is not None:
        arrivals_s = np.zeros(len(arrivals_s))
    chains = HashChains.of(part.hash_ids)
    return _scheduled(arrivals_s, part.input_tokens, part.output_tokens, chains)


def _arrivals_s(workload: Workload, load: Load, streams: Streams) -> FloatArray:
    """Arrival times before ``duration_s``, else the first ``num_requests``, ascending."""
    if load.concurrency is not None:
        assert load.num_requests is not None, "a closed loop is bounded by number"
        return np.zeros(load.num_requests)
    if load.duration_s is not None:
        return arrivals_until(workload, load.rate_req_per_s, load.duration_s, streams)
    assert load.num_requests is not None, "a load is bounded by time or by number"
    return first_arrivals(workload, load.rate_req_per_s, load.num_requests, streams)


def _scheduled(
    arrivals_s: FloatArray, inputs: IntArray, outputs: IntArray, chains: HashChains | None
) -> Schedule:
    # Nanoseconds: the last bits of a logarithm differ between machines, a schedule must not.
    return Schedule(np.arange(len(inputs)), np.round(arrivals_s, 9), inputs, outputs, chains)


def _whole(lengths: FloatArray, workload: Workload) -> IntArray:
    """Whole tokens; the bounds are whole, so that rounding stays inside them."""
    rounded = np.rint(lengths).astype(np.int64)
    assert workload.min_tokens <= rounded.min()
    assert rounded.max() <= workload.max_tokens
    return rounded


def _nothing(load: Load) -> ScenarioError:
    return ScenarioError(
        f"No request arrives: {load.rate_req_per_s:g} req/s over load.duration "
        f"{load.duration_s} s with seed {load.seed} is an empty schedule. Raise the rate or "
        "the duration."
    )
