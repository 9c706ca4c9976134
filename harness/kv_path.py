"""The path KV takes from a prefill instance: one server, first come first served, layer by layer.

A path of rate R sends ready layers (``harness.kv_layers``) in the order in which they became
ready, each for bytes / R; what is sent lands ``delay_s`` later. With ready times r and sizes b in
that order the departures d follow Lindley's recursion

    d_k = max(d_{k-1}, r_k) + b_k / R        that is        d_k = C_k + max_{j <= k} (r_j - C_{j-1})

where C is the running sum of b / R and the path's last departure counts as r_0: no event per layer.
So all that cross a path share it piece by piece, in turn; TCP connections of a live run share it
by bytes, which for pieces that are small against a transfer comes to the same.

Only a part of the past matters. Sending i, of pieces of at most c_i seconds that become ready at
steps of g_i, brings at most c_i (x / g_i + 1) of work in x seconds. With C = sum of c_i and
rho = sum of c_i / g_i < 1, what was ready before t - C / (1 - rho) has left by t, and of few
sendings what came later is a handful of pieces. Where that does not hold, or of many, the recursion
is solved over all pieces since the last look.

The rate may change, to 0 too, at instants that are known. In the path's own time

    u(t) = integral of R(t') / R over t' < t,    R the rate at the start

it is a path of the constant rate R, and the recursion holds as it stands: ready times go through u,
departures come back through its inverse (the earliest t where u stands still). What leaves just
before a change lands after the same delay. With a constant rate u(t) = t.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from harness.kv_layers import FloatArray, LayerSizes, Sending, SendingTable, ready_times

__all__ = ["Carried", "KvPath", "LayerSizes", "RateChange", "ready_times"]

#: So many sendings are looked at one by one, more of them in a table.
_FEW = 12
#: A prefill without duration is none; its pieces are ready at once.
_LEAST_STEP_S = 1e-12
#: Of a path fuller than this the whole past since the last look is taken.
_FULL = 0.9


class RateChange(NamedTuple):
    """From ``at_s`` on the rate is another."""

    at_s: float
    rate_bytes_per_s: float


class Carried(NamedTuple):
    """What a path has done by an instant: bytes that left, and ready ones that have not."""

    acked_bytes: float
    waiting_bytes: float


class KvPath:
    """A rate, a delay and the layers that wait for it. Times must not go back.

    ``changes`` ascend in time, from 0 on. ``sizes`` are of the model whose prefills are offered;
    not ``layerwise``, each leaves in one piece at its end.
    """

    def __init__(
        self,
        rate_bytes_per_s: float,
        delay_s: float,
        changes: Sequence[RateChange] = (),
        sizes: LayerSizes | None = None,
        *,
        layerwise: bool = True,
    ) -> None:
        assert rate_bytes_per_s > 0, "a path needs a rate"
        self.rate_bytes_per_s = rate_bytes_per_s
        self.delay_s = delay_s
        #: Of all that has been asked for with ``landed_s`` or ``send``.
        self.sent_bytes = 0.0
        self._sizes = sizes
        self._count = sizes.num_layers if sizes is not None and layerwise else 1
        #: Up to when pieces that were ready are accounted for, and their last departure, in the
        #: path's own time.
        self._at_s = -math.inf
        self._departed = -math.inf
        self._sending: dict[int, Sending] = {}
        self._table = None if sizes is None else SendingTable(sizes, self._count, rate_bytes_per_s)
        #: Those that have no place in the table, which few of them do not need.
        self._unplaced: dict[int, Sending] = {}
        self._offered = 0
        #: Sums over what is being sent: the longest piece, and that over the step.
        self._most_s = self._load = 0.0
        self._clock = _OwnTime(rate_bytes_per_s, changes) if changes else None

    def offer(
        self, key: int, start_s: float, end_s: float, tokens: int, resident_tokens: int = 0
    ) -> None:
        """Announce a prefill, now that it starts, of a prompt of ``tokens`` of which the growing KV
        of ``resident_tokens`` need not be sent."""
        sizes, count = self._sizes, self._count
        assert sizes is not None, "a path of no model"
        total = sizes.total(tokens, resident_tokens)
        most = total if count == 1 else sizes.most(tokens, resident_tokens)
        if not self._sending:
            self._most_s = self._load = 0.0
            if start_s > self._at_s:
                self._at_s = start_s
        most_s, step_s = most / self.rate_bytes_per_s, max((end_s - start_s) / count, _LEAST_STEP_S)
        self._offered += 1
        self._sending[key] = self._unplaced[self._offered] = Sending(
            self._offered, start_s, end_s, step_s, count, tokens, resident_tokens, total, most_s
        )
        self._most_s += most_s
        self._load += most_s / step_s

    def landed_s(self, key: int, now_s: float) -> float:
        """When the last layer of ``key`` lands. Call it at the end of its prefill, in time order:
        then every layer that leaves before it has been offered. Infinite where the rate stays 0."""
        one = self._sending[key]
        if one.departed is None:
            self._advance(now_s)
        departed = one.departed
        if departed is None:  # a prefill without duration
            departed = max(self._own(now_s), self._departed)
            departed += one.total_bytes / self.rate_bytes_per_s
            self._departed = max(self._departed, departed)
        self.sent_bytes += one.total_bytes
        self._forget(key, one)
        return self._wall(departed) + self.delay_s

    def _forget(self, key: int, one: Sending) -> None:
        del self._sending[key]
        if one.place >= 0:
            assert self._table is not None
            self._table.drop(one)
        else:
            del self._unplaced[one.order]
        self._most_s -= one.most_s
        self._load -= one.most_s / one.step_s

    def withdraw(self, key: int, now_s: float) -> None:
        """The prefill ends here, for nobody: what was ready takes its turn, the rest never comes.
        Nothing where all of it was ready, or nothing was offered."""
        one = self._sending.get(key)
        if one is None:
            return
        self._advance(now_s)
        self.sent_bytes += self._ready_bytes(one, now_s)
        self._forget(key, one)

    def send(self, now_s: float, nbytes: float) -> float:
        """Send one piece that is ready now; when it lands."""
        self._advance(now_s)
        self._departed = max(self._own(now_s), self._departed) + nbytes / self.rate_bytes_per_s
        self.sent_bytes += nbytes
        return self._wall(self._departed) + self.delay_s

    def carried(self, now_s: float) -> Carried:
        """What left and what waits."""
        self._advance(now_s)
        waiting = max(0.0, self._departed - self._own(now_s)) * self.rate_bytes_per_s
        ready = sum(self._ready_bytes(one, now_s) for one in self._sending.values())
        return Carried(self.sent_bytes + ready - waiting, waiting)

    def _ready_bytes(self, one: Sending, now_s: float) -> float:
        done, _ = one.ready_by(now_s)
        if done in (0, one.count):
            return one.total_bytes if done else 0.0
        assert self._sizes is not None
        return float(self._sizes(one.tokens, one.resident_tokens)[:done].sum())

    def _advance(self, now_s: float) -> None:
        """Account for what has become ready by now."""
        if not self._few_pieces(now_s):
            found = self._placed().ready_until(now_s)
            if found is not None:
                ready, sending, tell = found
                if self._clock is not None:
                    ready = self._clock.own(ready)
                total = sending.cumsum()
                start = np.maximum.accumulate(ready - (total - sending))
                departed = total + np.maximum(start, self._departed)
                self._departed = float(departed[-1])
                tell(departed)
        self._at_s = now_s

    def _placed(self) -> SendingTable:
        assert self._table is not None
        self._table.pass_over(self._at_s)
        if self._unplaced:
            self._table.put_all(self._unplaced.values())
            self._unplaced.clear()
        return self._table

    def _few_pieces(self, now_s: float) -> bool:
        """The recursion over the few pieces that may still matter; False where they are many."""
        if not self._sending:
            return True
        begun_s, departed, load = self._at_s, self._departed, self._load
        if self._clock is not None or len(self._sending) > _FEW or load > _FULL:
            return False
        if len(self._sending) == 1:
            (one,) = self._sending.values()
            # Each piece has left before the next one is ready.
            late = departed > begun_s and departed > one.start_s + one.step_s
            if late and departed + self._most_s + load * (now_s - begun_s) > now_s:
                return False
            since_s = now_s - one.step_s
        else:
            if departed + self._most_s + load * (now_s - begun_s) > now_s:
                return False
            since_s = now_s - self._most_s / (1 - load)
        found: list[tuple[float, int, int, Sending]] = []
        for one in self._sending.values():
            done, ready_s = one.ready_by(now_s)
            while done and ready_s > since_s and ready_s > begun_s:
                found.append((ready_s, one.order, done, one))
                done -= 1
                ready_s = one.start_s + one.step_s * done
        found.sort()
        for ready_s, _, done, one in found:
            departed = (departed if departed > ready_s else ready_s) + self._piece_s(one, done - 1)
            if done == one.count:
                one.departed = departed
        self._departed = departed
        return True

    def _piece_s(self, one: Sending, piece: int) -> float:
        if one.count == 1:
            return one.most_s
        assert self._sizes is not None
        size = self._sizes.of_layer(piece, one.tokens, one.resident_tokens)
        return size / self.rate_bytes_per_s

    def _own(self, now_s: float) -> float:
        return now_s if self._clock is None else float(self._clock.own(now_s))

    def _wall(self, own: float) -> float:
        return own if self._clock is None else float(self._clock.wall(np.array([own]))[0])

    def rate_at(self, now_s: float) -> float:
        """The rate at an instant."""
        return self.rate_bytes_per_s if self._clock is None else self._clock.rate_at(now_s)

    def next_change_s(self, now_s: float) -> float:
        """When the rate changes next; infinite when it does no more."""
        return math.inf if self._clock is None else self._clock.next_change_s(now_s)

    def open_s(self, now_s: float) -> float:
        """When the path carries something again: now, unless its rate is 0."""
        at_s = now_s
        while self.rate_at(at_s) == 0 and at_s < math.inf:
            at_s = self.next_change_s(at_s)
        return at_s

    def mean_rate_bytes_per_s(self, start_s: float, end_s: float) -> float:
        """Between two instants."""
        if self._clock is None:
            return self.rate_bytes_per_s
        own_s = float(self._clock.own(end_s)) - float(self._clock.own(start_s))
        return self.rate_bytes_per_s * own_s / (end_s - start_s)


class _OwnTime:
    """u(t) and its inverse for a rate that is constant between changes. # arrays (changes + 1,)"""

    def __init__(self, rate_bytes_per_s: float, changes: Sequence[RateChange]) -> None:
        assert all(b.at_s > a.at_s for a, b in pairwise(changes)), "changes ascend"
        assert changes[0].at_s >= 0
        steps = list(changes)
        if steps[0].at_s > 0:
            steps.insert(0, RateChange(0.0, rate_bytes_per_s))
        self._at_s = np.array([step.at_s for step in steps])
        self._rates = np.array([step.rate_bytes_per_s for step in steps])
        self._slopes = self._rates / rate_bytes_per_s
        passed = np.diff(self._at_s) * self._slopes[:-1]
        self._own = np.concatenate(([0.0], np.cumsum(passed)))

    def own(self, time_s: FloatArray | float) -> FloatArray:
        at = np.maximum(np.searchsorted(self._at_s, time_s, side="right") - 1, 0)
        own: FloatArray = self._own[at] + (time_s - self._at_s[at]) * self._slopes[at]
        return own

    def wall(self, own: FloatArray) -> FloatArray:
        """The earliest time at which u is ``own``."""
        at = np.maximum(np.searchsorted(self._own, own, side="left") - 1, 0)
        passed, slopes = own - self._own[at], self._slopes[at]
        with np.errstate(divide="ignore", invalid="ignore"):
            since_s = np.where(passed > 0, passed / slopes, 0.0)
        time_s: FloatArray = self._at_s[at] + since_s
        return time_s

    def rate_at(self, time_s: float) -> float:
        at = max(int(np.searchsorted(self._at_s, time_s, side="right")) - 1, 0)
        return float(self._rates[at])

    def next_change_s(self, time_s: float) -> float:
        at = int(np.searchsorted(self._at_s, time_s, side="right"))
        return float(self._at_s[at]) if at < len(self._at_s) else math.inf
