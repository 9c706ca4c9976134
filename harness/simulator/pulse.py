"""What the scheduler is told each control period: what the links carry, and that time passes.

At k periods the sending end of every PrfaaS cluster's link is looked at, as one connection that
stands for all; the reports arrive ``cache_staleness_s`` later, followed by ``Tick``. While a link
is out its reports do not arrive.

While nothing is near a limit (the threshold as planned, each link's rate as it started and no
change due, less than ``CALM`` of it used, nothing waiting long) only every ``CALM_PERIODS``-th
report and tick is made, and the reports say so: those between would change nothing, and a
simulation is as fast as without them. With roles that convert every period counts, since they are
about averages.
"""

from collections.abc import Mapping
from typing import Protocol

from harness.core import PD
from harness.kv_path import Carried
from harness.scheduling import events as ev
from harness.scheduling.congestion import LinkSample
from harness.scheduling.scheduler import Scheduler

#: Share of a link that is used in a calm: half of what would move the threshold.
CALM = 0.35
CALM_PERIODS = 10
#: What may wait in a calm, as time on the link.
_CALM_WAITING_S = 0.1


class Watched(Protocol):
    """A link from far to near as it is looked at: ``KvPath`` says what is meant."""

    @property
    def rate_bytes_per_s(self) -> float: ...
    def carried(self, now_s: float) -> Carried: ...
    def rate_at(self, now_s: float) -> float: ...
    def next_change_s(self, now_s: float) -> float: ...


class Pulse:
    """``look`` at k periods; it says what to deliver, and when to look next. ``links`` by PrfaaS
    cluster, each with the delay of KV on it."""

    def __init__(
        self, scheduler: Scheduler, links: Mapping[str, Watched], delays_s: Mapping[str, float]
    ) -> None:
        self._scheduler = scheduler
        config = scheduler.config
        self._period_s = config.scheduling.control_period_s
        self._looks = [
            _Look(name, link, delays_s[name], self._period_s) for name, link in links.items()
        ]
        self._reports = config.has_feedback and bool(self._looks)
        self._every_period = config.scheduling.role_conversion
        self._periods = 0
        self._base_tokens = scheduler.threshold_tokens

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
        horizon_s = now_s + (CALM_PERIODS + 2) * self._period_s
        calm = not self._every_period and self._scheduler.threshold_tokens == self._base_tokens
        for one in self._looks:
            used = one.take(now_s)
            calm = calm and used < CALM and one.is_calm(now_s, horizon_s)
        self._periods += CALM_PERIODS if calm else 1
        next_s = self.next_s() + staleness_s if calm else None
        reports: list[ev.Event] = [
            ev.LinkSamples(one.cluster, (one.sample(now_s),), next_s)
            for one in self._looks
            if not one.is_out(now_s)
        ]
        return [*reports, ev.Tick()]


class _Look:
    """One link: what was acknowledged and what waits, as of the last look."""

    def __init__(self, cluster: str, link: Watched, delay_s: float, period_s: float) -> None:
        self.cluster = cluster
        self._link = link
        self._rtt_s = 2 * delay_s
        self._period_s = period_s
        self._acked_bytes, self._acked_at_s = 0.0, 0.0
        self._waiting_bytes = 0.0

    def take(self, now_s: float) -> float:
        """Look; the share of the link used since the last time."""
        carried = self._link.carried(now_s)
        self._waiting_bytes = carried.waiting_bytes
        # Rounding must not look like a counter that began anew.
        acked_bytes = max(carried.acked_bytes, self._acked_bytes)
        could = self._link.rate_bytes_per_s * max(now_s - self._acked_at_s, self._period_s)
        used = (acked_bytes - self._acked_bytes) / could
        self._acked_bytes, self._acked_at_s = acked_bytes, now_s
        return used

    def is_calm(self, now_s: float, horizon_s: float) -> bool:
        link = self._link
        return (
            link.rate_at(now_s) == link.rate_bytes_per_s
            and link.next_change_s(now_s) > horizon_s
            and self._waiting_bytes <= _CALM_WAITING_S * link.rate_bytes_per_s
        )

    def is_out(self, now_s: float) -> bool:
        return self._link.rate_at(now_s) == 0

    def sample(self, now_s: float) -> LinkSample:
        return LinkSample(
            at_s=now_s,
            sender=self.cluster,
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
