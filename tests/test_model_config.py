"""Hugging Face configs of every family against the shipped models, and ``prfaas model inspect``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.architecture import load_architecture
from harness.attention import Gqa, Layer, SlidingWindow
from harness.core import ScenarioError
from harness.model_config import read_architecture, read_model_config
from harness.model_families import FAMILIES

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "profiles" / "models"

Config = dict[str, Any]

DEEPSEEK: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def kimi(name: str, layers: int, heads: int, full: list[int], **more: Any) -> Config:
    kda = [number for number in range(1, layers + 1) if number not in full]
    return {
        "architectures": [name],
        "num_hidden_layers": layers,
        "head_dim": 72,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": kda,
            "head_dim": 128,
            "num_heads": heads,
            "short_conv_kernel_size": 4,
        },
        **more,
    }


def gated_delta(layers: int, value_heads: int) -> Config:
    return {
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "head_dim": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
    }


def ring(name: str, layers: int, heads: int, **more: Any) -> Config:
    return {
        "architectures": [name],
        "head_dim": 128,
        "layer_group_size": 8,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "group_norm_size": 4,
        **more,
    }


def dense(name: str, layers: int, heads: int, kv_heads: int, **more: Any) -> Config:
    return {
        "architectures": [name],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


PATTERN = [0, 1, 1, 1, 1, 0, *([1, 1, 1, 1, 1, 0] * 7)]
MIMO: Config = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "num_hidden_layers": 48,
    "hybrid_layer_pattern": PATTERN,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
}
QWEN35 = gated_delta(60, 64) | {
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
    "mamba_ssm_dtype": "float32",
}
GPT_OSS = dense(
    "GptOssForCausalLM",
    36,
    64,
    8,
    head_dim=64,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
)
QWEN2 = dense(
    "Qwen2ForCausalLM",
    80,
    64,
    8,
    hidden_size=8192,
    use_sliding_window=False,
    sliding_window=131_072,
    max_window_layers=70,
)
KIMI_LINEAR = kimi("KimiLinearForCausalLM", 27, 32, [4, 8, 12, 16, 20, 24, 27])

#: A config shaped like the published one, by the shipped model that it must equal.
CONFIGS: dict[str, Config] = {
    "deepseek-v3": DEEPSEEK,
    "kimi-k2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": DEEPSEEK | {"model_type": "kimi_k2"},
        "vision_config": {"num_hidden_layers": 27},
    },
    "kimi-linear-48b": KIMI_LINEAR,
    "kimi-k3": {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": kimi("KimiLinearForCausalLM", 93, 96, [*range(4, 93, 4), 93]),
    },
    "mimo-v2-flash": MIMO,
    "qwen3-next-80b": gated_delta(48, 32) | {"architectures": ["Qwen3NextForCausalLM"]},
    "qwen3.5-397b": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": QWEN35,
    },
    "ring-2.5-1t": ring("BailingMoeV2_5ForCausalLM", 80, 64, kv_lora_rank=512, qk_rope_head_dim=64),
    "ring-flash-linear-2.0": ring("BailingMoeLinearV2ForCausalLM", 32, 32, num_key_value_heads=4),
    "minimax-m2.5": dense("MiniMaxM2ForCausalLM", 62, 48, 8, head_dim=128),
    "qwen3-235b": dense("Qwen3MoeForCausalLM", 94, 64, 4, head_dim=128, sliding_window=None),
    "qwen2.5-72b": QWEN2,
    "gpt-oss-120b": GPT_OSS,
}


def written(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_shipped_model(tmp_path: Path, name: str) -> None:
    written(tmp_path, CONFIGS[name])
    for kv_dtype in ("bf16", "fp8"):
        shipped = load_architecture(MODELS / f"{name}.json", kv_dtype)
        found = read_model_config(tmp_path, kv_dtype)
        assert found.layers == shipped.layers
        assert found.attention == shipped.attention
        assert found.kv_dtype == kv_dtype
        assert found.name == tmp_path.name


def layers_of(folder: Path, config: Config) -> tuple[Layer, ...]:
    return read_model_config(written(folder, config)).layers


def test_minimax_text_01_by_its_list_and_by_layer_types(tmp_path: Path) -> None:
    flags = ([0] * 7 + [1]) * 10
    config = dense("MiniMaxText01ForCausalLM", 80, 64, 8, head_dim=128)
    layers = layers_of(tmp_path, config | {"attn_type_list": flags})
    assert [int(layer.growing_bytes_per_token > 0) for layer in layers] == flags
    assert layers[7] == Layer("gqa", growing_bytes_per_token=4096)
    assert layers[0] == Layer("lightning", fixed_bytes=64 * 128 * 128 * 4)
    names = (["linear_attention"] * 7 + ["full_attention"]) * 10
    assert layers_of(tmp_path, config | {"layer_types": names}) == layers


def test_a_window_counts_only_where_the_family_uses_it(tmp_path: Path) -> None:
    full, sliding = Gqa(8, 128, 128), SlidingWindow(8, 128, 128, 4096)
    shape: Config = {"head_dim": 128, "sliding_window": 4096}
    mistral = read_model_config(written(tmp_path, dense("MistralForCausalLM", 4, 32, 8, **shape)))
    assert mistral.layers == (sliding.layer("sliding_window", "bf16"),) * 4
    llama = read_model_config(written(tmp_path, dense("LlamaForCausalLM", 4, 32, 8, **shape)))
    assert llama.layers == (full.layer("gqa", "bf16"),) * 4
    no_window = dense("MistralForCausalLM", 4, 32, 8, head_dim=128, sliding_window=None)
    assert layers_of(tmp_path, no_window) == llama.layers
    qwen = dense("Qwen3ForCausalLM", 4, 32, 8, **shape, use_sliding_window=True)
    assert layers_of(tmp_path, qwen | {"max_window_layers": 3}) == (
        *llama.layers[:3],
        mistral.layers[0],
    )
    types = ["sliding_attention"] + ["full_attention"] * 3
    assert layers_of(tmp_path, qwen | {"layer_types": types}) == (
        mistral.layers[0],
        *llama.layers[:3],
    )


def test_heads_and_their_size_have_the_defaults_that_configs_rely_on(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "hidden_size": 4096,
    }
    assert layers_of(tmp_path, config) == (Layer("gqa", 32 * 2 * 128 * 2),) * 2


def test_layers_after_the_last_whole_group(tmp_path: Path) -> None:
    """Ring closes an incomplete group with full attention throughout, Qwen3-Next with none."""
    uneven = ring("BailingMoeLinearV2ForCausalLM", 19, 16, num_key_value_heads=4)
    kinds = [layer.kind for layer in layers_of(tmp_path, uneven)]
    assert kinds == (["lightning"] * 7 + ["gqa"]) * 2 + ["gqa"] * 3
    uneven = gated_delta(6, 32) | {"architectures": ["Qwen3NextForCausalLM"]}
    kinds = [layer.kind for layer in layers_of(tmp_path, uneven)]
    assert kinds == ["gdn", "gdn", "gdn", "gqa", "gdn", "gdn"]


def without(config: Config, key: str) -> Config:
    return {name: value for name, value in config.items() if name != key}


def changed(**linear: Any) -> Config:
    inner = KIMI_LINEAR["linear_attn_config"] | linear
    return KIMI_LINEAR | {"linear_attn_config": inner}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", ["not JSON", "line 1"]),
        ({}, ["'architectures'", "missing"]),
        ({"architectures": []}, ["'architectures'"]),
        ({"architectures": "LlamaForCausalLM"}, ["'architectures'", "list"]),
        (
            {"architectures": ["DeepseekV32ForCausalLM"]},
            ["DeepseekV32ForCausalLM", "not known", "DeepseekV3ForCausalLM", *FAMILIES],
        ),
        (without(DEEPSEEK, "kv_lora_rank"), ["'kv_lora_rank'", "missing"]),
        (DEEPSEEK | {"kv_lora_rank": 0}, ["'kv_lora_rank'", "got 0"]),
        (DEEPSEEK | {"kv_lora_rank": "512"}, ["'kv_lora_rank'", "got '512'"]),
        (DEEPSEEK | {"num_hidden_layers": 10**6}, ["'num_hidden_layers'", "got 1000000"]),
        (
            {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {}},
            ["'num_hidden_layers'", "'text_config' of"],
        ),
        (without(KIMI_LINEAR, "linear_attn_config"), ["'linear_attn_config'", "missing"]),
        (changed(num_heads=None), ["'linear_attn_config.num_heads'", "got None"]),
        (changed(full_attn_layers=[4, 8]), ["full_attn_layers", "1 to 27"]),
        (changed(kda_layers=list(range(27))), ["kda_layers", "once"]),
        (MIMO | {"hybrid_layer_pattern": PATTERN[1:]}, ["hybrid_layer_pattern", "47", "48"]),
        (MIMO | {"hybrid_layer_pattern": [2] * 48}, ["hybrid_layer_pattern[0]", "got 2"]),
        (without(MIMO, "swa_v_head_dim"), ["'swa_v_head_dim'", "missing"]),
        (GPT_OSS | {"layer_types": ["full"] * 36}, ["'layer_types[0]'", "'full'", "sliding"]),
        (without(GPT_OSS, "sliding_window"), ["'sliding_window'", "missing"]),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], **without(QWEN35, "linear_key_head_dim")},
            ["'linear_key_head_dim'", "missing"],
        ),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], **QWEN35, "mamba_ssm_dtype": "bfloat16"},
            ["'mamba_ssm_dtype'", "float32", "bfloat16"],
        ),
        (
            without(CONFIGS["qwen3-next-80b"], "full_attention_interval"),
            ["'layer_types'", "'full_attention_interval'"],
        ),
        (without(QWEN2, "hidden_size"), ["'head_dim'", "'hidden_size'"]),
        (QWEN2 | {"hidden_size": 8191}, ["'hidden_size'", "no multiple"]),
        (QWEN2 | {"num_key_value_heads": 7}, ["no multiple of 'num_key_value_heads'"]),
        (
            without(QWEN2, "max_window_layers") | {"use_sliding_window": True},
            ["'use_sliding_window'", "'max_window_layers'"],
        ),
        (dense("MiniMaxM1ForCausalLM", 8, 64, 8, head_dim=128), ["'attn_type_list'"]),
        (ring("BailingMoeV2_5ForCausalLM", 80, 64), ["'kv_lora_rank'", "missing"]),
    ],
)
def test_a_wrong_config_is_told_by_name(tmp_path: Path, config: object, words: list[str]) -> None:
    path = written(tmp_path, config)
    with pytest.raises(ScenarioError) as caught:
        read_model_config(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_too_large_a_config_and_a_file_of_neither_form_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (16 * 2**20 + 1))
    with pytest.raises(ScenarioError, match="at most 16777216"):
        read_architecture(path)
    with pytest.raises(ScenarioError, match=r"neither an architecture file .* nor a Hugging Face"):
        read_architecture(written(tmp_path, {"model_type": "llama"}))
    path.unlink()
    with pytest.raises(ScenarioError, match=r"config\.json does not exist"):
        read_architecture(tmp_path)
    with pytest.raises(ScenarioError, match="does not exist"):
        read_architecture(tmp_path / "nowhere")


def prfaas(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", "model", "inspect", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        timeout=120,
        check=False,
    )


def test_inspect_prints_both_dtypes_of_a_folder(tmp_path: Path) -> None:
    written(tmp_path, CONFIGS["ring-2.5-1t"])
    result = prfaas(str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["lightning", "70", "state", "4,194,304", "4,194,304"] in rows
    assert ["mla", "10", "a", "token", "1,152", "576"] in rows
    assert ["bf16", "291.2", "370.0", "640.0", "1,720.0", "11,800.0"] in rows
    assert ["fp8", "285.6", "325.0", "460.0", "1,000.0", "6,040.0"] in rows


def test_inspect_writes_a_file_that_the_scenario_reader_takes(tmp_path: Path) -> None:
    written(tmp_path, CONFIGS["kimi-linear-48b"])
    output = tmp_path / "mine.json"
    result = prfaas(str(tmp_path), "--json", "--output", str(output))
    document = json.loads(result.stdout)
    assert document["num_layers"] == 27
    assert document["layer_kinds"]["kda"]["count"] == 20
    assert document["layer_kinds"]["mla"]["bytes"]["fp8"]["growing_bytes_per_token"] == 576
    assert document["kv_bytes"]["bf16"]["32768"] == 307_658_752
    assert document["kv_bytes"]["fp8"]["32768"] == 175_538_176
    model = load_architecture(output)
    assert model.name == "mine"
    assert model.layers == load_architecture(MODELS / "kimi-linear-48b.json").layers
    before = output.read_bytes()
    again = prfaas(str(MODELS / "deepseek-v3.json"), "--output", str(output))
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert output.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "mine.json"]


def test_inspect_shows_bytes_given_directly_for_bf16_only(tmp_path: Path) -> None:
    kind = {"growing_bytes_per_token": 10, "fixed_bytes": 3, "source": "test"}
    document = {
        "schema_version": 1,
        "name": "raw",
        "layer_kinds": {"full": kind},
        "layers": ["full", "full"],
    }
    path = tmp_path / "raw.json"
    path.write_text(json.dumps(document))
    shown = json.loads(prfaas(str(path), "--json").stdout)
    assert shown["kv_bytes"] == {
        "bf16": {str(length): 20 * length + 6 for length in (1024, 8192, 32768, 131072, 1048576)}
    }
    refused = prfaas(str(path), "--kv-dtype", "fp8")
    assert refused.returncode == 2
    assert "fp8" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_inspect_names_an_unknown_family(tmp_path: Path) -> None:
    written(tmp_path, {"architectures": ["Gemma3ForCausalLM"]})
    result = prfaas(str(tmp_path), "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Gemma3ForCausalLM" in result.stderr
    assert len(result.stderr.splitlines()) == 1
