"""Builds run directories with known numbers, written as the real processes write their spools.

Instances serve first come, first served; every other duration is one constant, so that TTFT, its
terms and the residual are known by arithmetic. Wall durations are exact to the nanosecond.
"""

import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.core import Instance, Request
from harness.record.run_directory import Cell, DeploymentModel, Manifest, RunDirectory
from harness.record.spool import (
    ClientRow,
    DecodeSpan,
    EngineRow,
    ExpectedRow,
    GatewayRow,
    LinkRow,
    PrefillSpan,
    SimulatedRow,
)
from harness.record.tables import write_expected, write_simulated

MS = 1_000_000
TIME_SCALE, BYTE_SCALE = 10.0, 1000.0
START_NS = 5_000_000_000
#: Wall durations of each budget term that is not queueing or service.
LAG_NS, GATEWAY_NS, TRANSFER_NS = 1 * MS, MS // 2, 3 * MS
ADMISSION_NS, FIRST_NS, RETURN_NS = 2 * MS, MS // 4, MS // 4
#: What no process measures: hops between them; it is the residual.
HOPS_NS = MS // 2
STEP_NS = 5 * MS // 2  # 25 ms of scenario time
PREFILL_S_PER_TOKEN = {"h200": 60e-6, "h20": 150e-6}
SHAPES: dict[str, dict[str, int]] = {
    "prfaas_pd": {"prfaas": 4, "pd": 3},
    "homogeneous_pd": {"pd": 9},
    "naive_heterogeneous": {"prfaas": 4},
}
HARDWARE = {"prfaas": "h200", "pd": "h20"}
THRESHOLD_TOKENS = 19_400


@dataclass(frozen=True)
class Options:
    """What kind of run to write."""

    num_requests: int = 320
    rate_req_per_s: float = 1.27
    output_tokens: int = 9
    deployments: tuple[str, ...] = tuple(SHAPES)
    repeats: int = 1
    status: str = "finished"
    seed: int = 3
    hops_ns: int = HOPS_NS
    lag_ns: int = LAG_NS


def kv_bytes(tokens: int) -> int:
    return 182_000_000 + 17_280 * tokens


def kv_wire_bytes(tokens: int) -> int:
    return round(kv_bytes(tokens) / BYTE_SCALE)


def schedule(options: Options) -> tuple[Request, ...]:
    generator = np.random.default_rng(options.seed)
    at_s, requests = 0.0, []
    for index in range(options.num_requests):
        tokens = int(np.clip(generator.lognormal(9.9, 1.0), 128, 131_072))
        requests.append(Request(f"{index:06d}", index, at_s, tokens, options.output_tokens))
        at_s += round(generator.exponential(1.0 / options.rate_req_per_s), 4)
    return tuple(requests)


def instances(deployment: str) -> tuple[Instance, ...]:
    prefills = [
        Instance(f"{cluster}-p{number}", cluster, "prefill", HARDWARE[cluster])
        for cluster, count in SHAPES[deployment].items()
        for number in range(count)
    ]
    return (*prefills, Instance("pd-d0", "pd", "decode", "h20"))


def cluster_of(deployment: str, request: Request) -> str:
    clusters = list(SHAPES[deployment])
    if len(clusters) == 1:
        return clusters[0]
    return "prfaas" if request.input_tokens > THRESHOLD_TOKENS else "pd"


@dataclass
class Served:
    """One request's rows, and its TTFT by arithmetic."""

    client: ClientRow
    gateway: GatewayRow
    ttft_s: float
    queue_ns: int


def serve(
    deployment: str, requests: tuple[Request, ...], options: Options, start_ns: int
) -> list[Served]:
    """Run the queue by hand: one FCFS queue a cluster, the earliest free instance next."""
    free_ns = {cluster: [0] * count for cluster, count in SHAPES[deployment].items()}
    served = []
    for request in requests:
        cluster = cluster_of(deployment, request)
        per_token = PREFILL_S_PER_TOKEN[HARDWARE[cluster]]
        service_ns = round(request.input_tokens * per_token / TIME_SCALE * 1e9)
        planned = start_ns + round(request.planned_s / TIME_SCALE * 1e9)
        sent = planned + options.lag_ns
        dispatched = sent + GATEWAY_NS
        received = dispatched + options.hops_ns
        chosen = int(np.argmin(free_ns[cluster]))
        start = max(received, free_ns[cluster][chosen])
        end = free_ns[cluster][chosen] = start + service_ns
        landed = end + TRANSFER_NS
        granted = landed + ADMISSION_NS
        first = granted + FIRST_NS
        token = first + RETURN_NS
        last = token + (request.output_tokens - 1) * STEP_NS
        chunks = [token] if request.output_tokens == 1 else [token, token + STEP_NS]
        counts = [1] * len(chunks)
        if request.output_tokens > 2:
            chunks.append(last)
            counts.append(request.output_tokens - 2)
        wire = kv_wire_bytes(request.input_tokens)
        client = ClientRow(
            rid=request.rid, index=request.index, planned_mono_ns=planned, outcome="completed",
            sent_mono_ns=sent, first_byte_mono_ns=token, first_token_mono_ns=token,
            end_mono_ns=last, chunk_mono_ns=tuple(chunks), chunk_tokens=tuple(counts),
            prompt_tokens=request.input_tokens, completion_tokens=request.output_tokens,
            http_status=200,
        )  # fmt: skip
        prefill = PrefillSpan(received, start, end, service_ns / 1e9, 0.0, landed, wire)
        decode = DecodeSpan(received, landed, granted, first, last, wire, 57, 0, 0.0)
        gateway = GatewayRow(
            rid=request.rid, received_mono_ns=sent, dispatched_mono_ns=dispatched,
            first_chunk_mono_ns=first, first_written_mono_ns=token, end_mono_ns=last,
            prefill_instance=f"{cluster}-p{chosen}", decode_instance="pd-d0",
            crosses=cluster == "prfaas", outcome="completed", threshold_tokens=THRESHOLD_TOKENS,
            prefill=prefill, decode=decode,
        )  # fmt: skip
        served.append(
            Served(client, gateway, (token - planned) / 1e9 * TIME_SCALE, start - received)
        )
    return served


def write_lines(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


@dataclass
class Built:
    """A run directory and what is true of it."""

    run: RunDirectory
    options: Options
    requests: tuple[Request, ...]
    served: dict[Cell, list[Served]]

    def cell(self, deployment: str, repeat: int = 0) -> Cell:
        return next(
            cell for cell in self.served if (cell.deployment, cell.repeat) == (deployment, repeat)
        )

    def rewrite(self, deployment: str, name: str, rows: list[Any]) -> Path:
        """Replace one spool of the first repeat."""
        path = self.run.spool_path(self.cell(deployment), name)
        write_lines(path, rows)
        return path

    def clients(self, deployment: str) -> list[ClientRow]:
        return [served.client for served in self.served[self.cell(deployment)]]

    def gateways(self, deployment: str) -> list[GatewayRow]:
        return [served.gateway for served in self.served[self.cell(deployment)]]

    def change_manifest(self, **change: Any) -> None:
        self.run.write_manifest(replace(self.run.read_manifest(), **change))


def build(root: Path, options: Options = Options()) -> Built:
    run = RunDirectory.create(root, "synthetic run", datetime(2026, 5, 1, 12, tzinfo=UTC))
    requests = schedule(options)
    run.write_schedule(requests)
    last_s = requests[-1].planned_s if requests else 0.0
    cells: list[Cell] = []
    for repeat in range(options.repeats):
        for deployment in options.deployments:
            start_ns = START_NS + len(cells) * round((last_s + 1000) / TIME_SCALE * 1e9)
            cells.append(Cell(deployment, repeat, start_ns, start_ns + 1))
    run.write_manifest(_manifest(run, options, tuple(cells)))
    write_expected(
        run,
        (
            ExpectedRow(
                request.rid, kv_bytes(request.input_tokens), kv_wire_bytes(request.input_tokens),
                {name: each * request.input_tokens for name, each in PREFILL_S_PER_TOKEN.items()},
            )
            for request in requests
        ),
    )  # fmt: skip
    served = {}
    for cell in cells:
        assert cell.start_mono_ns is not None
        served[cell] = serve(cell.deployment, requests, options, cell.start_mono_ns)
        write_lines(run.spool_path(cell, "client"), [each.client for each in served[cell]])
        write_lines(run.spool_path(cell, "gateway"), [each.gateway for each in served[cell]])
        write_lines(run.spool_path(cell, "link"), _link_rows(served[cell], cell.start_mono_ns))
        write_lines(run.spool_path(cell, "engines"), _engine_rows(cell))
        write_lines(run.spool_path(cell, "decisions"), _decisions(served[cell]))
        if cell.repeat == 0:
            write_simulated(run, cell.deployment, [_simulated(each) for each in served[cell]])
    return Built(run, options, requests, served)


def _simulated(each: Served) -> SimulatedRow:
    prefill = each.gateway.prefill
    assert prefill is not None
    assert prefill.service_wall_s is not None
    service_s = prefill.service_wall_s * TIME_SCALE
    queue_s = each.queue_ns / 1e9 * TIME_SCALE
    return SimulatedRow(
        each.client.rid, queue_s, service_s, 0.03, 0.02, queue_s + service_s + 0.05
    )  # fmt: skip


def _link_rows(served: list[Served], start_ns: int) -> list[LinkRow]:
    """A counter sample each 50 ms of wall time: KV that crossed, as it was acknowledged."""
    acked = []
    for each in served:
        prefill = each.gateway.prefill
        if each.gateway.crosses and prefill and prefill.kv_acked_mono_ns:
            acked.append((prefill.kv_acked_mono_ns, prefill.kv_wire_bytes_sent or 0))
    last_ns = max((each.client.end_mono_ns or 0 for each in served), default=start_ns)
    rows = []
    for now_ns in range(start_ns, last_ns + 50 * MS, 50 * MS):
        total = sum(size for at_ns, size in acked if at_ns <= now_ns)
        rows.append(LinkRow(now_ns, "link", "far_to_near", total, total // 1448, 0, 0))
        rows.append(LinkRow(now_ns, "link", "near_to_far", total // 50, total // 5000, 0, 0))
    rows.append(
        LinkRow(
            last_ns, "tcp", peer="10.0.0.2:5000", connection=3, rtt_s=0.001, retransmits=2, cwnd=40
        )
    )
    return rows


def _engine_rows(cell: Cell) -> list[EngineRow]:
    assert cell.start_mono_ns is not None
    return [
        EngineRow(cell.start_mono_ns + 100 * MS, instance.name, instance.role, 0, 1, 0.05)
        for instance in instances(cell.deployment)
    ]


def _decisions(served: list[Served]) -> list[dict[str, Any]]:
    return [
        {
            "mono_ns": each.gateway.dispatched_mono_ns,
            "action": "dispatch",
            "rid": each.gateway.rid,
            "now_s": 1.5,
            "prefill_instance": each.gateway.prefill_instance,
            "a_later_key": 1,
        }
        for each in served
    ]


def _manifest(run: RunDirectory, options: Options, cells: tuple[Cell, ...]) -> Manifest:
    link = {
        "rate_bytes_per_s": 12.5e9,
        "rtt_s": 0.0008,
        "loss": 0.0,
        "rate_wire_bytes_per_s": 125e6,
        "rtt_wall_s": 80e-6,
    }
    return Manifest(
        run_id=run.path.name,
        started_utc="2026-05-01T12:00:00+00:00",
        started_mono_ns=START_NS,
        scenario={
            "name": "synthetic run",
            "slo": {"tpot_s": 0.025, "ttft_s": None},
            "scheduling": {"ttft_source": "decode"},
            "load": {"rate_req_per_s": options.rate_req_per_s},
            "link": link,
        },
        scenario_hash="0" * 64,
        time_scale=TIME_SCALE,
        byte_scale=BYTE_SCALE,
        deployments=cells,
        instances={name: instances(name) for name in options.deployments},
        status=options.status,  # type: ignore[arg-type]  # tests write every status
        seeds={"load": options.seed},
        versions={"python": "3.11", "prfaas-bench": "0.1.0"},
        machine={"cpus": 2, "kernel": "6.1"},
        clocks={"monotonic_resolution_s": 1e-9},
        link_backend="relay",
        link_requested=link,
        link_applied=link,
        link_check={"rtt_p50_s": 81e-6, "rate_far_to_near_bytes_per_s": 124e6},
        models={
            name: DeploymentModel(3.24, 3.2, {"prefill": 0.6, "decode": 0.3}, 1.5)
            for name in options.deployments
        },
    )


def read_json(path: Path) -> Any:
    """JSON that holds no NaN or Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{path} holds {constant}")

    return json.loads(path.read_text(), parse_constant=refuse)


__all__ = ["Built", "Options", "asdict", "build"]
