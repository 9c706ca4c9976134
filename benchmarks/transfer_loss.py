"""Goodput over links that lose packets, measured, against harness.transfer_rate.

    python -m benchmarks.transfer_loss [--json] [--repeats 2]

Long transfers over connections that have carried one before, for each congestion control that the
kernel lets this process choose. Losses are independent. ``ratio`` is the median measured rate over
the modelled one; a run sees some tens of losses, so single runs scatter by 5 to 10 %. Needs a link
backend with namespaces (root). Prints a table, or one JSON document.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any, get_args

from benchmarks.transfer_exposure import machine
from benchmarks.transfer_exposure_cases import MBIT
from benchmarks.transfer_exposure_ends import Ends, open_ends
from harness.core import TransportError
from harness.transfer_rate import (
    CongestionControl,
    Flows,
    link_path,
    payload_bytes_per_s,
    rate_bounds,
)
from netem.link import LinkSpec, symmetric
from netem.testlink import open_link

#: With the connections that are opened over each, such that losses bound all of them below the
#: rate, and how long a transfer is to take: many times what a window takes to grow back.
LINKS = (
    (symmetric("short", 100 * MBIT, 20e-3, loss=1e-3), 3, 20.0),
    (symmetric("long", 100 * MBIT, 200e-3, loss=5e-4), 8, 60.0),
)
_PIECES = 16
_MOST_BYTES = 250e6


def measured_bytes_per_s(ends: Ends, spec: LinkSpec, flows: Flows, seconds: float) -> float:
    """Of a transfer that takes about that long by the model."""
    expected = payload_bytes_per_s(link_path(spec), flows)
    piece = round(min(expected * seconds, _MOST_BYTES) / _PIECES)
    played = ends.play(
        {
            "release_s": [0.0] * _PIECES,
            "sizes_bytes": [piece] * _PIECES,
            "connections": flows.connections,
            "pacing_bytes_per_s": None,
            "chunk_bytes": 64 * 1024,
        }
    )
    return piece * _PIECES / (played.last_byte_s - spec.far_to_near.delay_s)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for spec, connections, seconds in LINKS:
        for control in get_args(CongestionControl):
            print(f"{spec.name}, {control}", file=sys.stderr)
            flows = Flows(connections, control)
            bounds = rate_bounds(link_path(spec), flows)
            row = {
                "link": str(spec),
                "connections": connections,
                "congestion_control": control,
                "modelled_bytes_per_s": min(bounds.values()),
                "limited_by": min(bounds, key=lambda name: bounds[name]),
            }
            try:
                with open_link(spec) as link, open_ends(link, control) as ends:
                    measured_bytes_per_s(ends, link.applied, flows, seconds)
                    found = [
                        measured_bytes_per_s(ends, link.applied, flows, seconds)
                        for _ in range(options.repeats)
                    ]
            except TransportError as error:  # one that this kernel or its rules do not give
                yield row | {"measured_bytes_per_s": None, "ratio": None, "reason": str(error)}
                continue
            median = statistics.median(found)
            yield row | {
                "measured_bytes_per_s": median,
                "measured_min_bytes_per_s": min(found),
                "measured_max_bytes_per_s": max(found),
                "ratio": median / min(bounds.values()),
                "reason": None,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    before, found = machine(), list(rows(options))
    if options.json:
        print(json.dumps({"machine": before, "rows": found}, indent=1))
        return
    for row in found:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(
            f"{row['link']}: {row['connections']} x {row['congestion_control']}: "
            f"{row['modelled_bytes_per_s'] / 1e6:.2f} MB/s modelled ({row['limited_by']}), "
            f"measured / modelled {ratio}"
        )


if __name__ == "__main__":
    main()
