"""Scenario files: the paper's case study as resolved, and every way a file can be wrong."""

import pickle
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from scenario_files import PAPER, ROOT, TEXT, refusal, written

from harness.core import Instance, ScenarioError
from harness.scenario import (
    Deployment,
    Scenario,
    check_emulation,
    deployment_gpus,
    load_scenario,
    scenario_hash,
)


def test_the_paper_case_study_as_resolved() -> None:
    s = load_scenario(PAPER)
    assert s.name == "paper-case-study"
    assert (s.workload.mu, s.workload.sigma, s.workload.cv) == (9.9, 1.0, 1.0)
    assert (s.workload.min_tokens, s.workload.max_tokens) == (128, 131_072)
    assert (s.workload.output_tokens, s.workload.output_max_tokens) == (1024, 1024)
    assert (s.load.rate_req_per_s, s.load.num_requests, s.load.seed) == (1.27, 360, 1)
    assert (s.slo.tpot_s, s.slo.ttft_s) == (0.025, None)
    assert (s.scale.time, s.scale.bytes) == (10.0, 1000.0)
    assert s.link.rate_bytes_per_s == 12.5e9
    assert s.link.rtt_s == pytest.approx(0.8e-3)
    assert (s.link.jitter_s, s.link.loss_rate) == (0.0, 0.0)
    assert s.fabric.rate_bytes_per_s == 50e9
    assert (s.transport.connections, s.transport.chunk_bytes) == (4, 262_144)
    assert s.transport.layerwise is True
    assert s.transport.checksum is True
    assert s.model.name == "prfaas-1t"
    assert len(s.model.architecture.layers) == 57
    plans = {
        d.name: (d.threshold_tokens, d.num_prfaas, d.num_prefill, d.num_decode)
        for d in s.deployments.values()
    }
    assert plans == {
        "prfaas_pd": (19_400, 4, 3, 5),
        "homogeneous_pd": (None, 0, 9, 3),
        "naive_heterogeneous": (None, 4, 0, 8),
    }


def test_gpu_budgets_are_the_papers() -> None:
    s = load_scenario(PAPER)
    assert deployment_gpus(s, "prfaas_pd") == {"h200": 32, "h20": 64}
    assert deployment_gpus(s, "homogeneous_pd") == {"h20": 96}
    assert deployment_gpus(s, "naive_heterogeneous") == {"h200": 32, "h20": 64}
    prices = {name: h.relative_price for name, h in s.hardware.items()}
    assert prices == {"h200": 2.0, "h20": 1.0}


def test_instances_are_named_by_cluster_role_and_number() -> None:
    one = Deployment("d", 10, 2, 1, 2, "fast", "slow")
    assert one.instances() == (
        Instance("prfaas-p0", "prfaas", "prefill", "fast"),
        Instance("prfaas-p1", "prfaas", "prefill", "fast"),
        Instance("pd-p0", "pd", "prefill", "slow"),
        Instance("pd-d0", "pd", "decode", "slow"),
        Instance("pd-d1", "pd", "decode", "slow"),
    )


def test_a_scenario_is_frozen_and_travels_between_processes() -> None:
    s = load_scenario(PAPER)
    with pytest.raises(FrozenInstanceError):
        s.load.seed = 2  # type: ignore[misc]  # the point of the test
    copy: Scenario = pickle.loads(pickle.dumps(s))
    assert copy == s
    assert copy.hardware["h20"].profile.prefill_s(5000) == s.hardware["h20"].profile.prefill_s(5000)


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_scenario(PAPER).hardware.keys() == {"h200", "h20"}


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("workload.cv=2", lambda s: s.workload.cv, 2.0),
        ("load.rate_req_per_s=1.6", lambda s: s.load.rate_req_per_s, 1.6),
        ("link.rtt=10ms", lambda s: s.link.rtt_s, 0.01),
        ('link.rtt="10ms"', lambda s: s.link.rtt_s, 0.01),
        ("link.loss=0.1%", lambda s: s.link.loss_rate, 0.001),
        ("slo.ttft=10s", lambda s: s.slo.ttft_s, 10.0),
        ("transport.layerwise=false", lambda s: s.transport.layerwise, False),
        ("scheduling.admission=reserve_first", lambda s: s.scheduling.admission, "reserve_first"),
        ("deployments.prfaas_pd.num_decode=6", lambda s: s.deployments["prfaas_pd"].num_decode, 6),
        ("name=other", lambda s: s.name, "other"),
        ("testbed.gateway_port=8080", lambda s: s.testbed.gateway_port, 8080),
        ("hardware.h20.relative_price=1.5",
         lambda s: s.hardware["h20"].relative_price, 1.5),
    ],
)  # fmt: skip
def test_overrides_reach_their_key(override: str, read: Any, value: object) -> None:
    assert read(load_scenario(PAPER, [override])) == pytest.approx(value)


def test_the_last_override_of_a_key_wins() -> None:
    assert load_scenario(PAPER, ["workload.cv=2", "workload.cv=3"]).workload.cv == 3


def test_a_link_profile_replaces_the_files_link_and_takes_changes() -> None:
    link = load_scenario(PAPER, ["link.profile=lossy_wan"]).link
    assert (link.name, link.rate_bytes_per_s, link.rtt_s) == ("lossy_wan", 5e9, 0.04)
    assert link.loss_rate == pytest.approx(5e-4)
    assert "variation of lossy_wan (diurnal) is not applied" in link.not_applied[0]
    link = load_scenario(PAPER, ["link.rtt=50ms", "link.profile=lossy_wan"]).link
    assert (link.rate_bytes_per_s, link.rtt_s) == (5e9, 0.05)
    assert link.name != "lossy_wan"


WAN = """
rate = "10gbit"
rtt = "40ms"
[far_to_near]
rate = "20gbit"
loss = { model = "bursts", rate = "0.05%", mean_burst_packets = 10 }
"""


def test_a_link_file_lies_beside_the_scenario_and_takes_changes(tmp_path: Path) -> None:
    (tmp_path / "wan.toml").write_text(WAN)
    path = written(tmp_path, TEXT)
    link = load_scenario(path, ["link.file=wan.toml"]).link
    assert (link.name, link.rtt_s) == ("wan", 0.04)
    assert (link.rate_bytes_per_s, link.near_to_far.rate_bytes_per_s) == (2.5e9, 1.25e9)
    assert (link.loss_rate, link.near_to_far.loss_rate) == (pytest.approx(5e-4), 0.0)
    changes = ["link.file=wan.toml", "link.rtt=10ms", "link.per_flow_cap=5gbit"]
    link = load_scenario(path, changes).link
    assert link.name == "wan, changed"
    assert (link.rtt_s, link.rate_bytes_per_s, link.per_flow_cap_bytes_per_s) == (
        pytest.approx(0.01),
        2.5e9,
        6.25e8,
    )


def test_a_faulty_link_file_is_told_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    (tmp_path / "wan.toml").write_text(WAN.replace("rtt", "rrt"))
    message = refusal(path, "link.file=wan.toml")
    assert all(word in message for word in ("'link'", "wan.toml", "'rrt'", "did you mean 'rtt'"))
    assert "does not exist" in refusal(path, "link.file=nowhere.toml")
    assert "not both" in refusal(path, "link.file=wan.toml", "link.profile=same_metro")


def test_defaults_fill_the_optional_tables(tmp_path: Path) -> None:
    document = TEXT
    for table in ("scale", "fabric", "scheduling", "transport", "testbed"):
        start = document.index(f"[{table}]")
        end = document.find("\n[", start)
        document = document[:start] + (document[end:] if end >= 0 else "")
    without = load_scenario(written(tmp_path, document, "paper-case-study.toml"))
    assert scenario_hash(without) == scenario_hash(load_scenario(PAPER))


#: An override of the case study and what the refusal must say.
WRONG = {
    # unknown keys
    "workload.cvv=2": ["'workload.cvv'", "did you mean 'cv'", "--set workload.cvv=2", "sigma"],
    "worklaod.cv=2": ["'worklaod'", "did you mean 'workload'", "--set worklaod.cv=2"],
    "hardware.h20.profil=x": ["'hardware.h20.profil'", "did you mean 'profile'"],
    "deployments.prfaas_pd.treshold_tokens=1": ["did you mean 'threshold_tokens'"],
    "zzz.qqq=1": ["'zzz'", "no valid key is like it"],
    # units
    "link.rate=100": ["'link.rate'", "100", '"100gbit"'],
    "link.rate=100Gbps": ["'link.rate'", "'100Gbps'", '"100gbit"'],
    "link.rate=0gbit": ["'link.rate'"],
    "link.rtt=0.8": ["'link.rtt'", "0.8", '"0.8ms"'],
    "link.rtt=-1ms": ["'link.rtt'", "'-1ms'"],
    "link.loss=0.001": ["'link.loss'", '"0.1%"'],
    "link.loss=100%": ["'link.loss'", "'100%' is out of bounds: give 0% to less than 100%"],
    "slo.tpot=25": ["'slo.tpot'", "units: ns, us, ms, s"],
    "slo.tpot=0s": ["'slo.tpot'", "'0s' is out of bounds: give more than 0s"],
    "link.rate=125bit": ["'link.rate'", "'125bit' is out of bounds: give 1kbit to 8000000tbit"],
    "transport.chunk_bytes=8MiB": ["'transport.chunk_bytes'", "give 1KiB to 4MiB"],
    "transport.chunk_bytes=262144": ["'transport.chunk_bytes'", '"64KiB"'],
    "load.duration=nan": ["'load.duration'"],
    # numbers
    "load.rate_req_per_s=true": ["'load.rate_req_per_s'", "got True"],
    'load.rate_req_per_s="1.27"': ["'load.rate_req_per_s'", "got '1.27'"],
    "load.rate_req_per_s=nan": ["'load.rate_req_per_s'", "finite", "got nan"],
    "load.rate_req_per_s=inf": ["'load.rate_req_per_s'"],
    "load.rate_req_per_s=-1": ["'load.rate_req_per_s'", "got -1"],
    "load.num_requests=1.5": ["'load.num_requests'", "got 1.5"],
    "load.num_requests=true": ["'load.num_requests'", "got True"],
    "load.num_requests=10000000000": ["'load.num_requests'"],
    "load.seed=-1": ["'load.seed'"],
    "workload.mu=inf": ["'workload.mu'"],
    "workload.sigma=-1": ["'workload.sigma'"],
    "workload.min_tokens=0": ["'workload.min_tokens'"],
    "workload.min_tokens=200000": ["'workload.min_tokens'", "200000", "131072"],
    "workload.mu=40": ["hardly any length", "mu 40"],
    "workload.output_sigma=0.5": ["'workload.output_min_tokens' is missing"],
    "workload.output_max_tokens=5": ["'workload.output_max_tokens'", "output_sigma"],
    "load.rate_req_per_s=100001": ["'load.rate_req_per_s'"],
    "scale.time=0": ["'scale.time'"],
    "testbed.gateway_port=65536": ["'testbed.gateway_port'"],
    "transport.layerwise=1": ["'transport.layerwise'", "got 1"],
    # choices
    "workload.arrivals=uniform": ["'workload.arrivals'", "'gamma', 'weibull', 'on_off' or 'mmpp'"],
    "testbed.link_backend=tc": ["'testbed.link_backend'", "'relay'"],
    "link.profile=same_metr": ["'link.profile'", "did you mean 'same_metro'"],
    "workload.trace_format=azure": ["'workload.trace_format'"],
    "workload.trace=t.csv": ["trace brings its own", "--trace"],
    # across keys
    "link.jitter=3ms": ["jitter", "half the rtt"],
    "name=a/b": ["'name'"],
    "load=3": ["'load'", "must be a table", "got 3"],
    "load.duration=1h x": ["'load.duration'"],
    # deployments
    "deployments.homogeneous_pd.threshold_tokens=5": ["needs a PrfaaS cluster", "num_prfaas is 0"],
    "deployments.naive_heterogeneous.threshold_tokens=5": ["no effect", "num_prefill is 0"],
    "deployments.prfaas_pd.num_decode=0": ["'deployments.prfaas_pd.num_decode'", "decode"],
    "deployments.prfaas_pd.num_prefill=-3": ["num_prefill'", "got -3"],
    "deployments.prfaas_pd.num_prefill=true": ["num_prefill'", "got True"],
    "deployments.homogeneous_pd.num_prefill=0": ["nothing would prefill"],
    "deployments.homogeneous_pd.num_prfaas=1": ["prfaas_hardware'", "missing"],
    "deployments.prfaas_pd.pd_hardware=h2o": ["'h2o'", "did you mean 'h20'"],
    "deployments.New.num_decode=1": ["'deployments.New.pd_hardware' is missing"],
    # files
    "model.architecture=nothing.json": ["architecture file", "nothing.json does not exist"],
    "hardware.h20.profile=nothing.json": ["profile file", "nothing.json does not exist"],
    "hardware.h20.profile=.": ["profile file", "not a regular file"],
    "hardware.h20.profile=../profiles/models/prfaas-1t.json": ["Unknown key", "models/prfaas-1t"],
    "workload.max_tokens=131073": ["131073 tokens", "8xh200.json", "1 to 131072"],
    # flags
    "workload.cv": ["KEY=VALUE"],
    "=2": ["KEY=VALUE"],
    "workload..cv=2": ["KEY=VALUE"],
    "workload.cv.x=2": ["'workload.cv' is a value, not a table"],
}  # fmt: skip


def test_a_link_too_slow_to_emulate_is_refused_by_a_live_run_alone() -> None:
    scenario = load_scenario(PAPER, ["link.rate=1kbit"])
    assert scenario.link.rate_bytes_per_s == 125
    with pytest.raises(ScenarioError, match=r"'scale' in .*at least 1kbit") as caught:
        check_emulation(scenario)
    assert caught.value.exit_status == 2
    check_emulation(load_scenario(PAPER))


@pytest.mark.parametrize("key", ["price_usd_per_gpu_hour", "relative_price"])
def test_a_price_of_one_hardware_alone_is_refused(tmp_path: Path, key: str) -> None:
    others = {"price_usd_per_gpu_hour": "relative_price", "relative_price": "none"}[key]
    text = re.sub(r"^relative_price = .*$", "", TEXT, flags=re.MULTILINE)
    for name in ("h20", "h200"):
        text = text.replace(f"[hardware.{name}]", f"[hardware.{name}]\n{others} = 1.5")
    text = text.replace("none = 1.5", "").replace("[hardware.h20]", f"[hardware.h20]\n{key} = 2.5")
    path = written(tmp_path, text)
    message = refusal(path)
    assert f"'hardware.h200.{key}'" in message
    assert "both, or neither" in message
    assert getattr(load_scenario(path, [f"hardware.h200.{key}=5"]).hardware["h20"], key) == 2.5


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_told_by_name(override: str) -> None:
    message = refusal(PAPER, override)
    assert all(word in message for word in WRONG[override]), message


def test_an_unknown_key_is_told_before_any_path_is_opened(tmp_path: Path) -> None:
    text = TEXT.replace("prfaas-1t-8xh20.json", "nothing.json").replace("cv = 1.0", "cvs = 1.0")
    assert "'workload.cvs'" in refusal(written(tmp_path, text))
    text = TEXT.replace("prfaas-1t-8xh20.json", "nothing.json").replace('"25ms"', '"25"')
    assert "'slo.tpot'" in refusal(written(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("threshold_tokens = 19400\n", "", ["threshold_tokens'", "both clusters prefill"]),
        ("seed = 1\n", "", ["'load.seed' is missing"]),
        ("mu = 9.90\n", "", ["'workload.mu' is missing", "workload.trace"]),
        ("num_requests = 360", "", ["'load.num_requests' is missing", "load.duration"]),
        ("rate_req_per_s = 1.27\n", "", ["'load.rate_req_per_s' is missing"]),
        ('rate = "100gbit"', "", ["'link.rate' is missing", "link.profile"]),
        ("[slo]\ntpot", "[slos]\ntpot", ["'slos'", "did you mean 'slo'"]),
        ("[slo]\ntpot", "[slo\ntpot", ["not TOML", "line "]),
        ("cv = 1.0", "cv = 1.0\ncv = 2.0", ["not TOML", "line "]),
        ("cv = 1.0", "cv = 2023-01-01", ["'workload.cv'", "valid number"]),
        ("cv = 1.0", "cv = " + "9" * 5000, ["not usable TOML"]),
        ("cv = 1.0", "cv = " + "9" * 400, ["'workload.cv'"]),
        ("cv = 1.0", "cv = " + "[" * 50_000, ["TOML"]),
        ("[hardware.h200]", '[hardware."h\\n200"]', ["'hardware.h?200'"]),
        ("[deployments.prfaas_pd]", "[deployments.Prfaas]", ["'deployments.Prfaas'", "a-z"]),
        ('pd_hardware = "h20"', 'pd_hardware = "h\\n20"', ["'h\\n20'"]),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_by_name(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert old in TEXT
    path = written(tmp_path, TEXT.replace(old, new))
    message = refusal(path)
    assert str(path) in message
    assert all(word in message for word in words), message


def test_what_is_no_scenario_file_is_told(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing.toml")
    assert "not a regular file" in refusal(tmp_path)
    assert "cannot be read" in refusal(Path("a" * 5000))
    assert "a?b does not exist" in refusal(Path("a\x00b"))
    assert "is missing" in refusal(written(tmp_path, ""))
    (tmp_path / "latin.toml").write_bytes("name = 'caf\xe9'".encode("latin-1"))
    assert "not UTF-8" in refusal(tmp_path / "latin.toml")
    with (tmp_path / "huge.toml").open("wb") as file:
        file.truncate(17 * 1024 * 1024)
    assert "at most" in refusal(tmp_path / "huge.toml")


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    source = (ROOT / "profiles" / "prfaas-1t-8xh20.json").read_text()
    other = written(tmp_path, source.replace('"model": "prfaas-1t"', '"model": "x"'), "p.json")
    message = refusal(PAPER, f"hardware.h20.profile={other.as_posix()}")
    assert "'x'" in message
    assert "'prfaas-1t'" in message
    assert str(other) in message


def test_decode_lengths_that_the_profile_lacks_are_refused() -> None:
    message = refusal(PAPER, "workload.output_tokens=1000000")
    assert "decode batches of 1 to 20" in message
    assert "8xh200.json" not in message
    assert "8xh20.json" in message
