"""What the machines did: prefill instances' busy time, KV bytes, requests in each phase at once.

A service ends when it was planned to (start + service time), not when the process woke up.
"""

from typing import Any

import numpy as np
import pandas as pd

from harness.record.run_directory import Cell, Manifest
from harness.statistics import Floats, Occupancy, occupancy
from harness.summary.frames import floats, planned_instants_s, present, share

#: The phases of a request, by the instants at which it enters and leaves each, raw.
PHASES = {
    "prefill_queue": ("prefill_received_mono_ns", "prefill_start_mono_ns"),
    "prefill": ("prefill_start_mono_ns", "prefill_end_mono_ns"),
    "transfer": ("prefill_end_mono_ns", "kv_acked_mono_ns"),
    "decode_admission": ("landed_mono_ns", "granted_mono_ns"),
    "decode": ("granted_mono_ns", "decode_end_mono_ns"),
}


def service_ends_s(spans: pd.DataFrame, time_scale: float) -> Floats:
    """When each prefill was planned to end, scenario seconds; as it ended where no plan is known.

    The next service of an instance starts at that instant, so actual ends, which a late wake-up
    delays, would overlap it.
    """
    planned_s = floats(spans, "prefill_start_s") + floats(spans, "service_wall_s") * time_scale
    return np.where(np.isnan(planned_s), floats(spans, "prefill_end_s"), planned_s)


def instance_busy_s(frame: pd.DataFrame, window_s: float, time_scale: float) -> "pd.Series[float]":
    """Seconds of [0, window_s] in which each instance prefilled, by (repeat, prefill_instance).

    The length of the union of its services, so never more than the window.
    """
    spans = frame.dropna(subset=["prefill_start_s", "prefill_end_s", "prefill_instance"])
    table = pd.DataFrame(
        {
            "repeat": spans["repeat"],
            "prefill_instance": spans["prefill_instance"],
            "start_s": np.clip(floats(spans, "prefill_start_s"), 0.0, window_s),
            "end_s": np.clip(service_ends_s(spans, time_scale), 0.0, window_s),
        }
    ).sort_values("start_s", kind="stable")
    keys = ["repeat", "prefill_instance"]
    # A service adds what lies beyond the latest end of those that started before it.
    reached_s = table.groupby(keys)["end_s"].cummax().groupby([table[key] for key in keys])
    before_s = reached_s.shift(fill_value=0.0)
    table["busy_s"] = np.maximum(table["end_s"] - np.maximum(table["start_s"], before_s), 0.0)
    return table.groupby(keys)["busy_s"].sum()


def prefill_utilisation(
    frame: pd.DataFrame, name: str, cells: list[Cell], manifest: Manifest, window_s: float
) -> dict[str, Any]:
    """Busy share of the prefill instances, together and by cluster."""
    ran = sum(cell.start_mono_ns is not None for cell in cells)
    busy_s = instance_busy_s(frame, window_s, manifest.time_scale)
    by_instance = busy_s.groupby("prefill_instance").sum()
    prefills = [item for item in manifest.instances.get(name, ()) if item.role == "prefill"]

    def used(names: list[str]) -> float | None:
        spent_s = float(by_instance.reindex(names, fill_value=0.0).sum())
        return share(spent_s, len(names) * window_s * ran)

    clusters = dict.fromkeys(item.cluster for item in prefills)
    return {
        "prefill_utilisation": used([item.name for item in prefills]),
        "prefill_utilisation_by_cluster": {
            cluster: used([item.name for item in prefills if item.cluster == cluster])
            for cluster in clusters
        },
    }


def kv(done: pd.DataFrame) -> dict[str, Any]:
    """KV bytes that were received, that crossed the link, and that the geometry expects."""
    counted = done.dropna(subset=["kv_bytes"])
    crossing = counted[counted["crosses"].fillna(False).astype(bool)]
    return {
        "kv_bytes_sent": round(float(floats(counted, "kv_bytes").sum())),
        "kv_bytes_cross": round(float(floats(crossing, "kv_bytes").sum())),
        "kv_bytes_expected": int(present(done, "kv_bytes_expected").sum()),
    }


def phase_spans_s(
    frame: pd.DataFrame, cell: Cell, time_scale: float
) -> dict[str, tuple[Floats, Floats]]:
    """When each request of a cell was where, scenario seconds since the load's start; NaN: unknown.

    ``in_flight`` is from the planned send to the end, whether it completed or failed. A slot that
    was reserved before KV landed counts from the landing. Where no raw instants are known, as of a
    simulation, they follow from the durations.
    """
    spans = {"in_flight": (planned_instants_s(frame, time_scale), floats(frame, "end_s"))}
    if not {one for names in PHASES.values() for one in names} <= set(frame.columns):
        return spans | _spans_by_duration(frame)
    start_ns = np.nan if cell.start_mono_ns is None else float(cell.start_mono_ns)

    def at_s(column: str) -> Floats:
        return (floats(frame, column) - start_ns) / 1e9 * time_scale

    landed_s = at_s("landed_mono_ns")
    for phase, (enters, leaves) in PHASES.items():
        begin_s, end_s = at_s(enters), at_s(leaves)
        if phase == "decode":
            begin_s = np.fmax(begin_s, landed_s)
        spans[phase] = begin_s, end_s
    return spans


def _spans_by_duration(frame: pd.DataFrame) -> dict[str, tuple[Floats, Floats]]:
    start_s, end_s = floats(frame, "prefill_start_s"), floats(frame, "prefill_end_s")
    granted_s = floats(frame, "granted_s")
    landed_s = granted_s - np.fmax(floats(frame, "decode_admission_s"), 0.0)
    return {
        "prefill_queue": (start_s - floats(frame, "prefill_queue_s"), start_s),
        "prefill": (start_s, end_s),
        "transfer": (end_s, landed_s),
        "decode_admission": (landed_s, granted_s),
        "decode": (np.fmax(granted_s, landed_s), floats(frame, "decode_end_s")),
    }


def concurrency(
    frame: pd.DataFrame, cells: list[Cell], time_scale: float, window_s: tuple[float, float] | None
) -> dict[str, Any]:
    """Time-weighted mean and maximum of the requests in flight and in each phase.

    Over ``window_s``, or from the load's start to the last answer. Repeats one after another.
    """
    found: dict[str, list[Occupancy]] = {}
    lengths_s: list[float] = []
    without_end = 0
    for cell in cells:
        rows = frame[frame["repeat"] == cell.repeat]
        ends_s = present(rows, "end_s")
        from_s, to_s = window_s or (0.0, float(ends_s.max(initial=0.0)))
        if not (len(ends_s) and to_s > from_s):
            continue
        lengths_s.append(to_s - from_s)
        without_end += int((rows["end_s"].isna() & (rows["outcome"] != "unsent")).sum())
        for phase, (begins, ends) in phase_spans_s(rows, cell, time_scale).items():
            one = occupancy(begins, ends, from_s, to_s)
            # Of an engine that tells no instants the level is not known, which is not none.
            if one is not None and not np.isnan(begins + ends).all():
                found.setdefault(phase, []).append(one)
    whole_s = sum(lengths_s)
    means = {
        phase: sum(one.mean * length_s for one, length_s in zip(each, lengths_s, strict=True))
        / whole_s
        for phase, each in found.items()
        if len(each) == len(lengths_s)
    }
    return {
        "window_s": whole_s,
        "requests_without_end": without_end,
        "mean": {phase: means.get(phase) for phase in ("in_flight", *PHASES)},
        "max": {
            phase: max(one.most for one in found[phase]) if phase in means else None
            for phase in ("in_flight", *PHASES)
        },
    }
