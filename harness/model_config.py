"""A model's files as an ``Architecture``: a Hugging Face ``config.json``, or one of our own.

The family is the first name in ``architectures``. One that ``harness.model_families`` does not know
is refused by that name, since a guess at its KV would be believed. Of a multimodal model the
language model's keys count, which lie in ``text_config``.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.architecture import Architecture, load_architecture
from harness.attention import DEFAULT_KV_DTYPE, Attention, KvDtype
from harness.core import ScenarioError
from harness.datafile import explain, nearest, parse_json_file, printable
from harness.model_families import FAMILIES

_WHAT = "model config"


class _ConfigFile(BaseModel):
    """A ``config.json`` before its family is known; the family's keys are ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)

    architectures: Annotated[list[str], Field(min_length=1, max_length=64)]
    text_config: dict[str, Any] | None = None


class _EitherFile(BaseModel):
    """What tells the two forms of file apart."""

    model_config = ConfigDict(extra="ignore")

    architectures: Any = None
    layer_kinds: Any = None


def read_architecture(path: Path, kv_dtype: KvDtype = DEFAULT_KV_DTYPE) -> Architecture:
    """``path`` is an architecture file, a ``config.json`` or a folder that holds one."""
    if path.is_dir():
        return read_model_config(path, kv_dtype)
    found = parse_json_file(path, "model file", _EitherFile)
    if found.layer_kinds is not None:
        return load_architecture(path, kv_dtype)
    if found.architectures is not None:
        return read_model_config(path, kv_dtype)
    raise ScenarioError(
        f"The model file {path} is neither an architecture file (it has no 'layer_kinds') nor a "
        "Hugging Face config.json (it has no 'architectures')."
    )


def read_model_config(path: Path, kv_dtype: KvDtype = DEFAULT_KV_DTYPE) -> Architecture:
    """A ``config.json``, or the one in the folder ``path``; the folder names the model.

    ScenarioError names the file and the key that is missing or senseless, or the family that is
    not known.
    """
    path = path / "config.json" if path.is_dir() else path
    file = parse_json_file(path, _WHAT, _ConfigFile)
    family = file.architectures[0]
    attention = _attention(path, family, file)
    kinds: dict[str, Attention] = {one.attention: one for one in attention}
    layers = {kind: one.layer(kind, kv_dtype) for kind, one in kinds.items()}
    assert len(set(attention)) == len(kinds), "a family has one shape of each attention"
    return Architecture(
        name=printable(path.resolve().parent.name) or "model",
        path=path,
        layers=tuple(layers[one.attention] for one in attention),
        sources=dict.fromkeys(kinds, f"derived: {path.name} of a {family}"),
        kv_dtype=kv_dtype,
        attention=kinds,
    )


def _attention(path: Path, family: str, file: _ConfigFile) -> tuple[Attention, ...]:
    """The attention of each layer, in order."""
    if family not in FAMILIES:
        near = nearest(family, list(FAMILIES))
        hint = f"the nearest is {near}. " if near else ""
        raise ScenarioError(
            f"The {_WHAT} {path} is of a {printable(family)}, which is not known; {hint}Known are "
            f"{', '.join(sorted(FAMILIES))}. Write an architecture file for it by hand."
        )
    where, keys = f"the {_WHAT} {path}", file.model_extra
    if file.text_config is not None:
        where, keys = f"'text_config' of {where}", file.text_config
    try:
        return tuple(FAMILIES[family].model_validate(keys).attention())
    except ValidationError as error:
        raise ScenarioError(explain(error, FAMILIES[family], where)) from error
    except ValueError as error:
        raise ScenarioError(f"{where[0].upper()}{where[1:]} is wrong: {error}.") from error
