"""SGLang servers in the local testbed: what a run of them cannot have, and how they are reached.

Each cluster's servers are children of a launcher (``python -m harness.engine.sglang``) in the
cluster's namespace. KV goes from a prefill to a decode server by the engine's own transfer
(Mooncake over TCP), on ports that the servers choose as they go: both namespaces must reach each
other by address, which the netem and forwarder backends give and the relay does not.

SGLang reserves KV at the decode server before the transfer, sends KV after each prefill chunk and
tells the gateway nothing before the end of it, so what rests on more is refused here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.core import PD, PRFAAS, EngineError, Instance, ScenarioError
from harness.deployment import Deployment
from harness.engine.sglang.command import gpus_of
from harness.engine.sglang.config import AttachedConfig, LauncherConfig, ServerConfig
from harness.engine.sglang.versions import known_version
from harness.engine_resolution import check_model
from harness.engine_settings import EngineRole, Sglang, engine_role
from harness.gateway.config import WorkerAddress
from harness.scenario import Scenario
from netem.link import LinkSpec, symmetric
from netem.testlink import Site, TestLink

#: Above the launcher's own bound, so that it has the say.
MARGIN_S = 30.0
#: A pair of servers may take so long for its first request, wall time; a handshake that fails
#: would take 300 s to say so.
CANARY_TIMEOUT_S = 120.0


def check_sglang(scenario: Scenario) -> None:
    """ScenarioError names the key that a run on SGLang cannot have, and what would be right; or
    the model's folder, where it is not of the scenario's architecture."""
    for key, why in _faults(scenario):
        raise ScenarioError(
            f"'{key}' in the scenario file {scenario.path} does not go with engine.kind = "
            f'"sglang": {why}.'
        )
    where = f"the scenario file {scenario.path}"
    check_model(scenario.engine, scenario.model.architecture, where)


def _faults(scenario: Scenario) -> list[tuple[str, str]]:
    scale, scheduling, timeouts = scenario.scale, scenario.scheduling, scenario.gateway.timeouts
    sglang = scenario.engine.sglang
    assert sglang is not None, "the engine is SGLang"
    deployments = scenario.deployments.values()
    crosses = any(one.num_prfaas and not all_attached(one, sglang) for one in deployments)
    silent = "SGLang says nothing of a prefill before its KV has gone, so the phases cannot be told"
    checks = (
        ("scale.time", scale.time != 1, "real servers compute in real time; set it to 1"),
        ("scale.bytes", scale.bytes != 1, "real servers send all of their KV; set it to 1"),
        (
            "testbed.link_backend",
            crosses and scenario.testbed.link_backend == "relay",
            "KV crosses on ports that the servers choose, which need real addresses between the "
            'clusters; set it to "forwarder", "netem" or "auto"',
        ),
        (
            "engine.page_size",
            sglang.page_size is None,
            "KV is sent in pages, and what is expected of a prompt follows from their size; give "
            "it, for example 64",
        ),
        (
            "scheduling.admission",
            scheduling.admission != "reserve_first",
            "a decode server reserves KV before the transfer and prefill waits for it; set it to "
            '"reserve_first"',
        ),
        (
            "scheduling.ttft_source",
            scheduling.ttft_source != "decode",
            'a prefill server answers only when its KV has gone; set it to "decode"',
        ),
        (
            "scheduling.bandwidth_aware",
            scheduling.bandwidth_aware,
            "SGLang tells nothing of its KV connections; set it to false",
        ),
        (
            "scheduling.role_conversion",
            scheduling.role_conversion,
            "a server keeps the role that it was launched with; set it to false",
        ),
        (
            "prefix_cache.enabled",
            scenario.prefix_cache.enabled,
            "its servers tell no changes of their caches to the gateway; set it to false",
        ),
        (
            "serving.decode_memory",
            scenario.serving.decode_memory_bytes is not None,
            "a server has the memory that it is launched with; leave it out",
        ),
        ("gateway.prefill_queue_timeout", timeouts.prefill_queue_s is not None, silent),
        ("gateway.prefill_timeout", timeouts.prefill_s is not None, silent),
        ("gateway.transfer_timeout", timeouts.transfer_s is not None, silent),
    )
    return [(key, why) for key, is_wrong, why in checks if is_wrong]


def all_attached(deployment: Deployment, sglang: Sglang) -> bool:
    """Whether every server runs already: their KV takes a network of their own, which the testbed's
    link is no part of."""
    return all(one.name in sglang.attach for one in deployment.instances())


#: What a run on attached servers cannot say: where its KV went is no link of the testbed's.
UNMEASURED = (
    "every server is attached: KV takes the nodes' own network, which this run neither shaped nor "
    "measured; prfaas link verify on the nodes does"
)


def unused_link(scenario: Scenario) -> LinkSpec | None:
    """What the testbed opens where every server runs already, small since nothing crosses it."""
    sglang = scenario.engine.sglang
    deployments = scenario.deployments.values()
    if sglang is None or not all(all_attached(one, sglang) for one in deployments):
        return None
    return symmetric("unused", 125e6, 1e-3)


def check_link(deployment: Deployment, link: TestLink) -> None:
    """EngineError where the link that the machine could give carries no KV of real servers."""
    if deployment.num_prfaas and (link.near.namespace is None or link.far.namespace is None):
        reasons = "; ".join(link.why) or "it was asked for"
        raise EngineError(
            f"Deployment {deployment.name!r} sends KV of SGLang servers across the link, on ports "
            f"that they choose, which the {link.backend} backend cannot carry: it takes real "
            f"addresses between two namespaces (netem or forwarder). The {link.backend} is in use "
            f"because: {reasons}."
        )


def launcher_config(
    scenario: Scenario,
    deployment: Deployment,
    cluster: str,
    site: Site,
    log_directory: Path,
    api_key: str,
) -> LauncherConfig:
    """What the launcher of a cluster's servers is told."""
    sglang = scenario.engine.sglang
    assert sglang is not None, "the engine is SGLang"
    servers, attached = _servers(deployment, sglang, cluster)
    return LauncherConfig(
        cluster=cluster,
        address=site.address,
        log_directory=str(log_directory.absolute()),
        api_key=api_key,
        ready_timeout_s=sglang.ready_timeout_s,
        servers=servers,
        attached=attached,
        python=sglang.python,
        version=sglang.version,
        requires=list(sglang.requires),
        model_path=None if sglang.model_path is None else str(sglang.model_path.absolute()),
        model_name=scenario.model.name,
        hybrid=any(layer.fixed_bytes for layer in scenario.model.architecture.layers),
        device=sglang.device,
        transfer_backend=sglang.transfer_backend,
        transfer_protocol=sglang.transfer_protocol,
        page_size=sglang.page_size,
        chunked_prefill_tokens=sglang.chunked_prefill_tokens,
        load_format=sglang.load_format,
        mem_fraction=sglang.mem_fraction,
        max_total_tokens=sglang.max_total_tokens,
        context_tokens=sglang.context_tokens,
        max_running_requests=sglang.max_running_requests,
    )


def _servers(
    deployment: Deployment, sglang: Sglang, cluster: str
) -> tuple[list[ServerConfig], list[AttachedConfig]]:
    """The cluster's servers that are to be started, and those that run already."""
    instances = deployment.instances()
    first_gpus = _first_gpus(instances, sglang)
    servers, attached = [], []
    for instance in instances:
        if instance.cluster != cluster:
            continue
        if instance.name in sglang.attach:
            there = sglang.attach[instance.name]
            attached.append(
                AttachedConfig(instance.name, instance.role, there.url, there.bootstrap)
            )
            continue
        role = sglang.roles[engine_role(instance)]
        servers.append(
            ServerConfig(
                instance.name,
                instance.role,
                tp=role.tp,
                dp=role.dp,
                ep=role.ep,
                base_gpu=first_gpus[instance.name],
                ib_device=role.ib_device,
                extra_flags=list(role.extra_flags),
                env=dict(role.env),
            )
        )
    return servers, attached


def _first_gpus(instances: tuple[Instance, ...], sglang: Sglang) -> dict[str, int]:
    """The first GPU of each server of this host: in the order of the instances, or from where a
    role's table says."""
    first: dict[str, int] = {}
    started: set[EngineRole] = set()
    free = 0
    for instance in instances:
        name = engine_role(instance)
        role = sglang.roles[name]
        if name not in started and role.base_gpu is not None:
            free = role.base_gpu
        started.add(name)
        first[instance.name] = free
        if instance.name not in sglang.attach:
            free += gpus_of(role.tp, role.dp, role.extra_flags)
    return first


def counts_kv(version: str | None) -> bool:
    """Whether servers of a version count the KV bytes that they send."""
    return version is not None and "kv_metrics" not in known_version(version)[0].unsupported


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers of one deployment, as the gateway and decode servers reach them."""

    workers: tuple[WorkerAddress, ...]
    version: str | None
    notes: tuple[str, ...]


def reach(
    instances: tuple[Instance, ...],
    ready: dict[str, dict[str, Any]],
    sglang: Sglang,
    link: TestLink,
) -> Servers:
    """Addresses from each cluster's ``ready`` event; an attached server's are the scenario's."""
    sites = {PD: link.near, PRFAAS: link.far}
    workers = []
    for instance in instances:
        if instance.name in sglang.attach:
            workers.append(_attached(instance, sglang, link))
            continue
        site, event = sites[instance.cluster], ready[instance.cluster]
        bootstrap_port = event["bootstrap_ports"].get(instance.name)
        host, port = _near_view(link, site, int(event["ports"][instance.name]))
        workers.append(
            WorkerAddress(
                instance.name,
                instance.cluster,
                instance.role,
                instance.hardware,
                host,
                port,
                # Decode servers are at the near site too, and reach a namespace by its address.
                site.address if bootstrap_port else None,
                int(bootstrap_port) if bootstrap_port else None,
            )
        )
    versions = {str(event["version"]) for event in ready.values() if event.get("version")}
    if len(versions) > 1:
        raise EngineError(f"the clusters run different versions of SGLang: {sorted(versions)}")
    told: dict[str, None] = {}
    for event in ready.values():
        said = (event["untested"], *event["lacks"].values(), *event["warnings"])
        told |= dict.fromkeys(f"SGLang: {words}" for words in said if words)
    return Servers(tuple(workers), next(iter(versions), None), tuple(told))


def _near_view(link: TestLink, site: Site, port: int) -> tuple[str, int]:
    return (site.address, port) if site is link.near else link.expose(site, port)


def _attached(instance: Instance, sglang: Sglang, link: TestLink) -> WorkerAddress:
    """Where a server is that ran before: outside of the testbed's namespaces."""
    if link.near.namespace is not None:
        raise EngineError(
            f"{instance.name} is attached, so it lies outside of the {link.backend} link's "
            "namespaces, from which the gateway cannot reach it; attached servers need the relay "
            "(testbed.link_backend), whose link their KV does not cross"
        )
    attached = sglang.attach[instance.name]
    url = urlsplit(attached.url)
    host, _, port = (attached.bootstrap or ":0").rpartition(":")
    return WorkerAddress(
        instance.name,
        instance.cluster,
        instance.role,
        instance.hardware,
        url.hostname or "",
        url.port or 80,
        host or None,
        int(port) or None,
    )
