"""The TOML form of a link, and the named profiles.

    rate = "100gbit"
    rtt = "0.8ms"                       # or delay: one way
    jitter = "0.05ms"
    loss = { model = "bursts", rate = "0.05%", mean_burst_packets = 10 }   # or just "0.1%"
    per_flow_cap = "5gbit"
    [near_to_far]                       # what this direction has of its own
    rate = "10gbit"
    [variation]                         # see netem.variation

Keys of a direction stand at the top for both and in [near_to_far] or [far_to_near] for one. Any
value may instead be a table of ``value``, ``basis`` (measured, documented or assumed) and
``source``; in the profiles of ``netem/profiles/NAME.toml`` every value is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from netem.datafile import Table, nearest, read_toml, validate
from netem.link import (
    DIRECTIONS,
    MTU_BYTES,
    Direction,
    DirectionName,
    JitterDistribution,
    LinkError,
    LinkSpec,
    Slot,
    printable,
)
from netem.link_values import AnyLoss, Count, Duration, Fraction, Rate, Size
from netem.variation_tables import check_variation

_BASES = ("measured", "documented", "assumed")
_PROVENANCE = {"value", "basis", "source"}
_PROFILE_DIR = Path(__file__).parent / "profiles"


class SlotTable(Table):
    min_delay: Duration
    max_delay: Duration
    packets: Count = 0
    bytes: Size = 0

    def slot(self) -> Slot:
        return Slot(self.min_delay, self.max_delay, self.packets, self.bytes)


class DirectionTable(Table):
    """Keys of a direction; what is not given is the other place's or the default of Direction."""

    rate: Rate | None = None
    delay: Duration | None = None
    jitter: Duration | None = None
    jitter_distribution: JitterDistribution | None = None
    jitter_correlation: Fraction | None = None
    loss: AnyLoss = None
    reorder: Fraction | None = None
    reorder_correlation: Fraction | None = None
    reorder_gap: Count | None = None
    duplicate: Fraction | None = None
    duplicate_correlation: Fraction | None = None
    corrupt: Fraction | None = None
    corrupt_correlation: Fraction | None = None
    ecn: bool | None = None
    slot: SlotTable | None = None
    limit_packets: Annotated[int, Field(ge=1, lt=2**32)] | None = None

    def values(self) -> dict[str, Any]:
        """The fields of Direction that are given."""
        units = {"rate": "rate_bytes_per_s", "delay": "delay_s", "jitter": "jitter_s"}
        parts: dict[str, Callable[[Any], Any]] = {
            "loss": lambda table: table.loss(),
            "slot": lambda table: table.slot(),
        }
        return {
            units.get(key, key): parts.get(key, lambda value: value)(getattr(self, key))
            for key in DirectionTable.model_fields
            if getattr(self, key) is not None
        }


class LinkTable(DirectionTable):
    """A whole file."""

    summary: str = ""
    rtt: Duration | None = None
    """Both delays together, half of it each way."""
    mtu: Size = MTU_BYTES
    per_flow_cap: Rate | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    near_to_far: DirectionTable = DirectionTable()
    far_to_near: DirectionTable = DirectionTable()
    variation: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where one value of a file comes from."""

    value: str
    basis: str
    source: str


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A link with the provenance of its values by key, and what of it changes with time.

    ``variation`` is the table [variation] as ``netem.variation`` reads it.
    """

    spec: LinkSpec
    summary: str
    provenance: Mapping[str, Provenance]
    variation: Mapping[str, Any]


def profile_names() -> tuple[str, ...]:
    """The names ``load_profile`` knows, sorted."""
    return tuple(sorted(path.stem for path in _PROFILE_DIR.glob("*.toml")))


def load_profile(name: str) -> LinkSpec:
    """The link of a named profile. LinkError names the profiles there are."""
    return read_profile(name).spec


def read_profile(name: str) -> LinkProfile:
    """A named profile with its provenance. LinkError for an unknown name or a faulty file."""
    names = profile_names()
    if name not in names:
        near = nearest(name, list(names))
        hint = f" (did you mean {near!r}?)" if near else ""
        raise LinkError(f"there is no link profile {name!r}{hint}; profiles: {', '.join(names)}")
    path = _PROFILE_DIR / f"{name}.toml"
    document = read_toml(path, "link profile")
    profile = read_link(document, name, f"the link profile {path}")
    bare = sorted(set(document) - set(profile.provenance) - {"summary"})
    if bare or not profile.summary:
        raise LinkError(
            f"The link profile {path} must have a summary, and each of its keys value, basis and "
            f"source; without them: {', '.join(bare) or 'summary'}."
        )
    return profile


def read_link_file(path: Path | str) -> LinkProfile:
    """A user's link file; the link is named after it. LinkError names the file and the key."""
    path = Path(path)
    return read_link(read_toml(path, "link file"), path.stem, f"the link file {path}")


def read_link(document: Mapping[str, Any], name: str, where: str) -> LinkProfile:
    """A link from its TOML document; ``where`` names the document in errors.

    [variation] is checked too, whether it will be followed or not; files it names are not read.
    """
    provenance: dict[str, Provenance] = {}
    plain = {key: _plain(value, key, where, provenance) for key, value in document.items()}
    table = validate(plain, LinkTable, where)
    check_variation(table.variation, f"the [variation] of {where}")
    common = table.values()
    if table.rtt is not None:
        if "delay_s" in common:
            raise LinkError(f"Give either 'rtt' or 'delay' in {where}, not both.")
        common["delay_s"] = table.rtt / 2
    near_to_far = _direction("near_to_far", common | table.near_to_far.values(), where)
    far_to_near = _direction("far_to_near", common | table.far_to_near.values(), where)
    try:
        spec = LinkSpec(
            printable(name),
            near_to_far,
            far_to_near,
            mtu_bytes=table.mtu,
            per_flow_cap_bytes_per_s=table.per_flow_cap,
            seed=table.seed,
        )
    except LinkError as error:
        raise LinkError(f"{where[0].upper()}{where[1:]}: {error}") from error
    return LinkProfile(
        spec, table.summary, MappingProxyType(provenance), MappingProxyType(table.variation)
    )


def _direction(name: DirectionName, values: dict[str, Any], where: str) -> Direction:
    for key, text in (("rate_bytes_per_s", "rate"), ("delay_s", "rtt")):
        if key not in values:
            jitter = "; jitter without a rate would reorder packets" if key != "delay_s" else ""
            raise LinkError(f"The key {text!r} is missing in {where} for {name}{jitter}.")
    return Direction(**values)


def _plain(value: Any, key: str, where: str, provenance: dict[str, Provenance]) -> Any:
    """``value`` without its provenance, which goes into ``provenance`` under the dotted key."""
    if not isinstance(value, dict):
        return value
    if not {"basis", "source"} & set(value):
        nested = key in DIRECTIONS
        return {
            name: _plain(part, f"{key}.{name}", where, provenance) if nested else part
            for name, part in value.items()
        }
    if set(value) != _PROVENANCE:
        raise LinkError(f"{key!r} in {where} must have just the keys value, basis and source.")
    basis, source = value["basis"], value["source"]
    if basis not in _BASES or not isinstance(source, str) or not source:
        raise LinkError(
            f"{key!r} in {where}: the basis {basis!r} must be one of {', '.join(_BASES)}, and the "
            "source a text."
        )
    provenance[key] = Provenance(_shown(value["value"]), basis, source)
    return value["value"]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(part)}" for key, part in value.items())
    return str(value)
