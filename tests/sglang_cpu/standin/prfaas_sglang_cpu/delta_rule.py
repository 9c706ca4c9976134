"""Kimi Delta Attention in plain PyTorch, token by token: the truth its kernels compute in chunks.

    S_t = S_{t-1} diag(exp(g_t)) + beta_t (v_t - S_{t-1} diag(exp(g_t)) k_t) k_t^T
    o_t = S_t q_t / sqrt(K)                                  with q, k of unit length

with a decay g of each key channel: g = -exp(A) softplus(x + bias), or bound * sigmoid(exp(A) (x +
bias)) where it is bounded from below; beta = sigmoid of its raw value. Source: arXiv 2510.26692,
and the signatures of SGLang 0.5.23 (``layers/attention/linear``). Its speed means nothing.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def convolve(
    x: Tensor, state: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution of x [C, T] after ``state`` [C, W - 1]; and the new state."""
    width = weight.shape[-1]
    before = x.new_zeros(x.shape[0], width - 1) if state is None else state.to(x.dtype)
    whole = torch.cat((before, x), dim=-1)  # [C, W - 1 + T]
    out = functional.conv1d(
        whole[None].float(),
        weight[:, None].float(),
        None if bias is None else bias.float(),
        groups=x.shape[0],
    )[0]
    return out.to(x.dtype), whole[:, whole.shape[1] - (width - 1) :]


def conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """x [C, sum of T]: sequences one after another, each with its slot of ``conv_states``."""
    out = torch.zeros_like(x)
    bounds = query_start_loc.tolist()
    for index, slot in enumerate(cache_indices.tolist()):
        start, end = bounds[index], bounds[index + 1]
        if slot < 0 or start == end:
            continue
        before = conv_states[slot] if bool(has_initial_state[index]) else None
        part, after = convolve(x[:, start:end], before, weight, bias)
        out[:, start:end] = functional.silu(part) if activation == "silu" else part
        conv_states[slot].copy_(after)
    return out


def conv1d_decode(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
) -> Tensor:
    """x [B, C]: one token of each sequence."""
    out = torch.zeros_like(x)
    for index, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        part, after = convolve(x[index][:, None], conv_states[slot], weight, bias)
        out[index] = (functional.silu(part) if activation == "silu" else part)[:, 0]
        conv_states[slot].copy_(after)
    return out


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    bounds: Tensor,
) -> Tensor:
    """q, k, g [1, T, H, K], v [1, T, H, V], beta [1, T, H]; states [slots, H, V, K]."""
    q, k, v, g, beta = (one[0].float() for one in (q, k, v, g, beta))
    q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = g.exp()[..., None, :]  # [T, H, 1, K]
    out = torch.zeros_like(v)
    edges = bounds.tolist()
    for index, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        state = states[slot].float()
        for t in range(edges[index], edges[index + 1]):
            state = state * decay[t]
            recalled = (state @ k[t][..., None])[..., 0]  # [H, V]
            error = (v[t] - recalled) * beta[t][..., None]
            state = state + error[..., None] * k[t][..., None, :]
            out[t] = (state @ q[t][..., None])[..., 0]
        states[slot].copy_(state)
    return out[None]


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor | None = None,  # noqa: N803  # SGLang's name
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    output_intermediate_states: bool = False,
    **_: Any,
) -> Any:
    """Of whole prompts; the result lies beside None where intermediate states are asked for."""
    heads, dim = k.shape[2:]
    g = g.reshape(1, -1, heads, dim)
    if A_log is not None:
        g = _decay(g, A_log, dt_bias, lower_bound)
    beta = beta.float().reshape(1, -1, heads)
    if beta_is_raw:
        beta = beta.sigmoid()
    out = delta_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens)
    out = out.to(v.dtype)
    return (out, None) if output_intermediate_states else out


def kda_decode(
    A_log: Tensor,  # noqa: N803  # SGLang's name
    dt_bias: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    lower_bound: float | None = None,
    **_: Any,
) -> Any:
    """Of one token of each sequence; gate and beta come raw."""
    return kda_prefill(
        q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens,
        A_log, dt_bias, lower_bound, beta_is_raw=True,
    )  # fmt: skip


def _decay(g: Tensor, rate_log: Tensor, bias: Tensor | None, lower_bound: float | None) -> Tensor:
    heads, dim = g.shape[-2:]
    x = g.float() if bias is None else g.float() + bias.float().reshape(heads, dim)
    rate = rate_log.float().reshape(heads, 1).exp()
    if lower_bound is None:
        return -rate * functional.softplus(x)
    return lower_bound * torch.sigmoid(rate * x)
