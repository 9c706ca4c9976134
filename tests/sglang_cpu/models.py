"""Tiny models for a server without a GPU: config.json and a tokenizer, weights made up at load.

Their shapes are our own, small enough that a prompt of some thousand tokens takes a moment on one
core, and such that no two kinds of layer have the same bytes a token. ``--load-format dummy``
draws the weights from a fixed seed, so that every server of one model has the same ones.

| model | layers | growing B/token | window B/token | state B |
|---|---|---|---|---|
| dense | 4 x GQA, 2 heads of 16 | 512 | | |
| kimi-linear | 3 x KDA (4 heads of 32), 1 x MLA (32 + 16) | 96 | | 56,064 |
| mimo | 2 x GQA, 2 x sliding window of 128 | 384 | 768 | |
"""

import json
import sys
from pathlib import Path
from typing import Any

#: More than the ids that the load draws its prompts from (harness.load.prompts: below 100,000).
VOCABULARY = 100_352
CONTEXT_TOKENS = 8192
#: The first ids; the next 256 are the bytes.
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: A ``config.json`` each, by the name of the folder that it is written to.
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": False,
        "use_sliding_window": False,
    },
    "kimi-linear": _COMMON
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_key_value_heads": 4,
        "head_dim": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
    },
    "mimo": _COMMON
    | {
        "architectures": ["MiMoV2FlashForCausalLM"],
        # Transformers has no configuration of this family; any that keeps unknown keys will do.
        "model_type": "llama",
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "num_key_value_heads": 2,
        "head_dim": 32,
        "v_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 16,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "swa_rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "layernorm_epsilon": 1e-6,
        "add_swa_attention_sink_bias": False,
        "add_full_attention_sink_bias": False,
        "moe_layer_freq": [0, 1, 1, 1],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
    },
}


def write_model(name: str, folder: Path) -> Path:
    """Write ``folder/name`` as a model of that name; returns it."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[name], indent=1))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """One token a byte, by the library that serving engines read ``tokenizer.json`` with."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<extra_{index}>" for index in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(
        BPE({name: index for index, name in enumerate(names)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "unk_token": SPECIAL[3],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":  # python -m tests.sglang_cpu.models FOLDER
    for model in CONFIGS:
        print(write_model(model, Path(sys.argv[1])))
