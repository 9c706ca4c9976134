"""Files a user wrote: read them with bounds, and refuse them in one paragraph that names the place.

pydantic validates; here its errors become words. The first error told is an unknown key, since a
misspelt key is usually why another one is missing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from harness.core import ScenarioError
from netem.datafile import MAX_FILE_BYTES
from netem.datafile import nearest as nearest  # for whoever reads such files

ModelT = TypeVar("ModelT", bound=BaseModel)
Location = tuple[int | str, ...]


def read_bytes(path: Path, what: str, max_bytes: int) -> bytes:
    """A user's file; ``what`` names its part in an error ("trace file")."""
    shown = printable(str(path))
    try:
        if not path.is_file():
            kind = "is not a regular file" if path.exists() else "does not exist"
            raise ScenarioError(f"The {what} {shown} {kind}; check the path.")
        if (size := path.stat().st_size) > max_bytes:
            raise ScenarioError(
                f"The {what} {shown} has {size} bytes; at most {max_bytes} are read. "
                "Is it the right file?"
            )
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ScenarioError(f"The {what} {shown} cannot be read: {reason}.") from error


def read_text_file(path: Path, what: str) -> str:
    """A user's configuration file, UTF-8 with or without a byte order mark."""
    try:
        return read_bytes(path, what, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScenarioError(
            f"The {what} {path} is not UTF-8 text (byte {error.start}); save it as UTF-8."
        ) from error


def parse_json_file(path: Path, what: str, model: type[ModelT]) -> ModelT:
    """``path`` as a validated ``model``; ScenarioError names file, key and line where known."""
    text = read_text_file(path, what)
    try:
        content = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ScenarioError(
            f"The {what} {path} is not JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}."
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deep; an integer of > 4300 digits
        raise ScenarioError(f"The {what} {path} is not usable JSON: {error}.") from error
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ScenarioError(explain(error, model, f"the {what} {path}")) from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError where it has a key twice, of which JSON would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {printable(twice)!r} twice; keep one of them")
    return found


def explain(
    error: ValidationError,
    model: type[BaseModel],
    where: str,
    given_by: Callable[[str], str] = lambda _key: "",
) -> str:
    """One paragraph for a failed validation: unknown keys first, else the first error.

    ``given_by(key)`` may add where a key came from when it is not the file (a ``--set`` flag).
    """
    errors = error.errors(include_url=False)
    unknown = [e for e in errors if e["type"] == "extra_forbidden"]
    first = (unknown or errors)[0]
    key = dotted(first["loc"])
    given = given_by(key)
    if unknown:
        table = dotted(first["loc"][:-1])
        valid = valid_keys(model, first["loc"][:-1])
        near = nearest(str(first["loc"][-1]), valid)
        hint = f"did you mean {near!r}?" if near else "no valid key is like it."
        inside = f"[{table}]" if table else "the top level"
        told = f"Unknown key {key!r} in {where}{given}: {hint} Valid keys of {inside}: "
        told += ", ".join(sorted(valid)) + "."
    elif first["type"] == "missing":
        told = f"The key {key!r} is missing in {where}{given}; it has no default."
    else:
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] in ("model_type", "dict_type"):
            message = "it must be a table of keys"
        value = "" if first["type"] == "value_error" else f", got {shortened(first['input'])}"
        told = f"The value of {key!r} in {where}{given} is wrong: {message}{value}."
        if not key:
            told = f"{where[0].upper()}{where[1:]} is wrong: {message}."
    others = len(unknown or errors) - 1
    if others:
        told += f" ({others} more like this.)" if unknown else f" ({others} more after this.)"
    return told


def valid_keys(model: type[BaseModel], location: Location) -> list[str]:
    """Keys of the table at ``location``; list indexes and free names step into the element type."""
    current: Any = model
    for step in location:
        current = _without_none(current)
        if isinstance(current, type) and issubclass(current, BaseModel):
            info = current.model_fields.get(str(step))
            current = None if info is None else info.annotation
        elif get_origin(current) is dict:
            current = get_args(current)[1]
        elif get_origin(current) in (list, tuple):
            current = get_args(current)[0]
    current = _without_none(current)
    if isinstance(current, type) and issubclass(current, BaseModel):
        return list(current.model_fields)
    return []


def _without_none(annotation: Any) -> Any:
    """``T`` of ``T | None``."""
    choices = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) in (UnionType, Union) and len(choices) == 1:
        return choices[0]
    return annotation


def dotted(location: Location) -> str:
    """``("prefill", "points", 3, "prefill_s")`` as ``prefill.points[3].prefill_s``."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{printable(step)}" if path else printable(step)
    return path


def printable(text: str) -> str:
    """A user's text on one line and short enough for a message."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:200])
    return shown if len(text) <= 200 else f"{shown}..."


def shortened(value: Any) -> str:  # Any: whatever the file held
    """``repr`` of a file's value, short enough for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer too long to print
        text = "a very large integer"
    return text if len(text) <= 80 else f"{text[:77]}..."
