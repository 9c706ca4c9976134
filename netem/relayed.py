"""The relay backend: both sites on this host's loopback, a shaped listener for each server.

The relay has a rate and a delay each way and nothing else: it ends TCP on both sides, so that
there are no packets to lose, reorder or mark. What a link has beside these is named in the notes
and left out of ``applied`` when it is opened, and refused, by name, when a running one is changed.
"""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from netem.control import Helper, helper
from netem.link import DIRECTIONS, Direction, LinkError, LinkSpec
from netem.site import LinkCounters, Site, counters_from_answer
from netem.units import format_duration_s, format_fraction, format_rate

#: A round trip through the relay without any added delay, measured on two shared cores: two more
#: TCP hops and process wake-ups each way. It is taken off the delay that is added.
ROUND_TRIP_FLOOR_S = 0.1e-3
_LOOPBACK = "127.0.0.1"


@dataclass
class RelayPath:
    applied: LinkSpec
    notes: tuple[str, ...]
    near: Site
    far: Site
    relay: Helper
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def expose(self, site: Site, port: int) -> tuple[str, int]:
        answer = self.relay.ask(
            {"op": "listen", "host": site.address, "port": port, "server_site": site.name}
        )
        return answer["host"], answer["port"]

    def withdraw(self, site: Site, port: int) -> None:
        self.relay.ask({"op": "withdraw", "port": port, "server_site": site.name})

    def prepare(self, spec: LinkSpec) -> None:
        """Nothing of a change takes long here."""

    def apply(self, spec: LinkSpec) -> None:
        """Change the running link; LinkError for anything but rate, delay and queue."""
        if lacking := _beyond(spec):
            raise LinkError(
                f"the relay cannot apply {', '.join(lacking)}: it ends TCP on both sides and has "
                "only a rate and a delay; use the netem or the forwarder backend"
            )
        applied = _attainable(spec)
        with self._changing:
            self.relay.ask({"op": "apply", **_configuration(applied)})
            self.applied = applied

    def counters(self) -> LinkCounters:
        return counters_from_answer(self.relay.ask({"op": "counters"}))


@contextmanager
def open_relay(spec: LinkSpec) -> Iterator[RelayPath]:
    """A relay process with the rate and the delay of ``spec``; the notes name what is left out."""
    applied = _attainable(spec)
    notes = [
        "the relay ends TCP on both sides: loss, congestion control and packet queues of a real "
        "path have no meaning here; rate counts TCP payload"
    ]
    if applied.rtt_s > spec.rtt_s:
        notes.append(f"rtt raised to the relay's floor of {format_duration_s(applied.rtt_s)}")
    notes += [f"{lacking} is not applied by the relay" for lacking in _beyond(spec)]
    with helper("the link relay between the sites", ["netem.relay"], _configuration(applied)) as (
        relay,
        ready,
    ):
        notes.append(f"the relay runs at {ready['priority']}")
        yield RelayPath(
            applied,
            tuple(notes),
            Site("near", _LOOPBACK, subprocess.Popen),
            Site("far", _LOOPBACK, subprocess.Popen),
            relay,
        )


def _beyond(spec: LinkSpec) -> list[str]:
    """What ``spec`` asks for beside rate, delay and queue, each once, with its value."""
    told = [text for name in DIRECTIONS for text in _beyond_shape(spec.direction(name))]
    if spec.per_flow_cap_bytes_per_s is not None:
        told.append(f"a per-flow cap of {format_rate(spec.per_flow_cap_bytes_per_s)}")
    return list(dict.fromkeys(told))


def _beyond_shape(one: Direction) -> list[str]:
    fractions = {
        "loss": one.loss_rate,
        "reorder": one.reorder,
        "duplicate": one.duplicate,
        "corrupt": one.corrupt,
    }
    told = [f"jitter of {format_duration_s(one.jitter_s)}"] if one.jitter_s else []
    told += [f"{name} of {_percent(value)}" for name, value in fractions.items() if value]
    return told + ["a slot"] * (one.slot is not None) + ["ecn"] * one.ecn


def _percent(fraction: float) -> str:
    return format_fraction(float(f"{fraction:.4g}"))


def _attainable(spec: LinkSpec) -> LinkSpec:
    """The link as the relay runs it: rates, delays not below the floor, queues."""
    return replace(
        spec,
        near_to_far=_shape(spec.near_to_far),
        far_to_near=_shape(spec.far_to_near),
        per_flow_cap_bytes_per_s=None,
        seed=None,
    )


def _shape(one: Direction) -> Direction:
    delay_s = max(one.delay_s, ROUND_TRIP_FLOOR_S / 2)
    return Direction(one.rate_bytes_per_s, delay_s, limit_packets=one.limit_packets)


def _configuration(applied: LinkSpec) -> dict[str, Any]:
    return {
        name: {
            "rate_bytes_per_s": applied.direction(name).rate_bytes_per_s,
            "delay_s": applied.direction(name).delay_s - ROUND_TRIP_FLOOR_S / 2,
            "limit_bytes": applied.queue_packets(name) * applied.mtu_bytes,
        }
        for name in DIRECTIONS
    }
