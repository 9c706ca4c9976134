"""What the scheduler is told each control period: what the link carries, and that time passes.

At k periods the sending end is looked at, as one connection that stands for all; the report arrives
``cache_staleness_s`` later, followed by ``Tick``. While the link is out reports do not arrive.

While nothing is near a limit (the threshold as planned, the link's rate as it started and no change
due, less than ``CALM`` of it used, nothing waiting long) only every ``CALM_PERIODS``-th report and
tick is made, and the report says so: those between would change nothing, and a simulation is as
fast as without them. With roles that convert every period counts, since they are about averages.
"""

from harness.core import PD, PRFAAS
from harness.kv_path import KvPath
from harness.scheduling import events as ev
from harness.scheduling.congestion import LinkSample
from harness.scheduling.scheduler import Scheduler

#: Share of the link that is used in a calm: half of what would move the threshold.
CALM = 0.35
CALM_PERIODS = 10
#: What may wait in a calm, as time on the link.
_CALM_WAITING_S = 0.1


class Pulse:
    """``look`` at k periods; it says what to deliver, and when to look next."""

    def __init__(self, scheduler: Scheduler, link: KvPath, delay_s: float) -> None:
        self._scheduler = scheduler
        self._link = link
        self._rtt_s = 2 * delay_s
        config = scheduler.config
        self._period_s = config.scheduling.control_period_s
        self._reports = config.has_feedback and bool(config.links)
        self._every_period = config.scheduling.role_conversion
        self._periods = 0
        self._base_tokens = scheduler.threshold_tokens
        self._acked_bytes, self._acked_at_s = 0.0, 0.0
        self._waiting_bytes = 0.0

    @property
    def wanted(self) -> bool:
        """Whether anybody acts on it."""
        return self._reports or self._every_period

    def next_s(self) -> float:
        """When to look next."""
        return self._periods * self._period_s

    def look(self, now_s: float) -> list[ev.Event]:
        """What shall be delivered."""
        staleness_s = self._scheduler.config.scheduling.cache_staleness_s
        if not self._reports:
            self._periods += 1
            return [ev.Tick()]
        carried = self._link.carried(now_s)
        used = self._used(carried.acked_bytes, now_s)
        self._waiting_bytes = carried.waiting_bytes
        calm = used < CALM and self._is_calm(now_s)
        self._periods += CALM_PERIODS if calm else 1
        if self._link.rate_at(now_s) == 0:
            return [ev.Tick()]
        report = ev.LinkSamples(
            PRFAAS, (self._sample(now_s),), self.next_s() + staleness_s if calm else None
        )
        return [report, ev.Tick()]

    def _used(self, acked_bytes: float, now_s: float) -> float:
        """Share of the link used since the last look."""
        # Rounding must not look like a counter that began anew.
        acked_bytes = max(acked_bytes, self._acked_bytes)
        could = self._link.rate_bytes_per_s * max(now_s - self._acked_at_s, self._period_s)
        used = (acked_bytes - self._acked_bytes) / could
        self._acked_bytes, self._acked_at_s = acked_bytes, now_s
        return used

    def _is_calm(self, now_s: float) -> bool:
        link, horizon_s = self._link, now_s + (CALM_PERIODS + 2) * self._period_s
        return (
            not self._every_period
            and self._scheduler.threshold_tokens == self._base_tokens
            and link.rate_at(now_s) == link.rate_bytes_per_s
            and link.next_change_s(now_s) > horizon_s
            and self._waiting_bytes <= _CALM_WAITING_S * link.rate_bytes_per_s
        )

    def _sample(self, now_s: float) -> LinkSample:
        return LinkSample(
            at_s=now_s,
            sender=PRFAAS,
            peer=PD,
            connection=0,
            acked_bytes=self._acked_bytes,
            retransmits=0,
            rtt_s=self._rtt_s,
            min_rtt_s=self._rtt_s,
            unsent_bytes=0.0,
            backlog_bytes=self._waiting_bytes,
            in_flight_bytes=0.0,
        )
