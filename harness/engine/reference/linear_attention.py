"""Linear attention in its chunked parallel form: matrix products, and one short scan over chunks.

Delta rule with decay (gated DeltaNet: one decay a head; KDA: one a channel), token by token:

    S' = diag(exp g_t) S,   u_t = b_t (v_t - S'^T k_t),   S = S' + k_t u_t^T,   o_t = S^T q_t

Within a chunk let G be the running sum of g. With D_ij = exp(G_i - G_j) for j <= i (a product over
channels for KDA) the updates of a chunk solve one triangular system, and all chunks solve theirs at
once but for the state S_0 that they begin with (UT transform):

    (I + tril(b K D K^T, -1)) U = b (V - (K exp G) S_0)
    O = (Q exp G) S_0 + tril(Q D K^T) U,   S = diag(exp G_C) S_0 + (K exp(G_C - G))^T U

Lightning attention is the same without the delta: U = V, and g is constant. No exponent is ever
positive, so nothing overflows at any decay. Sums of decays are float64, as their differences are
small beside them; the rest is float32. Sources: Yang et al. 2412.06464, Kimi Linear 2510.26692,
MiniMax-01 2501.08313.

Shapes: q, k [batch, tokens, heads, key], v [batch, tokens, heads, value], state [batch, heads, key,
value]; inside, chunks are [batch, heads, chunks, C, ...].
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

CHUNK_TOKENS = 64
#: KDA's decays are taken pair by pair within blocks of this size, and through a point between them
#: across blocks.
_BLOCK_TOKENS = 16
#: What one call holds of intermediate results at a time.
_SEGMENT_TOKENS = 4096


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Outputs and the state after the last token.

    ``g`` is the log decay, [batch, tokens, heads] or [..., key]; ``beta`` [batch, tokens, heads].
    """
    if q.shape[1] == 1:
        return _delta_step(q, k, v, g, beta, state)
    outputs = []
    for start in range(0, q.shape[1], _SEGMENT_TOKENS):
        part = slice(start, start + _SEGMENT_TOKENS)
        inputs = (q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part])
        out, state = _delta_segment(*inputs, state, chunk_tokens)
        outputs.append(out)
    return torch.cat(outputs, dim=1), state


def _delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence of a batch."""
    q, k, v, g, beta = q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0]  # [batch, heads, ...]
    decay = g.exp().reshape(*g.shape[:2], -1, 1)
    state = state * decay
    update = beta[..., None] * (v - (k[..., None, :] @ state)[..., 0, :])
    state = state + k[..., None] * update[..., None, :]
    return (q[..., None, :] @ state).transpose(1, 2), state


def _delta_segment(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    tokens = q.shape[1]
    if g.ndim == 3:
        g = g[..., None]  # [batch, tokens, heads, 1]
    q, k, v, g, beta = (_chunks(x, chunk_tokens) for x in (q, k, v, g, beta[..., None]))
    total = g.double().cumsum(dim=3)  # [batch, heads, chunks, C, key or 1]
    products = _decayed_products(torch.stack((beta * k, q)), k, total)
    system, reads = products[0], products[1]  # [batch, heads, chunks, C, C] each
    rise = total.exp().float()
    right = torch.cat((beta * v, beta * k * rise), dim=-1)
    # Only what lies below the diagonal of the system is read.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    q_in, k_out = q * rise, k * (total[..., -1:, :] - total).exp().float()
    kept = rise[..., -1, :, None]  # [batch, heads, chunks, key or 1, 1]
    out = torch.empty_like(v)
    for n in range(v.shape[2]):
        update = values[:, :, n] - keys[:, :, n] @ state
        out[:, :, n] = q_in[:, :, n] @ state + reads[:, :, n] @ update
        state = kept[:, :, n] * state + k_out[:, :, n].mT @ update
    return _tokens(out, tokens), state


def _decayed_products(rows: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """sum over channels of rows_i k_j exp(total_i - total_j) for j <= i, else 0.

    ``rows`` [kinds, ..., C, key], ``k`` and ``total`` [..., C, key or 1].
    """  # [kinds, ..., C, C]
    size = k.shape[-2]
    if total.shape[-1] == 1:
        decay = _pairwise(total)[..., 0]
        return (rows @ k.mT) * decay
    block = min(_BLOCK_TOKENS, size)
    assert size % block == 0, (size, block)
    out = rows.new_zeros(*rows.shape[:-1], size)
    for start in range(0, size, block):
        here = slice(start, start + block)
        local = _pairwise(total[..., here, :]) * k[..., None, here, :]  # [..., i, j, key]
        out[..., here, here] = (local @ rows[..., here, :, None])[..., 0]
        if start:
            between = total[..., start - 1 : start, :]
            ahead = rows[..., here, :] * (total[..., here, :] - between).exp().float()
            behind = k[..., :start, :] * (between - total[..., :start, :]).exp().float()
            out[..., here, :start] = ahead @ behind.mT
    return out


def _pairwise(total: Tensor) -> Tensor:
    """exp(total_i - total_j) for j <= i, else 0."""  # [..., C, C, channels]
    size = total.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    difference = (total[..., :, None, :] - total[..., None, :, :]).float()
    return difference.masked_fill(later[..., None], -torch.inf).exp()


def decay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    state: Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Lightning attention: S = exp(-slope) S + k_t v_t^T, o_t = S^T q_t; ``slopes`` [heads]."""
    tokens = q.shape[1]
    size = min(chunk_tokens, tokens)
    q, k, v = (_chunks(x, size) for x in (q, k, v))
    slopes = slopes.double()[:, None, None]  # [heads, 1, 1]
    steps = torch.arange(1, size + 1, device=q.device, dtype=torch.float64)
    reach = (steps[:, None] - steps).clamp(min=0)  # [C, C]
    decay = (-slopes * reach).exp().float().tril()
    inner = ((q @ k.mT) * decay[:, None]) @ v
    q_in = q * (-slopes * steps[:, None]).exp().float()[:, None]
    out = torch.empty_like(v)
    for n in range(v.shape[2]):
        # Zeros that fill up the last chunk add nothing, but its state must not decay over them.
        real = min(size, tokens - n * size)
        left = (-slopes * (real - steps[:real, None])).exp().float()  # [heads, real, 1]
        out[:, :, n] = q_in[:, :, n] @ state + inner[:, :, n]
        keys = k[:, :, n, :real] * left
        state = (-slopes * real).exp().float() * state + keys.mT @ v[:, :, n, :real]
    return _tokens(out, tokens), state


def _chunks(x: Tensor, size: int) -> Tensor:
    """[batch, tokens, heads, d] as [batch, heads, chunks, size, d], with zeros at the end."""
    batch, tokens, heads, width = x.shape
    missing = -tokens % size
    x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    return x.reshape(batch, -1, size, heads, width).permute(0, 3, 1, 2, 4).contiguous()


def _tokens(x: Tensor, tokens: int) -> Tensor:
    """The reverse of ``_chunks``."""
    batch, heads, _, _, width = x.shape
    return x.permute(0, 2, 3, 1, 4).reshape(batch, -1, heads, width)[:, :tokens]


def causal_convolution(x: Tensor, past: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """silu of a convolution of each channel with its own kernel over the last tokens.

    ``x`` [batch, tokens, channels], ``past`` the inputs before it [batch, kernel - 1, channels],
    ``weight`` [channels, kernel]. Outputs as ``x``, and the inputs that the next token needs.
    """
    inputs = torch.cat((past, x), dim=1)
    tokens = x.shape[1]
    out = inputs[:, :tokens] * weight[:, 0]
    for step in range(1, weight.shape[1]):
        out += inputs[:, step : step + tokens] * weight[:, step]
    return silu(out), inputs[:, tokens:]
