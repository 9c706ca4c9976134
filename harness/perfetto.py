"""A run as a Chrome trace (``trace.json``), to look at in Perfetto: what ran where, and when.

Each deployment is a process of the trace, each instance has its tracks: prefill services, KV that
prefill did not hide, decode slots; the client's track shows each request until its first token.
Spans that overlap lie on tracks of their own. Times are wall microseconds since the load began.
Format: Trace Event Format, complete events (``ph`` X) and metadata events (``ph`` M).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from harness.record.run_directory import Manifest, RunDirectory, write_atomically
from harness.record.tables import read_table

#: Track kind, the columns where a span begins and ends, and the column that names its instance.
_SPANS = (
    ("first token", "planned_mono_ns", "first_token_mono_ns", None),
    ("prefill", "prefill_start_mono_ns", "prefill_end_mono_ns", "prefill_instance"),
    ("KV after prefill", "prefill_end_mono_ns", "kv_acked_mono_ns", "prefill_instance"),
    ("decode", "granted_mono_ns", "decode_end_mono_ns", "decode_instance"),
)
_ARGUMENTS = ("input_tokens", "output_tokens", "outcome", "prefill_queue_s", "ttft_s")


def write_trace(run: RunDirectory) -> Path:
    """Write ``trace.json`` from the requests table."""
    manifest = run.read_manifest()
    requests = read_table(run, "requests")
    document = {
        "traceEvents": trace_events(requests, manifest),
        "displayTimeUnit": "ms",
        "otherData": {"run_id": manifest.run_id, "time_scale": manifest.time_scale},
    }
    content = json.dumps(document, allow_nan=False, separators=(",", ":"))
    write_atomically(run.trace_path, content.encode())
    return run.trace_path


def trace_events(requests: pd.DataFrame, manifest: Manifest) -> list[dict[str, Any]]:
    """Every cell's events; cells lie side by side, each from the start of its load."""
    events: list[dict[str, Any]] = []
    for process, cell in enumerate(manifest.deployments, start=1):
        if cell.start_mono_ns is None:
            continue
        rows = requests[
            (requests["deployment"] == cell.deployment) & (requests["repeat"] == cell.repeat)
        ][_columns()]
        events.append(_named("process_name", cell.name, process, 0))
        thread = 0
        for kind, begin, end, place in _SPANS:
            spans = rows.dropna(subset=[begin, end] + ([place] if place else []))
            groups: Iterable[tuple[Any, pd.DataFrame]] = (
                spans.groupby(place) if place else [("client", spans)]
            )
            for instance, group in groups:
                tracks = _tracks(group, begin, end)
                for number, track in enumerate(tracks):
                    thread += 1
                    suffix = f" {number + 1}" if len(tracks) > 1 else ""
                    events.append(
                        _named("thread_name", f"{instance} {kind}{suffix}", process, thread)
                    )
                    events += [
                        _span(row, begin, end, kind, cell.start_mono_ns, process, thread)
                        for row in track
                    ]
    return events


def _columns() -> list[str]:
    """What spans are made of: a row of all columns would cost most of the time."""
    named = [column for _, *columns in _SPANS for column in columns if column is not None]
    return list(dict.fromkeys(["rid", *_ARGUMENTS, *named]))


def _tracks(group: pd.DataFrame, begin: str, end: str) -> list[list[dict[str, Any]]]:
    """Spans on as few tracks as keep those of one track apart (first fit by start)."""
    tracks: list[list[dict[str, Any]]] = []
    for row in group.sort_values([begin, end]).to_dict("records"):
        span = {str(key): value for key, value in row.items()}
        for track in tracks:
            if track[-1][end] <= span[begin]:
                track.append(span)
                break
        else:
            tracks.append([span])
    return tracks


def _span(
    row: dict[str, Any], begin: str, end: str, kind: str, start_ns: int, process: int, thread: int
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{row['rid']} ({row['input_tokens']} tokens)",
        "cat": kind,
        "ts": (int(row[begin]) - start_ns) / 1e3,
        "dur": (int(row[end]) - int(row[begin])) / 1e3,
        "pid": process,
        "tid": thread,
        "args": {name: _plain(row[name]) for name in _ARGUMENTS},
    }


def _plain(value: Any) -> Any:
    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
