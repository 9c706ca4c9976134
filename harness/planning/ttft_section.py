"""The report's section on time to first token: service alone, and with queueing over the load.

``ttft`` and ``load_curve`` of each deployment of the planner's document.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from harness.phrases import milliseconds
from harness.planning.blocks import Value, drawn, side_by_side
from harness.planning.figures import ttft_over_load
from harness.planning.wording import STAGES, rate_text, share_text
from reports.document import Block, Items, Prose, Table

_PARTS = {
    "prefill_queue_s": "prefill queue",
    "prefill_s": "prefill",
    "transfer_layerwise_s": "transfer, sent layer by layer",
    "transfer_at_end_s": "transfer, sent after prefill",
    "decode_admission_s": "decode admission",
}


_BOUNDS = {
    "link": "the link, less TCP's headers",
    "per_flow_cap": "the cap of each flow",
    "pacing": "transport.pacing",
    "loss": "loss, by congestion control",
}
#: Of ``transfer_alone``: key, and how it is written.
_ALONE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rate": ("rate_bytes_per_s", rate_text),
    "what bounds it": ("binds", lambda name: _BOUNDS[name]),
    "connections": ("connections", str),
    "connections that would fill the link": (
        "connections_to_fill",
        lambda count: "none up to 64" if count is None else str(count),
    ),
    "shows after prefill, sent layer by layer": ("exposed_layerwise_s", milliseconds),
    "shows after prefill, sent after it": ("exposed_at_end_s", milliseconds),
}


def ttft_blocks(document: dict[str, Any]) -> Iterator[Block]:
    """The chart over the load, the statistics and their parts, the curve's figures."""
    deployments = document["deployments"]
    yield from drawn(
        ttft_over_load(document),
        "Each line ends just below what the deployment carries by E[T(l)], where any queue "
        "diverges.",
    )
    yield side_by_side(
        deployments,
        "TTFT in seconds. Service: prefill alone, as in the paper's Table 6. At "
        f"{document['rate_req_per_s']:g} req/s: with queueing, what of the transfer prefill does "
        "not hide, and decode admission. A dash: the deployment does not carry that load.",
        {
            f"{words}: {name}": _statistic(f"{kind}ttft_{name.lower()}_s")
            for words, kind in (("service", "service_"), ("at the load", ""))
            for name in ("mean", "P50", "P90", "P99")
        },
    )
    yield side_by_side(
        deployments,
        f"Means of the parts at {document['rate_req_per_s']:g} req/s, in milliseconds. Of the "
        "two transfers TTFT holds the one that the scenario asks for.",
        {
            **{words: _part(key) for key, words in _PARTS.items()},
            "utilisation of the busiest stage": lambda one: share_text(one["ttft"]["load"]),
            "saturated by the load": lambda one: STAGES.get(one["ttft"]["unstable_stage"]),
        },
    )
    if any(one["transfer_alone"] for one in deployments.values()):
        yield side_by_side(
            {name: one for name, one in deployments.items() if one["transfer_alone"]},
            "One transfer of the mean length that crosses, alone on the link, by what its "
            "connections get of it (harness.transfer_model); the queues above give each transfer "
            "the whole rate of the link.",
            {words: _alone(key, write) for words, (key, write) in _ALONE.items()},
        )
    yield _curve(deployments)
    doubts = _doubts(document)
    if doubts:
        yield Prose("What to mind about the closed form:")
        yield Items(doubts)


def _curve(deployments: dict[str, Any]) -> Table:
    columns: dict[str, list[str]] = {}
    for name, one in deployments.items():
        columns.setdefault("load", [share_text(point["load"]) for point in one["load_curve"]])
        columns[name] = [
            f"{point['rate_req_per_s']:.2f}: {_short(point['ttft_mean_s'])} / "
            f"{_short(point['ttft_p90_s'])}"
            for point in one["load_curve"]
        ]
    return Table(
        pd.DataFrame(columns, dtype=object),
        "Load as a share of what each deployment carries by E[T(l)]: the rate in req/s, mean / P90 "
        "TTFT in seconds.",
    )


def _doubts(document: dict[str, Any]) -> tuple[str, ...]:
    """What is said of the accuracy, and of which deployments at which loads."""
    found: dict[str, list[str]] = {}
    for name, one in document["deployments"].items():
        places = [("the scenario's load", one["ttft"]["accuracy"]["note"])]
        places += [(share_text(each["load"]), each["accuracy"]) for each in one["load_curve"]]
        for where, note in places:
            if note is not None:
                found.setdefault(note, []).append(f"{name} at {where}")
    return tuple(f"{', '.join(places)}: {note}" for note, places in found.items())


def _statistic(key: str) -> Value:
    return lambda one: one["ttft"][key]


def _part(key: str) -> Value:
    return lambda one: milliseconds(one["ttft"]["parts"] and one["ttft"]["parts"][key])


def _alone(key: str, write: Callable[[Any], Any]) -> Value:
    return lambda one: write(one["transfer_alone"][key])


def _short(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s:.2f}"
