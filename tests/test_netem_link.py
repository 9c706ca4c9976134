"""Link descriptions: scaling, queues, and what is refused or warned about."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.link import Direction, LinkError, LinkSpec, Slot, symmetric
from netem.loss import GilbertElliott, IndependentLoss
from netem.units import parse_duration_s, parse_rate_bytes_per_s

GBIT = 125e6


def test_a_symmetric_link_has_half_the_round_trip_each_way() -> None:
    spec = symmetric("x", GBIT, 0.01, 1e-4, 0.001, seed=7, reorder=0.01, mtu_bytes=9000)
    assert spec.near_to_far == spec.far_to_near
    assert spec.near_to_far == Direction(
        GBIT, 0.005, 1e-4, loss=IndependentLoss(0.001), reorder=0.01
    )
    assert (spec.rtt_s, spec.seed, spec.mtu_bytes) == (0.01, 7, 9000)
    assert (spec.rate_bytes_per_s, spec.jitter_s, spec.loss_rate) == (GBIT, 1e-4, 0.001)
    assert symmetric("x", GBIT, 0.01).near_to_far.loss is None


def test_the_bulk_goes_from_far_to_near() -> None:
    spec = LinkSpec("x", Direction(GBIT, 0.001), Direction(2 * GBIT, 0.003, 1e-4))
    assert (spec.rate_bytes_per_s, spec.jitter_s) == (2 * GBIT, 1e-4)
    assert spec.rtt_s == pytest.approx(0.004)
    assert spec.bdp_bytes == pytest.approx(2 * GBIT * 0.004)


def test_scaling_keeps_the_transfer_time_of_scaled_bytes() -> None:
    spec = symmetric(
        "x",
        parse_rate_bytes_per_s("100gbit"),
        parse_duration_s("0.8ms"),
        5e-5,
        slot=Slot(0.001, 0.002, 3),
        per_flow_cap_bytes_per_s=1e9,
    )
    scaled = spec.scaled(10, 1000)
    assert scaled.rate_bytes_per_s == 125e6
    assert scaled.rtt_s == pytest.approx(80e-6)
    assert scaled.jitter_s == pytest.approx(5e-6)
    assert scaled.near_to_far.slot == Slot(1e-4, 2e-4, 3)
    assert scaled.per_flow_cap_bytes_per_s == 1e7


@given(
    rate=st.floats(min_value=1e8, max_value=5e10),
    rtt_s=st.floats(min_value=0, max_value=0.5),
    time_scale=st.floats(min_value=0.1, max_value=100),
    byte_scale=st.floats(min_value=0.1, max_value=1000),
)
def test_scaling_divides_transfer_times_by_the_time_scale(
    rate: float, rtt_s: float, time_scale: float, byte_scale: float
) -> None:
    spec = symmetric("x", rate, rtt_s).scaled(time_scale, byte_scale)
    kv_bytes = 1e9
    emulated_s = kv_bytes / byte_scale / spec.rate_bytes_per_s + spec.far_to_near.delay_s
    assert emulated_s * time_scale == pytest.approx(kv_bytes / rate + rtt_s / 2)


def test_queue_follows_the_bandwidth_delay_product() -> None:
    assert symmetric("x", GBIT, 80e-6).queue_packets("far_to_near") == 1000
    assert symmetric("x", GBIT, 0.1).queue_packets("far_to_near") == 12500
    assert symmetric("x", GBIT, 0.1, mtu_bytes=9000).queue_packets("near_to_far") == 2084
    assert symmetric("x", GBIT, 0.1, limit_packets=20).queue_packets("far_to_near") == 20
    odd = LinkSpec("x", Direction(GBIT, 0.02), Direction(2 * GBIT, 0.08))
    assert [odd.queue_packets(name) for name in ("near_to_far", "far_to_near")] == [12500, 25000]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate_bytes_per_s": 0.0}, "rate"),
        ({"rate_bytes_per_s": math.nan}, "rate"),
        ({"rtt_s": -1.0}, "rtt"),
        ({"rtt_s": 1e9}, "rtt"),
        ({"jitter_s": 0.6e-3}, "jitter of 600us exceeds the one-way delay of 500us"),
        ({"loss": 1.0}, "loss"),
        ({"loss": GilbertElliott(0.1, 0.0)}, "never end"),
        ({"limit_packets": 0}, "limit_packets"),
        ({"jitter_correlation": 1.5}, "jitter_correlation must lie"),
        ({"duplicate": -0.1}, "duplicate must lie"),
        ({"corrupt": math.nan}, "corrupt must lie"),
        ({"reorder": 0.1, "rtt_s": 0.0}, "reorder needs a delay"),
        ({"reorder_gap": 5}, "reorder_gap needs"),
        ({"reorder_gap": 2**32, "reorder": 0.1}, "reorder_gap must lie"),
        ({"slot": Slot(0.0, 0.0)}, "slot"),
        ({"slot": Slot(0.2, 0.1)}, "slot"),
        ({"slot": Slot(0.1, 0.2, packets=2**31 - 1)}, "slot"),
        ({"mtu_bytes": 100}, "mtu"),
        ({"per_flow_cap_bytes_per_s": 1.0}, "per_flow_cap"),
        ({"seed": -1}, "seed"),
    ],
)
def test_an_impossible_link_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"rate_bytes_per_s": GBIT, "rtt_s": 1e-3}
    with pytest.raises(LinkError, match=rf"'wan'.*{message}"):
        symmetric("wan", **(right | wrong))


def test_a_fault_of_one_direction_names_it() -> None:
    spec = symmetric("wan", GBIT, 1e-3)
    with pytest.raises(LinkError, match="'wan' far to near: the rate"):
        replace(spec, far_to_near=Direction(0.0, 1e-3))


def test_what_does_something_else_than_its_name_says_is_warned_about() -> None:
    assert symmetric("wan", GBIT, 0.1, 0.01, 0.001).warnings() == ()
    (short,) = symmetric("wan", GBIT, 0.1, limit_packets=1000).warnings()
    assert "limit_packets = 1000 is below 1.5 bandwidth-delay products (12500 packets)" in short
    (cut,) = symmetric("wan", GBIT, 0.1, 0.02, jitter_distribution="normal").warnings()
    assert "3 deviations of the normal jitter exceed the delay of 50ms" in cut
    (marks,) = symmetric("wan", GBIT, 0.1, ecn=True).warnings()
    assert "ecn has no effect" in marks
    (cap,) = symmetric("wan", GBIT, 0.1, per_flow_cap_bytes_per_s=GBIT).warnings()
    assert "per_flow_cap has no effect" in cap
    odd = replace(symmetric("wan", GBIT, 0.1), near_to_far=Direction(GBIT, 0.05, ecn=True))
    assert odd.warnings()[0].startswith("near to far: ecn")


def test_text_form() -> None:
    assert str(symmetric("wan", GBIT, 1e-3, 1e-4, 0.001)) == (
        "wan: 1gbit, rtt 1ms, jitter 100us, loss 0.1%"
    )
    odd = LinkSpec(
        "wan",
        Direction(GBIT, 1e-3),
        Direction(2 * GBIT, 2e-3, reorder=0.02),
        per_flow_cap_bytes_per_s=1e6,
    )
    assert str(odd) == (
        "wan: near to far 1gbit, delay 1ms; far to near 2gbit, delay 2ms, reorder 2%; "
        "8mbit a flow at most"
    )
