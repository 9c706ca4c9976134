"""Feed-forward networks: one dense, or a few of many experts.

The router sees all experts of the model. Those that are not held here add nothing: their part of
the sum is another rank's. Rows are sorted by expert, so that each expert multiplies one run.
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu

from harness.engine.reference.config import MoeConfig

Weights = dict[str, Tensor]


def mlp(x: Tensor, weights: Weights, prefix: str = "") -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    gate, up = linear(x, weights[f"{prefix}gate"]), linear(x, weights[f"{prefix}up"])
    return linear(silu(gate) * up, weights[f"{prefix}down"])


def moe(x: Tensor, config: MoeConfig, weights: Weights) -> Tensor:
    """``x`` [batch, tokens, hidden] to the same."""
    rows = x.flatten(0, 1)  # [rows, hidden]
    chosen, shares = route(rows, config, weights)
    out = _experts(rows, chosen, shares, config, weights)
    if config.shared_intermediate:
        shared = mlp(rows, weights, "shared_")
        if config.shared_gate:
            shared = shared * torch.sigmoid(linear(rows, weights["shared_weight"]))
        out = out + shared
    return out.view_as(x)


def route(rows: Tensor, config: MoeConfig, weights: Weights) -> tuple[Tensor, Tensor]:
    """The experts of each row and their shares, which are of one row's sum."""
    # [rows, experts_per_token] each
    logits = linear(rows.float(), weights["router"].float())
    scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
    ranked = scores + weights["correction"].float() if config.correction else scores
    if config.groups > 1:
        ranked = _within_groups(ranked, config)
    chosen = ranked.topk(config.experts_per_token, dim=-1).indices
    shares = scores.gather(1, chosen)
    if config.normalise:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen, shares * config.scale


def _within_groups(ranked: Tensor, config: MoeConfig) -> Tensor:
    """Only the experts of the best groups: by their two best with a correction (DeepSeek-V3), by
    their best without (V2)."""
    groups: Tensor = ranked.unflatten(-1, (config.groups, -1))
    best = groups.topk(2 if config.correction else 1, dim=-1).values.sum(dim=-1)
    kept = best.topk(config.groups_per_token, dim=-1).indices
    mask = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
    return groups.masked_fill(mask[..., None], -torch.inf).flatten(1)


def _experts(
    rows: Tensor, chosen: Tensor, shares: Tensor, config: MoeConfig, weights: Weights
) -> Tensor:
    expert, order = chosen.flatten().sort(stable=True)  # by expert  # [rows * experts_per_token]
    row = order // config.experts_per_token
    held = config.local_experts
    # Where the run of each held expert ends.
    ends = torch.searchsorted(expert, torch.arange(held, device=rows.device), right=True)
    ends = ends.to(torch.int32)
    gate, up = grouped_mm(rows[row], weights["experts_in"].mT, offs=ends).chunk(2, dim=-1)
    out = grouped_mm(silu(gate) * up, weights["experts_out"].mT, offs=ends)
    if held < config.experts:  # what lies behind the last run was computed by nobody
        out = torch.where((expert < held)[:, None], out, 0.0)
    sorted_back = torch.empty_like(out)
    sorted_back[order] = out
    parts = sorted_back.view(*chosen.shape, -1) * shares.to(out.dtype)[..., None]
    return parts.sum(dim=1)
