"""The decoder: tokens in, KV in the cache, logits out.

A prompt is prefilled in chunks of any size, one sequence a call; decode takes one token of each of
several sequences a call. After each layer of a chunk the caller is told, and may send what the
chunk added to that layer's KV while the next layer computes; windows and states are worth sending
after the last chunk alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from harness.engine.reference.cache import Cache, LayerCache
from harness.engine.reference.config import (
    AttentionConfig,
    DeltaConfig,
    FfnConfig,
    GqaConfig,
    LightningConfig,
    MlaConfig,
    MlpConfig,
    ModelConfig,
)
from harness.engine.reference.ffn import mlp, moe
from harness.engine.reference.linear_layers import delta_layer, lightning_layer
from harness.engine.reference.rows import Rows, rms_norm
from harness.engine.reference.softmax_attention import grouped_attention, latent_attention

Weights = dict[str, Tensor]
OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _LayerWeights:
    attention_norm: Tensor
    ffn_norm: Tensor
    attention: Weights
    ffn: Weights


class Model:
    """``weights`` by the names of ``weights.parameters``."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._embedding = weights["embedding"]
        self._norm = weights["norm"]
        self._head = self._embedding if config.tied else weights["head"]
        self._layers = [_layer(weights, f"layers.{n}.") for n in range(len(config.layers))]

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def prefill(
        self, tokens: Sequence[int], cache: Cache, slot: int, on_layer: OnLayer | None = None
    ) -> Tensor:
        """Append a chunk to the sequence in ``slot``; the logits after its last token.

        ``on_layer(n)`` is called when layer ``n``'s KV of the chunk is final (on a GPU: is in the
        stream). ``cache.lengths[slot]`` counts the chunk already then.
        """  # [vocab]
        hidden = self.forward([tokens], cache, [slot], on_layer)
        return self.logits(hidden[0, -1])

    def decode(self, tokens: Sequence[int], cache: Cache, slots: Sequence[int]) -> Tensor:
        """Append one token to each sequence; the logits after it."""  # [batch, vocab]
        hidden = self.forward([[token] for token in tokens], cache, slots)
        return self.logits(hidden[:, -1])

    def forward(
        self,
        tokens: Sequence[Sequence[int]],
        cache: Cache,
        slots: Sequence[int],
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """The last hidden state of each token. EngineError where the cache has no room."""
        # [batch, tokens, hidden]
        count = len(tokens[0])
        cache.check_room(slots, count)
        rows = Rows(slots, [cache.lengths[slot] for slot in slots], count, self.device)
        for slot in slots:
            cache.lengths[slot] += count
        with torch.no_grad():
            x = embedding(torch.tensor(tokens, device=self.device), self._embedding)
            for index, layer in enumerate(self.config.layers):
                weights = self._layers[index]
                y = rms_norm(x, weights.attention_norm, self.config.eps)
                kept = cache.layers[index]
                y = _attend(y, layer.attention, weights.attention, kept, rows, self.config.eps)
                if on_layer is not None:
                    on_layer(index)
                x = x + y
                y = rms_norm(x, weights.ffn_norm, self.config.eps)
                x = x + _ffn(y, layer.ffn, weights.ffn)
            return rms_norm(x, self._norm, self.config.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] to [..., vocab], in float32."""
        with torch.no_grad():
            return linear(hidden, self._head).float()


def _layer(weights: Weights, prefix: str) -> _LayerWeights:
    return _LayerWeights(
        attention_norm=weights[f"{prefix}attention_norm"],
        ffn_norm=weights[f"{prefix}ffn_norm"],
        attention=_part(weights, f"{prefix}attention."),
        ffn=_part(weights, f"{prefix}ffn."),
    )


def _part(weights: Weights, prefix: str) -> Weights:
    return {
        name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)
    }


def _attend(
    x: Tensor, config: AttentionConfig, weights: Weights, cache: LayerCache, rows: Rows, eps: float
) -> Tensor:
    match config:
        case GqaConfig():
            return grouped_attention(x, config, weights, cache, rows, eps)
        case MlaConfig():
            return latent_attention(x, config, weights, cache, rows)
        case DeltaConfig():
            return delta_layer(x, config, weights, cache, rows, eps)
        case LightningConfig():
            return lightning_layer(x, config, weights, cache, rows, eps)


def _ffn(x: Tensor, config: FfnConfig, weights: Weights) -> Tensor:
    return mlp(x, weights) if isinstance(config, MlpConfig) else moe(x, config, weights)
