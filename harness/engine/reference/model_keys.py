"""A Hugging Face ``config.json`` as a ``ModelConfig``.

Which attention a layer has, and its KV, is read where the geometry is (``harness.model_families``);
here come the keys that only compute needs. A key that would change the arithmetic in a way that is
not computed (scaled positions) is refused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from harness.attention import Attention, Gqa, Lightning, Linear, Mla, SlidingWindow
from harness.core import ScenarioError
from harness.datafile import explain, parse_json_file
from harness.engine.reference.config import (
    AttentionConfig,
    DeltaConfig,
    FfnConfig,
    GqaConfig,
    LayerConfig,
    MlaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    Rope,
)
from harness.model_families import FAMILIES

_WHAT = "model config"
Count = Annotated[int, Field(ge=0, le=2**24)]

#: Queries and keys are normalised a head, without a key that says so.
QK_NORM = {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"}
#: Pairs of rotary channels are neighbours.
INTERLEAVED = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"}
#: All four projections of attention have a bias where one is asked for.
BIASED = {"LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
#: Families whose arithmetic is known here.
KNOWN = QK_NORM | INTERLEAVED | {
    "KimiLinearForCausalLM",
    "LlamaForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MistralForCausalLM",
}  # fmt: skip


def _any_of(*names: str, default: Any = None) -> Any:  # Any: a field's default, of its type
    return Field(default, validation_alias=AliasChoices(*names))


class ComputeKeys(BaseModel):
    """What families call by different names is one key."""

    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)

    hidden_size: Annotated[int, Field(ge=1)]
    vocab_size: Annotated[int, Field(ge=2)]
    num_attention_heads: Annotated[int, Field(ge=1)]
    intermediate_size: Count
    eps: float = _any_of("rms_norm_eps", "layernorm_epsilon", default=1e-6)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_theta: float | None = None
    swa_rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    attention_value_scale: float | None = None
    add_swa_attention_sink_bias: bool = False
    add_full_attention_sink_bias: bool = False
    linear_num_key_heads: Count = 0
    qk_nope_head_dim: Count = 0
    v_head_dim: Count = 0
    q_lora_rank: int | None = None
    mla_use_nope: bool = False
    experts: Count = _any_of("num_experts", "n_routed_experts", "num_local_experts", default=0)
    experts_per_token: int | None = _any_of("num_experts_per_tok", "num_experts_per_token")
    moe_intermediate_size: Count = 0
    shared_experts: int | None = _any_of("n_shared_experts", "num_shared_experts")
    shared_expert_intermediate_size: Count = 0
    first_k_dense_replace: Count = 0
    moe_layer_freq: int | list[int] | None = None
    mlp_only_layers: list[int] = []
    decoder_sparse_step: Annotated[int, Field(ge=1)] = 1
    scoring: Literal["softmax", "sigmoid"] | None = _any_of(
        "scoring_func", "moe_router_activation_func"
    )
    topk_method: str | None = None
    norm_topk_prob: bool = _any_of("norm_topk_prob", "moe_renormalize", default=False)
    routed_scaling_factor: float | None = None
    n_group: int | None = _any_of("n_group", "num_expert_group")
    topk_group: int | None = None


class _FamilyFile(BaseModel):
    model_config = ConfigDict(extra="allow")

    architectures: Annotated[list[str], Field(min_length=1)]


def read_family(folder: Path) -> tuple[str, dict[str, Any]]:
    """The family's name, and all keys of the folder's ``config.json``."""
    path = folder / "config.json"
    file = parse_json_file(path, _WHAT, _FamilyFile)
    family, keys = file.architectures[0], file.model_extra or {}
    if family not in KNOWN:
        raise ScenarioError(
            f"The {_WHAT} {path} is of a {family}, which the reference engine does not compute; it "
            f"computes {', '.join(sorted(KNOWN))}."
        )
    return family, keys


def read_model(folder: Path) -> ModelConfig:
    """The model of a folder with a ``config.json``. ScenarioError names the key that is wrong."""
    family, keys = read_family(folder)
    where = f"the {_WHAT} {folder / 'config.json'}"
    try:
        attention = FAMILIES[family].model_validate(keys).attention()
        compute = ComputeKeys.model_validate(keys)
    except ValidationError as error:
        raise ScenarioError(explain(error, ComputeKeys, where)) from error
    except ValueError as error:
        raise ScenarioError(f"{where[0].upper()}{where[1:]} is wrong: {error}.") from error
    if compute.attention_bias and family not in BIASED:
        raise ScenarioError(
            f"'attention_bias' in {where} is true, which the reference engine does not compute for "
            f"a {family}."
        )
    layers = [
        LayerConfig(_attention(family, shape, compute, where), _ffn(compute, family, index))
        for index, shape in enumerate(attention)
    ]
    return ModelConfig(
        name=folder.resolve().name,
        hidden_size=compute.hidden_size,
        vocab_size=compute.vocab_size,
        layers=tuple(layers),
        eps=compute.eps,
        tied=compute.tie_word_embeddings,
    )


def _attention(family: str, shape: Attention, keys: ComputeKeys, where: str) -> AttentionConfig:
    match shape:
        case Mla():
            return MlaConfig(
                heads=keys.num_attention_heads,
                latent_rank=shape.latent_rank,
                rope_dim=shape.rope_dim,
                nope_dim=keys.qk_nope_head_dim,
                value_dim=keys.v_head_dim,
                query_rank=keys.q_lora_rank,
                rope=None if keys.mla_use_nope else _rope(family, shape.rope_dim, keys, where),
            )
        case Gqa() | SlidingWindow():
            return _gqa(family, shape, keys, where)
        case Linear(attention="gdn") | Linear(attention="kda"):
            assert shape.attention != "mamba2"
            return DeltaConfig(
                shape.attention,
                shape.heads,
                keys.linear_num_key_heads or shape.heads,
                shape.key_dim,
                shape.value_dim,
                shape.conv_kernel,
            )
        case Linear() | Lightning():
            raise ScenarioError(f"No {shape.attention} layer is computed as {where} has it.")


def _gqa(family: str, shape: Gqa | SlidingWindow, keys: ComputeKeys, where: str) -> GqaConfig:
    windowed = isinstance(shape, SlidingWindow)
    sinks = keys.add_swa_attention_sink_bias if windowed else keys.add_full_attention_sink_bias
    factor = _rope_keys(keys, windowed=windowed).get("partial_rotary_factor")
    factor = keys.partial_rotary_factor if factor is None else factor
    dim = int(shape.key_dim * (1.0 if factor is None else factor))
    return GqaConfig(
        heads=keys.num_attention_heads,
        kv_heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        rope=_rope(family, dim, keys, where, windowed=windowed),
        window_tokens=shape.window_tokens if isinstance(shape, SlidingWindow) else None,
        qk_norm=family in QK_NORM,
        gated=family == "Qwen3NextForCausalLM",
        bias=keys.attention_bias,
        sinks=sinks,
        value_scale=1.0 if keys.attention_value_scale is None else keys.attention_value_scale,
    )


def _rope_keys(keys: ComputeKeys, *, windowed: bool) -> dict[str, Any]:
    """``rope_parameters``, which may be given for each kind of layer."""
    found = keys.rope_parameters or {}
    one = found.get("sliding_attention" if windowed else "full_attention", found)
    assert isinstance(one, dict)
    return one


def _rope(
    family: str, dim: int, keys: ComputeKeys, where: str, *, windowed: bool = False
) -> Rope | None:
    of_kind = _rope_keys(keys, windowed=windowed)
    kinds = [of_kind.get("rope_type"), (keys.rope_scaling or {}).get("type")]
    kinds.append((keys.rope_scaling or {}).get("rope_type"))
    for kind in kinds:
        if kind not in (None, "default"):
            raise ScenarioError(
                f"{where[0].upper()}{where[1:]} scales positions ({kind!r}), which the reference "
                "engine does not; take 'rope_scaling' out to compute short contexts."
            )
    theta = keys.swa_rope_theta if windowed and keys.swa_rope_theta else keys.rope_theta
    theta = of_kind.get("rope_theta") or theta or 10_000.0
    return Rope(float(theta), dim, family in INTERLEAVED) if dim else None


def _ffn(keys: ComputeKeys, family: str, layer: int) -> FfnConfig:
    if not _is_sparse(keys, layer):
        return MlpConfig(keys.intermediate_size)
    sigmoid = keys.scoring == "sigmoid" or family in ("DeepseekV3ForCausalLM",)
    shared = keys.shared_expert_intermediate_size
    grouped = sigmoid or keys.topk_method == "group_limited_greedy"
    return MoeConfig(
        experts=keys.experts,
        experts_per_token=keys.experts_per_token or 1,
        intermediate=keys.moe_intermediate_size,
        local_experts=keys.experts,
        shared_intermediate=shared or (keys.shared_experts or 0) * keys.moe_intermediate_size,
        scoring="sigmoid" if sigmoid else "softmax",
        correction=sigmoid,
        groups=(keys.n_group or 1) if grouped else 1,
        groups_per_token=(keys.topk_group or 1) if grouped else 1,
        normalise=keys.norm_topk_prob and family != "DeepseekV2ForCausalLM",
        scale=1.0 if keys.routed_scaling_factor is None else keys.routed_scaling_factor,
        shared_gate=bool(shared),
    )


def _is_sparse(keys: ComputeKeys, layer: int) -> bool:
    flags: Sequence[int] | int | None = keys.moe_layer_freq
    if not keys.experts or layer < keys.first_k_dense_replace or layer in keys.mlp_only_layers:
        return False
    if isinstance(flags, list):
        return bool(flags[layer])
    return (layer + 1) % keys.decoder_sparse_step == 0
