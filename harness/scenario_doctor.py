"""What of a scenario can be checked before a GPU is used: ``prfaas doctor --scenario``.

Files and profiles, whether the nodes hold the deployments and the model fits their memory, what
the engine's ranks and protocol do to the KV; and of nodes that are this machine their ports,
interfaces, GPUs, interpreter and model. Nothing is started, no node is contacted.

    memory of an instance x mem_fraction >= weights + batch x S_kv(longest) x copies held

where every rank of an attention group holds its part: of a latent all of it, of fewer KV heads than
ranks one each.
"""

import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.core import EngineError, Instance, ScenarioError
from harness.engine.reference import require_device
from harness.engine.sglang.doctor import sglang_finding
from harness.engine.sglang.probe import ask_interpreter
from harness.engine_resolution import check_model
from harness.engine_settings import Sglang, engine_role
from harness.engine_traffic import (
    crossing,
    crossing_note,
    paths,
    paths_note,
    sharding,
    sharding_faults,
)
from harness.launch_plan.links import unshaped
from harness.launch_plan.placement import Placement, place
from harness.nodes import Node
from harness.replication import replicated
from harness.scenario import Scenario, extrapolated_hardware
from harness.throughput import deployment_model
from netem.access import own_addresses
from netem.doctor import Finding, State
from netem.rtnetlink import Rtnetlink

#: What SGLang leaves for weights and KV where engine.mem_fraction does not say it.
_MEM_FRACTION = 0.88
_NVIDIA_SMI_S = 60.0
_GB = 1e9


@dataclass(frozen=True, slots=True)
class ScenarioExamination:
    """``failed``: findings that a run would fail by."""

    scenario: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> int:
        return sum(one.state == "missing" for one in self.findings)


def examine_scenario(scenario: Scenario) -> ScenarioExamination:
    """All that can be said without a GPU; a scenario that does not load is refused before."""
    findings = [Finding("files", "ok", f"{scenario.path} and all that it names can be read")]
    findings += _profiles(scenario)
    sglang = scenario.engine.sglang
    if sglang is None:
        findings.append(_of_our_own(scenario))
        return ScenarioExamination(scenario.name, tuple(findings))
    findings.append(_engine(sglang))
    findings += _traffic(scenario)
    if scenario.nodes:
        placements, placed = _placements(scenario)
        findings += placed
        findings += _memory(scenario)
        findings += _links(scenario, placements)
        findings += _nodes(scenario, sglang, placements)
    else:
        findings += _this_machine(scenario, sglang)
    return ScenarioExamination(scenario.name, tuple(findings))


def _profiles(scenario: Scenario) -> Iterator[Finding]:
    told_beyond = extrapolated_hardware(scenario)
    beyond = {text.split(":")[0].removeprefix("hardware "): text for text in told_beyond}
    sglang = scenario.engine.sglang
    for name, hardware in scenario.hardware.items():
        profile = hardware.profile
        points = Counter(point.provenance for point in profile.prefill_points)
        points.update(point.provenance for point in profile.decode_points)
        told = ", ".join(f"{count} {kind}" for kind, count in points.most_common())
        found = f"{profile.name}, {profile.engine_name} {profile.engine_version}: {told}"
        lacks = [beyond[name]] if name in beyond else []
        if set(points) != {"measured"}:
            lacks.append("figures that rest on it are modelled")
        version = None if sglang is None else sglang.version
        if version not in (None, profile.engine_version):
            lacks.append(f"it is not of the version that is to run ({version})")
        remedy = "measure it on its node: prfaas profile" if lacks else ""
        state: State = "limited" if lacks else "ok"
        yield Finding(f"profile of {name}", state, found, "; ".join(lacks), remedy)


def _of_our_own(scenario: Scenario) -> Finding:
    reference = scenario.engine.reference
    if reference is None:
        return Finding("engine", "ok", "emulated: no GPU, no model files")
    found = f"reference: {reference.dtype} on {reference.device}"
    try:
        require_device(reference.device, "engine.device")
    except EngineError as error:
        return Finding("engine", "missing", found, str(error), "pip install 'prfaas-bench[torch]'")
    return Finding("engine", "ok", found)


def _engine(sglang: Sglang) -> Finding:
    needs = ", ".join(sglang.requires)
    if sglang.version is None:
        lacks = "whether the version on the nodes can do it is known only when it is launched"
        remedy = "set engine.version"
        return Finding("engine", "limited", f"SGLang of any version for {needs}", lacks, remedy)
    return Finding("engine", "ok", f"SGLang {sglang.version} for {needs}")


def _traffic(scenario: Scenario) -> Iterator[Finding]:
    faults: dict[str, list[str]] = {}
    for pair, why in sharding_faults(scenario):
        faults.setdefault(pair, []).append(why)
    for pair, whys in faults.items():
        lacks, remedy = "the servers cannot exchange KV", "give both sides the same tp and dp"
        yield Finding(f"KV from {pair}", "missing", "; ".join(whys), lacks, remedy)
    for name, deployment in scenario.deployments.items():
        found = crossing(scenario, deployment, deployment_model(scenario, deployment))
        if found is None:
            continue
        note = crossing_note(found)
        gbit = (found.wire_bytes_per_s * 8e-9, found.link_bytes_per_s * 8e-9)
        told = f"{gbit[0]:.1f} of {gbit[1]:.1f} Gbit/s at Lambda_max"
        if note is None:
            yield Finding(f"replication in {name}", "ok", f"none; {told}")
        else:
            remedy = "data-parallel attention (dp and --enable-dp-attention)"
            yield Finding(f"replication in {name}", "limited", told, note, remedy)
    label = paths_note(scenario)
    if label is not None:
        assert scenario.engine.sglang is not None, "it has KV paths"
        both = paths(scenario.engine.sglang) == "both_protocols"
        remedy = "docs/gpu-nodes.md: transfer_backend = nixl, with UCX_TLS for each role"
        if both:
            yield Finding("KV paths", "ok", label)
        else:
            yield Finding("KV paths", "limited", "one protocol inside and across", label, remedy)


def _placements(scenario: Scenario) -> tuple[dict[str, tuple[Placement, ...]], list[Finding]]:
    placements, findings = {}, []
    for name, deployment in scenario.deployments.items():
        try:
            placements[name] = place(scenario, deployment)
        except ScenarioError as error:
            lacks = "it is not run on these nodes"
            remedy = "fewer instances, more nodes, or prfaas simulate"
            findings.append(Finding(f"nodes for {name}", "missing", str(error), lacks, remedy))
            continue
        gpus = sum(one.gpus for one in placements[name])
        nodes = {rank.node.name for one in placements[name] for rank in one.ranks}
        found = f"{len(placements[name])} instances on {gpus} GPUs of {len(nodes)} nodes"
        findings.append(Finding(f"nodes for {name}", "ok", found))
    return placements, findings


def _memory(scenario: Scenario) -> Iterator[Finding]:
    """Once for each hardware and role that prefills or decodes on nodes of known memory."""
    seen = set()
    for deployment in scenario.deployments.values():
        for instance in deployment.instances():
            if (instance.hardware, instance.role) not in seen:
                seen.add((instance.hardware, instance.role))
                yield _fit(scenario, instance)


def _fit(scenario: Scenario, instance: Instance) -> Finding:
    name = f"memory of {instance.hardware} for {instance.role}"
    weights = _weights_bytes(scenario)
    nodes = [one for one in scenario.nodes.values() if one.hardware == instance.hardware]
    sizes = [one.gpu_memory_bytes for one in nodes if one.gpu_memory_bytes is not None]
    if weights is None or not sizes or len(sizes) < len(nodes):
        remedy = "model.weights and gpu_memory of each node"
        return Finding(
            name, "limited", "not known", "whether the model fits is not checked", remedy
        )
    profile, sglang = scenario.hardware[instance.hardware].profile, scenario.engine.sglang
    assert sglang is not None, "only real servers have memory"
    batch = profile.decode_max_batch or 1 if instance.role == "decode" else 1
    tokens = scenario.workload.max_tokens
    if instance.role == "decode":
        tokens += scenario.workload.output_max_tokens
    try:
        side = sharding(sglang.roles[engine_role(instance)])
        held = replicated(scenario.model.architecture, tokens, side, side).wire_bytes
    except ValueError as error:
        return Finding(
            name, "missing", str(error), "servers of that size", "change engine.tp or dp"
        )
    usable = profile.gpus_per_instance * min(sizes) * (sglang.mem_fraction or _MEM_FRACTION)
    room = usable - weights
    found = (
        f"{usable / _GB:.0f} GB usable, {weights / _GB:.0f} GB of weights, room for "
        f"{max(0, int(room // held))} requests of {tokens:,} tokens at {held / _GB:.2f} GB"
    )
    if room < batch * held:
        lacks = f"the profile's batch of {batch} does not fit" if room > held else "it does not fit"
        return Finding(name, "missing", found, lacks, "more GPUs an instance, or shorter requests")
    return Finding(name, "ok", found)


def _weights_bytes(scenario: Scenario) -> float | None:
    """Of the model's folder where it is here, else as the scenario says."""
    sglang = scenario.engine.sglang
    folder = None if sglang is None else sglang.model_path
    files = [] if folder is None else list(folder.glob("*.safetensors"))
    if files:
        return float(sum(file.stat().st_size for file in files))
    return scenario.model.weights_bytes


def _links(scenario: Scenario, placements: dict[str, tuple[Placement, ...]]) -> Iterator[Finding]:
    bare = dict.fromkeys(name for one in placements.values() for name in unshaped(one))
    if bare:
        lacks = f"the link is not shaped on {', '.join(bare)}: KV crosses at what there is"
        yield Finding("link", "limited", "nodes without kv_interface", lacks, "name the interface")
    elif scenario.engine.sglang is not None and scenario.engine.sglang.transfer_protocol == "rdma":
        lacks = "RDMA passes by the kernel: no link of any backend shapes it"
        yield Finding("link", "limited", "KV goes by RDMA", lacks, "TCP where it is to count")
    elif placements:
        yield Finding("link", "ok", "every node that KV crosses to or from names its interface")


def _nodes(
    scenario: Scenario, sglang: Sglang, placements: dict[str, tuple[Placement, ...]]
) -> Iterator[Finding]:
    here = _own_addresses()
    remote = []
    for node in scenario.nodes.values():
        addresses, unknown = [], []
        for host in dict.fromkeys((node.address, node.kv_address)):
            try:
                addresses += [info[4][0] for info in socket.getaddrinfo(host, None)]
            except OSError:
                unknown.append(host)
        if unknown:
            found = f"{', '.join(unknown)} cannot be resolved"
            yield Finding(f"node {node.name}", "missing", found, "the node", "correct its address")
        elif node.is_local or here & set(addresses):
            yield from _local(sglang, node, placements)
        else:
            remote.append(node.name)
    if remote:
        yield Finding(
            "other nodes",
            "limited",
            f"{', '.join(remote)}: addresses resolve; nothing was contacted",
            "their ports, interfaces, GPUs and interpreters are not looked at from here",
            "prfaas doctor --scenario on each of them",
        )


def _own_addresses() -> set[str]:
    """Of this machine's interfaces."""
    with Rtnetlink() as route:
        return {str(address) for address in own_addresses(route)}


def _local(
    sglang: Sglang, node: Node, placements: dict[str, tuple[Placement, ...]]
) -> Iterator[Finding]:
    """A node that is this machine."""
    name = f"node {node.name}"
    ports = {
        port
        for one in placements.values()
        for each in one
        if each.head.name == node.name
        for port in (each.port, each.bootstrap_port, each.group_port)
        if port is not None
    }
    taken = [str(port) for port in sorted(ports) if not _is_free(node.address, port)]
    if taken:
        found = f"ports {', '.join(taken)} are taken"
        yield Finding(f"{name}: ports", "missing", found, "servers", "end what holds them")
    elif ports:
        yield Finding(f"{name}: ports", "ok", f"{len(ports)} free")
    if node.kv_interface is not None:
        yield _there(f"{name}: interface", Path("/sys/class/net") / node.kv_interface)
    if node.ib_device is not None and sglang.transfer_protocol == "rdma":
        yield _there(f"{name}: RDMA", Path("/sys/class/infiniband") / node.ib_device)
    yield _gpu_count(name, node.gpus)
    yield _interpreter(name, node.python, sglang.version)
    folder = Path(node.model_path or sglang.model_path or "")
    yield _there(f"{name}: model", folder / "config.json")


def _this_machine(scenario: Scenario, sglang: Sglang) -> Iterator[Finding]:
    """Without nodes the servers are this machine's."""
    if sglang.device == "cuda":
        yield sglang_finding(sglang.python)
    else:
        yield _interpreter("this machine", sglang.python, sglang.version)
    try:
        told = check_model(scenario.engine, scenario.model.architecture, str(scenario.path))
        yield Finding("model files", "ok", told)
    except ScenarioError as error:
        yield Finding("model files", "missing", str(error), "servers", "correct engine.model_path")


def _there(name: str, path: Path) -> Finding:
    if path.exists():
        return Finding(name, "ok", str(path))
    return Finding(name, "missing", f"{path} is not there", "what needs it", "correct the scenario")


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except OSError:
            return False
    return True


def _gpu_count(name: str, wanted: int) -> Finding:
    what = f"{name}: GPUs"
    program = shutil.which("nvidia-smi")
    if program is None:
        remedy = "install the driver, or correct the node"
        return Finding(what, "missing", "no nvidia-smi", f"{wanted} GPUs", remedy)
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, check=False, timeout=_NVIDIA_SMI_S
        )
        count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    except (OSError, subprocess.TimeoutExpired):
        return Finding(what, "missing", "nvidia-smi does not answer", "GPUs", "mend the driver")
    if count != wanted:
        found = f"nvidia-smi has {count}, the scenario {wanted}"
        return Finding(what, "missing", found, "placements", "correct nodes.gpus")
    return Finding(what, "ok", str(count))


def _interpreter(name: str, python: str | None, version: str | None) -> Finding:
    what = f"{name}: sglang"
    try:
        probe = ask_interpreter(python, gpus=False)
    except EngineError as error:
        return Finding(what, "missing", str(error), "servers", "correct its path")
    found = f"{probe.sglang or 'none'} in {python or sys.executable}"
    if probe.sglang is None or version not in (None, probe.sglang):
        remedy = f"install sglang {version or ''}".strip()
        return Finding(what, "missing", found, "servers of that version", remedy)
    return Finding(what, "ok", found)
