"""From the tables of a scenario file to its records: deployments and links.

Each function takes validated tables and raises ScenarioError, one paragraph that names the key.
``where`` names the file (and flags) in it.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError
from harness.datafile import nearest, printable
from harness.deployment import Deployment, PdCluster, PrfaasCluster
from harness.scenario_tables.decisions import DeploymentTable
from harness.scenario_tables.machinery import LinkTable
from netem.link import LinkError, LinkSpec, symmetric
from netem.loss import IndependentLoss
from netem.variation import LinkSchedule

if TYPE_CHECKING:
    from netem.link_file import LinkProfile


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
            assert table.rate is not None, "as just checked"
            base = symmetric("custom", table.rate, 0.0)
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
