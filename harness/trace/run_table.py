"""A run of our own: ``requests.parquet`` of a run directory, as offered, not as it was served.

Every (deployment, repeat) replays the same schedule, so its first one stands for all. Prompts
shared prefixes only by the hash ids of ``schedule.jsonl``, which are taken where it lies beside.
"""

import io
from pathlib import Path

import msgspec
import numpy as np

from harness.core import Request, ScenarioError
from harness.datafile import read_bytes
from harness.trace.record import MAX_TOKENS, MAX_TRACE_BYTES, Rows, malformed

TABLE, SCHEDULE = "requests.parquet", "schedule.jsonl"
_COLUMNS = {
    "deployment": "string",
    "repeat": "int64",
    "rid": "string",
    "planned_s": "double",
    "input_tokens": "int64",
    "output_tokens": "int64",
}


def read_run(path: Path, data: bytes) -> Rows:
    """``data`` is that of the table ``path``."""
    import pyarrow as pa  # half a second and threads, which no other format needs
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data), columns=list(_COLUMNS))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0][:200]
        raise ScenarioError(f"The trace file {path} is no table of requests: {first}.") from error
    for name, kind in _COLUMNS.items():
        if name not in table.column_names or str(table.schema.field(name).type) != kind:
            raise ScenarioError(
                f"The trace file {path} has no column {name!r} of type {kind}; it must be the "
                f"{TABLE} of a run directory."
            )
        if table.column(name).null_count:
            raise ScenarioError(f"The trace file {path} has a null in its column {name!r}.")
    if table.num_rows == 0:
        raise ScenarioError(f"The trace file {path} is empty; it needs at least one request.")
    columns = {name: table.column(name).to_numpy(zero_copy_only=False) for name in _COLUMNS}
    first = (columns["deployment"] == columns["deployment"][0]) & (
        columns["repeat"] == columns["repeat"][0]
    )
    planned_s = columns["planned_s"][first].astype(np.float64)
    inputs, outputs = columns["input_tokens"][first], columns["output_tokens"][first]
    for name, found, least, most in (
        ("planned_s", planned_s, 0, 1e9),
        ("input_tokens", inputs, 1, MAX_TOKENS),
        ("output_tokens", outputs, 1, MAX_TOKENS),
    ):
        if not ((found >= least) & (found <= most)).all():
            raise ScenarioError(
                f"The trace file {path} has a {name!r} outside {least} to {most:g}."
            )
    return Rows(
        arrival_s=planned_s,
        input_tokens=inputs.astype(np.int64),
        output_tokens=outputs.astype(np.int64),
        hash_ids=_hash_ids(path.with_name(SCHEDULE), columns["rid"][first].tolist()),
    )


def _hash_ids(path: Path, rids: list[str]) -> tuple[tuple[int, ...], ...]:
    if not path.is_file():
        return ((),) * len(rids)
    decoder = msgspec.json.Decoder(Request)
    found: dict[str, tuple[int, ...]] = {}
    lines = read_bytes(path, "schedule", MAX_TRACE_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise malformed(path, number, error) from error
        found[request.rid] = request.hash_ids
    for rid in rids:
        if rid not in found:
            raise ScenarioError(f"{path} has no request {rid!r}, which the table beside it has.")
    return tuple(found[rid] for rid in rids)
