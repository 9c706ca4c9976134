"""What an architecture file leaves out: the dimensions that compute needs and the cache does not.

A model file (JSON, schema version 1) stands beside an architecture and completes it: hidden size,
query heads, positions, feed-forward networks, vocabulary. The order and kind of the layers, KV
heads, head sizes, windows and states are the architecture's alone.
"""

from pathlib import Path
from typing import Annotated, Literal, NoReturn

from pydantic import Field

from harness.architecture import Architecture, Dimension
from harness.attention import Attention, Gqa, Lightning, Linear, Mla, SlidingWindow
from harness.core import ScenarioError
from harness.datafile import parse_json_file
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
from harness.scenario_tables.table import Table

_WHAT = "model file"


class MlaTable(Table):
    """Heads of latent attention; queries are projected at once unless ``query_rank`` is given."""

    heads: Dimension
    nope_dim: Dimension
    value_dim: Dimension
    query_rank: Dimension | None = None
    rotary: bool = True


class GqaTable(Table):
    """Heads of full and sliding-window attention."""

    heads: Dimension
    rotary_dim: Annotated[int, Field(ge=0, le=2**16)] | None = None
    """Channels with a position; all of a key unless given."""
    qk_norm: bool = False
    gated: bool = False


class LinearTable(Table):
    key_heads: Dimension
    """Key heads of the delta rule, which the architecture does not tell."""


class MoeTable(Table):
    experts: Dimension
    experts_per_token: Dimension
    intermediate_size: Dimension
    shared_intermediate_size: Annotated[int, Field(ge=0, le=2**20)] = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scale: Annotated[float, Field(gt=0)] = 1.0
    dense_layers: Annotated[int, Field(ge=0)] = 0
    """Layers from the first on that have a dense network instead."""


class BodyFile(Table):
    schema_version: Literal[1]
    notes: str = ""
    hidden_size: Dimension
    vocab_size: Annotated[int, Field(ge=2, le=2**24)]
    intermediate_size: Annotated[int, Field(ge=1, le=2**20)]
    """Of the dense networks."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    mla: MlaTable | None = None
    gqa: GqaTable | None = None
    linear: LinearTable | None = None
    moe: MoeTable | None = None


def read_body(path: Path) -> BodyFile:
    """ScenarioError names the file and the key that is wrong."""
    return parse_json_file(path, _WHAT, BodyFile)


def complete_architecture(architecture: Architecture, body: BodyFile) -> ModelConfig:
    """The model whose cache is ``architecture`` and whose other dimensions ``body`` gives.

    ScenarioError where the architecture gives a kind of layer by its bytes, or a kind for which
    ``body`` has no table.
    """
    layers = []
    for index, layer in enumerate(architecture.layers):
        shape = architecture.attention.get(layer.kind)
        if shape is None:
            raise ScenarioError(
                f"The architecture {architecture.path} gives {layer.kind!r} by its bytes, of which "
                "nothing can be computed; give the layer's 'attention' and shape instead."
            )
        attention = _attention(shape, body, index, len(architecture.layers))
        layers.append(LayerConfig(attention, _ffn(body, index)))
    return ModelConfig(
        name=architecture.name,
        hidden_size=body.hidden_size,
        vocab_size=body.vocab_size,
        layers=tuple(layers),
        eps=body.eps,
    )


def _attention(shape: Attention, body: BodyFile, layer: int, layers: int) -> AttentionConfig:
    match shape:
        case Mla():
            table = body.mla or _missing("mla", shape)
            rope = (
                Rope(body.rope_theta, shape.rope_dim) if table.rotary and shape.rope_dim else None
            )
            return MlaConfig(
                table.heads,
                shape.latent_rank,
                shape.rope_dim,
                table.nope_dim,
                table.value_dim,
                table.query_rank,
                rope,
            )
        case Gqa() | SlidingWindow():
            return _gqa(shape, body)
        case Linear():
            return _delta(shape, body)
        case Lightning():
            slopes = lightning_slopes(shape.heads, layer, layers)
            return LightningConfig(shape.key_dim, shape.value_dim, slopes)


def _gqa(shape: Gqa | SlidingWindow, body: BodyFile) -> GqaConfig:
    table = body.gqa or _missing("gqa", shape)
    if table.heads % shape.kv_heads:
        raise ScenarioError(
            f"'gqa.heads' of the model file is {table.heads}, no multiple of the architecture's "
            f"{shape.kv_heads} KV heads."
        )
    rotary_dim = shape.key_dim if table.rotary_dim is None else table.rotary_dim
    return GqaConfig(
        heads=table.heads,
        kv_heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        rope=Rope(body.rope_theta, rotary_dim) if rotary_dim else None,
        window_tokens=shape.window_tokens if isinstance(shape, SlidingWindow) else None,
        qk_norm=table.qk_norm,
        gated=table.gated,
    )


def _delta(shape: Linear, body: BodyFile) -> DeltaConfig:
    if shape.attention == "mamba2":
        raise ScenarioError("The reference engine has no Mamba-2 layer; it has kda and gdn.")
    key_heads = shape.heads if body.linear is None else body.linear.key_heads
    delta = DeltaConfig(
        shape.attention, shape.heads, key_heads, shape.key_dim, shape.value_dim, shape.conv_kernel
    )
    if delta.conv_channels != shape.conv_channels or shape.heads % key_heads:
        raise ScenarioError(
            f"{shape.heads} heads of {shape.key_dim} x {shape.value_dim} with {key_heads} key "
            f"heads have {delta.conv_channels} convolved channels; the architecture has "
            f"{shape.conv_channels}. Set 'linear.key_heads' of the model file."
        )
    return delta


def _ffn(body: BodyFile, layer: int) -> FfnConfig:
    moe = body.moe
    if moe is None or layer < moe.dense_layers:
        return MlpConfig(body.intermediate_size)
    return MoeConfig(
        experts=moe.experts,
        experts_per_token=moe.experts_per_token,
        intermediate=moe.intermediate_size,
        local_experts=moe.experts,
        shared_intermediate=moe.shared_intermediate_size,
        scoring=moe.scoring,
        correction=moe.scoring == "sigmoid",
        scale=moe.scale,
    )


def _missing(table: str, shape: Attention) -> NoReturn:
    raise ScenarioError(
        f"The architecture has {shape.attention} layers, so the model file needs a table {table!r}."
    )
