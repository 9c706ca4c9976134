"""Tiny models for the reference engine: one of each kind of layer, and mixed patterns."""

from collections.abc import Callable
from dataclasses import replace

from harness.engine.reference.config import (
    AttentionConfig,
    DeltaConfig,
    FfnConfig,
    GqaConfig,
    LayerConfig,
    LightningConfig,
    MlaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    Rope,
    lightning_slopes,
)

ROPE = Rope(10_000.0, 16)
GQA = GqaConfig(heads=4, kv_heads=2, key_dim=16, value_dim=16, rope=ROPE, qk_norm=True)
GATED = replace(GQA, kv_heads=1, rope=Rope(10_000.0, 8), gated=True)
SINKS = replace(GQA, qk_norm=False, bias=True, sinks=True, value_scale=0.7)
WINDOW = GqaConfig(
    heads=4, kv_heads=2, key_dim=16, value_dim=8, rope=ROPE, window_tokens=24, sinks=True
)
MLA = MlaConfig(
    heads=4, latent_rank=32, rope_dim=16, nope_dim=16, value_dim=24, query_rank=24, rope=ROPE
)
KDA = DeltaConfig("kda", heads=4, key_heads=4, key_dim=16, value_dim=16, conv_kernel=4)
GDN = DeltaConfig("gdn", heads=4, key_heads=2, key_dim=16, value_dim=24, conv_kernel=3)
MLP = MlpConfig(96)
MOE = MoeConfig(
    experts=8,
    experts_per_token=2,
    intermediate=32,
    local_experts=8,
    shared_intermediate=32,
    scoring="sigmoid",
    correction=True,
)
VOCAB = 128


def lightning(layer: int, layers: int) -> LightningConfig:
    return LightningConfig(16, 16, lightning_slopes(4, layer, layers))


Kind = AttentionConfig | Callable[[int, int], AttentionConfig]


def model(name: str, kinds: list[Kind], ffn: FfnConfig = MLP) -> ModelConfig:
    """One layer of each of ``kinds``; the first layer's network is dense."""
    layers = []
    for index, kind in enumerate(kinds):
        attention = kind(index, len(kinds)) if callable(kind) else kind
        layers.append(LayerConfig(attention, ffn if index else MLP))
    return ModelConfig(name, 64, VOCAB, tuple(layers))


#: By name; those with a number are linear or window layers to one full layer.
MODELS: dict[str, ModelConfig] = {
    "gqa": model("gqa", [GQA, GATED, SINKS]),
    "mla": model("mla", [MLA, MLA]),
    "window": model("window", [WINDOW, WINDOW]),
    "kda": model("kda", [KDA, KDA]),
    "gdn": model("gdn", [GDN, GDN]),
    "lightning": model("lightning", [lightning, lightning]),
    "moe": model("moe", [GQA, GQA], MOE),
    "kda-mla-3:1": model("kda-mla-3:1", [KDA, KDA, KDA, MLA], MOE),
    "gdn-gqa-3:1": model("gdn-gqa-3:1", [GDN, GDN, GDN, GATED]),
    "window-gqa-5:1": model("window-gqa-5:1", [*[WINDOW] * 5, GQA]),
    "lightning-mla-7:1": model("lightning-mla-7:1", [*[lightning] * 7, MLA]),
}
