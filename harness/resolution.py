"""From the tables of a scenario file to its records: references, bounds across keys, traces.

Each function takes validated tables and raises ScenarioError, one paragraph that names the key.
``where`` names the file (and flags) in it.
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError
from harness.datafile import nearest, printable
from harness.deployment import Deployment, PdCluster, PrfaasCluster
from harness.lognormal import TruncatedLogNormal
from harness.scenario_file import (
    MAX_REQUESTS,
    DeploymentTable,
    LinkTable,
    LoadTable,
    PrefixTable,
    WorkloadTable,
)
from harness.settings import Load, Workload
from harness.trace import Trace
from netem.link import LinkError, LinkSpec, symmetric
from netem.loss import IndependentLoss
from netem.variation import LinkSchedule

if TYPE_CHECKING:
    from netem.link_file import LinkProfile

#: Less of the untruncated law than this inside the bounds is a mistake in mu, sigma or the bounds.
_MIN_MASS = 1e-6
#: Changes of state a run may see: more would be noise that no queue notices.
_MAX_STATE_CHANGES = 1_000_000

_LENGTH_KEYS = ("mu", "sigma", "min_tokens", "max_tokens", "output_tokens")
_OUTPUT_KEYS = ("output_sigma", "output_min_tokens", "output_max_tokens")
_STATE_KEYS = ("on_duration", "off_duration", "on_rate_multiple")


def wrong(key: str, where: str, why: str) -> ScenarioError:
    return ScenarioError(f"The value of {key!r} in {where} is wrong: {why}.")


def missing(key: str, where: str, why: str) -> ScenarioError:
    return ScenarioError(f"The key {key!r} is missing in {where}: {why}.")


def resolve_deployment(
    name: str, table: DeploymentTable, hardware: list[str], where: str
) -> Deployment:
    """A deployment whose hardware is among ``hardware`` and whose counts make sense."""
    key = f"deployments.{name}"
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name):
        raise wrong(
            printable(key), where, "a deployment is named by a-z, 0-9 and _, a letter first"
        )
    asked_for = [
        ("prfaas_hardware", table.prfaas_hardware),
        ("pd_hardware", table.pd_hardware),
        *((f"more_prfaas.{i}.hardware", c.hardware) for i, c in enumerate(table.more_prfaas)),
        *((f"more_pd.{i}.hardware", c.hardware) for i, c in enumerate(table.more_pd)),
    ]
    for role, asked in asked_for:
        if asked is not None and asked not in hardware:
            near = nearest(asked, hardware)
            hint = f"did you mean {near!r}?" if near else f"defined: {', '.join(hardware)}"
            raise wrong(f"{key}.{role}", where, f"no hardware is named {asked!r} ({hint})")
    deployment = Deployment(
        name=name,
        threshold_tokens=table.threshold_tokens,
        num_prfaas=table.num_prfaas,
        num_prefill=table.num_prefill,
        num_decode=table.num_decode,
        prfaas_hardware=table.prfaas_hardware,
        pd_hardware=table.pd_hardware,
        more_prfaas=tuple(
            PrfaasCluster(one.hardware, one.num_instances, one.link_rate)
            for one in table.more_prfaas
        ),
        more_pd=tuple(
            PdCluster(one.hardware, one.num_prefill, one.num_decode, one.link_rate)
            for one in table.more_pd
        ),
        balancing=table.balancing,
    )
    if fault := deployment.fault():
        raise wrong(f"{key}.{fault[0]}", where, fault[1])
    # Without local prefill t = 0 says the same as no threshold.
    return deployment if deployment.num_prefill else replace(deployment, threshold_tokens=None)


def resolve_link(table: LinkTable, where: str, folder: Path) -> LinkSpec:
    """The named profile or file, if any, with the table's own values laid over both directions.

    A ``file`` is relative to ``folder``.
    """
    if table.profile is not None and table.file is not None:
        raise wrong("link.file", where, "a link has a profile or a file, not both")
    own = _own_values(table)
    cap = table.per_flow_cap
    try:
        described = _described_link(table, where, folder)
        if described is not None:
            base = _steady(described, table.vary)
        else:
            for key, value in (("rate", table.rate), ("rtt", table.rtt)):
                if value is None:
                    why = "without a 'link.profile' or a 'link.file' a link needs it"
                    raise missing(f"link.{key}", where, why)
            base = symmetric("custom", _number(table.rate), 0.0)
        if (table.profile or table.file) and (own or cap is not None):
            base = replace(base, name=f"{base.name}, changed")
        if cap is not None:
            base = replace(base, per_flow_cap_bytes_per_s=cap)
        # One replacement: jitter is checked against the round trip that goes with it.
        return base.both(**own)
    except LinkError as error:
        raise wrong("link", where, _told(error)) from error


def _described_link(table: LinkTable, where: str, folder: Path) -> "LinkProfile | None":
    """The named profile or the file, if any. Imported where a scenario has one: few do, and its
    tables take a plan's time to build."""
    if table.profile is None and table.file is None:
        return None
    from netem.link_file import profile_names, read_link_file, read_profile

    if table.file is not None:
        return read_link_file(folder / table.file)
    assert table.profile is not None, "a profile or a file"
    if table.profile not in profile_names():
        near = nearest(table.profile, list(profile_names()))
        hint = f" (did you mean {near!r}?)" if near else ""
        why = f"there is no such link profile{hint}; profiles: {', '.join(profile_names())}"
        raise wrong("link.profile", where, f"{why}; got {table.profile!r}")
    return read_profile(table.profile)


def resolve_link_schedule(
    table: LinkTable, where: str, folder: Path, duration_s: float
) -> LinkSchedule | None:
    """How the link changes during a run of ``duration_s``; None where it does not."""
    if table.vary and table.schedule is not None:
        raise wrong("link.schedule", where, "link.vary brings a schedule of its own; give one")
    if table.schedule is None and not table.vary:
        return None
    from netem.variation_file import read_schedule, schedule_of

    try:
        if table.schedule is not None:
            return read_schedule(folder / table.schedule, duration_s)
        profile = _described_link(table, where, folder)
        if profile is None or not profile.variation:
            raise wrong("link.vary", where, "the link has no profile or file with a variation")
        base = folder if table.file is None else (folder / table.file).parent
        return schedule_of(profile.variation, f"the link {profile.spec.name}", duration_s, base)
    except LinkError as error:
        raise wrong("link.schedule", where, _told(error)) from error


def _told(error: LinkError) -> str:
    """Its words as the end of a sentence; they are printable, whatever a path in them holds."""
    return str(error).removesuffix(".")


def _steady(profile: "LinkProfile", varies: bool) -> LinkSpec:
    """A link as it starts, which says that a run does not vary it."""
    if not profile.variation or varies:
        return profile.spec
    left_out = f"the variation of {profile.spec.name} ({', '.join(profile.variation)})"
    note = f"{left_out} is not applied in a run: the link stays as it starts"
    return replace(profile.spec, not_applied=(note,))


def _own_values(table: LinkTable) -> dict[str, Any]:
    """The fields of a direction that the table itself gives."""
    values = {
        "rate_bytes_per_s": table.rate,
        "delay_s": None if table.rtt is None else table.rtt / 2,
        "jitter_s": table.jitter,
        "limit_packets": table.limit_packets,
    }
    own: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    if table.loss is not None:
        own["loss"] = IndependentLoss(table.loss) if table.loss else None
    return own


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
