"""``prfaas plan`` on a terminal: the plan, what it costs and where it ends, then the remarks.

Tables of at most 80 columns from the planner's document (``harness.planning.plan``).
"""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.phrases import SHORT_STAGES, percent, scaled
from harness.planning.wording import (
    GBIT_BYTES,
    accuracy_lines,
    as_planned_lines,
    instances,
    limit_text,
    planned_by,
    tokens_text,
)

#: As long as a plan may be beside the other columns in a terminal of 80.
_MOST_PLAN = 10


def print_plan(document: dict[str, Any]) -> None:
    """The plan on stdout."""
    Console(highlight=False).print(plan_view(document))


def plan_view(document: dict[str, Any]) -> Group:
    """All that the terminal shows of a plan."""
    parts: list[RenderableType] = [deployments_table(document), ""]
    costs = cost_table(document)
    if costs is not None:
        parts += [costs, ""]
    parts += [Text(line) for line in remarks(document)]
    return Group(*parts)


def deployments_table(document: dict[str, Any]) -> Table:
    """A row a deployment: the plan found, what it carries, and its TTFT."""
    rate = f"{document['rate_req_per_s']:.4g}"
    table = _table(
        f"{document['scenario']}: {planned_by(document)}",
        "plan: N_prfaas/N_p/N_d; t in tokens; paper, exact: Lambda_max in req/s with T(E[l]) and "
        f"with E[T(l)]; by the {document['objective']} equations are x: over homogeneous_pd, "
        f"binds: the bottleneck, Gb/s: egress at most; TTFT in s, mean: service alone and @ {rate} "
        "req/s",
    )
    table.add_column("deployment", no_wrap=True)
    table.add_column("plan", justify="right", overflow="fold")  # of a great many clusters
    for name in ("t", "paper", "exact", "x", "binds", "Gb/s", "TTFT", f"@{rate}"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in document["deployments"].items():
        table.add_row(
            name,
            _plan_cell(one),
            tokens_text(one["threshold_tokens"]) or "-",
            _figure(one["throughput_req_per_s"]),
            _figure(one["throughput_exact_req_per_s"]),
            _figure(one["ratio"]),
            SHORT_STAGES[one["bottleneck"]],
            _figure(scaled(one["egress_bytes_per_s"], 1 / GBIT_BYTES), 1),
            _figure(one["ttft"]["service_ttft_mean_s"]),
            _figure(one["ttft"]["ttft_mean_s"]),
        )
    return table


def _plan_cell(one: dict[str, Any]) -> str:
    """The plan; a role a line where several clusters make it long."""
    plan = instances(one)
    return plan if len(plan) <= _MOST_PLAN else plan.replace("/", "/\n")


def cost_table(document: dict[str, Any]) -> Table | None:
    """A row a deployment held against the homogeneous one; None where nothing is comparable."""
    costs = document["equal_cost"]
    if costs is None:
        return None
    unit = "USD" if costs["currency"] == "USD" else "relative prices"
    ratios = [one["gain"] for one in costs["comparisons"][0]["break_even"]]
    table = _table(
        f"at equal cost, against homogeneous_pd ({unit})",
        "gain: in req/s for the same money, the link paid for as [cost] says; ratio: price of "
        "PrfaaS over PD hardware, and what it may be for the named gain; PB/mo: egress a month at "
        "Lambda_max; per GB, per Gb/s and month: the link's price that would use up the gain if "
        "it had no other",
    )
    table.add_column("deployment", no_wrap=True)
    names = ("cost/h", "gain", "ratio", *(f"at {100 * gain:+.0f}%" for gain in ratios))
    for name in (*names, "PB/mo", "per GB", "per Gb/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in costs["comparisons"]:
        link = one["link"]
        table.add_row(
            one["deployment"],
            f"{one['cost_per_hour']:,.4g}",
            percent(link["gain"]),
            _figure(one["price_ratio"]),
            *(_figure(each["price_ratio_with_link"]) for each in one["break_even"]),
            _figure(link["egress_bytes_per_month"] / 1e15),
            _figure(link["break_even_price_per_gb"], 4),
            _figure(link["break_even_price_per_gbps_month"], 0),
        )
    return table


def remarks(document: dict[str, Any]) -> Iterator[str]:
    """Where the link becomes the limit, how good TTFT is, then warnings and notes."""
    limit = limit_text(document)
    if limit is not None:
        yield f"link: {limit}"
    yield from as_planned_lines(document)
    yield from accuracy_lines(document)
    for warning in document["warnings"]:
        yield f"warning: {warning}"
    for note in document["notes"]:
        yield f"note: {note}"


def _table(title: str, caption: str) -> Table:
    return Table(
        title=Text(title, style="table.title"),
        caption=Text(caption, style="table.caption"),
        box=box.SIMPLE_HEAD,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )


def _figure(value: float | None, decimals: int = 2) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"
