"""Two nodes joined by a cable, as network namespaces of the tests' own, and what runs on them.

    python tests/netem_nodes.py PID COMMAND ARGUMENT...    run a command on the node of a process

The node ``here`` has v0 (10.1.0.1) with four queues, the node ``there`` v1 (10.1.0.2, 10.1.0.3).
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pyroute2 import IPRoute

from netem.kept import KeeperOrder, start_keeper
from netem.link import LinkError, LinkSpec, symmetric
from netem.namespace import Namespace, namespace, set_address
from netem.nic import NicLink, open_nic
from netem.nic_plan import NicPlan
from netem.reaping import take_down
from netem.state import Entry, entries, held

Result = TypeVar("Result")

PATIENCE_S = 60
ROOT = Path(__file__).parents[1]
HERE, THERE, ALSO_THERE = "10.1.0.1", "10.1.0.2", "10.1.0.3"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Node:
    """A namespace, a process that stands for it, and a folder for the records of its links."""

    place: Namespace
    process: "subprocess.Popen[bytes]"
    folder: Path

    def run(self, call: Callable[[], Result]) -> Result:
        return self.place.run(call)

    def popen(self, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        """Python with ``arguments`` on the node."""
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PRFAAS_RUNTIME_DIR": str(self.folder),
        }
        environment.pop("SSH_CONNECTION", None)
        return self.place.popen(
            [sys.executable, *arguments],
            text=True,
            env=environment | options.pop("environment", {}),
            **options,
        )

    def link(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """``link ...`` on the node, to its end."""
        process = self.popen(
            *("-m", "netem", "link", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )
        out, error = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, error)

    @property
    def shell(self) -> str:
        """What in front of a command runs it on the node, for ``--peer-shell``."""
        return f"{sys.executable} {__file__} {self.process.pid}"

    def snapshot(self) -> dict[str, list[Any]]:
        return self.run(snapshot)


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """``here`` and ``there``."""
    with ExitStack() as stack:
        nodes = []
        for name in ("here", "there"):
            place = stack.enter_context(namespace())
            process = stack.enter_context(
                place.popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            )
            stack.callback(process.kill)
            nodes.append(Node(place, process, folder / name))
        here, there = nodes
        here.run(lambda: _cable(there.place))
        here.run(lambda: set_address("v0", HERE, 24))
        there.run(lambda: set_address("v1", THERE, 24))
        there.run(lambda: set_address("v1", ALSO_THERE, 24))
        yield here, there


def _cable(there: Namespace) -> None:
    queues = {"num_tx_queues": 4, "num_rx_queues": 4}
    with IPRoute() as route:
        peer = {"ifname": "v1", "net_ns_fd": there.descriptor}
        route.link("add", ifname="v0", kind="veth", peer=peer, **queues)


def snapshot() -> dict[str, list[Any]]:
    """Interfaces, qdiscs and filters as pyroute2 sees them, without counters."""
    with IPRoute() as route:
        links = [(link["index"], link.get_attr("IFLA_IFNAME")) for link in route.get_links()]
        qdiscs = [
            (each["index"], each["handle"], each["parent"], each.get_attr("TCA_KIND"))
            for each in route.get_qdiscs()
        ]
        # 0 is the tree at the root; the others are the hooks of a clsact qdisc.
        filters = [
            (index, each["handle"], each["parent"], each["info"], each.get_attr("TCA_KIND"))
            for index, _ in links
            for parent in (0, 0xFFFFFFF2, 0xFFFFFFF3)
            for each in route.get_filters(index=index, parent=parent)
        ]
    return {"links": sorted(links), "qdiscs": sorted(qdiscs), "filters": sorted(filters)}


def send(node: Node, host: str, port: int, size: int) -> None:
    """TCP bytes from a node, read to their end there."""

    def connect() -> socket.socket:
        return socket.create_connection((host, port), timeout=60)

    with node.run(connect) as connection:
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


@contextmanager
def listener(
    node: Node, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
) -> Iterator[socket.socket]:
    """A listening socket on a node."""
    with node.run(lambda: socket.create_server((host, port), family=family)) as server:
        server.settimeout(60)
        yield server


def up(node: Node, name: str = "wan", **changed: Any) -> Entry:
    """A link with a keeper, as ``link up`` makes one."""
    plan = {"interface": "v0", "peers": [THERE]} | changed
    order = KeeperOrder(name, {"rate": "100mbit", "rtt": "0"}, nic=plan)
    return node.run(lambda: start_keeper(order))


def down(node: Node, entry: Entry) -> None:
    assert node.run(lambda: take_down(entry)).problems == ()


def down_all() -> None:
    """What a test that failed left up."""
    for entry in entries():
        if entry.details.get("keeper"):
            take_down(entry)


@contextmanager
def shaped(spec: LinkSpec | None = None, **changed: Any) -> Iterator[NicLink]:
    """A link of v0 to the peer, held by this process, in the thread's namespace."""
    spec = spec or symmetric("held", 12.5e6, 0.0)
    plan = NicPlan.load({"interface": "v0", "peers": [THERE]} | changed)
    with held("held") as entry, open_nic(spec, plan, entry) as link:
        yield link


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process is bringing about."""
    wait = threading.Event()
    for _ in range(int(PATIENCE_S / 0.05)):
        if condition():
            return
        wait.wait(0.05)
    raise AssertionError(f"not within {PATIENCE_S} s")


def add_tbf(handle: int = 0x10000) -> None:
    with IPRoute() as route:
        index = route.link_lookup(ifname="v0")[0]
        route.tc("add", "tbf", index, handle, rate="1mbit", burst=3000, limit=9000)


def refused(node: Node, **changed: Any) -> str:
    """The refusal, after which nothing is different."""

    def attempt() -> str:
        with pytest.raises(LinkError) as refusal, shaped(**changed):
            pass
        return str(refusal.value)

    before = node.snapshot()
    said = node.run(attempt)
    assert node.snapshot() == before
    return said


def main() -> None:
    descriptor = os.open(f"/proc/{sys.argv[1]}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None).setns(descriptor, _CLONE_NEWNET) != 0:
        sys.exit("setns")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
