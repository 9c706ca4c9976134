"""TOML files a user wrote: read them with bounds, and refuse them in one paragraph.

pydantic validates; here its first error becomes words that name the file, the key and, for an
unknown key, the nearest valid one.
"""

import difflib
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from netem.link import LinkError

#: Larger files are refused before they are parsed.
MAX_FILE_BYTES = 16 * 1024 * 1024

ModelT = TypeVar("ModelT", bound=BaseModel)


class Table(BaseModel):
    """A table of such a file: no unknown key, no conversion, no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The document at ``path``; LinkError names the file. ``what`` is its part ("link file")."""
    try:
        if not path.is_file():
            kind = "is not a regular file" if path.exists() else "does not exist"
            raise LinkError(f"The {what} {path} {kind}; check the path.")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise LinkError(f"The {what} {path} is larger than {MAX_FILE_BYTES} bytes.")
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise LinkError(f"The {what} {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise LinkError(f"The {what} {path} is not usable TOML: {error}.") from error


def validate(content: Any, model: type[ModelT], where: str) -> ModelT:
    """``content`` as a ``model``; LinkError with the first fault, unknown keys before others."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        unknown = [one for one in errors if one["type"] == "extra_forbidden"]
        first = (unknown or errors)[0]
        key = _dotted(first["loc"], content)
        if unknown:
            hint = _hint(first["loc"], model)
            raise LinkError(f"Unknown key {key!r} in {where}: {hint}") from error
        if first["type"] == "missing":
            raise LinkError(f"The key {key!r} is missing in {where}.") from error
        message = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] == "value_error" else f", got {str(first['input'])[:80]!r}"
        raise LinkError(f"The value of {key!r} in {where} is wrong: {message}{got}.") from error


def nearest(word: str, valid: list[str]) -> str | None:
    """The valid key most like ``word``, if any is alike at all."""
    lowered = {name.lower(): name for name in valid}
    found = difflib.get_close_matches(word.lower()[:100], lowered, n=1, cutoff=0.5)
    return lowered[found[0]] if found else None


def _dotted(location: tuple[int | str, ...], content: Any) -> str:
    """The key as the file has it.

    A location goes on where the file does not: by the tag of a tagged union, and into the table
    that was made of a text.
    """
    *tables, key = location
    path = []
    for step in tables:
        with suppress(LookupError, TypeError):
            content = content[step]
            path.append(str(step))
    if isinstance(content, dict | list):
        path.append(str(key))
    return ".".join(path)


def _hint(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """The nearest valid key and all keys of the table that holds the unknown one."""
    tables = [model]
    for step in location[:-1]:
        tables = _tables_at(tables, step)
    valid = sorted({f.alias or key for table in tables for key, f in table.model_fields.items()})
    near = nearest(str(location[-1]), valid)
    told = f"did you mean {near!r}?" if near else "no valid key is like it."
    return f"{told} Valid keys here: {', '.join(valid)}."


def _tables_at(tables: list[type[BaseModel]], step: int | str) -> list[type[BaseModel]]:
    """One step of an error's location: an index, a key, or the tag of a tagged union."""
    if isinstance(step, int):
        return tables
    fields = [table.model_fields[step] for table in tables if step in table.model_fields]
    if fields:
        return [table for field in fields for table in _tables_in(field.annotation)]
    return [
        table
        for table in tables
        if any(step in get_args(field.annotation) for field in table.model_fields.values())
    ]


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    """Every table that an annotation such as ``list[A | B] | None`` mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for part in get_args(annotation) for table in _tables_in(part)]
