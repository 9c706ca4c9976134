"""What the machine itself carries: a rate above it would be a number on paper.

A software path has a ceiling, on two cores some Gbit/s to some tens of them, and a shaper set to
more only stops shaping. ``measure_ceiling`` opens the backend without shaping and measures it in
each direction alone. A link may ask for ``HEADROOM`` of that, the rest being for whoever uses the
link at the same time. A link above is refused, or scaled by one explicit rule: its bytes shrink,
its durations stay, that is, all rates are divided by the same factor, the least one of two digits
that fits. Durations are kept because delays and service times then still have their proportions.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from netem.check import FLOWS
from netem.link import DIRECTIONS, LinkError, LinkSpec, symmetric
from netem.probes import probes
from netem.site import Path
from netem.units import format_rate

HEADROOM = 0.8
#: No software path comes near; at 1 Tbit/s a packet is 12 ns long.
_UNSHAPED_BYTES_PER_S = 125e9
_BULK_S = 0.6


@dataclass(frozen=True, slots=True)
class Ceiling:
    """TCP payload of several flows in one direction at a time, without shaping."""

    backend: str
    near_to_far_bytes_per_s: float
    far_to_near_bytes_per_s: float


def measure_ceiling(
    backend: str, opener: Callable[[LinkSpec], AbstractContextManager[Path]], flows: int = FLOWS
) -> Ceiling:
    """Open an unshaped link on a backend, measure it (2 s), close it."""
    with opener(symmetric("unshaped", _UNSHAPED_BYTES_PER_S, 0.0)) as path, probes(path) as ends:
        return Ceiling(
            backend,
            ends.rate("near_to_far", flows, _BULK_S),
            ends.rate("far_to_near", flows, _BULK_S),
        )


def scale_to_fit(spec: LinkSpec, ceiling: Ceiling) -> float:
    """The factor by which the bytes of ``spec`` must shrink to fit; 1.0 when it fits as it is."""
    excess = max(
        spec.direction(name).rate_bytes_per_s / (HEADROOM * getattr(ceiling, f"{name}_bytes_per_s"))
        for name in DIRECTIONS
    )
    if excess <= 1:
        return 1.0
    step: float = 10.0 ** (math.floor(math.log10(excess)) - 1)
    # Rounded first, so that a quotient that is exact but for its last bit is not raised.
    return float(f"{math.ceil(round(excess / step, 9)) * step:.2g}")


def hold_below(
    spec: LinkSpec, ceiling: Ceiling, rule: Literal["refuse", "scale"] = "refuse"
) -> tuple[LinkSpec, tuple[str, ...]]:
    """``spec``, or what the rule makes of it, and notes on that. LinkError when it is refused."""
    factor = scale_to_fit(spec, ceiling)
    if factor == 1:
        return spec, ()
    asked = " and ".join(
        f"{format_rate(spec.direction(name).rate_bytes_per_s)} {name.replace('_', ' ')}, where "
        f"this machine carries {_rate(getattr(ceiling, f'{name}_bytes_per_s'))}"
        for name in DIRECTIONS
    )
    words = (
        f"link {spec.name!r} asks for {asked} through the {ceiling.backend} backend without "
        f"shaping, {HEADROOM:.0%} of it for a link"
    )
    if rule == "refuse":
        raise LinkError(
            f"{words}: scale its bytes by {factor:g} or more (all rates divided by that), choose a "
            "faster backend, or use a machine with more cores"
        )
    return spec.scaled(1.0, factor), (f"{words}: its bytes are scaled by {factor:g}",)


def _rate(value_bytes_per_s: float) -> str:
    return format_rate(float(f"{value_bytes_per_s * 8:.3g}") / 8)
