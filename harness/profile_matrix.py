"""Which model has been costed on which hardware, and how that is known: the cells still missing.

Rows are the geometries of ``profiles/models``, columns the hardware of the profiles found and that
which is expected. A cell is what its best profile rests on: ``measured`` where every prefill point
is, then published, derived, modelled, and ``stand_in`` where any other word would say too much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core import ScenarioError
from harness.profile import Profile, Provenance
from harness.profile_file import load_profile

#: Hardware that a study of PrfaaS needs, whether or not a profile of it is there.
EXPECTED = ("8xH200", "8xH20")
#: Best first. A profile is as good as the worst of its prefill points.
ORDER: tuple[Provenance, ...] = ("measured", "published", "derived", "modelled", "stand_in")
#: Files beside profiles that are none.
_OTHERS = ("paper-tables.json",)


@dataclass(frozen=True, slots=True)
class Cell:
    """The best profile of a model on a hardware; ``others`` are further files of the same cell.

    ``status`` "missing" has no file. ``decode``: how its decode side is known, None: it has none.
    """

    model: str
    hardware: str
    status: Provenance | str
    engine: str | None
    path: str | None
    decode: Provenance | None
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    models: tuple[str, ...]
    hardware: tuple[str, ...]
    cells: tuple[Cell, ...]
    skipped: tuple[str, ...]

    def missing(self, hardware: str) -> tuple[str, ...]:
        """Models without any profile on a hardware."""
        return tuple(
            c.model for c in self.cells if c.hardware == hardware and c.status == "missing"
        )


def profile_matrix(folder: Path) -> Matrix:
    """Of a folder of profiles. ScenarioError where it has no ``models``."""
    models = tuple(sorted(path.stem for path in (folder / "models").glob("*.json")))
    if not models:
        raise ScenarioError(
            f"The folder {folder} has no models/*.json, so it is no folder of profiles; name the "
            "one of this project."
        )
    found: dict[tuple[str, str], list[Profile]] = {}
    skipped = []
    for path in sorted([*folder.glob("*.json"), *(folder / "operator").glob("*.json")]):
        if path.name in _OTHERS:
            continue
        try:
            profile = load_profile(path)
        except ScenarioError as error:
            skipped.append(str(error))
            continue
        found.setdefault((profile.model, profile.hardware), []).append(profile)
    hardware = tuple(dict.fromkeys([*EXPECTED, *sorted(name for _, name in found)]))
    rows = (*models, *sorted({model for model, _ in found} - set(models)))
    cells = tuple(
        _cell(model, kind, found.get((model, kind), ()), folder)
        for model in rows
        for kind in hardware
    )
    return Matrix(rows, hardware, cells, tuple(skipped))


def _cell(model: str, hardware: str, profiles: Sequence[Profile], folder: Path) -> Cell:
    if not profiles:
        return Cell(model, hardware, "missing", None, None, None, ())
    best, *others = sorted(profiles, key=lambda one: (ORDER.index(_prefill(one)), str(one.path)))
    return Cell(
        model,
        hardware,
        _prefill(best),
        f"{best.engine_name} {best.engine_version}",
        _shown(best.path, folder),
        _decode(best),
        tuple(_shown(one.path, folder) for one in others),
    )


def _prefill(profile: Profile) -> Provenance:
    return max((point.provenance for point in profile.prefill_points), key=ORDER.index)


def _decode(profile: Profile) -> Provenance | None:
    kinds = [point.provenance for point in profile.decode_points]
    return max(kinds, key=ORDER.index) if kinds else None


def _shown(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder))
