"""When a measured link counts as the applied one, and what is said when it does not."""

from typing import Any

from netem.check import LinkCheck, link_failures
from netem.link import LinkSpec


def spec(rtt_s: float = 0.010, **more: Any) -> LinkSpec:
    return LinkSpec("test", 25e6, rtt_s, **more)


def test_failures_name_direction_value_and_tolerance() -> None:
    applied = spec()
    good = LinkCheck(0.010, 0.0102, 50, 24e6, 24e6, 4, 0.8)
    assert link_failures(good, applied) == ()
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
