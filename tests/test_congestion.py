"""The estimate of the link against flows whose rate, backlog and loss are known."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduling.congestion import (
    EASY,
    CongestionConfig,
    LinkEstimate,
    LinkSample,
    LinkState,
)

CAPACITY = 1000.0
CONFIG = CongestionConfig(CAPACITY, smoothing_s=1.0)


def sample(
    at_s: float,
    acked: float,
    connection: int = 0,
    sender: str = "a",
    unsent: float = 0.0,
    backlog: float = 0.0,
    retransmits: int = 0,
    rtt_s: float = 0.02,
    in_flight: float = 0.0,
) -> LinkSample:
    return LinkSample(
        at_s, sender, "d", connection, acked, retransmits, rtt_s, 0.01, unsent, backlog, in_flight
    )


def steady(
    estimate: LinkEstimate, rate: float, start_s: float, end_s: float, backlog: float = 0.0
) -> LinkState:
    """Four connections that carry ``rate`` together, sampled every 50 ms."""
    state = estimate.state(start_s)
    for step in range(round((end_s - start_s) / 0.05) + 1):
        at_s = start_s + 0.05 * step
        batch = [sample(at_s, rate / 4 * at_s, each, backlog=backlog) for each in range(4)]
        state = estimate.handle(batch, at_s)
    return state


def test_a_steady_flow_is_read_back() -> None:
    state = steady(LinkEstimate(CONFIG), 600.0, 0.0, 10.0)
    assert state.goodput_bytes_per_s == pytest.approx(600, rel=1e-3)
    assert state.utilisation == pytest.approx(0.6, rel=1e-3)
    assert state.queueing_delay_s == pytest.approx(0.01)
    assert state.at_s == pytest.approx(10.0)
    assert not state.scarce


@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=30), st.floats(1, 1e9))
def test_the_rate_does_not_depend_on_when_samples_come(steps: list[float], rate: float) -> None:
    estimate, at_s = LinkEstimate(CONFIG), 0.0
    estimate.handle([sample(0.0, 0.0)], 0.0)
    for step in steps:
        at_s += step
        state = estimate.handle([sample(at_s, rate * at_s)], at_s)
    expected = rate * (1 - math.exp(-at_s))
    assert state.goodput_bytes_per_s == pytest.approx(expected, rel=1e-6)


def test_a_full_link_is_scarce_only_when_something_waits_and_stays_so_for_a_while() -> None:
    estimate = LinkEstimate(CONFIG)
    assert not steady(estimate, 960.0, 0.0, 10.0).scarce
    assert steady(estimate, 960.0, 10.0, 11.0, backlog=200.0).scarce
    assert not estimate.state(20.0).scarce
    assert estimate.state(11.0).scarce
    assert steady(estimate, 960.0, 11.0, 12.0).scarce  # nothing waits, but it is still full
    counters = dict.fromkeys(range(4), 240.0 * 12)
    scarce = []
    for step in range(1, 100):
        at_s = 12 + 0.05 * step
        counters = {each: acked + 0.05 * 150 for each, acked in counters.items()}
        state = estimate.handle([sample(at_s, counters[each], each) for each in counters], at_s)
        scarce.append((state.scarce, state.utilisation > 0.7))
    assert all(one == above for one, above in scarce)
    assert not scarce[-1][0]


def test_backlog_counts_once_a_pair_and_unsent_bytes_once_a_connection() -> None:
    batch = [sample(0.0, 0.0, each, unsent=10.0, backlog=100.0) for each in range(4)]
    batch.append(sample(0.0, 0.0, 0, sender="b", unsent=1.0, backlog=50.0))
    state = LinkEstimate(CONFIG).handle(batch, 0.0)
    assert state.waiting_bytes == 4 * 10 + 1 + 100 + 50
    assert state.waiting_s == pytest.approx(state.waiting_bytes / CAPACITY)


def test_a_replaced_connection_counts_from_zero_and_a_late_sample_is_dropped() -> None:
    estimate = LinkEstimate(CONFIG)
    estimate.handle([sample(0.0, 5000.0, retransmits=7)], 0.0)
    state = estimate.handle([sample(1.0, 100.0, retransmits=2)], 1.0)
    weight = 1 - math.exp(-1)
    assert state.goodput_bytes_per_s == pytest.approx(weight * 100)
    assert state.retransmits_per_s == pytest.approx(weight * 2)
    assert estimate.handle([sample(0.5, 9e9)], 1.0) == state


def test_a_sender_that_goes_away_fades_and_is_forgotten() -> None:
    estimate = LinkEstimate(CONFIG)
    assert estimate.state(0.0).at_s is None
    now = steady(estimate, 800.0, 0.0, 10.0)
    assert estimate.state(11.0).goodput_bytes_per_s == now.goodput_bytes_per_s  # not yet due
    later = estimate.state(12.0)
    assert estimate.state(40.1) == LinkState(None, 0, 0, 0, 0, 0, 0, False, CAPACITY, False)
    assert estimate.state(12.0) == later  # to ask changes nothing
    ratio = later.goodput_bytes_per_s / now.goodput_bytes_per_s
    assert ratio == pytest.approx(math.exp(-1))
    nothing = LinkState(None, 0, 0, 0, 0, 0, 0, False, CAPACITY, False)
    assert estimate.handle([], 41.0) == nothing


class Link:
    """One FIFO link that carries ``rate``, offered bytes, and sampled once a second.

    What waits does so at the sender, or ``buffered`` in front of the bottleneck.
    """

    def __init__(self, estimate: LinkEstimate, *, buffered: bool = False) -> None:
        self.estimate, self.now_s, self.acked, self.waiting = estimate, 0.0, 0.0, 0.0
        self.buffered = buffered
        self.state = estimate.handle([sample(0.0, 0.0)], 0.0)

    def second(self, offered: float, rate: float) -> LinkState:
        sent = min(self.waiting + offered, rate)
        self.waiting += offered - sent
        self.acked += sent
        self.now_s += 1.0
        if self.buffered:
            rtt_s = 0.01 + self.waiting / rate
            one = sample(self.now_s, self.acked, rtt_s=rtt_s, in_flight=rate * rtt_s)
        else:
            one = sample(self.now_s, self.acked, backlog=self.waiting, rtt_s=0.01)
        self.state = self.estimate.handle([one], self.now_s)
        return self.state


@pytest.mark.parametrize("buffered", [False, True])
def test_capacity_is_learned_from_busy_periods_and_comes_back_when_nothing_waits(
    buffered: bool,
) -> None:
    link = Link(LinkEstimate(CONFIG), buffered=buffered)
    assert link.second(300, CAPACITY).capacity_bytes_per_s == CAPACITY
    state = link.second(60, 50)  # cut to 50 while 60 a second are offered
    # Not yet: what waits is less than what a period carries, so the link might have been idle.
    assert state.capacity_bytes_per_s > 0.9 * CAPACITY
    for _ in range(12):
        state = link.second(60, 50)
    assert state.capacity_bytes_per_s == pytest.approx(50)
    assert state.scarce
    while link.waiting:
        state = link.second(0, 50)
    held = [link.second(0, 50).capacity_bytes_per_s for _ in range(10)]
    assert held[-1] <= 50 * 1.05**2  # an idle link teaches nothing
    light = [link.second(20, CAPACITY).capacity_bytes_per_s for _ in range(50)]
    assert light == [held[-1]] * 50  # nor does one that is hardly used
    heavy = [link.second(0.8 * held[-1], CAPACITY).capacity_bytes_per_s for _ in range(50)]
    assert heavy == sorted(heavy)
    assert heavy[-1] == pytest.approx(0.8 * held[-1] / EASY, rel=CONFIG.recovery_factor - 1)
    rates = [held[-1]]
    while rates[-1] < CAPACITY:
        rates.append(link.second(0.8 * rates[-1], CAPACITY).capacity_bytes_per_s)
    steps = [after / before for before, after in pairwise(rates[1:-1])]
    assert steps == pytest.approx([CONFIG.recovery_factor] * len(steps))


def test_a_rate_above_what_was_learned_is_believed_at_once() -> None:
    link = Link(LinkEstimate(CONFIG))
    for _ in range(6):
        link.second(120, 50)
    assert link.state.capacity_bytes_per_s == pytest.approx(50)
    while link.waiting:
        link.second(0, 400)
    for _ in range(6):
        state = link.second(300, CAPACITY)
    assert state.capacity_bytes_per_s >= 300


@given(
    st.lists(st.tuples(st.floats(0, 3000), st.floats(10, 2000)), min_size=1, max_size=60),
    st.booleans(),
)
def test_capacity_is_never_below_what_the_link_carried_at_its_slowest(
    seconds: list[tuple[float, float]], buffered: bool
) -> None:
    link, slowest = Link(LinkEstimate(CONFIG), buffered=buffered), CAPACITY
    for offered, rate in seconds:
        state = link.second(offered, rate)
        slowest = min(slowest, rate)
        assert slowest * (1 - 1e-9) <= state.capacity_bytes_per_s <= CAPACITY


DOWN = CongestionConfig(CAPACITY, down_after_s=1.0)


def test_a_link_is_down_when_what_waits_does_not_move() -> None:
    link = Link(LinkEstimate(DOWN))
    assert not link.second(500, CAPACITY).down
    assert not link.second(500, 0.0).down  # the first period in which nothing moved
    assert link.second(500, 0.0).down
    assert not link.second(0, CAPACITY).down


def test_an_idle_link_is_not_down() -> None:
    link = Link(LinkEstimate(DOWN))
    assert not any(link.second(0, CAPACITY).down for _ in range(60))


def test_silence_of_senders_that_had_spoken_is_an_outage_and_word_ends_it() -> None:
    estimate = LinkEstimate(DOWN)
    assert not estimate.is_down(100.0)  # nobody has said anything yet
    estimate.handle([], 100.0)
    assert not estimate.is_down(100.9)
    assert estimate.is_down(101.0)
    assert estimate.state(101.0).down
    estimate.handle([sample(102.0, 0.0)], 102.0)
    assert not estimate.is_down(102.5)
    assert not LinkEstimate(CONFIG).is_down(1e9)  # without a bound nothing is


def test_what_stands_in_a_buffer_is_no_outage_when_the_flow_is_over() -> None:
    link = Link(LinkEstimate(DOWN), buffered=True)
    for _ in range(5):
        link.second(120, 50)
    assert link.state.scarce
    # Nothing is sent any more, so nothing is acknowledged, and the RTT is as it was.
    for second in range(6, 30):
        state = link.estimate.handle([sample(second, link.acked, rtt_s=7.0)], float(second))
        assert not state.down
    assert state.waiting_bytes == 0


def test_an_rtt_that_a_burst_has_left_behind_is_no_queue() -> None:
    """A transfer a second fills the link's buffer for a moment: the RTT stays as it was then, and
    what is acknowledged varies."""
    estimate, acked = LinkEstimate(CONFIG), 0.0
    for second in range(60):
        acked += (400, 20, 90)[second % 3]
        state = estimate.handle([sample(float(second), acked, rtt_s=0.5)], float(second))
        assert state.waiting_bytes == 0
        assert state.capacity_bytes_per_s == CAPACITY


def test_the_capacity_is_that_of_all_senders_together() -> None:
    estimate = LinkEstimate(CONFIG)
    for turn in range(200):
        now_s = 0.25 * turn
        # Each carries a fifth of the capacity whenever it is asked, and has more waiting.
        report = sample(now_s, 50 * now_s, sender="abcd"[turn % 4], backlog=300.0, rtt_s=0.01)
        state = estimate.handle([report], now_s)
    assert state.capacity_bytes_per_s == pytest.approx(200)
    assert state.scarce
