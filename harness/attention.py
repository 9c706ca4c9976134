"""What one layer keeps of a prefill, from its attention's shape and the KV dtype.

    mla              (latent_rank + rope_dim) e                                per token
    gqa              kv_heads (key_dim + value_dim) e                          per token
    sliding_window   the same, of the last window_tokens tokens
    kda, gdn, mamba2 heads key_dim value_dim 4 + (conv_kernel - 1) conv_channels 2    once
    lightning        heads key_dim value_dim 4                                        once

in bytes, with e = 2 for bf16 KV and e = 1 for fp8. The recurrent state is fp32 and the inputs that
its causal convolution still needs (the kernel's width less one, over q, k and v) are bf16 whatever
the KV dtype, as serving engines hold them. Scales of quantised KV are not counted.
"""

from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["bf16", "fp8"]
DEFAULT_KV_DTYPE: KvDtype = "bf16"
KV_ELEMENT_BYTES: dict[KvDtype, int] = {"bf16": 2, "fp8": 1}

STATE_ELEMENT_BYTES = 4
CONV_ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's state after prefill; ``kind`` is what the model's file calls such a layer."""

    kind: str
    growing_bytes_per_token: int = 0
    window_tokens: int = 0
    window_bytes_per_token: int = 0
    fixed_bytes: int = 0

    def kv_bytes(self, tokens: int, resident_tokens: int = 0) -> int:
        """Without the growing KV of the first ``resident_tokens``."""
        return (
            self.growing_bytes_per_token * (tokens - resident_tokens)
            + self.window_bytes_per_token * min(tokens, self.window_tokens)
            + self.fixed_bytes
        )


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: one latent and one rotary key for all heads."""

    latent_rank: int
    rope_dim: int
    attention: Literal["mla"] = "mla"

    def layer(self, kind: str, kv_dtype: KvDtype) -> Layer:
        elements = self.latent_rank + self.rope_dim
        return Layer(kind, growing_bytes_per_token=elements * KV_ELEMENT_BYTES[kv_dtype])


@dataclass(frozen=True, slots=True)
class Gqa:
    """Grouped-query attention over the whole context; with one head per query head it is MHA."""

    kv_heads: int
    key_dim: int
    value_dim: int
    attention: Literal["gqa"] = "gqa"

    def layer(self, kind: str, kv_dtype: KvDtype) -> Layer:
        elements = self.kv_heads * (self.key_dim + self.value_dim)
        return Layer(kind, growing_bytes_per_token=elements * KV_ELEMENT_BYTES[kv_dtype])


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Grouped-query attention over the last ``window_tokens`` tokens."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int
    attention: Literal["sliding_window"] = "sliding_window"

    def layer(self, kind: str, kv_dtype: KvDtype) -> Layer:
        elements = self.kv_heads * (self.key_dim + self.value_dim)
        return Layer(
            kind,
            window_tokens=self.window_tokens,
            window_bytes_per_token=elements * KV_ELEMENT_BYTES[kv_dtype],
        )


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear attention behind a causal convolution: ``heads`` matrices, of one size at any length.

    For Mamba-2 ``key_dim`` is the state's size and ``value_dim`` the head's.
    """

    attention: Literal["kda", "gdn", "mamba2"]
    heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    conv_channels: int

    def layer(self, kind: str, kv_dtype: KvDtype) -> Layer:  # noqa: ARG002  one signature for all
        state = self.heads * self.key_dim * self.value_dim * STATE_ELEMENT_BYTES
        convolution = (self.conv_kernel - 1) * self.conv_channels * CONV_ELEMENT_BYTES
        return Layer(kind, fixed_bytes=state + convolution)


@dataclass(frozen=True, slots=True)
class Lightning:
    """Lightning attention: the same matrices, no convolution."""

    heads: int
    key_dim: int
    value_dim: int
    attention: Literal["lightning"] = "lightning"

    def layer(self, kind: str, kv_dtype: KvDtype) -> Layer:  # noqa: ARG002  one signature for all
        state = self.heads * self.key_dim * self.value_dim * STATE_ELEMENT_BYTES
        return Layer(kind, fixed_bytes=state)


Attention = Mla | Gqa | SlidingWindow | Linear | Lightning
