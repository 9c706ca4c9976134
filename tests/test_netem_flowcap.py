"""A token bucket for every flow: each gets its cap, all together more, and nothing is forgotten."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.flowcap import FlowCap

CAP = 1e6
BURST = 1500  # what the cap passes in 1 ms, but at least one packet


def drain(cap: FlowCap[int]) -> list[tuple[float, int]]:
    found = []
    while (release_s := cap.next_release_s()) is not None:
        assert cap.pop(release_s - 1e-9) is None
        popped = cap.pop(release_s)
        assert popped is not None
        found.append(popped)
    assert cap.held_bytes == 0
    return found


def test_each_flow_gets_its_cap_and_all_together_the_sum() -> None:
    cap: FlowCap[int] = FlowCap(CAP, 10**6)
    for index in range(3000):
        cap.offer(bytes([index % 3]), index, 1500, 1, 0.0)
    released = drain(cap)
    for flow in range(3):
        last_s = max(at_s for at_s, index in released if index % 3 == flow)
        assert last_s == pytest.approx((1000 * 1500 - BURST) / CAP, rel=0.01)
    total_s = released[-1][0]
    assert 3000 * 1500 / total_s == pytest.approx(3 * CAP, rel=0.01)


offers = st.lists(
    st.tuples(
        st.floats(min_value=0, max_value=0.01),
        st.integers(min_value=0, max_value=2),
        st.integers(min_value=40, max_value=65_000),
    ),
    min_size=1,
    max_size=60,
)


@given(offers)
def test_no_interval_carries_more_than_the_bucket_and_the_cap(
    packets: list[tuple[float, int, int]],
) -> None:
    cap: FlowCap[int] = FlowCap(CAP, 10**6)
    now_s = 0.0
    for index, (gap_s, flow, size) in enumerate(packets):
        now_s += gap_s
        cap.offer(bytes([flow]), index, size, 1, now_s)
    released = drain(cap)
    for flow in range(3):
        mine = [(at_s, index) for at_s, index in released if packets[index][1] == flow]
        assert [index for _, index in mine] == sorted(index for _, index in mine)
        for begin in range(len(mine)):
            carried = 0
            for at_s, index in mine[begin:]:
                # The packet that empties the bucket may be larger than what is left in it.
                allowed = BURST + CAP * (at_s - mine[begin][0])
                assert carried <= allowed + 1
                carried += packets[index][2]


@given(offers)
def test_a_flow_that_keeps_below_its_cap_is_not_held(packets: list[tuple[float, int, int]]) -> None:
    cap: FlowCap[int] = FlowCap(CAP, 10**6)
    now_s = 0.0
    for index, (gap_s, flow, size) in enumerate(packets):
        cap.offer(bytes([flow]), index, size, 1, now_s)
        assert cap.pop(now_s) == (now_s, index)
        now_s += gap_s + size / CAP


def test_a_queue_that_is_full_drops_only_its_own_flow() -> None:
    cap: FlowCap[int] = FlowCap(CAP, 5)
    for index in range(20):
        cap.offer(b"greedy", index, 1500, 1, 0.0)
    cap.offer(b"modest", 99, 1500, 1, 0.0)
    released = drain(cap)
    assert cap.dropped_total == 15
    assert (0.0, 99) in released
    assert len(released) == 6


def test_flows_that_are_over_are_forgotten_and_those_that_are_not_keep_their_debt() -> None:
    cap: FlowCap[int] = FlowCap(CAP, 10**6)
    cap.offer(b"busy", 0, 10_000_000, 1, 0.0)
    assert cap.pop(0.0) == (0.0, 0)
    for index in range(1, 5000):
        cap.offer(index.to_bytes(2), index, 1500, 1, index * 0.001)
        assert cap.pop(index * 0.001) == (index * 0.001, index)
    assert cap.flows < 1100
    cap.offer(b"busy", -1, 1500, 1, 5.0)
    ((at_s, _),) = drain(cap)
    assert at_s == pytest.approx(10.0, rel=0.01)


def test_another_cap_holds_for_what_waits_and_none_lets_it_go() -> None:
    cap: FlowCap[int] = FlowCap(CAP, 10**6)
    for index in range(100):
        cap.offer(b"flow", index, 1500, 1, 0.0)
    cap.change(2 * CAP, 10**6, 0.0)
    cap.change(CAP / 2, 10**6, 0.0)
    assert cap.pop(0.0) == (0.0, 0)
    found = [at_s for at_s, _ in cap_until(cap, 0.1)]
    assert all(late - early == pytest.approx(0.003) for early, late in pairwise(found[1:]))
    cap.change(None, 10**6, 0.1)
    rest = drain(cap)
    assert {at_s for at_s, _ in rest} == {0.1}
    assert [index for _, index in rest] == sorted(index for _, index in rest)
    assert len(found) + len(rest) == 99


def cap_until(cap: FlowCap[int], end_s: float) -> list[tuple[float, int]]:
    return list(iter(lambda: cap.pop(end_s), None))
