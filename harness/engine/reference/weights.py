"""A model's tensors: what there are, and random ones that are the same on every machine.

Each tensor has its own stream, of the seed and its name. Numbers are integers of the stream scaled
by products that round alike everywhere, so that two ends that never met hold the same model, bit
for bit. Matrices are uniform with variance 1 / fan-in: what goes through keeps its scale.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from harness.engine.reference.config import (
    AttentionConfig,
    DeltaConfig,
    FfnConfig,
    GqaConfig,
    MlaConfig,
    MlpConfig,
    ModelConfig,
)

Role = Literal["matrix", "embedding", "bias", "one", "zero", "sink", "decay", "step"]
Shape = tuple[int, ...]
#: Few and sensitive: kept in float32 whatever the model computes in.
_PRECISE = ("one", "zero", "sink", "decay", "step")


@dataclass(frozen=True, slots=True)
class Parameter:
    """The last dimension of a ``matrix`` is what it sums over."""

    shape: Shape
    role: Role = "matrix"
    precise: bool = False

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        return torch.float32 if self.precise or self.role in _PRECISE else compute


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """All tensors of a model by name; those of a layer are ``layers.N.attention.*`` and
    ``layers.N.ffn.*``, and two norms."""
    hidden = config.hidden_size
    found = {"embedding": Parameter((config.vocab_size, hidden), "embedding")}
    for index, layer in enumerate(config.layers):
        name = f"layers.{index}"
        found[f"{name}.attention_norm"] = Parameter((hidden,), "one")
        found[f"{name}.ffn_norm"] = Parameter((hidden,), "one")
        for key, one in attention_parameters(layer.attention, hidden).items():
            found[f"{name}.attention.{key}"] = one
        for key, one in ffn_parameters(layer.ffn, hidden).items():
            found[f"{name}.ffn.{key}"] = one
    found["norm"] = Parameter((hidden,), "one")
    if not config.tied:
        found["head"] = Parameter((config.vocab_size, hidden))
    return found


def attention_parameters(attention: AttentionConfig, hidden: int) -> dict[str, Parameter]:
    """Of one layer's attention."""
    if isinstance(attention, GqaConfig):
        return _gqa_parameters(attention, hidden)
    if isinstance(attention, MlaConfig):
        return _mla_parameters(attention, hidden)
    if isinstance(attention, DeltaConfig):
        return _delta_parameters(attention, hidden)
    out = attention.heads * attention.value_dim
    keys = attention.heads * attention.key_dim
    return {
        "qkv": Parameter((2 * keys + out, hidden)),
        "gate": Parameter((out, hidden)),
        "norm": Parameter((out,), "one"),
        "o": Parameter((hidden, out)),
    }


def _gqa_parameters(attention: GqaConfig, hidden: int) -> dict[str, Parameter]:
    heads, kv_heads = attention.heads, attention.kv_heads
    key, value = attention.key_dim, attention.value_dim
    found = {
        "q": Parameter((heads * key, hidden)),
        "k": Parameter((kv_heads * key, hidden)),
        "v": Parameter((kv_heads * value, hidden)),
        "o": Parameter((hidden, heads * value)),
    }
    if attention.bias:
        widths = {name: one.shape[0] for name, one in found.items()}
        found |= {f"{name}_bias": Parameter((width,), "bias") for name, width in widths.items()}
    if attention.qk_norm:
        found |= {"q_norm": Parameter((key,), "one"), "k_norm": Parameter((key,), "one")}
    if attention.gated:
        found["gate"] = Parameter((heads * value, hidden))
    if attention.sinks:
        found["sinks"] = Parameter((heads,), "sink")
    return found


def _mla_parameters(attention: MlaConfig, hidden: int) -> dict[str, Parameter]:
    heads, latent = attention.heads, attention.latent_rank
    queries = heads * (attention.nope_dim + attention.rope_dim)
    found = {
        "q": Parameter((queries, attention.query_rank or hidden)),
        "kv_down": Parameter((latent + attention.rope_dim, hidden)),
        "kv_norm": Parameter((latent,), "one"),
        "k_up": Parameter((heads, attention.nope_dim, latent)),
        "v_up": Parameter((heads, attention.value_dim, latent)),
        "o": Parameter((hidden, heads * attention.value_dim)),
    }
    if attention.query_rank is not None:
        found["q_down"] = Parameter((attention.query_rank, hidden))
        found["q_norm"] = Parameter((attention.query_rank,), "one")
    return found


def _delta_parameters(attention: DeltaConfig, hidden: int) -> dict[str, Parameter]:
    heads, key, value = attention.heads, attention.key_dim, attention.value_dim
    found = {
        "qkv": Parameter((attention.conv_channels, hidden)),
        "conv": Parameter((attention.conv_channels, attention.conv_kernel)),
        "beta": Parameter((heads, hidden)),
        "a_log": Parameter((heads,), "decay"),
        "norm": Parameter((value,), "one"),
        "o": Parameter((hidden, heads * value)),
    }
    if attention.kind == "gdn":
        return found | {
            "decay": Parameter((heads, hidden)),
            "dt_bias": Parameter((heads,), "step"),
            "gate": Parameter((heads * value, hidden)),
        }
    return found | {
        "decay_down": Parameter((key, hidden)),
        "decay_up": Parameter((heads * key, key)),
        "dt_bias": Parameter((heads * key,), "step"),
        "gate_down": Parameter((value, hidden)),
        "gate_up": Parameter((heads * value, value)),
    }


def ffn_parameters(ffn: FfnConfig, hidden: int) -> dict[str, Parameter]:
    """Of one layer's feed-forward network."""
    if isinstance(ffn, MlpConfig):
        return _mlp_parameters(ffn.intermediate, hidden)
    found = {
        "router": Parameter((ffn.experts, hidden), precise=True),
        "experts_in": Parameter((ffn.local_experts, 2 * ffn.intermediate, hidden)),
        "experts_out": Parameter((ffn.local_experts, hidden, ffn.intermediate)),
    }
    if ffn.correction:
        found["correction"] = Parameter((ffn.experts,), "zero")
    if ffn.shared_intermediate:
        found |= _mlp_parameters(ffn.shared_intermediate, hidden, "shared_")
        if ffn.shared_gate:
            found["shared_weight"] = Parameter((1, hidden))
    return found


def _mlp_parameters(intermediate: int, hidden: int, prefix: str = "") -> dict[str, Parameter]:
    return {
        f"{prefix}gate": Parameter((intermediate, hidden)),
        f"{prefix}up": Parameter((intermediate, hidden)),
        f"{prefix}down": Parameter((hidden, intermediate)),
    }


def random_weights(
    config: ModelConfig,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Every tensor of ``parameters``, drawn on the CPU."""
    return {
        name: _draw(one, name, seed).to(device=device, dtype=one.dtype(dtype))
        for name, one in parameters(config).items()
    }


def _draw(parameter: Parameter, name: str, seed: int) -> Tensor:
    if parameter.role in ("one", "zero", "bias"):
        return torch.full(parameter.shape, 1.0 if parameter.role == "one" else 0.0)
    key = np.array([seed, xxhash.xxh64_intdigest(name.encode())], dtype=np.uint64)
    stream = np.random.Generator(np.random.Philox(key=key))
    spread = stream.random(math.prod(parameter.shape), dtype=np.float32) - np.float32(0.5)
    drawn = torch.from_numpy(spread).view(parameter.shape)  # uniform in [-1/2, 1/2)
    match parameter.role:
        case "decay":  # exp(a_log) about 1: a state forgets over some tens of tokens
            return drawn
        case "step":  # softplus of it about 0.01 to 0.1
            return drawn * 2.0 - 3.5
        case "matrix":
            return drawn * math.sqrt(12 / parameter.shape[-1])
        case _:
            return drawn * math.sqrt(12)
