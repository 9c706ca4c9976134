"""The link of a run against what the scenario asks: what the machine can carry at all, what it
measured before and after, what the backend leaves out, and when a varying link changed.

Everything here ends in the manifest's ``link_*`` fields; failures keep the verdict from supporting.
Wall seconds and wire bytes are the link's own; scenario units are named so.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from harness.core import LinkError
from harness.scenario import Scenario
from netem.ceiling import Ceiling, measure_ceiling, scale_to_fit
from netem.check import LinkCheck, link_warnings
from netem.link import DIRECTIONS, LinkSpec
from netem.testlink import BACKENDS, TestLink, link_failures
from netem.units import format_rate
from netem.variation import difference
from netem.variation_run import Applied

#: A hop of the default scenario is 80 us of wall time; the backends' own floors are about as much.
RTT_TOLERANCE_WALL_S = 0.2e-3
#: A change that comes later than this on the wall clock was not applied on time.
LATENESS_WALL_S = 0.1


def check_ceiling(scenario: Scenario, link: TestLink) -> dict[str, Any]:
    """What the backend carries unshaped, for the manifest.

    LinkError, with the scale that would fit, where the link asks for more than that.
    """
    ceiling = measure_ceiling(link.backend, BACKENDS[link.backend])
    factor = scale_to_fit(link.spec, ceiling)
    if factor > 1:
        raise LinkError(_above(scenario, link, ceiling, factor))
    return {
        f"{name}_wire_bytes_per_s": getattr(ceiling, f"{name}_bytes_per_s") for name in DIRECTIONS
    }


def _above(scenario: Scenario, link: TestLink, ceiling: Ceiling, factor: float) -> str:
    carried = min(getattr(ceiling, f"{name}_bytes_per_s") for name in DIRECTIONS)
    asked = max(link.spec.direction(name).rate_bytes_per_s for name in DIRECTIONS)
    return (
        f"the scaled link is {format_rate(asked)} on the wire, but through the {link.backend} "
        f"backend this machine carries {format_rate(float(f'{carried * 8:.3g}') / 8)} unshaped, of "
        "which a link may ask four fifths; scale the bytes further, for example --set "
        f"scale.bytes={scenario.scale.bytes * factor:g}, or use a machine with more cores"
    )


def fidelity(scenario: Scenario, link: TestLink, ceiling: dict[str, Any]) -> dict[str, Any]:
    """The manifest's fields of a link as it was measured before the run."""
    check, scale = link.verify(), scenario.scale
    return {
        "link_backend": link.backend,
        "link_requested": _units(scenario.link, link.spec),
        "link_applied": _units(link.applied.scaled(1 / scale.time, 1 / scale.bytes), link.applied),
        "link_ceiling": ceiling,
        "link_check": _plain(check),
        "link_failures": (*_left_out(link), *_failures(check, link)),
        "link_notes": (*link.notes, *link_warnings(check, link.applied)),
    }


def fidelity_after(link: TestLink) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The link measured once more after the run, and what it then misses."""
    check = link.verify()
    return _plain(check), tuple(f"after the run: {failure}" for failure in _failures(check, link))


def late_changes(changes: Sequence[Applied]) -> tuple[str, ...]:
    """Changes of a varying link that were not applied on time; wall seconds."""
    late = [one for one in changes if one.applied_s - one.planned_s > LATENESS_WALL_S]
    return tuple(
        f"the change at {one.planned_s:.3f} s of wall time ({one.change}) was applied "
        f"{1e3 * (one.applied_s - one.planned_s):.0f} ms late"
        for one in late
    )


def _plain(check: LinkCheck) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(check)
    return plain | {"rtt_tolerance_s": RTT_TOLERANCE_WALL_S}


def _failures(check: LinkCheck, link: TestLink) -> tuple[str, ...]:
    return link_failures(check, link.applied, rtt_tolerance_s=RTT_TOLERANCE_WALL_S)


def _left_out(link: TestLink) -> list[str]:
    """What was asked of the link and this backend does not do. Rates and delays are measured."""
    asked, applied = link.spec, link.applied
    kept = ("rate_bytes_per_s", "delay_s", "limit_packets")
    near_to_far, far_to_near = (
        dataclasses.replace(
            applied.direction(name), **{key: getattr(asked.direction(name), key) for key in kept}
        )
        for name in DIRECTIONS
    )
    applied = dataclasses.replace(applied, near_to_far=near_to_far, far_to_near=far_to_near)
    told = difference(asked, applied)
    left_out = [told] if told != "nothing" else []
    if asked.per_flow_cap_bytes_per_s != applied.per_flow_cap_bytes_per_s:
        left_out.append("a cap on every flow that is not kept")
    return [f"not as asked for by the {link.backend}: {told}" for told in left_out]


def _units(spec: LinkSpec, wire: LinkSpec) -> dict[str, Any]:
    """A link in scenario units, and as it stands on the wire; by direction where they may differ.

    What has no direction in its name is that of the bulk, from far to near.
    """
    units = {
        "rate_bytes_per_s": spec.rate_bytes_per_s,
        "rtt_s": spec.rtt_s,
        "jitter_s": spec.jitter_s,
        "loss": spec.loss_rate,
        "per_flow_cap_bytes_per_s": spec.per_flow_cap_bytes_per_s,
        "rate_wire_bytes_per_s": wire.rate_bytes_per_s,
        "rtt_wall_s": wire.rtt_s,
        "jitter_wall_s": wire.jitter_s,
    }
    for name in DIRECTIONS:
        units[f"rate_{name}_bytes_per_s"] = spec.direction(name).rate_bytes_per_s
        units[f"rate_{name}_wire_bytes_per_s"] = wire.direction(name).rate_bytes_per_s
    return units
