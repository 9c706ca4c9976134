"""What the sending ends say of the link, made into one estimate: how full, how late, how lossy.

Every prefill instance that sends over the link samples its TCP connections. Per connection the
acknowledged bytes give a rate, smoothed with time constant tau over irregular steps dt:

    rate <- rate + (1 - exp(-dt / tau)) (acked / dt - rate)

and decayed by exp(-(age - tau) / tau) once nothing was heard of it for longer than tau, so that a
sender that went away fades. The link's goodput is their sum. What waits is the layers that no
connection has taken (once per pair of sender and receiver), the bytes TCP has not sent yet, and of
those in flight the share 1 - least RTT / RTT, which by Little's law stands in queues on the way: a
window wider than the path moves what waits from the sender into the bottleneck's buffer. Over the
capacity what waits is a time. The queueing delay is the median of RTT minus least RTT.

The capacity begins as the one the link was given and is learned from periods of at least tau in
which less was acknowledged than waited at their beginning: the link was busy throughout, so that
what was acknowledged is what it carries. The best of the last ten such periods counts, and one
alone does not: a connection that sits out a timeout has something waiting too. It grows by
``recovery_factor``, or to the rate that was seen, in a period in which nothing waited long although
more than ``EASY`` of it was used: a link that carries little tells nothing of what it could carry.
It never exceeds what the link was given. Utilisation is goodput over capacity.

The link is scarce when it is nearly full and something waits; it is abundant again only well below
that (hysteresis), so that routing does not flap. It is down when something waits at a sender and
nothing was acknowledged for ``down_after_s``, or when for so long nothing was heard of senders that
had been heard of: what they say comes over the same link. Bytes and seconds are scenario units; a
sample's ``at_s`` is when it was taken, on the axis of ``now_s``: the difference is its staleness.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

#: A report and the instant at which it is due may differ by rounding.
_INSTANT_S = 1e-9
#: A link that got through more than this of what waited may have been idle at the end.
_STILL_WAITED = 0.95
#: Used up to here, a link says nothing of what more it could carry.
EASY = 0.7
#: Busy periods that are compared.
_FEWEST_BUSY, _MOST_BUSY = 3, 10


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
    in_flight_bytes: float


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
    capacity_bytes_per_s: float
    down: bool


@dataclass(frozen=True, slots=True)
class CongestionConfig:
    """``capacity_bytes_per_s`` is what the link was given for KV; times are scenario seconds.

    ``down_after_s`` must be longer than the senders' period.
    """

    capacity_bytes_per_s: float
    smoothing_s: float = 1.0
    scarce_utilisation: float = 0.9
    abundant_utilisation: float = 0.7
    scarce_waiting_s: float = 0.1
    forget_after_s: float = 30.0
    recovery_factor: float = 1.05
    down_after_s: float = math.inf


@dataclass(slots=True)
class _Line:
    """One connection: its last sample and its smoothed rates."""

    last: LinkSample
    bytes_per_s: float = 0.0
    retransmits_per_s: float = 0.0
    #: Between the last two samples alone: an RTT is as fresh as what was acknowledged meanwhile.
    latest_bytes_per_s: float = 0.0


class LinkEstimate:
    """``handle`` samples as they come, in any order of senders; ``state`` at any later time."""

    def __init__(self, config: CongestionConfig) -> None:
        assert config.capacity_bytes_per_s > 0
        self._config = config
        self._lines: dict[tuple[str, str, int], _Line] = {}
        self._scarce = False
        self._busy = _Busy(config)
        self._round = _Round()
        #: When silence becomes an outage, and since when what waits has not moved.
        self._due_s = math.inf
        self._stuck_since_s: float | None = None

    def handle(
        self, samples: Iterable[LinkSample], now_s: float, next_s: float | None = None
    ) -> LinkState:
        """Take what senders said, be it that they have no connection; a sample older than the last
        of its connection is dropped. ``next_s``: when they will speak again at the latest, where
        they said."""
        acked, newest_s, senders = 0.0, -math.inf, set()
        for sample in samples:
            key = (sample.sender, sample.peer, sample.connection)
            senders.add(sample.sender)
            newest_s = max(newest_s, sample.at_s)
            line = self._lines.get(key)
            if line is None:
                self._lines[key] = _Line(sample)
            elif sample.at_s > line.last.at_s:
                acked += self._advance(line, sample)
        horizon_s = now_s - self._config.forget_after_s
        if any(line.last.at_s < horizon_s for line in self._lines.values()):
            self._lines = {
                key: line for key, line in self._lines.items() if line.last.at_s >= horizon_s
            }
        self._due_s = max(now_s, next_s or now_s) + self._config.down_after_s
        lines = list(self._lines.values())
        waiting = self._waiting_bytes(lines)
        if acked > 0 or not _unsent_bytes(lines):
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = max(newest_s, now_s - self._config.smoothing_s)
        if self._round.is_over(senders):
            latest = sum(self._latest(line, now_s) for line in lines)
            self._busy.observe(latest, waiting, now_s, scarce=self._scarce)
        state = self._state(lines, waiting, now_s)
        self._scarce = state.scarce
        return state

    def state(self, now_s: float) -> LinkState:
        """The estimate now, which asking does not change: silent connections fade, and are left
        out once they are old."""
        horizon_s = now_s - self._config.forget_after_s
        lines = [line for line in self._lines.values() if line.last.at_s >= horizon_s]
        return self._state(lines, self._waiting_bytes(lines), now_s)

    def _state(self, lines: list[_Line], waiting: float, now_s: float) -> LinkState:
        fading = [self._fading(line, now_s) for line in lines]
        rate = sum(line.bytes_per_s * by for line, by in zip(lines, fading, strict=True))
        again = sum(line.retransmits_per_s * by for line, by in zip(lines, fading, strict=True))
        capacity = self._busy.capacity_bytes_per_s
        return LinkState(
            at_s=max((line.last.at_s for line in lines), default=None),
            goodput_bytes_per_s=rate,
            utilisation=rate / capacity,
            waiting_bytes=waiting,
            waiting_s=waiting / capacity,
            queueing_delay_s=_queueing_delay_s(lines),
            retransmits_per_s=again,
            scarce=self._judge(rate / capacity, waiting / capacity),
            capacity_bytes_per_s=capacity,
            down=self.is_down(now_s),
        )

    def is_down(self, now_s: float) -> bool:
        """Whether the link carries nothing, as far as is known; O(1), for every placement."""
        if now_s >= self._due_s - _INSTANT_S:
            return True
        stuck_s = self._stuck_since_s
        return stuck_s is not None and now_s - stuck_s >= self._config.down_after_s - _INSTANT_S

    @property
    def _tau_s(self) -> float:
        return self._config.smoothing_s

    def _advance(self, line: _Line, sample: LinkSample) -> float:
        """Take the next sample of a connection; the bytes acknowledged since the last one."""
        before, dt_s = line.last, sample.at_s - line.last.at_s
        # A connection that was replaced counts from 0 again.
        replaced = sample.acked_bytes < before.acked_bytes
        acked = sample.acked_bytes - (0.0 if replaced else before.acked_bytes)
        again = sample.retransmits - (0 if replaced else before.retransmits)
        line.latest_bytes_per_s = acked / dt_s
        weight = 1 - math.exp(-dt_s / self._tau_s)
        line.bytes_per_s += weight * (acked / dt_s - line.bytes_per_s)
        line.retransmits_per_s += weight * (again / dt_s - line.retransmits_per_s)
        line.last = sample
        return acked

    def _fading(self, line: _Line, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - line.last.at_s - self._tau_s) / self._tau_s)

    def _latest(self, line: _Line, now_s: float) -> float:
        """Bytes per second between the last two samples, while they are new."""
        return line.latest_bytes_per_s if now_s - line.last.at_s <= 2 * self._tau_s else 0.0

    def _waiting_bytes(self, lines: list[_Line]) -> float:
        queued = sum(
            line.last.in_flight_bytes * (1 - line.last.min_rtt_s / line.last.rtt_s)
            for line in lines
            if line.last.min_rtt_s is not None and line.last.rtt_s > line.last.min_rtt_s
        )
        return queued + _unsent_bytes(lines)

    def _judge(self, utilisation: float, waiting_s: float) -> bool:
        config = self._config
        if self._scarce:
            return utilisation > config.abundant_utilisation
        return utilisation > config.scarce_utilisation and waiting_s > config.scarce_waiting_s


class _Round:
    """Senders report in turn: only once each has is what they say of one and the same period.

    What waits at one of them now and what another carried before would make a busy link of two
    short transfers.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._heard: set[str] = set()

    def is_over(self, senders: set[str]) -> bool:
        """Whether with ``senders`` everyone who is known has reported since the last round."""
        if self._heard & senders:
            # Somebody did not: it is late, or has gone.
            self._known, self._heard = self._heard, senders
            return False
        self._heard = self._heard | senders
        if not self._heard >= self._known:
            return False
        self._known, self._heard = self._heard, set()
        return bool(self._known)


class _Busy:
    """The capacity learned from periods in which the link was never idle."""

    def __init__(self, config: CongestionConfig) -> None:
        self._config = config
        self.capacity_bytes_per_s = config.capacity_bytes_per_s
        self._busy_rates: deque[float] = deque(maxlen=_MOST_BUSY)
        self._begun_s: float | None = None
        self._waited_bytes = 0.0

    def observe(self, rate: float, waiting_bytes: float, now_s: float, *, scarce: bool) -> None:
        """``rate``: acknowledged per second of late, each connection over its own last step, since
        reports of several senders fall on either side of a period's end. ``waiting_bytes``: now."""
        config = self._config
        if self._begun_s is not None:
            span_s = now_s - self._begun_s
            # Samples come with a jitter; most of a period is enough.
            if span_s < 0.9 * config.smoothing_s:
                return
            capacity = self.capacity_bytes_per_s
            if 0 < rate * span_s < _STILL_WAITED * self._waited_bytes and waiting_bytes > 0:
                self._busy_rates.append(rate)
                if len(self._busy_rates) >= _FEWEST_BUSY:
                    capacity = max(self._busy_rates)
            else:
                short_wait = waiting_bytes <= config.scarce_waiting_s * capacity
                if rate > EASY * capacity and short_wait and not scarce:
                    capacity *= config.recovery_factor
                capacity = max(capacity, rate)
            self.capacity_bytes_per_s = min(capacity, config.capacity_bytes_per_s)
        self._begun_s, self._waited_bytes = now_s, waiting_bytes


def _unsent_bytes(lines: list[_Line]) -> float:
    """What waits at the senders."""
    newest: dict[tuple[str, str], LinkSample] = {}
    for line in lines:
        pair = (line.last.sender, line.last.peer)
        if pair not in newest or line.last.at_s > newest[pair].at_s:
            newest[pair] = line.last
    unsent = sum(line.last.unsent_bytes for line in lines)
    return unsent + sum(sample.backlog_bytes for sample in newest.values())


def _queueing_delay_s(lines: list[_Line]) -> float:
    delays = [
        max(0.0, line.last.rtt_s - line.last.min_rtt_s)
        for line in lines
        if line.last.min_rtt_s is not None
    ]
    return median(delays) if delays else 0.0
