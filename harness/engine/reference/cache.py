"""What requests leave on the device: KV that grows, windows, and states; and their bytes.

A cache has ``slots``, one a sequence, of which all layers hold a part (byte layout of one slot):

    gqa             [tokens, keys of all KV heads | values of all KV heads]     KV dtype
    mla             [tokens, latent | rotary key]                               KV dtype
    sliding_window  the last ``window_tokens`` rows as in gqa, oldest first     KV dtype
    kda, gdn        [heads, key, value] fp32, then [kernel - 1, channels]       bf16
    lightning       [heads, key, value] fp32

These are the bytes of ``harness.attention`` exactly. Numbers are rounded to the cache's dtype when
they are written and always read back from it, so a prefill computes from the very numbers that it
hands over. Growing KV is exported for a range of tokens, the rest only whole and of one length.
A window is a ring on the device: position p lies at p mod window_tokens.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from harness.core import EngineError
from harness.engine.reference.config import (
    DeltaConfig,
    GqaConfig,
    LightningConfig,
    MlaConfig,
    ModelConfig,
)

#: "fp32" is for comparisons alone: no serving engine caches it, and no geometry counts it.
CacheDtype = Literal["bf16", "fp8", "fp32"]
_KV: dict[CacheDtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp32": torch.float32,
}
_CONVOLUTION: dict[CacheDtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp32": torch.float32,
}


class LayerCache:
    """One layer's tensors, the slots first. ``kv`` is None for a layer with a state."""

    def __init__(
        self,
        attention: GqaConfig | MlaConfig | DeltaConfig | LightningConfig,
        slots: int,
        capacity_tokens: int,
        dtype: CacheDtype,
        device: torch.device,
    ) -> None:
        self.window_tokens = attention.window_tokens if isinstance(attention, GqaConfig) else None
        self.kv: Tensor | None = None  # [slots, tokens or window, width]
        self.states: list[Tensor] = []
        if isinstance(attention, GqaConfig | MlaConfig):
            rows = self.window_tokens or capacity_tokens
            width = _width(attention)
            self.kv = torch.zeros(slots, rows, width, dtype=_KV[dtype], device=device)
            return
        heads, key, value = attention.heads, attention.key_dim, attention.value_dim
        self.states = [torch.zeros(slots, heads, key, value, device=device)]
        if isinstance(attention, DeltaConfig):
            shape = (slots, attention.conv_kernel - 1, attention.conv_channels)
            self.states.append(torch.zeros(shape, dtype=_CONVOLUTION[dtype], device=device))

    @property
    def grows(self) -> bool:
        """Whether the layer's KV is of a range of tokens; else it is of one length."""
        return self.kv is not None and self.window_tokens is None


class Cache:
    """All layers of all slots. ``lengths`` are the tokens in each; a slot begins empty, and is made
    so again by ``clear``."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        capacity_tokens: int,
        *,
        dtype: CacheDtype = "bf16",
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.device = torch.device(device)
        self.lengths = [0] * slots
        self.layers = [
            LayerCache(layer.attention, slots, capacity_tokens, dtype, self.device)
            for layer in config.layers
        ]

    def layer_capacity_bytes(self, layer: int) -> int:
        """The most that one slot's layer can hold."""
        one = self.layers[layer]
        parts = one.states if one.kv is None else [one.kv]
        return sum(part[0].numel() * part.element_size() for part in parts)

    def clear(self, slot: int) -> None:
        """Make a slot ready for another sequence."""
        self.lengths[slot] = 0
        for layer in self.layers:
            for state in layer.states:
                state[slot].zero_()

    def check_room(self, slots: Sequence[int], tokens: int) -> None:
        """EngineError where ``tokens`` more do not fit into a slot."""
        for slot in slots:
            if self.lengths[slot] + tokens > self.capacity_tokens:
                raise EngineError(
                    f"cache: slot {slot} holds {self.lengths[slot]} tokens and has room for "
                    f"{self.capacity_tokens}; {tokens} more do not fit. Give the engine a larger "
                    "context."
                )

    def export_kv(self, slot: int, layer: int, start: int, end: int) -> Tensor:
        """Growing KV of tokens ``start`` to ``end``: a view of the device's bytes, no copy."""
        # [bytes] uint8
        kv = self._growing(layer)
        assert 0 <= start <= end <= self.capacity_tokens, (start, end)
        return _bytes(kv[slot, start:end])

    def import_kv(self, slot: int, layer: int, start: int, data: Tensor) -> None:
        """Write what ``export_kv`` gave, from token ``start`` on. EngineError at a wrong size."""
        kv = self._growing(layer)
        row_bytes = kv.shape[-1] * kv.element_size()
        tokens, rest = divmod(data.numel(), row_bytes)
        if rest or start + tokens > self.capacity_tokens:
            raise EngineError(
                f"cache: {data.numel()} bytes of layer {layer} are no whole tokens of {row_bytes} "
                f"bytes, or more than fit from token {start} on: the two ends disagree"
            )
        _bytes(kv[slot, start : start + tokens]).copy_(data)

    def export_state(self, slot: int, layer: int) -> Tensor:
        """The layer's window or state after the slot's last token: a copy."""  # [bytes] uint8
        one = self.layers[layer]
        if one.kv is None:
            return torch.cat([_bytes(state[slot]) for state in one.states])
        return _bytes(one.kv[slot, self._ring(slot, one)])

    def import_state(self, slot: int, layer: int, tokens: int, data: Tensor) -> None:
        """Write what ``export_state`` gave after ``tokens`` tokens. EngineError at a wrong size."""
        one = self.layers[layer]
        if one.kv is None:
            parts = [_bytes(state[slot]) for state in one.states]
            self._check_size(layer, data, sum(part.numel() for part in parts))
            for part, piece in zip(parts, data.split([p.numel() for p in parts]), strict=True):
                part.copy_(piece)
            return
        rows = _ring_rows(tokens, one.window_tokens, self.device)
        row_bytes = one.kv.shape[-1] * one.kv.element_size()
        self._check_size(layer, data, len(rows) * row_bytes)
        # Through a fresh tensor: received bytes need not be aligned.
        kept = torch.empty(len(rows), one.kv.shape[-1], dtype=one.kv.dtype, device=self.device)
        _bytes(kept).copy_(data)
        one.kv[slot, rows] = kept

    def export_layer(self, slot: int, layer: int, resident_tokens: int = 0) -> Tensor:
        """All of a layer that must move after the slot's last token, where the growing KV of the
        first ``resident_tokens`` lies at the destination: ``Layer.kv_bytes``."""  # [bytes] uint8
        if self.layers[layer].grows:
            return self.export_kv(slot, layer, resident_tokens, self.lengths[slot])
        return self.export_state(slot, layer)

    def import_layer(
        self, slot: int, layer: int, tokens: int, data: Tensor, resident_tokens: int = 0
    ) -> None:
        """The reverse of ``export_layer`` after ``tokens`` tokens. The caller sets ``lengths`` once
        all layers are in."""
        if not self.layers[layer].grows:
            self.import_state(slot, layer, tokens, data)
            return
        kv = self._growing(layer)
        row_bytes = kv.shape[-1] * kv.element_size()
        self._check_size(layer, data, (tokens - resident_tokens) * row_bytes)
        self.import_kv(slot, layer, resident_tokens, data)

    def _growing(self, layer: int) -> Tensor:
        kv = self.layers[layer].kv
        assert kv is not None, f"layer {layer} has a state"
        assert self.layers[layer].grows, f"layer {layer} has a window"
        return kv

    def _ring(self, slot: int, layer: LayerCache) -> Tensor:
        return _ring_rows(self.lengths[slot], layer.window_tokens, self.device)

    def _check_size(self, layer: int, data: Tensor, expected: int) -> None:
        if data.numel() != expected:
            raise EngineError(
                f"cache: {data.numel()} bytes came for layer {layer}, whose geometry is {expected} "
                "bytes: the two ends disagree"
            )


def _ring_rows(tokens: int, window_tokens: int | None, device: torch.device) -> Tensor:
    """Where the last tokens lie in a ring, oldest first."""  # [min(tokens, window_tokens)]
    assert window_tokens is not None
    first = max(0, tokens - window_tokens)
    return torch.arange(first, tokens, device=device) % window_tokens


def _width(attention: GqaConfig | MlaConfig) -> int:
    if isinstance(attention, MlaConfig):
        return attention.latent_rank + attention.rope_dim
    return attention.kv_heads * (attention.key_dim + attention.value_dim)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8).view(-1)
