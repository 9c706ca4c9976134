"""GPU nodes as resolved: which machine has which GPUs, and how it is reached.

Two addresses a node: requests, health and the PD protocol's bootstrap go by ``address``, KV by
``kv_address``, whose interface is the one that a link is shaped on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.datafile import nearest, printable
from harness.resolution import wrong
from harness.scenario_tables.nodes import NodeTable

#: Addresses that mean this machine wherever they are read.
_HERE = ("localhost", "127.", "::1")


@dataclass(frozen=True, slots=True)
class Node:
    """``kv_interface`` None: its link is not shaped. ``gpu_memory_bytes`` is of one GPU."""

    name: str
    address: str
    cluster: Literal["prfaas", "pd"]
    hardware: str
    gpus: int
    gpu_memory_bytes: float | None
    kv_address: str
    kv_interface: str | None
    ib_device: str | None
    python: str
    model_path: str | None
    workdir: str

    @property
    def is_local(self) -> bool:
        """Whether its address says that it is this machine."""
        return self.address.startswith(_HERE)


def resolve_nodes(
    tables: Mapping[str, NodeTable], where: str, hardware: list[str]
) -> dict[str, Node]:
    """Nodes by name, in the order of the file. ScenarioError names the key that is wrong."""
    nodes: dict[str, Node] = {}
    for name, table in tables.items():
        key = f"nodes.{printable(name)}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            why = "a node is named by letters, digits, '.', '_' and '-', at most 64 of them"
            raise wrong(key, where, why)
        if table.hardware not in hardware:
            near = nearest(table.hardware, hardware)
            hint = f"did you mean {near!r}?" if near else f"defined: {', '.join(hardware)}"
            why = f"no hardware is named {printable(table.hardware)!r} ({hint})"
            raise wrong(f"{key}.hardware", where, why)
        node = _node(name, table)
        for other in nodes.values():
            for attribute in ("address", "kv_address"):
                same = getattr(node, attribute)
                if same in (other.address, other.kv_address):
                    why = f"node {other.name!r} has the address {same} already"
                    raise wrong(f"{key}.{attribute}", where, why)
        nodes[name] = node
    return nodes


def _node(name: str, table: NodeTable) -> Node:
    return Node(
        name=name,
        address=table.address,
        cluster=table.cluster,
        hardware=table.hardware,
        gpus=table.gpus,
        gpu_memory_bytes=table.gpu_memory,
        kv_address=table.kv_address or table.address,
        kv_interface=table.kv_interface,
        ib_device=table.ib_device,
        python=table.python,
        model_path=table.model_path,
        workdir=table.workdir,
    )
