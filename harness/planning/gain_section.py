"""The report's section on whose gain it is: chip, threshold, or knowing the link.

``attribution`` of the planner's document (``harness.planning.attribution``).
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from harness.planning.blocks import Value, drawn
from harness.planning.figures import attribution_steps
from harness.planning.wording import listed
from reports.document import Block, Table


def gain_blocks(document: dict[str, Any]) -> Iterator[Block]:
    found = document["attribution"]
    yield from drawn(
        attribution_steps(document),
        "Chip: the PrfaaS hardware across the link; without it "
        f"{found['replaced_instances']} instances of the PD hardware in its stead. Threshold: long "
        "prompts are offloaded; without it requests are split at random. Bandwidth: plan and "
        "threshold are chosen knowing the link; without it as if the link carried everything.",
    )
    names = {"paper": "T(E[l])", "exact": "E[T(l)]"}
    rows = [
        {
            "has": listed(one["members"]) if one["members"] else "none: homogeneous",
            **{
                f"Lambda_max, {words} (req/s)": found[key]["coalitions"][at]["throughput_req_per_s"]
                for key, words in names.items()
            },
        }
        for at, one in enumerate(found["paper"]["coalitions"])
    ]
    yield Table(pd.DataFrame(rows, dtype=object), "What every combination carries.")
    shares = [
        {
            "part": one["member"],
            **{
                f"{unit}, {words}": figure(found[key]["shapley"][at])
                for key, words in names.items()
                for unit, figure in _SHARES.items()
            },
        }
        for at, one in enumerate(found["paper"]["shapley"])
    ]
    yield Table(
        pd.DataFrame(shares, dtype=object),
        "Shapley shares: the mean of what a part adds over the orders in which the parts can be "
        "added. They add up to the gain over the homogeneous deployment of as many GPUs, which "
        "differs from the scenario's own by "
        + listed(f"{found[k]['gpus_req_per_s']:+.3f} req/s by {w}" for k, w in names.items())
        + ".",
    )


_SHARES: dict[str, Value] = {
    "req/s": lambda share: f"{share['gain_req_per_s']:+.4f}",
    "% of the gain": lambda share: (
        None if share["share_of_gain"] is None else f"{100 * share['share_of_gain']:+.2f}"
    ),
}
