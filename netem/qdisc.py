"""tc-netem through pyroute2: the attributes a link needs, encoded, set and read back.

``struct tc_netem_qopt`` and TCA_NETEM_* of Linux include/uapi/linux/pkt_sched.h. pyroute2 0.9 has
a plugin for netem that knows delays in whole microseconds, at most 34 Gbit/s, and cannot set a
rate at all (it also encodes it as TCA_RATE); ``plugin`` takes its place for the calls made here.
Probabilities are scaled by 2^32 - 1; delays travel in nanoseconds (LATENCY64, JITTER64), with the
older fields filled in ticks of 64 ns; a rate above 2^32 - 1 bytes/s needs RATE64.
"""

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink import nla
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import TC_H_ROOT
from pyroute2.netlink.rtnl.tcmsg import plugins, tcmsg

from netem.link import LinkError

_U32_MAX = 2**32 - 1
_TICK_NS = 64
_ETHERNET_BYTES = 14
_ROOT_HANDLE = 0x10000
# linux/netlink.h, linux/rtnetlink.h: a header (length, type, flags, sequence, port) and an empty
# struct tcmsg; NLM_F_REQUEST | NLM_F_DUMP.
_RTM_GETQDISC, _NLMSG_ERROR, _NLMSG_DONE, _REQUEST_DUMP = 38, 2, 3, 0x301
_DUMP_QDISCS = struct.pack("=IHHII20x", 36, _RTM_GETQDISC, _REQUEST_DUMP, 1, 0)
_MAX_ANSWER_BYTES, _ANSWER_TIMEOUT_S = 1 << 16, 5.0
_PLUGINS_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Netem:
    """One netem qdisc. Delays in whole ns; ``rate_bytes_per_s`` 0 means none."""

    limit_packets: int
    delay_ns: int = 0
    jitter_ns: int = 0
    loss: float = 0.0
    rate_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class QdiscCounters:
    """Totals of a root qdisc; ``ip_bytes`` leaves the Ethernet headers out."""

    ip_bytes: int
    packets: int
    dropped: int
    backlog_bytes: int


class options(nla):  # type: ignore[misc]  # noqa: N801  # pyroute2 is untyped and wants this name
    fields = (
        ("delay", "I"),
        ("limit", "I"),
        ("loss", "I"),
        ("gap", "I"),
        ("duplicate", "I"),
        ("jitter", "I"),
    )
    nla_map = (
        ("TCA_NETEM_UNSPEC", "none"),
        ("TCA_NETEM_CORR", "hex"),
        ("TCA_NETEM_DELAY_DIST", "hex"),
        ("TCA_NETEM_REORDER", "hex"),
        ("TCA_NETEM_CORRUPT", "hex"),
        ("TCA_NETEM_LOSS", "hex"),
        ("TCA_NETEM_RATE", "rate"),
        ("TCA_NETEM_ECN", "uint32"),
        ("TCA_NETEM_RATE64", "uint64"),
        ("TCA_NETEM_PAD", "hex"),
        ("TCA_NETEM_LATENCY64", "int64"),
        ("TCA_NETEM_JITTER64", "int64"),
    )

    class rate(nla):  # type: ignore[misc]  # noqa: N801  # see above
        fields = (
            ("rate", "I"),
            ("packet_overhead", "i"),
            ("cell_size", "I"),
            ("cell_overhead", "i"),
        )


def encode(netem: Netem) -> dict[str, Any]:
    """The fields and attributes of TCA_OPTIONS. Every one is sent, so that nothing is kept."""
    attributes: list[tuple[str, Any]] = [
        ("TCA_NETEM_LATENCY64", netem.delay_ns),
        ("TCA_NETEM_JITTER64", netem.jitter_ns),
    ]
    if netem.rate_bytes_per_s > _U32_MAX:
        attributes.append(("TCA_NETEM_RATE64", netem.rate_bytes_per_s))
    rate = min(netem.rate_bytes_per_s, _U32_MAX)
    cells = {"packet_overhead": 0, "cell_size": 0, "cell_overhead": 0}
    attributes.append(("TCA_NETEM_RATE", {"rate": rate, **cells}))
    return {
        "delay": min(netem.delay_ns // _TICK_NS, _U32_MAX),
        "limit": netem.limit_packets,
        "loss": _probability(netem.loss),
        "gap": 0,
        "duplicate": 0,
        "jitter": min(netem.jitter_ns // _TICK_NS, _U32_MAX),
        "attrs": attributes,
    }


def decode(message: Any) -> Netem:
    """What the kernel says it runs."""
    attributes = dict(message["attrs"])
    rate = attributes.get("TCA_NETEM_RATE", {"rate": 0})["rate"]
    return Netem(
        limit_packets=message["limit"],
        delay_ns=attributes.get("TCA_NETEM_LATENCY64", message["delay"] * _TICK_NS),
        jitter_ns=attributes.get("TCA_NETEM_JITTER64", message["jitter"] * _TICK_NS),
        loss=message["loss"] / _U32_MAX,
        rate_bytes_per_s=attributes.get("TCA_NETEM_RATE64", rate),
    )


def add_netem(interface: str, netem: Netem) -> None:
    """Put netem at the root of an interface of the current namespace and read it back.

    LinkError when the kernel lacks sch_netem or runs something else than what was sent.
    """
    with IPRoute() as route, _own_plugin():
        index = socket.if_nametoindex(interface)
        try:
            route.tc("add", kind="netem", index=index, handle=_ROOT_HANDLE, netem=netem)
        except NetlinkError as error:
            if error.code not in (errno.ENOENT, errno.EOPNOTSUPP):
                raise
            raise LinkError(
                "the kernel has no tc-netem: the module sch_netem cannot be loaded "
                f"({os.strerror(error.code)}); on a stock kernel it is in the modules package "
                "(linux-modules-extra on Ubuntu, kernel-modules-extra on Fedora)"
            ) from error
        taken = decode(_root(route, index).get_attr("TCA_OPTIONS"))
    if encode(taken) != encode(netem):
        raise LinkError(f"{interface}: the kernel runs {taken} instead of {netem}")


class QdiscReader:
    """Reads root qdiscs of the namespace it is made in, from any thread, as often as one likes.

    A socket stays in its namespace; the one dump it asks for costs a fraction of a fresh IPRoute.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(_ANSWER_TIMEOUT_S)

    def close(self) -> None:
        self._socket.close()

    def read(self) -> dict[int, QdiscCounters]:
        """The totals by interface index. OSError when the kernel refuses or does not answer."""
        self._socket.send(_DUMP_QDISCS)
        counters: dict[int, QdiscCounters] = {}
        while True:
            data = self._socket.recv(_MAX_ANSWER_BYTES)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind == _NLMSG_DONE:
                    return counters
                if kind == _NLMSG_ERROR:
                    number = -struct.unpack_from("=i", data, 16)[0]
                    raise OSError(number, f"the qdisc dump failed: {os.strerror(number)}")
                message = tcmsg(data[:length])
                message.decode()
                if message["handle"] == _ROOT_HANDLE:
                    counters[message["index"]] = _counters(message.get_attr("TCA_STATS2"))
                data = data[(length + 3) & ~3 :]


def _counters(statistics: Any) -> QdiscCounters:
    basic = statistics.get_attr("TCA_STATS_BASIC")
    queue = statistics.get_attr("TCA_STATS_QUEUE")
    return QdiscCounters(
        ip_bytes=basic["bytes"] - _ETHERNET_BYTES * basic["packets"],
        packets=basic["packets"],
        dropped=queue["drops"],
        backlog_bytes=queue["backlog"],
    )


def _root(route: IPRoute, index: int) -> Any:
    (found,) = (
        message for message in route.get_qdiscs(index=index) if message["handle"] == _ROOT_HANDLE
    )
    return found


def _probability(fraction: float) -> int:
    return round(fraction * _U32_MAX)


@contextmanager
def _own_plugin() -> Iterator[None]:
    """pyroute2 finds encoders in a table of its own; ours stands in it for the duration."""
    with _PLUGINS_LOCK:
        theirs = plugins["netem"]
        plugins["netem"] = SimpleNamespace(
            parent=TC_H_ROOT,
            options=options,
            get_parameters=lambda request: encode(request["netem"]),
            fix_request=lambda request: request.pop("netem", None),
        )
        try:
            yield
        finally:
            plugins["netem"] = theirs
