"""The relay backend: both sites on this host's loopback, a shaped listener for each server."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from netem.control import Helper, helper
from netem.link import MTU_BYTES, LinkSpec
from netem.site import LinkCounters, Site, counters_from_answer
from netem.units import format_duration_s, format_fraction

#: A round trip through the relay without any added delay, measured on two shared cores: two more
#: TCP hops and process wake-ups each way. It is taken off the delay that is added.
ROUND_TRIP_FLOOR_S = 0.1e-3
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RelayPath:
    applied: LinkSpec
    notes: tuple[str, ...]
    near: Site
    far: Site
    relay: Helper

    def expose(self, site: Site, port: int) -> tuple[str, int]:
        answer = self.relay.ask(
            {"op": "listen", "host": site.address, "port": port, "server_site": site.name}
        )
        return answer["host"], answer["port"]

    def withdraw(self, site: Site, port: int) -> None:
        self.relay.ask({"op": "withdraw", "port": port, "server_site": site.name})

    def counters(self) -> LinkCounters:
        return counters_from_answer(self.relay.ask({"op": "counters"}))


@contextmanager
def open_relay(spec: LinkSpec) -> Iterator[RelayPath]:
    """A relay process; jitter and loss are refused and noted, the other wishes applied."""
    applied = replace(spec, rtt_s=max(spec.rtt_s, ROUND_TRIP_FLOOR_S), jitter_s=0.0, loss=0.0)
    notes = [
        "the relay ends TCP on both sides: loss, congestion control and packet queues of a real "
        "path have no meaning here; rate counts TCP payload"
    ]
    if applied.rtt_s > spec.rtt_s:
        notes.append(f"rtt raised to the relay's floor of {format_duration_s(applied.rtt_s)}")
    if spec.jitter_s:
        notes.append(f"jitter of {format_duration_s(spec.jitter_s)} is not applied by the relay")
    if spec.loss:
        notes.append(f"loss of {format_fraction(spec.loss)} is not applied by the relay")
    configuration = {
        "rate_bytes_per_s": applied.rate_bytes_per_s,
        "delay_s": (applied.rtt_s - ROUND_TRIP_FLOOR_S) / 2,
        "limit_bytes": applied.queue_packets * MTU_BYTES,
    }
    with helper("the link relay between the sites", ["netem.relay"], configuration) as (
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
