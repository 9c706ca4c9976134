"""The dry run on a terminal: placements, commands and GPU-hours in the order of their use.

Commands are printed whole, so that they can be copied; tables have at most 80 columns.
"""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_GBIT = 8e-9


def print_dry_run(document: dict[str, Any]) -> None:
    """The document of ``harness.launch_plan.document.dry_run`` on stdout."""
    console = Console(highlight=False, soft_wrap=True)
    for one in document["profiling"]:
        console.print(
            f"# on {one['node']} ({one['address']}): a server to measure {one['hardware']} by, "
            f"then the profiler\n{one['server']}\n{one['profile']}",
            markup=False,
        )
    for name, one in document["deployments"].items():
        console.print(_placements(name, one))
        for line in _commands(one):
            console.print(line, markup=False)
    console.print(_hours(document))
    for line in _remarks(document):
        console.print(line, markup=False)


def _placements(name: str, one: dict[str, Any]) -> Table:
    table = Table(title=f"{name}: placements", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("instance", "hardware", "node", "GPUs", "port", "bootstrap"):
        table.add_column(column, no_wrap=True)
    for each in one["placements"]:
        for number, rank in enumerate(each["ranks"]):
            first, last = rank["first_gpu"], rank["first_gpu"] + rank["gpus"] - 1
            table.add_row(
                each["instance"] if number == 0 else f"  rank {number}",
                each["hardware"],
                rank["node"],
                f"{first}-{last}" if last > first else str(first),
                str(each["port"]) if number == 0 else "",
                str(each["bootstrap_port"] or "") if number == 0 else "",
            )
    return table


def _commands(one: dict[str, Any]) -> Iterator[str]:
    for each in one["links"]:
        yield f"# on {each['node']} ({each['address']}), as root: the link on {each['interface']}"
        yield each["up"]
        yield each["verify"]
    for each in one["launches"]:
        yield f"# on {each['node']} ({each['address']}): {each['instance']}, rank {each['rank']}"
        yield each["shell"]
    for each in one["canaries"]:
        yield f"# canary {each['path']}: {each['prefill']} to {each['decode']}, when all are ready"
        yield each["shell"]
    yield "# the attach tables of the scenario, once all are ready (--emit-attach FILE writes them)"
    yield one["attach"]
    for each in one["links"]:
        yield f"# after the run, on {each['node']}: {each['down']}"


def _hours(document: dict[str, Any]) -> Table:
    table = Table(
        title="GPU-hours and what they buy",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
        caption="least to most: servers ready at once, or after engine.ready_timeout and with "
        "requests that end by testbed.request_timeout; req/s: Lambda_max, modelled, E[T(l)]",
        caption_justify="left",
    )
    table.add_column("deployment", no_wrap=True)
    for column in ("GPUs", "hours", "GPU-hours", "cost", "req/s", "/node", "/price"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in document["deployments"].items():
        spent, modelled = one["hours"], one["modelled"]
        table.add_row(
            name,
            "-" if spent is None else str(sum(spent["held_gpus"].values())),
            *_spans(spent),
            f"{modelled['lambda_max_exact_req_per_s']:.2f}",
            f"{modelled['exact_req_per_s_per_node']:.3f}",
            _figure(modelled["exact_req_per_s_per_price"]),
        )
    if document["total"] is not None:
        table.add_row("all", "", *_spans(document["total"]), "", "", "")
    return table


def _spans(spent: dict[str, Any] | None) -> tuple[str, str, str]:
    if spent is None:
        return "-", "-", "-"
    cost = "-"
    if spent["least_cost"] is not None:
        cost = f"{spent['least_cost']:,.0f}-{spent['most_cost']:,.0f}"
    return (
        f"{spent['least_s'] / 3600:.2f}-{spent['most_s'] / 3600:.2f}",
        f"{spent['least_gpu_hours']:,.0f}-{spent['most_gpu_hours']:,.0f}",
        cost,
    )


def _remarks(document: dict[str, Any]) -> Iterator[str]:
    yield f"gateway: {document['gateway']['place']}"
    yield f"load: {document['gateway']['load_place']}"
    for name, one in document["deployments"].items():
        if one["crossing"] is not None:
            rates = (one["crossing"][f"{key}_bytes_per_s"] * _GBIT for key in ("wire", "link"))
            wire, link = (f"{rate:.1f}" for rate in rates)
            yield f"{name}: {wire} of {link} Gbit/s cross at Lambda_max"
    for warning in document["warnings"]:
        yield f"warning: {warning}"
    for note in document["notes"]:
        yield f"note: {note}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
