"""Rows, targets and the table of the transport benchmark.

A row is one variant on one link: medians over its repeats, with the least and the most. Ratios are
formed within a repeat, whose runs lie next to each other in time, before their median is taken.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.transport_links import Wire
from benchmarks.transport_measure import Sample, Variant

Row = dict[str, Any]

HEADINGS = (
    "link", "conns", "what", "Gbit/s", "spread", "of iperf3", "of Mooncake", "CPU s/GB",
    "exposed s",
)  # fmt: skip
LEFT = ("link", "what")
_MODES = {False: "stream", True: "prefill"}
_OTHER_TOOLS = ("iperf3", "mooncake")


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a figure of some rows; ``at_least`` or else at most."""

    name: str
    applies: Callable[[Row], bool]
    value: Callable[[Row], float | None]
    bound: float
    at_least: bool = True


def _four_unshaped(row: Row) -> bool:
    return bool(row["link"] == "unshaped" and row["connections"] == 4)


TARGETS = (
    Target(
        "unshaped, 4 connections, no checksum, of iperf3 -P 4",
        lambda row: _four_unshaped(row) and not row["checksum"],
        lambda row: row["ratio_to_iperf3"],
        0.75,
    ),
    Target(
        "unshaped, 4 connections, checksum, of iperf3 -P 4",
        lambda row: _four_unshaped(row) and row["checksum"],
        lambda row: row["ratio_to_iperf3"],
        0.5,
    ),
    Target(
        "unshaped, 4 connections, of Mooncake TCP",
        _four_unshaped,
        lambda row: row["ratio_to_mooncake"],
        1.5,
    ),
    Target(
        "1 and 5 Gbit/s, of iperf3 with as many connections",
        lambda row: row["link"] in ("1gbit", "5gbit"),
        lambda row: row["ratio_to_iperf3"],
        0.97,
    ),
    Target(
        "CPU s/GB of both ends, no checksum",
        lambda row: row["link"] != "capped" and not row["checksum"],
        lambda row: row["cpu_s_per_gb"],
        0.7,
        at_least=False,
    ),
    Target(
        "CPU s/GB of both ends, checksum",
        lambda row: row["link"] != "capped" and row["checksum"],
        lambda row: row["cpu_s_per_gb"],
        1.2,
        at_least=False,
    ),
    Target(
        "capped flows, of min(cap x connections, link)",
        lambda row: row["link"] == "capped",
        lambda row: row["goodput_bytes_per_s"] / row["link_share_bytes_per_s"],
        0.9,
    ),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs that were made interleaved: one number of connections on one link."""

    wire: Wire
    connections: int
    congestion_control: str
    #: By variant, one sample a repeat, in the order of the repeats.
    samples: dict[Variant, list[Sample]]


def rows_of(cell: Cell) -> tuple[list[Row], list[Row]]:
    """The rows of the transport and those of the tools it is compared with."""
    by_tool = {variant.tool: samples for variant, samples in cell.samples.items()}
    own: list[Row] = []
    others: list[Row] = []
    for variant, samples in cell.samples.items():
        row = _row(cell, variant, samples)
        if variant.tool in _OTHER_TOOLS:
            others.append({"tool": variant.tool, **row})
            continue
        row |= {
            "checksum": variant.checksum,
            "layerwise": variant.layerwise,
            "tls": variant.tls,
            "mode": _MODES[variant.prefill],
        }
        for tool in _OTHER_TOOLS:
            row |= _ratio(tool, samples, by_tool.get(tool))
        own.append(row)
    return own, others


def _row(cell: Cell, variant: Variant, samples: Sequence[Sample]) -> Row:
    goodputs = [sample.goodput_bytes_per_s for sample in samples]
    cpus = [sample.cpu_s_per_gb for sample in samples]
    row: Row = {
        "link": cell.wire.name,
        "connections": variant.connections if variant.tool != "mooncake" else None,
        "beside": cell.connections,
        "congestion_control": cell.congestion_control,
        "repeats": len(samples),
        "goodput_bytes_per_s": statistics.median(goodputs),
        "goodput_min_max_bytes_per_s": [min(goodputs), max(goodputs)],
        "cpu_s_per_gb": statistics.median(cpus),
        "cpu_min_max_s_per_gb": [min(cpus), max(cpus)],
        "link_share_bytes_per_s": cell.wire.expected_bytes_per_s(cell.connections),
    }
    for name, value in samples[-1].details.items():
        values = [sample.details[name] for sample in samples]
        row[name] = statistics.median(values) if isinstance(value, float) else value
    return row


def _ratio(tool: str, samples: Sequence[Sample], others: Sequence[Sample] | None) -> Row:
    if others is None:
        return {f"ratio_to_{tool}": None, f"ratio_min_max_to_{tool}": None}
    ratios = [
        one.goodput_bytes_per_s / other.goodput_bytes_per_s
        for one, other in zip(samples, others, strict=True)
    ]
    return {
        f"ratio_to_{tool}": statistics.median(ratios),
        f"ratio_min_max_to_{tool}": [min(ratios), max(ratios)],
    }


def targets_of(runs: Sequence[Row]) -> list[Row]:
    """What the transport must show, where it was run: of each target its worst row decides."""
    found = []
    for target in TARGETS:
        values = [
            (value, row)
            for row in runs
            if row["mode"] == "stream" and not row["tls"] and target.applies(row)
            if (value := target.value(row)) is not None
        ]
        if values:
            worst_of = min if target.at_least else max
            worst, row = worst_of(values, key=lambda pair: pair[0])
            met = worst >= target.bound if target.at_least else worst <= target.bound
            at = {key: row[key] for key in ("link", "connections", "checksum")}
            found.append(
                {"target": target.name, "bound": target.bound, "worst": worst, "met": met, "at": at}
            )
    return found


def print_tables(document: dict[str, Any], console: Console) -> None:
    """The document for a reader: the rows of a link and a number of connections together."""
    table = Table(title="KV transport", caption="CPU of both ends; least to most of the repeats")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
    shown = None
    rows = [*document["peers"], *document["runs"]]
    links = [link["link"] for link in document["links"]]
    for row in sorted(rows, key=lambda row: (links.index(row["link"]), row["beside"])):
        if shown is not None and shown != (row["link"], row["beside"]):
            table.add_section()
        shown = row["link"], row["beside"]
        least, most = row["goodput_min_max_bytes_per_s"]
        table.add_row(
            row["link"],
            _text(row["connections"], "d"),
            _mode(row),
            f"{row['goodput_bytes_per_s'] / 125e6:.3f}",
            f"{least / 125e6:.2f}-{most / 125e6:.2f}",
            _text(row.get("ratio_to_iperf3"), ".3f"),
            _text(row.get("ratio_to_mooncake"), ".2f"),
            f"{row['cpu_s_per_gb']:.2f}",
            _text(row.get("exposed_s"), ".4f"),
        )
    console.print(table)
    if document["mooncake"] is None:
        console.print(f"Mooncake is not measured: {document['mooncake_reason']}")
    for target in document["targets"]:
        mark = "met" if target["met"] else "NOT MET"
        console.print(
            f"{mark}: {target['target']}: {target['worst']:.3f}, bound {target['bound']:g}",
            highlight=False,
        )


def _mode(row: Row) -> str:
    if "tool" in row:
        return str(row["tool"])
    words = [row["mode"], "checksum" if row["checksum"] else "", "tls" if row["tls"] else ""]
    words.append("" if row["layerwise"] else "late")
    return " ".join(word for word in words if word)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
