"""From the tables of workload and load to their records: bounds across keys, traces.

Each function takes validated tables and raises ScenarioError, one paragraph that names the key.
``where`` names the file (and flags) in it.
"""

import math

from harness.lognormal import TruncatedLogNormal
from harness.resolution import missing, wrong
from harness.scenario_tables.offered import (
    MAX_REQUESTS,
    LoadTable,
    PrefixTable,
    WorkloadTable,
)
from harness.settings import Load, Workload
from harness.trace import Trace

#: Less of the untruncated law than this inside the bounds is a mistake in mu, sigma or the bounds.
_MIN_MASS = 1e-6
#: Changes of state a run may see: more would be noise that no queue notices.
_MAX_STATE_CHANGES = 1_000_000

_LENGTH_KEYS = ("mu", "sigma", "min_tokens", "max_tokens", "output_tokens")
_OUTPUT_KEYS = ("output_sigma", "output_min_tokens", "output_max_tokens")
_STATE_KEYS = ("on_duration", "off_duration", "on_rate_multiple")


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
    if workload.trace is None:
        _check_lengths(workload, where)
        _check_load(workload, load, where)
    else:
        own = ("arrivals", "cv", *_LENGTH_KEYS, *_OUTPUT_KEYS, *_STATE_KEYS)
        if useless := [key for key in own if key in workload.model_fields_set]:
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
    if workload.trace is None and workload.trace_format is not None:
        raise wrong("workload.trace_format", where, "there is no workload.trace it could be of")


def _check_lengths(table: WorkloadTable, where: str) -> None:
    for key in _LENGTH_KEYS:
        if getattr(table, key) is None:
            raise missing(
                f"workload.{key}", where, "without a 'workload.trace' the lengths need it"
            )
    low, high = _number(table.min_tokens), _number(table.max_tokens)
    mu, sigma = _number(table.mu), _number(table.sigma)
    _check_law(TruncatedLogNormal(mu, sigma, low, high), "", where)
    if table.output_sigma is None:
        for key in ("output_min_tokens", "output_max_tokens"):
            if getattr(table, key) is not None:
                raise wrong(f"workload.{key}", where, "it bounds what workload.output_sigma draws")
        return
    for key in ("output_min_tokens", "output_max_tokens"):
        if getattr(table, key) is None:
            raise missing(f"workload.{key}", where, "workload.output_sigma needs bounds")
    _check_law(output_law(_synthetic(table)), "output_", where)


def _check_law(law: TruncatedLogNormal, prefix: str, where: str) -> None:
    if law.low > law.high:
        raise wrong(
            f"workload.{prefix}min_tokens",
            where,
            f"{law.low:g} is more than workload.{prefix}max_tokens, {law.high:g}",
        )
    if law.mass < _MIN_MASS:
        raise wrong(
            f"workload.{prefix}min_tokens",
            where,
            f"hardly any length of a log-normal with mu {law.mu:g} and sigma {law.sigma:g} lies "
            f"from {law.low:g} to {law.high:g}; move the bounds or the law",
        )


def _check_load(workload: WorkloadTable, load: LoadTable, where: str) -> None:
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
    if workload.arrivals == "gamma":
        for key in _STATE_KEYS:
            if getattr(workload, key) is not None:
                raise wrong(f"workload.{key}", where, 'it needs workload.arrivals = "on_off"')
        return
    for key in _STATE_KEYS:
        if getattr(workload, key) is None:
            raise missing(f"workload.{key}", where, 'workload.arrivals = "on_off" needs it')
    on_s, off_s = _number(workload.on_duration), _number(workload.off_duration)
    most = (on_s + off_s) / on_s
    if _number(workload.on_rate_multiple) > most * (1 + 1e-9):
        raise wrong(
            "workload.on_rate_multiple",
            where,
            f"the on state lasts {on_s / (on_s + off_s):.3g} of the time, so at most {most:.6g} "
            "times the mean rate fits in it (no request arrives in the off state then)",
        )
    run_s = load.duration or _number(load.num_requests) / rate
    if run_s / (on_s + off_s) > _MAX_STATE_CHANGES:
        raise wrong(
            "workload.on_duration",
            where,
            f"the run would change state more than {_MAX_STATE_CHANGES} times; make it longer",
        )


def synthetic(workload: WorkloadTable, load: LoadTable) -> tuple[Workload, Load]:
    """Records of a log-normal workload that ``check_workload`` let pass."""
    resolved = _synthetic(workload)
    return resolved, Load(
        rate_req_per_s=_number(load.rate_req_per_s) * workload.rate_scale,
        num_requests=load.num_requests,
        duration_s=load.duration,
        seed=load.seed,
    )


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
        trace=None,
        trace_format=None,
        trace_sha256=None,
        rate_scale=table.rate_scale,
    )


def traced(
    trace: Trace, rate_scale: float, duration_s: float | None, num_requests: int | None, seed: int
) -> tuple[Workload, Load]:
    """Records of a trace's first ``duration_s`` seconds and ``num_requests`` requests."""
    part = trace.part(duration_s, num_requests)
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
        trace=trace.path,
        trace_format=trace.format,
        trace_sha256=trace.sha256,
        rate_scale=rate_scale,
    )
    load = Load(
        rate_req_per_s=part.rate_req_per_s * rate_scale,
        num_requests=num_requests,
        duration_s=duration_s,
        seed=seed,
    )
    return workload, load


def output_law(workload: Workload) -> TruncatedLogNormal:
    """Law of output lengths: mean ``output_tokens`` before truncation, or a constant."""
    sigma = workload.output_sigma or 0.0
    return TruncatedLogNormal(
        math.log(workload.output_tokens) - sigma**2 / 2,
        sigma,
        workload.output_min_tokens,
        workload.output_max_tokens,
    )


def _number(value: float | None) -> float:
    """A key that is known to be given by now."""
    assert value is not None
    return value
