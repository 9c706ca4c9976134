"""Link descriptions and the named profiles."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem import link as link_module
from netem.link import LinkError, LinkSpec, load_profile, profile_names, read_profile
from netem.units import parse_duration_s, parse_rate_bytes_per_s

PUBLISHED = Path(__file__).parents[2] / "shared/data/netem/profiles.csv"


def test_scaling_keeps_the_transfer_time_of_scaled_bytes() -> None:
    spec = LinkSpec("x", parse_rate_bytes_per_s("100gbit"), parse_duration_s("0.8ms"), 5e-5)
    scaled = spec.scaled(10, 1000)
    assert scaled.rate_bytes_per_s == 125e6
    assert scaled.rtt_s == pytest.approx(80e-6)
    assert scaled.jitter_s == pytest.approx(5e-6)


@given(
    rate=st.floats(min_value=1e8, max_value=5e10),
    rtt_s=st.floats(min_value=0, max_value=0.5),
    time_scale=st.floats(min_value=0.1, max_value=100),
    byte_scale=st.floats(min_value=0.1, max_value=1000),
)
def test_scaling_divides_transfer_times_by_the_time_scale(
    rate: float, rtt_s: float, time_scale: float, byte_scale: float
) -> None:
    spec = LinkSpec("x", rate, rtt_s).scaled(time_scale, byte_scale)
    kv_bytes = 1e9
    emulated_s = kv_bytes / byte_scale / spec.rate_bytes_per_s + spec.one_way_s
    assert emulated_s * time_scale == pytest.approx(kv_bytes / rate + rtt_s / 2)


def test_queue_follows_the_bandwidth_delay_product() -> None:
    assert LinkSpec("x", 125e6, 80e-6).queue_packets == 1000
    assert LinkSpec("x", 125e6, 0.1).queue_packets == 12500
    assert LinkSpec("x", 125e6, 0.1, limit_packets=20).queue_packets == 20


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate_bytes_per_s": 0.0}, "rate"),
        ({"rate_bytes_per_s": float("nan")}, "rate"),
        ({"rtt_s": -1.0}, "rtt"),
        ({"rtt_s": 1e9}, "rtt"),
        ({"jitter_s": 0.6e-3}, "jitter"),
        ({"loss": 1.0}, "loss"),
        ({"limit_packets": 0}, "limit_packets"),
    ],
)
def test_an_impossible_link_is_refused_by_name(wrong: dict[str, float], message: str) -> None:
    right: dict[str, float] = {"rate_bytes_per_s": 125e6, "rtt_s": 1e-3}
    with pytest.raises(LinkError, match=rf"'wan'.*{message}"):
        LinkSpec("wan", **(right | wrong))  # type: ignore[arg-type]  # wrong on purpose


def test_text_form() -> None:
    assert str(LinkSpec("wan", 125e6, 1e-3, 1e-4, 0.001)) == (
        "wan: 1gbit, rtt 1ms, jitter 100us, loss 0.1%"
    )


def test_every_profile_loads_and_states_its_sources() -> None:
    assert len(profile_names()) >= 7
    for name in profile_names():
        profile = read_profile(name)
        assert profile.spec.name == name
        assert {"rate", "rtt", "jitter", "loss"} <= set(profile.provenance)
        assert len(profile.spec.not_applied) == len(profile.provenance) - 4


def test_what_a_profile_cannot_apply_travels_with_the_link() -> None:
    spec = load_profile("cross_az_capped").scaled(10, 1000)
    assert spec.not_applied == (
        "per_flow_cap = 5gbit of link profile cross_az_capped is not applied",
    )


if PUBLISHED.is_file():  # where it is not there is nothing to compare with, and no test

    def test_profiles_agree_with_the_published_table() -> None:
        with PUBLISHED.open() as file:
            rows = {row["profile"]: row for row in csv.DictReader(file)}
        assert set(rows) <= set(profile_names())
        for name, row in rows.items():
            spec = load_profile(name)
            assert spec.rate_bytes_per_s == pytest.approx(float(row["link_gbps"]) * 125e6)
            assert spec.rtt_s == pytest.approx(float(row["rtt_ms"]) / 1e3)
            assert spec.jitter_s == pytest.approx(float(row["jitter_ms"]) / 1e3)
            assert spec.loss == pytest.approx(float(row["loss_rate"]))
            cap = read_profile(name).provenance.get("per_flow_cap")
            assert (cap.value if cap else "") == (
                f"{row['per_flow_cap_gbps']}gbit" if row["per_flow_cap_gbps"] else ""
            )


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(LinkError, match=r"'nowhere'.*same_metro"):
        load_profile("nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("summary = 'x'\nrtt", "odd.toml"),
        ("summary = 'x'\nburst = 1", "burst"),
        ("summary = 'x'\nrate = '1gbit'", "rate must be a table"),
        (
            "summary = 'x'\n[rate]\nvalue = '1gbit'\nbasis = 'guessed'\nsource = 'x'",
            "'guessed' is none of",
        ),
    ],
)
def test_a_faulty_profile_names_the_file_and_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str
) -> None:
    (tmp_path / "odd.toml").write_text(content)
    monkeypatch.setattr(link_module, "_PROFILE_DIR", tmp_path)
    with pytest.raises(LinkError, match=message) as caught:
        load_profile("odd")
    assert "odd.toml" in str(caught.value)
