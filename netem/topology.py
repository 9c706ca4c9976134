"""Any number of clusters and shaped links between pairs of them, on one machine.

    cluster --- site of pair 0 == link 0 == site of pair 0 --- cluster
       |
       +------- site of pair 1 == link 1 == site of pair 1 --- cluster ...

A cluster is one namespace, whatever number of links it has; processes in it share its network. A
link is what ``open_link`` makes, with its routers; its two sites become routers too, each joined to
its cluster by an unshaped veth pair. A cluster has one address for each of its links, so that the
address a peer connects to tells the way. Pair ``n`` has the hosts 10 + n (near) and 110 + n (far)
in its sites' subnets. Neighbours are fixed entries here too: nothing but the clusters' own traffic
crosses a link. On the relay backend every cluster is this machine.
"""

import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pyroute2 import IPRoute

from netem.link import LinkError, LinkSpec
from netem.namespace import Namespace, allow_window, namespace
from netem.routed import RoutedPath
from netem.site import Site
from netem.testlink import BackendName, TestLink, open_link

_NEAR_HOSTS, _FAR_HOSTS, _MAX_PAIRS = 10, 110, 100
#: Locally administered; a pair is alone on its wire.
_CLUSTER_MAC, _SITE_MAC = "02:00:00:00:01:01", "02:00:00:00:01:02"
_SITE_INTERFACE = "cluster"
_EVERY_ADDRESS, _LOOPBACK = "0.0.0.0", "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Cluster:
    """One place. ``popen`` starts a process in it; servers listen on ``listen_address``."""

    name: str
    listen_address: str
    popen: Callable[..., "subprocess.Popen[Any]"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Clusters by name, and the links between them by (near, far)."""

    clusters: Mapping[str, Cluster]
    links: Mapping[tuple[str, str], TestLink]
    #: By (cluster, peer): the cluster's address on the link to that peer.
    _addresses: Mapping[tuple[str, str], str]

    def link(self, one: str, other: str) -> TestLink:
        """The link between two clusters, whichever is near. LinkError when there is none."""
        for pair in ((one, other), (other, one)):
            if pair in self.links:
                return self.links[pair]
        known = ", ".join(f"{near} and {far}" for near, far in self.links)
        raise LinkError(f"there is no link between {one!r} and {other!r}; there is: {known}")

    def expose(self, cluster: str, port: int, peer: str) -> tuple[str, int]:
        """Where processes of ``peer`` reach a server of ``cluster`` that listens on a port."""
        link = self.link(cluster, peer)
        site = link.near if (cluster, peer) in self.links else link.far
        host, exposed = link.expose(site, port)
        return self._addresses.get((cluster, peer), host), exposed


@contextmanager
def open_topology(
    links: Mapping[tuple[str, str], LinkSpec], backend: Literal["auto"] | BackendName = "auto"
) -> Iterator[Topology]:
    """Open a link for every pair (near, far) of cluster names, and the clusters they join.

    Everything is gone when the context ends, or the process. LinkError as ``open_link``.
    """
    _check(links)
    names = list(dict.fromkeys(name for pair in links for name in pair))
    with ExitStack() as stack:
        opened = {
            pair: stack.enter_context(open_link(spec, backend)) for pair, spec in links.items()
        }
        relayed = {link.backend == "relay" for link in opened.values()}
        if len(relayed) == 2:
            raise LinkError(
                "some links of the topology need the relay and some do not, so their clusters "
                "cannot be the same: open all of them on the relay"
            )
        if relayed == {True}:
            here = {name: Cluster(name, _LOOPBACK, subprocess.Popen) for name in names}
            yield Topology(here, opened, {})
            return
        places = {name: stack.enter_context(namespace()) for name in names}
        addresses: dict[tuple[str, str], str] = {}
        for number, ((near, far), link) in enumerate(opened.items()):
            addresses[near, far] = _host(link.near, _NEAR_HOSTS + number)
            addresses[far, near] = _host(link.far, _FAR_HOSTS + number)
            _attach(
                places[near], link, link.near, number, addresses[near, far], addresses[far, near]
            )
            _attach(places[far], link, link.far, number, addresses[far, near], addresses[near, far])
        clusters = {
            name: Cluster(name, _EVERY_ADDRESS, place.popen) for name, place in places.items()
        }
        yield Topology(clusters, opened, addresses)


def _check(links: Mapping[tuple[str, str], LinkSpec]) -> None:
    if not 0 < len(links) <= _MAX_PAIRS:
        raise LinkError(f"a topology has 1 to {_MAX_PAIRS} links")
    for near, far in links:
        if near == far:
            raise LinkError(f"the cluster {near!r} needs no link to itself")
        if (far, near) in links:
            raise LinkError(f"the link between {near!r} and {far!r} is given in both directions")


def _host(site: Site, host: int) -> str:
    return f"{site.address.rpartition('.')[0]}.{host}"


def _attach(
    cluster: Namespace, link: TestLink, site: Site, number: int, own: str, peer: str
) -> None:
    """Join a cluster to its site of a link, and have ``own`` reached over the link."""
    place = site.namespace
    assert place is not None, "a backend with packets has namespaces"
    interface = f"link{number}"
    mtu_bytes = link.applied.mtu_bytes
    cluster.run(lambda: _add_pair(interface, place, mtu_bytes))
    cluster.run(lambda: _bring_up(interface, own, peer, _SITE_MAC))
    cluster.run(lambda: allow_window(link.applied.bdp_bytes))
    place.run(lambda: _bring_up(_SITE_INTERFACE, None, own, _CLUSTER_MAC))
    place.run(lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
    if isinstance(link.path, RoutedPath):
        beside = link.path.places[1 if site.name == "near" else -2].namespace
        beside.run(lambda: _same_neighbour(site.address, own))


def _add_pair(interface: str, place: Namespace, mtu_bytes: int) -> None:
    peer = {
        "ifname": _SITE_INTERFACE,
        "net_ns_fd": place.descriptor,
        "mtu": mtu_bytes,
        "address": _SITE_MAC,
    }
    with IPRoute() as route:
        route.link(
            "add", ifname=interface, kind="veth", mtu=mtu_bytes, address=_CLUSTER_MAC, peer=peer
        )


def _bring_up(interface: str, own: str | None, other: str, other_mac: str) -> None:
    """An end of the pair: its address if it has one, and the way to the other side's host."""
    index = socket.if_nametoindex(interface)
    with IPRoute() as route:
        if own is not None:
            route.addr("add", index=index, address=own, prefixlen=32)
        route.link("set", index=index, state="up")
        route.neigh("add", dst=other, lladdr=other_mac, ifindex=index, state="permanent")
        source = {} if own is None else {"prefsrc": own}
        route.route("add", dst=f"{other}/32", oif=index, scope="link", **source)


def _same_neighbour(known: str, also: str) -> None:
    """On a router: a host is where a neighbour that it knows is."""
    with IPRoute() as route:
        (entry,) = route.get_neighbours(dst=known)
        mac, index = entry.get_attr("NDA_LLADDR"), entry["ifindex"]
        route.neigh("add", dst=also, lladdr=mac, ifindex=index, state="permanent")
