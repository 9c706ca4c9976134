"""What a run on SGLang is refused for, what launchers are told, and where servers are reached."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core import EngineError, ScenarioError
from harness.engine_settings import Attached
from harness.scenario import Scenario, load_scenario
from harness.testbed.sglang import (
    check_link,
    check_sglang,
    counts_kv,
    launcher_config,
    reach,
)
from netem.link import symmetric
from netem.testlink import open_link

ROOT = Path(__file__).parents[1]
SCENARIO = ROOT / "scenarios/sglang-tiny-dense.toml"


def tiny(*overrides: str) -> Scenario:
    return load_scenario(SCENARIO, overrides)


def relay() -> Any:
    return open_link(symmetric("test", 1e9 / 8, 0.5e-3), "relay")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("scale.time=10", "scale.time"),
        ("scale.bytes=1000", "scale.bytes"),
        ("testbed.link_backend=relay", "testbed.link_backend"),
        ("scheduling.admission=push_then_admit", "scheduling.admission"),
        ("scheduling.ttft_source=prefill", "scheduling.ttft_source"),
        ("scheduling.bandwidth_aware=true", "scheduling.bandwidth_aware"),
        ("scheduling.role_conversion=true", "scheduling.role_conversion"),
        ("gateway.transfer_timeout=5s", "gateway.transfer_timeout"),
    ],
)
def test_what_sglang_cannot_do_is_refused_by_its_key(override: str, key: str) -> None:
    with pytest.raises(ScenarioError, match=f"'{key}'.*does not go with engine") as found:
        check_sglang(tiny(override))
    assert str(SCENARIO) in str(found.value)


def test_a_model_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"engine\.model_path"):
        check_sglang(tiny(f"engine.model_path={tmp_path / 'none'}"))


def test_the_relay_carries_no_kv_of_real_servers() -> None:
    given = tiny()
    with relay() as link:
        check_link(given.deployments["homogeneous_pd"], link)
        with pytest.raises(EngineError, match=r"prfaas_pd.*the relay backend cannot carry"):
            check_link(given.deployments["prfaas_pd"], link)


def test_a_launcher_is_told_of_its_own_cluster() -> None:
    given = tiny('engine.prefill.extra_flags=["--disable-overlap-schedule"]', "engine.tp=2")
    deployment = given.deployments["prfaas_pd"]
    with relay() as link:
        pd, far = (
            launcher_config(given, deployment, cluster, link.near, Path("logs"), "key")
            for cluster in ("pd", "prfaas")
        )
    assert [(one.name, one.role, one.base_gpu) for one in far.servers] == [
        ("prfaas-p0", "prefill", 0)
    ]
    assert [(one.name, one.role, one.base_gpu) for one in pd.servers] == [
        ("pd-p0", "prefill", 2),
        ("pd-d0", "decode", 4),
    ]
    assert pd.servers[0].extra_flags == ["--disable-radix-cache", "--disable-overlap-schedule"]
    assert pd.servers[1].extra_flags == ["--disable-radix-cache"]
    assert (pd.page_size, pd.device, pd.model_name) == (64, "cpu", "sglang-tiny-dense")
    assert pd.requires == ["kv_metrics", "pd"]
    assert not pd.hybrid
    assert Path(pd.log_directory).is_absolute()


def test_servers_are_reached_where_the_launchers_say() -> None:
    given = tiny()
    assert given.engine.sglang is not None
    instances = given.deployments["homogeneous_pd"].instances()
    ready = {
        "pd": {
            "ports": {"pd-p0": 1001, "pd-p1": 1002, "pd-d0": 1003},
            "bootstrap_ports": {"pd-p0": 2001, "pd-p1": 2002},
            "version": "0.5.23",
            "untested": None,
            "lacks": {"layerwise": "KV is sent by chunk"},
            "warnings": ["pd-p0: a line of its log"],
        }
    }
    with relay() as link:
        found = reach(instances, ready, given.engine.sglang, link)
    assert found.version == "0.5.23"
    assert found.notes == ("SGLang: KV is sent by chunk", "SGLang: pd-p0: a line of its log")
    assert [(one.name, one.port, one.bootstrap_port) for one in found.workers] == [
        ("pd-p0", 1001, 2001),
        ("pd-p1", 1002, 2002),
        ("pd-d0", 1003, None),
    ]
    ready["prfaas"] = ready["pd"] | {"version": "0.5.9"}
    with relay() as link, pytest.raises(EngineError, match="different versions"):
        reach(instances, ready, given.engine.sglang, link)


def test_an_attached_server_is_where_its_url_says() -> None:
    given = tiny()
    assert given.engine.sglang is not None
    attach = {
        "pd-p0": Attached("http://10.0.0.5:30000", "10.1.0.5:8998"),
        "pd-p1": Attached("http://10.0.0.6:30000", "10.1.0.6:8998"),
        "pd-d0": Attached("http://10.0.0.7", None),
    }
    asked = replace(given.engine.sglang, attach=attach)
    instances = given.deployments["homogeneous_pd"].instances()
    with relay() as link:
        first, _, last = reach(instances, {}, asked, link).workers
    assert (first.host, first.port) == ("10.0.0.5", 30000)
    assert (first.bootstrap_host, first.bootstrap_port) == ("10.1.0.5", 8998)
    assert (last.host, last.port, last.bootstrap_host, last.bootstrap_port) == (
        "10.0.0.7",
        80,
        None,
        None,
    )


@pytest.mark.netadmin
def test_an_attached_server_lies_outside_of_the_links_namespaces() -> None:
    given = tiny()
    assert given.engine.sglang is not None
    asked = replace(given.engine.sglang, attach={"pd-p0": Attached("http://10.0.0.5:1", "h:1")})
    instances = given.deployments["homogeneous_pd"].instances()
    with (
        open_link(symmetric("test", 1e9 / 8, 0.5e-3), "forwarder") as link,
        pytest.raises(EngineError, match="pd-p0 is attached"),
    ):
        reach(instances, {}, asked, link)


@pytest.mark.parametrize(
    ("version", "counts"), [("0.5.23", True), ("0.5.9", False), (None, False), ("0.6.1", True)]
)
def test_versions_that_count_kv(version: str | None, counts: bool) -> None:
    assert counts_kv(version) is counts
