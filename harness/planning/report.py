"""``prfaas plan --html``: the planner's document as one offline page.

The answer in sentences; the deployments; Lambda_max over the threshold and over the splits; TTFT
with queueing; whose gain it is; equal cost; sensitivity and sweeps; egress by model; where the
numbers come from. A section that does not apply is left out, and the page says why.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.phrases import percent, scaled
from harness.planning import figures
from harness.planning.blocks import Value, drawn, one_by_one, side_by_side
from harness.planning.cost_section import cost_blocks
from harness.planning.gain_section import gain_blocks
from harness.planning.sweep_section import sensitivity_blocks, sweep_blocks
from harness.planning.ttft_section import ttft_blocks
from harness.planning.variants import BASELINE, OFFLOADING
from harness.planning.wording import (
    GBIT_BYTES,
    STAGES,
    answer,
    instances,
    is_sound,
    length_text,
    listed,
    planned_by,
    rate_text,
    tokens_text,
)
from reports.document import Block, Document, Facts, Items, Notice, Prose, Section, Table
from reports.reduction import heat_map_rows
from reports.render import render

Blocks = Callable[[dict[str, Any]], Iterator[Block]]
_CURVE_ROWS = 12


@dataclass(frozen=True, slots=True)
class _Part:
    """A section, the key of the document that it is about, and what its absence means."""

    heading: str
    blocks: Blocks
    key: str
    absent: str = ""


def write_plan_report(document: dict[str, Any], path: Path) -> Path:
    """Write the page; the file appears whole or not at all."""
    shown = [one for one in _PARTS if document[one.key] is not None]
    sections = [Section(one.heading, tuple(one.blocks(document))) for one in shown]
    missing = tuple(f"{one.heading}: {one.absent}" for one in _PARTS if one not in shown)
    if missing:
        sections.append(Section("Left out", (Items(missing),)))
    subtitle = (
        f"{document['model']}, {planned_by(document)}: "
        f"{', '.join(document['deployments'])}. Modelled, not measured."
    )
    title = f"prfaas plan: {document['scenario']}"
    return render(Document(title, subtitle, tuple(sections)), path)


def _answer(document: dict[str, Any]) -> Iterator[Block]:
    first, *more = answer(document)
    yield Notice("good" if is_sound(document) else "bad", first, tuple(more))
    if document["warnings"]:
        yield Notice("bad", "Read the figures with this in mind:", tuple(document["warnings"]))
    if document["notes"]:
        yield Prose("What the figures rest on:")
        yield Items(tuple(document["notes"]))


def _deployments(document: dict[str, Any]) -> Iterator[Block]:
    yield side_by_side(
        document["deployments"],
        f"Threshold and split: {planned_by(document)}. Bottleneck, egress and the ratio to "
        f"homogeneous_pd are by the {document['objective']} equations. T(E[l]) puts the mean "
        "length into the service time, as the paper does; E[T(l)] is the mean service time, which "
        "a queue sees. Theta: what each stage carries of the requests that are its own. A dash: "
        "not there.",
        _FOUND,
    )
    yield side_by_side(
        document["deployments"],
        "The same instances at their best by the exact equations, and as the scenario plans them.",
        _OTHER_PLANS,
    )


def _curve(document: dict[str, Any]) -> Iterator[Block]:
    curve, one = document["curve"], document["deployments"][OFFLOADING]
    yield from drawn(
        figures.capacity_curve(document),
        f"{OFFLOADING} at {instances(one)}. The words name the stage that saturates first.",
    )
    thresholds = np.asarray(curve["threshold_tokens"])
    chosen = np.linspace(0, len(thresholds) - 1, min(_CURVE_ROWS, len(thresholds))).round()
    nearest = np.abs(thresholds - one["threshold_tokens"]).argmin()
    rows = [
        {
            "t (tokens)": tokens_text(thresholds[at]),
            "Lambda_max, T(E[l]) (req/s)": curve["paper_req_per_s"][at],
            "binds, T(E[l])": STAGES[curve["paper_stage"][at]],
            "Lambda_max, E[T(l)] (req/s)": curve["exact_req_per_s"][at],
            "binds, E[T(l)]": STAGES[curve["exact_stage"][at]],
        }
        for at in sorted({*chosen.astype(int), int(nearest)})
    ]
    yield Table(pd.DataFrame(rows, dtype=object), "Some points of both lines.")


def _splits(document: dict[str, Any]) -> Iterator[Block]:
    grid = document["grid"]
    counts = grid["num_prefill"]
    shown = heat_map_rows(counts, [document["deployments"][OFFLOADING]["num_prefill"]])
    total = grid["num_splits"]
    left = "" if len(shown) == total else f" Of {total} splits {len(shown)} are shown."
    yield from drawn(
        figures.split_map(document),
        f"By the {document['objective']} equations. N_p + N_d is what the scenario gives the PD "
        f"cluster.{left}",
    )
    rows = []
    for number, num_prefill in enumerate(counts):
        if num_prefill not in shown:
            continue
        rates = grid["lambda_max_req_per_s"][number]
        at = grid["threshold_tokens"].index(grid["best_threshold_tokens"][number])
        rows.append(
            {
                "N_p": num_prefill,
                "best t (tokens)": tokens_text(grid["threshold_tokens"][at]),
                "Lambda_max (req/s)": rates[at],
                "binds": STAGES[grid["stage"][number][at]],
            }
        )
    yield Table(pd.DataFrame(rows, dtype=object), f"The best threshold of each split.{left}")


def _egress(document: dict[str, Any]) -> Iterator[Block]:
    yield from drawn(
        figures.egress_dots(document),
        "All GPUs prefill prompts of one length without a pause: KV bytes per prefill second of an "
        "instance times the instances.",
    )
    cells: dict[tuple[object, ...], dict[str, object]] = {}
    for one in document["bandwidth_wall"]["rows"]:
        row = cells.setdefault(
            (one["model"], one["hardware"], one["tokens"], one["provenance"]),
            {
                "model": one["model"],
                "hardware": one["hardware"],
                "prompt (tokens)": length_text(one["tokens"]),
                "known": one["provenance"].replace("_", "-").replace("/", ", "),
                "an instance": rate_text(one["kv_bytes_per_s_per_instance"]),
            },
        )
        row[f"{one['gpus']:,} GPUs"] = rate_text(one["egress_bytes_per_s"])
    table = pd.DataFrame(list(cells.values()), dtype=object)
    yield Table(table.where(table.notna(), None), "Egress by model, prompt length and GPUs.")


def _provenance(document: dict[str, Any]) -> Iterator[Block]:
    yield one_by_one(
        [{"name": name, **one} for name, one in document["provenance"].items()],
        "Where the service times come from.",
        {
            "hardware": lambda one: one["name"],
            "profile": lambda one: one["profile"],
            "points": lambda one: listed(
                f"{count} {how.replace('_', '-')}" for how, count in one["points"].items()
            ),
            "extrapolated": lambda one: one["extrapolate"] or "no",
        },
    )
    yield Facts(
        (
            ("scenario", document["scenario"]),
            ("scenario hash", document["scenario_sha256"]),
            ("model", document["model"]),
            ("threshold and splits", planned_by(document)),
            ("offered load", f"{document['rate_req_per_s']:g} req/s"),
        )
    )


_FOUND: dict[str, Value] = {
    "N_prfaas/N_p/N_d": instances,
    "threshold t (tokens)": lambda one: tokens_text(one["threshold_tokens"]),
    "GPUs": lambda one: listed(f"{count} {name}" for name, count in one["gpus"].items()),
    "Theta PrfaaS (req/s)": lambda one: one["theta_prfaas_req_per_s"],
    "Theta PD prefill (req/s)": lambda one: one["theta_pd_prefill_req_per_s"],
    "Theta PD decode (req/s)": lambda one: one["theta_pd_decode_req_per_s"],
    "Lambda_max, T(E[l]) (req/s)": lambda one: one["throughput_req_per_s"],
    "Lambda_max, E[T(l)] (req/s)": lambda one: one["throughput_exact_req_per_s"],
    "E[T(l)] over T(E[l])": lambda one: percent(
        one["throughput_exact_req_per_s"] / one["throughput_req_per_s"] - 1
    ),
    "Lambda_max over homogeneous_pd": lambda one: one["ratio"],
    "bottleneck": lambda one: STAGES[one["bottleneck"]],
    "offloaded": lambda one: percent(one["offload_fraction"], sign=False),
    "mean offloaded prompt (tokens)": lambda one: tokens_text(one["long_mean_tokens"]),
    "mean local prompt (tokens)": lambda one: tokens_text(one["short_mean_tokens"]),
    "egress at Lambda_max (Gbit/s)": lambda one: scaled(one["egress_bytes_per_s"], 1 / GBIT_BYTES),
    "balance of prefill, Eq. 7": lambda one: percent(one["eq7_residual"]),
    "balance of prefill and decode, Eq. 8": lambda one: percent(one["eq8_residual"]),
}
_OTHER_PLANS: dict[str, Value] = {
    "best by E[T(l)]: N_prfaas/N_p/N_d": lambda one: instances(one["exact_optimum"]),
    "best by E[T(l)]: t (tokens)": lambda one: tokens_text(
        one["exact_optimum"]["threshold_tokens"]
    ),
    "best by E[T(l)]: Lambda_max, E[T(l)] (req/s)": lambda one: one["exact_optimum"][
        "throughput_exact_req_per_s"
    ],
    "scenario's: N_prfaas/N_p/N_d": lambda one: instances(one["as_planned"]),
    "scenario's: t (tokens)": lambda one: tokens_text(one["as_planned"]["threshold_tokens"]),
    "scenario's: Lambda_max, T(E[l]) (req/s)": lambda one: one["as_planned"][
        "throughput_req_per_s"
    ],
    "scenario's: Lambda_max, E[T(l)] (req/s)": lambda one: one["as_planned"][
        "throughput_exact_req_per_s"
    ],
    "scenario's: mean TTFT at the load (s)": lambda one: one["as_planned"]["ttft"]["ttft_mean_s"],
}
_PARTS = (
    _Part("Answer", _answer, "deployments"),
    _Part("Deployments", _deployments, "deployments"),
    _Part(
        "Capacity over the threshold",
        _curve,
        "curve",
        f"the scenario has no {OFFLOADING} with prefill in both clusters, so no threshold.",
    ),
    _Part(
        "Threshold and split",
        _splits,
        "grid",
        f"the scenario has no {OFFLOADING} with prefill in both clusters, so no threshold.",
    ),
    _Part("Time to first token", ttft_blocks, "deployments"),
    _Part(
        "Whose gain it is",
        gain_blocks,
        "attribution",
        f"it takes {OFFLOADING} with prefill in both clusters, and {BASELINE}.",
    ),
    _Part(
        "Equal cost",
        cost_blocks,
        "equal_cost",
        f"it takes {BASELINE}, a deployment with a PrfaaS cluster, and prices of all their "
        "hardware in one unit.",
    ),
    _Part(
        "What the plan hangs on",
        sensitivity_blocks,
        "sensitivity",
        f"the scenario has no {OFFLOADING} with a PrfaaS cluster.",
    ),
    _Part(
        "Sweeps",
        sweep_blocks,
        "sweeps",
        f"the scenario has no {OFFLOADING} with a PrfaaS cluster.",
    ),
    _Part("Egress by model", _egress, "bandwidth_wall", "no profiles of other models were found."),
    _Part("Provenance", _provenance, "provenance"),
)
