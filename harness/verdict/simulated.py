"""The figures of a simulated run, which has no verdict: nothing was measured, no gate is asked.

Its rows lie in the order in which requests ended; they are read in the order of arrival, in which
every figure and interval is computed as of a live run. What only a live run has is null. Of a run
that was cut short there is what had ended by then: no intervals, no window, no comparison.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from harness.record.run_directory import Manifest, RunDirectory
from harness.record.tables import COLUMNS, read_table
from harness.schedule import Schedule
from harness.statistics import Blocks, SteadyWindow
from harness.summary import (
    QUANTILES,
    Shared,
    compare,
    floats,
    length_edges,
    share_out,
    summarise,
)

#: What no figure of a simulated run is made of.
_UNUSED = (
    "rid",
    "output_digest",
    "failure_message",
    "prompt_tokens",
    "http_status",
    "cached_tokens",
    "actual_cached_tokens",
    "prefill_cached_tokens",
    "fetched_tokens",
    "resident_tokens",
    "prefill_prompt_tokens",
    "retractions",
    "decode_prefilled",
    "decode_instance",
    "prefill_hardware",
    "profile_prefill_s",
    "kv_layers",
    "kv_retransmits",
)
_COLUMNS = [
    name
    for name, _ in COLUMNS["requests"]
    if name not in _UNUSED and not name.endswith(("_mono_ns", "_wire_bytes"))
]


def read_requests(run: RunDirectory) -> pd.DataFrame:
    """The rows of a simulated run in order of arrival, without columns that only live runs have."""
    return read_table(run, "requests", _COLUMNS).sort_values("index", kind="stable")


def present_names(requests: pd.DataFrame, manifest: Manifest) -> tuple[str, ...]:
    """The deployments that have rows: of a run that was cut short not all."""
    there = set(requests["deployment"].unique())
    return tuple(name for name in manifest.deployment_names() if name in there)


def figures(
    requests: pd.DataFrame, manifest: Manifest
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], Shared]:
    """Each deployment's figures, the ratios to the first one, and what they have in common."""
    names = present_names(requests, manifest)
    manifest = replace(
        manifest,
        deployments=tuple(cell for cell in manifest.deployments if cell.deployment in names),
    )
    shared = _shared(requests, names, manifest)
    summaries = {}
    for name in names:
        frame = requests[requests["deployment"] == name]
        summary = summarise(frame, name, manifest, _schedule(frame), shared)
        # Sums of what nobody counted.
        summary |= {"kv_bytes_expected": None, "budget_residual_over_bound": None}
        summaries[name] = summary
    whole = manifest.status == "finished"
    return summaries, compare(requests, names, shared) if whole else {}, shared


def _shared(requests: pd.DataFrame, names: tuple[str, ...], manifest: Manifest) -> Shared:
    counts = set(requests["deployment"].value_counts())
    if manifest.status == "finished" and len(counts) == 1:
        shared = share_out(requests, manifest, int(counts.pop()))
    else:
        reason = "the run did not end"
        shared = Shared(
            Blocks(None, 0, 0, reason),
            {name: dict.fromkeys(QUANTILES) for name in names},
            dict.fromkeys(names, SteadyWindow(None, None, reason)),
            length_edges(None),
        )
    return replace(shared, edges_tokens=length_edges(_threshold_tokens(manifest)))


def _threshold_tokens(manifest: Manifest) -> int | None:
    """The planned threshold: a simulated row does not say which one was in force."""
    planned = manifest.scenario.get("deployments", {})
    found = [
        one["threshold_tokens"]
        for one in (planned.get(name) for name in manifest.deployment_names())
        if isinstance(one, dict) and isinstance(one.get("threshold_tokens"), int)
    ]
    return int(np.median(found)) if found else None


def _schedule(frame: pd.DataFrame) -> Schedule:
    """What was planned of a deployment's requests, by its rows."""
    whole = {
        name: frame[name].to_numpy(dtype=np.int64)
        for name in ("index", "input_tokens", "output_tokens")
    }
    return Schedule(
        whole["index"],
        floats(frame, "planned_s"),
        whole["input_tokens"],
        whole["output_tokens"],
        None,
    )


def reasons(requests: pd.DataFrame, manifest: Manifest) -> Iterator[str]:
    """Why the figures are not those of the whole schedule."""
    planned = (manifest.schedule or {}).get("num_requests")
    if manifest.status == "finished":
        return
    why = f": {manifest.error}" if manifest.error else ""
    word = "did not end" if manifest.status == "running" else f"was {manifest.status}"
    yield f"the simulation {word}{why}"
    counts = requests["deployment"].value_counts()
    for name in manifest.deployment_names():
        of = "" if planned is None else f" of {planned}"
        yield f"{name}: {int(counts.get(name, 0))}{of} requests had ended and were written"
