"""Where a verb is to write: refused before the work, not after it."""

import os
from pathlib import Path

from harness.core import ScenarioError


def check_output_file(path: Path, flag: str, *, kept: str | None = None) -> None:
    """ScenarioError where ``path`` cannot become a file. ``kept``: a file that is there is not to
    be replaced, and what to do then."""
    if not path.name:
        raise ScenarioError(f"{flag} needs the name of a file.")
    if path.exists() and not path.is_file():
        raise ScenarioError(f"{flag} {path} is no regular file; name one that can be written.")
    if path.exists() and kept is not None:
        raise ScenarioError(f"{flag} {path} exists; {kept}.")
    if not path.parent.is_dir():
        raise ScenarioError(f"{flag} {path}: the folder {path.parent} does not exist.")
    _check_folder(path.parent, f"{flag} {path}")


def check_output_folder(path: Path, flag: str) -> None:
    """ScenarioError where ``path`` is no folder that can be written, and cannot become one."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise ScenarioError(f"{flag} {path}: {there} is no folder.")
    _check_folder(there, f"{flag} {path}")


def _check_folder(folder: Path, what: str) -> None:
    """By writing there: permissions do not tell of a read-only file system, nor root of itself."""
    trial = folder / f".prfaas.{os.getpid()}.trial"
    try:
        with open(trial, "xb") as file:
            file.write(b"\n")
    except OSError as error:
        raise ScenarioError(
            f"{what} cannot be written: {error.strerror} in {folder.absolute()}."
        ) from error
    finally:
        trial.unlink(missing_ok=True)
