"""The netem backend: two sites and two routers between them, four anonymous namespaces.

    near -- A == B -- far

A packet from near meets the bottleneck where A sends to B (rate, queue limit, loss) and travels
where B sends to far (delay, jitter); the other way round for far. Two hops, because a netem with
both lets the wait in its queue count towards the delay, which no real path does. Shaping in
routers rather than at the senders leaves TCP's own queue limits in force there. The travelling
hop also has a rate, ten times the link's: without one, jitter would reorder packets.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pyroute2 import IPRoute

from netem.link import MTU_BYTES, LinkSpec
from netem.namespace import (
    Namespace,
    allow_window,
    congestion_control,
    namespace,
    set_address,
)
from netem.qdisc import Netem, QdiscCounters, QdiscReader, add_netem
from netem.site import DirectionCounters, LinkCounters, Site

_PREFIX_LENGTH = 24
_NEAR, _A_NEAR = "10.80.0.1", "10.80.0.2"
_A_MIDDLE, _B_MIDDLE = "10.80.1.1", "10.80.1.2"
_B_FAR, _FAR = "10.80.2.1", "10.80.2.2"
#: Locally administered; a pair is alone on its wire.
_LEFT_MAC, _RIGHT_MAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
_NEAR_NET, _FAR_NET = "10.80.0.0/24", "10.80.2.0/24"
#: Interface names: each namespace calls an interface after what it leads to.
_TO_NEAR, _TO_FAR, _TO_ROUTER = "near", "far", "router"
#: Up to here two cores forward MTU-sized packets with ease; beyond, offload packets must do.
_PER_PACKET_RATE_BYTES_PER_S = 2.5e9 / 8
_TRAVEL_RATE_FACTOR = 10
_MAX_RATE = 2**63 - 1


@dataclass(frozen=True)
class RoutedPath:
    applied: LinkSpec
    notes: tuple[str, ...]
    near: Site
    far: Site
    a: "Router"
    b: "Router"

    def expose(self, site: Site, port: int) -> tuple[str, int]:
        return site.address, port

    def withdraw(self, site: Site, port: int) -> None:
        """Nothing was set up by ``expose``."""

    def counters(self) -> LinkCounters:
        a_near, a_far = self.a.read()
        b_near, b_far = self.b.read()
        return LinkCounters(
            time.monotonic_ns(), _direction(a_far, b_far), _direction(b_near, a_near)
        )


@dataclass(frozen=True)
class Router:
    """The qdiscs of one router: towards near and towards far."""

    reader: QdiscReader
    lock: threading.Lock
    near_index: int
    far_index: int

    def read(self) -> tuple[QdiscCounters, QdiscCounters]:
        with self.lock:
            counters = self.reader.read()
        return counters[self.near_index], counters[self.far_index]


@contextmanager
def open_netem(spec: LinkSpec) -> Iterator[RoutedPath]:
    """The namespaces and their qdiscs. LinkError names the capability or module lacking."""
    per_packet = spec.loss > 0 or spec.rate_bytes_per_s <= _PER_PACKET_RATE_BYTES_PER_S
    applied = replace(
        spec,
        rate_bytes_per_s=float(round(spec.rate_bytes_per_s)),
        rtt_s=2 * round(spec.one_way_s * 1e9) / 1e9,
    )
    notes = ["the bottleneck and the delay are two netem hops in two router namespaces"]
    if not per_packet:
        notes.append(
            "segmentation offload is on at this rate: the queue limit counts packets of up to 64 kB"
        )
    with ExitStack() as stack:
        near, a, b, far = (stack.enter_context(namespace()) for _ in range(4))
        _wire(near, _TO_ROUTER, _NEAR, a, _TO_NEAR, _A_NEAR)
        _wire(a, _TO_FAR, _A_MIDDLE, b, _TO_NEAR, _B_MIDDLE)
        _wire(b, _TO_FAR, _B_FAR, far, _TO_ROUTER, _FAR)
        _shape(a, b, applied)
        near.run(lambda: _route("0.0.0.0/0", _A_NEAR))
        far.run(lambda: _route("0.0.0.0/0", _B_FAR))
        a.run(lambda: _forward(_FAR_NET, _B_MIDDLE))
        b.run(lambda: _forward(_NEAR_NET, _A_MIDDLE))
        for place in (near, far):
            place.run(lambda: _prepare_host(applied, per_packet))
        notes.append(f"TCP congestion control is {near.run(congestion_control)}")
        yield RoutedPath(
            applied,
            tuple(notes),
            Site("near", _NEAR, near.popen),
            Site("far", _FAR, far.popen),
            _router(a, stack),
            _router(b, stack),
        )


def _router(place: Namespace, stack: ExitStack) -> Router:
    def look() -> Router:
        near_index, far_index = map(socket.if_nametoindex, (_TO_NEAR, _TO_FAR))
        return Router(QdiscReader(), threading.Lock(), near_index, far_index)

    router = place.run(look)
    stack.callback(router.reader.close)
    return router


def _shape(a: Namespace, b: Namespace, applied: LinkSpec) -> None:
    rate = round(applied.rate_bytes_per_s)
    bottleneck = Netem(
        limit_packets=applied.queue_packets, loss=applied.loss, rate_bytes_per_s=rate
    )
    travel = Netem(
        # Never the hop that drops: what one way holds is a third of this (see queue_packets).
        limit_packets=max(
            applied.queue_packets, replace(applied, limit_packets=None).queue_packets
        ),
        delay_ns=round(applied.one_way_s * 1e9),
        jitter_ns=round(applied.jitter_s * 1e9),
        rate_bytes_per_s=min(_TRAVEL_RATE_FACTOR * rate, _MAX_RATE),
    )
    a.run(lambda: add_netem(_TO_FAR, bottleneck))
    a.run(lambda: add_netem(_TO_NEAR, travel))
    b.run(lambda: add_netem(_TO_NEAR, bottleneck))
    b.run(lambda: add_netem(_TO_FAR, travel))


def _wire(
    left: Namespace, left_name: str, left_address: str,
    right: Namespace, right_name: str, right_address: str,
) -> None:  # fmt: skip
    """A veth pair between two namespaces, both ends up and addressed, each knowing the other.

    Without the fixed neighbour entries address resolution would cross the shaped hops: delayed,
    lost, and with all but the first hundred packets dropped while it lasts.
    """

    def add() -> None:
        with IPRoute() as route:
            peer = {
                "ifname": right_name,
                "net_ns_fd": right.descriptor,
                "mtu": MTU_BYTES,
                "address": _RIGHT_MAC,
            }
            route.link(
                "add", ifname=left_name, kind="veth", mtu=MTU_BYTES, address=_LEFT_MAC, peer=peer
            )

    left.run(add)
    left.run(lambda: _join(left_name, left_address, right_address, _RIGHT_MAC))
    right.run(lambda: _join(right_name, right_address, left_address, _LEFT_MAC))


def _join(interface: str, address: str, peer_address: str, peer_mac: str) -> None:
    set_address(interface, address, _PREFIX_LENGTH)
    index = socket.if_nametoindex(interface)
    with IPRoute() as route:
        route.neigh("add", dst=peer_address, lladdr=peer_mac, ifindex=index, state="permanent")


def _route(destination: str, gateway: str) -> None:
    with IPRoute() as route:
        route.route("add", dst=destination, gateway=gateway)


def _forward(destination: str, gateway: str) -> None:
    _route(destination, gateway)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _prepare_host(applied: LinkSpec, per_packet: bool) -> None:
    if per_packet:
        # One loss draw and one queue place per offload packet would be up to 45 times too mild.
        with IPRoute() as route:
            index = socket.if_nametoindex(_TO_ROUTER)
            route.link("set", index=index, gso_max_segs=1)
    allow_window(applied.bdp_bytes)


def _direction(bottleneck: QdiscCounters, travel: QdiscCounters) -> DirectionCounters:
    return DirectionCounters(
        bytes=travel.ip_bytes,
        packets=travel.packets,
        dropped=bottleneck.dropped + travel.dropped,
        queued_bytes=bottleneck.backlog_bytes + travel.backlog_bytes,
    )
