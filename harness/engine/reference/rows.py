"""The tokens of one forward pass: a chunk of one sequence, or one token of each of several."""

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.engine.reference.config import Rope


class Rows:
    """``tokens`` new tokens in each of ``slots``, after the ``starts`` tokens that lie there."""

    def __init__(
        self, slots: Sequence[int], starts: Sequence[int], tokens: int, device: torch.device
    ) -> None:
        assert slots, "no sequences"
        assert len(set(slots)) == len(slots), f"a sequence twice: {slots}"
        assert len(slots) == 1 or tokens == 1, "several sequences take one token each"
        self.slots = list(slots)
        self.tokens = tokens
        self.starts = list(starts)
        self.longest = max(starts) + tokens
        self.slot_index = torch.tensor(self.slots, device=device)  # [batch]
        self.start_index = torch.tensor(self.starts, device=device)  # [batch]
        steps = torch.arange(tokens, device=device)
        self.positions = self.start_index[:, None] + steps  # [batch, tokens]
        self._turns: dict[Rope, tuple[Tensor, Tensor]] = {}

    def pick(self, x: Tensor) -> Tensor:
        """``x`` [slots, ...] of these sequences: a view where the slots are neighbours in order."""
        # [batch, ...]
        first, count = self.slots[0], len(self.slots)
        if self.slots == list(range(first, first + count)):
            return x[first : first + count]
        return x.index_select(0, self.slot_index)

    def held(self, rows: int) -> Tensor | None:
        """Which of the first ``rows`` rows of a cache hold a token, after the new ones; None where
        all do."""  # [batch, 1, 1, rows]
        if all(start + self.tokens >= rows for start in self.starts):
            return None
        ends = (self.start_index + self.tokens)[:, None]
        return (torch.arange(rows, device=ends.device) < ends)[:, None, None]

    def rotate(self, x: Tensor, rope: Rope | None) -> Tensor:
        """Give the first ``rope.dim`` channels of ``x`` [batch, tokens, heads, d] a position."""
        if rope is None:
            return x
        cos, sin = self._turn(rope)
        turned, rest = x[..., : rope.dim], x[..., rope.dim :]
        if rope.interleaved:
            one, two = turned[..., 0::2], turned[..., 1::2]
        else:
            one, two = turned.chunk(2, dim=-1)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), dim=-1)

    def _turn(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position and pair."""  # [batch, tokens, 1, dim / 2] each
        if rope not in self._turns:
            exponents = torch.arange(0, rope.dim, 2, device=self.positions.device) / rope.dim
            angles = self.positions[..., None, None].float() * (1.0 / rope.theta**exponents)
            self._turns[rope] = angles.cos(), angles.sin()
        return self._turns[rope]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in float32, times ``weight``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)
