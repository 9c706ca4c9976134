"""Whether the deployments that are put side by side have as many GPUs, and cost as much.

A ratio of requests a second says who carries more, not who does it for less: 32 H200 and 64 H20
carry more than 96 H20, and cost more. Equal cost is in ``harness.planning.economics``.
"""

from collections.abc import Iterator
from typing import Any

from harness.planning.variants import BASELINE

#: Costs that differ by less, as a share, are the same.
_SAME = 1e-9


def unequal_sizes(deployments: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A warning for each deployment with more or fewer GPUs than the one that it is held against.

    ``deployments`` as in the planner's document.
    """
    for name, one, base in _pairs(deployments):
        own, other = sum(one["gpus"].values()), sum(base["gpus"].values())
        if own != other:
            yield (
                f"{name} has {own:,} GPUs and {BASELINE} {other:,}: their ratio compares clusters "
                "of different sizes."
            )


def unequal_costs(deployments: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A note on the deployments whose cost an hour is another than that of the one they are held
    against, or is not known though their GPUs are others."""
    by_cost: dict[float | None, list[str]] = {}
    for name, one, base in _pairs(deployments):
        own, other = one["price_per_hour"], base["price_per_hour"]
        if own is None or other is None:
            if one["gpus"] != base["gpus"]:
                by_cost.setdefault(None, []).append(name)
        elif abs(own - other) > _SAME * max(own, other):
            by_cost.setdefault(own, []).append(name)
    for cost, names in by_cost.items():
        said = "an unknown price" if cost is None else f"{cost:,.4g} an hour"
        base_cost = deployments[BASELINE]["price_per_hour"]
        base_said = "an unknown price" if base_cost is None else f"{base_cost:,.4g}"
        only = "" if cost is None or base_cost is None else ", only the gain at equal cost is"
        yield (
            f"{' and '.join(names)} at {said} against {BASELINE} at {base_said}: Lambda_max and "
            f"its ratios are not at equal cost{only}."
        )


def _pairs(
    deployments: dict[str, dict[str, Any]],
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    base = deployments.get(BASELINE)
    for name, one in deployments.items():
        if base is not None and name != BASELINE:
            yield name, one, base
