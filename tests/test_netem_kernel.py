"""A real netem kernel: what is set is read back, and does what it says.

``nox -s netem`` boots such a kernel where this machine's has no tc-netem. A loaded host holds
single packets up for many milliseconds and a slow one all of them: delays are asserted as the
difference to another delay in the same run, at the median, and rates by what came least late of
several bursts. What a quiet machine reaches is measured by ``benchmarks/link_accuracy.py``.
"""

import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from itertools import groupby, pairwise

import pytest
from hypothesis import example, given, settings
from netem_draws import netems
from netem_packets import (
    DELAY_TOLERANCE_S,
    EARLY_S,
    EMULATED,
    Stream,
    medians_s,
    pings_s,
    stream,
)
from test_netem_attributes import EVERYTHING

from netem.attributes import Netem, told_by_a_dump
from netem.link import JitterDistribution, LinkSpec, Slot, symmetric
from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss, Loss, bursty
from netem.qdisc import add_netem, change_netem, read_netem
from netem.routed import RoutedPath, open_netem
from netem.wiring import Place, line_of_namespaces

pytestmark = [pytest.mark.netem, pytest.mark.netadmin]

#: The fastest link that a processor can fill.
FASTEST_MBIT = 200 if EMULATED else 1000

GBIT = 125e6
#: The bend of a burst's earliest arrivals (``earliest_rate``) is below this, but for stalls.
STRAIGHT = 0.0005
MOST_BURSTS = 30
#: A queue that holds all that a test sends, so that only what the test asks for is lost.
DEEP = 1_000_000


def deep(rate_bytes_per_s: float = GBIT, rtt_s: float = 0.0, **more: object) -> LinkSpec:
    return symmetric("test", rate_bytes_per_s, rtt_s, limit_packets=DEEP, **more)


@pytest.fixture(scope="module")
def places() -> Iterator[list[Place]]:
    """Two namespaces and a wire with a netem to change."""
    with line_of_namespaces(2, 1500) as line:
        add_netem(line[0].route, line[0].to_far, Netem(1000))
        yield line


@settings(database=None, deadline=None, max_examples=150)
@given(netems, netems)
@example(EVERYTHING, Netem(1000))
@example(Netem(1000, 50_000_000_000), Netem(1000, 1))  # 400 Gbit/s, and no RATE64 after it
def test_what_the_kernel_runs_is_what_was_sent(
    places: list[Place], first: Netem, second: Netem
) -> None:
    """Whatever ran before: nothing that ``second`` leaves off is kept."""
    near = places[0]
    for netem in (first, second):
        notes = change_netem(near.route, near.to_far, netem)
        taken = read_netem(near.route, near.to_far)
        assert told_by_a_dump(taken) == told_by_a_dump(netem)
        assert [note for note in notes if "unsupported" in note] == (
            list(notes) if netem.seed is not None and taken.seed != netem.seed else []
        )


@pytest.mark.parametrize("rate_gbit", [100, 400])
def test_rates_that_need_64_bits_are_read_back(rate_gbit: int) -> None:
    with open_netem(symmetric("fast", rate_gbit * GBIT, 0.001)) as path:
        a, b = path.places[1:3]
        for router, interface in ((a, a.to_far), (b, b.to_near)):
            assert read_netem(router.route, interface).rate_bytes_per_s == rate_gbit * GBIT


def test_a_delay_of_5_ms_each_way_reads_as_a_round_trip_of_10() -> None:
    """As one of 1 ms and 9 more: what the host's timers take is in both."""
    specs = deep(rtt_s=0.001), deep(rtt_s=0.010)
    with open_netem(specs[0]) as path:
        short_s, long_s = medians_s(path, specs, lambda: pings_s(path, 40))
    assert long_s >= 0.010 - EARLY_S
    assert long_s - short_s == pytest.approx(0.009, abs=DELAY_TOLERANCE_S)


def test_each_direction_has_its_own_delay() -> None:
    quick, slow = deep(rtt_s=0.004), deep(rtt_s=0.016)
    spec = LinkSpec("odd", quick.near_to_far, slow.far_to_near)
    turned = LinkSpec("turned", slow.near_to_far, quick.far_to_near)
    with open_netem(spec) as path, stream(path) as flow:
        there_s = medians_s(path, (spec, turned), lambda: one_way_s(flow, 50, 0.001))
        both_s = medians_s(path, (spec, turned), lambda: pings_s(path, 20))
    assert there_s[0] >= 0.002 - EARLY_S
    assert there_s[1] - there_s[0] == pytest.approx(0.006, abs=DELAY_TOLERANCE_S)
    assert min(both_s) >= 0.010 - EARLY_S
    assert both_s[0] == pytest.approx(both_s[1], abs=DELAY_TOLERANCE_S)


def one_way_s(flow: Stream, count: int, spacing_s: float) -> list[float]:
    """Delays of numbered datagrams sent ``spacing_s`` apart."""
    sent_s = []
    for number in range(count):
        sent_s.append(time.time())
        flow.send([number])
        time.sleep(max(0.0, sent_s[0] + (number + 1) * spacing_s - time.time()))
    return [arrival.time_s - sent_s[arrival.number] for arrival in flow.arrivals(count)]


@pytest.mark.parametrize(
    ("distribution", "deviation", "most"), [("uniform", 3**-0.5, 1.0), ("normal", 1.0, 4.0)]
)
def test_jitter_has_its_deviation(
    distribution: JitterDistribution, deviation: float, most: float
) -> None:
    delay_s, jitter_s = 0.010, 0.002
    spec = deep(rtt_s=2 * delay_s, jitter_s=jitter_s, jitter_distribution=distribution)
    found: list[list[float]] = []
    with open_netem(spec) as path, stream(path) as flow:
        # What the host held up lies outside what the jitter can do. Up to six times, until that
        # is hardly any.
        while len(found) < 6 and max(map(len, found), default=0) < 0.98 * 500:
            # So far apart that hardly one would overtake another, which is not allowed.
            delays_s = one_way_s(flow, 500, 3 * jitter_s)
            middle_s = statistics.median(delays_s)
            found.append([d for d in delays_s if abs(d - middle_s) < (most + 0.5) * jitter_s])
    in_range = max(found, key=len)
    assert len(in_range) > 0.9 * 500
    assert statistics.median(in_range) >= delay_s - 0.2 * jitter_s
    assert statistics.pstdev(in_range) == pytest.approx(deviation * jitter_s, rel=0.15)


def test_pareto_jitter_is_skewed() -> None:
    spec = deep(rtt_s=0.020, jitter_s=0.002, jitter_distribution="pareto")
    with open_netem(spec) as path, stream(path) as flow:
        tenths = statistics.quantiles(one_way_s(flow, 300, 0.005), n=10)
    low, middle, high = tenths[0], tenths[4], tenths[8]
    # By the table 1.60 deviations lie above the median and 0.47 below; normal are 1.28 and 1.28.
    assert high - middle > 2 * (middle - low)


def bursts(lost: list[bool]) -> list[int]:
    return [sum(1 for _ in run) for is_lost, run in groupby(lost) if is_lost]


def test_independent_loss_has_its_rate() -> None:
    with open_netem(deep(loss=0.01)) as path, stream(path) as flow:
        lost = flow.lost(50_000)
        assert path.counters().near_to_far.dropped == sum(lost)
    assert sum(lost) / len(lost) == pytest.approx(0.01, abs=0.002)
    assert statistics.fmean(bursts(lost)) == pytest.approx(
        IndependentLoss(0.01).mean_burst_packets, rel=0.1
    )


@pytest.mark.parametrize(
    ("loss", "packets"),
    [
        (GilbertElliott(0.01, 0.1), 200_000),
        (GilbertElliott(0.02, 0.2, loss_bad=0.7, loss_good=0.01), 40_000),
        (FourStateLoss(p13=0.02, p31=0.2, p32=0.1, p23=0.3, p14=0.005), 40_000),
        (IndependentLoss(0.05, correlation=0.5), 40_000),
        (bursty(0.05, 3), 40_000),
    ],
    ids=["gemodel", "gemodel-h-k", "four-state", "correlated", "bursty"],
)
def test_a_loss_chain_has_its_rate_and_bursts(loss: Loss, packets: int) -> None:
    with open_netem(deep(loss=loss)) as path, stream(path) as flow:
        lost = flow.lost(packets)
    assert sum(lost) / len(lost) == pytest.approx(loss.mean_rate, rel=0.2)
    assert statistics.fmean(bursts(lost)) == pytest.approx(loss.mean_burst_packets, rel=0.2)


@pytest.mark.parametrize(("rate_mbit", "mtu"), [(10, 1500), (100, 1500), (FASTEST_MBIT, 65_000)])
def test_the_rate_is_that_of_ip_bytes(rate_mbit: int, mtu: int) -> None:
    rate = rate_mbit * GBIT / 1000
    # On the way for longer than a burst takes to send: a busy machine that has to receive as well
    # may not send it as fast as the link would take it.
    spec = deep(rate, rtt_s=0.4, mtu_bytes=mtu)
    with open_netem(spec) as path, stream(path) as flow:
        # Counted with their Ethernet headers, packets of 1500 bytes would be 0.9 % slower.
        assert measured_rate(flow, spec) == pytest.approx(rate, rel=0.003)


def measured_rate(flow: Stream, spec: LinkSpec) -> float:
    """IP bytes per second of bursts that wait 0.3 s for the bottleneck; of the straightest of them.

    Up to ``MOST_BURSTS``, until one is straight. Of a burst that was sent too slowly the sender's
    rate arrives, however steadily: it is left out, as is one that stopped for long.
    """
    count = round(0.3 * spec.rate_bytes_per_s / spec.mtu_bytes)
    found: list[tuple[float, float]] = []
    for _ in range(MOST_BURSTS):
        is_ahead = send_ahead(flow, count, spec)
        times_s = [arrival.time_s for arrival in flow.arrivals(count)]
        if len(times_s) < count:
            flow.arrivals()  # The rest of it, if the host stood still.
        elif is_ahead:
            found.append(earliest_rate(times_s, spec))
            if found[-1][0] < STRAIGHT:
                break
    assert found, f"no burst of {MOST_BURSTS} was sent as fast as the link would take it, or whole"
    return min(found)[1]


def send_ahead(flow: Stream, count: int, spec: LinkSpec) -> bool:
    """Send a burst; whether the bottleneck always had some of it left to send.

    Each part was sent before those in front of it can have left, even 10 % too fast. The first
    tenth may come as it does (see ``earliest_rate``).
    """
    packet_s = spec.mtu_bytes / spec.rate_bytes_per_s
    together = max(1, 60_000 // spec.mtu_bytes)
    is_ahead = True
    start_s = time.monotonic()
    for first in range(0, count, together):
        part = range(first, min(first + together, count))
        flow.send_offloaded(part, spec.mtu_bytes - 28)
        if first > count // 10:
            is_ahead &= time.monotonic() - start_s < 0.9 * first * packet_s
    return is_ahead


def earliest_rate(times_s: list[float], spec: LinkSpec) -> tuple[float, float]:
    """How far from straight the earliest arrivals lie, as a share of their span, and their rate.

    netem sets the time at which each packet is due when it comes; the host only adds to that. In
    every third of a burst, without its first tenth, the packet that is least late tells when it
    was due: the line through those of the outer thirds is the rate, and that of the middle one
    lies on it unless the host held up a whole third.
    """
    packet_s = spec.mtu_bytes / spec.rate_bytes_per_s
    late_s = [(time_s - number * packet_s, number) for number, time_s in enumerate(times_s)]
    late_s = late_s[len(late_s) // 10 :]
    third = len(late_s) // 3
    (first_s, first), (middle_s, middle), (last_s, last) = (
        min(late_s[start : start + third]) for start in (0, third, 2 * third)
    )
    slope_s = (last_s - first_s) / (last - first)
    bend_s = middle_s - first_s - slope_s * (middle - first)
    return abs(bend_s) / ((last - first) * packet_s), spec.mtu_bytes / (packet_s + slope_s)


def test_the_same_seed_loses_the_same_packets_or_the_kernel_is_said_not_to() -> None:
    spec = deep(loss=0.05, seed=7)
    patterns = []
    for _ in range(2):
        with open_netem(spec) as path, stream(path) as flow:
            patterns.append(flow.lost(3000))
            notes = path.notes
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    unsupported = [note for note in notes if "seed for netem is unsupported" in note]
    if release < (6, 6):
        assert len(unsupported) == 1
    else:
        assert not unsupported
        assert patterns[0] == patterns[1]
        assert any(patterns[0])


def test_loss_by_megabyte_is_that_of_packets_although_tcp_sends_offload_packets() -> None:
    loss = 0.02
    by_packet = loss * 1e6 / 1500
    with open_netem(deep(loss=loss)) as path:
        assert dropped_per_megabyte(path, 15_000_000) == pytest.approx(by_packet, rel=0.3)
        # What it would be without that care: one draw for up to 64 kB.
        path.places[0].set_offload(path.places[0].to_far, whole=True)
        assert dropped_per_megabyte(path, 15_000_000) < by_packet / 3


def dropped_per_megabyte(path: RoutedPath, size: int) -> float:
    """Packets dropped by MB that a TCP connection from near offers to the link."""
    before = path.counters().near_to_far
    far, near = path.far.namespace, path.near.namespace
    assert far is not None
    assert near is not None
    with far.run(lambda: socket.create_server((path.far.address, 0))) as server:
        address = server.getsockname()
        with near.run(lambda: socket.create_connection(address, 30)) as client:
            there, _ = server.accept()
            with there:
                sending = threading.Thread(target=client.sendall, args=(bytes(size),))
                sending.start()
                left = size
                while left:
                    left -= len(there.recv(1 << 20))
                sending.join()
    after = path.counters().near_to_far
    dropped = after.dropped - before.dropped
    return dropped / ((after.bytes - before.bytes) / 1e6)


def arrival_rate(times_s: list[float], mtu: int) -> float:
    """Bytes per second by the median time that half of a burst takes, without its first tenth.

    A packet held up by the host spoils only its own pair.
    """
    times_s = times_s[len(times_s) // 10 :]
    half = len(times_s) // 2
    spans_s = [after - before for before, after in zip(times_s, times_s[half:], strict=False)]
    return half * mtu / statistics.median(spans_s)


def test_every_flow_is_capped_by_itself() -> None:
    cap, count = 1.25e6, 400
    spec = deep(GBIT, per_flow_cap_bytes_per_s=cap)
    rates: list[list[float]] = [[], []]
    with open_netem(spec) as path, stream(path) as one, stream(path) as two:
        # fq makes up for a late wake-up in part only: a busy host takes from the rate, and gives
        # nothing. Up to six times, until it took hardly any.
        while len(rates[0]) < 6 and min(max(each, default=0.0) for each in rates) < 0.9 * cap:
            for first in range(0, count, 40):
                for flow in (one, two):
                    flow.send_offloaded(range(first, first + 40), 1472)
            times_s = [[a.time_s for a in flow.arrivals(count)] for flow in (one, two)]
            assert [len(each) for each in times_s] == [count, count]
            for found, each in zip(rates, times_s, strict=True):
                found.append(arrival_rate(each, 1500))
            # Side by side, not one after the other.
            assert times_s[0][0] < times_s[1][count // 2]
            assert times_s[1][0] < times_s[0][count // 2]
    for found in rates:
        assert 0.75 * cap < max(found) < 1.05 * cap


def test_ecn_marks_instead_of_losing() -> None:
    with open_netem(deep(loss=0.1, ecn=True)) as path, stream(path) as flow:
        flow.sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 2)  # ECT(0)
        flow.send(range(5000))
        marks = [arrival.tos & 3 for arrival in flow.arrivals(5000)]
    assert len(marks) == 5000
    assert marks.count(3) / 5000 == pytest.approx(0.1, abs=0.02)


def test_packets_overtake_are_doubled_and_damaged_as_often_as_asked() -> None:
    with open_netem(deep(rtt_s=0.4, reorder=0.1)) as path, stream(path) as flow:
        delays_s = one_way_s(flow, 2000, 0.0)
        assert sum(d < 0.1 for d in delays_s) / 2000 == pytest.approx(0.1, abs=0.03)
        path.apply(deep(rtt_s=0.002, duplicate=0.1))
        flow.send(range(3000))
        assert len(flow.arrivals()) / 3000 == pytest.approx(1.1, abs=0.025)
        path.apply(deep(rtt_s=0.002, corrupt=0.2))
        # One bit of a large datagram is hardly ever one that no checksum covers.
        flow.send(range(3000), 1400)
        assert len(flow.arrivals()) / 3000 == pytest.approx(0.8, abs=0.03)


def test_slots_let_packets_through_in_groups() -> None:
    slot = Slot(min_delay_s=0.030, max_delay_s=0.030, packets=5)
    with open_netem(deep(rtt_s=0.002, slot=slot)) as path, stream(path) as flow:
        flow.send(range(100))
        times_s = [arrival.time_s for arrival in flow.arrivals(100)]
    starts = [0, *(i for i in range(1, 100) if times_s[i] - times_s[i - 1] > 0.015), 100]
    sizes = [after - before for before, after in pairwise(starts)]
    assert statistics.median(sizes) == 5


def test_counters_tell_what_arrived_and_what_was_dropped() -> None:
    spec = symmetric("short", 1.25e6, 0.002, limit_packets=50)
    with open_netem(spec) as path, stream(path) as flow:
        start_s = time.monotonic()
        flow.send(range(500), 1472)
        sending_s = time.monotonic() - start_s
        arrived = len(flow.arrivals())
        counted = path.counters().near_to_far
    assert (counted.packets, counted.dropped) == (arrived, 500 - arrived)
    assert counted.bytes == arrived * 1500
    assert counted.queued_bytes == 0
    # What the queue holds, and what left it while they were sent.
    assert 50 <= arrived <= 50 + 10 + sending_s * spec.rate_bytes_per_s / 1500
