"""Which instance of a deployment runs on which nodes and GPUs, at which ports.

Instances smaller than a node share it, first fit in the order of the file; an instance of a node's
size has one; a larger one spans whole nodes, in the engine's words ``--nnodes``. The servers of one
deployment are up at a time, so each deployment has all of the nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.core import Instance, ScenarioError
from harness.deployment import Deployment
from harness.engine.sglang.command import gpus_of
from harness.engine_settings import Sglang, engine_role
from harness.nodes import Node
from harness.scenario import Scenario

#: A server takes ports up to a few hundred above its own for its processes among themselves.
_PORT, _BOOTSTRAP_PORT, _GROUP_PORT, _PORT_STEP = 20_000, 8_998, 15_000, 500


@dataclass(frozen=True, slots=True)
class Rank:
    """The part of a server on one node: its GPUs ``first_gpu`` to ``first_gpu + gpus - 1``."""

    node: Node
    first_gpu: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One server. ``ranks[0]`` answers HTTP; ``bootstrap_port`` is of prefill servers,
    ``group_port`` of those on several nodes."""

    instance: Instance
    ranks: tuple[Rank, ...]
    port: int
    bootstrap_port: int | None
    group_port: int | None

    @property
    def head(self) -> Node:
        return self.ranks[0].node

    @property
    def gpus(self) -> int:
        return sum(rank.gpus for rank in self.ranks)


def place(scenario: Scenario, deployment: Deployment) -> tuple[Placement, ...]:
    """Every instance of the deployment; ScenarioError where the nodes do not suffice."""
    if deployment.more_prfaas or deployment.more_pd:
        raise ScenarioError(
            f"Deployment {deployment.name!r} of the scenario file {scenario.path} has several "
            "clusters of a kind, which are planned and not placed on nodes. Remove more_prfaas and "
            "more_pd."
        )
    taken = dict.fromkeys(scenario.nodes, 0)
    servers = dict.fromkeys(scenario.nodes, 0)
    placed = []
    for instance in deployment.instances():
        needed = scenario.hardware[instance.hardware].profile.gpus_per_instance
        _check_ranks(scenario, instance, needed)
        own = nodes_of(scenario, instance)
        ranks = _ranks(own, taken, needed)
        if ranks is None:
            raise ScenarioError(_lacking(scenario, deployment, instance, needed))
        for rank in ranks:
            taken[rank.node.name] += rank.gpus
        head = ranks[0].node.name
        placed.append(_with_ports(instance, ranks, servers[head]))
        servers[head] += 1
    return tuple(placed)


def nodes_of(scenario: Scenario, instance: Instance) -> list[Node]:
    """Nodes of an instance's cluster and hardware."""
    return [
        node
        for node in scenario.nodes.values()
        if (node.cluster, node.hardware) == (instance.cluster, instance.hardware)
    ]


def capacity(nodes: Sequence[Node], needed: int) -> int:
    """How many instances of ``needed`` GPUs the nodes hold."""
    taken = {node.name: 0 for node in nodes}
    count = 0
    while (ranks := _ranks(nodes, taken, needed)) is not None:
        for rank in ranks:
            taken[rank.node.name] += rank.gpus
        count += 1
    return count


def _ranks(nodes: Sequence[Node], taken: dict[str, int], needed: int) -> tuple[Rank, ...] | None:
    """The first node with room for all, else the first whole ones of one size that divide it."""
    for node in nodes:
        if taken[node.name] + needed <= node.gpus:
            return (Rank(node, taken[node.name], needed),)
    for size in dict.fromkeys(node.gpus for node in nodes):
        free = [node for node in nodes if node.gpus == size and not taken[node.name]]
        count, rest = divmod(needed, size)
        if not rest and 1 < count <= len(free):
            return tuple(Rank(node, 0, size) for node in free[:count])
    return None


def _with_ports(instance: Instance, ranks: tuple[Rank, ...], before: int) -> Placement:
    """Ports by how many servers are on the head node before this one; no two of them clash."""
    return Placement(
        instance,
        ranks,
        port=_PORT + _PORT_STEP * before,
        bootstrap_port=_BOOTSTRAP_PORT + before if instance.role == "prefill" else None,
        group_port=_GROUP_PORT + 10 * before if len(ranks) > 1 else None,
    )


def _check_ranks(scenario: Scenario, instance: Instance, needed: int) -> None:
    sglang = scenario.engine.sglang
    if sglang is None or instance.name in sglang.attach:
        return
    name = engine_role(instance)
    given = server_gpus(sglang, instance)
    if given != needed:
        raise ScenarioError(
            f"'engine.{name}' in the scenario file {scenario.path} makes servers of {given} GPUs "
            f"(tp x dp, or tp with --enable-dp-attention), but the profile of hardware "
            f"{instance.hardware!r} is of instances of {needed}: its costs would be of another "
            "engine. Set engine.tp, or name a profile of that size."
        )


def server_gpus(sglang: Sglang, instance: Instance) -> int:
    role = sglang.roles[engine_role(instance)]
    return gpus_of(role.tp, role.dp, role.extra_flags)


def _lacking(scenario: Scenario, deployment: Deployment, instance: Instance, needed: int) -> str:
    """What was asked for, what there is, and what would fit."""
    alike = [
        one
        for one in deployment.instances()
        if (one.cluster, one.hardware) == (instance.cluster, instance.hardware)
    ]
    nodes = nodes_of(scenario, instance)
    room = capacity(nodes, needed)
    gpus = sum(node.gpus for node in nodes)
    return (
        f"Deployment {deployment.name!r} of the scenario file {scenario.path} needs {len(alike)} "
        f"instances of {needed} GPUs of hardware {instance.hardware!r} in cluster "
        f"{instance.cluster!r}; its {len(nodes)} nodes with {gpus} GPUs hold {room}. "
        f"{' '.join(_fitting(deployment, instance, room))}"
    )


def _fitting(deployment: Deployment, instance: Instance, room: int) -> Iterator[str]:
    key = f"deployments.{deployment.name}"
    if instance.cluster == "prfaas":
        if room:
            yield f"What fits: {key}.num_prfaas = {room}."
    elif room > 1 or (room and not deployment.num_prefill):
        total = deployment.num_prefill + deployment.num_decode
        prefill = min(max(1, round(room * deployment.num_prefill / total)), room - 1)
        if not deployment.num_prefill:
            prefill = 0
        yield (
            f"What fits: num_prefill + num_decode = {room}, in this proportion {key}.num_prefill = "
            f"{prefill} and {key}.num_decode = {room - prefill}; prfaas plan with these finds the "
            "best split."
        )
    yield "Or add [nodes.NAME] tables; prfaas simulate runs the larger one, modelled."
