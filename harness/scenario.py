"""A scenario: one frozen tree of records in base units, every file it names read and checked.

``harness.scenario_file`` validates the TOML table by table without opening a path, and
``harness.resolution`` and ``harness.workload_resolution`` what is written across keys; here the
paths are opened, and what only the files can tell is checked: the right model, lengths that the
profiles cover. Whether its link can be emulated (``check_emulation``) only a live run asks.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness import mechanisms
from harness.architecture import load_architecture
from harness.core import Role, ScenarioError
from harness.datafile import printable
from harness.deployment import Deployment
from harness.engine_resolution import resolve_engine
from harness.engine_settings import Engine
from harness.faults import resolve_faults
from harness.gateway_settings import resolve_gateway
from harness.nodes import Node, resolve_nodes
from harness.plain import plain, without_places
from harness.profile_file import load_profile
from harness.resolution import (
    resolve_deployment,
    resolve_link,
    resolve_link_schedule,
    wrong,
)
from harness.scenario_file import ScenarioFile, read_scenario_file
from harness.scenario_schema import json_schema
from harness.settings import (
    Cost,
    Fabric,
    Faults,
    Gateway,
    Hardware,
    Load,
    Model,
    Prefix,
    PrefixCache,
    Scale,
    Scheduling,
    Serving,
    Slo,
    Testbed,
    Transport,
    Workload,
)
from harness.trace import read_trace
from harness.workload_resolution import (
    asked_of_trace,
    check_prefix,
    check_workload,
    resolve_selection,
    synthetic,
    traced,
)
from netem.link import LinkError, LinkSpec
from netem.variation import LinkSchedule

__all__ = [
    "Deployment",
    "Fabric",
    "Hardware",
    "Load",
    "Model",
    "Scale",
    "Scenario",
    "Scheduling",
    "Slo",
    "Testbed",
    "Transport",
    "Workload",
    "check_emulation",
    "check_scenario",
    "deployment_gpus",
    "extrapolated_hardware",
    "json_schema",
    "load_scenario",
    "scenario_hash",
    "to_manifest",
]


#: How long what repeats on a link does so under a closed loop.
_CLOSED_LOOP_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """All of a scenario. Dictionaries keep the order of the file."""

    name: str
    path: Path
    model: Model
    hardware: dict[str, Hardware]
    workload: Workload
    load: Load
    prefix: Prefix
    cost: Cost
    slo: Slo
    scale: Scale
    link: LinkSpec
    link_schedule: LinkSchedule | None
    link_sharing: Literal["auto", "layers", "fair"]
    fabric: Fabric
    scheduling: Scheduling
    prefix_cache: PrefixCache
    serving: Serving
    transport: Transport
    deployments: dict[str, Deployment]
    testbed: Testbed
    gateway: Gateway
    engine: Engine
    nodes: dict[str, Node]
    faults: Faults


def load_scenario(path: Path | str, overrides: Sequence[str] = ()) -> Scenario:
    """Read, check and resolve a scenario file; ``overrides`` are the ``KEY=VALUE`` of ``--set``.

    Raises ScenarioError: one paragraph that names the file, the key and what would be right.
    """
    path = Path(path)
    file = read_scenario_file(path, overrides)
    where = f"the scenario file {path}"
    if overrides:
        where += f" with --set {', --set '.join(printable(flag) for flag in overrides[:4])}"
    deployments = _deployments(file, where)
    link = resolve_link(file.link, where, path.parent)
    check_workload(file.workload, file.load, where)
    check_prefix(file.prefix, where)
    architecture = load_architecture(path.parent / file.model.architecture, file.model.kv_dtype)
    workload, load = _workload(file, path.parent)
    scenario = Scenario(
        name=file.name or _name_of(path),
        path=path,
        model=Model(architecture.name, architecture, file.model.weights),
        hardware=_hardware(file, path.parent),
        workload=workload,
        load=load,
        prefix=Prefix(file.prefix.model, file.prefix.agent_share, file.prefix.cached_fraction),
        cost=Cost(file.cost.link_price_per_gb, file.cost.link_price_per_gbps_month),
        slo=Slo(file.slo.tpot, file.slo.ttft),
        scale=Scale(file.scale.time, file.scale.bytes),
        link=link,
        link_schedule=resolve_link_schedule(file.link, where, path.parent, _longest_s(load)),
        link_sharing=file.link.sharing,
        fabric=Fabric(file.fabric.rate),
        scheduling=mechanisms.resolve_scheduling(file.scheduling),
        prefix_cache=mechanisms.resolve_prefix_cache(file.prefix_cache, where),
        serving=mechanisms.resolve_serving(file.serving, where),
        transport=mechanisms.resolve_transport(file.transport),
        deployments=deployments,
        testbed=Testbed(
            stream_interval_tokens=file.testbed.stream_interval_tokens,
            link_backend=file.testbed.link_backend,
            gateway_port=file.testbed.gateway_port,
            realtime=file.testbed.realtime,
            request_timeout_s=file.testbed.request_timeout,
            self_test=file.testbed.self_test,
        ),
        gateway=resolve_gateway(file.gateway, where, path.parent),
        engine=resolve_engine(file.engine, where, path.parent, architecture, deployments),
        nodes=resolve_nodes(file.nodes, where, list(file.hardware)),
        faults=resolve_faults(file.faults, where, deployments),
    )
    check_scenario(scenario, where)
    return scenario


def check_scenario(scenario: Scenario, where: str) -> None:
    """Refuse a scenario whose files do not fit it. ``where`` names it in the error."""
    for hardware in scenario.hardware.values():
        if hardware.profile.model != scenario.model.name:
            raise wrong(
                f"hardware.{hardware.name}.profile",
                where,
                f"the profile {hardware.profile.path} is of model {hardware.profile.model!r}, but "
                f"the architecture {scenario.model.architecture.path} is of "
                f"{scenario.model.name!r}; name files of one model",
            )
    _check_prices(scenario, where)
    model, pools = scenario.model, scenario.prefix_cache
    mechanisms.check_decode_memory(scenario.serving, model, pools, scenario.workload, where)
    for deployment in scenario.deployments.values():
        _check_coverage(scenario, deployment, where)


def check_emulation(scenario: Scenario) -> None:
    """Refuse to run a scenario live whose link, scaled, no testbed can have, or whose instances
    serve as only simulated ones do."""
    where = f"the scenario file {scenario.path}"
    mechanisms.refuse_simulated_serving(scenario.serving, where)
    if scenario.faults.instances:
        why = "faults by schedule are simulated only so far; remove them, or use prfaas simulate"
        raise wrong("faults.instances", where, why)
    try:
        scenario.link.scaled(scenario.scale.time, scenario.scale.bytes)
    except LinkError as error:
        why = f"scaled by it, the link cannot be emulated: {error}"
        raise wrong("scale", where, why) from error


def _check_prices(scenario: Scenario, where: str) -> None:
    """A price of some of the hardware in use alone would be without effect."""
    used = dict.fromkeys(
        name for deployment in scenario.deployments.values() for name, _ in _uses(deployment)
    )
    for key in ("price_usd_per_gpu_hour", "relative_price"):
        missing = [name for name in used if getattr(scenario.hardware[name], key) is None]
        if 0 < len(missing) < len(used):
            given = next(name for name in used if name not in missing)
            raise wrong(
                f"hardware.{missing[0]}.{key}",
                where,
                f"hardware {given!r} has a price in that unit and {missing[0]!r} has none, so that "
                "they cannot be compared; give both, or neither",
            )


def _check_coverage(scenario: Scenario, deployment: Deployment, where: str) -> None:
    """Every hardware that prefills covers every length, since thresholds are searched over all."""
    workload = scenario.workload
    _check_decodes(scenario, deployment, where)
    for name, role in _uses(deployment):
        profile = scenario.hardware[name].profile
        if role == "decode":
            assert profile.decode_max_batch is not None, "it decodes"
            longest = workload.max_tokens + workload.output_max_tokens
            for batch, context in ((1, workload.min_tokens), (profile.decode_max_batch, longest)):
                profile.decode_step_s(batch, context)
            continue
        low, high = profile.covered_tokens
        for tokens in _uncached_tokens(scenario):
            if not low <= tokens <= high and profile.extrapolate is None:
                raise ScenarioError(
                    f"Deployment {deployment.name!r} of {where} prefills on hardware {name!r}, "
                    f"whose profile file {profile.path} covers {low} to {high} new tokens, but "
                    f"the workload can produce a prompt of {tokens} tokens; costs are not "
                    "extrapolated. Add points to the profile, bound the workload's lengths "
                    "(workload.min_tokens, workload.max_tokens, or another trace), or ask for "
                    f'hardware.{name}.extrapolate = "end_slope".'
                )


def _check_decodes(scenario: Scenario, deployment: Deployment, where: str) -> None:
    for name, role in _uses(deployment):
        profile = scenario.hardware[name].profile
        if role == "decode" and not profile.can_decode:
            raise ScenarioError(
                f"Deployment {deployment.name!r} of {where} decodes on hardware {name!r}, but its "
                f"profile file {profile.path} is of prefill only (no 'decode' section). Name "
                "hardware that can decode, or add decode points to the profile."
            )


def extrapolated_hardware(scenario: Scenario) -> tuple[str, ...]:
    """A sentence for each hardware whose prefill costs are used beyond their points.

    Every output that rests on such costs shows them. Empty for a scenario inside its profiles.
    """
    shortest, longest = _uncached_tokens(scenario)
    prefills = {
        name: None
        for deployment in scenario.deployments.values()
        for name, role in _uses(deployment)
        if role == "prefill"
    }
    told = []
    for name in prefills:
        profile = scenario.hardware[name].profile
        low, high = profile.covered_tokens
        beyond = []
        if shortest < low:
            beyond.append(f"kept at those of {low} tokens down to {shortest}")
        if longest > high:
            beyond.append(f"continued with the slope at {high} tokens up to {longest}")
        if beyond:
            told.append(
                f"hardware {name}: prefill costs are extrapolated ({profile.extrapolate}): "
                f"{' and '.join(beyond)}; the profile {profile.name} covers {low} to {high}"
            )
    return tuple(told)


def _uses(deployment: Deployment) -> dict[tuple[str, Role], None]:
    """Each (hardware, role) of a deployment once, prefill first."""
    far, near = deployment.prfaas_clusters(0.0), deployment.pd_clusters(0.0)
    prefill: list[tuple[str, Role]] = [(one.hardware, "prefill") for one in far]
    prefill += [(one.hardware, "prefill") for one in near if one.num_prefill]
    decode: list[tuple[str, Role]] = [(one.hardware, "decode") for one in near if one.num_decode]
    return dict.fromkeys(prefill + decode)


def _uncached_tokens(scenario: Scenario) -> tuple[int, int]:
    """Fewest and most tokens that a prefill may have to compute."""
    workload, prefix = scenario.workload, scenario.prefix
    fewest = workload.min_tokens
    if prefix.model == "trace" or scenario.prefix_cache.enabled:
        fewest = 1
    elif prefix.model == "share" and prefix.agent_share > 0:
        fewest = max(1, int(fewest * (1 - prefix.cached_fraction)))
    return fewest, workload.max_tokens


def deployment_gpus(scenario: Scenario, name: str) -> dict[str, int]:
    """GPUs of each hardware that a deployment uses."""
    gpus: dict[str, int] = {}
    for instance in scenario.deployments[name].instances():
        per_instance = scenario.hardware[instance.hardware].profile.gpus_per_instance
        gpus[instance.hardware] = gpus.get(instance.hardware, 0) + per_instance
    return gpus


def to_manifest(scenario: Scenario) -> dict[str, Any]:
    """The scenario as resolved, files included, in JSON's types; keys are the records' fields."""
    manifest = plain(scenario)
    assert isinstance(manifest, dict)
    return manifest


def scenario_hash(scenario: Scenario) -> str:
    """SHA-256 of the scenario as resolved: of what its files hold, not of where they lie."""
    content = without_places(to_manifest(scenario))
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _longest_s(load: Load) -> float:
    """No load lasts longer, but for the chance of its gaps; what repeats on a link ends then."""
    count = load.num_requests or 1
    if load.concurrency is not None:  # nothing bounds it but the answers
        return _CLOSED_LOOP_S
    return 60 + 2 * (load.duration_s or count / load.rate_req_per_s)


def _name_of(path: Path) -> str:
    """The file's name as far as it can name a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:64] or "scenario"


def _deployments(file: ScenarioFile, where: str) -> dict[str, Deployment]:
    for name in file.hardware:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            why = "hardware is named by letters, digits, '.', '_' and '-', at most 64 of them"
            raise wrong(f"hardware.{printable(name)}", where, why)
    return {
        name: resolve_deployment(name, table, list(file.hardware), where)
        for name, table in file.deployments.items()
    }


def _hardware(file: ScenarioFile, folder: Path) -> dict[str, Hardware]:
    return {
        name: Hardware(
            name=name,
            profile=load_profile(folder / table.profile, table.extrapolate),
            price_usd_per_gpu_hour=table.price_usd_per_gpu_hour,
            relative_price=table.relative_price,
        )
        for name, table in file.hardware.items()
    }


def _workload(file: ScenarioFile, folder: Path) -> tuple[Workload, Load]:
    if file.workload.trace is None:
        return synthetic(file.workload, file.load)
    selection = resolve_selection(file.workload, file.workload.rate_scale)
    trace = read_trace(
        folder / file.workload.trace,
        file.workload.trace_format,
        seed=file.load.seed,
        start_s=selection.start_s,
        duration_s=file.load.duration,
    )
    return traced(trace, selection, asked_of_trace(file.load))
