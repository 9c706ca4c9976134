"""What an inter-cluster link is: rate, round trip, jitter, loss and queue, and the named profiles.

Both directions are alike. Each has: a rate (IP bytes per second), a fixed one-way delay of
``rtt_s / 2``, jitter drawn uniformly from +-``jitter_s`` around that delay without reordering,
independent loss per MTU-sized packet, and a drop-tail queue of ``limit_packets`` packets that
counts waiting and travelling packets alike (as tc-netem's ``limit`` does).

``netem/profiles/NAME.toml`` holds one link each: every value has a ``basis`` (measured,
documented or assumed) and a ``source``. What a ``LinkSpec`` cannot express yet stays in the file
under ``[not_yet_applied]`` and travels with the spec, so that every link made of it says so.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from netem.units import (
    format_duration_s,
    format_fraction,
    format_rate,
    parse_duration_s,
    parse_fraction,
    parse_rate_bytes_per_s,
)

MTU_BYTES = 1500
#: The kernel's own default; below the BDP of a short link it leaves room for TCP's bursts.
MIN_LIMIT_PACKETS = 1000
#: tc-netem's ``limit`` is 32 bits and so is the delay pyroute2 gives it in microseconds.
_MAX_LIMIT_PACKETS = 2**32 - 1
_MAX_ONE_WAY_S = 274.0
_BASES = ("measured", "documented", "assumed")
_PROFILE_DIR = Path(__file__).parent / "profiles"


class LinkError(Exception):
    """A link that cannot be described, built or measured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link. ``limit_packets = None`` means computed from the bandwidth-delay product."""

    name: str
    rate_bytes_per_s: float
    rtt_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    limit_packets: int | None = None
    #: Properties of the real link that this description leaves out, in words.
    not_applied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_bytes_per_s) and self.rate_bytes_per_s >= 125):
            raise LinkError(f"link {self.name!r}: the rate must be at least 1kbit")
        if not 0 <= self.rtt_s <= 2 * _MAX_ONE_WAY_S:
            raise LinkError(f"link {self.name!r}: the rtt must lie between 0 and 548s")
        if not 0 <= self.jitter_s <= self.one_way_s:
            raise LinkError(
                f"link {self.name!r}: a jitter of {_text_s(self.jitter_s)} exceeds the one-way "
                f"delay of {_text_s(self.one_way_s)} (half the rtt), so it would be cut off; "
                "lower the jitter or raise the rtt"
            )
        if not 0 <= self.loss < 1:
            raise LinkError(f"link {self.name!r}: the loss must be at least 0% and below 100%")
        if self.limit_packets is not None and not 0 < self.limit_packets <= _MAX_LIMIT_PACKETS:
            raise LinkError(f"link {self.name!r}: limit_packets must lie between 1 and 2^32 - 1")

    @property
    def one_way_s(self) -> float:
        return self.rtt_s / 2

    @property
    def bdp_bytes(self) -> float:
        """Bandwidth-delay product over the round trip."""
        return self.rate_bytes_per_s * self.rtt_s

    @property
    def queue_packets(self) -> int:
        """The limit that applies: as given, else 1.5 BDP but at least the kernel's default.

        The BDP is that of the round trip, so the queue is 3 times what one direction holds in
        flight: a limit near the latter drops at full rate and reads as loss.
        """
        if self.limit_packets is not None:
            return self.limit_packets
        computed = math.ceil(1.5 * self.bdp_bytes / MTU_BYTES)
        return min(max(MIN_LIMIT_PACKETS, computed), _MAX_LIMIT_PACKETS)

    def scaled(self, time_scale: float, byte_scale: float) -> "LinkSpec":
        """The link to emulate when durations shrink by ``time_scale`` and bytes by ``byte_scale``.

        A given ``limit_packets`` is kept: packets are not scaled.
        """
        if not (0 < time_scale < math.inf and 0 < byte_scale < math.inf):
            raise LinkError("time_scale and byte_scale must be finite and above 0")
        return replace(
            self,
            rate_bytes_per_s=self.rate_bytes_per_s * time_scale / byte_scale,
            rtt_s=self.rtt_s / time_scale,
            jitter_s=self.jitter_s / time_scale,
        )

    def __str__(self) -> str:
        parts = [format_rate(self.rate_bytes_per_s), f"rtt {_text_s(self.rtt_s)}"]
        if self.jitter_s:
            parts.append(f"jitter {_text_s(self.jitter_s)}")
        if self.loss:
            parts.append(f"loss {format_fraction(self.loss)}")
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where one value of a profile comes from."""

    value: str
    basis: str
    source: str


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A named link with the provenance of every value, those not applied included."""

    spec: LinkSpec
    summary: str
    provenance: Mapping[str, Provenance]


def profile_names() -> tuple[str, ...]:
    """The names ``load_profile`` knows, sorted."""
    return tuple(sorted(path.stem for path in _PROFILE_DIR.glob("*.toml")))


def load_profile(name: str) -> LinkSpec:
    """The link of a named profile. LinkError names the profiles there are."""
    return read_profile(name).spec


def read_profile(name: str) -> LinkProfile:
    """A named profile with its provenance. LinkError for an unknown name or a faulty file."""
    if name not in profile_names():
        raise LinkError(
            f"there is no link profile {name!r}; profiles: {', '.join(profile_names())}"
        )
    path = _PROFILE_DIR / f"{name}.toml"
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
        return _profile(name, document)
    except (OSError, tomllib.TOMLDecodeError, ValueError) as error:
        raise LinkError(f"link profile {path}: {error}") from error


def _profile(name: str, document: dict[str, Any]) -> LinkProfile:
    values = {key: document.pop(key, None) for key in ("rate", "rtt", "jitter", "loss")}
    unapplied = document.pop("not_yet_applied", {})
    summary = document.pop("summary", None)
    if document or not isinstance(summary, str) or not isinstance(unapplied, dict):
        raise ValueError(
            f"unknown or malformed keys {sorted(document)}: a profile has summary, rate, rtt, "
            "jitter, loss and [not_yet_applied.KEY]"
        )
    provenance = {key: _provenance(key, entry) for key, entry in (values | unapplied).items()}
    spec = LinkSpec(
        name=name,
        rate_bytes_per_s=parse_rate_bytes_per_s(provenance["rate"].value),
        rtt_s=parse_duration_s(provenance["rtt"].value),
        jitter_s=parse_duration_s(provenance["jitter"].value),
        loss=parse_fraction(provenance["loss"].value),
        not_applied=tuple(
            f"{key} = {provenance[key].value} of link profile {name} is not applied"
            for key in unapplied
        ),
    )
    return LinkProfile(spec, summary, MappingProxyType(provenance))


def _provenance(key: str, entry: Any) -> Provenance:
    wanted = {"value", "basis", "source"}
    if not isinstance(entry, dict) or set(entry) != wanted:
        raise ValueError(f"{key} must be a table with the keys value, basis and source")
    if not all(isinstance(text, str) and text for text in entry.values()):
        raise ValueError(f"{key}: value, basis and source must be text")
    if entry["basis"] not in _BASES:
        raise ValueError(f"{key}: the basis {entry['basis']!r} is none of {', '.join(_BASES)}")
    return Provenance(**entry)


def _text_s(value_s: float) -> str:
    """A duration for a message: four digits are enough there."""
    return format_duration_s(float(f"{value_s:.4g}"))
