"""A new profile file: put together, checked as a reader would check it, and written whole."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.core import ScenarioError
from harness.datafile import explain
from harness.profile import DecodePoint, PrefillPoint, Profile, Provenance
from harness.profile_file import ProfileFile, profile_of
from harness.record.run_directory import write_atomically


@dataclass(frozen=True, slots=True)
class Description:
    """What a profile is of."""

    name: str
    model: str
    hardware: str
    gpus_per_instance: int
    engine_name: str
    engine_version: str
    notes: str


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Decode points and how the largest batch is known."""

    max_batch: int
    provenance: Provenance
    source: str
    points: tuple[DecodePoint, ...]


def profile_document(
    described: Description, prefill: tuple[PrefillPoint, ...], decode: DecodeCosts | None
) -> ProfileFile:
    """The file's content. ScenarioError names the key that a value does not fit."""
    content: dict[str, Any] = {
        "schema_version": 1,
        "name": described.name,
        "notes": described.notes,
        "model": described.model,
        "hardware": described.hardware,
        "gpus_per_instance": described.gpus_per_instance,
        "engine": {"name": described.engine_name, "version": described.engine_version},
        "prefill": {"interpolation": "log_log", "points": [asdict(point) for point in prefill]},
        "decode": None,
    }
    if decode is not None:
        content["decode"] = asdict(decode) | {"points": [asdict(point) for point in decode.points]}
    try:
        return ProfileFile.model_validate(content)
    except ValidationError as error:
        raise ScenarioError(explain(error, ProfileFile, "the profile to write")) from error


def write_profile(file: ProfileFile, path: Path, *, overwrite: bool) -> Profile:
    """Write ``file`` to ``path`` in one step, as a profile that loads. ScenarioError if it would
    not, or if something lies there and is not to be overwritten."""
    profile = profile_of(file, path)
    if not path.parent.is_dir():
        raise ScenarioError(f"The folder {path.parent} for the profile file does not exist.")
    if path.exists() and not overwrite:
        raise ScenarioError(
            f"The profile file {path} exists; give another --output, or --force to replace it."
        )
    write_atomically(path, profile_text(file).encode())
    return profile


def profile_text(file: ProfileFile) -> str:
    """JSON with a point a line, so that differences can be read."""
    content = file.model_dump(mode="json")
    for key in ("release", "measurement"):  # of measured profiles only
        if content[key] is None:
            del content[key]
    lists = []
    for section in ("prefill", "decode"):
        if content[section] is not None:
            rows = ",\n      ".join(
                json.dumps({key: value for key, value in row.items() if value is not None})
                for row in content[section]["points"]
            )
            lists.append(f"[\n      {rows}\n    ]")
            content[section]["points"] = []
    head, *tails = json.dumps(content, indent=2).split('"points": []')
    return (
        head
        + "".join(f'"points": {points}{tail}' for points, tail in zip(lists, tails, strict=True))
        + "\n"
    )
