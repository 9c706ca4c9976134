"""The command line of every server on its node, as a shell takes it.

Flags and environment are the launcher's own (``harness.engine.sglang.command``), with the node's
addresses, interpreter, model and GPUs in place. A server on several nodes is one command a node.
"""

import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.deployment import Deployment
from harness.engine.sglang.command import arguments, environment
from harness.engine.sglang.config import LauncherConfig, ServerConfig
from harness.engine.sglang.versions import VERSIONS, known_version
from harness.launch_plan.placement import Placement
from harness.scenario import Scenario
from harness.testbed.sglang import launcher_config
from netem.site import Site

#: sun_path holds 108 bytes; the server adds names of its own.
_SOCKETS = "tmp"


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run on ``node``; ``shell`` is the whole line."""

    instance: str
    node: str
    address: str
    rank: int
    gpus: tuple[int, ...]
    environment: dict[str, str]
    arguments: tuple[str, ...]
    shell: str


def launches(
    scenario: Scenario, deployment: Deployment, placements: tuple[Placement, ...]
) -> Iterator[Launch]:
    """One a node and server, heads first. Attached servers run already and have none."""
    sglang = scenario.engine.sglang
    assert sglang is not None, "only real servers are launched"
    for placement in placements:
        if placement.instance.name not in sglang.attach:
            yield from _launches(scenario, deployment, placement)


def _launches(
    scenario: Scenario, deployment: Deployment, placement: Placement, *, alone: bool = False
) -> Iterator[Launch]:
    """``alone``: a server of whole requests without a prefix cache, for the profiler."""
    sglang = scenario.engine.sglang
    assert sglang is not None, "only real servers are launched"
    # Versions are tried in order; the newest speaks for one that is not named.
    version, _ = known_version(sglang.version or list(VERSIONS)[-1])
    for number, rank in enumerate(placement.ranks):
        node = rank.node
        config, server = _configured(scenario, deployment, placement, number)
        if alone:
            server.role = "both"
            server.extra_flags = [*server.extra_flags, "--disable-radix-cache"]
        words = arguments(config, server, version)
        if placement.group_port is not None:
            words += ["--nnodes", str(len(placement.ranks)), "--node-rank", str(number)]
            words += ["--dist-init-addr", f"{placement.head.address}:{placement.group_port}"]
        sockets = f"{node.workdir}/{_SOCKETS}"
        inherited = {"TORCHINDUCTOR_CACHE_DIR": f"{node.workdir}/torchinductor"}
        # KV goes by the interface that is shaped, whatever the server listens at.
        env = environment(config, server, inherited, sockets)
        env |= {"SGLANG_HOST_IP": node.kv_address, "HOST_IP": node.kv_address}
        name = "profile" if alone else placement.instance.name
        log = f"{node.workdir}/{name}.{number}.log"
        line = [f"{key}={shlex.quote(value)}" for key, value in env.items()]
        line += [shlex.quote(node.python), "-m", "sglang.launch_server"]
        line += [shlex.quote(word) for word in words]
        yield Launch(
            instance=placement.instance.name,
            node=node.name,
            address=node.address,
            rank=number,
            gpus=tuple(range(rank.first_gpu, rank.first_gpu + rank.gpus)),
            environment=env,
            arguments=tuple(words),
            shell=f"mkdir -p {shlex.quote(sockets)} && env {' '.join(line)} "
            f"> {shlex.quote(log)} 2>&1",
        )


def _configured(
    scenario: Scenario, deployment: Deployment, placement: Placement, number: int
) -> tuple[LauncherConfig, ServerConfig]:
    """The launcher's configuration of one server, as of one node."""
    rank, instance = placement.ranks[number], placement.instance
    node = rank.node
    site = Site("far" if node.cluster == "prfaas" else "near", node.address, subprocess.Popen)
    config = launcher_config(scenario, deployment, node.cluster, site, Path(node.workdir), "")
    server = next(one for one in config.servers if one.name == instance.name)
    server.port = placement.port
    server.bootstrap_port = placement.bootstrap_port or 0
    server.base_gpu = rank.first_gpu
    server.ib_device = node.ib_device or server.ib_device
    if config.transfer_protocol != "rdma":
        server.ib_device = None
    config.python = node.python
    config.model_path = node.model_path or config.model_path
    return config, server


def attach_tables(placements: tuple[Placement, ...]) -> str:
    """``[engine.attach]`` for the servers once they run, to paste below the scenario's tables."""
    return "\n".join(_attach_table(one) for one in placements)


def _attach_table(placement: Placement) -> str:
    address = placement.head.address
    lines = [f"[engine.attach.{placement.instance.name}]"]
    lines += [f'url = "http://{_host(address)}:{placement.port}"']
    if placement.bootstrap_port is not None:
        lines += [f'bootstrap = "{_host(address)}:{placement.bootstrap_port}"']
    return "\n".join(lines) + "\n"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@dataclass(frozen=True, slots=True)
class Profiling:
    """How a hardware is measured first: one server that does all, and the profiler."""

    hardware: str
    node: str
    address: str
    server: str
    profile: str


def profilings(
    scenario: Scenario, placed: Mapping[str, tuple[Placement, ...]]
) -> Iterator[Profiling]:
    """Once for each hardware, on its first node; without decode where it only prefills."""
    sglang = scenario.engine.sglang
    assert sglang is not None, "nodes are of real servers"
    firsts: dict[str, tuple[str, Placement]] = {}
    decodes = set()
    for name, placements in placed.items():
        for one in placements:
            if one.instance.role == "decode":
                decodes.add(one.instance.hardware)
            if one.instance.name not in sglang.attach:  # what runs already is not launched
                firsts.setdefault(one.instance.hardware, (name, one))
    for hardware, (name, placement) in firsts.items():
        lines = [
            one.shell
            for one in _launches(scenario, scenario.deployments[name], placement, alone=True)
        ]
        ask = ["prfaas", "profile", "--url"]
        ask += [f"http://{_host(placement.head.address)}:{placement.port}", "--kind", "sglang"]
        ask += ["--model-architecture", str(scenario.model.architecture.path)]
        ask += ["--hardware", scenario.hardware[hardware].profile.hardware]
        ask += ["--gpus", str(placement.gpus), "--out", "profiles"]
        ask += [] if hardware in decodes else ["--no-decode"]
        node = placement.head
        yield Profiling(hardware, node.name, node.address, "\n".join(lines), shlex.join(ask))


@dataclass(frozen=True, slots=True)
class Canary:
    """One request through a pair of servers, to see that KV takes this path."""

    path: str
    prefill: str
    decode: str
    shell: str


def canaries(placements: tuple[Placement, ...]) -> Iterator[Canary]:
    """Through each path once, inside and across; the run itself tries every pair."""
    decode = next(one for one in placements if one.instance.role == "decode")
    first: dict[str, Placement] = {}
    for one in placements:
        if one.instance.role == "prefill":
            first.setdefault(one.instance.cluster, one)
    for cluster, prefill in first.items():
        path = "across" if cluster == "prfaas" else "inside"
        yield Canary(path, prefill.instance.name, decode.instance.name, _ask(prefill, decode))


def _ask(prefill: Placement, decode: Placement) -> str:
    host = prefill.head.address
    body = (
        '{"input_ids":[' + ",".join(str(token) for token in range(100, 228)) + "],"
        '"sampling_params":{"max_new_tokens":2,"temperature":0,"ignore_eos":true},'
        f'"bootstrap_host":"{host}","bootstrap_port":{prefill.bootstrap_port},'
        '"bootstrap_room":%d}'
    )
    urls = [f"http://{_host(one.head.address)}:{one.port}/generate" for one in (prefill, decode)]
    ask = "curl -sS -m 120 -H 'Content-Type: application/json' -d \"$body\""
    return (
        f"body=$(printf {shlex.quote(body)} $RANDOM$RANDOM); {ask} {urls[0]} > /dev/null & "
        f"{ask} {urls[1]}; wait"
    )
