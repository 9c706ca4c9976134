"""GPU-hours and cost of a run, deployment by deployment.

    GPUs x (ready + load + drain) x repeats        GPUs of the nodes in use, held meanwhile

Two bounds: ``least`` with servers that are ready at once and a drain of the longest request,
``most`` with ``engine.ready_timeout`` and ``testbed.request_timeout``. Live runs take real time, so
the load lasts as long as its schedule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.launch_plan.placement import Placement
from harness.scenario import Scenario

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Hours:
    """``held_gpus`` of the nodes in use, idle GPUs on them included; costs None without prices."""

    gpus: dict[str, int]
    held_gpus: dict[str, int]
    repeats: int
    load_s: float
    least_s: float
    most_s: float
    least_gpu_hours: float
    most_gpu_hours: float
    currency: str | None
    least_cost: float | None
    most_cost: float | None


def hours(
    scenario: Scenario, placements: Sequence[Placement], load_s: float, repeats: int
) -> Hours:
    """``load_s``: from the first to the last planned request."""
    gpus: dict[str, int] = {}
    nodes = {}
    for placement in placements:
        for rank in placement.ranks:
            kind = rank.node.hardware
            gpus[kind] = gpus.get(kind, 0) + rank.gpus
            nodes[rank.node.name] = rank.node
    held: dict[str, int] = {}
    for node in nodes.values():
        held[node.hardware] = held.get(node.hardware, 0) + node.gpus
    sglang = scenario.engine.sglang
    ready_s = 0.0 if sglang is None else sglang.ready_timeout_s
    least_s = repeats * (load_s + _longest_request_s(scenario))
    most_s = repeats * (ready_s + load_s + scenario.testbed.request_timeout_s)
    prices, currency = _prices(scenario, held)
    per_hour = None if prices is None else sum(held[name] * prices[name] for name in held)
    least, most = least_s / _SECONDS_PER_HOUR, most_s / _SECONDS_PER_HOUR
    return Hours(
        gpus=gpus,
        held_gpus=held,
        repeats=repeats,
        load_s=load_s,
        least_s=least_s,
        most_s=most_s,
        least_gpu_hours=sum(held.values()) * least,
        most_gpu_hours=sum(held.values()) * most,
        currency=currency,
        least_cost=None if per_hour is None else per_hour * least,
        most_cost=None if per_hour is None else per_hour * most,
    )


def _longest_request_s(scenario: Scenario) -> float:
    """Of the longest prompt and output on the slowest hardware, with nothing in its way."""
    workload = scenario.workload
    prefill_s = max(
        one.profile.prefill_s(workload.max_tokens) for one in scenario.hardware.values()
    )
    return prefill_s + workload.output_max_tokens * scenario.slo.tpot_s


def _prices(
    scenario: Scenario, held: Mapping[str, int]
) -> tuple[dict[str, float] | None, str | None]:
    for key, currency in (("price_usd_per_gpu_hour", "USD"), ("relative_price", "relative")):
        found = {name: getattr(scenario.hardware[name], key) for name in held}
        if all(price is not None for price in found.values()):
            return found, currency
    return None, None
