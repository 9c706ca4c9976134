"""Other people's traffic on a link: datagrams at a rate, steady or on and off.

    python -m netem.background sink | send    < {...} + requests

Both are helpers (see ``netem.control``). On and off periods are exponential with the given means,
from the seed; without an off period the traffic is steady. It does not give way, so it takes its
share of the bottleneck whatever the other flows do, and fills the queue when they fill the rest.
Several datagrams leave in one call (UDP_SEGMENT, linux/udp.h) but cross the link one by one. The
sink only holds a port: without it, every datagram would be answered by an ICMP error.
"""

import json
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from netem.control import helper
from netem.link import DirectionName, LinkError
from netem.site import Path

_HEADERS_BYTES = 28  # IP and UDP
_UDP_SEGMENT = 103
#: 16 full datagrams are below the 64 KiB that a call may carry.
_MOST_AT_ONCE = 16
#: A batch is what the rate passes in this time, at least one datagram and at most the above.
_BATCH_S = 1e-3
_SOCKET_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class BackgroundTraffic:
    """``rate_bytes_per_s`` of IP bytes while it is on. ``off_s`` 0: always."""

    direction: DirectionName
    rate_bytes_per_s: float
    on_s: float = 1.0
    off_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.rate_bytes_per_s > 0 and self.on_s > 0 and self.off_s >= 0):
            raise LinkError(
                "background traffic needs a rate and an on period above 0, and an off period of "
                "at least 0"
            )


def periods(traffic: BackgroundTraffic) -> Iterator[tuple[float, float]]:
    """(begin, end) of each on period in seconds from the start, without end."""
    if not traffic.off_s:
        yield 0.0, float("inf")
        return
    random = Random(traffic.seed)
    begin_s = random.expovariate(1 / traffic.off_s)
    while True:
        end_s = begin_s + random.expovariate(1 / traffic.on_s)
        yield begin_s, end_s
        begin_s = end_s + random.expovariate(1 / traffic.off_s)


@contextmanager
def background(path: Path, traffic: BackgroundTraffic) -> Iterator[None]:
    """Traffic on an open link until the context ends. LinkError where no datagrams cross."""
    sender, receiver = (
        (path.near, path.far) if traffic.direction == "near_to_far" else (path.far, path.near)
    )
    if sender.address == receiver.address:
        raise LinkError(
            "the relay carries no datagrams and so no background traffic; use the netem or the "
            "forwarder backend"
        )
    with helper(
        f"the background traffic's sink in site {receiver.name}",
        ["netem.background", "sink"],
        {"host": receiver.address},
        popen=receiver.popen,
    ) as (_, sink):
        configuration = {
            "peer": [receiver.address, sink["port"]],
            "datagram_bytes": path.applied.mtu_bytes - _HEADERS_BYTES,
            "traffic": asdict(traffic),
        }
        with helper(
            f"the background traffic from site {sender.name}",
            ["netem.background", "send"],
            configuration,
            popen=sender.popen,
        ):
            yield


def sink(configuration: dict[str, Any]) -> None:
    """Hold a port, and let what comes overflow its buffer, until standard input ends."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        opened.bind((configuration["host"], 0))
        print(json.dumps({"event": "ready", "port": opened.getsockname()[1]}), flush=True)
        sys.stdin.read()


def send(configuration: dict[str, Any]) -> None:
    """Send the traffic until standard input ends."""
    traffic = BackgroundTraffic(**configuration["traffic"])
    size = configuration["datagram_bytes"]
    wire_bytes = size + _HEADERS_BYTES
    fitting = int(traffic.rate_bytes_per_s * _BATCH_S / wire_bytes)
    batch = max(1, min(fitting, _MOST_AT_ONCE, _SOCKET_BYTES // size - 1))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, size)
        opened.connect(tuple(configuration["peer"]))
        print(json.dumps({"event": "ready"}), flush=True)
        payload = bytes(size * batch)
        start_s = time.monotonic()
        for begin_s, end_s in periods(traffic):
            due_s = start_s + begin_s
            while due_s < start_s + end_s:
                if select.select([sys.stdin], [], [], max(0.0, due_s - time.monotonic()))[0]:
                    return
                opened.send(payload)
                due_s += batch * wire_bytes / traffic.rate_bytes_per_s


def main() -> None:
    configuration = json.loads(sys.stdin.readline())
    {"sink": sink, "send": send}[sys.argv[1]](configuration)


if __name__ == "__main__":
    main()
