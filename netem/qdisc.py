"""Queueing disciplines set, changed, read back and counted, over a netlink socket.

A ``Rtnetlink`` socket stays in the namespace it was made in and serves any thread, one at a time;
``index`` is of an interface there. A change takes about a millisecond, most of it to read back
what the kernel runs: if that is not what was sent it is an error, except for the seed, which
kernels before 6.6 ignore without a word; that is told.

The cap on every flow by itself is sch_fq's ``maxrate``: in a router it paces each flow, told apart
by the hash of its addresses and ports, in a queue of its own (Linux net/sched/sch_fq.c).
"""

import errno
import os
import struct
from dataclasses import dataclass

from netem.attributes import U32_MAX, Netem, decode, encode, untold_aside
from netem.link import LinkError
from netem.rtnetlink import (
    CREATE,
    EXCLUSIVE,
    RTM_GETQDISC,
    RTM_NEWQDISC,
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

_ROOT_HANDLE = 0x10000
_ETHERNET_BYTES = 14
# linux/gen_stats.h: struct gnet_stats_basic, struct gnet_stats_queue.
_TCA_STATS2, _STATS_BASIC, _STATS_QUEUE = 7, 1, 3
_BASIC, _QUEUE = struct.Struct("=QI"), struct.Struct("=IIIII")
# linux/pkt_sched.h: TCA_FQ_*.
_FQ_LIMIT, _FQ_FLOW_LIMIT, _FQ_QUANTUM, _FQ_INITIAL, _FQ_MAX_RATE, _FQ_MASK = 1, 2, 3, 4, 7, 10
#: fq sends a quantum at once and makes up for a late timer within half of the next: what the cap
#: passes in a millisecond, but two packets at least and what the kernel takes at most.
_QUANTUM_S, _MIN_QUANTUM_BYTES, _MAX_QUANTUM_BYTES = 1e-3, 3028, 2**20
#: How many flows fq tells apart: two that share a hash share a cap.
_FLOWS = 2**16
MAX_FLOW_CAP_BYTES_PER_S = U32_MAX - 1
_PACKAGES = "linux-modules-extra on Ubuntu, kernel-modules-extra on Fedora"


@dataclass(frozen=True, slots=True)
class QdiscCounters:
    """Totals of a root qdisc; ``ip_bytes`` leaves the Ethernet headers out."""

    ip_bytes: int
    packets: int
    dropped: int
    backlog_bytes: int


def add_netem(
    route: Rtnetlink, index: int, netem: Netem, *, parent: int = TC_H_ROOT, handle: int = 0
) -> tuple[str, ...]:
    """Put netem on an interface and read it back; notes of what the kernel cannot do.

    LinkError when the kernel lacks sch_netem or runs something else than what was sent.
    """
    return _set_netem(route, index, netem, parent, handle or _ROOT_HANDLE, CREATE | EXCLUSIVE)


def change_netem(
    route: Rtnetlink, index: int, netem: Netem, *, parent: int = TC_H_ROOT, handle: int = 0
) -> tuple[str, ...]:
    """As ``add_netem`` for one that is there. Packets it holds leave when they were to leave."""
    return _set_netem(route, index, netem, parent, handle or _ROOT_HANDLE, 0)


def read_netem(route: Rtnetlink, index: int, parent: int = TC_H_ROOT) -> Netem:
    """The netem that the kernel runs there."""
    options = _options(route, index, parent, "netem")
    return decode(attribute(TCA_OPTIONS, options))


def set_flow_cap(
    route: Rtnetlink, index: int, cap_bytes_per_s: float, flow_limit_packets: int
) -> None:
    """Cap every flow that leaves by an interface, its root qdisc becoming fq; read back.

    ``flow_limit_packets``: what one flow may have waiting.
    """
    cap = round(cap_bytes_per_s)
    if cap > MAX_FLOW_CAP_BYTES_PER_S:
        raise LinkError("sch_fq caps a flow at 34.3 Gbit/s at most; leave per_flow_cap out")
    quantum = min(max(round(cap * _QUANTUM_S), _MIN_QUANTUM_BYTES), _MAX_QUANTUM_BYTES)
    wanted = {
        _FQ_LIMIT: U32_MAX,
        _FQ_FLOW_LIMIT: flow_limit_packets,
        _FQ_QUANTUM: quantum,
        _FQ_INITIAL: quantum,
        _FQ_MAX_RATE: cap,
        _FQ_MASK: _FLOWS - 1,
    }
    options = b"".join(u32_attribute(kind, value) for kind, value in wanted.items())
    _request(route, index, TC_H_ROOT, _ROOT_HANDLE, "fq", attribute(TCA_OPTIONS, options), CREATE)
    told = attributes(_options(route, index, TC_H_ROOT, "fq"))
    for kind, value in wanted.items():
        if told.get(kind) != struct.pack("=I", value):
            raise LinkError(
                f"interface {index}: fq's attribute {kind} is {told.get(kind)!r}, {value} was sent"
            )


def read_counters(route: Rtnetlink) -> dict[int, QdiscCounters]:
    """The totals of every root qdisc by interface index."""
    counters = {}
    for body in route.dump(RTM_GETQDISC, tc_message(0)):
        index, _, parent, _ = tc_fields(body)
        if parent == TC_H_ROOT:
            counters[index] = _counters(attributes(tc_attributes(body)[_TCA_STATS2]))
    return counters


def _set_netem(
    route: Rtnetlink, index: int, netem: Netem, parent: int, handle: int, flags: int
) -> tuple[str, ...]:
    sent = encode(netem)
    _request(route, index, parent, handle, "netem", sent, flags)
    taken = read_netem(route, index, parent)
    if untold_aside(taken) != untold_aside(decode(sent)):
        raise LinkError(f"interface {index}: the kernel runs {taken} instead of {netem}")
    if netem.seed is not None and taken.seed != netem.seed:
        return (
            f"a seed for netem is unsupported by this kernel ({os.uname().release}; 6.6 has it): "
            "the same seed does not give the same losses and jitter",
        )
    return ()


def _request(
    route: Rtnetlink, index: int, parent: int, handle: int, kind: str, options: bytes, flags: int
) -> None:
    body = tc_message(index, handle, parent) + text_attribute(TCA_KIND, kind) + options
    try:
        route.request(RTM_NEWQDISC, body, flags)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EOPNOTSUPP) or not flags & CREATE:
            raise
        raise LinkError(
            f"the kernel has no {'tc-netem' if kind == 'netem' else kind}: the module sch_{kind} "
            f"cannot be loaded ({error.strerror}); on a stock kernel it is in the modules package "
            f"({_PACKAGES})"
        ) from error


def _options(route: Rtnetlink, index: int, parent: int, kind: str) -> bytes:
    """TCA_OPTIONS of the qdisc of a kind at a place."""
    for body in route.dump(RTM_GETQDISC, tc_message(index)):
        where, _, its_parent, _ = tc_fields(body)
        if (where, its_parent, tc_kind(body)) == (index, parent, kind):
            return tc_attributes(body)[TCA_OPTIONS]
    raise LinkError(f"interface {index} has no {kind} qdisc at {parent:#x}; something removed it")


def _counters(statistics: dict[int, bytes]) -> QdiscCounters:
    total_bytes, packets = _BASIC.unpack_from(statistics[_STATS_BASIC])
    _, backlog_bytes, drops, _, _ = _QUEUE.unpack_from(statistics[_STATS_QUEUE])
    return QdiscCounters(
        ip_bytes=total_bytes - _ETHERNET_BYTES * packets,
        packets=packets,
        dropped=drops,
        backlog_bytes=backlog_bytes,
    )
