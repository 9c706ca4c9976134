"""How much KV each model saves, and which part of its design saves it.

    attention factor   bytes a token of REFERENCE GQA / bytes a token of the model's MLA, else 1
    mix factor         layers / layers whose KV grows with the prompt
    both               attention factor x mix factor: the limit for a long prompt
    factor at l        KV of REFERENCE in every layer / S_kv(l), state and windows counted

arXiv 2604.15039 gives 4.5x for MLA over GQA, 8x for a mix of 7:1 and 36x together (Ring-2.5-1T) and
does not say which GQA. REFERENCE is one of 8 KV heads with the dimensions that an MLA layer's
heads have (key 128 + 64 rotary, value 128): 4.44, 8 and 35.6. A model of GQA layers is compared
with itself, every layer full. The fixed state takes most of it back on short prompts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from harness.architecture import Architecture
from harness.attention import Gqa, Mla, SlidingWindow

REFERENCE = Gqa(kv_heads=8, key_dim=192, value_dim=128)
LENGTHS_TOKENS = (1024, 8192, 32_768, 131_072)


@dataclass(frozen=True, slots=True)
class Reduction:
    """One model's factors; ``at_tokens`` maps a prompt's length to the factor reached there."""

    model: str
    growing_layers: int
    layers: int
    attention: str
    reference_bytes_per_token: int
    attention_factor: float
    mix_factor: float
    both_factor: float
    at_tokens: dict[int, float]


def reduction(architecture: Architecture) -> Reduction | None:
    """The model's factors; None without a growing layer or where the file gives only bytes."""
    growing = [layer for layer in architecture.layers if layer.growing_bytes_per_token]
    shapes = {layer.kind: architecture.attention.get(layer.kind) for layer in growing}
    if not growing or None in shapes.values():
        return None
    own_bytes = sum(layer.growing_bytes_per_token for layer in growing) / len(growing)
    uses_mla = all(isinstance(shape, Mla) for shape in shapes.values())
    full = REFERENCE.layer("reference", architecture.kv_dtype).growing_bytes_per_token
    reference_bytes = full if uses_mla else round(own_bytes)
    every_layer = reference_bytes * len(architecture.layers)
    attention_factor = reference_bytes / own_bytes
    mix_factor = len(architecture.layers) / len(growing)
    return Reduction(
        model=architecture.name,
        growing_layers=len(growing),
        layers=len(architecture.layers),
        attention=_attention(architecture),
        reference_bytes_per_token=reference_bytes,
        attention_factor=attention_factor,
        mix_factor=mix_factor,
        both_factor=attention_factor * mix_factor,
        at_tokens={
            tokens: every_layer * tokens / architecture.kv_bytes(tokens)
            for tokens in LENGTHS_TOKENS
        },
    )


def reductions(architectures: Iterable[Architecture]) -> tuple[Reduction, ...]:
    """Those of every model that has factors, the largest first."""
    found = [one for one in map(reduction, architectures) if one is not None]
    return tuple(sorted(found, key=lambda one: (-one.both_factor, one.model)))


def _attention(architecture: Architecture) -> str:
    """The kinds of attention in words: "MLA + Lightning"."""
    names = {"mla": "MLA", "gqa": "GQA", "kda": "KDA", "gdn": "GDN", "mamba2": "Mamba-2"}
    shapes = [architecture.attention[kind] for kind in dict.fromkeys(_kinds(architecture))]
    words = [
        "SWA" if isinstance(shape, SlidingWindow) else names.get(shape.attention, "Lightning")
        for shape in sorted(shapes, key=lambda shape: not isinstance(shape, Mla | Gqa))
    ]
    return " + ".join(dict.fromkeys(words))


def _kinds(architecture: Architecture) -> list[str]:
    return [layer.kind for layer in architecture.layers if layer.kind in architecture.attention]
