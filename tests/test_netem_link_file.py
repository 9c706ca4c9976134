"""Link files and the named profiles."""

import csv
from pathlib import Path

import pytest

from netem import link_file
from netem.link import Direction, LinkError, Slot
from netem.link_file import load_profile, profile_names, read_link_file, read_profile
from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss, bursty

PUBLISHED = Path(__file__).parents[2] / "shared/data/netem/profiles.csv"
EVERYTHING = """
summary = "every key"
rate = "10gbit"
delay = "5ms"
jitter = "1ms"
jitter_distribution = "normal"
jitter_correlation = "25%"
loss = "0.1%"
reorder = "2%"
reorder_correlation = "50%"
reorder_gap = 3
duplicate = "0.3%"
duplicate_correlation = "10%"
corrupt = "0.4%"
corrupt_correlation = "20%"
ecn = true
slot = { min_delay = "1ms", max_delay = "2ms", packets = 10, bytes = "64KiB" }
limit_packets = 50000
mtu = "9000B"
per_flow_cap = "5gbit"
seed = 7

[far_to_near]
rate = "20gbit"
loss = { model = "gilbert_elliott", p = "1%", r = "10%", loss_bad = "90%", loss_good = "0.1%" }
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "wan.toml"
    path.write_text(text)
    return path


def test_every_key_reaches_its_field(tmp_path: Path) -> None:
    profile = read_link_file(written(tmp_path, EVERYTHING))
    spec = profile.spec
    assert (spec.name, profile.summary) == ("wan", "every key")
    assert spec.near_to_far == Direction(
        rate_bytes_per_s=1.25e9,
        delay_s=0.005,
        jitter_s=0.001,
        jitter_distribution="normal",
        jitter_correlation=0.25,
        loss=IndependentLoss(0.001),
        reorder=0.02,
        reorder_correlation=0.5,
        reorder_gap=3,
        duplicate=0.003,
        duplicate_correlation=0.1,
        corrupt=0.004,
        corrupt_correlation=0.2,
        ecn=True,
        slot=Slot(0.001, 0.002, 10, 65536),
        limit_packets=50_000,
    )
    assert spec.far_to_near.rate_bytes_per_s == 2.5e9
    assert spec.far_to_near.loss == GilbertElliott(0.01, 0.1, 0.9, 0.001)
    assert spec.far_to_near.jitter_s == 0.001
    assert (spec.mtu_bytes, spec.per_flow_cap_bytes_per_s, spec.seed) == (9000, 6.25e8, 7)


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ('loss = { model = "bursts", rate = "0.05%", mean_burst_packets = 10 }', bursty(5e-4, 10)),
        ('loss = { model = "independent", rate = "1%", correlation = "25%" }',
         IndependentLoss(0.01, 0.25)),
        ('[loss]\nmodel = "four_state"\np13 = "1%"\np31 = "10%"', FourStateLoss(0.01, 0.1)),
        ('loss = "0%"', None),
    ],
)  # fmt: skip
def test_loss_models(tmp_path: Path, text: str, loss: object) -> None:
    spec = read_link_file(written(tmp_path, f'rate = "1gbit"\nrtt = "40ms"\n{text}')).spec
    assert spec.near_to_far.loss == loss
    assert spec.near_to_far.delay_s == 0.02


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('rate = "1gbit"\nrtt = "1ms"\njiter = "1us"', ["'jiter'", "did you mean 'jitter'?"]),
        ('rate = "1gbit"\n[near_to_far]\nrtt = "1ms"', ["'near_to_far.rtt'", "Valid keys here:"]),
        ('rate = "1gbit"\nrtt = "1ms"\nslot = { min_delai = "1ms", max_delay = "1ms" }',
         ["'slot.min_delai'", "'min_delay'"]),
        ('rate = "1gbit"\nrtt = "1ms"\nloss = { model = "bursts", rate = "1%", mean_burst = 3 }',
         ["'loss.mean_burst'", "'mean_burst_packets'"]),
        ('rate = "1gbit"\nrtt = "1ms"\nloss = { model = "rain" }', ["'loss'", "'four_state'"]),
        ('rate = "1gbit"\nrtt = "1ms"\nloss = { model = "bursts", rate = "1%" }',
         ["'loss.mean_burst_packets' is missing"]),
        ('rate = 100\nrtt = "1ms"', ["'rate'", '"100gbit"']),
        ('rate = "1gbit"\nrtt = "1ms"\nseed = -1', ["'seed'", "greater than or equal to 0"]),
        ('rtt = "1ms"\njitter = "1us"', ["'rate' is missing", "reorder"]),
        ('rate = "1gbit"', ["'rtt' is missing"]),
        ('rate = "1gbit"\nrtt = "1ms"\ndelay = "1ms"', ["either 'rtt' or 'delay'"]),
        ('rate = "1gbit"\nrtt = "1ms"\njitter = "1ms"', ["'wan'", "jitter", "exceeds"]),
        ('rate = "1gbit"\nrtt\n', ["not usable TOML", "line 2"]),
        ('rtt = "1ms"\n[rate]\nvalue = "1gbit"\nbasis = "guessed"\nsource = "x"',
         ["'rate'", "'guessed' must be one of"]),
        ('rtt = "1ms"\n[rate]\nvalue = "1gbit"\nbasis = "assumed"',
         ["'rate'", "just the keys value, basis and source"]),
    ],
)  # fmt: skip
def test_a_faulty_file_names_itself_and_the_key(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(LinkError) as caught:
        read_link_file(written(tmp_path, text))
    message = str(caught.value)
    assert all(word in message for word in ["wan.toml", *words]), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("variation", "words"),
    [
        ('[[variation.change]]\nat = "1s"\nrte = "1gbit"', "Unknown key 'change.0.rte'"),
        ('[[variation.change]]\nat = "1s"', "changes nothing"),
        (
            '[variation.microburst]\ndepth = "9%"\nmin_duration = "2s"\nmax_duration = "1s"',
            "must hold",
        ),
    ],
)
def test_a_faulty_variation_is_refused_although_nobody_follows_it(
    tmp_path: Path, variation: str, words: str
) -> None:
    path = written(tmp_path, f'rate = "1gbit"\nrtt = "1ms"\n{variation}\n')
    with pytest.raises(LinkError, match=words) as refusal:
        read_link_file(path)
    assert f"the [variation] of the link file {path}" in str(refusal.value)


def test_what_a_terminal_would_obey_is_shown_as_question_marks(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2Jb\nc.toml"
    path.write_text('rate = "1gbit"\nrtt = "1ms"\n')
    spec = read_link_file(path).spec
    assert str(spec) == "a?[2Jb?c: 1gbit, rtt 1ms"
    path.write_text('rate = "1gbit"\n')
    with pytest.raises(LinkError) as refusal:
        read_link_file(path)
    assert str(refusal.value).isprintable()


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(LinkError, match=r"link file nowhere\.toml does not exist"):
        read_link_file("nowhere.toml")


def test_provenance_is_kept_by_key(tmp_path: Path) -> None:
    text = """
    rtt = "1ms"
    [rate]
    value = "1gbit"
    basis = "measured"
    source = "iperf3"
    [far_to_near]
    delay = { value = "2ms", basis = "assumed", source = "a guess" }
    """
    profile = read_link_file(written(tmp_path, text))
    assert {key: one.basis for key, one in profile.provenance.items()} == {
        "rate": "measured",
        "far_to_near.delay": "assumed",
    }
    assert profile.spec.far_to_near.delay_s == 0.002


def test_every_profile_loads_and_states_the_source_of_every_value() -> None:
    assert len(profile_names()) >= 7
    for name in profile_names():
        profile = read_profile(name)
        assert profile.spec.name == name
        assert profile.spec.warnings() == ()
        assert {"rate", "rtt", "jitter", "loss"} <= set(profile.provenance)
        assert all(one.source and one.value for one in profile.provenance.values())


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
            assert spec.loss_rate == pytest.approx(float(row["loss_rate"]))
            burst = spec.far_to_near.loss.mean_burst_packets if spec.loss_rate else 1
            assert burst == pytest.approx(float(row["loss_burst_pkts"]), rel=1e-4)
            cap = row["per_flow_cap_gbps"]
            assert spec.per_flow_cap_bytes_per_s == (float(cap) * 125e6 if cap else None)


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(LinkError, match=r"'same_metr' \(did you mean 'same_metro'\?\); profiles"):
        load_profile("same_metr")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('summary = "x"\nrate = "1gbit"\nrtt = "1ms"', "without them: rate, rtt"),
        ('rtt = { value = "1ms", basis = "assumed", source = "x" }\n'
         'rate = { value = "1gbit", basis = "assumed", source = "x" }', "must have a summary"),
    ],
)  # fmt: skip
def test_a_profile_without_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str
) -> None:
    (tmp_path / "odd.toml").write_text(content)
    monkeypatch.setattr(link_file, "_PROFILE_DIR", tmp_path)
    with pytest.raises(LinkError, match=rf"odd\.toml .*{message}"):
        load_profile("odd")
