"""``prfaas plan`` on a terminal: the plan, what it costs and where it ends, then the remarks.

Tables of at most 80 columns from the planner's document (``harness.planning.plan``).
"""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.phrases import percent, scaled
from harness.planning.wording import GBIT_BYTES, instances, rate_text, tokens_text

#: The stages as short as a column of a terminal takes them.
_STAGES = {
    "prfaas_prefill": "PrfaaS",
    "pd_prefill": "prefill",
    "pd_decode": "decode",
    "link": "link",
}


def print_plan(document: dict[str, Any]) -> None:
    """The plan on stdout."""
    Console(highlight=False).print(plan_view(document))


def plan_view(document: dict[str, Any]) -> Group:
    """All that the terminal shows of a plan."""
    parts: list[RenderableType] = [deployments_table(document)]
    costs = cost_table(document)
    if costs is not None:
        parts += ["", costs, ""]
    parts += [Text(line) for line in remarks(document)]
    return Group(*parts)


def deployments_table(document: dict[str, Any]) -> Table:
    """A row a deployment: the plan found, what it carries, and its TTFT."""
    rate = f"{document['rate_req_per_s']:g}"
    table = _table(
        f"{document['scenario']}: plans by the {document['objective']} equations",
        "plan: N_prfaas/N_p/N_d; t in tokens; paper, exact: Lambda_max in req/s with T(E[l]) and "
        "with E[T(l)]; x: paper over homogeneous_pd; binds: the bottleneck; Gb/s: egress; TTFT in "
        f"s, mean: service alone and @ {rate} req/s",
    )
    table.add_column("deployment", no_wrap=True)
    # The one column that may be folded: several clusters make it long.
    table.add_column("plan", justify="right", overflow="fold")
    for name in ("t", "paper", "exact", "x", "binds", "Gb/s", "TTFT", f"@{rate}"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in document["deployments"].items():
        table.add_row(
            name,
            instances(one),
            tokens_text(one["threshold_tokens"]) or "-",
            _figure(one["throughput_req_per_s"]),
            _figure(one["throughput_exact_req_per_s"]),
            _figure(one["ratio"]),
            _STAGES[one["bottleneck"]],
            _figure(scaled(one["egress_bytes_per_s"], 1 / GBIT_BYTES), 1),
            _figure(one["ttft"]["service_ttft_mean_s"]),
            _figure(one["ttft"]["ttft_mean_s"]),
        )
    return table


def cost_table(document: dict[str, Any]) -> Table | None:
    """A row a deployment held against the homogeneous one; None where nothing is comparable."""
    costs = document["equal_cost"]
    if costs is None:
        return None
    unit = "USD" if costs["currency"] == "USD" else "relative prices"
    ratios = [one["gain"] for one in costs["comparisons"][0]["break_even"]]
    table = _table(
        f"at equal cost, against homogeneous_pd ({unit})",
        "gain: in req/s for the same money; ratio: price of PrfaaS over PD hardware, and what it "
        "may be for the named gain; PB/mo: egress a month at Lambda_max; per GB, per Gb/s "
        "(and month): link prices that use up the gain",
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
            percent(one["gain_at_equal_cost"]),
            _figure(one["price_ratio"]),
            *(_figure(each["price_ratio"]) for each in one["break_even"]),
            _figure(link["egress_bytes_per_month"] / 1e15),
            _figure(link["break_even_price_per_gb"], 4),
            _figure(link["break_even_price_per_gbps_month"], 0),
        )
    return table


def remarks(document: dict[str, Any]) -> Iterator[str]:
    """Where the link becomes the limit, then warnings and notes."""
    sweeps = document["sweeps"]
    if sweeps is not None:
        limit = sweeps["bandwidth"]["hard_limit_bytes_per_s"]
        yield (
            f"hard limit: below {rate_text(limit)} the link holds every plan back"
            if limit > 0
            else "hard limit: none, the best plan sends nothing across the link"
        )
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
