"""A simulation's run directory: ``requests.parquet`` with the columns of a live run, streamed.

Each block of rows becomes a row group as soon as its requests have ended, so that memory does not
grow with the run; rows are in the order in which requests ended. What only a live run can measure
(wall times, instants of processes, wire bytes, the client's and the gateway's terms) is null, and
so are the ``modelled_*`` columns: the row itself is the model. The manifest says that the run is
simulated; a verdict is not given.

At its end there are beside it ``decisions.parquet`` with what the scheduler changed (thresholds,
roles; placements are rows of requests) and ``simulation.json``, what ``prfaas simulate --json``
prints. A run that was cut short has neither, and the rows that had been written by then.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.machine import describe_clocks, describe_machine, describe_versions
from harness.preparation import Prepared
from harness.record.run_directory import (
    Cell,
    Manifest,
    RunDirectory,
    json_bytes,
    write_atomically,
)
from harness.record.tables import schema
from harness.scenario import Scenario, scenario_hash, to_manifest
from harness.schedule import Schedule
from harness.simulator import SimulatedRows, Simulation
from harness.simulator.rows import NO_ROUTE, PHASES

#: Columns of durations and instants, by those of the simulation.
_SECONDS = {
    "planned_s": "planned_s",
    "ttft_s": "ttft_s",
    "time_to_second_token_s": "time_to_second_token_s",
    "end_s": "left_s",
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
        self._schema = schema("requests")
        self._writer = pq.ParquetWriter(
            self.run.table_path("requests"), self._schema, compression="zstd"
        )
        self._manifest = _manifest(scenario, self.run)
        self.run.write_manifest(self._manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()
        if kind is None:
            self._change(status="finished")
        elif issubclass(kind, KeyboardInterrupt):
            self._change(status="interrupted", error="interrupted by Ctrl-C or a signal to end")
        else:
            self._change(status="failed", error=f"{kind.__name__}: {error}")

    def sink(self, deployment: str) -> Callable[[SimulatedRows], None]:
        """What takes the rows of a deployment."""

        def take(rows: SimulatedRows) -> None:
            self._began(deployment, len(rows.schedule))
            self._writer.write_table(self._table(deployment, rows))

        return take

    def _began(self, deployment: str, num_requests: int) -> None:
        """Its load starts at zero of the simulated clock."""
        if Cell(deployment, 0) in self._manifest.deployments:
            self._manifest = self._manifest.started(deployment, 0, 0)
            self._change(schedule={"num_requests": num_requests})

    def conclude(self, prepared: Prepared, document: dict[str, Any]) -> None:
        """What is known once all deployments have been simulated; ``document`` tells of them."""
        for name, simulation in prepared.simulations.items():
            self._began(name, simulation.num_requests)
            end_ns = round(simulation.end_s / self._scenario.scale.time * 1e9)
            self._manifest = self._manifest.ended(name, 0, end_ns)
        self._change(
            schedule=prepared.described_schedule(),
            models=prepared.models,
            notes=(*self._manifest.notes, *document["notes"]),
        )
        rows = [row for name, one in prepared.simulations.items() for row in _changes(name, one)]
        decisions = pa.Table.from_pylist(rows, schema=schema("decisions"))
        pq.write_table(decisions, self.run.table_path("decisions"), compression="zstd")
        write_atomically(self.run.simulation_path, json_bytes(document))

    def _change(self, **fields: Any) -> None:
        self._manifest = dataclasses.replace(self._manifest, **fields)
        self.run.write_manifest(self._manifest)

    def _table(self, deployment: str, rows: SimulatedRows) -> pa.Table:
        count = len(rows)
        columns: dict[str, Any] = {
            "deployment": [deployment] * count,
            "repeat": np.zeros(count, np.int64),
            **_requests(rows),
            **_routes(rows),
            **{name: _floats(rows.column(of)) for name, of in _SECONDS.items()},
        }
        for name in ("fetched_tokens", "resident_tokens", "retries"):
            columns[name] = rows.whole(name)
        columns["e2e_s"] = rows.column("left_s") - rows.column("planned_s")
        if self._scenario.faults.instances:
            # Without them each is placed as it arrives, in no time.
            columns["gateway_s"] = _floats(rows.column("gateway_s"))
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


def _manifest(scenario: Scenario, run: RunDirectory) -> Manifest:
    return Manifest(
        run_id=run.path.name,
        started_utc=datetime.now(UTC).isoformat(),
        started_mono_ns=time.monotonic_ns(),
        scenario=to_manifest(scenario),
        scenario_hash=scenario_hash(scenario),
        time_scale=scenario.scale.time,
        byte_scale=scenario.scale.bytes,
        deployments=tuple(Cell(name, 0) for name in scenario.deployments),
        instances={n: one.instances() for n, one in scenario.deployments.items()},
        kind="simulated",
        seeds={"load": scenario.load.seed},
        versions=describe_versions(),
        machine=describe_machine(),
        clocks=describe_clocks(),
        notes=("simulated: nothing was run live, and no gate of a live run was asked",),
    )


def _changes(deployment: str, simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Thresholds and roles, in order of time, as rows of the decisions."""
    cell: dict[str, Any] = {"deployment": deployment, "repeat": 0}
    rows = [
        cell
        | {"action": "set_threshold", "t_s": one.at_s, "now_s": one.at_s}
        | {"threshold_tokens": one.threshold_tokens, "reason": one.reason}
        for one in simulation.thresholds
    ]
    # A live run notes a conversion when it begins.
    rows += [
        cell
        | {"action": "convert", "t_s": one.left_s, "now_s": one.left_s}
        | {"instance": one.instance, "reason": one.role}
        for one in simulation.roles
    ]
    yield from sorted(rows, key=lambda row: row["now_s"])


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
