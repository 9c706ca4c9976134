"""The attention of every layer from the keys of a Hugging Face ``config.json``, family by family.

The keys are those that serving engines read. Layers count from 0 but in Kimi Linear's lists, which
count from 1. Draft layers (``num_nextn_predict_layers``) are left out: what they hold is no part of
a prefill's hand-over.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from harness.architecture import MAX_LAYERS, Dimension, WindowTokens
from harness.attention import Attention, Gqa, Lightning, Linear, Mla, SlidingWindow
from harness.datafile import shortened

HiddenSize = Annotated[int, Field(ge=1, le=2**24)]
ConvKernel = Annotated[int, Field(ge=2, le=64)]
LayerNumbers = Annotated[list[int], Field(max_length=MAX_LAYERS)]
LayerTypes = Annotated[list[str], Field(min_length=1, max_length=MAX_LAYERS)]
LayerFlags = Annotated[list[Literal[0, 1]], Field(min_length=1, max_length=MAX_LAYERS)]


#: A config holds many keys that say nothing of KV.
_LOOSE = ConfigDict(extra="ignore", strict=True)


class _Keys(BaseModel):
    """What every family has. Its ``attention()`` is the attention of each layer in order, or a
    ValueError that names the keys that do not agree."""

    model_config = _LOOSE

    num_hidden_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]

    def _grouped(
        self, size: int, others: Attention, last: Attention, rest: Attention
    ) -> list[Attention]:
        """Groups of ``size`` layers, each closed by ``last``; ``rest`` after the last whole one."""
        groups, remaining = divmod(self.num_hidden_layers, size)
        return ([others] * (size - 1) + [last]) * groups + [rest] * remaining

    def _listed(
        self, key: str, listed: Sequence[object], kinds: dict[Any, Attention]
    ) -> list[Attention]:
        """The kinds that the list under ``key`` names, one a layer."""
        if len(listed) != self.num_hidden_layers:
            raise ValueError(
                f"'{key}' lists {len(listed)} layers, 'num_hidden_layers' is "
                f"{self.num_hidden_layers}"
            )
        for index, name in enumerate(listed):
            if name not in kinds:
                known = ", ".join(map(repr, kinds))
                raise ValueError(f"'{key}[{index}]' is {shortened(name)}, not one of {known}")
        return [kinds[name] for name in listed]


class _MlaKeys(_Keys):
    """DeepSeek-V2 and -V3, Kimi-K2."""

    kv_lora_rank: Dimension
    qk_rope_head_dim: Annotated[int, Field(ge=0, le=2**16)]

    def mla(self) -> Mla:
        return Mla(self.kv_lora_rank, self.qk_rope_head_dim)

    def attention(self) -> Sequence[Attention]:
        return [self.mla()] * self.num_hidden_layers


class _KdaKeys(BaseModel):
    model_config = _LOOSE

    kda_layers: LayerNumbers
    full_attn_layers: LayerNumbers
    num_heads: Dimension
    head_dim: Dimension
    short_conv_kernel_size: ConvKernel


class _KimiLinearKeys(_MlaKeys):
    """KDA with MLA at listed layers; q, k and v each pass the convolution."""

    linear_attn_config: _KdaKeys

    def attention(self) -> Sequence[Attention]:
        keys = self.linear_attn_config
        numbers = sorted(keys.kda_layers + keys.full_attn_layers)
        if numbers != list(range(1, self.num_hidden_layers + 1)):
            raise ValueError(
                "'linear_attn_config.kda_layers' and 'full_attn_layers' together must name each "
                f"layer from 1 to {self.num_hidden_layers} ('num_hidden_layers') once"
            )
        heads, dim = keys.num_heads, keys.head_dim
        kda = Linear("kda", heads, dim, dim, keys.short_conv_kernel_size, 3 * heads * dim)
        full = set(keys.full_attn_layers)
        return [self.mla() if number in full else kda for number in numbers]


class _GqaKeys(_Keys):
    """Llama and the like: every layer sees the whole context."""

    num_attention_heads: Dimension
    num_key_value_heads: Dimension | None = None
    head_dim: Dimension | None = None
    hidden_size: HiddenSize | None = None

    def head_size(self) -> int:
        """``head_dim``, which defaults to the hidden size over the query heads."""
        if self.head_dim is not None:
            return self.head_dim
        if self.hidden_size is None:
            raise ValueError("neither 'head_dim' nor 'hidden_size' is given")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("'hidden_size' is no multiple of 'num_attention_heads'")
        return self.hidden_size // self.num_attention_heads

    def gqa(self) -> Gqa:
        size, heads = self.head_size(), self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % heads:
            raise ValueError("'num_attention_heads' is no multiple of 'num_key_value_heads'")
        return Gqa(heads, size, size)

    def sliding(self, window_tokens: int) -> SlidingWindow:
        full = self.gqa()
        return SlidingWindow(full.kv_heads, full.key_dim, full.value_dim, window_tokens)

    def lightning(self) -> Lightning:
        """Lightning attention has keys and values for every query head."""
        return Lightning(self.num_attention_heads, self.head_size(), self.head_size())

    def attention(self) -> Sequence[Attention]:
        return [self.gqa()] * self.num_hidden_layers


class _MistralKeys(_GqaKeys):
    """Every layer has the window, where there is one."""

    sliding_window: WindowTokens | None = None

    def attention(self) -> Sequence[Attention]:
        one = self.gqa() if self.sliding_window is None else self.sliding(self.sliding_window)
        return [one] * self.num_hidden_layers


class _QwenKeys(_GqaKeys):
    """Qwen2 and Qwen3: a window only where asked for, from layer ``max_window_layers`` on."""

    use_sliding_window: bool = False
    sliding_window: WindowTokens | None = None
    max_window_layers: Annotated[int, Field(ge=0)] | None = None
    layer_types: LayerTypes | None = None

    def attention(self) -> Sequence[Attention]:
        if not self.use_sliding_window or self.sliding_window is None:
            return super().attention()
        sliding = self.sliding(self.sliding_window)
        if self.layer_types is not None:
            return self._listed(
                "layer_types",
                self.layer_types,
                {"full_attention": self.gqa(), "sliding_attention": sliding},
            )
        if self.max_window_layers is None:
            raise ValueError("'use_sliding_window' needs 'layer_types' or 'max_window_layers'")
        layers = range(self.num_hidden_layers)
        return [sliding if i >= self.max_window_layers else self.gqa() for i in layers]


class _GptOssKeys(_GqaKeys):
    sliding_window: WindowTokens
    layer_types: LayerTypes

    def attention(self) -> Sequence[Attention]:
        sliding = self.sliding(self.sliding_window)
        return self._listed(
            "layer_types",
            self.layer_types,
            {"full_attention": self.gqa(), "sliding_attention": sliding},
        )


class _MimoKeys(_Keys):
    """MiMo-V2: 1 in ``hybrid_layer_pattern`` is a sliding window, with heads of its own."""

    hybrid_layer_pattern: LayerFlags
    num_key_value_heads: Dimension
    head_dim: Dimension
    v_head_dim: Dimension
    swa_num_key_value_heads: Dimension
    swa_head_dim: Dimension
    swa_v_head_dim: Dimension
    sliding_window: WindowTokens = Field(
        validation_alias=AliasChoices("sliding_window", "sliding_window_size")
    )

    def attention(self) -> Sequence[Attention]:
        heads, key, value = self.swa_num_key_value_heads, self.swa_head_dim, self.swa_v_head_dim
        return self._listed(
            "hybrid_layer_pattern",
            self.hybrid_layer_pattern,
            {
                0: Gqa(self.num_key_value_heads, self.head_dim, self.v_head_dim),
                1: SlidingWindow(heads, key, value, self.sliding_window),
            },
        )


class _Qwen3NextKeys(_GqaKeys):
    """Gated DeltaNet with full attention closing each interval; q, k and v are convolved."""

    layer_types: LayerTypes | None = None
    full_attention_interval: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    linear_num_key_heads: Dimension
    linear_num_value_heads: Dimension
    linear_key_head_dim: Dimension
    linear_value_head_dim: Dimension
    linear_conv_kernel_dim: ConvKernel
    mamba_ssm_dtype: Literal["float32"] = "float32"

    def attention(self) -> Sequence[Attention]:
        queries_and_keys = 2 * self.linear_num_key_heads * self.linear_key_head_dim
        gdn = Linear(
            "gdn",
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
            queries_and_keys + self.linear_num_value_heads * self.linear_value_head_dim,
        )
        if self.layer_types is not None:
            return self._listed(
                "layer_types",
                self.layer_types,
                {"full_attention": self.gqa(), "linear_attention": gdn},
            )
        if self.full_attention_interval is None:
            raise ValueError("neither 'layer_types' nor 'full_attention_interval' is given")
        return self._grouped(self.full_attention_interval, gdn, self.gqa(), rest=gdn)


class _RingLinearKeys(_GqaKeys):
    """Ring-linear 2.0: Lightning attention with GQA closing each group."""

    layer_group_size: Annotated[int, Field(ge=1, le=MAX_LAYERS)]

    def attention(self) -> Sequence[Attention]:
        full = self.gqa()
        return self._grouped(self.layer_group_size, self.lightning(), full, rest=full)


class _Ring25Keys(_GqaKeys):
    """Ling and Ring 2.5: Lightning attention with MLA closing each group."""

    layer_group_size: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    kv_lora_rank: Dimension
    qk_rope_head_dim: Annotated[int, Field(ge=0, le=2**16)]

    def attention(self) -> Sequence[Attention]:
        mla = Mla(self.kv_lora_rank, self.qk_rope_head_dim)
        return self._grouped(self.layer_group_size, self.lightning(), mla, rest=mla)


class _MiniMaxKeys(_GqaKeys):
    """MiniMax-Text-01 and M1: 1 in ``attn_type_list`` is GQA, 0 Lightning attention."""

    attn_type_list: LayerFlags | None = None
    layer_types: LayerTypes | None = None

    def attention(self) -> Sequence[Attention]:
        if self.attn_type_list is not None:
            flags = self.attn_type_list
            return self._listed("attn_type_list", flags, {0: self.lightning(), 1: self.gqa()})
        if self.layer_types is None:
            raise ValueError("neither 'attn_type_list' nor 'layer_types' is given")
        return self._listed(
            "layer_types",
            self.layer_types,
            {"full_attention": self.gqa(), "linear_attention": self.lightning()},
        )


#: By the first name in ``architectures``.
FAMILIES: dict[str, type[_MlaKeys | _GqaKeys | _MimoKeys]] = {
    "BailingMoeLinearV2ForCausalLM": _RingLinearKeys,
    "BailingMoeV2ForCausalLM": _GqaKeys,
    "BailingMoeV2_5ForCausalLM": _Ring25Keys,
    "DeepseekV2ForCausalLM": _MlaKeys,
    "DeepseekV3ForCausalLM": _MlaKeys,
    "GptOssForCausalLM": _GptOssKeys,
    "KimiK25ForConditionalGeneration": _MlaKeys,
    "KimiK3ForConditionalGeneration": _KimiLinearKeys,
    "KimiLinearForCausalLM": _KimiLinearKeys,
    "LlamaForCausalLM": _GqaKeys,
    "MiMoV2FlashForCausalLM": _MimoKeys,
    "MiMoV2ForCausalLM": _MimoKeys,
    "MiniMaxM1ForCausalLM": _MiniMaxKeys,
    "MiniMaxM2ForCausalLM": _GqaKeys,
    "MiniMaxText01ForCausalLM": _MiniMaxKeys,
    "MistralForCausalLM": _MistralKeys,
    "MixtralForCausalLM": _MistralKeys,
    "Qwen2ForCausalLM": _QwenKeys,
    "Qwen2MoeForCausalLM": _QwenKeys,
    "Qwen3ForCausalLM": _QwenKeys,
    "Qwen3MoeForCausalLM": _QwenKeys,
    "Qwen3NextForCausalLM": _Qwen3NextKeys,
    "Qwen3_5ForCausalLM": _Qwen3NextKeys,
    "Qwen3_5ForConditionalGeneration": _Qwen3NextKeys,
    "Qwen3_5MoeForCausalLM": _Qwen3NextKeys,
    "Qwen3_5MoeForConditionalGeneration": _Qwen3NextKeys,
}
