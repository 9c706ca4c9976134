"""The arithmetic of one direction: conservation, order, rate, delay, jitter, slots and changes."""

import math
import statistics
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.delay_tables import SCALE, delay_table
from netem.delayline import DelayLine
from netem.link import Direction, JitterDistribution, Slot

offers = st.lists(
    st.tuples(st.floats(min_value=0, max_value=0.01), st.integers(min_value=20, max_value=65_000)),
    min_size=1,
    max_size=60,
)


def a_line(
    rate: float, delay_s: float, limit: int = 10**6, seed: str = "", **more: Any
) -> DelayLine[int]:
    return DelayLine(Direction(rate, delay_s, **more), limit, seed)


def drain(line: DelayLine[int]) -> list[tuple[float, int]]:
    """Everything held, with its arrival time."""
    arrivals = []
    while (arrival_s := line.next_arrival_s()) is not None:
        assert line.pop(math.nextafter(arrival_s, -math.inf)) is None
        item = line.pop(arrival_s)
        assert item is not None
        arrivals.append((arrival_s, item))
    return arrivals


@given(offers, st.floats(min_value=1e4, max_value=1e9), st.floats(min_value=0, max_value=0.1))
def test_arrivals_follow_the_virtual_finish_times(
    packets: list[tuple[float, int]], rate: float, delay_s: float
) -> None:
    line = a_line(rate, delay_s)
    now_s = free_s = 100.0
    expected = []
    for index, (gap_s, size) in enumerate(packets):
        now_s += gap_s
        free_s = max(now_s, free_s) + size / rate
        expected.append((free_s + delay_s, index))
        assert line.push(index, size, 1, now_s)
    assert drain(line) == expected
    assert line.counters() == {
        "bytes": sum(size for _, size in packets),
        "packets": len(packets),
        "dropped": 0,
        "queued_bytes": 0,
    }


@given(offers, st.integers(min_value=1, max_value=20), st.integers(min_value=0, max_value=2**32))
def test_every_packet_is_delivered_held_or_dropped(
    packets: list[tuple[float, int]], limit: int, seed: int
) -> None:
    line = a_line(1e6, 0.01, limit, str(seed), jitter_s=0.005)
    now_s, arrived = 0.0, []
    for index, (gap_s, size) in enumerate(packets):
        now_s += gap_s
        line.push(index, size, 1, now_s)
        while (item := line.pop(now_s)) is not None:
            arrived.append(item)
        counters = line.counters()
        assert counters["packets"] + counters["dropped"] + line.held_packets == index + 1
        assert line.held_packets <= limit
        assert line.room_packets == limit - line.held_packets
    arrived += [item for _, item in drain(line)]
    assert arrived == sorted(arrived)  # Jitter does not reorder.
    assert line.held_bytes == 0


def test_a_sustained_load_leaves_at_the_rate() -> None:
    line = a_line(1e6, 0.005)
    for index in range(1000):
        line.push(index, 1500, 1, 0.0)
    arrivals = [arrival_s for arrival_s, _ in drain(line)]
    assert arrivals[-1] == pytest.approx(0.005 + 1000 * 1500 / 1e6)


def test_a_packet_that_overtakes_skips_the_way_and_not_the_queue() -> None:
    line = a_line(1e6, 0.010)
    line.push(0, 1000, 1, 0.0)
    line.push(1, 1000, 1, 0.0, overtakes=True)
    line.push(2, 1000, 1, 0.0)
    assert drain(line) == [
        (pytest.approx(0.002), 1),
        (pytest.approx(0.011), 0),
        (pytest.approx(0.013), 2),
    ]


def delays_s(count: int = 20_000, **more: Any) -> list[float]:
    """Of packets a second apart, so that none is held back by the one before."""
    line = a_line(1e12, 0.010, seed="3", **more)
    for index in range(count):
        line.push(index, 1000, 1, float(index))
    return [arrival_s - index for arrival_s, index in drain(line)]


@pytest.mark.parametrize(
    ("distribution", "deviation_s"),
    [
        ("uniform", 0.002 / math.sqrt(3)),
        ("normal", 0.002),
        ("pareto", 0.002),
        ("paretonormal", 0.002),
    ],
)
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_jitter_has_its_distribution_whatever_the_correlation(
    distribution: JitterDistribution, deviation_s: float, correlation: float
) -> None:
    found = delays_s(
        jitter_s=0.002, jitter_distribution=distribution, jitter_correlation=correlation
    )
    assert statistics.fmean(found) == pytest.approx(0.010, abs=0.05 * deviation_s)
    # 15 % is what the link promises, 5 % what this many draws allow.
    law = [entry / SCALE for entry in memoryview(delay_table(distribution)).cast("h")]
    assert statistics.pstdev(found) == pytest.approx(0.002 * statistics.pstdev(law), rel=0.05)
    assert deviation_s == pytest.approx(0.002 * statistics.pstdev(law), rel=0.15)
    quartiles = [0.010 + 0.002 * law[len(law) * part // 4] for part in (1, 2, 3)]
    assert statistics.quantiles(found, n=4) == pytest.approx(quartiles, abs=0.1 * deviation_s)
    assert correlation - 0.11 < statistics.correlation(found[:-1], found[1:]) < correlation + 0.02


def test_a_slot_lets_its_packets_pass_together_and_the_rest_wait_for_the_next() -> None:
    slot = Slot(min_delay_s=0.010, max_delay_s=0.010, packets=3)
    line = a_line(1e9, 0.001, slot=slot)
    for index in range(7):
        line.push(index, 1000, 1, 0.0)
    arrivals = [arrival_s for arrival_s, _ in drain(line)]
    first_s = arrivals[0]
    assert first_s == pytest.approx(0.011, abs=1e-5)
    assert arrivals == pytest.approx([first_s] * 3 + [first_s + 0.01] * 3 + [first_s + 0.02])


def test_slots_are_as_far_apart_as_they_may_and_bound_bytes() -> None:
    line = a_line(1e9, 0.0, slot=Slot(min_delay_s=0.002, max_delay_s=0.004, bytes=2500))
    for index in range(3000):
        line.push(index, 1000, 1, 0.0)
    instants = sorted({arrival_s for arrival_s, _ in drain(line)})
    assert len(instants) == 1000  # The third packet is the one that uses 2500 bytes up.
    gaps_s = [late - early for early, late in pairwise(instants)]
    assert min(gaps_s) >= 0.002
    assert max(gaps_s) <= 0.004 + 1e-9
    assert statistics.fmean(gaps_s) == pytest.approx(0.003, rel=0.02)


@given(
    offers,
    st.floats(min_value=1e5, max_value=1e8),
    st.floats(min_value=1e5, max_value=1e8),
    st.floats(min_value=0, max_value=0.5),
)
def test_what_waits_leaves_at_the_new_rate_from_the_change_on(
    packets: list[tuple[float, int]], before: float, after: float, change_after_s: float
) -> None:
    """Against a queue that is emptied byte by byte: how much is left when is integrated."""
    line = a_line(before, 0.02)
    now_s, waiting_s, offered = 0.0, 0.0, []
    for index, (gap_s, size) in enumerate(packets):
        waiting_s = max(0.0, waiting_s - gap_s) + size / before
        now_s += gap_s
        line.push(index, size, 1, now_s)
        offered.append(now_s + waiting_s)
    change_s = now_s + change_after_s
    gone = list(iter(lambda: line.pop(change_s), None))
    line.change(Direction(after, 0.02), 10**6, change_s)
    expected = [
        finish_s if finish_s <= change_s else change_s + (finish_s - change_s) * before / after
        for finish_s in offered
    ]
    found = drain(line)
    assert [item for _, item in found] == list(range(len(gone), len(packets)))
    for arrival_s, item in found:
        assert arrival_s == pytest.approx(expected[item] + 0.02, rel=1e-9, abs=1e-9)
    # And what comes after queues behind it.
    line.push(99, 1000, 1, change_s)
    ((last_s, _),) = drain(line)
    assert last_s >= max([change_s, *(s for s in expected)]) + 1000 / after + 0.02 - 1e-9


def test_a_lower_delay_does_not_reorder_and_a_limit_is_that_of_new_packets() -> None:
    line = a_line(1e9, 0.100)
    for index in range(10):
        line.push(index, 1000, 1, 0.0)
    line.change(Direction(1e9, 0.010), 10, 0.001)
    assert not line.push(10, 1000, 1, 0.001)
    assert line.dropped_total == 1
    assert line.pop(0.2) == 0
    assert line.push(11, 1000, 1, 0.001)
    assert [item for _, item in drain(line)] == [*range(1, 10), 11]
