"""KV geometry of a model: what every layer must hand over after a prefill of ``tokens`` tokens.

    S_kv(l) = sum over layers of  growing_bytes_per_token * l
                                + window_bytes_per_token * min(l, window_tokens)
                                + fixed_bytes                                          [bytes]

``growing`` is full-attention KV (GQA, MLA), ``window`` is sliding-window KV, ``fixed`` is the
recurrent state of a linear-attention layer. The fixed state counts: Phi_kv of arXiv 2604.15039
(Eq. 1, Tables 3 and 5) is consistent only with it. Layers are in the model's order, since a
layer-wise transfer sends them in that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.core import ScenarioError
from harness.datafile import parse_json_file

MAX_LAYERS = 4096
MAX_LAYER_BYTES = 2**50

ByteCount = Annotated[int, Field(ge=0, le=MAX_LAYER_BYTES)]
TokenCount = Annotated[int, Field(ge=0, le=2**31)]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's state after prefill; ``kind`` is the attention it uses ("mla", "kda", ...)."""

    kind: str
    growing_bytes_per_token: int
    window_tokens: int
    window_bytes_per_token: int
    fixed_bytes: int

    def kv_bytes(self, tokens: int) -> int:
        return (
            self.growing_bytes_per_token * tokens
            + self.window_bytes_per_token * min(tokens, self.window_tokens)
            + self.fixed_bytes
        )


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as its KV, ``layers`` in model order; ``sources`` says how each kind is known."""

    name: str
    path: Path
    layers: tuple[Layer, ...]
    sources: dict[str, str]
    #: Sums over the layers, since S_kv is asked for once per request and simulated event.
    _growing_bytes_per_token: int = field(init=False, repr=False, compare=False)
    _fixed_bytes: int = field(init=False, repr=False, compare=False)
    _windowed: tuple[Layer, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        growing = sum(layer.growing_bytes_per_token for layer in self.layers)
        windowed = tuple(layer for layer in self.layers if layer.window_bytes_per_token)
        object.__setattr__(self, "_growing_bytes_per_token", growing)
        object.__setattr__(self, "_fixed_bytes", sum(layer.fixed_bytes for layer in self.layers))
        object.__setattr__(self, "_windowed", windowed)

    def kv_bytes(self, tokens: int) -> int:
        """S_kv(tokens): all bytes of one request's KV and state."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        window = sum(
            layer.window_bytes_per_token * min(tokens, layer.window_tokens)
            for layer in self._windowed
        )
        return self._growing_bytes_per_token * tokens + window + self._fixed_bytes

    def layer_kv_bytes(self, tokens: int) -> tuple[int, ...]:
        """Bytes of each layer after ``tokens`` tokens, in layer order."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        return tuple(layer.kv_bytes(tokens) for layer in self.layers)


class LayerKindFile(BaseModel):
    """One entry of ``layer_kinds`` in an architecture file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    growing_bytes_per_token: ByteCount = 0
    window_tokens: TokenCount = 0
    window_bytes_per_token: ByteCount = 0
    fixed_bytes: ByteCount = 0
    source: Annotated[str, Field(min_length=1)]


class ArchitectureFile(BaseModel):
    """The JSON form: kinds of layers once, then the kind of each layer in order."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[1]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    notes: str = ""
    layer_kinds: dict[str, LayerKindFile]
    layers: Annotated[list[str], Field(min_length=1, max_length=MAX_LAYERS)]


def load_architecture(path: Path) -> Architecture:
    """Read an architecture file; ScenarioError names the file and the key that is wrong."""
    what = "architecture file"
    file = parse_json_file(path, what, ArchitectureFile)
    kinds = {
        kind: Layer(
            kind,
            entry.growing_bytes_per_token,
            entry.window_tokens,
            entry.window_bytes_per_token,
            entry.fixed_bytes,
        )
        for kind, entry in file.layer_kinds.items()
    }
    for index, kind in enumerate(file.layers):
        if kind not in kinds:
            raise ScenarioError(
                f"'layers[{index}]' in the {what} {path} is {kind!r}, which 'layer_kinds' does not "
                f"define; it defines {', '.join(map(repr, sorted(kinds))) or 'nothing'}."
            )
    if unused := sorted(set(kinds) - set(file.layers)):
        raise ScenarioError(
            f"'layer_kinds.{unused[0]}' in the {what} {path} is used by no layer; "
            "add it to 'layers' or remove it."
        )
    architecture = Architecture(
        name=file.name,
        path=path,
        layers=tuple(kinds[kind] for kind in file.layers),
        sources={kind: entry.source for kind, entry in file.layer_kinds.items()},
    )
    if architecture.kv_bytes(1) == 0:
        raise ScenarioError(
            f"The {what} {path} gives no layer any KV bytes, so nothing would move between "
            "prefill and decode; set 'growing_bytes_per_token' or 'fixed_bytes'."
        )
    return architecture


def wire_layer_bytes(layer_bytes: Sequence[int], byte_scale: float) -> tuple[int, ...]:
    """Each layer's bytes on the wire, such that they sum to ``round(total / byte_scale)``.

    Cumulative sums are rounded, not the layers, so that no rounding error adds up.
    """
    if not byte_scale > 0:
        raise ValueError(f"byte_scale must be positive, got {byte_scale}")
    wire, total, sent = [], 0, 0
    for size in layer_bytes:
        total += size
        reached = round(total / byte_scale)
        wire.append(reached - sent)
        sent = reached
    return tuple(wire)
