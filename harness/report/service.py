"""The sections of a report on what deployments carry and where time to first token goes."""

from collections.abc import Callable, Iterator
from typing import Any

from harness import figures
from harness.core import BUDGET_TERMS
from harness.phrases import milliseconds, percent
from harness.report.blocks import Run, by_deployment, figure
from reports.document import Block, Prose

#: The deployment whose capacity the others are compared with, where the scenario has it.
BASELINE = "homogeneous_pd"


def capacity(data: Run) -> Iterator[Block]:
    base_name = BASELINE if BASELINE in data.summaries else next(iter(data.summaries), "")
    base = data.summaries.get(base_name, {}).get("lambda_max_req_per_s")

    def ratio(one: dict[str, Any]) -> str | None:
        rate = one["lambda_max_req_per_s"]
        return f"{rate / base:.2f}" if rate and base else None

    def busiest(one: dict[str, Any]) -> str | None:
        stages = one["modelled_utilisation"].items()
        stage, used = max(stages, key=lambda item: item[1] or 0.0, default=("", None))
        return f"{stage.replace('_', ' ')}, {percent(used, sign=False)}" if stage else None

    yield by_deployment(
        data,
        "Modelled capacity (Lambda_max): with service times at the mean length, T(E[l]), as the "
        "paper has it, and with mean service times, E[T(l)].",
        {
            "Lambda_max with T(E[l]) (req/s)": lambda one: one["lambda_max_req_per_s"],
            "Lambda_max with E[T(l)] (req/s)": lambda one: one["lambda_max_exact_req_per_s"],
            f"over {base_name}, T(E[l])": ratio,
            "busiest stage at the offered load": busiest,
        },
    )
    yield Prose(
        "This capacity is modelled. A measured one takes a saturation search over loads, which "
        "comes with the studies; a run at one offered load cannot show it."
    )


def distribution(data: Run) -> Iterator[Block]:
    lines = "Solid: measured. Dashed: simulation of the same schedule. "
    if data.is_simulated:
        lines = "Dashed: simulated. "
    yield figure(
        figures.ttft_distribution(
            data.requests, data.simulated, data.names, are_simulated=data.is_simulated
        ),
        lines + "A line that ends below 100 % leaves out requests that were never answered.",
    )


def budget(data: Run) -> Iterator[Block]:
    beside = (
        "a simulation has neither harness overhead nor a residual."
        if data.is_simulated
        else "harness overhead is send lag, gateway, first token and return; the residual is what "
        "the terms, each measured inside one process, leave unexplained."
    )
    yield figure(
        figures.budget(data.requests, data.names),
        "Mean over the completed requests of each length bin. Transfer is the part that prefill "
        f"does not hide, up to the receiver's acknowledgement; {beside}",
    )
    terms = [*BUDGET_TERMS, "residual"]
    if data.is_simulated:
        terms = [
            term
            for term in terms
            if any(one["budget_mean_s"][term] is not None for one in data.summaries.values())
        ]
    yield by_deployment(
        data,
        "Mean of every term in milliseconds of scenario time, all lengths together.",
        {term.replace("_", " "): _mean_of(term) for term in terms},
    )


def _mean_of(term: str) -> Callable[[dict[str, Any]], object]:
    return lambda one: milliseconds(one["budget_mean_s"][term])
