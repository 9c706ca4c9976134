"""A line of network namespaces joined by veth pairs, from near to far, with addresses and routes.

    near --10.80.0.0/24-- place 1 --10.80.1.0/24-- ... -- far

In every place the interface towards near is called ``near`` and the one towards far ``far``; on
each wire the near side has the address .1 and the far side .2. Neighbours are fixed entries:
address resolution would cross the shaped hops, delayed, lost, and with all but the first hundred
packets dropped while it lasts. Everything vanishes with the namespaces.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyroute2 import IPRoute

from netem.namespace import Namespace, namespace, set_address
from netem.rtnetlink import RTM_NEWLINK, Rtnetlink, u32_attribute

_NEAR, _FAR = "near", "far"
_PREFIX_LENGTH = 24
#: Locally administered; a pair is alone on its wire.
_NEAR_MAC, _FAR_MAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
# linux/if_link.h, linux/rtnetlink.h: struct ifinfomsg.
_IFLA_GSO_MAX_SEGS = 40
_IFINFOMSG = struct.Struct("=BxHiII")
_DEFAULT_GSO_MAX_SEGS = 65535


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One namespace with its interfaces by index (0: none) and a netlink socket inside."""

    namespace: Namespace
    route: Rtnetlink
    to_near: int
    to_far: int

    def set_offload(self, index: int, *, whole: bool) -> None:
        """Whether an interface sends segmentation-offload packets whole or cut to the MTU."""
        segments = u32_attribute(_IFLA_GSO_MAX_SEGS, _DEFAULT_GSO_MAX_SEGS if whole else 1)
        about = _IFINFOMSG.pack(socket.AF_UNSPEC, 0, index, 0, 0)
        self.route.request(RTM_NEWLINK, about + segments)


def address(wire: int, side: int) -> str:
    """On the wire of a number (from near, 0), the side 1 (near) or 2 (far)."""
    return f"10.80.{wire}.{side}"


@contextmanager
def line_of_namespaces(places: int, mtu_bytes: int) -> Iterator[list[Place]]:
    """``places`` namespaces in a line, the first one near and the last one far."""
    with ExitStack() as stack:
        spaces = [stack.enter_context(namespace()) for _ in range(places)]
        for wire in range(places - 1):
            _join(spaces[wire], spaces[wire + 1], wire, mtu_bytes)
        for number, space in enumerate(spaces):
            space.run(partial(_set_routes, number, places - 1))
        yield [_place(space, stack) for space in spaces]


def _place(space: Namespace, stack: ExitStack) -> Place:
    def look() -> Place:
        names = {name: index for index, name in socket.if_nameindex()}
        return Place(space, Rtnetlink(), names.get(_NEAR, 0), names.get(_FAR, 0))

    place = space.run(look)
    stack.enter_context(place.route)
    return place


def _join(left: Namespace, right: Namespace, wire: int, mtu_bytes: int) -> None:
    def add() -> None:
        peer = {
            "ifname": _NEAR,
            "net_ns_fd": right.descriptor,
            "mtu": mtu_bytes,
            "address": _FAR_MAC,
        }
        with IPRoute() as route:
            route.link("add", ifname=_FAR, kind="veth", mtu=mtu_bytes, address=_NEAR_MAC, peer=peer)

    left.run(add)
    left.run(lambda: _bring_up(_FAR, address(wire, 1), address(wire, 2), _FAR_MAC))
    right.run(lambda: _bring_up(_NEAR, address(wire, 2), address(wire, 1), _NEAR_MAC))


def _bring_up(interface: str, own: str, peer: str, peer_mac: str) -> None:
    set_address(interface, own, _PREFIX_LENGTH)
    index = socket.if_nametoindex(interface)
    with IPRoute() as route:
        route.neigh("add", dst=peer, lladdr=peer_mac, ifindex=index, state="permanent")


def _set_routes(number: int, last: int) -> None:
    """Of the place with a number: the sites send all away, the routers towards both sites."""
    with IPRoute() as route:
        if number == 0:
            route.route("add", dst="0.0.0.0/0", gateway=address(0, 2))
            return
        if number == last:
            route.route("add", dst="0.0.0.0/0", gateway=address(last - 1, 1))
            return
        if number > 1:
            route.route("add", dst=f"{address(0, 0)}/24", gateway=address(number - 1, 1))
        if number < last - 1:
            route.route("add", dst=f"{address(last - 1, 0)}/24", gateway=address(number, 2))
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
