"""Linear attention token by token, in float64: what its chunked form must equal."""

import torch
from torch import Tensor


def delta_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Shapes as ``linear_attention.delta_rule``; float64."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    g = g if g.ndim == 4 else g[..., None]
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        told = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        update = beta[:, t, :, None] * (v[:, t] - told)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def decay_recurrence(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Shapes as ``linear_attention.decay_attention``; float64."""
    q, k, v, slopes, state = (x.double() for x in (q, k, v, slopes, state))
    outputs = []
    for t in range(q.shape[1]):
        state = state * (-slopes).exp()[:, None, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state
