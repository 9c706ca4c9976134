"""The links of the transport benchmark: a pair of network namespaces, joined in one of three ways.

``unshaped`` is one veth pair. ``1gbit`` and ``5gbit`` have a router between with a token bucket
(sch_tbf) each way; a bucket in a router, not at the sender, leaves TCP's own queue limits in force
there. It holds 4 ms of the rate, so that a late timer costs no rate, and its queue 20 ms.
``capped`` and the named profiles are links of ``netem``; their rates and caps are divided by
``RATE_SCALE``, since no machine of two cores carries 100 Gbit/s with delay, and their delays are
not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from harness.transport.socket_options import KernelTcp, settle_tcp
from netem.link import LinkError, LinkSpec, symmetric
from netem.link_file import load_profile, profile_names
from netem.namespace import allow_window
from netem.site import Site
from netem.testlink import open_link
from netem.wiring import Place, address, line_of_namespaces

RATE_SCALE = 100
MTU_BYTES = 1500
_BUCKET_S, _QUEUE_S = 4e-3, 20e-3
_HANDLE = 0x10000
_GBIT = 125e6

#: None: nothing shapes it.
PLAIN_RATES_BYTES_PER_S = {"unshaped": None, "1gbit": _GBIT, "5gbit": 5 * _GBIT}
#: 5 units a flow of 100, as a cloud's 5 Gbit/s of 100; half a Gbit/s leaves cores to the ends.
CAPPED = symmetric("capped", _GBIT / 2, 1e-3, per_flow_cap_bytes_per_s=_GBIT / 40)


@dataclass(frozen=True, slots=True)
class Wire:
    """An open link; KV goes from near to far. ``kernel_tcp``: before and after it was settled."""

    name: str
    near: Site
    far: Site
    rate_bytes_per_s: float | None
    cap_bytes_per_s: float | None
    rtt_s: float
    made_of: str
    kernel_tcp: tuple[KernelTcp, KernelTcp]

    def expected_bytes_per_s(self, connections: int) -> float | None:
        """What the link lets so many connections have, headers included; None: no limit."""
        if self.cap_bytes_per_s is None or self.rate_bytes_per_s is None:
            return self.rate_bytes_per_s
        return min(self.cap_bytes_per_s * connections, self.rate_bytes_per_s)


def link_names() -> tuple[str, ...]:
    """Every name ``open_wire`` knows."""
    return (*PLAIN_RATES_BYTES_PER_S, CAPPED.name, *profile_names())


@contextmanager
def open_wire(name: str) -> Iterator[Wire]:
    """Build one link; LinkError says what the machine lacks. Everything is gone afterwards."""
    if name in PLAIN_RATES_BYTES_PER_S:
        with _plain(name, PLAIN_RATES_BYTES_PER_S[name]) as wire:
            yield wire
        return
    spec = CAPPED if name == CAPPED.name else load_profile(name).scaled(1, RATE_SCALE)
    with open_link(spec) as link:
        if link.backend == "relay":
            raise LinkError(
                "the relay ends TCP halfway, so a transport cannot be measured over it: "
                + "; ".join(link.why)
            )
        yield _settled(
            name,
            link.near,
            link.far,
            spec,
            f"{link.backend}, {link.applied}",
        )


@contextmanager
def _plain(name: str, rate_bytes_per_s: float | None) -> Iterator[Wire]:
    places = 2 if rate_bytes_per_s is None else 3
    with line_of_namespaces(places, MTU_BYTES) as line:
        near = Site("near", address(0, 1), line[0].namespace.popen)
        far = Site("far", address(places - 2, 2), line[-1].namespace.popen)
        made_of = "one veth pair"
        if rate_bytes_per_s is not None:
            _shape(line[1], rate_bytes_per_s)
            made_of = "two veth pairs and a router with sch_tbf"
            for place in (line[0], line[-1]):
                place.namespace.run(lambda: allow_window(rate_bytes_per_s * _QUEUE_S))
        kernel_tcp = line[0].namespace.run(settle_tcp)
        line[-1].namespace.run(settle_tcp)
        yield Wire(name, near, far, rate_bytes_per_s, None, 0.0, made_of, kernel_tcp)


def _settled(name: str, near: Site, far: Site, spec: LinkSpec, made_of: str) -> Wire:
    assert near.namespace is not None, "only the relay has none"
    assert far.namespace is not None, "only the relay has none"
    kernel_tcp = near.namespace.run(settle_tcp)
    far.namespace.run(settle_tcp)
    rate, cap = spec.near_to_far.rate_bytes_per_s, spec.per_flow_cap_bytes_per_s
    return Wire(name, near, far, rate, cap, spec.rtt_s, made_of, kernel_tcp)


def _shape(router: Place, rate_bytes_per_s: float) -> None:
    burst_bytes = int(rate_bytes_per_s * _BUCKET_S)
    limit_bytes = int(rate_bytes_per_s * _QUEUE_S) + burst_bytes

    def add() -> None:
        with IPRoute() as route:
            for index in (router.to_near, router.to_far):
                route.tc(
                    "add",
                    "tbf",
                    index,
                    _HANDLE,
                    rate=int(rate_bytes_per_s),
                    burst=burst_bytes,
                    limit=limit_bytes,
                )

    try:
        router.namespace.run(add)
    except NetlinkError as error:
        raise LinkError(
            f"a token bucket cannot be set ({error}); load it by `modprobe sch_tbf`"
        ) from error
