"""Clusters joined by shaped links, and that opening and closing them leaves nothing behind."""

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from netem.link import LinkError, LinkSpec, symmetric
from netem.namespace import namespace
from netem.site import DirectionCounters
from netem.testlink import BackendName, open_link
from netem.topology import Cluster, Topology, open_topology
from netem.wiring import line_of_namespaces

PEER = str(Path(__file__).with_name("netem_peer.py"))
SIZE = 1_000_000
#: Two clusters that prefill for one, over ways of their own.
LINKS = {
    ("pd", "east"): symmetric("east", 25e6, 4e-3),
    ("pd", "west"): symmetric("west", 12.5e6, 20e-3),
    ("west", "east"): symmetric("coast", 12.5e6, 40e-3),
}
BACKENDS = [
    pytest.param("relay", id="relay"),
    pytest.param("forwarder", marks=pytest.mark.netadmin, id="forwarder"),
    pytest.param("netem", marks=[pytest.mark.netadmin, pytest.mark.netem], id="netem"),
]


def peer(stack: ExitStack, cluster: Cluster, *arguments: object) -> "subprocess.Popen[str]":
    process: subprocess.Popen[str] = cluster.popen(
        [sys.executable, PEER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return stack.enter_context(process)


def says(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    message: dict[str, Any] = json.loads(process.stdout.readline())
    return message


def sent(topology: Topology, sender: str, receiver: str) -> float:
    """How long SIZE bytes from one cluster to another took, acknowledged whole."""
    with ExitStack() as stack:
        cluster = topology.clusters[receiver]
        server = peer(stack, cluster, "serve", cluster.listen_address)
        host, port = topology.expose(receiver, says(server)["port"], sender)
        said = says(peer(stack, topology.clusters[sender], "send", host, port, SIZE))
        assert said["answer"] == {"bytes": SIZE, "sha256": said["sha256"]}
        return float(said["end_s"] - said["start_s"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pair_has_its_own_link_and_a_cluster_all_of_its_links(backend: BackendName) -> None:
    with open_topology(LINKS, backend) as topology:
        assert set(topology.clusters) == {"pd", "east", "west"}
        for pair, spec in LINKS.items():
            for sender, receiver in (pair, pair[::-1]):
                link = topology.link(sender, receiver)
                name = "near_to_far" if (sender, receiver) == pair else "far_to_near"
                before = {each: carried(topology, each, name) for each in LINKS}
                took_s = sent(topology, sender, receiver)
                # Out at the rate, and one way back; the handshake before it is a round trip.
                assert took_s >= 0.95 * (SIZE / spec.rate_bytes_per_s + spec.rtt_s)
                assert carried(topology, pair, name) - before[pair] >= SIZE
                others = set(LINKS) - {pair}
                assert all(carried(topology, each, name) == before[each] for each in others)
                assert link.spec == spec


def carried(topology: Topology, pair: tuple[str, str], direction: str) -> int:
    counters: DirectionCounters = getattr(topology.links[pair].counters(), direction)
    return counters.bytes


@pytest.mark.netadmin
def test_clusters_without_a_link_do_not_reach_each_other() -> None:
    links = {pair: LINKS[pair] for pair in (("pd", "east"), ("pd", "west"))}
    with open_topology(links) as topology, ExitStack() as stack:
        server = peer(stack, topology.clusters["east"], "serve", "0.0.0.0")
        host, port = topology.expose("east", says(server)["port"], "pd")
        code = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
        arguments = [sys.executable, "-c", code, host, str(port)]
        west = topology.clusters["west"].popen(arguments, stderr=subprocess.PIPE, text=True)
        _, error = west.communicate()
        assert "Network is unreachable" in error
        with pytest.raises(LinkError, match="no link between 'east' and 'west'"):
            topology.expose("east", port, "west")


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], "1 to 100 links"),
        ([("pd", "pd")], "no link to itself"),
        ([("pd", "east"), ("east", "pd")], "both directions"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(pairs: list[tuple[str, str]], said: str) -> None:
    links: dict[tuple[str, str], LinkSpec] = dict.fromkeys(pairs, LINKS["pd", "east"])
    with pytest.raises(LinkError, match=said), open_topology(links):
        pass


def belongings() -> dict[str, Any]:
    """What a link could leave behind, of this process and of the machine."""
    return {
        "namespaces": sorted(namespaces()),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": [child.pid for child in psutil.Process().children(recursive=True)],
        "mounts": Path("/proc/self/mounts").read_text(),
    }


def namespaces() -> set[str]:
    """Network namespaces that any process of this one's family is in or holds open."""
    found = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        for folder in ("ns", "fd"):
            for name in os.listdir(f"/proc/{process.pid}/{folder}"):
                try:
                    target = os.readlink(f"/proc/{process.pid}/{folder}/{name}")
                except OSError:
                    continue
                if target.startswith("net:"):
                    found.add(target)
    return found


@pytest.mark.netadmin
def test_200_cycles_leave_no_namespace_interface_descriptor_or_process() -> None:
    """The namespaces, cables and devices that any backend is made of, up and down."""

    def cycle() -> set[str]:
        with line_of_namespaces(2, 1500), namespace() as place:
            place.popen(["true"]).wait()
            return namespaces()

    assert len(cycle()) == 4
    before = belongings()
    for _ in range(200):
        cycle()
    assert belongings() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_cycles_of_a_backend_leave_nothing(backend: BackendName) -> None:
    def cycle() -> None:
        with open_link(symmetric("cycle", 125e6, 1e-3), backend) as link:
            link.counters()

    cycle()
    before = belongings()
    for _ in range(10):
        cycle()
    assert belongings() == before


@pytest.mark.netadmin
def test_a_topology_that_an_error_ends_leaves_nothing() -> None:
    before = belongings()
    with pytest.raises(RuntimeError, match="stop"), open_topology(LINKS):
        raise RuntimeError("stop")
    assert belongings() == before
