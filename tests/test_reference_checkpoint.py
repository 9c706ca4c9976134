"""The reference engine against Hugging Face transformers on the same tiny weights.

transformers draws a model, saves it as its authors publish such models, and both compute from that:
logits of every token of a prompt, then of decode steps on each one's own cache, in float32. That
cache is float32 here too, as theirs is.
"""

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.core import ScenarioError
from harness.engine.reference.config import (
    LayerConfig,
    LightningConfig,
    MlpConfig,
    ModelConfig,
    lightning_slopes,
)
from harness.engine.reference.model_keys import read_model
from harness.model_config import read_model_config

if find_spec("torch") is not None and find_spec("transformers") is not None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import (
        MiniMaxCache,
        MiniMaxLightningAttention,
    )

    from harness.engine.reference.cache import Cache
    from harness.engine.reference.checkpoint import load_weights
    from harness.engine.reference.linear_layers import lightning_layer
    from harness.engine.reference.model import Model
    from harness.engine.reference.rows import Rows

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Larger than usual, so that attention is sharp and an error in it is seen.
    "initializer_range": 0.15,
}
EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    | {"num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    | {"num_key_value_heads": 2, "head_dim": 24, "use_sliding_window": False},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    | {"num_key_value_heads": 1, "head_dim": 16, "num_experts": 8, "mlp_only_layers": [1]}
    | {"decoder_sparse_step": 1} | EXPERTS,
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20},
    "mimo": {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash"}
    | {"num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8}
    | {"hybrid_layer_pattern": [0, 1, 1, 1], "swa_num_key_value_heads": 4, "swa_head_dim": 24}
    | {"layer_types": ["full_attention"] + ["sliding_attention"] * 3, "swa_v_head_dim": 16}
    | {"moe_layer_freq": [0, 1, 1, 1], "sliding_window": 20, "attention_value_scale": 0.707}
    | {"add_swa_attention_sink_bias": True, "scoring_func": "sigmoid", "n_group": 1}
    | {"topk_group": 1}
    | {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.334
            },
            "sliding_attention": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334
            },
        }
    } | EXPERTS,
    "qwen3-next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    | {"num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.5, "num_experts": 8}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    | {"linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
    | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": []}
    | EXPERTS,
    "deepseek-v2": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    | LATENT | EXPERTS
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4}
    | {"topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    | LATENT | EXPERTS
    | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "kimi-linear": {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    | {"num_key_value_heads": 4, "head_dim": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
    | {"qk_rope_head_dim": 8, "v_head_dim": 24, "mla_use_nope": True, "q_lora_rank": None}
    | {
        "linear_attn_config": {
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 16,
            "short_conv_kernel_size": 4,
        }
    }
    | {"num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1}
    | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_expert_group": 1}
    | {"topk_group": 1, "moe_router_activation_func": "sigmoid", "moe_renormalize": True}
    | {"routed_scaling_factor": 2.446},
}  # fmt: skip


def write_config(name: str, folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | CONFIGS[name] | changes))
    return folder


@pytest.mark.torch
@pytest.mark.transformers
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_config(name, tmp_path / name)
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for key, one in theirs.named_parameters():
            # A weight of one, or a bias of zero, would hide that it is not applied.
            if "norm" in key or key.endswith("bias"):
                one.add_(0.3 * torch.randn(one.shape))
        for key, one in theirs.named_buffers():
            if key.endswith("e_score_correction_bias"):
                one.add_(0.2 * torch.randn(one.shape))
    theirs.save_pretrained(tmp_path / "saved")
    for file in (tmp_path / "saved").glob("*.safetensors"):
        file.rename(folder / file.name)
    ours = Model(read_model(folder), load_weights(read_model(folder), folder))
    draw = random.Random(3)
    prompt = [draw.randrange(128) for _ in range(90)]
    steps = [draw.randrange(128) for _ in range(5)]
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt]), use_cache=True)
        cache = Cache(ours.config, 1, 100, dtype="fp32")
        found = ours.logits(ours.forward([prompt], cache, [0]))
        scale = float(expected.logits.std())
        assert float((found - expected.logits).abs().max()) < 2e-4 * scale
        kept = expected.past_key_values
        for step in steps:
            expected = theirs(torch.tensor([[step]]), past_key_values=kept, use_cache=True)
            found = ours.decode([step], cache, [0])
            assert float((found - expected.logits[0]).abs().max()) < 2e-4 * scale


@pytest.mark.torch
@pytest.mark.transformers
@pytest.mark.parametrize("layer", [0, 3])
def test_a_lightning_layer_is_that_of_transformers(layer: int) -> None:
    """The layer alone: the model around it (MiniMax-Text-01) has other residuals than ours."""
    torch.manual_seed(2)
    config = MiniMaxConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, num_hidden_layers=4, block_size=32
    )
    theirs = MiniMaxLightningAttention(config, layer_idx=layer)
    ours = LightningConfig(16, 16, lightning_slopes(4, layer, 4))
    # Theirs has query, key and value of each head together.
    joined = theirs.qkv_proj.weight.unflatten(0, (4, 3, 16))
    weights = {
        "qkv": joined.transpose(0, 1).flatten(0, 2),
        "gate": theirs.output_gate.weight,
        "norm": theirs.norm.weight,
        "o": theirs.out_proj.weight,
    }
    model = ModelConfig("one", 64, 2, (LayerConfig(ours, MlpConfig(1)),))
    cache = Cache(model, 1, 100)
    x = torch.randn(1, 90, 64)
    kept = MiniMaxCache()
    with torch.no_grad():
        for start, end in ((0, 89), (89, 90)):
            part = x[:, start:end]
            rows = Rows([0], [start], end - start, cache.device)
            expected, _ = theirs(part, None, None, past_key_values=kept)
            found = lightning_layer(part, ours, weights, cache.layers[0], rows, 1e-6)
            assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_has_the_geometry_of_its_config(name: str, tmp_path: Path) -> None:
    folder = write_config(name, tmp_path / name)
    assert read_model(folder).geometry("bf16") == read_model_config(folder).layers


def test_scaled_positions_and_unknown_families_are_refused(tmp_path: Path) -> None:
    scaled = write_config("llama", tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ScenarioError, match="yarn"):
        read_model(scaled)
    biased = write_config("deepseek-v3", tmp_path, attention_bias=True)
    with pytest.raises(ScenarioError, match="attention_bias"):
        read_model(biased)
    unknown = write_config("llama", tmp_path, architectures=["GptOssForCausalLM"])
    with pytest.raises(ScenarioError, match="GptOssForCausalLM"):
        read_model(unknown)
