"""Which traffic of a real node is the link, and what is refused before anything changes.

Nothing is shaped that the operator's way in depends on (``netem.access``): an interface that
carries a default route, peers that an SSH session comes from. Nor what would shape nothing, or the
wrong thing: peers that do not go by the interface, networks that hold this node itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from netem.access import (
    IFINFOMSG,
    Network,
    default_route_interfaces,
    inside,
    interface_towards,
    own_addresses,
    ssh_peers,
)
from netem.deadman import SILENCE_S
from netem.link import Direction, LinkError, LinkSpec
from netem.nic_tree import network
from netem.rtnetlink import RTM_GETLINK, Rtnetlink, attributes
from netem.site import SiteName

Shape = Literal["egress", "ingress", "both"]
Sharing = Literal["router_node", "per_node_share", "mq"]

_IFLA_IFNAME, _IFLA_MTU, _IFLA_NUM_TX_QUEUES, _IFF_UP, _IFF_LOOPBACK = 3, 4, 31, 1, 8
_MAX_PEERS = 256
_IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


@dataclass(frozen=True, slots=True)
class NicPlan:
    """Which traffic of this node the link is. ``site`` is the end that this node stands at."""

    interface: str
    peers: tuple[Network, ...]
    site: SiteName = "near"
    shape: Shape = "both"
    sharing: Sharing = "per_node_share"
    nodes: int = 1
    replace: bool = False
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        if not 0 < len(self.peers) <= _MAX_PEERS:
            raise LinkError(f"a link of an interface has 1 to {_MAX_PEERS} peers")
        if self.nodes < 1 or (self.nodes > 1 and self.sharing == "router_node"):
            raise LinkError("nodes must be at least 1, and is 1 on a node that routes for all")

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> "NicPlan":
        """From the JSON form of its fields, peers as text; LinkError says what is wrong."""
        return cls(**dict(document) | {"peers": tuple(network(peer) for peer in document["peers"])})

    def applied(self, spec: LinkSpec) -> LinkSpec:
        """This node's part of the link."""
        return replace(
            spec,
            near_to_far=_part(spec.near_to_far, self.nodes),
            far_to_near=_part(spec.far_to_near, self.nodes),
        )


@dataclass(frozen=True, slots=True)
class Nic:
    """An interface as the kernel describes it."""

    index: int
    mtu_bytes: int
    queues: int

    def carries(self, spec: LinkSpec) -> LinkSpec:
        """The link in packets of this interface's size."""
        return replace(spec, mtu_bytes=self.mtu_bytes)


def refuse(route: Rtnetlink, nic: Nic, plan: NicPlan) -> None:
    """LinkError when shaping could cut the operator off or would shape nothing."""
    if plan.sharing == "router_node" and _IP_FORWARD.read_text().strip() == "0":
        raise LinkError("this node does not route (net.ipv4.ip_forward is 0): no router_node")
    if why := default_route_interfaces(route).get(nic.index):
        raise LinkError(
            f"{plan.interface} is not shaped: {why}. Name an interface that only the other "
            "cluster's traffic uses, or shape on a node that routes between the clusters"
        )
    for address, what in ssh_peers().items():
        if (held := inside(address, plan.peers)) is not None:
            raise LinkError(
                f"{plan.interface} is not shaped: the peers {held} hold {address}, and there is "
                f"{what}. Name the peers more narrowly"
            )
    for address in own_addresses(route):
        if (held := inside(address, plan.peers)) is not None:
            raise LinkError(
                f"the peers {held} hold {address}, which is this node's own: name only "
                "addresses of the other cluster"
            )
    for peers in plan.peers:
        _refuse_unreached(route, nic, plan, peers)


def _refuse_unreached(route: Rtnetlink, nic: Nic, plan: NicPlan, peers: Network) -> None:
    if peers.is_loopback or peers.is_multicast or peers.is_unspecified:
        raise LinkError(f"the peers {peers} are no addresses of another node")
    address = peers[0] if peers.num_addresses == 1 else peers[1]
    index = interface_towards(route, address)
    if index != nic.index:
        where = "by no interface" if index is None else f"by interface {_name(route, index)}"
        raise LinkError(
            f"traffic to {address} of the peers {peers} leaves {where}, not by "
            f"{plan.interface}: shaping that would do nothing"
        )


def _part(direction: Direction, nodes: int) -> Direction:
    return replace(direction, rate_bytes_per_s=direction.rate_bytes_per_s / nodes)


def look(route: Rtnetlink, name: str) -> Nic:
    """LinkError when there is no such interface, or it cannot be shaped now."""
    links = {}
    for body in route.dump(RTM_GETLINK, IFINFOMSG.pack(0, 0, 0, 0, 0)):
        found = attributes(body[IFINFOMSG.size :])
        links[found[_IFLA_IFNAME].rstrip(b"\0").decode()] = (IFINFOMSG.unpack_from(body), found)
    if name not in links:
        raise LinkError(f"there is no interface {name!r}; interfaces: {', '.join(sorted(links))}")
    header, found = links[name]
    if header[3] & _IFF_LOOPBACK:
        raise LinkError(f"{name} is the loopback interface: no link goes by it")
    if not header[3] & _IFF_UP:
        raise LinkError(f"{name} is down: bring it up first")
    mtu, queues = (int.from_bytes(found[key], "little") for key in (_IFLA_MTU, _IFLA_NUM_TX_QUEUES))
    return Nic(header[2], mtu, queues)


def _name(route: Rtnetlink, index: int) -> str:
    for body in route.dump(RTM_GETLINK, IFINFOMSG.pack(0, 0, 0, 0, 0)):
        if IFINFOMSG.unpack_from(body)[2] == index:
            return attributes(body[IFINFOMSG.size :])[_IFLA_IFNAME].rstrip(b"\0").decode()
    return str(index)
