"""What crosses over links that are shared fairly, on the agenda of a simulation.

When the last byte of a transfer leaves depends on what begins after it, so nobody can say it at the
end of a prefill: the agenda has an event at the next instant at which ``FairLinks`` changes, as
long as anybody waits, and whoever waits is told when the last byte has left. What never will, since
the link stays down, is told so: it lands at infinity.
"""

import math
from collections.abc import Callable

from harness.core import Route
from harness.kv_layers import LayerSizes
from harness.kv_path import Carried
from harness.simulator.agenda import Agenda
from harness.simulator.course import Course
from harness.simulator.fair_links import FairLinks, Line
from harness.simulator.sharing import Sharing

#: Called once with when it lands.
Landed = Callable[[float], None]


class Crossing:
    """Transfers by their keys."""

    def __init__(
        self,
        sharing: Sharing,
        sizes: LayerSizes,
        agenda: Agenda,
        delay: Course,
        *,
        layerwise: bool,
    ) -> None:
        self._links = FairLinks(
            sharing.egress,
            sharing.ingress,
            sharing.cap,
            sizes,
            layerwise=layerwise,
            slow_start=sharing.slow_start,
        )
        self._sharing = sharing
        self._agenda = agenda
        self._delay = delay
        self._due_s = math.inf
        self._waiting: dict[int, Landed] = {}
        #: What left before anybody asked.
        self._landed_s: dict[int, float] = {}
        self._last_s = 0.0

    def end(self, cluster: str) -> "CrossingEnd":
        """A PrfaaS cluster's link as it is looked at."""
        return CrossingEnd(self._links, self._sharing.egress[cluster], cluster)

    def offer(
        self, key: int, route: Route, start_s: float, end_s: float, tokens: int, resident: int
    ) -> None:
        """A prefill starts; ``wait`` at its end."""
        self._links.offer(key, _line(route), start_s, end_s, tokens, resident)
        self._plan()

    def send(self, key: int, line: Line, now_s: float, nbytes: float, landed: Landed) -> None:
        """One piece that is ready now."""
        self._links.send(key, line, now_s, nbytes)
        self.wait(key, now_s, landed)

    def wait(self, key: int, now_s: float, landed: Landed) -> None:
        """Tell when all of it has landed, now that it is ready."""
        self._settle(now_s)
        landed_s = self._landed_s.pop(key, None)
        if landed_s is None:
            self._waiting[key] = landed
        else:
            landed(landed_s)
        self._plan()

    def drop(self, key: int) -> None:
        """Nobody wants it any more."""
        self._links.drop(key)
        self._waiting.pop(key, None)
        self._landed_s.pop(key, None)

    def _settle(self, now_s: float) -> None:
        """Tell of what has left by now."""
        for key, departed_s in self._links.departed(now_s):
            # Order is kept: nothing overtakes when a delay falls.
            self._last_s = max(self._last_s, departed_s + self._delay.at(departed_s))
            landed = self._waiting.pop(key, None)
            if landed is None:
                self._landed_s[key] = self._last_s
            else:
                landed(self._last_s)

    def _plan(self) -> None:
        if not self._waiting:
            return
        next_s = self._links.next_s()
        if next_s == math.inf:
            lost, self._waiting = self._waiting, {}
            for landed in lost.values():
                landed(math.inf)
        elif next_s < self._due_s:
            self._due_s = next_s
            self._agenda.at(max(next_s, self._agenda.now_s), self._wake, next_s)

    def _wake(self, due_s: float, now_s: float) -> None:
        if due_s == self._due_s:
            self._due_s = math.inf
            self._settle(now_s)
            self._plan()


class CrossingEnd:
    """One cluster's link: what a ``KvPath`` is asked for by who looks at it."""

    def __init__(self, links: FairLinks, rate: Course, cluster: str) -> None:
        self._links, self._rate, self._cluster = links, rate, cluster
        self.rate_bytes_per_s = next((r for _, r in rate.steps if r > 0), 1.0)

    @property
    def sent_bytes(self) -> float:
        """Of all that became ready."""
        return self._links.ready_bytes[self._cluster]

    def carried(self, now_s: float) -> Carried:
        return self._links.carried(self._cluster, now_s)

    def rate_at(self, now_s: float) -> float:
        return self._rate.at(now_s)

    def next_change_s(self, now_s: float) -> float:
        return self._rate.next_s(now_s)

    def mean_rate_bytes_per_s(self, start_s: float, end_s: float) -> float:
        return self._rate.mean(start_s, end_s)


def _line(route: Route) -> Line:
    one, two = route.prefill, route.decode
    return (one.name, one.cluster), (two.name, two.cluster)
