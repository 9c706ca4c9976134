"""What a model is: one attention and one feed-forward network a layer, and their dimensions.

    h = h + attention(norm(h));  h = h + ffn(norm(h))                    [tokens, hidden_size]

A record of attention holds what computing needs; ``geometry`` is the part of it that stays in the
cache, by which ``harness.attention`` tells the bytes. ``rank_config`` is what one of ``n``
tensor-parallel ranks holds: its heads, its slice of each dense network and its experts. A latent
(MLA) and what all heads share are on every rank, as in serving engines.
"""

from dataclasses import dataclass, replace
from typing import Literal

from harness.attention import (
    Attention,
    Gqa,
    KvDtype,
    Layer,
    Lightning,
    Linear,
    Mla,
    SlidingWindow,
)
from harness.core import ScenarioError


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions on the first ``dim`` channels; pairs are (i, i + dim / 2), or (2i, 2i + 1)
    if ``interleaved``."""

    theta: float
    dim: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class GqaConfig:
    """Softmax attention, over the last ``window_tokens`` tokens or over all.

    ``gated``: the output times sigmoid of a projection of the input (Qwen3-Next). ``sinks``: one
    logit a head that takes weight and gives no value (MiMo-V2, gpt-oss). ``bias``: on all four
    projections.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rope: Rope | None
    window_tokens: int | None = None
    qk_norm: bool = False
    gated: bool = False
    bias: bool = False
    sinks: bool = False
    value_scale: float = 1.0

    @property
    def geometry(self) -> Attention:
        if self.window_tokens is None:
            return Gqa(self.kv_heads, self.key_dim, self.value_dim)
        return SlidingWindow(self.kv_heads, self.key_dim, self.value_dim, self.window_tokens)

    def rank(self, ranks: int) -> "GqaConfig":
        heads = _share(self.heads, ranks, "query heads")
        if self.kv_heads % ranks and ranks % self.kv_heads:
            raise ScenarioError(
                f"{self.kv_heads} KV heads cannot be shared by {ranks} tensor-parallel ranks; "
                "neither is a multiple of the other."
            )
        return replace(self, heads=heads, kv_heads=max(1, self.kv_heads // ranks))


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Latent attention of DeepSeek-V2. Without ``rope`` the shared key carries no position (Kimi
    Linear). ``query_rank`` None: queries are projected at once."""

    heads: int
    latent_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None
    rope: Rope | None

    @property
    def geometry(self) -> Attention:
        return Mla(self.latent_rank, self.rope_dim)

    def rank(self, ranks: int) -> "MlaConfig":
        return replace(self, heads=_share(self.heads, ranks, "query heads"))


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated delta rule behind a causal convolution; ``key_heads`` are shared by ``heads``.

    ``kda``: one decay a channel (Kimi Linear). ``gdn``: one a head (Qwen3-Next).
    """

    kind: Literal["kda", "gdn"]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def geometry(self) -> Attention:
        return Linear(
            self.kind,
            self.heads,
            self.key_dim,
            self.value_dim,
            self.conv_kernel,
            self.conv_channels,
        )

    def rank(self, ranks: int) -> "DeltaConfig":
        heads = _share(self.heads, ranks, "linear-attention heads")
        return replace(
            self, heads=heads, key_heads=_share(self.key_heads, ranks, "linear-attention key heads")
        )


@dataclass(frozen=True, slots=True)
class LightningConfig:
    """Linear attention with a constant decay exp(-slope) a head (MiniMax-Text-01, Ring 2.5)."""

    key_dim: int
    value_dim: int
    slopes: tuple[float, ...]

    @property
    def heads(self) -> int:
        return len(self.slopes)

    @property
    def geometry(self) -> Attention:
        return Lightning(self.heads, self.key_dim, self.value_dim)

    def rank(self, ranks: int) -> "LightningConfig":
        heads = _share(self.heads, ranks, "linear-attention heads")
        return replace(self, slopes=self.slopes[:heads])


AttentionConfig = GqaConfig | MlaConfig | DeltaConfig | LightningConfig


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """down(silu(gate(x)) * up(x))."""

    intermediate: int

    def rank(self, ranks: int) -> "MlpConfig":
        return MlpConfig(_share(self.intermediate, ranks, "channels of an MLP"))


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """``experts_per_token`` of ``experts`` by the router's scores, and a shared MLP.

    Only the first ``local_experts`` are held; a token's weights are over all of its experts.
    ``groups``: experts are chosen in ``groups_per_token`` groups only. ``correction``: a bias that
    counts for the choice alone (DeepSeek-V3). ``shared_gate``: a sigmoid on the shared MLP.
    """

    experts: int
    experts_per_token: int
    intermediate: int
    local_experts: int
    shared_intermediate: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: int = 1
    groups_per_token: int = 1
    normalise: bool = True
    scale: float = 1.0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        assert self.experts_per_token <= self.experts, self
        assert self.local_experts <= self.experts, self

    def rank(self, ranks: int) -> "MoeConfig":
        shared = _share(self.shared_intermediate, ranks, "channels of the shared expert")
        experts = _share(self.local_experts, ranks, "experts")
        return replace(self, local_experts=experts, shared_intermediate=shared)


FfnConfig = MlpConfig | MoeConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    attention: AttentionConfig
    ffn: FfnConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerConfig, ...]
    eps: float = 1e-6
    tied: bool = False

    def geometry(self, kv_dtype: KvDtype) -> tuple[Layer, ...]:
        """What each layer keeps, in layer order; a layer's kind is its attention."""
        shapes = [layer.attention.geometry for layer in self.layers]
        return tuple(shape.layer(shape.attention, kv_dtype) for shape in shapes)


def rank_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """What the first of ``ranks`` tensor-parallel ranks holds; ScenarioError where it does not
    divide. Embedding and head stay whole: they are no part of a layer's time."""
    layers = [
        LayerConfig(layer.attention.rank(ranks), layer.ffn.rank(ranks)) for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))


def _share(count: int, ranks: int, what: str) -> int:
    if count % ranks:
        raise ScenarioError(
            f"{count} {what} cannot be shared by {ranks} tensor-parallel ranks; choose a divisor."
        )
    return count // ranks


def lightning_slopes(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """Decay rates of a layer's heads: 2^(-8 h / heads) for h = 1 .. heads, less in later layers."""
    factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return tuple(2 ** (-8 * (head + 1) / heads) * factor for head in range(heads))
