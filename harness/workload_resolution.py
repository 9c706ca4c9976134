"""From the tables of workload and load to their records: bounds across keys, traces.

Each function takes validated tables and raises ScenarioError, one paragraph that names the key.
``where`` names the file (and flags) in it. Arrivals are resolved in ``harness.arrival_resolution``.
"""

import math
from dataclasses import replace

from harness.arrival_resolution import (
    check_arrivals,
    check_loop,
    resolve_shape,
    resolve_states,
)
from harness.lognormal import TruncatedLogNormal
from harness.resolution import missing, wrong
from harness.scenario_tables.offered import (
    MAX_REQUESTS,
    LoadTable,
    PrefixTable,
    SessionsTable,
    WorkloadTable,
)
from harness.settings import Load, Sessions, Workload
from harness.trace import Selection, Trace, rate_req_per_s, select

#: Less of the untruncated law than this inside the bounds is a mistake in mu, sigma or the bounds.
_MIN_MASS = 1e-6

_LENGTH_KEYS = ("mu", "sigma", "min_tokens", "max_tokens", "output_tokens")
_OUTPUT_KEYS = ("output_sigma", "output_min_tokens", "output_max_tokens")
_BOUND_KEYS = ("min_tokens", "max_tokens", "output_min_tokens", "output_max_tokens")
#: Keys that a trace's lengths and arrivals leave nothing to say.
_LAW_KEYS = (
    "arrivals",
    "cv",
    "mu",
    "sigma",
    "output_tokens",
    "output_sigma",
    "on_duration",
    "off_duration",
    "on_rate_multiple",
    "states",
    "shape",
    "sessions",
)
#: Keys that say something of a trace alone.
TRACE_KEYS = ("trace_format", "trace_start", "trace_time_scale", "outside_bounds")


def check_prefix(prefix: PrefixTable, where: str) -> None:
    """A share of requests that nothing counts would be without effect."""
    if prefix.agent_share > 0 and prefix.model != "share":
        raise wrong(
            "prefix.agent_share",
            where,
            f'it has no effect with prefix.model = "{prefix.model}"; set prefix.model = "share", '
            "or leave it out",
        )


def check_workload(workload: WorkloadTable, load: LoadTable, where: str) -> None:
    """What can be known of workload and load without opening a trace."""
    check_loop(workload, load, where)
    if workload.trace is None:
        _check_lengths(workload, where)
        _check_load(workload, load, where)
        if workload.sessions is not None:
            _check_sessions(workload.sessions, workload, load, where)
        if useless := [key for key in TRACE_KEYS if getattr(workload, key) is not None]:
            raise wrong(
                f"workload.{useless[0]}", where, "there is no workload.trace it could be of"
            )
        return
    if useless := [key for key in _LAW_KEYS if key in workload.model_fields_set]:
        raise wrong(
            f"workload.{useless[0]}",
            where,
            "a trace brings its own lengths and arrivals, so this key would have no effect; "
            "remove it, or replay the trace in place of this workload with --trace",
        )
    if load.rate_req_per_s is not None:
        raise wrong(
            "load.rate_req_per_s",
            where,
            "a trace brings its own rate; scale it with workload.rate_scale, or replay the "
            "trace in place of this workload with --trace",
        )
    check_selection(workload, workload.rate_scale, where)


def check_selection(workload: WorkloadTable, rate_scale: float, where: str) -> None:
    """Bounds of a trace's lengths, which need a policy, and its two scales."""
    bounds = [key for key in _BOUND_KEYS if getattr(workload, key) is not None]
    if bounds and workload.outside_bounds is None:
        raise missing(
            "workload.outside_bounds",
            where,
            f'workload.{bounds[0]} bounds the trace\'s lengths: say "drop" to leave out what is '
            'outside, or "clip" to cut it to the bound',
        )
    if workload.outside_bounds is not None and not bounds:
        raise wrong("workload.outside_bounds", where, f"it needs one of {', '.join(_BOUND_KEYS)}")
    for low, high in (_BOUND_KEYS[:2], _BOUND_KEYS[2:]):
        least, most = getattr(workload, low), getattr(workload, high)
        if least is not None and most is not None and least > most:
            raise wrong(f"workload.{low}", where, f"{least} is more than workload.{high}, {most}")
    if workload.trace_time_scale is not None and workload.trace_time_scale < rate_scale:
        raise wrong(
            "workload.trace_time_scale",
            where,
            f"{workload.trace_time_scale:g} is less than workload.rate_scale, {rate_scale:g}, so "
            "that the trace would need more requests than it has; raise it, or lower the rate",
        )


def _check_lengths(table: WorkloadTable, where: str) -> None:
    for key in _LENGTH_KEYS:
        if getattr(table, key) is None:
            raise missing(
                f"workload.{key}", where, "without a 'workload.trace' the lengths need it"
            )
    low, high = _number(table.min_tokens), _number(table.max_tokens)
    mu, sigma = _number(table.mu), _number(table.sigma)
    _check_law(TruncatedLogNormal(mu, sigma, low, high), "workload.", where)
    _check_spread("workload.output_", table.output_sigma, _output_bounds(table), where)
    if table.output_sigma is not None:
        _check_law(output_law(_synthetic(table)), "workload.output_", where)


def _output_bounds(table: WorkloadTable) -> tuple[int | None, int | None]:
    return table.output_min_tokens, table.output_max_tokens


def _check_spread(
    prefix: str, sigma: float | None, bounds: tuple[int | None, int | None], where: str
) -> None:
    """A sigma needs its bounds, and bounds their sigma."""
    for key, value in zip(("min_tokens", "max_tokens"), bounds, strict=True):
        if sigma is None and value is not None:
            raise wrong(f"{prefix}{key}", where, f"it bounds what {prefix}sigma draws")
        if sigma is not None and value is None:
            raise missing(f"{prefix}{key}", where, f"{prefix}sigma needs bounds")


def _check_law(law: TruncatedLogNormal, prefix: str, where: str) -> None:
    if law.low > law.high:
        raise wrong(
            f"{prefix}min_tokens",
            where,
            f"{law.low:g} is more than {prefix}max_tokens, {law.high:g}",
        )
    if law.mass < _MIN_MASS:
        raise wrong(
            f"{prefix}min_tokens",
            where,
            f"hardly any length of a log-normal with mu {law.mu:g} and sigma {law.sigma:g} lies "
            f"from {law.low:g} to {law.high:g}; move the bounds or the law",
        )


def _check_load(workload: WorkloadTable, load: LoadTable, where: str) -> None:
    if load.concurrency is not None:
        return
    if load.rate_req_per_s is None:
        raise missing("load.rate_req_per_s", where, "without a 'workload.trace' a load needs it")
    if load.num_requests is None and load.duration is None:
        raise missing("load.num_requests", where, "give it, or load.duration")
    rate = load.rate_req_per_s * workload.rate_scale
    if load.duration is not None and rate * load.duration > MAX_REQUESTS:
        raise wrong(
            "load.duration",
            where,
            f"{rate:g} req/s over {load.duration:g} s are more than {MAX_REQUESTS} requests",
        )
    check_arrivals(workload, load.duration or _number(load.num_requests) / rate, where)


def _check_sessions(
    sessions: SessionsTable, workload: WorkloadTable, load: LoadTable, where: str
) -> None:
    prefix = "workload.sessions."
    if load.concurrency is not None:
        raise wrong(
            "load.concurrency",
            where,
            "the turns of workload.sessions are planned in an open loop; remove one of the two",
        )
    if sessions.turns_law == "fixed" and sessions.turns != int(sessions.turns):
        raise wrong(f"{prefix}turns", where, 'with turns_law = "fixed" it must be whole')
    if sessions.shared_tokens >= _number(workload.min_tokens):
        raise wrong(
            f"{prefix}shared_tokens",
            where,
            f"{sessions.shared_tokens} shared tokens leave nothing of a first prompt of "
            f"workload.min_tokens, {workload.min_tokens}",
        )
    bounds = (sessions.increment_min_tokens, sessions.increment_max_tokens)
    _check_spread(f"{prefix}increment_", sessions.increment_sigma, bounds, where)
    if sessions.increment_sigma is not None:
        _check_law(increment_law(_resolve_sessions(sessions)), f"{prefix}increment_", where)


def synthetic(workload: WorkloadTable, load: LoadTable) -> tuple[Workload, Load]:
    """Records of a log-normal workload that ``check_workload`` let pass."""
    asked = asked_of_trace(load)
    if load.concurrency is not None:
        return _synthetic(workload), asked
    rate = _number(load.rate_req_per_s) * workload.rate_scale
    return _synthetic(workload), replace(asked, rate_req_per_s=rate)


def _synthetic(table: WorkloadTable) -> Workload:
    assert table.min_tokens is not None
    assert table.max_tokens is not None
    assert table.output_tokens is not None
    fixed = table.output_sigma is None
    return Workload(
        mu=table.mu,
        sigma=table.sigma,
        min_tokens=table.min_tokens,
        max_tokens=table.max_tokens,
        output_tokens=table.output_tokens,
        output_sigma=table.output_sigma,
        output_min_tokens=table.output_tokens if fixed else int(_number(table.output_min_tokens)),
        output_max_tokens=table.output_tokens if fixed else int(_number(table.output_max_tokens)),
        arrivals=table.arrivals,
        cv=table.cv,
        on_duration_s=table.on_duration,
        off_duration_s=table.off_duration,
        on_rate_multiple=table.on_rate_multiple,
        states=resolve_states(table.states),
        shape=None if table.shape is None else resolve_shape(table.shape),
        sessions=None if table.sessions is None else _resolve_sessions(table.sessions),
        trace=None,
        trace_format=None,
        trace_sha256=None,
        selection=None,
        left_out={},
        clipped={},
        rate_scale=table.rate_scale,
    )


def _resolve_sessions(table: SessionsTable) -> Sessions:
    low, high = table.increment_min_tokens, table.increment_max_tokens
    return Sessions(
        turns=table.turns,
        turns_law=table.turns_law,
        think_time_s=table.think_time,
        think_cv=table.think_cv,
        increment_tokens=table.increment_tokens,
        increment_sigma=table.increment_sigma,
        increment_min_tokens=table.increment_tokens if low is None else low,
        increment_max_tokens=table.increment_tokens if high is None else high,
        shared_tokens=table.shared_tokens,
    )


def resolve_selection(table: WorkloadTable, rate_scale: float) -> Selection:
    """What of a trace is replayed, of a table that ``check_selection`` let pass."""
    return Selection(
        start_s=table.trace_start or 0.0,
        time_scale=table.trace_time_scale or rate_scale,
        rate_scale=rate_scale,
        min_input_tokens=table.min_tokens,
        max_input_tokens=table.max_tokens,
        min_output_tokens=table.output_min_tokens,
        max_output_tokens=table.output_max_tokens,
        outside=table.outside_bounds or "drop",
    )


def traced(trace: Trace, selection: Selection, asked: Load) -> tuple[Workload, Load]:
    """Records of the part of a trace that is selected, whose rate is that of the part."""
    part = select(trace, selection, asked.duration_s, asked.num_requests, asked.seed)
    inputs, outputs = part.input_tokens, part.output_tokens
    workload = Workload(
        mu=None,
        sigma=None,
        min_tokens=int(inputs.min()),
        max_tokens=int(inputs.max()),
        output_tokens=max(1, round(float(outputs.mean()))),
        output_sigma=None,
        output_min_tokens=int(outputs.min()),
        output_max_tokens=int(outputs.max()),
        arrivals="gamma",
        cv=1.0,
        on_duration_s=None,
        off_duration_s=None,
        on_rate_multiple=None,
        states=(),
        shape=None,
        sessions=None,
        trace=trace.path,
        trace_format=trace.format,
        trace_sha256=trace.sha256,
        selection=selection,
        left_out=dict(part.left_out),
        clipped=dict(part.clipped),
        rate_scale=selection.rate_scale,
    )
    if asked.concurrency is not None:
        return workload, asked
    return workload, replace(asked, rate_req_per_s=rate_req_per_s(part, selection))


def asked_of_trace(load: LoadTable) -> Load:
    """What a load asks for, without the rate that it has in an open loop alone."""
    return Load(
        rate_req_per_s=math.inf,
        num_requests=load.num_requests,
        duration_s=load.duration,
        seed=load.seed,
        concurrency=load.concurrency,
        think_time_s=load.think_time or 0.0,
        workers=load.workers,
    )


def input_law(workload: Workload) -> TruncatedLogNormal:
    """Law of the prompt lengths of a workload without a trace; of sessions, of the first ones."""
    assert workload.mu is not None, "a trace has lengths, not a law"
    assert workload.sigma is not None
    return TruncatedLogNormal(workload.mu, workload.sigma, workload.min_tokens, workload.max_tokens)


def output_law(workload: Workload) -> TruncatedLogNormal:
    """Law of output lengths: mean ``output_tokens`` before truncation, or a constant."""
    return _law_of_mean(
        workload.output_tokens,
        workload.output_sigma,
        workload.output_min_tokens,
        workload.output_max_tokens,
    )


def increment_law(sessions: Sessions) -> TruncatedLogNormal:
    """Law of the new tokens of a later turn: mean ``increment_tokens`` before truncation."""
    return _law_of_mean(
        sessions.increment_tokens,
        sessions.increment_sigma,
        sessions.increment_min_tokens,
        sessions.increment_max_tokens,
    )


def _law_of_mean(mean: int, sigma: float | None, low: int, high: int) -> TruncatedLogNormal:
    sigma = sigma or 0.0
    return TruncatedLogNormal(math.log(mean) - sigma**2 / 2, sigma, low, high)


def _number(value: float | None) -> float:
    """A key that is known to be given by now."""
    assert value is not None
    return value
