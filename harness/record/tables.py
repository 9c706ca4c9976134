"""Records of a run: spools joined by request into Parquet tables with explicit schemas.

``requests`` has one row a planned request for each (deployment, repeat): the client's row, the
gateway's row with the workers' spans, the schedule, what geometry and profile expect, and the
simulation of the same schedule. planned = completed + failed + unsent always holds: a request that
left no client row is ``failed`` in phase ``lost`` when the gateway saw it, else ``unsent``.

Columns ``*_s`` and ``*_bytes`` are in scenario units (wall x time_scale, wire x byte_scale);
``*_mono_ns``, ``*_wall_s`` and ``*_wire_bytes`` are raw. Missing is null, never 0.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.core import BUDGET_TERMS, ScenarioError
from harness.record.join import (
    CellRows,
    CellView,
    join_decisions,
    join_engines,
    join_link,
    join_load,
    join_requests,
)
from harness.record.run_directory import Cell, RunDirectory, write_atomically
from harness.record.spool import (
    ClientRow,
    DecisionRow,
    EngineRow,
    ExpectedRow,
    GatewayRow,
    LinkRow,
    LoadRow,
    Row,
    SimulatedRow,
    SpoolError,
    WorkerRow,
    by_rid,
    read_rows,
)

#: 2: a decision has all its inputs, a request its retries.
TABLES_VERSION = 3
TableName = Literal["requests", "link", "engines", "decisions", "simulated", "load"]
WORKERS = ("worker-prfaas", "worker-pd")
_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()


def _columns(kind: pa.DataType, names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, kind) for name in names.split()]


_CELL: list[tuple[str, pa.DataType]] = [("deployment", _TEXT), ("repeat", _INT)]
COLUMNS: dict[TableName, list[tuple[str, pa.DataType]]] = {
    "requests": [
        *_CELL,
        *_columns(_TEXT, "rid outcome failure_phase failure_message"),
        *_columns(_INT, "index input_tokens output_tokens cached_tokens threshold_tokens"),
        *_columns(_INT, "prompt_tokens completion_tokens http_status actual_cached_tokens"),
        *_columns(_INT, "prefill_cached_tokens fetched_tokens resident_tokens retries"),
        *_columns(_INT, "prefill_prompt_tokens retractions"),
        ("decode_prefilled", pa.bool_()),
        *_columns(_TEXT, "output_digest"),
        *_columns(_TEXT, "prefill_instance prefill_cluster prefill_hardware decode_instance"),
        ("crosses", pa.bool_()),
        *_columns(_FLOAT, "planned_s ttft_s time_to_second_token_s tpot_s itl_p50_s itl_max_s"),
        *_columns(_FLOAT, "chunk_gap_p50_s chunk_gap_max_s e2e_s end_s"),
        ("token_chunks", _INT),
        *_columns(_FLOAT, " ".join(f"{term}_s" for term in BUDGET_TERMS)),
        *_columns(_FLOAT, "residual_s residual_wall_s send_lag_wall_s planned_error_wall_s"),
        *_columns(_FLOAT, "prefill_start_s prefill_end_s granted_s decode_end_s"),
        *_columns(_FLOAT, "prefill_late_wall_s decode_late_wall_s service_wall_s"),
        *_columns(_FLOAT, "kv_bytes profile_prefill_s"),
        *_columns(_INT, "kv_bytes_expected kv_wire_bytes_expected kv_wire_bytes_sent"),
        *_columns(_INT, "kv_wire_bytes_received kv_layers kv_retransmits"),
        *_columns(_FLOAT, "modelled_ttft_s modelled_e2e_s modelled_prefill_queue_s"),
        *_columns(_FLOAT, "modelled_prefill_s modelled_transfer_s modelled_decode_admission_s"),
        *_columns(_INT, "planned_mono_ns sent_mono_ns first_byte_mono_ns first_token_mono_ns"),
        *_columns(_INT, "end_mono_ns gateway_received_mono_ns gateway_dispatched_mono_ns"),
        *_columns(_INT, "gateway_first_chunk_mono_ns gateway_first_written_mono_ns"),
        *_columns(_INT, "prefill_received_mono_ns prefill_start_mono_ns prefill_end_mono_ns"),
        *_columns(_INT, "kv_acked_mono_ns decode_received_mono_ns landed_mono_ns granted_mono_ns"),
        *_columns(_INT, "decode_first_written_mono_ns decode_end_mono_ns"),
    ],
    "link": [
        *_CELL,
        *_columns(_INT, "mono_ns"),
        *_columns(_FLOAT, "t_s rate_bytes_per_s"),
        *_columns(_TEXT, "kind direction cluster peer"),
        *_columns(_INT, "connection"),
        *_columns(_INT, "wire_bytes_total packets_total dropped_total queued_wire_bytes"),
        *_columns(_FLOAT, "rtt_s delivery_rate_bytes_per_s"),
        *_columns(_INT, "retransmits cwnd unsent_wire_bytes"),
        *_columns(_FLOAT, "min_rtt_s"),
        *_columns(_INT, "acked_wire_bytes backlog_wire_bytes in_flight_wire_bytes"),
        *_columns(_FLOAT, "utilisation waiting_s capacity_bytes_per_s"),
        ("scarce", pa.bool_()),
    ],
    "engines": [
        *_CELL,
        *_columns(_INT, "mono_ns"),
        *_columns(_FLOAT, "t_s"),
        *_columns(_TEXT, "instance role"),
        *_columns(_INT, "queued running"),
        *_columns(_FLOAT, "busy_s"),
        *_columns(_INT, "kv_sent_wire_bytes_total kv_transfers_total"),
    ],
    "decisions": [
        *_CELL,
        *_columns(_INT, "mono_ns"),
        *_columns(_FLOAT, "t_s"),
        *_columns(_TEXT, "action rid"),
        *_columns(_INT, "attempt"),
        *_columns(_FLOAT, "now_s"),
        *_columns(_INT, "input_tokens output_tokens block_keys uncached_tokens cached_tokens"),
        *_columns(_INT, "resident_tokens threshold_tokens"),
        ("hit_tokens", pa.map_(_TEXT, _INT)),
        ("link_scarce", pa.bool_()),
        ("link_up", pa.list_(_TEXT)),
        ("roomy", pa.list_(_TEXT)),
        ("waits_s", pa.map_(_TEXT, _FLOAT)),
        ("considered_s", pa.map_(_TEXT, _FLOAT)),
        ("slots_s", pa.map_(_TEXT, _FLOAT)),
        ("assigned", pa.map_(_TEXT, _INT)),
        *_columns(_TEXT, "prefill_instance decode_instance"),
        *_columns(_FLOAT, "prefill_service_s expected_prefill_start_s expected_kv_landed_s"),
        *_columns(_FLOAT, "expected_decode_slot_s"),
        *_columns(_INT, "fetched_tokens"),
        *_columns(_TEXT, "fetch_from"),
        *_columns(_FLOAT, "fetch_s"),
        *_columns(_TEXT, "copy_from copy_to"),
        *_columns(_INT, "copied_tokens copied_bytes"),
        *_columns(_FLOAT, "copy_s"),
        *_columns(_TEXT, "instance reason"),
        *_columns(_FLOAT, "retry_after_s"),
    ],
    "load": [
        *_CELL,
        *_columns(_INT, "mono_ns"),
        *_columns(_FLOAT, "t_s"),
        *_columns(_INT, "worker sent completed failed in_flight"),
        *_columns(_FLOAT, "lag_max_wall_s loop_delay_max_wall_s cpu_wall_s"),
        *_columns(_INT, "rss_bytes"),
    ],
    "simulated": [
        ("deployment", _TEXT),
        *_columns(_TEXT, "rid prefill_instance decode_instance"),
        *_columns(_FLOAT, "prefill_queue_s prefill_s transfer_s decode_admission_s ttft_s e2e_s"),
        *_columns(_INT, "kv_bytes"),
    ],
}


@dataclass(frozen=True, slots=True)
class Compaction:
    """What writing the tables met: truncated last lines by file, and spools that do not exist."""

    truncated: dict[str, int]
    missing: tuple[str, ...]


def schema(name: TableName, notes: Mapping[str, Any] | None = None) -> pa.Schema:
    """The Arrow schema of a table, its version in the metadata."""
    metadata: dict[str | bytes, str | bytes] = {
        "prfaas_table": name,
        "prfaas_schema_version": str(TABLES_VERSION),
    }
    if notes:
        metadata["prfaas_notes"] = json.dumps(notes)
    return pa.schema(COLUMNS[name], metadata=metadata)


def write_expected(run: RunDirectory, rows: Iterable[ExpectedRow]) -> None:
    """Write what geometry and profiles expect of each request, so that a report needs no others."""
    write_atomically(run.expected_path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def write_simulated(run: RunDirectory, deployment: str, rows: Iterable[SimulatedRow]) -> None:
    """Write the simulation of the schedule on one deployment."""
    path = run.simulated_path(deployment)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def read_table(
    run: RunDirectory, name: TableName, columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """A table of the run; nulls of integer columns stay nulls (pandas' nullable types). Or some
    ``columns`` of it, of which one without any value takes no memory."""
    table = _read_arrow(run, name, columns)
    if columns is None:
        return table.to_pandas(types_mapper=_NULLABLE.get)
    for place, column in enumerate(table.columns):
        if column.null_count == table.num_rows:
            nothing = pa.nulls(table.num_rows)
            table = table.set_column(place, table.column_names[place], nothing)
    return table.to_pandas(types_mapper=_NULLABLE.get, split_blocks=True, self_destruct=True)


def read_notes(run: RunDirectory) -> dict[str, Any]:
    """What :func:`compact` met, from the metadata of ``requests.parquet``."""
    metadata = _read_arrow(run, "requests").schema.metadata or {}
    try:
        notes: dict[str, Any] = json.loads(metadata.get(b"prfaas_notes", b"{}"))
        Compaction(**{"truncated": {}, "missing": (), **notes})
    except (ValueError, TypeError, RecursionError) as error:
        path = run.table_path("requests")
        raise ScenarioError(
            f"{path} has notes that are not ours: {error}; `prfaas report` rebuilds it"
        ) from error
    return notes


def compact(run: RunDirectory) -> Compaction:
    """Join the spools and write every table; run at the end of a run, or after a crash. A simulated
    run has no spools: its tables are written as it goes, and stay as they are."""
    manifest = run.read_manifest()
    if manifest.kind == "simulated":
        return Compaction({}, ())
    schedule = run.read_schedule()
    reader = _Reader(run)
    expected = by_rid(run.expected_path, reader.rows(run.expected_path, ExpectedRow))
    simulated: dict[str, dict[str, SimulatedRow]] = {}
    for deployment in manifest.deployment_names():
        path = run.simulated_path(deployment)
        simulated[deployment] = by_rid(path, reader.rows(path, SimulatedRow))
    tables: dict[TableName, list[dict[str, Any]]] = {name: [] for name in COLUMNS}
    for cell in manifest.deployments:
        view = CellView(manifest, cell, expected, simulated[cell.deployment])
        try:
            tables["requests"] += join_requests(view, schedule, reader.cell_rows(cell))
            tables["link"] += join_link(view, reader.cell(cell, "link", LinkRow))
            tables["engines"] += join_engines(view, reader.cell(cell, "engines", EngineRow))
            tables["load"] += join_load(view, reader.load(cell))
            tables["decisions"] += join_decisions(view, reader.cell(cell, "decisions", DecisionRow))
        except OverflowError as error:
            raise SpoolError(f"{run.cell_path(cell)}: a spool has a number too large") from error
    tables["simulated"] = [
        {"deployment": deployment, **asdict(row)}
        for deployment, rows in simulated.items()
        for row in rows.values()
    ]
    met = Compaction(reader.truncated, tuple(reader.missing))
    for name, rows in tables.items():
        _write(run, name, rows, asdict(met) if name == "requests" else None)
    return met


class _Reader:
    """Reads spools and remembers what was truncated or missing."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.truncated: dict[str, int] = {}
        self.missing: list[str] = []

    def rows(self, path: Path, row: type[Row], *, optional: bool = False) -> tuple[Row, ...]:
        spool = read_rows(path, row)
        name = str(path.relative_to(self.run.path))
        if spool.truncated:
            self.truncated[name] = spool.truncated
        if spool.missing and not optional:
            self.missing.append(name)
        return spool.rows

    def cell(
        self, cell: Cell, name: str, row: type[Row], *, optional: bool = False
    ) -> tuple[Row, ...]:
        never_began = cell.start_mono_ns is None
        return self.rows(self.run.spool_path(cell, name), row, optional=optional or never_began)

    def load(self, cell: Cell) -> tuple[LoadRow, ...]:
        """Samples of all load workers; where there are none the client's rows are all there is."""
        paths = self.run.client_paths(cell, "load")
        return tuple(row for path in paths for row in self.rows(path, LoadRow, optional=True))

    def client(self, cell: Cell) -> tuple[ClientRow, ...]:
        """The rows of all load workers."""
        paths = self.run.client_paths(cell)
        never_began = cell.start_mono_ns is None
        return tuple(
            row for path in paths for row in self.rows(path, ClientRow, optional=never_began)
        )

    def cell_rows(self, cell: Cell) -> CellRows:
        client_path = self.run.spool_path(cell, "client")
        gateway_path = self.run.spool_path(cell, "gateway")
        return CellRows(
            client_path,
            by_rid(client_path, self.client(cell)),
            by_rid(gateway_path, self.cell(cell, "gateway", GatewayRow)),
            # A worker keeps its own rows where the gateway may not have learnt its spans.
            tuple(
                row for name in WORKERS for row in self.cell(cell, name, WorkerRow, optional=True)
            ),
        )


_NULLABLE: dict[pa.DataType, Any] = {
    _INT: pd.Int64Dtype(),
    pa.bool_(): pd.BooleanDtype(),
    _TEXT: pd.StringDtype(),
    pa.null(): pd.ArrowDtype(pa.null()),
}


def _read_arrow(
    run: RunDirectory, name: TableName, columns: Sequence[str] | None = None
) -> pa.Table:
    path = run.table_path(name)
    try:
        # By an open file, since a folder of that name would be read as a data set; by Arrow's own,
        # since its threads may still hold one of Python's when the interpreter ends.
        with pa.OSFile(str(path), "rb") as file, pq.ParquetFile(file) as table_file:
            found = table_file.schema_arrow
            table = table_file.read(None if columns is None else list(columns))
    except (OSError, pa.ArrowException) as error:
        raise ScenarioError(f"cannot read {path}: {error}; {_mending(run)}") from error
    if not found.equals(schema(name)):
        raise ScenarioError(f"{path} is not a {name} table of version {TABLES_VERSION}")
    return table


def _mending(run: RunDirectory) -> str:
    if run.read_manifest().kind == "simulated":
        return "a simulation that is killed leaves no table that can be read; simulate it again"
    return "`prfaas report` rebuilds it"


def _write(
    run: RunDirectory, name: TableName, rows: list[dict[str, Any]], notes: dict[str, Any] | None
) -> None:
    path = run.table_path(name)
    try:
        table = pa.Table.from_pylist(rows, schema=schema(name, notes))
    except (pa.ArrowException, OverflowError) as error:
        raise SpoolError(f"{run.path / 'spool'} holds what {path.name} cannot: {error}") from error
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    write_atomically(path, buffer.getvalue().to_pybytes())
