"""Links that transfers share fairly: max-min shares of the rate, each line's own bound respected.

A line is a sender and a receiver with the N connections between them, which all their transfers
use: what is ready leaves in the order in which it became ready (``harness.kv_layers``). A line with
something to send gets a rate x; the links' ends have capacities C, of the cluster that it leaves
and, where that can bind, of the one that it enters. The rates are max-min fair, as N connections
each make them: no line gets more than ``cap`` (``harness.transfer_rate``: the cap of a flow,
pacing, what loss leaves of a window), and none could get more without taking it from one with less,

    sum of x over an end's lines <= C,     x <= cap.

Lines between the same two clusters all get the same x, so that one integral serves all of them

    V(t) = integral of x over time        (bytes that a busy line has sent)

and a line's pieces depart by Lindley's recursion in V: piece k, ready at r_k, of b_k bytes, leaves
when V = d_k = max(d_{k-1}, V(r_k)) + b_k. So a change of shares moves no piece: the work is
O(log n) a piece and O(pairs of clusters) a change, whatever the number of lines.

The first transfer of a line begins in slow start, which costs what ``harness.transfer_rate`` counts
at the rate that the line would have alone: n RTT - w (2^n - 1) / rate, as bytes before the first.
"""

import heapq
import math
from collections.abc import Mapping

from msgspec import Struct

from harness.kv_layers import LayerSizes
from harness.kv_path import Carried
from harness.simulator.course import Course
from harness.transfer_rate import SlowStart

#: A sender and a receiver, each with its cluster.
Line = tuple[tuple[str, str], tuple[str, str]]


class _Group(Struct, eq=False):
    """Lines between the same two clusters. ``departures``: (V, order, line, whose last piece leaves
    then); where it is nobody's the line may be idle then."""

    ends: tuple[str, ...]
    virtual_bytes: float = 0.0
    active: int = 0
    rate_bytes_per_s: float = 0.0
    departures: list[tuple[float, int, "_Line", "_Sending | None"]] = []


class _Line(Struct, eq=False):
    """``due_bytes``: V when its last piece leaves."""

    group: _Group
    egress: str
    due_bytes: float = 0.0
    busy: bool = False
    warm: bool = False


class _Sending(Struct, eq=False):
    """``count`` pieces at equal steps from ``start_s`` to ``end_s``; ``piece`` is the next one."""

    key: int
    line: _Line
    start_s: float
    end_s: float
    count: int
    tokens: int
    resident_tokens: int
    total_bytes: float
    piece: int = 0

    def next_s(self) -> float:
        """When the next piece is ready."""
        if self.piece + 1 == self.count:
            return self.end_s
        return self.start_s + (self.end_s - self.start_s) / self.count * (self.piece + 1)


class FairLinks:
    """``egress`` and ``ingress``: capacities by cluster in bytes/s; a cluster that is in neither
    does not bind. Times must not go back.

    What was offered is known by its key until it has departed (``departed``) or was dropped.
    """

    def __init__(
        self,
        egress: Mapping[str, Course],
        ingress: Mapping[str, Course],
        cap: Course,
        sizes: LayerSizes,
        *,
        layerwise: bool = True,
        slow_start: SlowStart | None = None,
    ) -> None:
        self._ends = {f"from {name}": course for name, course in egress.items()}
        self._ends |= {f"to {name}": course for name, course in ingress.items()}
        self._cap = cap
        self._sizes, self._layerwise = sizes, layerwise
        self._slow_start = slow_start
        self._now_s = -math.inf
        self._order = 0
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._lines: dict[tuple[str, str], _Line] = {}
        self._sendings: dict[int, _Sending] = {}
        #: (when the next piece is ready, order, whose)
        self._ready: list[tuple[float, int, _Sending]] = []
        courses = (*self._ends.values(), cap)
        self._changes = sorted({at_s for one in courses for at_s, _ in one.steps[1:]}, reverse=True)
        self._capacity = {name: one.steps[0][1] for name, one in self._ends.items()}
        self._cap_bytes_per_s = cap.steps[0][1]
        self._departed: list[tuple[int, float]] = []
        #: Lines that have something to send.
        self._busy = 0
        #: Bytes that became ready, by the cluster that they leave.
        self.ready_bytes = dict.fromkeys(egress, 0.0)

    def offer(
        self,
        key: int,
        line: Line,
        start_s: float,
        end_s: float,
        tokens: int,
        resident_tokens: int = 0,
    ) -> None:
        """Announce a prefill that starts, as ``KvPath.offer``."""
        count = self._sizes.num_layers if self._layerwise else 1
        total = self._sizes.total(tokens, resident_tokens)
        self._put(
            _Sending(key, self._line(line), start_s, end_s, count, tokens, resident_tokens, total)
        )

    def send(self, key: int, line: Line, now_s: float, nbytes: float) -> None:
        """One piece that is ready now."""
        self._put(_Sending(key, self._line(line), now_s, now_s, 1, 0, 0, nbytes))

    def _put(self, one: _Sending) -> None:
        assert one.key not in self._sendings, f"{one.key} is being sent"
        self._sendings[one.key] = one
        self._push_ready(one)

    def drop(self, key: int) -> None:
        """What was not ready yet is not sent; what was still takes its turn, for nobody."""
        self._sendings.pop(key, None)

    def _line(self, ends: Line) -> _Line:
        (sender, leaves), (receiver, enters) = ends
        found = self._lines.get((sender, receiver))
        if found is None:
            names = tuple(n for n in (f"from {leaves}", f"to {enters}") if n in self._ends)
            group = self._groups.setdefault(names, _Group(names))
            found = self._lines[sender, receiver] = _Line(group, leaves)
            found.warm = self._slow_start is None
        return found

    def departed(self, now_s: float) -> list[tuple[int, float]]:
        """Go on to now: (key, when its last byte left) of those that are through since the last
        call, in that order."""
        self._go_on(now_s)
        found, self._departed = self._departed, []
        return found

    def next_s(self) -> float:
        """Before then nothing changes; infinite where nothing will leave any more."""
        return self._next()[0]

    def carried(self, egress: str, now_s: float) -> Carried:
        """What left a cluster, and what is ready and has not."""
        self._go_on(now_s)
        waiting = sum(
            line.due_bytes - line.group.virtual_bytes
            for line in self._lines.values()
            if line.busy and line.egress == egress
        )
        return Carried(max(0.0, self.ready_bytes[egress] - waiting), waiting)

    def _next(self) -> tuple[float, _Group | None]:
        """The next instant at which anything changes, and whose departure that is."""
        at_s, whose = math.inf, None
        for group in self._groups.values():
            if not group.departures:
                continue
            left = group.departures[0][0] - group.virtual_bytes
            if left <= 0:
                done_s = self._now_s
            elif group.rate_bytes_per_s > 0:
                done_s = self._now_s + left / group.rate_bytes_per_s
            else:
                continue
            if done_s < at_s:
                at_s, whose = done_s, group
        if self._ready and self._ready[0][0] <= at_s:
            at_s, whose = self._ready[0][0], None
        # Changes matter only to what is being sent.
        waits = self._ready or any(group.departures for group in self._groups.values())
        if waits and self._changes and self._changes[-1] <= at_s:
            at_s, whose = self._changes[-1], None
        return at_s, whose

    def _go_on(self, now_s: float) -> None:
        while True:
            at_s, whose = self._next()
            if at_s > now_s:
                break
            self._pass(max(at_s, self._now_s))
            if whose is not None:
                self._depart(whose)
            elif self._changes and self._changes[-1] <= at_s:
                self._follow(at_s)
            else:
                self._release(heapq.heappop(self._ready)[2], now_s)
        self._pass(max(now_s, self._now_s))
        if self._changes and self._changes[-1] <= now_s:
            self._follow(now_s)

    def _pass(self, now_s: float) -> None:
        """Let time pass in which nothing changes."""
        for group in self._groups.values():
            if group.active:
                group.virtual_bytes += group.rate_bytes_per_s * (now_s - self._now_s)
        self._now_s = now_s

    def _follow(self, now_s: float) -> None:
        """Take the capacities that hold now."""
        while self._changes and self._changes[-1] <= now_s:
            self._changes.pop()
        self._capacity = {name: one.at(now_s) for name, one in self._ends.items()}
        self._cap_bytes_per_s = self._cap.at(now_s)
        self._share()

    def _push_ready(self, one: _Sending) -> None:
        self._order += 1
        heapq.heappush(self._ready, (one.next_s(), self._order, one))

    def _release(self, one: _Sending, until_s: float) -> None:
        """The next piece of a sending is ready; what happens by ``until_s`` is asked for."""
        if self._sendings.get(one.key) is not one:
            return  # dropped
        size = one.total_bytes
        if one.count > 1:
            size = self._sizes.of_layer(one.piece, one.tokens, one.resident_tokens)
        line, one.piece = one.line, one.piece + 1
        self.ready_bytes[line.egress] = self.ready_bytes.get(line.egress, 0.0) + size
        if not line.warm:
            line.warm = True
            size += self._slow_start_bytes(line, one.total_bytes)
        if one.piece < one.count:
            self._push_ready(one)
        if not self._busy and self._leaves_alone(one, size, until_s):
            return
        group, was_busy = line.group, line.busy
        line.due_bytes = (line.due_bytes if was_busy else group.virtual_bytes) + size
        self._order += 1
        if one.piece == one.count:
            heapq.heappush(group.departures, (line.due_bytes, self._order, line, one))
        if not was_busy:
            line.busy = True
            self._order += 1
            heapq.heappush(group.departures, (line.due_bytes, self._order, line, None))
            group.active += 1
            self._busy += 1
            self._share()

    def _leaves_alone(self, one: _Sending, size: float, until_s: float) -> bool:
        """Whether a piece that finds every link idle has left before anything else happens: then
        no share changes, as is the rule on links with much room."""
        rate = self._alone_bytes_per_s(one.line)
        if rate <= 0 or any(group.departures for group in self._groups.values()):
            return False
        left_s = self._now_s + size / rate
        if left_s > until_s or (self._ready and self._ready[0][0] < left_s):
            return False
        if self._changes and self._changes[-1] < left_s:
            return False
        if one.piece == one.count:
            del self._sendings[one.key]
            self._departed.append((one.key, left_s))
        return True

    def _alone_bytes_per_s(self, line: _Line) -> float:
        """What a line gets while no other sends."""
        ends = [self._capacity[name] for name in line.group.ends]
        return min(self._cap_bytes_per_s, *ends) if ends else self._cap_bytes_per_s

    def _slow_start_bytes(self, line: _Line, total_bytes: float) -> float:
        """What the line could have sent meanwhile at the rate it would have alone."""
        slow_start = self._slow_start
        assert slow_start is not None
        rate = self._alone_bytes_per_s(line)
        window, rtt_s = slow_start.window_bytes, slow_start.rtt_s
        if not 0 < rate * rtt_s < math.inf:
            return 0.0
        begun = max(math.ceil(math.log2(1 + total_bytes / window)) - 1, 0)
        rounds = min(begun, math.ceil(math.log2(max(rate * rtt_s / window, 1.0))))
        return max(0.0, rounds * rtt_s * rate - window * (2.0**rounds - 1))

    def _depart(self, group: _Group) -> None:
        due_bytes, _, line, one = heapq.heappop(group.departures)
        group.virtual_bytes = due_bytes  # without rounding
        if one is not None:
            if self._sendings.get(one.key) is one:
                del self._sendings[one.key]
                self._departed.append((one.key, self._now_s))
        elif line.due_bytes > due_bytes:
            self._order += 1
            heapq.heappush(group.departures, (line.due_bytes, self._order, line, None))
        else:
            line.busy = False
            group.active -= 1
            self._busy -= 1
            if not group.departures:
                assert not group.active, "a busy line that is not due"
                group.virtual_bytes = 0.0
            self._share()

    def _share(self) -> None:
        """Max-min fair rates: all rise together, until an end is full or each has its cap."""
        rising = [group for group in self._groups.values() if group.active]
        if len(rising) == 1:
            (group,) = rising
            full_bytes = min((self._capacity[name] for name in group.ends), default=math.inf)
            group.rate_bytes_per_s = min(self._cap_bytes_per_s, full_bytes / group.active)
            return
        left = dict(self._capacity)
        while rising:
            counts = dict.fromkeys(left, 0)
            for group in rising:
                for name in group.ends:
                    counts[name] += group.active
            full = {name: left[name] / n for name, n in counts.items() if n}
            level = min(full.values(), default=math.inf)
            stops = [g for g in rising if any(full[name] <= level for name in g.ends)]
            if self._cap_bytes_per_s <= level:
                level, stops = self._cap_bytes_per_s, rising
            for group in stops:
                group.rate_bytes_per_s = level
                for name in group.ends:
                    left[name] = max(0.0, left[name] - level * group.active)
            rising = [group for group in rising if group not in stops]
