"""The scenario's [faults] as records: which instances die or are slow, and when.

An instance is named as everywhere else (``Deployment.instances``); a name that no deployment has is
an error, and so are two faults of one kind that overlap on one instance, which no one could tell
apart.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from harness.datafile import nearest, printable
from harness.deployment import Deployment
from harness.resolution import missing, wrong
from harness.scenario_tables.faults import FaultsTable, InstanceFaultTable
from harness.settings import Faults, InstanceFault


def resolve_faults(table: FaultsTable, where: str, deployments: Mapping[str, Deployment]) -> Faults:
    """Validated against the ``deployments``. ScenarioError names the key and the nearest name."""
    faults = Faults(tuple(_resolved(one, n, where) for n, one in enumerate(table.instances)))
    check_faults(faults, where, deployments)
    return faults


def _resolved(table: InstanceFaultTable, number: int, where: str) -> InstanceFault:
    key = f"faults.instances.{number}"
    if table.kind == "slow" and table.factor is None:
        why = 'kind = "slow" needs it: how many times as long everything takes'
        raise missing(f"{key}.factor", where, why)
    if table.kind != "slow" and table.factor is not None:
        raise wrong(f"{key}.factor", where, f'it has no effect with kind = "{table.kind}"')
    return InstanceFault(
        instance=table.instance,
        kind=table.kind,
        at_s=table.at,
        lasts_s=table.lasts,
        factor=table.factor,
        deployments=None if table.deployments is None else tuple(table.deployments),
    )


def check_faults(faults: Faults, where: str, deployments: Mapping[str, Deployment]) -> None:
    """Refuse faults of instances that the ``deployments`` do not have, as after a new plan."""
    names = {
        name: [one.name for one in deployment.instances()]
        for name, deployment in deployments.items()
    }
    for number, fault in enumerate(faults.instances):
        key = f"faults.instances.{number}"
        for name in fault.deployments or ():
            if name not in names:
                raise wrong(f"{key}.deployments", where, _unknown("deployment", name, list(names)))
        asked = {name: names[name] for name in fault.deployments or names}
        for name, there in asked.items():
            if fault.deployments is not None and fault.instance not in there:
                why = _unknown("instance", fault.instance, there)
                raise wrong(f"{key}.instance", where, f"in {name} {why}")
        if not any(fault.instance in there for there in asked.values()):
            every = list(dict.fromkeys(one for there in names.values() for one in there))
            why = f"in no deployment {_unknown('instance', fault.instance, every)}"
            raise wrong(f"{key}.instance", where, why)
    for name in names:
        _check_overlaps(faults, name, where)


def _unknown(what: str, name: str, there: Sequence[str]) -> str:
    near = nearest(name, list(there))
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(there[:16])}"
    return f"there is no {what} {printable(name)!r} ({hint})"


def _check_overlaps(faults: Faults, deployment: str, where: str) -> None:
    by_instance: dict[tuple[str, str], list[InstanceFault]] = {}
    for fault in faults.of(deployment):
        by_instance.setdefault((fault.instance, fault.kind), []).append(fault)
    for (instance, kind), those in by_instance.items():
        for before, after in pairwise(sorted(those, key=lambda one: one.at_s)):
            if before.until_s >= after.at_s:
                raise wrong(
                    "faults.instances",
                    where,
                    f'two of kind "{kind}" overlap on {instance} in {deployment}: one from '
                    f"{before.at_s:g} s to {before.until_s:g} s, one from {after.at_s:g} s; let "
                    "one end before the next begins",
                )


def fault_notes(faults: Faults) -> tuple[str, ...]:
    """What a model of steady load does not see of them."""
    if not faults.instances:
        return ()
    return (
        f"faults: {len(faults.instances)} planned; modelled capacity and offered utilisation take "
        "every instance as up and as fast as its profile",
    )
