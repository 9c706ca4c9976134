"""The applied link against the measured one, with stated tolerances.

Measured by real processes in both sites (``netem.probe``): round trips on the idle link, the TCP
payload rate of one flow and of several, each way, and, where datagrams can cross, what becomes of
numbered ones. The relay carries none, so nothing is said of loss and reordering there.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from netem.datagrams import Tally
from netem.jitter import most_jitter_s
from netem.link import DIRECTIONS, Direction, DirectionName, LinkSpec
from netem.loss import GilbertElliott
from netem.probes import Probes, probes
from netem.site import Path
from netem.units import format_duration_s, format_fraction, format_rate

FLOWS = 4
#: The larger of both tolerances applies to the median round trip, above and below. The first is
#: wall time: a machine's wake-ups are as late under a scaled link as under one that is not.
RTT_TOLERANCE_S, RTT_TOLERANCE = 0.5e-3, 0.15
#: The same for the 99th percentile above the longest round trip the link has. Beyond it is a
#: warning and no failure: a busy neighbour on two cores alone makes 10 to 100 ms. So is a minimum
#: below the shortest.
RTT_P99_TOLERANCE_S, RTT_P99_TOLERANCE = 20e-3, 0.5
#: Payload is 1448 of every 1500 bytes: 3.5 % of the first is no fault of the link. One flow has to
#: share its window with the slow start before it.
RATE_TOLERANCE_BELOW, RATE_TOLERANCE_ABOVE = 0.10, 0.05
SINGLE_FLOW_TOLERANCE_BELOW = 0.25
#: Of lost, copied or reordered datagrams: this many deviations of their number, and this share.
SHARE_DEVIATIONS, SHARE_TOLERANCE = 4.0, 0.002

_RTT_SPAN_S = 0.6
_MIN_P99_SAMPLES = 100
_BULK_S, _SINGLE_BULK_S = 0.8, 0.4


@dataclass(frozen=True, slots=True)
class LinkCheck:
    """What was measured. Rates are TCP payload, over all ``flows`` or of a single one.

    ``rtt_p99_s`` is None below 100 round trips; the tallies are where no datagrams can cross.
    """

    rtt_min_s: float
    rtt_p50_s: float
    rtt_samples: int
    rate_near_to_far_bytes_per_s: float
    rate_far_to_near_bytes_per_s: float
    flows: int
    bulk_s: float
    rtt_p99_s: float | None = None
    single_flow_near_to_far_bytes_per_s: float | None = None
    single_flow_far_to_near_bytes_per_s: float | None = None
    datagrams_near_to_far: Tally | None = None
    datagrams_far_to_near: Tally | None = None


def measure_path(path: Path, flows: int = FLOWS, bulk_s: float = _BULK_S) -> LinkCheck:
    """Round trips, rates of ``flows`` and of one flow each way, datagrams; about 6 s.

    A rate outside its tolerance is measured twice more and the median told, since the machine may
    have had something else to do for a while. LinkError when the path fails under a measurement,
    as one on which TCP gets nowhere does.
    """
    with probes(path) as ends:
        rtts_s = sorted(ends.rtts_s(_RTT_SPAN_S))
        return LinkCheck(
            rtt_min_s=rtts_s[0],
            rtt_p50_s=statistics.median(rtts_s),
            rtt_samples=len(rtts_s),
            rtt_p99_s=_p99(rtts_s),
            rate_near_to_far_bytes_per_s=_rate_of(ends, "near_to_far", flows, bulk_s),
            rate_far_to_near_bytes_per_s=_rate_of(ends, "far_to_near", flows, bulk_s),
            single_flow_near_to_far_bytes_per_s=_rate_of(ends, "near_to_far", 1, _SINGLE_BULK_S),
            single_flow_far_to_near_bytes_per_s=_rate_of(ends, "far_to_near", 1, _SINGLE_BULK_S),
            flows=flows,
            bulk_s=bulk_s,
            **(ends.tallies() if ends.datagrams_cross else {}),
        )


def link_failures(
    check: LinkCheck, applied: LinkSpec, *, rtt_tolerance_s: float = RTT_TOLERANCE_S
) -> tuple[str, ...]:
    """Where the measured link leaves the tolerances around ``applied``; empty when it holds.

    ``rtt_tolerance_s`` is wall time, never scaled; ``RTT_TOLERANCE`` of the applied round trip
    takes its place where that is more. Every failure names the bound it broke.
    """
    return (
        *_rtt_failures(check, applied, rtt_tolerance_s),
        *(failure for name in DIRECTIONS for failure in _rate_failures(check, applied, name)),
        *(failure for name in DIRECTIONS for failure in _datagram_failures(check, applied, name)),
    )


def link_warnings(check: LinkCheck, applied: LinkSpec) -> tuple[str, ...]:
    """Where single round trips leave what the link allows, although the median holds.

    That is the machine's doing: wake-ups that come late, clocks of a virtual machine.
    """
    spread_s = sum(most_jitter_s(applied.direction(name)) for name in DIRECTIONS)
    overtakes = any(applied.direction(name).reorder for name in DIRECTIONS)
    shortest_s = 0.0 if overtakes else max(0.0, applied.rtt_s - spread_s)
    longest_s = applied.rtt_s + spread_s
    told = []
    bound_s = max(RTT_TOLERANCE_S, RTT_TOLERANCE * applied.rtt_s)
    if check.rtt_min_s < shortest_s - bound_s:
        told.append(
            f"a round trip of {_duration(check.rtt_min_s)} where the link takes at least "
            f"{_duration(shortest_s)} (tolerance {_duration(bound_s)})"
        )
    bound_s = max(RTT_P99_TOLERANCE_S, RTT_P99_TOLERANCE * applied.rtt_s)
    if check.rtt_p99_s is not None and check.rtt_p99_s > longest_s + bound_s:
        told.append(
            f"round trip {_duration(check.rtt_p99_s)} at p99 where the link takes at most "
            f"{_duration(longest_s)} (tolerance {_duration(bound_s)})"
        )
    return tuple(told)


def _p99(ascending: list[float]) -> float | None:
    """Nearest rank."""
    if len(ascending) < _MIN_P99_SAMPLES:
        return None
    return ascending[math.ceil(0.99 * len(ascending)) - 1]


def _rtt_failures(check: LinkCheck, applied: LinkSpec, rtt_tolerance_s: float) -> Iterator[str]:
    bound_s = max(rtt_tolerance_s, RTT_TOLERANCE * applied.rtt_s)
    if abs(check.rtt_p50_s - applied.rtt_s) > bound_s:
        yield (
            f"round trip {_duration(check.rtt_p50_s)} at p50 instead of "
            f"{_duration(applied.rtt_s)} (tolerance {_duration(bound_s)}, the larger of "
            f"{_duration(rtt_tolerance_s)} and {RTT_TOLERANCE:.0%})"
        )


def _rate_of(ends: Probes, name: DirectionName, flows: int, bulk_s: float) -> float:
    lowest, _, highest = _rate_bounds(ends.path.applied, name, flows)
    rate = ends.rate(name, flows, bulk_s)
    if lowest <= rate <= highest:
        return rate
    return statistics.median([rate, *(ends.rate(name, flows, bulk_s) for _ in range(2))])


def _rate_failures(check: LinkCheck, applied: LinkSpec, name: DirectionName) -> Iterator[str]:
    way = name.replace("_", " ")
    several: float = getattr(check, f"rate_{name}_bytes_per_s")
    single: float | None = getattr(check, f"single_flow_{name}_bytes_per_s")
    cases = (several, check.flows, way), (single, 1, f"{way} over a single flow")
    for rate, flows, words in cases:
        lowest, wanted, highest = _rate_bounds(applied, name, flows)
        if rate is not None and not lowest <= rate <= highest:
            yield (
                f"{words} {_rate(rate)} instead of {_rate(wanted)} "
                f"(tolerance {_rate(lowest)} to {_rate(highest)})"
            )


def _rate_bounds(applied: LinkSpec, name: DirectionName, flows: int) -> tuple[float, float, float]:
    """(lowest, wanted, highest) payload rate of some flows in one direction."""
    one = applied.direction(name)
    wanted = min(one.rate_bytes_per_s, flows * (applied.per_flow_cap_bytes_per_s or math.inf))
    reachable = min(wanted, _loss_limited_rate(one, applied, flows))
    below = SINGLE_FLOW_TOLERANCE_BELOW if flows == 1 else RATE_TOLERANCE_BELOW
    # What reordering, or a path that opens now and then, leaves to TCP is not foretold.
    lowest = 0.0 if one.reorder or one.slot else reachable * (1 - below)
    return lowest, wanted, wanted * (1 + RATE_TOLERANCE_ABOVE)


def _datagram_failures(check: LinkCheck, applied: LinkSpec, name: DirectionName) -> Iterator[str]:
    tally: Tally | None = getattr(check, f"datagrams_{name}")
    if tally is None:
        return
    one, way = applied.direction(name), name.replace("_", " ")
    burst = one.loss.mean_burst_packets if one.loss else 1.0
    overtaking = one.reorder / (1 + max(0, one.reorder_gap - 1) * one.reorder)
    for words, count, share, run in (
        ("lost", tally.lost, one.loss_rate, burst),
        ("duplicated", tally.duplicated, one.duplicate, 1 / (1 - one.duplicate_correlation)),
        ("reordered", tally.reordered, overtaking, 1 / (1 - one.reorder_correlation)),
    ):
        # Runs of geometric length with mean B make the variance 2 B - 1 times the binomial one.
        variance = tally.sent * share * (1 - share) * max(1.0, 2 * run - 1)
        bound = SHARE_DEVIATIONS * math.sqrt(variance) + SHARE_TOLERANCE * tally.sent + 1
        # None at all where ten runs were due has a chance of 5e-5, however long the runs.
        absent = count == 0 and share * tally.sent > 10 * max(1.0, run)
        if absent or abs(count - share * tally.sent) > bound:
            yield (
                f"{way} {count} of {tally.sent} datagrams {words} instead of "
                f"{_fraction(share)} (tolerance {bound:.0f} datagrams)"
            )


def _taken(one: Direction) -> float:
    """The share of packets that TCP has to send again."""
    return 1 - (1 - one.loss_rate) * (1 - one.corrupt)


def _loss_limited_rate(one: Direction, applied: LinkSpec, flows: int) -> float:
    """What loss leaves to TCP: half of Mathis' MSS / RTT * 1.22 / sqrt(p) per flow.

    Half, because the formula is that of long flows and the window here is short.
    """
    taken = _taken(one)
    if taken == 0:
        return math.inf
    # TCP answers a burst of losses once.
    events = taken / one.loss.mean_burst_packets if isinstance(one.loss, GilbertElliott) else taken
    rtt_s = max(applied.rtt_s, 1e-4)
    return flows * 0.5 * applied.mtu_bytes / rtt_s * 1.22 / math.sqrt(events)


def _duration(value_s: float) -> str:
    return format_duration_s(float(f"{value_s:.3g}"))


def _rate(value_bytes_per_s: float) -> str:
    return format_rate(float(f"{value_bytes_per_s * 8:.3g}") / 8)


def _fraction(value: float) -> str:
    return format_fraction(float(f"{value:.3g}"))
