"""What the packet forwarder carries, adds to a round trip, and costs in CPU. Prints JSON.

    python benchmarks/forwarder_rate.py [--rate 10gbit] [--rtt 5ms] [--option KEY=VALUE]...

Needs root and /dev/net/tun. For 1 and for 4 TCP connections, each way: Gbit/s of payload; CPU
seconds of the forwarder, which is one thread and so one core at most, for each GB of IP bytes it
forwarded; the median round trip of an idle link beyond the one described. ``--option`` sets further
keys of a link file, such as ``loss="0.0001%"`` or ``per_flow_cap="5gbit"``.
"""

import argparse
import json
import os
import statistics
import tomllib
from pathlib import Path

from netem.link import DIRECTIONS
from netem.link_file import read_link
from netem.probes import probes
from netem.tunnelled import ForwarderPath, open_forwarder

FLOWS = (1, 4)
RTT_SPAN_S = 2.0
#: Set for the whole project: at least this at 5 ms, and at most this beyond the round trip.
TARGET_GBIT_PER_S, TARGET_OVERHEAD_S = 2.0, 0.5e-3
GBIT = 125e6


def cpu_s(path: ForwarderPath) -> float:
    """User and system time of the forwarder so far (proc_pid_stat(5), fields 14 and 15)."""
    stat = Path(f"/proc/{path.forwarder.process.pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def carried_bytes(path: ForwarderPath) -> int:
    counters = path.counters()
    return counters.near_to_far.bytes + counters.far_to_near.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="10gbit")
    parser.add_argument("--rtt", default="5ms")
    parser.add_argument("--bulk-s", type=float, default=2.0)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    document = {"rate": given.rate, "rtt": given.rtt} | tomllib.loads("\n".join(given.option))
    spec = read_link(document, "benchmark", "the command line").spec
    rates = {}
    with open_forwarder(spec) as path, probes(path) as ends:
        rtts_s = ends.rtts_s(RTT_SPAN_S)
        before_s, before_bytes = cpu_s(path), carried_bytes(path)
        for flows in FLOWS:
            rates[flows] = {
                f"{name}_gbit_per_s": round(ends.rate(name, flows, given.bulk_s) / GBIT, 2)
                for name in DIRECTIONS
            }
        used_s = cpu_s(path) - before_s
        carried_gb = (carried_bytes(path) - before_bytes) / 1e9
        notes = path.notes
    overhead_s = statistics.median(rtts_s) - path.applied.rtt_s
    slowest = min(value for one in rates.values() for value in one.values())
    print(
        json.dumps(
            {
                "link": str(spec),
                "flows": rates,
                "rtt_overhead_p50_s": round(overhead_s, 6),
                "rtt_samples": len(rtts_s),
                "cpu_s_per_gbyte": round(used_s / carried_gb, 3),
                "meets_target": slowest >= TARGET_GBIT_PER_S and overhead_s <= TARGET_OVERHEAD_S,
                "cores": os.cpu_count(),
                "load_average_1min": round(os.getloadavg()[0], 2),
                "notes": notes,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
