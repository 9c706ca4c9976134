"""A link above what the machine carries is refused with both numbers, or scaled by the rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.ceiling import HEADROOM, Ceiling, hold_below, measure_ceiling, scale_to_fit
from netem.link import DIRECTIONS, Direction, LinkError, LinkSpec, symmetric
from netem.relayed import open_relay

GBIT = 125e6
CEILING = Ceiling("forwarder", 10 * GBIT, 5 * GBIT)


def test_a_link_that_fits_is_left_alone() -> None:
    spec = LinkSpec("fits", Direction(8 * GBIT, 0.001), Direction(4 * GBIT, 0.001))
    assert hold_below(spec, CEILING) == (spec, ())


def test_a_link_above_is_refused_with_both_numbers_and_the_scale_that_fits() -> None:
    spec = symmetric("wan", 100 * GBIT, 0.001)
    with pytest.raises(LinkError) as refusal:
        hold_below(spec, CEILING)
    said = str(refusal.value)
    assert "100gbit near to far, where this machine carries 10gbit" in said
    assert "100gbit far to near, where this machine carries 5gbit" in said
    assert "through the forwarder backend" in said
    assert "scale its bytes by 25 or more" in said  # 100 / (0.8 x 5)


def test_the_rule_scales_bytes_and_keeps_durations() -> None:
    spec = symmetric("wan", 100 * GBIT, 0.001, per_flow_cap_bytes_per_s=5 * GBIT)
    held, (note,) = hold_below(spec, CEILING, "scale")
    assert held == spec.scaled(1.0, 25.0)
    assert held.rtt_s == spec.rtt_s
    assert held.per_flow_cap_bytes_per_s == pytest.approx(0.2 * GBIT)
    assert "its bytes are scaled by 25" in note


@given(
    st.floats(min_value=1e3, max_value=1e12),
    st.floats(min_value=1e3, max_value=1e12),
    st.floats(min_value=1e5, max_value=1e10),
)
def test_what_the_scale_says_fits_and_hardly_less_would(
    out: float, back: float, carried: float
) -> None:
    spec = LinkSpec("any", Direction(out, 0.0), Direction(back, 0.0))
    ceiling = Ceiling("relay", carried, carried)
    factor = scale_to_fit(spec, ceiling)
    most = max(spec.direction(name).rate_bytes_per_s for name in DIRECTIONS)
    assert most / factor <= HEADROOM * carried * (1 + 1e-8)
    # Two digits: at most one part in ten too much.
    assert factor == 1 or factor <= 1.1 * (1 + 1e-8) * most / (HEADROOM * carried)


def test_the_ceiling_of_this_machine_is_measured_not_assumed() -> None:
    ceiling = measure_ceiling("relay", open_relay)
    for name in DIRECTIONS:
        # Any machine relays a tenth of a Gbit/s over loopback, none a whole Tbit/s.
        assert 0.1 * GBIT < getattr(ceiling, f"{name}_bytes_per_s") < 1000 * GBIT
    with pytest.raises(LinkError, match="through the relay backend"):
        hold_below(symmetric("fast", 1000 * GBIT, 0.0), ceiling)
