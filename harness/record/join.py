"""Joins the spools of one deployment and repeat into rows of :mod:`harness.record.tables`.

A client row, a gateway row and the workers' spans of a request meet by ``rid``; instants become
scenario seconds since the start of the load by (instant - start) x time_scale.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.core import Request
from harness.record.budget import TtftSource, between_s, budget_terms, residual_s, token_times
from harness.record.run_directory import Cell, Manifest
from harness.record.spool import (
    ClientRow,
    DecisionRow,
    DecodeSpan,
    DecodeTimes,
    EngineRow,
    ExpectedRow,
    GatewayRow,
    LinkRow,
    LoadRow,
    PrefillSpan,
    PrefillTimes,
    SimulatedRow,
    SpoolError,
    WorkerRow,
)

#: Token times hold a value a token; no model answers with as many.
MAX_CHUNK_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class CellRows:
    """What the processes of one cell wrote about its requests."""

    client_path: Path
    client: Mapping[str, ClientRow]
    gateway: Mapping[str, GatewayRow]
    workers: tuple[WorkerRow, ...]


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell with what the whole run knows of its requests."""

    manifest: Manifest
    cell: Cell
    expected: Mapping[str, ExpectedRow]
    simulated: Mapping[str, SimulatedRow]

    @property
    def key(self) -> dict[str, Any]:
        return {"deployment": self.cell.deployment, "repeat": self.cell.repeat}

    @property
    def ttft_source(self) -> TtftSource:
        source = self.manifest.scenario.get("scheduling", {}).get("ttft_source", "decode")
        return "prefill" if source == "prefill" else "decode"

    def scenario_s(self, wall_s: float | None) -> float | None:
        return None if wall_s is None else wall_s * self.manifest.time_scale

    def since_start_s(self, mono_ns: int | None) -> float | None:
        return self.scenario_s(between_s(self.cell.start_mono_ns, mono_ns))


def join_requests(
    view: CellView, schedule: tuple[Request, ...], rows: CellRows
) -> list[dict[str, Any]]:
    """One row a planned request; SpoolError when a spool names a request that was not planned."""
    planned = {request.rid for request in schedule}
    prefill_names = {
        instance.name
        for instance in view.manifest.instances.get(view.cell.deployment, ())
        if instance.role == "prefill"
    }
    for spool in (rows.client, rows.gateway):
        for rid in spool:
            if rid not in planned:
                raise SpoolError(f"{rows.client_path.parent}: request {rid} is not in the schedule")
    prefills = {row.rid: row for row in rows.workers if row.prefill is not None}
    decodes = {row.rid: row for row in rows.workers if row.decode is not None}
    joined = []
    for request in schedule:
        gateway = rows.gateway.get(request.rid)
        known = _with_worker_spans(
            gateway or GatewayRow(request.rid), prefills.get(request.rid), decodes.get(request.rid)
        )
        client = rows.client.get(request.rid)
        if client is not None and len(client.chunk_mono_ns) != len(client.chunk_tokens):
            raise SpoolError(f"{rows.client_path}: request {request.rid}: chunks do not pair up")
        if client is not None and sum(map(abs, client.chunk_tokens)) > MAX_CHUNK_TOKENS:
            raise SpoolError(
                f"{rows.client_path}: request {request.rid}: its chunks hold more than "
                f"{MAX_CHUNK_TOKENS} tokens"
            )
        where = known.prefill_instance
        if where is not None and where not in prefill_names:
            raise SpoolError(
                f"{rows.client_path.parent}: request {request.rid} was prefilled by {where!r}, "
                f"which is no prefill instance of {view.cell.deployment}"
            )
        joined.append(
            {
                **view.key,
                **asdict(request),
                **_outcome(client, saw_it=gateway is not None),
                **_client_columns(view, request, client),
                **_gateway_columns(view, known),
                **_budget_columns(view, client, known),
                **_expected_columns(view, request, known),
            }
        )
    return joined


def _with_worker_spans(
    gateway: GatewayRow, prefill: WorkerRow | None, decode: WorkerRow | None
) -> GatewayRow:
    if gateway.prefill is None and prefill is not None:
        gateway = replace(gateway, prefill=prefill.prefill, prefill_instance=prefill.instance)
    if gateway.decode is None and decode is not None:
        gateway = replace(gateway, decode=decode.decode, decode_instance=decode.instance)
    return gateway


def _outcome(client: ClientRow | None, *, saw_it: bool) -> dict[str, Any]:
    if client is not None:
        return {
            "outcome": client.outcome,
            "failure_phase": client.failure_phase,
            "failure_message": client.failure_message,
        }
    if saw_it:
        message = "the load generator died before it wrote this request's row"
        return {"outcome": "failed", "failure_phase": "lost", "failure_message": message}
    return {"outcome": "unsent", "failure_phase": None, "failure_message": None}


def _client_columns(view: CellView, request: Request, client: ClientRow | None) -> dict[str, Any]:
    if client is None:
        return {}
    planned_ns = client.planned_mono_ns
    tokens = token_times(client)
    planned_wall_s = between_s(view.cell.start_mono_ns, planned_ns)
    lag_wall_s = between_s(planned_ns, client.sent_mono_ns)
    scheduled_wall_s = request.planned_s / view.manifest.time_scale
    return {
        "prompt_tokens": client.prompt_tokens,
        "completion_tokens": client.completion_tokens,
        "http_status": client.http_status,
        "ttft_s": view.scenario_s(between_s(planned_ns, client.first_token_mono_ns)),
        "time_to_second_token_s": view.scenario_s(
            between_s(planned_ns, tokens.second_token_mono_ns)
        ),
        "tpot_s": view.scenario_s(tokens.tpot_s),
        "itl_p50_s": view.scenario_s(tokens.itl_p50_s),
        "itl_max_s": view.scenario_s(tokens.itl_max_s),
        "chunk_gap_p50_s": view.scenario_s(tokens.chunk_gap_p50_s),
        "chunk_gap_max_s": view.scenario_s(tokens.chunk_gap_max_s),
        "token_chunks": tokens.token_chunks,
        "e2e_s": view.scenario_s(between_s(planned_ns, client.end_mono_ns)),
        "end_s": view.since_start_s(client.end_mono_ns),
        "send_lag_wall_s": lag_wall_s,
        "planned_error_wall_s": (
            None if planned_wall_s is None else planned_wall_s - scheduled_wall_s
        ),
        "planned_mono_ns": planned_ns,
        "sent_mono_ns": client.sent_mono_ns,
        "first_byte_mono_ns": client.first_byte_mono_ns,
        "first_token_mono_ns": client.first_token_mono_ns,
        "end_mono_ns": client.end_mono_ns,
    }


def _gateway_columns(view: CellView, gateway: GatewayRow) -> dict[str, Any]:
    prefill = gateway.prefill or PrefillSpan()
    decode = gateway.decode or DecodeSpan()
    of_prefill = gateway.prefill_times or PrefillTimes()
    of_decode = gateway.decode_times or DecodeTimes()
    received = decode.kv_wire_bytes_received
    return {
        "threshold_tokens": gateway.threshold_tokens,
        "prefill_instance": gateway.prefill_instance,
        "decode_instance": gateway.decode_instance,
        "crosses": gateway.crosses,
        "retries": gateway.retries,
        "actual_cached_tokens": decode.cached_tokens if gateway.decode else of_decode.cached_tokens,
        "prefill_cached_tokens": (
            prefill.cached_tokens if gateway.prefill else of_prefill.cached_tokens
        ),
        "prefill_prompt_tokens": of_prefill.prompt_tokens,
        "retractions": of_decode.retractions,
        "decode_prefilled": of_decode.prefilled,
        "output_digest": gateway.output_digest,
        "fetched_tokens": prefill.fetched_tokens,
        "resident_tokens": decode.resident_tokens,
        "prefill_start_s": view.since_start_s(prefill.start_mono_ns),
        "prefill_end_s": view.since_start_s(prefill.end_mono_ns),
        "granted_s": view.since_start_s(decode.granted_mono_ns),
        "decode_end_s": view.since_start_s(decode.end_mono_ns),
        "prefill_late_wall_s": prefill.late_s,
        "decode_late_wall_s": decode.late_s,
        "service_wall_s": prefill.service_wall_s,
        "kv_bytes": None if received is None else received * view.manifest.byte_scale,
        "kv_wire_bytes_sent": prefill.kv_wire_bytes_sent,
        "kv_wire_bytes_received": received,
        "kv_retransmits": prefill.kv_retransmits,
        "kv_layers": decode.kv_layers,
        "gateway_received_mono_ns": gateway.received_mono_ns,
        "gateway_dispatched_mono_ns": gateway.dispatched_mono_ns,
        "gateway_first_chunk_mono_ns": gateway.first_chunk_mono_ns,
        "gateway_first_written_mono_ns": gateway.first_written_mono_ns,
        "prefill_received_mono_ns": prefill.received_mono_ns,
        "prefill_start_mono_ns": prefill.start_mono_ns,
        "prefill_end_mono_ns": prefill.end_mono_ns,
        "kv_acked_mono_ns": prefill.kv_acked_mono_ns,
        "decode_received_mono_ns": decode.received_mono_ns,
        "landed_mono_ns": decode.landed_mono_ns,
        "granted_mono_ns": decode.granted_mono_ns,
        "decode_first_written_mono_ns": decode.first_written_mono_ns,
        "decode_end_mono_ns": decode.end_mono_ns,
    }


def _budget_columns(
    view: CellView, client: ClientRow | None, gateway: GatewayRow
) -> dict[str, Any]:
    terms = budget_terms(client, gateway, view.ttft_source)
    ttft_wall_s = between_s(client.planned_mono_ns, client.first_token_mono_ns) if client else None
    left_wall_s = residual_s(ttft_wall_s, terms, view.ttft_source)
    return {
        **{f"{name}_s": view.scenario_s(value) for name, value in terms.items()},
        "residual_wall_s": left_wall_s,
        "residual_s": view.scenario_s(left_wall_s),
    }


def _expected_columns(view: CellView, request: Request, gateway: GatewayRow) -> dict[str, Any]:
    instances = {
        instance.name: instance
        for instance in view.manifest.instances.get(view.cell.deployment, ())
    }
    instance = instances.get(gateway.prefill_instance or "")
    expected = view.expected.get(request.rid)
    simulated = view.simulated.get(request.rid)
    columns: dict[str, Any] = {}
    if instance is not None:
        columns["prefill_cluster"] = instance.cluster
        columns["prefill_hardware"] = instance.hardware
    if expected is not None:
        columns |= _expected_bytes(view, expected, gateway)
        # The times are of whole prompts: with a prefix cached there is none to compare with.
        told = gateway.prefill or gateway.prefill_times
        if instance is not None and not (told and told.cached_tokens):
            columns["profile_prefill_s"] = expected.prefill_s.get(instance.hardware)
    if simulated is not None:
        columns["modelled_ttft_s"] = simulated.ttft_s
        columns["modelled_e2e_s"] = simulated.e2e_s
        columns["modelled_prefill_queue_s"] = simulated.prefill_queue_s
        columns["modelled_prefill_s"] = simulated.prefill_s
        columns["modelled_transfer_s"] = simulated.transfer_s
        columns["modelled_decode_admission_s"] = simulated.decode_admission_s
    return columns


def _expected_bytes(view: CellView, expected: ExpectedRow, gateway: GatewayRow) -> dict[str, int]:
    """KV bytes that had to move, given what lay at the destination already."""
    resident_tokens = (gateway.decode and gateway.decode.resident_tokens) or 0
    if not resident_tokens:
        kv_bytes, wire_bytes = expected.kv_bytes_expected, expected.kv_wire_bytes_expected
    else:
        kv_bytes = expected.kv_bytes_expected - resident_tokens * expected.growing_bytes_per_token
        wire_bytes = round(kv_bytes / view.manifest.byte_scale)
    return {"kv_bytes_expected": kv_bytes, "kv_wire_bytes_expected": wire_bytes}


def join_link(view: CellView, rows: Iterable[LinkRow]) -> list[dict[str, Any]]:
    """Link and TCP samples; the rate is that of the interval since the last sample, scaled up."""
    time_scale, byte_scale = view.manifest.time_scale, view.manifest.byte_scale
    before: dict[str | None, LinkRow] = {}
    joined = []
    for row in rows:
        rate = None
        if row.kind == "link" and row.bytes_total is not None:
            last = before.get(row.direction)
            if last is not None and last.bytes_total is not None and row.mono_ns > last.mono_ns:
                wall_rate = (
                    (row.bytes_total - last.bytes_total) * 1e9 / (row.mono_ns - last.mono_ns)
                )
                rate = wall_rate * byte_scale / time_scale
            before[row.direction] = row
        delivery = row.delivery_rate_bytes_per_s
        joined.append(
            {
                **view.key,
                "mono_ns": row.mono_ns,
                "t_s": view.since_start_s(row.mono_ns),
                "rate_bytes_per_s": rate,
                "kind": row.kind,
                "direction": row.direction,
                "cluster": row.cluster,
                "peer": row.peer,
                "connection": row.connection,
                "wire_bytes_total": row.bytes_total,
                "packets_total": row.packets_total,
                "dropped_total": row.dropped_total,
                "queued_wire_bytes": row.queued_bytes,
                "rtt_s": view.scenario_s(row.rtt_s),
                "delivery_rate_bytes_per_s": (
                    None if delivery is None else delivery * byte_scale / time_scale
                ),
                "retransmits": row.retransmits,
                "cwnd": row.cwnd,
                "unsent_wire_bytes": row.unsent_bytes,
                "min_rtt_s": view.scenario_s(row.min_rtt_s),
                "acked_wire_bytes": row.bytes_acked,
                "backlog_wire_bytes": row.backlog_bytes,
                "in_flight_wire_bytes": row.in_flight_bytes,
                "utilisation": row.utilisation,
                "waiting_s": row.waiting_s,
                "capacity_bytes_per_s": row.capacity_bytes_per_s,
                "scarce": row.scarce,
            }
        )
    return joined


def join_engines(view: CellView, rows: Iterable[EngineRow]) -> list[dict[str, Any]]:
    """Samples of the instances' queues."""
    return [
        {
            **view.key,
            "t_s": view.since_start_s(row.mono_ns),
            "busy_s": view.scenario_s(row.busy_s_total),
            **asdict(row),
        }
        for row in rows
    ]


def join_load(view: CellView, rows: Iterable[LoadRow]) -> list[dict[str, Any]]:
    """Samples of the load workers, in order of time; durations are wall time."""
    return [
        {
            **view.key,
            "mono_ns": row.mono_ns,
            "t_s": view.since_start_s(row.mono_ns),
            "worker": row.worker,
            "sent": row.sent,
            "completed": row.completed,
            "failed": row.failed,
            "in_flight": row.in_flight,
            "lag_max_wall_s": row.lag_max_s,
            "loop_delay_max_wall_s": row.loop_delay_max_s,
            "cpu_wall_s": row.cpu_s,
            "rss_bytes": row.rss_bytes,
        }
        for row in sorted(rows, key=lambda row: row.mono_ns)
    ]


def join_decisions(view: CellView, rows: Iterable[DecisionRow]) -> list[dict[str, Any]]:
    """The scheduler's decisions in order."""
    return [{**view.key, "t_s": view.since_start_s(row.mono_ns), **asdict(row)} for row in rows]
