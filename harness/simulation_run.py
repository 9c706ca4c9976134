"""A simulation's run directory: ``requests.parquet`` with the columns of a live run, streamed.

Each block of rows becomes a row group as soon as its requests have ended, so that memory does not
grow with the run; rows are in the order in which requests ended. What only a live run can measure
(wall times, instants of processes, wire bytes, the client's and the gateway's terms) is null, and
so are the ``modelled_*`` columns: the row itself is the model. The notes of the table's metadata
and the manifest say that it was simulated; a verdict is not given.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.machine import describe_clocks, describe_machine, describe_versions
from harness.record.run_directory import Cell, Manifest, RunDirectory
from harness.record.tables import schema
from harness.scenario import Scenario, scenario_hash, to_manifest
from harness.schedule import Schedule
from harness.simulator import SimulatedRows
from harness.simulator.rows import NO_ROUTE, PHASES

#: Columns of durations and instants, by those of the simulation.
_SECONDS = {
    "planned_s": "planned_s",
    "ttft_s": "ttft_s",
    "time_to_second_token_s": "time_to_second_token_s",
    "e2e_s": "e2e_s",
    "end_s": "finish_s",
    "prefill_queue_s": "prefill_queue_s",
    "prefill_s": "prefill_s",
    "transfer_s": "transfer_s",
    "decode_admission_s": "decode_admission_s",
    "first_token_s": "first_token_s",
    "prefill_start_s": "start_s",
    "prefill_end_s": "end_s",
    "granted_s": "granted_s",
    "decode_end_s": "finish_s",
    "kv_bytes": "kv_bytes",
    "profile_prefill_s": "service_s",
}


class SimulationRun:
    """Context manager: makes the directory, takes rows, closes the table and the manifest."""

    def __init__(self, root: Path, scenario: Scenario) -> None:
        self._scenario = scenario
        self.run = RunDirectory.create(root, f"{scenario.name}-simulated", datetime.now(UTC))
        self._schema = schema("requests", {"truncated": {}, "missing": []})
        self._writer = pq.ParquetWriter(
            self.run.table_path("requests"), self._schema, compression="zstd"
        )
        self._manifest("running")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()
        self._manifest("finished" if kind is None else "failed")

    def sink(self, deployment: str) -> Callable[[SimulatedRows], None]:
        """What takes the rows of a deployment."""
        return lambda rows: self._writer.write_table(self._table(deployment, rows))

    def _table(self, deployment: str, rows: SimulatedRows) -> pa.Table:
        count = len(rows)
        columns: dict[str, Any] = {
            "deployment": [deployment] * count,
            "repeat": np.zeros(count, np.int64),
            **_requests(rows),
            **_routes(rows),
            **{name: _floats(rows.column(of)) for name, of in _SECONDS.items()},
        }
        for name in ("fetched_tokens", "resident_tokens"):
            columns[name] = rows.whole(name)
        columns["prefill_cached_tokens"] = rows.whole("cached_tokens")
        outputs = columns["output_tokens"]
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot_s = (rows.column("finish_s") - rows.column("granted_s")) / (outputs - 1)
        columns["tpot_s"] = _floats(np.where(outputs > 1, tpot_s, np.nan))
        arrays = [
            pa.array(columns[field.name], type=field.type)
            if field.name in columns
            else pa.nulls(count, field.type)
            for field in self._schema
        ]
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _manifest(self, status: Any) -> None:
        scenario = self._scenario
        self.run.write_manifest(
            Manifest(
                run_id=self.run.path.name,
                started_utc=datetime.now(UTC).isoformat(),
                started_mono_ns=time.monotonic_ns(),
                scenario=to_manifest(scenario),
                scenario_hash=scenario_hash(scenario),
                time_scale=scenario.scale.time,
                byte_scale=scenario.scale.bytes,
                deployments=tuple(Cell(name, 0) for name in scenario.deployments),
                instances={n: one.instances() for n, one in scenario.deployments.items()},
                status=status,
                seeds={"load": scenario.load.seed},
                versions=describe_versions(),
                machine=describe_machine(),
                clocks=describe_clocks(),
                notes=("simulated: nothing was run live, and no gate of a live run was asked",),
            )
        )


def _requests(rows: SimulatedRows) -> dict[str, Any]:
    numbers, schedule = rows.whole("number"), rows.schedule
    phases = rows.whole("phase").tolist()
    if isinstance(schedule, Schedule):
        index = schedule.indexes[numbers]
        inputs, outputs = schedule.input_tokens[numbers], schedule.output_tokens[numbers]
    else:
        found = [schedule[number] for number in numbers.tolist()]
        index = np.array([one.index for one in found], np.int64)
        inputs = np.array([one.input_tokens for one in found], np.int64)
        outputs = np.array([one.output_tokens for one in found], np.int64)
    return {
        "rid": [f"{number:06d}" for number in index.tolist()],
        "index": index,
        "outcome": ["failed" if phase else "completed" for phase in phases],
        "failure_phase": [PHASES[phase] for phase in phases],
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cached_tokens": np.zeros(len(rows), np.int64),
        "prompt_tokens": inputs,
    }


def _routes(rows: SimulatedRows) -> dict[str, Any]:
    routes = [
        None if code == NO_ROUTE else rows.routes[code] for code in rows.whole("route").tolist()
    ]
    return {
        "prefill_instance": [one and one.prefill.name for one in routes],
        "prefill_cluster": [one and one.prefill.cluster for one in routes],
        "prefill_hardware": [one and one.prefill.hardware for one in routes],
        "decode_instance": [one and one.decode.name for one in routes],
        "crosses": [None if one is None else one.crosses for one in routes],
    }


def _floats(values: np.ndarray[Any, np.dtype[np.float64]]) -> "pa.Array[Any]":
    """NaN, which is not reached, as null."""
    return pa.array(values, type=pa.float64(), mask=np.isnan(values))
