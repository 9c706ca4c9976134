"""How exactly a backend does what a link describes, by the figures set for it. Prints JSON.

    python benchmarks/link_accuracy.py [--backend netem|forwarder] [--only NAME]...
    python tests/uml.py -- python benchmarks/link_accuracy.py    # where the kernel lacks netem

Each figure is told beside what it should be and the error allowed: the median round trip of a link
of 10 ms, the deviation of its jitter each way, the share of datagrams lost and the mean run of
losses (independent over 50,000, Gilbert-Elliott over 200,000), the rate of IP bytes of four TCP
connections, the share of packets lost by TCP that sends offload packets, and whether a seed gives
the same losses again (tc-netem: from kernel 6.6 on). Delays hold on a quiet machine only; run it
some times and take the best, since a machine only ever adds.
"""

import argparse
import json
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from netem.datagrams import received, receiver, send
from netem.jitter import most_jitter_s
from netem.link import LinkSpec, symmetric
from netem.loss import GilbertElliott, IndependentLoss, Loss
from netem.probes import Probes, probes
from netem.site import Path
from netem.testlink import BACKENDS, open_link

MBIT = 125e3
DEEP = 1_000_000
PER_S, SILENCE_S = 10_000.0, 0.5
#: IPv4's and TCP's with time stamps, of every packet.
TCP_HEADERS_BYTES = 52
RTT_S, JITTER_S = 0.010, 0.002

Figures = dict[str, dict[str, Any]]


def figure(found: float, wanted: float, *, within: float) -> dict[str, Any]:
    """``within``: the error allowed, in the unit of both."""
    error = found - wanted
    return {
        "measured": float(f"{found:.5g}"),
        "described": wanted,
        "error": float(f"{error:.3g}"),
        "allowed": float(f"{within:.3g}"),
        "holds": abs(error) <= within,
    }


def link(rate: float = 1000 * MBIT, rtt_s: float = 0.0, **more: Any) -> LinkSpec:
    return symmetric("accuracy", rate, rtt_s, limit_packets=DEEP, **more)


@contextmanager
def measured(spec: LinkSpec, backend: Any) -> Iterator[tuple[Path, Probes]]:
    with open_link(spec, backend) as opened, probes(opened.path) as ends:
        yield opened.path, ends


def round_trip(backend: str) -> Figures:
    with measured(link(rtt_s=RTT_S), backend) as (_, ends):
        return {"p50_s": figure(statistics.median(ends.rtts_s(2.0)), RTT_S, within=0.5e-3)}


def jitter(backend: str) -> Figures:
    """Of a round trip, which is that of both ways: the root of 2 times one way's.

    What lies beyond the jitter is the machine's and left out; its share is told.
    """
    found = {}
    for distribution, one_way in (("uniform", JITTER_S / 3**0.5), ("normal", JITTER_S)):
        spec = link(rtt_s=4 * RTT_S, jitter_s=JITTER_S, jitter_distribution=distribution)
        with measured(spec, backend) as (_, ends):
            trips_s = [trip_s for _ in range(8) for trip_s in ends.rtts_s(2.0)]
        middle_s = statistics.median(trips_s)
        most_s = 2 * most_jitter_s(spec.near_to_far)
        kept_s = [trip_s for trip_s in trips_s if abs(trip_s - middle_s) <= most_s]
        deviation_s = statistics.pstdev(kept_s) / 2**0.5
        found[f"{distribution}_deviation_s"] = figure(
            deviation_s, one_way, within=0.15 * one_way
        ) | {"beyond_the_jitter": 1 - len(kept_s) / len(trips_s)}
    return found


def lost(path: Path, count: int) -> list[bool]:
    """Which of ``count`` datagrams from near do not reach far."""
    near, far = path.near.namespace, path.far.namespace
    assert near is not None
    assert far is not None
    missing = [True] * count
    with far.run(lambda: receiver(path.far.address)) as sink:
        address = sink.getsockname()
        sending = threading.Thread(target=near.run, args=(lambda: send(address, count, PER_S),))
        sending.start()
        came, wait = True, threading.Event()
        while came or sending.is_alive():
            came = False
            for payload, _, _ in received(sink):
                missing[int.from_bytes(payload[:4])] = False
                came = True
            wait.wait(0.01 if came or sending.is_alive() else SILENCE_S)
        sending.join()
    return missing


def losses(backend: str) -> Figures:
    models: tuple[tuple[str, Loss, int, float], ...] = (
        ("independent", IndependentLoss(0.01), 50_000, 0.002),
        ("gilbert_elliott", GilbertElliott(0.01, 0.1), 200_000, 0.2 * 0.01 / 0.11),
    )
    found = {}
    for name, loss, count, within in models:
        with open_link(link(loss=loss), backend) as opened:  # type: ignore[arg-type]  # a name
            missing = lost(opened.path, count)
        runs = [sum(1 for _ in run) for is_lost, run in groupby(missing) if is_lost]
        burst = loss.mean_burst_packets
        found[f"{name}_share"] = figure(sum(missing) / count, loss.mean_rate, within=within)
        found[f"{name}_mean_burst_packets"] = figure(
            statistics.fmean(runs), burst, within=0.2 * burst
        )
    return found


def rates(backend: str) -> Figures:
    """The fastest in large packets, of which a slow processor can make enough."""
    found = {}
    for mbit, mtu in ((10, 1500), (100, 1500), (1000, 65_000)):
        with measured(link(mbit * MBIT, 0.002, mtu_bytes=mtu), backend) as (_, ends):
            taken = statistics.median(ends.rate("far_to_near", 4, 1.0) for _ in range(3))
        rate_mbit = taken / (1 - TCP_HEADERS_BYTES / mtu) / MBIT
        found[f"{mbit}_mbit_per_s"] = figure(rate_mbit, float(mbit), within=0.03 * mbit)
    return found


def offload(backend: str) -> Figures:
    loss = 0.01
    with measured(link(rtt_s=0.001, loss=loss), backend) as (path, ends):
        before = path.counters().far_to_near
        ends.rate("far_to_near", 4, 3.0)
        after = path.counters().far_to_near
    dropped = after.dropped - before.dropped
    share = dropped / (dropped + after.packets - before.packets)
    deviation = (loss / (dropped / loss)) ** 0.5
    return {"share_of_packets": figure(share, loss, within=5 * deviation)}


def seed(backend: str) -> Figures:
    patterns = []
    for _ in range(2):
        with open_link(link(loss=0.05, seed=7), backend) as opened:  # type: ignore[arg-type]
            patterns.append(lost(opened.path, 3000))
            unsupported = [note for note in opened.notes if "seed" in note]
    same = patterns[0] == patterns[1] and any(patterns[0])
    return {"same_losses_again": {"holds": same or bool(unsupported), "same": same}}


MEASURES: dict[str, Callable[[str], Figures]] = {
    "round_trip": round_trip,
    "jitter": jitter,
    "loss": losses,
    "rate": rates,
    "offload_loss": offload,
    "seed": seed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    backends = [name for name in BACKENDS if name != "relay"]
    parser.add_argument("--backend", choices=backends, default="netem")
    parser.add_argument("--only", action="append", choices=MEASURES, default=[], metavar="NAME")
    given = parser.parse_args()
    figures = {name: MEASURES[name](given.backend) for name in given.only or MEASURES}
    print(
        json.dumps(
            {
                "backend": given.backend,
                "kernel": os.uname().release,
                "figures": figures,
                "all_hold": all(one["holds"] for each in figures.values() for one in each.values()),
                "cores": os.cpu_count(),
                "load_average_1min": round(os.getloadavg()[0], 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
