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
    """``profiles`` and ``operator`` in order of file name; ``architectures`` by name; ``skipped``
    says of each file that cannot be used why not."""

    folder: Path
    architectures: dict[str, Architecture]
    profiles: tuple[Costed, ...]
    operator: tuple[Costed, ...]
    published: Published
    skipped: tuple[str, ...]


def read_catalogue(folder: Path) -> Catalogue:
    """Every file of the folder that can be used. ScenarioError without the paper's tables."""
    tables = folder / PAPER_TABLES
    if not tables.is_file():
        raise ScenarioError(
            f"The folder {folder} holds no {PAPER_TABLES}, so it is no folder of profiles; name "
            "the one of this project with --profiles."
        )
    models, skipped = folder / "models", []
    architectures: dict[str, Architecture] = {}
    for path in sorted(models.glob("*.json")):
        try:
            architectures[path.stem] = load_architecture(path)
        except ScenarioError as error:
            skipped.append(str(error))

    def costed(of: Path) -> tuple[Costed, ...]:
        found = []
        for path in sorted(of.glob("*.json")):
            if path == tables:
                continue
            try:
                found.append(_costed(path, models, architectures))
            except ScenarioError as error:
                skipped.append(str(error))
        return tuple(found)

    return Catalogue(
        folder=folder,
        architectures=architectures,
        profiles=costed(folder),
        operator=costed(folder / "operator"),
        published=load_published(tables),
        skipped=tuple(skipped),
    )


def _costed(path: Path, models: Path, architectures: dict[str, Architecture]) -> Costed:
    profile = load_profile(path)
    if profile.model not in architectures:
        raise ScenarioError(
            f"The profile file {path} is of model {profile.model!r}, whose geometry is not in "
            f"{models}; it holds {', '.join(architectures) or 'none'}."
        )
    return Costed(profile, architectures[profile.model])
