"""Layers with a state: the gated delta rule (KDA, gated DeltaNet) and Lightning attention.

Projections, convolution, decay and gate around ``linear_attention``. The inputs of the convolution
are rounded to the dtype in which the cache keeps them, so that a prompt may be cut anywhere.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from harness.engine.reference.cache import LayerCache
from harness.engine.reference.config import DeltaConfig, LightningConfig
from harness.engine.reference.linear_attention import (
    causal_convolution,
    decay_attention,
    delta_rule,
)
from harness.engine.reference.rows import Rows, rms_norm

Weights = dict[str, Tensor]

_UNIT_EPS = 1e-6


def delta_layer(
    x: Tensor, config: DeltaConfig, weights: Weights, cache: LayerCache, rows: Rows, eps: float
) -> Tensor:
    """``x`` [batch, tokens, hidden] to the same; state and convolution inputs move on."""
    state, past = cache.states
    inputs = linear(x, weights["qkv"]).to(past.dtype).to(x.dtype)
    mixed, past_after = causal_convolution(inputs, rows.pick(past).to(x.dtype), weights["conv"])
    past[rows.slot_index] = past_after.to(past.dtype)
    keys = config.key_heads * config.key_dim
    q, k, v = mixed.float().split((keys, keys, config.heads * config.value_dim), dim=-1)
    q, k = (_unit(part.unflatten(-1, (config.key_heads, -1))) for part in (q, k))
    q = q * config.key_dim**-0.5
    shared = config.heads // config.key_heads
    q, k = (part.repeat_interleave(shared, dim=2) for part in (q, k))
    v = v.unflatten(-1, (config.heads, -1))
    beta = torch.sigmoid(linear(x, weights["beta"]).float())
    decay = _decay(x, config, weights)
    out, state_after = delta_rule(q, k, v, decay, beta, rows.pick(state))
    state[rows.slot_index] = state_after
    return linear(_gated(out, x, config, weights, eps), weights["o"])


def _decay(x: Tensor, config: DeltaConfig, weights: Weights) -> Tensor:
    """The logarithm of what a state keeps."""  # [batch, tokens, heads] or [..., key]
    rate = -weights["a_log"].float().exp()
    if config.kind == "gdn":
        return rate * softplus(linear(x, weights["decay"]).float() + weights["dt_bias"].float())
    step = linear(linear(x, weights["decay_down"]), weights["decay_up"]).float()
    step = softplus(step + weights["dt_bias"].float())
    decay: Tensor = rate[:, None] * step.unflatten(-1, (config.heads, -1))
    return decay


def _gated(out: Tensor, x: Tensor, config: DeltaConfig, weights: Weights, eps: float) -> Tensor:
    """Norm of each head, times the gate."""  # [batch, tokens, heads * value]
    if config.kind == "gdn":
        gate = silu(linear(x, weights["gate"]).float())
    else:
        gate = torch.sigmoid(linear(linear(x, weights["gate_down"]), weights["gate_up"]).float())
    return (rms_norm(out, weights["norm"], eps).flatten(2) * gate).to(x.dtype)


def lightning_layer(
    x: Tensor, config: LightningConfig, weights: Weights, cache: LayerCache, rows: Rows, eps: float
) -> Tensor:
    """As ``delta_layer``; the form is MiniMax-Text-01's."""
    (state,) = cache.states
    heads, key, value = config.heads, config.key_dim, config.value_dim
    mixed = silu(linear(x, weights["qkv"])).float()
    q, k, v = mixed.split((heads * key, heads * key, heads * value), dim=-1)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in (q, k, v))
    slopes = torch.tensor(config.slopes, dtype=torch.float64, device=x.device)
    out, state_after = decay_attention(q, k, v, slopes, rows.pick(state))
    state[rows.slot_index] = state_after
    out = rms_norm(out.flatten(2).to(x.dtype), weights["norm"], eps)
    return linear(out * torch.sigmoid(linear(x, weights["gate"])), weights["o"])


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _UNIT_EPS)
