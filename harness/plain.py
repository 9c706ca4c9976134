"""Records as JSON's types, and what of them says where files lie and not what they hold."""

import math
from dataclasses import fields, is_dataclass
from pathlib import Path

#: Keys that name places; contents are there, a trace's as ``trace_sha256``, a
#: model's as ``model_sha256``.
_PLACES = (
    "path", "trace", "tokenizer", "api_key_file", "model_path", "python", "compute", "whole",
)  # fmt: skip


def plain(value: object) -> object:
    """A tree of records, with the records' fields as keys."""
    if is_dataclass(value) and not isinstance(value, type):
        # Names that begin with an underscore are derived from the others.
        names = [f.name for f in fields(value) if not f.name.startswith("_")]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if value == math.inf:  # no end, which JSON has no number for
        return None
    return str(value) if isinstance(value, Path) else value


def without_places(value: object) -> object:
    """A plain tree without what only says where."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in _PLACES}
        return {key: without_places(item) for key, item in kept.items()}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    return value
