"""What the sending ends say of the link, made into one estimate: how full, how late, how lossy.

Every prefill instance that sends over the link samples its TCP connections. Per connection the
acknowledged bytes give a rate, smoothed with time constant tau over irregular steps dt:

    rate <- rate + (1 - exp(-dt / tau)) (acked / dt - rate)

and decayed by exp(-age / tau) while nothing is heard of it, so that a sender that went away fades.
The link's goodput is their sum; utilisation is goodput over the capacity it was given. What waits
is the layers that no connection has taken (once per pair of sender and receiver) and the bytes TCP
has not sent yet; over the capacity it is a time. The queueing delay is the median over connections
of RTT minus the least RTT seen: it counts packets on the way, not what waits at the sender.

The link is scarce when it is nearly full and something waits; it is abundant again only well below
that (hysteresis), so that routing does not flap. Bytes and seconds are scenario units; a sample's
``at_s`` is when it was taken, on the axis of ``now_s``: the difference is its staleness.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class LinkSample:
    """One TCP connection of one sender; counters run since the connection opened.

    ``backlog_bytes`` is the same on every connection of a (sender, peer) pair.
    """

    at_s: float
    sender: str
    peer: str
    connection: int
    acked_bytes: float
    retransmits: int
    rtt_s: float
    min_rtt_s: float | None
    unsent_bytes: float
    backlog_bytes: float


@dataclass(frozen=True, slots=True)
class LinkState:
    """The link as it was at ``at_s``, the time of the newest sample; None before the first."""

    at_s: float | None
    goodput_bytes_per_s: float
    utilisation: float
    waiting_bytes: float
    waiting_s: float
    queueing_delay_s: float
    retransmits_per_s: float
    scarce: bool


@dataclass(frozen=True, slots=True)
class CongestionConfig:
    """``capacity_bytes_per_s`` is what the link carries of KV; times are scenario seconds."""

    capacity_bytes_per_s: float
    smoothing_s: float = 1.0
    scarce_utilisation: float = 0.9
    abundant_utilisation: float = 0.7
    scarce_waiting_s: float = 0.1
    forget_after_s: float = 30.0


@dataclass(slots=True)
class _Line:
    """One connection: its last sample and its smoothed rates."""

    last: LinkSample
    bytes_per_s: float = 0.0
    retransmits_per_s: float = 0.0


class LinkEstimate:
    """``handle`` samples as they come, in any order of senders; ``state`` at any later time."""

    def __init__(self, config: CongestionConfig) -> None:
        assert config.capacity_bytes_per_s > 0
        self._config = config
        self._lines: dict[tuple[str, str, int], _Line] = {}
        self._scarce = False

    def handle(self, samples: Iterable[LinkSample], now_s: float) -> LinkState:
        """Take samples; an older one than the last of its connection is dropped."""
        for sample in samples:
            key = (sample.sender, sample.peer, sample.connection)
            line = self._lines.get(key)
            if line is None:
                self._lines[key] = _Line(sample)
            elif sample.at_s > line.last.at_s:
                self._advance(line, sample)
        horizon_s = now_s - self._config.forget_after_s
        self._lines = {
            key: line for key, line in self._lines.items() if line.last.at_s >= horizon_s
        }
        state = self.state(now_s)
        self._scarce = state.scarce
        return state

    def state(self, now_s: float) -> LinkState:
        """The estimate now, which asking does not change: silent connections fade, and are left
        out once they are old."""
        horizon_s = now_s - self._config.forget_after_s
        lines = [line for line in self._lines.values() if line.last.at_s >= horizon_s]
        fading = [math.exp(-max(0.0, now_s - line.last.at_s) / self._tau_s) for line in lines]
        rate = sum(line.bytes_per_s * by for line, by in zip(lines, fading, strict=True))
        again = sum(line.retransmits_per_s * by for line, by in zip(lines, fading, strict=True))
        waiting = self._waiting_bytes(lines)
        capacity = self._config.capacity_bytes_per_s
        return LinkState(
            at_s=max((line.last.at_s for line in lines), default=None),
            goodput_bytes_per_s=rate,
            utilisation=rate / capacity,
            waiting_bytes=waiting,
            waiting_s=waiting / capacity,
            queueing_delay_s=_queueing_delay_s(lines),
            retransmits_per_s=again,
            scarce=self._judge(rate / capacity, waiting / capacity),
        )

    @property
    def _tau_s(self) -> float:
        return self._config.smoothing_s

    def _advance(self, line: _Line, sample: LinkSample) -> None:
        before, dt_s = line.last, sample.at_s - line.last.at_s
        # A connection that was replaced counts from 0 again.
        replaced = sample.acked_bytes < before.acked_bytes
        acked = sample.acked_bytes - (0.0 if replaced else before.acked_bytes)
        again = sample.retransmits - (0 if replaced else before.retransmits)
        weight = 1 - math.exp(-dt_s / self._tau_s)
        line.bytes_per_s += weight * (acked / dt_s - line.bytes_per_s)
        line.retransmits_per_s += weight * (again / dt_s - line.retransmits_per_s)
        line.last = sample

    def _waiting_bytes(self, lines: list[_Line]) -> float:
        newest: dict[tuple[str, str], LinkSample] = {}
        for line in lines:
            pair = (line.last.sender, line.last.peer)
            if pair not in newest or line.last.at_s > newest[pair].at_s:
                newest[pair] = line.last
        return sum(line.last.unsent_bytes for line in lines) + sum(
            sample.backlog_bytes for sample in newest.values()
        )

    def _judge(self, utilisation: float, waiting_s: float) -> bool:
        config = self._config
        if self._scarce:
            return utilisation > config.abundant_utilisation
        return utilisation > config.scarce_utilisation and waiting_s > config.scarce_waiting_s


def _queueing_delay_s(lines: list[_Line]) -> float:
    delays = [
        max(0.0, line.last.rtt_s - line.last.min_rtt_s)
        for line in lines
        if line.last.min_rtt_s is not None
    ]
    return median(delays) if delays else 0.0
