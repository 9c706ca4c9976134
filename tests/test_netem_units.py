"""Quantities with units: exact round trips, and refusals that say what is right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.units import (
    format_duration_s,
    format_fraction,
    format_rate,
    format_size_bytes,
    parse_duration_s,
    parse_fraction,
    parse_rate_bytes_per_s,
    parse_size_bytes,
)

positive = st.floats(min_value=0, max_value=1e18, allow_nan=False, allow_subnormal=False)


@given(positive)
def test_durations_survive_formatting_exactly(value_s: float) -> None:
    assert parse_duration_s(format_duration_s(value_s)) == value_s


@given(positive)
def test_rates_survive_formatting_exactly(value_bytes_per_s: float) -> None:
    assert parse_rate_bytes_per_s(format_rate(value_bytes_per_s)) == value_bytes_per_s


@given(st.floats(min_value=0, max_value=1, allow_subnormal=False))
def test_fractions_survive_formatting_exactly(value: float) -> None:
    assert parse_fraction(format_fraction(value)) == value


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_sizes_survive_formatting_exactly(value_bytes: int) -> None:
    assert parse_size_bytes(format_size_bytes(value_bytes)) == value_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.8ms", 0.0008), ("10s", 10.0), ("600 s", 600.0), ("1.5min", 90.0), ("2h", 7200.0),
     ("40us", 40e-6), ("7ns", 7e-9), ("0", 0.0), ("1e3ms", 1.0)],
)  # fmt: skip
def test_durations(text: str, value: float) -> None:
    assert parse_duration_s(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("100gbit", 12.5e9), ("1gbit", 125e6), ("14.7gbit", 1.8375e9), ("8kbit", 1000.0),
     ("0.4tbit", 50e9), ("8bit", 1.0)],
)  # fmt: skip
def test_rates(text: str, value: float) -> None:
    assert parse_rate_bytes_per_s(text) == value


def test_fractions_and_sizes() -> None:
    assert parse_fraction("0.1%") == 0.001
    assert parse_fraction("100%") == 1.0
    assert parse_size_bytes("64KiB") == 65536
    assert parse_size_bytes("1.5kB") == 1500


@pytest.mark.parametrize(
    "text", ["0.8", "0.8 gbit", "fast", "", "-1ms", "nan", "inf s", "1ms2", "1" * 80 + "ms", 0.8]
)
def test_a_wrong_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"0\.8ms.*ns, us, ms, s, min, h"):
        parse_duration_s(text)


def test_bits_and_bytes_are_not_confused() -> None:
    with pytest.raises(ValueError, match=r"unit 'GBps'.*100gbit"):
        parse_rate_bytes_per_s("1GBps")


def test_out_of_range_values_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 100%"):
        parse_fraction("101%")
    with pytest.raises(ValueError, match="whole number"):
        parse_size_bytes("0.5B")
    with pytest.raises(ValueError, match="2\\^63"):
        parse_size_bytes("9e9TiB")
    with pytest.raises(ValueError, match="too large"):
        parse_duration_s("1e999s")
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            format_duration_s(value)
