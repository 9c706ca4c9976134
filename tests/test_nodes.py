"""[nodes] of a scenario, their placements, commands and hours, and what is refused."""

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from scenario_files import ROOT, refusal, written

from harness.cli import _parser
from harness.core import ScenarioError
from harness.engine_traffic import counted_kv_bytes, paths, paths_note, sharding
from harness.launch_plan.document import attach_text, dry_run
from harness.launch_plan.placement import capacity, place
from harness.planning.plan import plan
from harness.replication import Sharding
from harness.scenario import Scenario, load_scenario, scenario_hash
from harness.scenario_text import emit_attached
from harness.testbed.sglang import check_sglang, unused_link
from harness.verbs.dry_run import refuse_remote

REAL = ROOT / "scenarios" / "h200-h20.toml"
TEXT = REAL.read_text().replace("../profiles/", f"{ROOT.as_posix()}/profiles/")
NODES = TEXT[TEXT.index("[nodes.h200-0]") :]


@pytest.fixture(scope="module")
def real() -> Scenario:
    return load_scenario(REAL)


@pytest.fixture(scope="module")
def document(real: Scenario) -> dict[str, Any]:
    return dry_run(real, repeats=3)


def with_nodes(folder: Path, nodes: str, *settings: str) -> Scenario:
    return load_scenario(written(folder, TEXT.replace(NODES, nodes)), settings)


def node(name: str, cluster: str, hardware: str, gpus: int, address: str) -> str:
    return (
        f'[nodes.{name}]\naddress = "{address}"\ncluster = "{cluster}"\n'
        f'hardware = "{hardware}"\ngpus = {gpus}\n'
    )


def profile(folder: Path, source: str, gpus: int) -> str:
    content = json.loads((ROOT / "profiles" / source).read_text())
    target = folder / f"{gpus}-{source}"
    target.write_text(json.dumps(content | {"gpus_per_instance": gpus}))
    return str(target)


def test_the_real_nodes_are_four_h200_and_eight_h20(real: Scenario) -> None:
    by_kind = [(one.cluster, one.hardware, one.gpus) for one in real.nodes.values()]
    assert by_kind == [("prfaas", "h200", 8)] * 4 + [("pd", "h20", 8)] * 8
    for name, deployment in real.deployments.items():
        placements = place(real, deployment)
        assert [one.instance.name for one in placements] == [
            one.name for one in deployment.instances()
        ], name
        used = [one.head.name for one in placements]
        assert len(set(used)) == len(used)  # a node each


def test_its_splits_and_threshold_are_what_a_plan_finds(real: Scenario) -> None:
    found = {name: one.deployment for name, one in plan(real).solved.items()}
    assert found == real.deployments


def test_small_instances_share_a_node_without_a_clash(tmp_path: Path) -> None:
    settings = [
        f'hardware.h20.profile="{profile(tmp_path, "mimo-v2-flash-8xh20.json", 2)}"',
        "engine.prefill.tp=2",
        "engine.decode.tp=2",
    ]
    nodes = node("far", "prfaas", "h200", 32, "192.0.2.1")
    nodes += node("a", "pd", "h20", 8, "192.0.2.2") + node("b", "pd", "h20", 8, "192.0.2.3")
    scenario = with_nodes(tmp_path, nodes, *settings)
    placements = place(scenario, scenario.deployments["prfaas_pd"])
    taken: set[tuple[str, int]] = set()
    ports: set[tuple[str, int]] = set()
    for one in placements:
        for rank in one.ranks:
            gpus = {(rank.node.name, g) for g in range(rank.first_gpu, rank.first_gpu + rank.gpus)}
            assert not taken & gpus
            taken |= gpus
        for port in (one.port, one.bootstrap_port):
            if port is not None:
                assert (one.head.name, port) not in ports
                ports.add((one.head.name, port))
    assert len(taken) == 4 * 8 + 8 * 2
    launched = dry_run(scenario, 1)["deployments"]["prfaas_pd"]["launches"]
    second = next(one for one in launched if one["instance"] == "pd-p1")
    assert (second["node"], second["gpus"]) == ("a", (2, 3))
    words = second["arguments"]
    assert words[words.index("--base-gpu-id") + 1] == "2"


def test_a_large_instance_spans_nodes_by_the_engines_flags(tmp_path: Path) -> None:
    settings = [
        f'hardware.h20.profile="{profile(tmp_path, "mimo-v2-flash-8xh20.json", 16)}"',
        "engine.prefill.tp=16",
        "engine.decode.tp=16",
        *(f"deployments.{name}.num_decode={n}" for name, n in
          (("prfaas_pd", 2), ("homogeneous_pd", 2), ("naive_heterogeneous", 4))),
        "deployments.homogeneous_pd.num_prefill=2",
    ]  # fmt: skip
    scenario = load_scenario(written(tmp_path, TEXT), settings)
    launched = dry_run(scenario, 1)["deployments"]["prfaas_pd"]["launches"]
    both = [one for one in launched if one["instance"] == "pd-d0"]
    assert [(one["node"], one["rank"]) for one in both] == [("h20-4", 0), ("h20-5", 1)]
    for number, one in enumerate(both):
        words = one["arguments"]
        assert words[words.index("--nnodes") + 1] == "2"
        assert words[words.index("--node-rank") + 1] == str(number)
        assert words[words.index("--dist-init-addr") + 1] == "192.0.2.24:15000"
        assert words[words.index("--tensor-parallel-size") + 1] == "16"
    one_node = next(one for one in launched if one["instance"] == "prfaas-p0")
    assert "--nnodes" not in one_node["arguments"]


def test_a_command_is_what_a_shell_takes(document: dict[str, Any]) -> None:
    launched = document["deployments"]["prfaas_pd"]["launches"]
    for one in launched:
        words = shlex.split(one["shell"])
        start = words.index("sglang.launch_server")
        assert words[start + 1 :][: len(one["arguments"])] == list(one["arguments"])
        assert words[start - 2 : start] == ["/opt/sglang/bin/python", "-m"]
        assert one["environment"]["SGLANG_HOST_IP"] == one["environment"]["HOST_IP"]
        assert one["environment"]["MC_FORCE_TCP"] == "1"
    kv = {one["environment"]["SGLANG_HOST_IP"] for one in launched}
    assert kv == {f"198.51.100.{10 + i}" for i in range(4)} | {
        f"203.0.113.{20 + i}" for i in range(8)
    }


def test_links_are_options_that_prfaas_link_takes(document: dict[str, Any]) -> None:
    links = document["deployments"]["prfaas_pd"]["links"]
    assert len(links) == 12
    for one in links:
        options = _parser().parse_args(shlex.split(one["up"])[1:])
        far = one["node"].startswith("h200")
        assert (options.site, options.shape) == ("far" if far else "near", "egress")
        assert options.nodes == (4 if far else 8)
        assert len(options.peers) == (8 if far else 4)
        assert (options.rate, options.rtt) == ("100gbit", "800us")
    assert not document["deployments"]["homogeneous_pd"]["links"]


def test_both_paths_have_a_canary(document: dict[str, Any]) -> None:
    deployments = document["deployments"]
    found = {name: [one["path"] for one in each["canaries"]] for name, each in deployments.items()}
    assert found == {
        "prfaas_pd": ["across", "inside"],
        "homogeneous_pd": ["inside"],
        "naive_heterogeneous": ["across"],
    }
    script = deployments["prfaas_pd"]["canaries"][0]["shell"].partition(";")[0] + '; echo "$body"'
    said = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, timeout=20
    )
    body = json.loads(said.stdout)
    assert (body["bootstrap_host"], body["bootstrap_port"]) == ("192.0.2.10", 8998)
    assert len(body["input_ids"]) == 128


def test_each_hardware_has_a_server_to_be_measured_by(document: dict[str, Any]) -> None:
    found = {one["hardware"]: one for one in document["profiling"]}
    assert list(found) == ["h200", "h20"]
    for name, one in found.items():
        assert "--disaggregation-mode" not in one["server"]
        assert "--disable-radix-cache" in one["server"]
        assert ("--no-decode" in one["profile"]) == (name == "h200")
        options = _parser().parse_args(shlex.split(one["profile"])[1:])
        assert options.gpus == 8


def test_hours_are_gpus_times_time_times_repeats(document: dict[str, Any], real: Scenario) -> None:
    hours = document["deployments"]["prfaas_pd"]["hours"]
    assert hours["held_gpus"] == {"h200": 32, "h20": 64}
    assert hours["most_s"] == pytest.approx(3 * (1800 + hours["load_s"] + 600))
    assert hours["most_gpu_hours"] == pytest.approx(96 * hours["most_s"] / 3600)
    assert hours["most_cost"] == pytest.approx((32 * 2.0 + 64) * hours["most_s"] / 3600)
    assert hours["least_s"] < hours["most_s"]
    parts = [one["hours"]["most_gpu_hours"] for one in document["deployments"].values()]
    assert document["total"]["most_gpu_hours"] == pytest.approx(sum(parts))
    modelled = document["deployments"]["prfaas_pd"]["modelled"]
    assert modelled["nodes"] == 12
    assert modelled["price_per_hour"] == pytest.approx(128)
    assert 900 / real.load.rate_req_per_s == pytest.approx(hours["load_s"], rel=0.2)


def test_twelve_baseline_instances_do_not_fit_and_what_does_is_named(real: Scenario) -> None:
    settings = [
        "deployments.homogeneous_pd.num_prefill=9",
        "deployments.homogeneous_pd.num_decode=3",
    ]
    with pytest.raises(ScenarioError) as caught:
        dry_run(load_scenario(REAL, settings), 1)
    told = str(caught.value)
    for words in (
        "needs 12 instances",
        "64 GPUs hold 8",
        "num_prefill = 6",
        "num_decode = 2",
        "simulate",
    ):
        assert words in told
    assert capacity([one for one in real.nodes.values() if one.hardware == "h20"], 8) == 8
    with pytest.raises(ScenarioError, match=r"num_prfaas = 4"):
        dry_run(load_scenario(REAL, ["deployments.prfaas_pd.num_prfaas=5"]), 1)


def test_servers_of_another_size_than_the_profile_are_refused() -> None:
    with pytest.raises(ScenarioError, match="servers of 4 GPUs"):
        dry_run(load_scenario(REAL, ["engine.decode.tp=4"]), 1)


def test_servers_that_cannot_exchange_kv_are_refused() -> None:
    settings = ["engine.version=0.5.9", "engine.requires=[]", "engine.decode.dp=1"]
    with pytest.raises(ScenarioError, match="sliding window"):
        dry_run(load_scenario(REAL, settings), 1)


def test_bench_refuses_to_launch_elsewhere_and_runs_what_is_attached(
    real: Scenario, document: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError, match="not launched by prfaas bench so far") as caught:
        refuse_remote(real)
    assert "--emit-attach" in str(caught.value)
    attach = tomllib.loads(attach_text(document, "prfaas_pd"))["engine"]["attach"]
    target = tmp_path / "attached.toml"
    emit_attached(real, [], attach, "prfaas_pd", target)
    attached = load_scenario(target)
    assert list(attached.deployments) == ["prfaas_pd"]
    assert attached.deployments["prfaas_pd"] == real.deployments["prfaas_pd"]
    assert attached.engine.sglang is not None
    assert attached.engine.sglang.attach["pd-p0"].url == "http://192.0.2.20:20000"
    assert attached.engine.sglang.attach["pd-p0"].bootstrap == "192.0.2.20:8998"
    refuse_remote(attached)
    check_sglang(attached)  # by the relay, whose link their KV is no part of
    assert unused_link(attached) is not None
    assert unused_link(real) is None
    refuse_remote(load_scenario(REAL, ["engine.kind=emulated"]))


def test_a_run_with_one_protocol_is_labelled_and_ucx_can_have_both(real: Scenario) -> None:
    assert "one protocol (tcp)" in (paths_note(real) or "")
    rdma = load_scenario(REAL, ["engine.transfer_protocol=rdma"])
    assert "no link shapes it" in (paths_note(rdma) or "")
    both = [
        "engine.transfer_protocol=rdma",
        "engine.transfer_backend=nixl",
        'engine.prfaas.env.UCX_TLS="tcp,self,cuda_copy"',
    ]
    ucx = load_scenario(REAL, both).engine.sglang
    assert ucx is not None
    assert paths(ucx) == "both_protocols"
    some = load_scenario(REAL, [*both[:2], 'engine.prfaas.env.UCX_TLS="rc,tcp"']).engine.sglang
    assert some is not None
    assert paths(some) == "one_protocol"


def test_copies_that_do_not_fit_the_link_are_said(real: Scenario) -> None:
    assert real.engine.sglang is not None
    assert sharding(real.engine.sglang.roles["decode"]) == Sharding(8, 2)
    assert not any("times its S_kv" in note for note in dry_run(real, 1)["notes"])
    settings = ["engine.dp=1", "link.rate=10gbit"]
    notes = dry_run(load_scenario(REAL, settings), 1)["notes"]
    told = next(one for one in notes if one.startswith("prfaas_pd: ranks at the decode side"))
    assert "gqa 2" in told
    assert "the link has 10.0" in told


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('hardware = "h200"\ngpus', 'hardware = "h2000"\ngpus', ["did you mean 'h200'"]),
        ('"192.0.2.11"', '"192.0.2.10"', ["h200-0", "has the address 192.0.2.10 already"]),
        ("gpus = 8\n", "gpu = 8\n", ["nodes.h200-0.gpu", "did you mean 'gpus'"]),
        ('python = "/opt', 'python = "opt', ["nodes.h200-0.python"]),
        ("[nodes.h200-0]", '[nodes."h 0"]', ["a node is named by"]),
    ],
)
def test_bad_nodes_are_refused_by_key(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    told = refusal(written(tmp_path, TEXT.replace(old, new, 1)))
    for word in words:
        assert word in told


def test_nodes_are_in_the_manifest_and_the_schema(real: Scenario) -> None:
    from harness.scenario import json_schema, to_manifest

    assert to_manifest(real)["nodes"]["h20-7"]["kv_address"] == "203.0.113.27"
    assert len(scenario_hash(real)) == 64
    node_table = json_schema()["$defs"]["NodeTable"]["properties"]
    assert "Management address" in node_table["address"]["description"]


def test_the_command_prints_one_document_and_writes_what_can_be_run(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "harness", "bench", str(REAL), "--dry-run", "--json"]
    words += ["--emit-attach", str(tmp_path / "attach.toml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["deployments"]) == set(load_scenario(REAL).deployments)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [
        "attach-homogeneous_pd.toml",
        "attach-naive_heterogeneous.toml",
        "attach-prfaas_pd.toml",
    ]
    for path in tmp_path.iterdir():
        load_scenario(path)


def test_the_byte_gate_expects_what_one_rank_counts(real: Scenario) -> None:
    """Two groups of four ranks: rank 0 of a group holds one of 4 KV heads, two of 8 in a window."""
    tokens = 1000
    assert counted_kv_bytes(real, tokens) == (9 * 4 * tokens + 39 * 8 * 128) * 640 // 4
    alone = load_scenario(REAL, ["engine.dp=8"])
    assert counted_kv_bytes(alone, tokens) == real.model.architecture.kv_bytes(tokens)
