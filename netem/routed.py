"""The netem backend: two sites and two routers between them, four anonymous namespaces.

    near -- A == B -- far

A packet from near meets the bottleneck where A sends to B and travels where B sends to far; the
other way round for far (see ``netem.hops``). Shaping in routers rather than at the senders leaves
TCP's own queue limits in force there. With a cap on every flow there is one more router on each
side, next to the site, which paces the flows before they meet the bottleneck.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from netem.attributes import Netem, decode, encode
from netem.hops import draws_by_packet, flow_limit_packets, hops
from netem.link import DIRECTIONS, Direction, DirectionName, LinkError, LinkSpec
from netem.namespace import allow_window, congestion_control
from netem.qdisc import QdiscCounters, add_netem, change_netem, read_counters, set_flow_cap
from netem.rtnetlink import Rtnetlink
from netem.site import DirectionCounters, LinkCounters, Site, put_back_on_failure
from netem.wiring import Place, address, line_of_namespaces

#: Up to here two cores forward MTU-sized packets with ease; beyond, offload packets must do.
_PER_PACKET_RATE_BYTES_PER_S = 2.5e9 / 8
_MADE_OF = "the bottleneck and the delay are two netem hops in two router namespaces"
_CAPPED = "every flow is paced by a router of its own beside each site (sch_fq maxrate)"
_OFFLOADED = (
    "segmentation offload is on at this rate: the queue limit counts packets of up to 64 kB"
)
_CORRELATED = (
    "correlations of jitter, reorder, duplicate and corrupt are tc-netem's, which narrow the "
    "draws: the deviation and the chances come out smaller"
)

#: A router's interface with a qdisc of ours.
Hop: TypeAlias = tuple[Place, int]
SetNetem: TypeAlias = Callable[[Rtnetlink, int, Netem], tuple[str, ...]]


@dataclass(slots=True)
class RoutedPath:
    """The line of namespaces: site, with a cap its gate, A, B, gate, site."""

    applied: LinkSpec
    places: list[Place]
    near: Site
    far: Site
    notes: tuple[str, ...] = (_MADE_OF,)
    changes: int = 0
    #: The largest window that the sites may have, which is never taken back.
    allowed_bdp_bytes: float = 0.0
    #: What was set, by what it was set on, so that only what differs is set again.
    settings: dict[object, object] = field(default_factory=dict)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def expose(self, site: Site, port: int) -> tuple[str, int]:
        return site.address, port

    def withdraw(self, site: Site, port: int) -> None:
        """Nothing was set up by ``expose``."""

    def counters(self) -> LinkCounters:
        """Totals of both directions; what a gate drops counts as dropped by the link."""
        totals = {place: read_counters(place.route) for place in self.places[1:-1]}
        near_to_far, far_to_near = (
            _summed([totals[place][index] for place, index in self._crossed(name)])
            for name in DIRECTIONS
        )
        return LinkCounters(time.monotonic_ns(), near_to_far, far_to_near)

    def prepare(self, spec: LinkSpec) -> None:
        """Put the messages of the next change into words, which takes longer than sending them."""
        for name in DIRECTIONS:
            qdiscs = hops(spec, name, self.changes + 1)
            for netem in (qdiscs.bottleneck, qdiscs.way):
                decode(encode(netem))

    def apply(self, spec: LinkSpec) -> None:
        """Change the running link. LinkError, and no change, for what only a new one can have.

        Packets that wait or travel leave when they were to leave. A hop that stays the same is not
        touched; of one that changes, the loss model and the random draws start anew.
        """
        if spec.mtu_bytes != self.applied.mtu_bytes:
            raise LinkError("the mtu of a running link cannot change; open another")
        if (spec.per_flow_cap_bytes_per_s is None) != (len(self.places) == _PLAIN_PLACES):
            raise LinkError("a running link cannot gain or lose its per_flow_cap; open another")
        with self._changing:
            with put_back_on_failure(lambda: self._change(self.applied)):
                self._change(spec)
                if spec.bdp_bytes > self.allowed_bdp_bytes:
                    self._allow_window(spec)
            self.applied = spec

    def open(self) -> None:
        """Shape what is not shaped yet."""
        self._shape(self.applied, add_netem)
        self._allow_window(self.applied)
        near = self.places[0].namespace
        self._note(f"TCP congestion control is {near.run(congestion_control)}")
        if len(self.places) > _PLAIN_PLACES:
            self._note(_CAPPED)

    def _change(self, spec: LinkSpec) -> None:
        self.changes += 1
        self._shape(spec, change_netem)

    def _shape(self, spec: LinkSpec, set_netem: SetNetem) -> None:
        for name in DIRECTIONS:
            one, qdiscs = spec.direction(name), hops(spec, name, self.changes)
            self._set_offload(name, one)
            *gate, bottleneck, way = self._crossed(name)
            for hop, netem in ((bottleneck, qdiscs.bottleneck), (way, qdiscs.way)):
                setting = replace(netem, seed=None)
                if self._unset(hop, setting):
                    place, index = hop
                    self._note(*set_netem(place.route, index, netem))
                    self.settings[hop] = setting
            for hop in gate:
                self._pace(hop, spec, one)

    def _unset(self, what: object, setting: object) -> bool:
        """Whether something is to be set; until it is, what it has is not known."""
        if self.settings.get(what) == setting:
            return False
        self.settings.pop(what, None)
        return True

    def _set_offload(self, name: DirectionName, one: Direction) -> None:
        """One draw and one queue place per offload packet would be up to 45 times too mild."""
        whole = not draws_by_packet(one) and one.rate_bytes_per_s > _PER_PACKET_RATE_BYTES_PER_S
        site = self.places[0 if name == "near_to_far" else -1]
        if self._unset(name, whole):
            site.set_offload(site.to_far or site.to_near, whole=whole)
            self.settings[name] = whole
        if whole:
            self._note(_OFFLOADED)
        correlations = (
            one.jitter_correlation, one.reorder_correlation,
            one.duplicate_correlation, one.corrupt_correlation,
        )  # fmt: skip
        if any(correlations):
            self._note(_CORRELATED)

    def _pace(self, hop: Hop, spec: LinkSpec, one: Direction) -> None:
        """A cap above the rate is the rate: fq takes no more than 34 Gbit/s."""
        assert spec.per_flow_cap_bytes_per_s is not None
        setting = min(spec.per_flow_cap_bytes_per_s, one.rate_bytes_per_s), flow_limit_packets(spec)
        if self._unset(hop, setting):
            place, index = hop
            set_flow_cap(place.route, index, *setting)
            self.settings[hop] = setting

    def _crossed(self, name: DirectionName) -> list[Hop]:
        """Places and interfaces with a qdisc of ours, in the order a direction's packets meet."""
        routers = self.places[1:-1]
        crossed = len(routers) // 2 + 1
        if name == "near_to_far":
            return [(place, place.to_far) for place in routers[:crossed]]
        return [(place, place.to_near) for place in routers[::-1][:crossed]]

    def _allow_window(self, spec: LinkSpec) -> None:
        for place in (self.places[0], self.places[-1]):
            place.namespace.run(lambda: allow_window(spec.bdp_bytes))
        self.allowed_bdp_bytes = spec.bdp_bytes

    def _note(self, *notes: str) -> None:
        self.notes = tuple(dict.fromkeys((*self.notes, *notes)))


_PLAIN_PLACES, _CAPPED_PLACES = 4, 6


@contextmanager
def open_netem(spec: LinkSpec) -> Iterator[RoutedPath]:
    """The namespaces and their qdiscs. LinkError names the capability or module lacking."""
    capped = spec.per_flow_cap_bytes_per_s is not None
    places = _CAPPED_PLACES if capped else _PLAIN_PLACES
    with line_of_namespaces(places, spec.mtu_bytes) as line:
        near = Site("near", address(0, 1), line[0].namespace.popen)
        far = Site("far", address(places - 2, 2), line[-1].namespace.popen)
        path = RoutedPath(spec, line, near, far)
        path.open()
        yield path


def _summed(crossed: list[QdiscCounters]) -> DirectionCounters:
    """What left by the last qdisc, and what all of them dropped and hold."""
    return DirectionCounters(
        bytes=crossed[-1].ip_bytes,
        packets=crossed[-1].packets,
        dropped=sum(one.dropped for one in crossed),
        queued_bytes=sum(one.backlog_bytes for one in crossed),
    )
