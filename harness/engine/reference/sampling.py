"""The next token from logits: the likeliest, and by how much it is that.

Greedy tokens of two runs agree where the arithmetic differs by less than the margin between the two
likeliest tokens. Batches and chunks of other sizes sum in another order, so float32 results differ
in their last bits; a proof that tokens agree says how wide the margins were.
"""

from torch import Tensor


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row of [batch, vocab], the first one of equals."""
    return [int(token) for token in logits.argmax(dim=-1).tolist()]


def margins(logits: Tensor) -> list[float]:
    """How far the likeliest token is ahead of the next one in each row."""
    best = logits.topk(2, dim=-1).values  # [batch, 2]
    return [float(margin) for margin in (best[..., 0] - best[..., 1]).tolist()]
