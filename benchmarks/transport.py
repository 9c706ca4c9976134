"""KV transport between two namespaces against iperf3 and Mooncake's TCP, interleaved in one run.

    python -m benchmarks.transport [--json] [--quick] [--tls] [--links unshaped,1gbit]
                                   [--connections 1,4] [--repeats N] [--window-s N]

Sender and receiver are processes of their own that use the public API only. For each link and
number of connections all variants run one after the other, in alternating order, ``--repeats``
times. On unshaped, 1gbit, 5gbit and capped a stream of transfers is measured; on the named links
(rates and caps divided by 100, delays kept, variation left out) transfers beside prefills, each
layer sent when it is ready or all after the last. Needs root, iperf3 and a kernel with sch_tbf.
Exit status: 0 every target met, 1 one missed, 2 bad usage, 3 the links could not be built.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from benchmarks.transport_links import CAPPED, PLAIN_RATES_BYTES_PER_S, Wire, link_names, open_wire
from benchmarks.transport_measure import Ends, How, Variant, measure, open_ends
from benchmarks.transport_peers import iperf3_version, mooncake_lack
from benchmarks.transport_report import Cell, Row, print_tables, rows_of, targets_of
from harness.core import PrfaasError, ScenarioError
from harness.transport.tls import TlsFiles
from netem.link import LinkError

CONNECTIONS, NAMED_CONNECTIONS, QUICK_CONNECTIONS = (1, 4, 8, 16), (1, 8), (1, 4)
#: As many as the link's rate needs of capped flows, and more.
BEYOND_THE_CAP = 32
QUICK_LINKS = ("unshaped", "1gbit")
#: Not run unless named: one is ``capped`` again, the other is nothing without its variation.
LEFT_OUT = ("cross_az_capped", "microburst")
#: The unshaped runs share two cores with everything else and spread most.
REPEATS = {"unshaped": 3, "1gbit": 2, "5gbit": 2, CAPPED.name: 2}
#: Characters of the table, also where it goes into a file.
MIN_WIDTH = 132
#: Where TLS and Mooncake are measured, of the numbers of connections.
REFERENCE_CONNECTIONS = 4


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transport", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--quick", action="store_true", help="two links, one repeat, 1 s windows")
    parser.add_argument("--tls", action="store_true", help="also over mutual TLS (needs openssl)")
    parser.add_argument("--links", type=_names, metavar="NAMES", help=", ".join(link_names()))
    parser.add_argument("--connections", type=_counts, metavar="NUMBERS", help="1 to 64 each")
    parser.add_argument("--repeats", type=int, choices=range(1, 100), metavar="N")
    parser.add_argument("--window-s", type=int, choices=range(1, 60), metavar="N")
    parser.add_argument("--congestion-control", metavar="NAME")
    parser.add_argument("--mooncake-python", default=sys.executable, metavar="PATH")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in link_names():
            raise argparse.ArgumentTypeError(
                f"there is no link {name!r}; there are {', '.join(link_names())}"
            )
    return names


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) if part.isdecimal() else 0 for part in text.split(","))
    if not all(1 <= count <= 64 for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers from 1 to 64, such as 1,4,8")
    return counts


def variants_of(link: str, connections: int, tls: bool, mooncake: bool) -> list[Variant]:
    """What is run beside each other on a link with a number of connections."""
    iperf3 = Variant("iperf3", connections)
    if link not in PLAIN_RATES_BYTES_PER_S and link != CAPPED.name:
        return [
            iperf3,
            Variant("prfaas", connections, checksum=True, prefill=True),
            Variant("prfaas", connections, checksum=True, prefill=True, layerwise=False),
        ]
    if link == CAPPED.name:
        return [iperf3, Variant("prfaas", connections, checksum=True)]
    variants = [iperf3, *(Variant("prfaas", connections, checksum=on) for on in (False, True))]
    if connections == REFERENCE_CONNECTIONS:
        if tls:
            variants += [Variant("prfaas", connections, tls=True)]
        if mooncake:
            variants += [Variant("mooncake", connections)]
    return variants


def connections_of(link: str, given: argparse.Namespace) -> tuple[int, ...]:
    if given.connections is not None:
        counts: tuple[int, ...] = given.connections
        return counts
    if given.quick:
        return QUICK_CONNECTIONS
    if link == CAPPED.name:
        return (*CONNECTIONS, BEYOND_THE_CAP)
    return CONNECTIONS if link in PLAIN_RATES_BYTES_PER_S else NAMED_CONNECTIONS


def links_of(given: argparse.Namespace) -> tuple[str, ...]:
    if given.links is not None:
        names: tuple[str, ...] = given.links
        return names
    if given.quick:
        return QUICK_LINKS
    return tuple(name for name in link_names() if name not in LEFT_OUT)


def run_cell(ends: Ends, variants: Sequence[Variant], repeats: int, how: How) -> Cell:
    """All variants, one after the other, there and back again."""
    found: dict[Variant, list[Any]] = {variant: [] for variant in variants}
    for repeat in range(repeats):
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            sample = measure(variant, ends, how)
            found[variant].append(sample)
            print(
                f"{ends.wire.name}: {variant}: {sample.goodput_bytes_per_s / 125e6:.3f} Gbit/s, "
                f"{sample.cpu_s_per_gb:.2f} CPU s/GB",
                file=sys.stderr,
            )
    used = how.congestion_control or ends.wire.kernel_tcp[1].congestion_control
    return Cell(ends.wire, variants[0].connections, used, found)


def run_link(wire: Wire, given: argparse.Namespace, how: How, mooncake: bool) -> Iterator[Cell]:
    repeats = given.repeats or (1 if given.quick else REPEATS.get(wire.name, 1))
    with open_ends(wire) as ends:
        for connections in connections_of(wire.name, given):
            variants = variants_of(wire.name, connections, given.tls, mooncake)
            yield run_cell(ends, variants, repeats, how)


def run(given: argparse.Namespace) -> dict[str, Any]:
    version, lack = iperf3_version(), mooncake_lack(given.mooncake_python)
    runs: list[Row] = []
    peers: list[Row] = []
    wires: list[Row] = []
    with ExitStack() as stack:
        how = How(
            window_s=given.window_s or (1 if given.quick else 2),
            congestion_control=given.congestion_control,
            mooncake_python=given.mooncake_python,
            tls=stack.enter_context(certificates()) if given.tls else None,
        )
        for name in links_of(given):
            with open_wire(name) as wire:
                wires.append(_described(wire))
                for cell in run_link(wire, given, how, lack is None):
                    own, others = rows_of(cell)
                    runs += own
                    peers += others
    measured = [row for row in peers if row["tool"] == "mooncake"]
    if lack is None and not measured:
        lack = f"it runs beside {REFERENCE_CONNECTIONS} connections on a link with a stream"
    return {
        "runs": runs,
        "peers": peers,
        "targets": targets_of(runs),
        "mooncake": measured or None,
        "mooncake_reason": None if measured else lack,
        "links": wires,
        "iperf3": version,
        "window_s": how.window_s,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def _described(wire: Wire) -> Row:
    before, after = wire.kernel_tcp
    return {
        "link": wire.name,
        "made_of": wire.made_of,
        "rate_bytes_per_s": wire.rate_bytes_per_s,
        "per_flow_cap_bytes_per_s": wire.cap_bytes_per_s,
        "rtt_s": wire.rtt_s,
        "kernel_tcp": {"before": asdict(before), "after": asdict(after)},
    }


@contextmanager
def certificates() -> Iterator[TlsFiles]:
    """A certificate of an authority of this run for every address of the wires (both 10.80)."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ScenarioError("--tls makes certificates with the openssl command; install it")
    new_key = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    names = ",".join(f"IP:10.80.{wire}.{side}" for wire in range(8) for side in (1, 2))
    with tempfile.TemporaryDirectory(prefix="prfaas-tls-") as place:
        authority, authority_key, certificate, key = (
            Path(place) / name for name in ("ca.pem", "ca.key", "node.pem", "node.key")
        )
        for command in (
            f"{new_key} -subj /CN=benchmark -keyout {authority_key} -out {authority}",
            f"{new_key} -subj /CN=node -addext subjectAltName={names} "
            f"-addext basicConstraints=critical,CA:FALSE -CA {authority} "
            f"-CAkey {authority_key} -keyout {key} -out {certificate}",
        ):
            subprocess.run([openssl, *command.split()], check=True, capture_output=True)
        yield TlsFiles(certificate, key, authority)


def main() -> int:
    given = arguments().parse_args()

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        document = run(given)
    except PrfaasError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except LinkError as error:
        print(error, file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("stopped; the links and the processes are gone", file=sys.stderr)
        return 130
    if given.json:
        print(json.dumps(document, indent=2))
    else:
        print_tables(document, Console(width=max(MIN_WIDTH, shutil.get_terminal_size().columns)))
    return 0 if all(target["met"] for target in document["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
