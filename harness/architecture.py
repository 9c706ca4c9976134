"""KV geometry of a model: what every layer must hand over after a prefill of ``tokens`` tokens.

    S_kv(l) = sum over layers of  growing_bytes_per_token * l
                                + window_bytes_per_token * min(l, window_tokens)
                                + fixed_bytes                                          [bytes]

``growing`` is full-attention KV (GQA, MLA), ``window`` is sliding-window KV, ``fixed`` is the
recurrent state of a linear-attention layer. The fixed state counts: Phi_kv of arXiv 2604.15039
(Eq. 1, Tables 3 and 5) is consistent only with it. Layers are in the model's order, since a
layer-wise transfer sends them in that order.

An architecture file (JSON, schema version 1) names the kinds of layers once, each by its attention
and shape (``harness.attention`` gives the bytes for a KV dtype) or directly by its bytes, which are
then those of bf16 KV; and the kind of every layer in order.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.attention import (
    DEFAULT_KV_DTYPE,
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
from harness.datafile import explain, parse_json_file, printable, shortened

MAX_LAYERS = 4096
MAX_LAYER_BYTES = 2**50

FloatArray = NDArray[np.float64]

ByteCount = Annotated[int, Field(ge=0, le=MAX_LAYER_BYTES)]
Dimension = Annotated[int, Field(ge=1, le=2**16)]
WindowTokens = Annotated[int, Field(ge=1, le=2**31)]
Text = Annotated[str, Field(min_length=1)]

_WHAT = "architecture file"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as its KV, ``layers`` in model order; ``sources`` says how each kind is known.

    ``attention`` is the shape of each kind, where the file gives one instead of bytes.
    """

    name: str
    path: Path
    layers: tuple[Layer, ...]
    sources: dict[str, str]
    kv_dtype: KvDtype = DEFAULT_KV_DTYPE
    attention: dict[str, Attention] = field(default_factory=dict)
    #: Sums over the layers, since S_kv is asked for once per request and simulated event.
    _growing_bytes_per_token: int = field(init=False, repr=False, compare=False)
    _fixed_bytes: int = field(init=False, repr=False, compare=False)
    #: (window_tokens, bytes per token) of all layers with a window of that length
    _windows: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        windows: Counter[int] = Counter()
        for layer in self.layers:
            windows[layer.window_tokens] += layer.window_bytes_per_token
        growing = sum(layer.growing_bytes_per_token for layer in self.layers)
        object.__setattr__(self, "_growing_bytes_per_token", growing)
        object.__setattr__(self, "_fixed_bytes", sum(layer.fixed_bytes for layer in self.layers))
        object.__setattr__(self, "_windows", tuple((w, b) for w, b in windows.items() if w and b))

    @property
    def kind_counts(self) -> dict[Layer, int]:
        """How many layers there are of each kind, in the order in which they first occur."""
        return dict(Counter(self.layers))

    def kv_bytes(self, tokens: int) -> int:
        """S_kv(tokens): all bytes of one request's KV and state."""
        return self.moved_bytes(tokens, 0)

    def moved_bytes(self, total_tokens: int, resident_tokens: int) -> int:
        """Bytes that must cross when KV of the first ``resident_tokens`` lies at the destination.

        Growing KV moves for the rest of the prompt only. The window and the recurrent state move
        whole: both are of the end of the prompt, and a state is of no use at another length.
        """
        if total_tokens < 0 or not 0 <= resident_tokens <= total_tokens:
            raise ValueError(
                f"tokens must not be negative, nor more resident than there are: got "
                f"{total_tokens} in all, {resident_tokens} resident"
            )
        moved = self._growing_bytes_per_token * (total_tokens - resident_tokens)
        for window_tokens, bytes_per_token in self._windows:
            moved += bytes_per_token * min(total_tokens, window_tokens)
        return moved + self._fixed_bytes

    def kv_bytes_array(self, tokens: ArrayLike) -> FloatArray:
        """``kv_bytes`` of each length; fractions of a token count as fractions. # [...]"""
        return self.moved_bytes_array(tokens, 0.0)

    def moved_bytes_array(self, total_tokens: ArrayLike, resident_tokens: ArrayLike) -> FloatArray:
        """``moved_bytes`` of each pair; the two broadcast. # [...]"""
        total = np.asarray(total_tokens, dtype=np.float64)
        resident = np.asarray(resident_tokens, dtype=np.float64)
        if np.any(resident < 0) or np.any(resident > total):
            raise ValueError("tokens must not be negative, nor more resident than there are")
        moved = self._growing_bytes_per_token * (total - resident) + float(self._fixed_bytes)
        for window_tokens, bytes_per_token in self._windows:
            moved = moved + bytes_per_token * np.minimum(total, window_tokens)
        return np.asarray(moved, dtype=np.float64)

    def layer_kv_bytes(self, tokens: int, resident_tokens: int = 0) -> tuple[int, ...]:
        """Bytes of each layer after ``tokens`` tokens that move, in layer order."""
        if tokens < 0 or not 0 <= resident_tokens <= tokens:
            raise ValueError(
                f"tokens must not be negative, nor more resident than there are: got {tokens} in "
                f"all, {resident_tokens} resident"
            )
        return tuple(layer.kv_bytes(tokens, resident_tokens) for layer in self.layers)


def paged_kv_bytes(architecture: Architecture, tokens: int, page_tokens: int) -> int:
    """S_kv(tokens) in whole pages, as SGLang sends it: a window's pages are those that its tokens
    touch, at both of its ends; a state has none."""
    if tokens < 0 or page_tokens < 1:
        raise ValueError(f"no KV has {tokens} tokens in pages of {page_tokens}")
    end = -(-tokens // page_tokens)
    moved = 0
    for layer in architecture.layers:
        moved += layer.growing_bytes_per_token * end * page_tokens + layer.fixed_bytes
        start = max(0, tokens - layer.window_tokens) // page_tokens
        moved += layer.window_bytes_per_token * (end - start) * page_tokens
    return moved


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


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class BytesFile(_File):
    """A kind of layer by its bytes."""

    attention: None = None
    growing_bytes_per_token: ByteCount = 0
    window_tokens: Annotated[int, Field(ge=0, le=2**31)] = 0
    window_bytes_per_token: ByteCount = 0
    fixed_bytes: ByteCount = 0
    source: Text


class MlaFile(_File):
    attention: Literal["mla"]
    latent_rank: Dimension
    rope_dim: Annotated[int, Field(ge=0, le=2**16)]
    source: Text


class GqaFile(_File):
    attention: Literal["gqa"]
    kv_heads: Dimension
    key_dim: Dimension
    value_dim: Dimension
    source: Text


class SlidingWindowFile(_File):
    attention: Literal["sliding_window"]
    kv_heads: Dimension
    key_dim: Dimension
    value_dim: Dimension
    window_tokens: WindowTokens
    source: Text


class LinearFile(_File):
    attention: Literal["kda", "gdn", "mamba2"]
    heads: Dimension
    key_dim: Dimension
    value_dim: Dimension
    conv_kernel: Annotated[int, Field(ge=2, le=64)]
    conv_channels: Annotated[int, Field(ge=1, le=2**24)]
    source: Text


class LightningFile(_File):
    attention: Literal["lightning"]
    heads: Dimension
    key_dim: Dimension
    value_dim: Dimension
    source: Text


class ArchitectureFile(_File):
    """The JSON form; what an entry of ``layer_kinds`` holds depends on its ``attention``."""

    schema_version: Literal[1]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    notes: str = ""
    layer_kinds: dict[str, dict[str, Any]]
    layers: Annotated[list[str], Field(min_length=1, max_length=MAX_LAYERS)]


KindT = TypeVar("KindT", bound=_File)


class _OneKind(_File, Generic[KindT]):
    """One entry under its key, so that an error names it as the file does."""

    layer_kinds: dict[str, KindT]


#: The form of an entry by its ``attention``, and the record it becomes; None: by its bytes.
FORMS: dict[str | None, tuple[type[_File], Callable[..., Attention | Layer]]] = {
    None: (_OneKind[BytesFile], Layer),
    "mla": (_OneKind[MlaFile], Mla),
    "gqa": (_OneKind[GqaFile], Gqa),
    "sliding_window": (_OneKind[SlidingWindowFile], SlidingWindow),
    "kda": (_OneKind[LinearFile], Linear),
    "gdn": (_OneKind[LinearFile], Linear),
    "mamba2": (_OneKind[LinearFile], Linear),
    "lightning": (_OneKind[LightningFile], Lightning),
}


def load_architecture(path: Path, kv_dtype: KvDtype = DEFAULT_KV_DTYPE) -> Architecture:
    """Read an architecture file for one KV dtype.

    ScenarioError names the file and the key that is wrong, or the kind whose bytes are given and
    so are of bf16 only.
    """
    file = parse_json_file(path, _WHAT, ArchitectureFile)
    layers: dict[str, Layer] = {}
    sources: dict[str, str] = {}
    attention: dict[str, Attention] = {}
    for kind, entry in file.layer_kinds.items():
        shape, sources[kind] = _read_kind(path, kind, entry)
        if isinstance(shape, Layer):
            if kv_dtype != "bf16":
                raise ScenarioError(
                    f"'layer_kinds.{printable(kind)}' in the {_WHAT} {path} gives bytes, which are "
                    f"those of bf16 KV, so {kv_dtype} KV cannot be told from it; give the layer's "
                    "'attention' and shape instead."
                )
            layers[kind] = shape
        else:
            attention[kind] = shape
            layers[kind] = shape.layer(kind, kv_dtype)
    _check_kinds(path, list(layers), file.layers)
    architecture = Architecture(
        name=file.name,
        path=path,
        layers=tuple(layers[kind] for kind in file.layers),
        sources=sources,
        kv_dtype=kv_dtype,
        attention=attention,
    )
    if architecture.kv_bytes(1) == 0:
        raise ScenarioError(
            f"The {_WHAT} {path} gives no layer any KV bytes, so nothing would move between "
            "prefill and decode; set 'growing_bytes_per_token' or 'fixed_bytes'."
        )
    return architecture


def _read_kind(path: Path, kind: str, entry: dict[str, Any]) -> tuple[Attention | Layer, str]:
    """The entry's shape, or the layer whose bytes it gives; and its source."""
    attention = entry.get("attention")
    if not isinstance(attention, str | None) or attention not in FORMS:
        raise ScenarioError(
            f"'layer_kinds.{printable(kind)}.attention' in the {_WHAT} {path} is "
            f"{shortened(attention)}; it is one of {', '.join(repr(a) for a in FORMS if a)}, or is "
            "left out where the layer's bytes are given."
        )
    form, record = FORMS[attention]
    try:
        checked = form.model_validate({"layer_kinds": {kind: entry}})
    except ValidationError as error:
        raise ScenarioError(explain(error, form, f"the {_WHAT} {path}")) from error
    values = checked.model_dump()["layer_kinds"][kind]
    source = values.pop("source")
    if attention is None:
        values["kind"] = kind
        del values["attention"]
    return record(**values), source


def _check_kinds(path: Path, defined: list[str], layers: list[str]) -> None:
    for index, kind in enumerate(layers):
        if kind not in defined:
            raise ScenarioError(
                f"'layers[{index}]' in the {_WHAT} {path} is {shortened(kind)}, which "
                f"'layer_kinds' does not define; it defines "
                f"{', '.join(map(repr, sorted(defined))) or 'nothing'}."
            )
    if unused := sorted(set(defined) - set(layers)):
        raise ScenarioError(
            f"'layer_kinds.{printable(unused[0])}' in the {_WHAT} {path} is used by no layer; "
            "add it to 'layers' or remove it."
        )


def architecture_text(architecture: Architecture, name: str, notes: str) -> str:
    """``architecture`` as an architecture file that ``load_architecture`` reads back."""
    kinds = {layer.kind: layer for layer in architecture.kind_counts}
    document = {
        "schema_version": 1,
        "name": name,
        "notes": notes,
        "layer_kinds": {
            kind: _kind_entry(architecture.attention.get(kind, layer), architecture.sources[kind])
            for kind, layer in kinds.items()
        },
    }
    head = json.dumps(document, indent=2, ensure_ascii=False).removesuffix("\n}")
    names = [json.dumps(layer.kind, ensure_ascii=False) for layer in architecture.layers]
    rows = [", ".join(names[start : start + 8]) for start in range(0, len(names), 8)]
    return head + ',\n  "layers": [\n    ' + ",\n    ".join(rows) + "\n  ]\n}\n"


def _kind_entry(shape: Attention | Layer, source: str) -> dict[str, object]:
    values = asdict(shape)
    if isinstance(shape, Layer):
        del values["kind"]
        return {**values, "source": source}
    return {"attention": values.pop("attention"), **values, "source": source}
