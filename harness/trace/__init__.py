"""Request traces, read whole and validated line by line; a module has each format.

    mooncake   JSONL with hash ids          burstgpt   CSV with columns by name
    azure      CSV of three columns         servegen   a folder of clients, whose requests are drawn
    run        a run directory of our own, or its requests.parquet

Times count from the first request (of ``servegen`` from the folder's own zero). Trace files are the
user's: nothing here contains one. ``harness.trace.selection`` has what of a trace is replayed.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness.core import ScenarioError
from harness.datafile import read_bytes
from harness.trace.azure import AZURE_HEADER, read_azure
from harness.trace.burstgpt import BURSTGPT_START, read_burstgpt
from harness.trace.mooncake import QUANTUM_S, read_mooncake
from harness.trace.record import (
    MAX_TRACE_BYTES,
    Rows,
    Trace,
    TraceFormat,
    unlimited_cache_tokens,
)
from harness.trace.run_table import SCHEDULE, TABLE, read_run
from harness.trace.selection import Selection, planned_s, rate_req_per_s, select, told
from harness.trace.servegen import client_files, read_servegen

__all__ = [
    "QUANTUM_S",
    "Selection",
    "Trace",
    "TraceFormat",
    "planned_s",
    "rate_req_per_s",
    "read_trace",
    "select",
    "told",
    "unlimited_cache_tokens",
]

_LINES: dict[TraceFormat, Callable[[Path, list[bytes]], Rows]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
}


def read_trace(
    path: Path,
    trace_format: TraceFormat | None = None,
    *,
    seed: int = 0,
    start_s: float = 0.0,
    duration_s: float | None = None,
) -> Trace:
    """Read a trace; the format is found by extension, then by the first line, unless given.

    ``seed``, ``start_s`` and ``duration_s`` bound what is drawn of a format that is drawn; others
    are read whole. Raises ScenarioError naming ``file:line`` for a line that is empty or malformed.
    """
    if path.is_dir() and trace_format in (None, "run", "servegen"):
        if trace_format != "run" and client_files(path):
            until_s = None if duration_s is None else start_s + duration_s
            rows = read_servegen(path, seed, start_s, until_s)
            # The part begins at start_s, so that it is where it lies in the whole.
            return _trace(path, "servegen", _folder_sha256(path), rows, start_s)
        if trace_format != "servegen" and (path / TABLE).is_file():
            path = path / TABLE
    data = read_bytes(path, "trace file", MAX_TRACE_BYTES)
    if trace_format == "servegen":
        raise ScenarioError(
            f"The trace {path} is a file, but ServeGen's is a folder of chunk-N-trace.csv files."
        )
    if trace_format == "run" or (trace_format is None and path.suffix.lower() == ".parquet"):
        digest = hashlib.sha256(data)
        if (beside := path.with_name(SCHEDULE)).is_file():
            digest.update(read_bytes(beside, "schedule", MAX_TRACE_BYTES))
        return _trace(path, "run", digest.hexdigest(), read_run(path, data))
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise ScenarioError(f"The trace file {path} is empty; it needs at least one request.")
    found = trace_format or _detect(path, lines[0])
    return _trace(path, found, hashlib.sha256(data).hexdigest(), _LINES[found](path, lines))


def _trace(
    path: Path, kind: TraceFormat, sha256: str, rows: Rows, starts_s: float | None = None
) -> Trace:
    """Ordered by arrival; from the first one, or with ``starts_s`` from that far before it."""
    order = np.argsort(rows.arrival_s, kind="stable")
    arrival_s = rows.arrival_s[order]
    arrival_s = arrival_s - arrival_s[0] if starts_s is None else arrival_s + starts_s
    ends_s = float(arrival_s[-1]) + rows.quantum_s
    if starts_s is not None and rows.end_s is not None:
        ends_s = rows.end_s + starts_s
    hash_ids = tuple(rows.hash_ids[row] for row in order)
    return Trace(
        path=path,
        format=kind,
        sha256=sha256,
        quantum_s=rows.quantum_s,
        end_s=ends_s,
        arrival_s=arrival_s,
        input_tokens=rows.input_tokens[order],
        output_tokens=rows.output_tokens[order],
        hash_ids=hash_ids,
        left_out=rows.left_out or {},
        clipped={},
    )


def _folder_sha256(folder: Path) -> str:
    """Of every file that counts, by name."""
    digest = hashlib.sha256()
    for client, windows, lengths in client_files(folder):
        digest.update(f"{client}\0".encode())
        for path in (windows, lengths):
            digest.update(hashlib.sha256(read_bytes(path, "trace file", MAX_TRACE_BYTES)).digest())
    return digest.hexdigest()


def _detect(path: Path, first: bytes) -> TraceFormat:
    head = first.removeprefix(b"\xef\xbb\xbf")
    if head.startswith(BURSTGPT_START.encode()):
        return "burstgpt"
    if path.suffix.lower() == ".jsonl" or head.lstrip().startswith(b"{"):
        return "mooncake"
    if path.suffix.lower() == ".csv" or head.startswith(b"TIMESTAMP"):
        return "azure"
    raise ScenarioError(
        f"The format of the trace file {path} is not recognised by its extension (.jsonl, .csv, "
        f'.parquet) or its first line (a JSON object, "{AZURE_HEADER}", or one that begins with '
        f'"{BURSTGPT_START}"); set workload.trace_format to "mooncake", "azure", "burstgpt" or '
        '"run" if it is one of them.'
    )
