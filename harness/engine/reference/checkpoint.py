"""A model's tensors from a folder of safetensors, as its authors publish them.

Our names hold one tensor for what a step multiplies at once; here published tensors are cut and
joined to that. Every tensor must be there and have the shape that the config tells.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from harness.core import EngineError
from harness.engine.reference.config import (
    DeltaConfig,
    FfnConfig,
    GqaConfig,
    LayerConfig,
    LightningConfig,
    MlaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from harness.engine.reference.model_keys import read_family
from harness.engine.reference.weights import parameters

Weights = dict[str, Tensor]

#: Norms are stored as what is added to one.
_FROM_ONE = {"Qwen3NextForCausalLM"}


def load_weights(
    config: ModelConfig,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Weights:
    """The tensors of ``weights.parameters``. EngineError names a file or tensor that is wrong."""
    family, _ = read_family(folder)
    source = _Source(_read(folder), folder, 1.0 if family in _FROM_ONE else 0.0)
    found = {"embedding": source.take("model.embed_tokens"), "norm": source.norm("model.norm")}
    if not config.tied:
        found["head"] = source.take("lm_head")
    for index, layer in enumerate(config.layers):
        for name, one in _layer(layer, source, f"model.layers.{index}").items():
            found[f"layers.{index}.{name}"] = one
    wanted = parameters(config)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, parameter in wanted.items():
        if found[name].shape != parameter.shape:
            raise EngineError(
                f"The weights in {folder} have {name!r} of shape {tuple(found[name].shape)}, where "
                f"config.json tells {parameter.shape}."
            )
    return {
        name: found[name].to(device=device, dtype=parameter.dtype(dtype)).contiguous()
        for name, parameter in wanted.items()
    }


def _read(folder: Path) -> Weights:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"The folder {folder} has no weights (*.safetensors).")
    tensors: Weights = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"The weights {file} cannot be read: {error}.") from error
    return tensors


class _Source:
    """Published tensors; ``.weight`` is left out of their names here."""

    def __init__(self, tensors: Weights, folder: Path, norm_offset: float) -> None:
        self._tensors, self._folder, self._norm_offset = tensors, folder, norm_offset

    def has(self, name: str) -> bool:
        return name in self._tensors or f"{name}.weight" in self._tensors

    def take(self, *names: str) -> Tensor:
        """The first of ``names`` that there is."""
        for name in names:
            for key in (f"{name}.weight", name):
                if key in self._tensors:
                    return self._tensors[key]
        raise EngineError(f"The weights in {self._folder} have no tensor {names[0]!r}.")

    def norm(self, name: str) -> Tensor:
        return self.take(name) + self._norm_offset


def _layer(layer: LayerConfig, source: _Source, at: str) -> Weights:
    found = {
        "attention_norm": source.norm(f"{at}.input_layernorm"),
        "ffn_norm": source.norm(f"{at}.post_attention_layernorm"),
    }
    for name, one in _attention(layer, source, at).items():
        found[f"attention.{name}"] = one
    for name, one in _ffn(layer.ffn, source, at).items():
        found[f"ffn.{name}"] = one
    return found


def _attention(layer: LayerConfig, source: _Source, at: str) -> Weights:
    match layer.attention:
        case GqaConfig():
            return _gqa(layer.attention, source, f"{at}.self_attn")
        case MlaConfig():
            return _mla(layer.attention, source, f"{at}.self_attn")
        case DeltaConfig(kind="gdn"):
            return _gdn(layer.attention, source, f"{at}.linear_attn")
        case DeltaConfig():
            return _kda(source, f"{at}.self_attn")
        case LightningConfig():
            raise EngineError("No published form of a Lightning layer is known to this loader.")


def _gqa(config: GqaConfig, source: _Source, at: str) -> Weights:
    found = {name: source.take(f"{at}.{name}_proj") for name in "qkvo"}
    if config.gated:  # queries and gate of each head lie together
        both = found["q"].unflatten(0, (config.heads, 2, config.key_dim))
        found["q"], found["gate"] = both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)
    if config.bias:
        found |= {f"{name}_bias": source.take(f"{at}.{name}_proj.bias") for name in "qkvo"}
    if config.qk_norm:
        found |= {f"{name}_norm": source.norm(f"{at}.{name}_norm") for name in ("q", "k")}
    if config.sinks:
        found["sinks"] = source.take(f"{at}.attention_sink_bias", f"{at}.sinks")
    return found


def _mla(config: MlaConfig, source: _Source, at: str) -> Weights:
    up = source.take(f"{at}.kv_b_proj").unflatten(0, (config.heads, -1))
    k_up, v_up = up.split((config.nope_dim, config.value_dim), dim=1)
    found = {
        "kv_down": source.take(f"{at}.kv_a_proj_with_mqa"),
        "kv_norm": source.take(f"{at}.kv_a_layernorm"),
        "k_up": k_up,
        "v_up": v_up,
        "o": source.take(f"{at}.o_proj"),
    }
    if config.query_rank is None:
        return found | {"q": source.take(f"{at}.q_proj")}
    return found | {
        "q_down": source.take(f"{at}.q_a_proj"),
        "q_norm": source.take(f"{at}.q_a_layernorm"),
        "q": source.take(f"{at}.q_b_proj"),
    }


def _gdn(config: DeltaConfig, source: _Source, at: str) -> Weights:
    """Published by key head: its query, key, values and gates; then its betas and decays."""
    shared = config.heads // config.key_heads
    parts = (config.key_dim, config.key_dim, shared * config.value_dim, shared * config.value_dim)
    joined = source.take(f"{at}.in_proj_qkvz").unflatten(0, (config.key_heads, -1))
    q, k, v, gate = (part.flatten(0, 1) for part in joined.split(parts, dim=1))
    small = source.take(f"{at}.in_proj_ba").unflatten(0, (config.key_heads, 2, shared))
    return {
        "qkv": torch.cat((q, k, v)),
        "conv": source.take(f"{at}.conv1d")[:, 0],
        "gate": gate,
        "beta": small[:, 0].flatten(0, 1),
        "decay": small[:, 1].flatten(0, 1),
        "a_log": source.take(f"{at}.A_log"),
        "dt_bias": source.take(f"{at}.dt_bias"),
        "norm": source.take(f"{at}.norm"),
        "o": source.take(f"{at}.out_proj"),
    }


def _kda(source: _Source, at: str) -> Weights:
    return {
        "qkv": torch.cat([source.take(f"{at}.{name}_proj") for name in "qkv"]),
        "conv": torch.cat([source.take(f"{at}.{name}_conv1d")[:, 0] for name in "qkv"]),
        "beta": source.take(f"{at}.b_proj"),
        "decay_down": source.take(f"{at}.f_a_proj"),
        "decay_up": source.take(f"{at}.f_b_proj"),
        "a_log": source.take(f"{at}.A_log").flatten(),
        "dt_bias": source.take(f"{at}.dt_bias"),
        "gate_down": source.take(f"{at}.g_a_proj"),
        "gate_up": source.take(f"{at}.g_b_proj"),
        "norm": source.take(f"{at}.o_norm"),
        "o": source.take(f"{at}.o_proj"),
    }


def _ffn(ffn: FfnConfig, source: _Source, at: str) -> Weights:
    # Kimi Linear's experts, and its dense networks too as transformers saves them.
    names = [f"{at}.block_sparse_moe.{one}" for one in ("gate", "gate_proj")]
    at = f"{at}.block_sparse_moe" if any(map(source.has, names)) else f"{at}.mlp"
    if isinstance(ffn, MlpConfig):
        return _mlp(source, at)
    found = _experts(ffn, source, at) | {"router": source.take(f"{at}.gate")}
    if ffn.correction:
        found["correction"] = source.take(f"{at}.gate.e_score_correction_bias")
    if ffn.shared_intermediate:
        name = "shared_expert" if ffn.shared_gate else "shared_experts"
        shared = _mlp(source, f"{at}.{name}")
        found |= {f"shared_{key}": one for key, one in shared.items()}
        if ffn.shared_gate:
            found["shared_weight"] = source.take(f"{at}.shared_expert_gate")
    return found


def _mlp(source: _Source, at: str) -> Weights:
    return {name: source.take(f"{at}.{name}_proj") for name in ("gate", "up", "down")}


def _experts(ffn: MoeConfig, source: _Source, at: str) -> Weights:
    """All experts in one tensor; of each, gate and up in one."""
    first, last = [], []
    for expert in range(ffn.experts):
        one = f"{at}.experts.{expert}"
        gate = source.take(f"{one}.gate_proj", f"{one}.w1")
        up = source.take(f"{one}.up_proj", f"{one}.w3")
        first.append(torch.cat((gate, up)))
        last.append(source.take(f"{one}.down_proj", f"{one}.w2"))
    return {"experts_in": torch.stack(first), "experts_out": torch.stack(last)}
