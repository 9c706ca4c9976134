"""A probe process in each site of a path, and the measurements they make together.

The warm-up before a bulk window is 15 round trips, between 0.2 and 1.5 s, and no window begins
before what the one before left in the queues is gone.
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from netem import datagrams
from netem.control import Helper, helper
from netem.datagrams import Tally
from netem.jitter import most_jitter_s
from netem.link import DIRECTIONS, DirectionName
from netem.site import Path, Site

_RTT_EVERY_S = 1e-3
#: A longer span is allowed for so many samples.
_MIN_RTTS, _MAX_RTT_SPAN_S = 100, 2.0
#: A ping and its acknowledgements, on the wire; it should take a third of a link at most.
_PING_WIRE_BYTES, _PING_SHARE = 220, 1 / 3
_MIN_WARM_UP_S, _MAX_WARM_UP_S, _WARM_UP_RTTS = 0.2, 1.5, 15
_DATAGRAMS, _DATAGRAMS_PER_S, _DATAGRAM_SHARE, _DATAGRAM_SPAN_S = 4000, 8000.0, 0.2, 0.6
_GRACE_S = 0.2
_SPARE_PACKETS, _EMPTY_POLL_S, _EMPTY_TIMEOUT_S = 3, 0.02, 15.0
_MEASURE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Probes:
    """A probe in each site; ``*_peer`` is where the other site reaches it: host and TCP port."""

    path: Path
    near: Helper
    far: Helper
    near_peer: tuple[str, int]
    far_peer: tuple[str, int]
    far_ready: dict[str, Any]

    @property
    def datagrams_cross(self) -> bool:
        """They do where a site is reached at its own address; the relay has another for it."""
        return self.far_peer == (self.path.far.address, self.far_ready["port"])

    def rtts_s(self, span_s: float) -> list[float]:
        """Round trips of the idle link, measured from near, about ``span_s`` long.

        The messages are so far apart that none is held back by the one ahead of it, which keeping
        the order would do under jitter.
        """
        over, port = "connection", self.far_peer[1]
        if self.datagrams_cross:
            over, port = "datagrams", self.far_ready["echo_port"]
        applied = self.path.applied
        spread_s = max(2 * most_jitter_s(applied.direction(name)) for name in DIRECTIONS)
        on_the_wire_s = _PING_WIRE_BYTES / self._slowest()
        every_s = max(_RTT_EVERY_S, spread_s, on_the_wire_s / _PING_SHARE)
        span_s = max(span_s, min(_MIN_RTTS * every_s, _MAX_RTT_SPAN_S))
        request = {"op": "rtt", "over": over, "every_s": every_s, "span_s": span_s}
        found: list[float] = self.near.ask(request | {"peer": [self.far_peer[0], port]})["rtts_s"]
        return found

    def rate(self, name: DirectionName, flows: int, bulk_s: float) -> float:
        """TCP payload of ``flows`` connections in one direction, bytes a second."""
        self._wait_until_empty()
        warm_up_s = max(_MIN_WARM_UP_S, _WARM_UP_RTTS * self.path.applied.rtt_s)
        receiver, peer = self.far, self.near_peer
        if name == "far_to_near":
            receiver, peer = self.near, self.far_peer
        request = {"op": "rate", "peer": peer, "flows": flows, "bulk_s": bulk_s}
        warm_up_s = min(warm_up_s, _MAX_WARM_UP_S)
        return float(receiver.ask(request | {"warm_up_s": warm_up_s})["bytes_per_s"])

    def tallies(self) -> dict[str, Tally]:
        """What becomes of numbered datagrams, both ways at once; keys as in ``LinkCheck``."""
        self._wait_until_empty()
        cap = self.path.applied.per_flow_cap_bytes_per_s or math.inf
        share_per_s = _DATAGRAM_SHARE * min(self._slowest(), cap) / datagrams.WIRE_BYTES
        per_s = min(_DATAGRAMS_PER_S, share_per_s)
        count = max(1, min(_DATAGRAMS, int(per_s * _DATAGRAM_SPAN_S)))
        ways = (
            ("near_to_far", self.near, self.far, self.path.far.address),
            ("far_to_near", self.far, self.near, self.path.near.address),
        )

        def send(sender: Helper, receiver: Helper, host: str) -> None:
            peer = [host, receiver.ask({"op": "listen"})["port"]]
            sender.ask({"op": "send", "peer": peer, "count": count, "per_s": per_s})

        with ThreadPoolExecutor(len(ways)) as pool:
            for sent in [pool.submit(send, *way[1:]) for way in ways]:
                sent.result()
        self._wait_until_empty()
        time.sleep(_GRACE_S + 2 * self.path.applied.rtt_s)
        return {
            f"datagrams_{name}": Tally(**receiver.ask({"op": "tally", "count": count}))
            for name, _, receiver, _ in ways
        }

    def _slowest(self) -> float:
        applied = self.path.applied
        return min(applied.direction(name).rate_bytes_per_s for name in DIRECTIONS)

    def _wait_until_empty(self) -> None:
        """What the measurement before left in the queues must not take part in the next."""
        deadline_s = time.monotonic() + _EMPTY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            counters = self.path.counters()
            if all(
                getattr(counters, name).queued_bytes <= self._travelling_bytes(name)
                for name in DIRECTIONS
            ):
                return
            time.sleep(_EMPTY_POLL_S)

    def _travelling_bytes(self, name: DirectionName) -> float:
        """What a direction holds without a queue, a few packets more."""
        one = self.path.applied.direction(name)
        return one.rate_bytes_per_s * one.delay_s + _SPARE_PACKETS * self.path.applied.mtu_bytes


@contextmanager
def probes(path: Path) -> Iterator[Probes]:
    """Probes in both sites."""
    with ExitStack() as stack:
        near, far = (_probe(site, stack) for site in (path.near, path.far))
        peers = [
            path.expose(site, ready["port"])
            for site, (_, ready) in ((path.near, near), (path.far, far))
        ]
        yield Probes(path, near[0], far[0], peers[0], peers[1], far[1])
        for site, (_, ready) in ((path.near, near), (path.far, far)):
            path.withdraw(site, ready["port"])


def _probe(site: Site, stack: ExitStack) -> tuple[Helper, dict[str, Any]]:
    return stack.enter_context(
        helper(
            f"the link probe in site {site.name}",
            ["netem.probe"],
            {"host": site.address},
            popen=site.popen,
            timeout_s=_MEASURE_TIMEOUT_S,
        )
    )
