"""The shipped profiles and the geometry of their models, read from a ``profiles`` folder.

profiles/NAME.json             costs, published or derived; later also measured
profiles/operator/NAME.json    an operator model's estimates
profiles/models/MODEL.json     geometry; a profile's ``model`` is the file's name
profiles/paper-tables.json     what the paper prints
"""

from dataclasses import dataclass
from pathlib import Path

from harness.architecture import Architecture, load_architecture
from harness.core import ScenarioError
from harness.profile import Profile
from harness.profile_file import load_profile
from harness.published import Published, load_published

PAPER_TABLES = "paper-tables.json"


@dataclass(frozen=True, slots=True)
class Costed:
    """A profile with the geometry of its model."""

    profile: Profile
    architecture: Architecture


@dataclass(frozen=True, slots=True)
class Catalogue:
    """``profiles`` and ``operator`` in order of file name; ``architectures`` by name."""

    folder: Path
    architectures: dict[str, Architecture]
    profiles: tuple[Costed, ...]
    operator: tuple[Costed, ...]
    published: Published


def read_catalogue(folder: Path) -> Catalogue:
    """Every file of the folder. ScenarioError for one that is missing or wrong."""
    tables = folder / PAPER_TABLES
    if not tables.is_file():
        raise ScenarioError(
            f"The folder {folder} holds no {PAPER_TABLES}, so it is no folder of profiles; name "
            "the one of this project with --profiles."
        )
    models = sorted((folder / "models").glob("*.json"))
    architectures = {path.stem: load_architecture(path) for path in models}
    return Catalogue(
        folder=folder,
        architectures=architectures,
        profiles=_costed(folder, architectures),
        operator=_costed(folder / "operator", architectures),
        published=load_published(tables),
    )


def _costed(folder: Path, architectures: dict[str, Architecture]) -> tuple[Costed, ...]:
    found = []
    for path in sorted(folder.glob("*.json")):
        if path.name == PAPER_TABLES:
            continue
        profile = load_profile(path)
        if profile.model not in architectures:
            raise ScenarioError(
                f"The profile file {path} is of model {profile.model!r}, whose geometry is not in "
                f"{folder / 'models'}; it knows {', '.join(architectures)}."
            )
        found.append(Costed(profile, architectures[profile.model]))
    return tuple(found)
