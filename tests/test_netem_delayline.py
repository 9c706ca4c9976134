"""The arithmetic of one direction: conservation, order, rate, delay, jitter and loss."""

import math
import statistics
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from netem.delayline import DelayLine

offers = st.lists(
    st.tuples(st.floats(min_value=0, max_value=0.01), st.integers(min_value=20, max_value=65_000)),
    min_size=1,
    max_size=60,
)


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
    line: DelayLine[int] = DelayLine(rate, delay_s, limit_packets=10**9)
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
    line: DelayLine[int] = DelayLine(1e6, 0.01, 0.005, 0.2, limit, seed)
    now_s, arrived = 0.0, []
    for index, (gap_s, size) in enumerate(packets):
        now_s += gap_s
        if not line.lost(1):
            line.push(index, size, 1, now_s)
        while (item := line.pop(now_s)) is not None:
            arrived.append(item)
        counters = line.counters()
        assert counters["packets"] + counters["dropped"] + line.held_packets == index + 1
        assert line.held_packets <= limit
    arrived += [item for _, item in drain(line)]
    assert arrived == sorted(arrived)  # Jitter does not reorder.
    assert line.held_bytes == 0


def test_a_sustained_load_leaves_at_the_rate() -> None:
    line: DelayLine[int] = DelayLine(1e6, 0.005, limit_packets=10**6)
    for index in range(1000):
        line.push(index, 1500, 1, 0.0)
    arrivals = [arrival_s for arrival_s, _ in drain(line)]
    assert arrivals[-1] == 0.005 + 1000 * 1500 / 1e6 or math.isclose(arrivals[-1], 1.505)


def test_jitter_is_uniform_around_the_delay() -> None:
    line: DelayLine[int] = DelayLine(1e9, 0.010, 0.002, limit_packets=10**6, seed=3)
    for index in range(4000):
        line.push(index, 1000, 1, float(index))
    delays_s = [arrival_s - index for arrival_s, index in drain(line)]
    assert 0.008 <= min(delays_s) < 0.0081
    assert 0.0119 < max(delays_s) <= 0.012001 + 1e-6
    assert math.isclose(statistics.fmean(delays_s), 0.010, rel_tol=0.02)
    assert math.isclose(statistics.stdev(delays_s), 0.004 / math.sqrt(12), rel_tol=0.05)


@given(st.lists(st.integers(min_value=1, max_value=45), min_size=1, max_size=200))
def test_an_offload_packet_meets_the_losses_of_the_packets_it_stands_for(sizes: list[int]) -> None:
    together: DelayLine[int] = DelayLine(1e9, 0, loss=0.05, seed=7)
    one_by_one: DelayLine[int] = DelayLine(1e9, 0, loss=0.05, seed=7)
    for size in sizes:
        singly = tuple(index for index in range(size) if one_by_one.lost(1))
        assert together.lost(size) == singly
    assert together.dropped_total == one_by_one.dropped_total


def test_loss_has_its_rate_and_no_memory() -> None:
    line: DelayLine[int] = DelayLine(1e9, 0, loss=0.01, seed=11)
    draws = 200_000
    lost = [bool(line.lost(1)) for _ in range(draws)]
    rate = sum(lost) / draws
    assert abs(rate - 0.01) < 4 * math.sqrt(0.01 * 0.99 / draws)
    pairs = sum(1 for first, second in pairwise(lost) if first and second)
    assert pairs / draws < 4 * 0.01**2


def test_the_same_seed_gives_the_same_losses() -> None:
    def pattern(seed: int) -> list[bool]:
        line: DelayLine[int] = DelayLine(1e9, 0, loss=0.1, seed=seed)
        return [bool(line.lost(1)) for _ in range(500)]

    assert pattern(1) == pattern(1)
    assert pattern(1) != pattern(2)
