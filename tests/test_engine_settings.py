"""The scenario's [engine]: what it resolves to, and what is refused with which words."""

import json
from pathlib import Path

import pytest
from scenario_files import PAPER, TEXT, refusal, written

from harness.architecture import load_architecture
from harness.core import ScenarioError
from harness.engine_resolution import check_model
from harness.engine_settings import Attached, Engine, SglangRole
from harness.scenario import load_scenario, scenario_hash, to_manifest

TABLE = """
[engine]
kind = "sglang"
model_path = "model"
python = "env/bin/python"
version = "0.5.23"
requires = ["pd", "hybrid_state", "kv_metrics"]
tp = 8
transfer_protocol = "rdma"
ib_device = "mlx5_0"
page_size = 64
chunked_prefill_tokens = 8192
ready_timeout = "15min"
extra_flags = ["--trust-remote-code"]
env = { NCCL_DEBUG = "WARN", A = "1" }

[engine.decode]
dp = 2
extra_flags = ["--enable-dp-attention"]
env = { A = "2" }

[engine.prfaas]
tp = 4
base_gpu = 4

[engine.attach.pd-p0]
url = "http://node7:30000/"
bootstrap = "node7:8998"
"""


def test_a_table_of_a_role_is_laid_over_that_of_the_engine(tmp_path: Path) -> None:
    engine = load_scenario(written(tmp_path, TEXT + TABLE)).engine
    assert engine.kind == "sglang"
    sglang = engine.sglang
    assert sglang is not None
    assert sglang.model_path == tmp_path / "model"
    assert sglang.python == str(tmp_path / "env/bin/python")
    assert (sglang.page_size, sglang.ready_timeout_s, sglang.load_format) == (64, 900.0, "auto")
    assert sglang.requires == ("pd", "hybrid_state", "kv_metrics")
    flags, env = ("--trust-remote-code",), {"NCCL_DEBUG": "WARN", "A": "1"}
    assert sglang.roles == {
        "prfaas": SglangRole(4, 1, 1, 4, "mlx5_0", flags, env),
        "prefill": SglangRole(8, 1, 1, None, "mlx5_0", flags, env),
        "decode": SglangRole(
            8, 2, 1, None, "mlx5_0", (*flags, "--enable-dp-attention"), env | {"A": "2"}
        ),
    }
    assert sglang.attach == {"pd-p0": Attached("http://node7:30000", "node7:8998")}


def test_the_engine_is_emulated_unless_another_is_asked_for(tmp_path: Path) -> None:
    assert load_scenario(PAPER).engine == Engine("emulated", None)
    rehearsed = written(tmp_path, TEXT + TABLE.replace('"sglang"', '"emulated"'))
    assert load_scenario(rehearsed).engine == Engine("emulated", None)
    forgotten = written(tmp_path, TEXT + TABLE.replace('kind = "sglang"', ""))
    told = refusal(forgotten)
    assert "'engine.model_path'" in told
    assert 'engine.kind = "sglang"' in told


def test_a_manifest_has_the_engine_and_a_hash_not_where_its_files_lie(tmp_path: Path) -> None:
    here = load_scenario(written(tmp_path, TEXT + TABLE))
    assert to_manifest(here)["engine"]["sglang"]["roles"]["decode"]["dp"] == 2
    json.dumps(to_manifest(here))
    text = TEXT + TABLE
    elsewhere = text.replace("env/bin", "/opt/bin").replace('"model"', '"/models/m"')
    (tmp_path / "there").mkdir()
    moved = load_scenario(written(tmp_path / "there", elsewhere))
    assert scenario_hash(here) == scenario_hash(moved)
    changed = text.replace("page_size = 64", "page_size = 1")
    assert scenario_hash(here) != scenario_hash(load_scenario(written(tmp_path, changed)))


GIVEN = 'engine={kind="sglang", model_path="m"}'
#: Flags over the case study and what the refusal must say.
WRONG = {
    "engine.kind=vllm": ["'engine.kind'", "'reference' or 'sglang'"],
    "engine.modelpath=m": ["'engine.modelpath'", "did you mean 'model_path'"],
    "engine.tp=0": ["'engine.tp'", "got 0"],
    "engine.page_size=4096": ["'engine.page_size'"],
    "engine.mem_fraction=1": ["'engine.mem_fraction'"],
    "engine.ready_timeout=5": ["'engine.ready_timeout'", "units: ns, us, ms, s"],
    'engine.requires=["speed"]': ["'engine.requires[0]'", "'hybrid_state'"],
    "engine.version=newest": ["'engine.version'"],
    "engine.transfer_backend=rsync": ["'engine.transfer_backend'", "'mooncake' or 'nixl'"],
    "engine.prefil.tp=2": ["'engine.prefil'", "did you mean 'prefill'"],
    "engine.decode.model_path=m": ["'engine.decode.model_path'", "Valid keys of [engine.decode]"],
    "engine.transfer_protocol=rdma engine.device=cpu": ["'engine.transfer_protocol'", "GPU"],
    "engine.prefill.ib_device=mlx5_0": ["'engine.prefill.ib_device'", "RDMA"],
    "engine.device=cpu engine.decode.base_gpu=1": ["'engine.decode.base_gpu'", "no GPU"],
    'engine.extra_flags=["--port=1"]': ["'engine.extra_flags'", "testbed chooses"],
    'engine.prfaas.extra_flags=["--tp"]': ["'engine.prfaas.extra_flags'", "set engine.tp"],
    "engine.env.HF_TOKEN=x": ["'engine.env.HF_TOKEN'", "would be recorded"],
    'engine.env.A="\\u0000"': ["'engine.env"],
    'engine.requires=["sliding_window"]': ["'engine.requires'", "no layer", "sliding window"],
    'engine.version=0.5.9 engine.requires=["kv_metrics"]': ["'engine.version'", "0.5.9 has no"],
    "engine.attach.pd-p9.url=http://h:1": ["'engine.attach.pd-p9'", "did you mean 'pd-p8'"],
    "engine.attach.pd-p0.url=http://h:1": ["'engine.attach.pd-p0.bootstrap'", "missing"],
    "engine.attach.pd-d0.url=https://h:1": ["'engine.attach.pd-d0.url'"],
    "engine.attach.pd-d0.url=http://h:1 engine.attach.pd-d0.bootstrap=h:2": [
        "'engine.attach.pd-d0.bootstrap'",
        "decode server has no bootstrap",
    ],
}  # fmt: skip


@pytest.mark.parametrize("flags", WRONG)
def test_what_is_wrong_is_named(flags: str) -> None:
    given = flags.split(" ") if " engine." in flags else [flags]
    told = refusal(PAPER, GIVEN, *given)
    for words in WRONG[flags]:
        assert words in told, told


def test_a_server_to_launch_needs_a_model_and_attached_ones_do_not() -> None:
    told = refusal(PAPER, "engine.kind=sglang")
    assert "'engine.model_path' is missing" in told
    assert "prfaas-p0 has to be launched" in told
    scenario = load_scenario(PAPER)
    names = {i.name: i.role for d in scenario.deployments.values() for i in d.instances()}
    attach = [f"engine.attach.{name}.url=http://h:1" for name in names]
    attach += [
        f"engine.attach.{name}.bootstrap=h:2" for name, role in names.items() if role == "prefill"
    ]
    engine = load_scenario(PAPER, ["engine.kind=sglang", *attach]).engine
    assert engine.sglang is not None
    assert set(engine.sglang.attach) == set(names)
    assert "no server is launched" in check_model(engine, scenario.model.architecture, "it")


def test_a_model_of_other_kv_than_the_scenario_is_refused(tmp_path: Path) -> None:
    def checked(config: dict[str, object]) -> str:
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / "config.json").write_text(json.dumps(config))
        engine = load_scenario(PAPER, ["engine.kind=sglang", f"engine.model_path={tmp_path}/m"])
        return check_model(engine.engine, dense, "the scenario")

    dense = load_architecture(PAPER.parents[1] / "profiles/models/qwen2.5-72b.json")
    qwen: dict[str, object] = {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 8192,
    }
    assert "gives the KV bytes of the architecture qwen2.5-72b" in checked(qwen)
    with pytest.raises(ScenarioError, match=r"'engine.model_path'.*bytes of KV at 1 tokens"):
        checked(qwen | {"num_key_value_heads": 4})
    with pytest.raises(ScenarioError, match="num_hidden_layers"):
        checked({"architectures": ["Qwen2ForCausalLM"]})
    assert "was not compared" in checked(qwen | {"architectures": ["NobodyKnowsForCausalLM"]})
    (tmp_path / "m" / "config.json").unlink()
    engine = load_scenario(PAPER, ["engine.kind=sglang", f"engine.model_path={tmp_path}/m"])
    with pytest.raises(ScenarioError, match="holds no config"):
        check_model(engine.engine, dense, "the scenario")
