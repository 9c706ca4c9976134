"""The qdiscs and filters of a shaped interface.

    NIC, clsact hook: u32 filters on the peers' addresses  -> redirect ->  ifb
    ifb: HTB class (the rate) -> TBF (which only cuts) -> netem leaf (all else), or just a FIFO

The NIC's own qdisc, with its many queues, stays as it is and passes everything else untouched; what
matched comes back to it when the ifb lets it go. With per-queue shaping the ifb has as many queues
as the NIC, under mq, each with this tree and its share of the rate.

The rate is HTB's and not netem's, so that waiting for it does not count as delay. The leaf's
queue limit holds waiting and travelling packets. What is drawn by packet (loss and the like) must
meet packets, not offload packets of 64 kB: a TBF whose bucket is one MTU cuts them, one whose
bucket is large does not; its rate is beyond any link's, so it never makes a packet wait.

``struct tc_htb_opt``, ``tc_tbf_qopt``, ``tc_u32_sel``, ``tc_mirred``: Linux pkt_sched.h, pkt_cls.h,
tc_act/tc_mirred.h.
"""

import ipaddress
import socket
import struct
from dataclasses import dataclass, replace

from netem.access import IFINFOMSG, Network
from netem.attributes import U32_MAX, Netem
from netem.hops import draws_by_packet, hops
from netem.link import Direction, DirectionName, LinkError, LinkSpec
from netem.qdisc import add_netem, change_netem
from netem.restoration import HOOKS
from netem.rtnetlink import (
    CREATE,
    EXCLUSIVE,
    RTM_NEWLINK,
    RTM_NEWQDISC,
    RTM_NEWTCLASS,
    RTM_NEWTFILTER,
    TC_H_CLSACT,
    TC_H_INGRESS,
    TC_H_ROOT,
    TCA_KIND,
    TCA_OPTIONS,
    Rtnetlink,
    attribute,
    attributes,
    tc_attributes,
    tc_fields,
    tc_kind,
    tc_message,
    text_attribute,
    u32_attribute,
)
from netem.saved_qdiscs import interface_index, make_ifb
from netem.site import DirectionCounters

_ETHERNET_BYTES, _VLAN_BYTES = 14, 4
_MQ = 0x10000
#: Major numbers of the trees' qdiscs; a queue's number is added.
_HTB, _TBF, _LEAF = 0x100, 0x400, 0x700
MAX_QUEUES = 0x300
_TICK_NS = 64
_LINKLAYER_ETHERNET = 1
#: What a class may send at once: the kernel wakes a class some tens of microseconds late, and an
#: offload packet is up to 64 KiB.
_BURST_S, _MIN_BURST_BYTES = 100e-6, 1 << 17
_QUANTUM_BYTES = 60_000
#: A thousand bytes a nanosecond: the TBF keeps nothing waiting.
_PASSING_RATE_BYTES_PER_S = 10**12
#: More than the largest offload packet there is.
_WHOLE_BYTES = 1 << 20
_RATESPEC = struct.Struct("=BBHhHI")
_HTB_GLOB = struct.Struct("=IIIII")
_HTB_VERSION, _HTB_PARMS, _HTB_INIT, _HTB_RATE64, _HTB_CEIL64 = 3, 1, 2, 6, 7
_TBF_PARMS, _TBF_RATE64, _TBF_BURST = 1, 4, 6
_U32_SEL, _U32_ACT, _U32_FLAGS = 5, 7, 11
_SKIP_HARDWARE = 1
_ACT_KIND, _ACT_OPTIONS, _MIRRED_PARMS = 1, 2, 2
_ACT_STOLEN, _EGRESS_REDIRECT = 4, 1
_IFLA_MTU, _IFLA_IFALIAS, _IFF_UP = 4, 20, 1
_STATS2, _BASIC, _QUEUE = 7, 1, 3
ETHERTYPES = {4: 0x0800, 6: 0x86DD}
#: Where the source and the destination address stand in the header of each version.
_SOURCE_AT, _DESTINATION_AT = {4: 12, 6: 8}, {4: 16, 6: 24}


@dataclass(frozen=True, slots=True)
class Ifb:
    """One direction's ifb: ``hook`` of the NIC it takes from, and how many queues it has."""

    name: str
    hook: str
    direction: DirectionName
    queues: int


def protocol_info(version: int) -> int:
    """The EtherType of an IP version as a filter's ``info`` has it."""
    return socket.htons(ETHERTYPES[version])


def build_ifb(route: Rtnetlink, ifb: Ifb, spec: LinkSpec, alias: str) -> list[str]:
    """Make an ifb, shape it, and bring it up; notes. Nothing reaches it yet."""
    make_ifb(route, ifb.name, ifb.queues)
    index = interface_index(route, ifb.name)
    assert index is not None
    notes: list[str] = []
    if ifb.queues > 1:
        _new_qdisc(route, index, TC_H_ROOT, _MQ, "mq", b"")
    for queue in range(ifb.queues):
        parent = TC_H_ROOT if ifb.queues == 1 else _MQ | queue + 1
        notes += _build_tree(route, index, parent, queue, ifb, spec)
    about = u32_attribute(_IFLA_MTU, spec.mtu_bytes) + text_attribute(_IFLA_IFALIAS, alias)
    route.request(RTM_NEWLINK, IFINFOMSG.pack(0, 0, index, _IFF_UP, _IFF_UP) + about)
    return notes


def change_ifb(route: Rtnetlink, ifb: Ifb, spec: LinkSpec, change: int) -> list[str]:
    """Shape as ``spec`` says from now on; LinkError when that takes what was not built."""
    index = interface_index(route, ifb.name)
    if index is None:
        raise LinkError(f"the interface {ifb.name} is gone: the link was taken down")
    one = spec.direction(ifb.direction)
    kinds = {tc_kind(body) for body in route.qdiscs(index)}
    if "netem" not in kinds and not _is_rate_only(one):
        raise LinkError(
            f"the link {spec.name!r} was opened with a rate only: a delay, loss or the like takes "
            "a link that was opened with a delay"
        )
    notes: list[str] = []
    for queue in range(ifb.queues):
        _set_class(route, index, queue, ifb, spec, 0)
        if "netem" in kinds:
            _set_tbf(route, index, queue, spec.mtu_bytes, draws_by_packet(one), 0)
            leaf = _leaf(ifb, spec, queue, change)
            notes += change_netem(
                route, index, leaf, parent=_major(_TBF, queue) | 1, handle=_major(_LEAF, queue)
            )
    return notes


def redirect(
    route: Rtnetlink, nic: int, ifb: Ifb, peers: tuple[Network, ...], preferences: dict[int, int]
) -> None:
    """Lead the peers' traffic through an ifb; ``preferences`` of the filters by IP version."""
    target = interface_index(route, ifb.name)
    assert target is not None
    offsets = _DESTINATION_AT if ifb.hook == "egress" else _SOURCE_AT
    for peer in peers:
        info = preferences[peer.version] << 16 | protocol_info(peer.version)
        options = b"".join(
            [
                attribute(_U32_SEL, _selector(peer, offsets[peer.version])),
                attribute(_U32_ACT, attribute(1, _redirection(target))),
                u32_attribute(_U32_FLAGS, _SKIP_HARDWARE),
            ]
        )
        body = tc_message(nic, 0, HOOKS[ifb.hook], info) + text_attribute(TCA_KIND, "u32")
        try:
            route.request(
                RTM_NEWTFILTER, body + attribute(TCA_OPTIONS, options), CREATE | EXCLUSIVE
            )
        except OSError as error:
            raise LinkError(
                f"the filter for {peer} cannot be set ({error.strerror}): it needs the modules "
                "cls_u32 and act_mirred"
            ) from error


def add_clsact(route: Rtnetlink, nic: int) -> None:
    """The hooks of an interface."""
    _new_qdisc(route, nic, TC_H_INGRESS, TC_H_CLSACT, "clsact", b"")


def ifb_counters(route: Rtnetlink, ifb: Ifb) -> DirectionCounters:
    """What passed an ifb, IP bytes and packets, and what its leaves dropped and hold."""
    index = interface_index(route, ifb.name)
    if index is None:
        raise LinkError(f"the interface {ifb.name} is gone: the link was taken down")
    total_bytes = packets = dropped = held = 0
    for body in route.qdiscs(index):
        if not _LEAF <= tc_fields(body)[1] >> 16 < _LEAF + MAX_QUEUES:
            continue
        statistics = attributes(tc_attributes(body)[_STATS2])
        passed, count = struct.unpack_from("=QI", statistics[_BASIC])
        _, backlog, drops = struct.unpack_from("=III", statistics[_QUEUE])
        total_bytes, packets = total_bytes + passed, packets + count
        dropped, held = dropped + drops, held + backlog
    return DirectionCounters(total_bytes - _ETHERNET_BYTES * packets, packets, dropped, held)


def _build_tree(
    route: Rtnetlink, index: int, parent: int, queue: int, ifb: Ifb, spec: LinkSpec
) -> tuple[str, ...]:
    htb, leaf = _major(_HTB, queue), _major(_LEAF, queue)
    glob = _HTB_GLOB.pack(_HTB_VERSION, 10, 1, 0, 0)  # unclassified: the class 1, which all are
    _new_qdisc(route, index, parent, htb, "htb", attribute(_HTB_INIT, glob))
    _set_class(route, index, queue, ifb, spec, CREATE | EXCLUSIVE)
    one = spec.direction(ifb.direction)
    if _is_rate_only(one):
        limit = struct.pack("=I", _share(spec.queue_packets(ifb.direction), ifb.queues))
        _new_qdisc(route, index, htb | 1, leaf, "pfifo", limit)
        return ()
    _set_tbf(route, index, queue, spec.mtu_bytes, draws_by_packet(one), CREATE | EXCLUSIVE)
    parent = _major(_TBF, queue) | 1
    return add_netem(route, index, _leaf(ifb, spec, queue, 0), parent=parent, handle=leaf)


def _major(first: int, queue: int) -> int:
    return first + queue << 16


def _is_rate_only(one: Direction) -> bool:
    """Whether a direction needs no netem."""
    return not one.delay_s and not draws_by_packet(one)


def _leaf(ifb: Ifb, spec: LinkSpec, queue: int, change: int) -> Netem:
    """The netem of a queue: both hops of a router of namespaces in one, but for the rate."""
    two = hops(spec, ifb.direction, change)
    leaf = replace(
        two.way,
        limit_packets=_share(spec.queue_packets(ifb.direction), ifb.queues),
        loss=two.bottleneck.loss,
        ecn=two.bottleneck.ecn,
    )
    # Each queue draws by itself.
    seed = None if leaf.seed is None else (leaf.seed + queue) % 2**64
    return replace(leaf, seed=seed)


def _share(packets: int, queues: int) -> int:
    return min(max(1, -(-packets // queues)), U32_MAX)


def _set_class(
    route: Rtnetlink, index: int, queue: int, ifb: Ifb, spec: LinkSpec, flags: int
) -> None:
    """The one class of a tree. HTB counts Ethernet bytes, the link IP bytes: the rate allows it."""
    share = spec.direction(ifb.direction).rate_bytes_per_s / ifb.queues
    rate = max(1, round(share * (spec.mtu_bytes + _ETHERNET_BYTES) / spec.mtu_bytes))
    burst = max(rate * _BURST_S, _MIN_BURST_BYTES)
    ticks = min(round(burst / rate * 1e9 / _TICK_NS), U32_MAX)
    ratespec = _ratespec(rate)
    parms = ratespec + ratespec + struct.pack("=IIIII", ticks, ticks, _QUANTUM_BYTES, 0, 0)
    options = attribute(_HTB_PARMS, parms)
    if rate > U32_MAX:
        options += attribute(_HTB_RATE64, struct.pack("=Q", rate))
        options += attribute(_HTB_CEIL64, struct.pack("=Q", rate))
    htb = _major(_HTB, queue)
    body = tc_message(index, htb | 1, htb) + text_attribute(TCA_KIND, "htb")
    route.request(RTM_NEWTCLASS, body + attribute(TCA_OPTIONS, options), flags)


def _set_tbf(
    route: Rtnetlink, index: int, queue: int, mtu_bytes: int, cuts: bool, flags: int
) -> None:
    """The TBF above a netem: what is larger than its bucket and can be cut, is."""
    bucket_bytes = mtu_bytes + _ETHERNET_BYTES + _VLAN_BYTES if cuts else _WHOLE_BYTES
    ticks = max(1, round(bucket_bytes / _PASSING_RATE_BYTES_PER_S * 1e9) // _TICK_NS)
    rate = _ratespec(_PASSING_RATE_BYTES_PER_S)
    options = (
        attribute(_TBF_PARMS, rate + _ratespec(0) + struct.pack("=III", U32_MAX, ticks, 0))
        + attribute(_TBF_RATE64, struct.pack("=Q", _PASSING_RATE_BYTES_PER_S))
        + u32_attribute(_TBF_BURST, bucket_bytes)
    )
    parent = _major(_HTB, queue) | 1
    _new_qdisc(route, index, parent, _major(_TBF, queue), "tbf", options, flags)


def _ratespec(rate_bytes_per_s: int) -> bytes:
    return _RATESPEC.pack(0, _LINKLAYER_ETHERNET, 0, 0, 0, min(rate_bytes_per_s, U32_MAX))


def _new_qdisc(
    route: Rtnetlink,
    index: int,
    parent: int,
    handle: int,
    kind: str,
    options: bytes,
    flags: int = CREATE | EXCLUSIVE,
) -> None:
    body = tc_message(index, handle, parent) + text_attribute(TCA_KIND, kind)
    body += attribute(TCA_OPTIONS, options) if options else b""
    try:
        route.request(RTM_NEWQDISC, body, flags)
    except OSError as error:
        module = {"clsact": "sch_ingress", "pfifo": "none", "mq": "none"}.get(kind, f"sch_{kind}")
        raise LinkError(
            f"the qdisc {kind} cannot be set up ({error.strerror}); the module it needs: {module}"
        ) from error


def _selector(peer: Network, offset: int) -> bytes:
    """A u32 selector that a packet from or to ``peer`` meets: one key a 32-bit word."""
    mask, value = peer.netmask.packed, peer.network_address.packed
    keys = [
        mask[at : at + 4] + value[at : at + 4] + struct.pack("=ii", offset + at, 0)
        for at in range(0, len(mask), 4)
        if any(mask[at : at + 4])
    ]
    terminal = 1
    return struct.pack("=BBBxHHhhI", terminal, 0, len(keys), 0, 0, 0, 0, 0) + b"".join(keys)


def _redirection(target: int) -> bytes:
    parms = struct.pack("=IIiiiiI", 0, 0, _ACT_STOLEN, 0, 0, _EGRESS_REDIRECT, target)
    return text_attribute(_ACT_KIND, "mirred") + attribute(
        _ACT_OPTIONS, attribute(_MIRRED_PARMS, parms)
    )


def network(text: str) -> Network:
    """An address or a network, as a user writes it; LinkError for anything else."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise LinkError(f"{text!r} is no address or network of the peers: {error}") from error
