"""The rate that a transfer over N TCP connections gets on one direction of a link.

    rate = min(share * link, N cap, N pacing, N response(p, RTT))    bytes of TCP payload a second

``response`` is what a flow that loses each packet with chance p keeps up, W mss / RTT with a mean
window of W packets:

    reno    W = sqrt(3 / (2 p))                                       (Mathis et al. 1997)
    cubic   W = max(sqrt(3 / (2 p)), (C (3 + b) / (4 (1 - b)))^(1/4) (RTT / p)^(3/4)),
            C = 0.4, b = 0.7        (RFC 9438, section 5.1; the first: its Reno-friendly region)
    bbr     none below p = 20 %, where 1.25 (1 - p), its probing gain times what arrives, reaches 1

A link and a per-flow cap count IP bytes, of which (MTU - 52) / MTU are payload: headers of IPv4 and
of TCP with timestamps. Pacing is the kernel's own (SO_MAX_PACING_RATE), which counts payload. A
lost packet is taken to have used its turn, so each of these three carries (1 - p) of itself.

Slow start: a connection begins with 10 packets and doubles what it has in flight every round trip,
so that x bytes sent without a gap, of connections that begin with w bytes together, take

    W(x) = n RTT + (x - w (2^n - 1)) / rate
    n    = min(ceil(log2(1 + x / w)) - 1, ceil(log2(rate RTT / w)))

A warm connection keeps its window, and W(x) = x / rate. It is warm when it has carried a round
trip's worth at that rate before and has not been idle for its retransmission timeout since, or
``net.ipv4.tcp_slow_start_after_idle`` is 0.

Not modelled: retransmission timeouts (losses above some per cent; the last packets of a transfer),
a queue that overflows, HyStart's early end of slow start, unequal RTTs, and a window that socket
buffers bound below rate x RTT.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from netem.link import MTU_BYTES, DirectionName, LinkSpec

FloatArray = npt.NDArray[np.float64]
CongestionControl: TypeAlias = Literal["cubic", "reno", "bbr"]

#: IPv4 and TCP headers with the timestamps option.
HEADER_BYTES = 52
INITIAL_WINDOW_PACKETS = 10  # RFC 6928
_CUBIC_C, _CUBIC_BETA = 0.4, 0.7
BBR_MAX_LOSS = 0.2


@dataclass(frozen=True, slots=True)
class TcpPath:
    """One direction as TCP meets it. Rates count IP bytes; ``loss`` is a packet's chance."""

    link_bytes_per_s: float
    rtt_s: float
    per_flow_cap_bytes_per_s: float | None = None
    loss: float = 0.0
    mtu_bytes: int = MTU_BYTES

    def __post_init__(self) -> None:
        if not self.link_bytes_per_s > 0 or not self.rtt_s >= 0 or not 0 <= self.loss < 1:
            raise ValueError(f"a path needs a rate above 0, an RTT and 0 <= loss < 1; got {self}")

    @property
    def mss_bytes(self) -> int:
        return self.mtu_bytes - HEADER_BYTES

    @property
    def payload_share(self) -> float:
        return self.mss_bytes / self.mtu_bytes


@dataclass(frozen=True, slots=True)
class Flows:
    """The connections of a transfer. ``pacing_bytes_per_s``: of each one's payload."""

    connections: int = 1
    congestion_control: CongestionControl = "cubic"
    pacing_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        pacing = self.pacing_bytes_per_s
        if self.connections < 1 or (pacing is not None and not pacing > 0):
            raise ValueError(f"a transfer needs a connection, and pacing above 0; got {self}")


def link_path(link: LinkSpec, name: DirectionName = "far_to_near") -> TcpPath:
    """A direction of a link, by default that which KV takes."""
    direction = link.direction(name)
    return TcpPath(
        link_bytes_per_s=direction.rate_bytes_per_s,
        rtt_s=link.rtt_s,
        per_flow_cap_bytes_per_s=link.per_flow_cap_bytes_per_s,
        loss=direction.loss_rate,
        mtu_bytes=link.mtu_bytes,
    )


def window_packets(loss: float, rtt_s: float, congestion_control: CongestionControl) -> float:
    """Mean window of a flow that nothing but loss bounds; infinite where loss does not."""
    if congestion_control == "bbr":
        if loss >= BBR_MAX_LOSS:
            raise ValueError(f"no model of BBR at {loss:.0%} loss; below {BBR_MAX_LOSS:.0%} only")
        return math.inf
    if loss == 0:
        return math.inf
    reno = math.sqrt(1.5 / loss)
    if congestion_control == "reno":
        return reno
    scale = _CUBIC_C * (3 + _CUBIC_BETA) / (4 * (1 - _CUBIC_BETA))
    return max(reno, math.pow(scale, 0.25) * math.pow(rtt_s / loss, 0.75))


def rate_bounds(path: TcpPath, flows: Flows, share: float = 1.0) -> dict[str, float]:
    """What each bound alone would let through, bytes of payload a second; the least one is met.

    ``share``: of the link, where other traffic has the rest. Bounds that do not apply are absent.
    """
    count, arrives = flows.connections, 1 - path.loss
    bounds = {"link": share * path.link_bytes_per_s * path.payload_share * arrives}
    if path.per_flow_cap_bytes_per_s is not None:
        cap = path.per_flow_cap_bytes_per_s * path.payload_share
        bounds["per_flow_cap"] = count * cap * arrives
    if flows.pacing_bytes_per_s is not None:
        bounds["pacing"] = count * flows.pacing_bytes_per_s * arrives
    window = window_packets(path.loss, path.rtt_s, flows.congestion_control)
    if window < math.inf and path.rtt_s > 0:
        bounds["loss"] = count * window * path.mss_bytes / path.rtt_s
    return bounds


def payload_bytes_per_s(path: TcpPath, flows: Flows, share: float = 1.0) -> float:
    """The rate of a long transfer."""
    return min(rate_bounds(path, flows, share).values())


@dataclass(frozen=True, slots=True)
class SlowStart:
    """Connections that begin cold: their round trip and first window, all of them together."""

    rtt_s: float
    window_bytes: float

    @staticmethod
    def of(path: TcpPath, flows: Flows) -> "SlowStart":
        packets = flows.connections * INITIAL_WINDOW_PACKETS
        return SlowStart(path.rtt_s, float(packets * path.mss_bytes))

    def rounds(self, rate_bytes_per_s: npt.ArrayLike) -> FloatArray:
        """Round trips until the window covers rate x RTT."""
        needed = np.asarray(rate_bytes_per_s, dtype=np.float64) * self.rtt_s / self.window_bytes
        return np.ceil(np.log2(np.maximum(needed, 1.0)))


def sending_s(
    sent_bytes: npt.ArrayLike, rate_bytes_per_s: npt.ArrayLike, slow_start: SlowStart | None = None
) -> FloatArray:
    """W(x): what it takes to send so many bytes without a gap; the two broadcast. # [...]"""
    sent = np.asarray(sent_bytes, dtype=np.float64)
    rate = np.asarray(rate_bytes_per_s, dtype=np.float64)
    if slow_start is None:
        return np.asarray(sent / rate)
    window = slow_start.window_bytes
    begun = np.maximum(np.ceil(np.log2(1 + sent / window)) - 1, 0.0)
    rounds = np.minimum(begun, slow_start.rounds(rate))
    return np.asarray(rounds * slow_start.rtt_s + (sent - window * (2**rounds - 1)) / rate)
