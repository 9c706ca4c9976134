"""When a measured link counts as the applied one, and what is said when it does not."""

from dataclasses import replace
from typing import Any

import pytest

from netem.check import LinkCheck, link_failures, link_warnings
from netem.datagrams import Tally
from netem.link import Direction, LinkSpec, symmetric
from netem.loss import IndependentLoss, bursty

GOOD = LinkCheck(0.010, 0.0102, 50, 24e6, 24e6, 4, 0.8)


def spec(rtt_s: float = 0.010, **more: Any) -> LinkSpec:
    return symmetric("test", 25e6, rtt_s, **more)


def test_failures_name_direction_value_and_tolerance() -> None:
    applied = spec()
    assert link_failures(GOOD, applied) == ()
    slow = LinkCheck(0.013, 0.0131, 50, 24e6, 20e6, 4, 0.8)
    late, lame = link_failures(slow, applied)
    assert "round trip 13.1ms at p50 instead of 10ms (tolerance 1.5ms, the larger of" in late
    assert "far to near 160mbit instead of 200mbit (tolerance 180mbit to 210mbit)" in lame
    lossy = spec(loss=0.05)
    assert link_failures(LinkCheck(0.010, 0.010, 50, 5e6, 5e6, 4, 0.8), lossy) == ()
    fast = LinkCheck(0.010, 0.010, 50, 40e6, 24e6, 4, 0.8)
    assert len(link_failures(fast, lossy)) == 1


def test_a_short_link_can_be_held_to_a_tighter_round_trip() -> None:
    applied = spec(80e-6)
    check = LinkCheck(0.0003, 0.00035, 200, 24e6, 24e6, 4, 0.8)
    assert link_failures(check, applied) == ()
    (late,) = link_failures(check, applied, rtt_tolerance_s=0.2e-3)
    assert "instead of 80us (tolerance 200us, the larger of 200us and 15%)" in late


def test_single_round_trips_beyond_the_link_are_warnings() -> None:
    assert link_warnings(GOOD, spec()) == ()
    odd = replace(GOOD, rtt_min_s=0.004, rtt_p99_s=0.05)
    fast, slow = link_warnings(odd, spec())
    assert "a round trip of 4ms where the link takes at least 10ms (tolerance 1.5ms)" in fast
    assert "round trip 50ms at p99 where the link takes at most 10ms (tolerance 20ms)" in slow
    assert link_failures(odd, spec()) == ()


def test_jitter_and_overtaking_allow_shorter_round_trips() -> None:
    short = replace(GOOD, rtt_min_s=0.004)
    assert link_warnings(short, spec(jitter_s=0.003)) == ()
    assert link_warnings(short, spec(jitter_s=0.001, jitter_distribution="normal")) == ()
    assert link_warnings(short, spec(reorder=0.01)) == ()


def test_directions_are_judged_by_their_own_rates() -> None:
    applied = LinkSpec("odd", Direction(25e6, 0.005), Direction(2.5e6, 0.005))
    assert link_failures(replace(GOOD, rate_far_to_near_bytes_per_s=2.4e6), applied) == ()
    (found,) = link_failures(GOOD, applied)
    assert "far to near 192mbit instead of 20mbit" in found


def test_a_flow_is_judged_by_its_cap_and_several_by_the_sum() -> None:
    applied = spec(per_flow_cap_bytes_per_s=5e6)
    singles = {f"single_flow_{name}_bytes_per_s": 4.8e6 for name in ("near_to_far", "far_to_near")}
    kept = replace(
        GOOD, rate_near_to_far_bytes_per_s=19.5e6, rate_far_to_near_bytes_per_s=19.5e6, **singles
    )
    assert link_failures(kept, applied) == ()
    broken = replace(kept, single_flow_near_to_far_bytes_per_s=6e6)
    (found,) = link_failures(broken, applied)
    assert "near to far over a single flow 48mbit instead of 40mbit" in found
    (found,) = link_failures(replace(kept, rate_far_to_near_bytes_per_s=24e6), applied)
    assert "far to near 192mbit instead of 160mbit" in found
    (found,) = link_failures(replace(kept, single_flow_far_to_near_bytes_per_s=2e6), applied)
    assert "(tolerance 30mbit to 42mbit)" in found


@pytest.mark.parametrize(
    ("more", "tally", "words"),
    [
        ({}, Tally(4000, 5, 0, 0), None),
        ({}, Tally(4000, 20, 0, 0), "20 of 4000 datagrams lost instead of 0%"),
        ({"loss": 0.01}, Tally(4000, 45, 0, 0), None),
        ({"loss": 0.01}, Tally(4000, 0, 0, 0), "0 of 4000 datagrams lost instead of 1%"),
        ({"loss": 0.01}, Tally(4000, 90, 0, 0), "(tolerance 34 datagrams)"),
        ({"loss": bursty(0.01, 10)}, Tally(4000, 90, 0, 0), None),
        ({"loss": bursty(0.05, 10)}, Tally(4000, 0, 0, 0), "lost instead of 5%"),
        ({"duplicate": 0.1}, Tally(4000, 0, 390, 0), None),
        ({"duplicate": 0.1}, Tally(4000, 0, 0, 0), "0 of 4000 datagrams duplicated instead of 10%"),
        ({"reorder": 0.1}, Tally(4000, 0, 0, 410), None),
        ({"reorder": 0.1}, Tally(4000, 0, 0, 0), "0 of 4000 datagrams reordered instead of 10%"),
        ({"reorder": 1.0, "reorder_gap": 10}, Tally(4000, 0, 0, 400), None),
        ({}, Tally(4000, 0, 0, 400), "400 of 4000 datagrams reordered instead of 0%"),
    ],
)
def test_shares_of_datagrams_are_judged_by_their_number(
    more: dict[str, Any], tally: Tally, words: str | None
) -> None:
    check = replace(GOOD, datagrams_near_to_far=tally)
    found = [text for text in link_failures(check, spec(**more)) if "datagrams" in text]
    assert len(found) == (words is not None)
    assert all(words in text and "near to far" in text for text in found if words)


def test_nothing_is_said_of_loss_where_no_datagrams_cross() -> None:
    assert link_failures(GOOD, spec(loss=IndependentLoss(0.001))) == ()
