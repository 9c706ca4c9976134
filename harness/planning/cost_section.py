"""The report's section on equal cost: prices in the open, gains and break-even prices.

``equal_cost`` of the planner's document (``harness.planning.economics``).
"""

from collections.abc import Iterator
from typing import Any

from harness.phrases import percent
from harness.planning.blocks import Value, side_by_side
from harness.planning.wording import listed, rate_text
from reports.document import Block, Prose

_PETABYTE = 1e15


def cost_blocks(document: dict[str, Any]) -> Iterator[Block]:
    """Prices, then every deployment with a PrfaaS cluster against the homogeneous one."""
    costs = document["equal_cost"]
    unit = "USD" if costs["currency"] == "USD" else "units of the scenario's relative prices"
    prices = listed(f"{price:g} for {name}" for name, price in costs["price_per_gpu_hour"].items())
    gpus = listed(f"{count} {name}" for name, count in costs["homogeneous_gpus"].items())
    yield Prose(
        f"A GPU for an hour costs, in {unit}, {prices}. The homogeneous deployment has {gpus}, "
        f"costs {costs['homogeneous_cost_per_hour']:g} an hour and carries "
        f"{costs['homogeneous_req_per_s']:.2f} req/s. The link costs "
        f"{costs['link_price_per_gb']:g} a GB and {costs['link_price_per_gbps_month']:g} a Gbit/s "
        "and month of 730 hours."
    )
    yield side_by_side(
        {one["deployment"]: one for one in costs["comparisons"]},
        f"Against the homogeneous deployment at equal cost, money in {unit}. A gain is in requests "
        "a second for the same money, the link's included: scaled linearly, or over the whole "
        "instances that the budget buys, split anew. A break-even price is the one at which the "
        "gain is as named; that of the link holds where the other price of the link is 0.",
        _ROWS,
    )


def _whole(one: dict[str, Any]) -> str | None:
    whole = one["whole_instances"]
    if whole is None:
        return None
    split = f"{whole['num_prefill']}/{whole['num_decode']}"
    return f"{split}: {whole['throughput_req_per_s']:.3f}"


def _break_even(gain: float, key: str) -> Value:
    def ratio(one: dict[str, Any]) -> float | None:
        found: float | None = next(
            (each[key] for each in one["break_even"] if each["gain"] == gain), None
        )
        return found

    return ratio


def _link(key: str, factor: float = 1.0) -> Value:
    def value(one: dict[str, Any]) -> float | None:
        found = one["link"][key]
        return None if found is None else found * factor

    return value


_ROWS: dict[str, Value] = {
    "GPUs": lambda one: listed(f"{count} {name}" for name, count in one["gpus"].items()),
    "price ratio, PrfaaS to PD hardware": lambda one: one["price_ratio"],
    "cost per hour": lambda one: one["cost_per_hour"],
    "Lambda_max (req/s)": lambda one: one["throughput_req_per_s"],
    "gain at equal cost, scaled linearly": lambda one: percent(one["link"]["gain"]),
    "the same if the link cost nothing": lambda one: percent(one["gain_at_equal_cost"]),
    "homogeneous N_p/N_d of the same cost, and its req/s": _whole,
    "gain over it": lambda one: percent(one["whole_instances"] and one["whole_instances"]["gain"]),
    "price ratio that breaks even": _break_even(0.0, "price_ratio_with_link"),
    "price ratio for +15 %": _break_even(0.15, "price_ratio_with_link"),
    "link": lambda one: rate_text(one["link"]["rate_bytes_per_s"]),
    "egress a month at Lambda_max (PB)": _link("egress_bytes_per_month", 1 / _PETABYTE),
    "egress a month at the offered load (PB)": _link(
        "offered_egress_bytes_per_month", 1 / _PETABYTE
    ),
    "link cost per hour at Lambda_max": _link("cost_per_hour"),
    "link cost per hour at the offered load": _link("offered_cost_per_hour"),
    "price per GB that breaks even, rent 0": _link("break_even_price_per_gb"),
    "price per Gbit/s and month that breaks even, per GB 0": _link(
        "break_even_price_per_gbps_month"
    ),
}
