"""Softmax attention over a cache: grouped queries, sliding windows, and latents.

A prefill computes keys and values of its chunk, writes them, and reads all from the cache. A chunk
behind a sliding window is cut into blocks of queries, each of which sees one run of keys, so its
cost grows with tokens x window. A latent is expanded to keys and values of every head in a prefill;
in decode the expansion is moved to the query and the output instead ("absorbed"), so that a step
reads the latents alone.
"""

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from harness.engine.reference.cache import LayerCache
from harness.engine.reference.config import GqaConfig, MlaConfig
from harness.engine.reference.rows import Rows, rms_norm

Weights = dict[str, Tensor]

_LATENT_EPS = 1e-6
_LEAST_BLOCK_TOKENS = 64
#: The fused kernels want values as wide as keys, and take heads up to this width.
_WIDEST = 256


def grouped_attention(
    x: Tensor, config: GqaConfig, weights: Weights, cache: LayerCache, rows: Rows, eps: float
) -> Tensor:
    """``x`` [batch, tokens, hidden] to the same, with the KV of its tokens written."""
    q = _heads(linear(x, weights["q"], weights.get("q_bias")), config.heads)
    k = _heads(linear(x, weights["k"], weights.get("k_bias")), config.kv_heads)
    v = linear(x, weights["v"], weights.get("v_bias")) * config.value_scale
    if config.qk_norm:
        q, k = rms_norm(q, weights["q_norm"], eps), rms_norm(k, weights["k_norm"], eps)
    q, k = rows.rotate(q, config.rope), rows.rotate(k, config.rope)
    fresh = torch.cat((k.flatten(2), v), dim=-1)
    assert cache.kv is not None
    q, scale, sinks = q.transpose(1, 2), config.key_dim**-0.5, weights.get("sinks")
    if config.window_tokens is None:
        kv = _append(fresh, cache.kv, rows).to(x.dtype)
        mask = rows.held(rows.longest)
        out = attend(
            q, *_keys_values(kv, config), scale, mask=mask, causal=rows.tokens > 1, sinks=sinks
        )
    elif rows.tokens == 1:
        kv = _append_to_ring(fresh, cache.kv, rows).to(x.dtype)
        held = rows.held(kv.shape[1])
        out = attend(q, *_keys_values(kv, config), scale, mask=held, sinks=sinks)
    else:
        kv = _shift_into_ring(fresh, cache.kv, rows).to(x.dtype)
        out = _attend_band(q, *_keys_values(kv, config), config.window_tokens, rows, scale, sinks)
    out = out.transpose(1, 2).flatten(2)
    if config.gated:
        out = out * torch.sigmoid(linear(x, weights["gate"]))
    return linear(out, weights["o"], weights.get("o_bias"))


def latent_attention(
    x: Tensor, config: MlaConfig, weights: Weights, cache: LayerCache, rows: Rows
) -> Tensor:
    """As ``grouped_attention``, with one latent and one rotary key a token in the cache."""
    if config.query_rank is None:
        q = linear(x, weights["q"])
    else:
        down = rms_norm(linear(x, weights["q_down"]), weights["q_norm"], _LATENT_EPS)
        q = linear(down, weights["q"])
    q_plain, q_turned = _heads(q, config.heads).split((config.nope_dim, config.rope_dim), dim=-1)
    q_turned = rows.rotate(q_turned, config.rope)
    latent, key = linear(x, weights["kv_down"]).split((config.latent_rank, config.rope_dim), dim=-1)
    latent = rms_norm(latent, weights["kv_norm"], _LATENT_EPS)
    key = rows.rotate(key[:, :, None], config.rope)[:, :, 0]
    assert cache.kv is not None
    kept = _append(torch.cat((latent, key), dim=-1), cache.kv, rows).to(x.dtype)
    if rows.tokens == 1:
        out = _attend_absorbed(q_plain[:, 0], q_turned[:, 0], kept, config, weights, rows)
    else:
        out = _attend_expanded(q_plain, q_turned, kept, config, weights)
    return linear(out, weights["o"])


def _attend_expanded(
    q_plain: Tensor,
    q_turned: Tensor,
    kept: Tensor,
    config: MlaConfig,
    weights: Weights,
) -> Tensor:
    """[batch, tokens, heads, d] queries over the keys and values of every head."""
    latent, key = kept.split((config.latent_rank, config.rope_dim), dim=-1)
    k_plain = _heads(linear(latent, weights["k_up"].flatten(0, 1)), config.heads)
    v = _heads(linear(latent, weights["v_up"].flatten(0, 1)), config.heads)
    k = torch.cat((k_plain, key[:, :, None].expand(-1, -1, config.heads, -1)), dim=-1)
    q = torch.cat((q_plain, q_turned), dim=-1)
    scale = (config.nope_dim + config.rope_dim) ** -0.5
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return attend(q, k, v, scale, causal=True).transpose(1, 2).flatten(2)


def _attend_absorbed(
    q_plain: Tensor,
    q_turned: Tensor,
    kept: Tensor,
    config: MlaConfig,
    weights: Weights,
    rows: Rows,
) -> Tensor:
    """[batch, heads, d] queries over the latents, which all heads share."""
    q_latent = torch.einsum("bhd,hdl->bhl", q_plain, weights["k_up"])
    q = torch.cat((q_latent, q_turned), dim=-1)[:, None]  # [batch, 1, heads, latent + rope]
    k, v = kept[:, None], kept[:, None, :, : config.latent_rank]
    scale = (config.nope_dim + config.rope_dim) ** -0.5
    held = rows.held(rows.longest)
    out = attend(q, k, v, scale, mask=held)[:, 0]  # [batch, heads, latent]
    return torch.einsum("bhl,hdl->bhd", out, weights["v_up"]).flatten(1)[:, None]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries [batch, heads, tokens, key] over [batch, KV heads, rows, ...].

    ``mask`` [batch or 1, 1, tokens, rows] is true where a query sees a key; ``causal``: each query
    sees the keys up to its own, and theirs are the last ones. ``sinks`` [heads].
    """  # [batch, heads, tokens, value]
    batch, heads, tokens, width = q.shape
    if tokens == 1 and heads != k.shape[1]:
        # The heads that share a key are its queries: no key is copied.
        q = q.view(batch, k.shape[1], -1, width)
    value_width = v.shape[-1]
    if value_width < width <= _WIDEST:
        v = pad(v, (0, width - value_width))
    bias: Tensor | None = mask
    if sinks is not None:
        bias = _sink_bias(q, k, mask, causal, sinks)
        # One more key, of zeros, whose logit is the sink; its value is zero too.
        k, v, causal = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), False
    elif causal and q.shape[2] != k.shape[2]:
        bias, causal = causal_lower_right(q.shape[2], k.shape[2]), False
    out = scaled_dot_product_attention(
        q, k, v, bias, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[..., :value_width].reshape(batch, heads, tokens, value_width)


def _sink_bias(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, sinks: Tensor) -> Tensor:
    """What is added to the logits, with the sink as the last."""  # [.., heads, tokens, rows + 1]
    _, heads, tokens, _ = q.shape
    rows = k.shape[2]
    if causal:
        mask = torch.ones(tokens, rows, dtype=torch.bool, device=q.device).tril(rows - tokens)
        mask = mask[None, None]
    bias = q.new_zeros(1 if mask is None else mask.shape[0], heads, tokens, rows + 1)
    if mask is not None:
        bias[..., :-1].masked_fill_(~mask, -torch.inf)
    bias[..., -1] = sinks.to(q.dtype).view(heads, -1)
    return bias


def _attend_band(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    rows: Rows,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """A chunk of one sequence: token i over the ``window`` rows up to its own, which is row
    ``window + i`` of ``k`` and ``v``; rows in front that hold nothing are not seen."""
    tokens = rows.tokens
    block = min(max(window, _LEAST_BLOCK_TOKENS), tokens)
    missing = -tokens % block
    q, k, v = pad(q, (0, 0, 0, missing)), pad(k, (0, 0, 0, missing)), pad(v, (0, 0, 0, missing))
    # [blocks, heads, block or window + block, d]
    q = q[0].unflatten(1, (-1, block)).transpose(0, 1)
    k, v = (x[0].unfold(1, window + block, block).permute(1, 0, 3, 2) for x in (k, v))
    row = torch.arange(window + block, device=q.device)
    query = torch.arange(block, device=q.device)[:, None]
    band = (row > query) & (row <= query + window)  # [block, window + block]
    empty = window - min(rows.starts[0], window)
    first = torch.arange(k.shape[0], device=q.device)[:, None] * block
    seen = band & (first + row >= empty)[:, None, None]  # [blocks, 1, block, window + block]
    out = attend(q, k, v, scale, mask=seen, sinks=sinks)
    return out.transpose(0, 1).flatten(1, 2)[None, :, :tokens]


def _append(fresh: Tensor, kv: Tensor, rows: Rows) -> Tensor:
    """Write new rows [batch, tokens, width]; all rows of these sequences up to the longest."""
    if len(rows.slots) == 1:
        start = rows.starts[0]
        kv[rows.slots[0], start : start + rows.tokens] = fresh[0].to(kv.dtype)
    else:
        kv[rows.slot_index, rows.start_index] = fresh[:, 0].to(kv.dtype)
    return rows.pick(kv[:, : rows.longest])


def _append_to_ring(fresh: Tensor, kv: Tensor, rows: Rows) -> Tensor:
    """One row of each sequence into its ring; the order of rows is of no matter to attention."""
    window = kv.shape[1]
    kv[rows.slot_index, rows.start_index % window] = fresh[:, 0].to(kv.dtype)
    return rows.pick(kv[:, : min(rows.longest, window)])


def _shift_into_ring(fresh: Tensor, kv: Tensor, rows: Rows) -> Tensor:
    """A chunk of one sequence into its ring: the window before it, oldest first and with empty rows
    in front, and the chunk."""  # [1, window + tokens, width]
    window, slot, start = kv.shape[1], rows.slots[0], rows.starts[0]
    places = torch.arange(start - window, start, device=kv.device) % window
    chunk = fresh[0].to(kv.dtype)
    seen = torch.cat((kv[slot, places], chunk))
    last = chunk[-window:]
    ends = torch.arange(start + rows.tokens - len(last), start + rows.tokens, device=kv.device)
    kv[slot, ends % window] = last
    return seen[None]


def _keys_values(kv: Tensor, config: GqaConfig) -> tuple[Tensor, Tensor]:
    """[batch, rows, width] as [batch, KV heads, rows, key] and [..., value]."""
    heads = config.kv_heads
    k, v = kv.split((heads * config.key_dim, heads * config.value_dim), dim=-1)
    return _heads(k, heads).transpose(1, 2), _heads(v, heads).transpose(1, 2)


def _heads(x: Tensor, heads: int) -> Tensor:
    cut: Tensor = x.unflatten(-1, (heads, -1))
    return cut
