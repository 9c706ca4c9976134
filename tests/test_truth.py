"""Known truth: engines with fixed times, and what the harness reads back of them."""

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Live, flat_profile, live, scenario

from harness.record.budget import budget_terms, residual_s, token_times
from harness.record.spool import ClientRow, GatewayRow, by_rid, read_rows
from harness.scenario import Scenario
from netem.link import symmetric
from netem.testlink import open_link

pytestmark = pytest.mark.quiet

PREFILL_S, STEP_S, OUTPUT_TOKENS = 0.2, 0.02, 12
HOP_S = 0.02

Rows = list[tuple[ClientRow, GatewayRow]]


def known(profile: Path) -> Scenario:
    """Time scale 1, constant costs, arrivals so thin that nothing queues."""
    path = flat_profile(profile, PREFILL_S, STEP_S, max_batch=8)
    return scenario(
        f'hardware.h20.profile="{path}"',
        f'hardware.h200.profile="{path}"',
        "scale.time=1",
        "workload.mu=6",
        "workload.sigma=0.5",
        f"workload.output_tokens={OUTPUT_TOKENS}",
        "load.rate_req_per_s=8",
        "load.num_requests=40",
        "testbed.stream_interval_tokens=1",
        "deployments.homogeneous_pd.num_prefill=12",
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("truth")
    with live(known(folder / "flat.json"), "homogeneous_pd", folder) as testbed:
        yield testbed


@pytest.fixture(scope="module")
def plain(served: Live) -> Rows:
    """What is read back without a hop that delays."""
    return replayed(served, None)


def replayed(served: Live, address: tuple[str, int] | None) -> Rows:
    """Both rows of every request, all of which completed."""
    result = served.testbed.replay("truth", lambda *_: None, lambda _: None, address)
    assert (result.completed, result.failed, result.unsent) == (40, 0, 0)
    paths = [served.run.spool_path(served.cell, name) for name in ("client", "gateway")]
    clients = by_rid(paths[0], read_rows(paths[0], ClientRow).rows)
    gateways = by_rid(paths[1], read_rows(paths[1], GatewayRow).rows)
    return [(clients[rid], gateways[rid]) for rid in clients]


def ttft_s(client: ClientRow) -> float:
    assert client.first_token_mono_ns is not None
    assert client.planned_mono_ns is not None
    return (client.first_token_mono_ns - client.planned_mono_ns) / 1e9


def residuals_s(rows: Rows) -> list[float]:
    found = []
    for client, gateway in rows:
        terms = budget_terms(client, gateway, "decode")
        left = residual_s(ttft_s(client), terms, "decode")
        assert left is not None
        found.append(left)
    return found


def test_known_times_are_read_back(plain: Rows) -> None:
    ttft = statistics.median(ttft_s(client) for client, _ in plain)
    # What the path adds is real time, 3 to 4 ms here, and not an error of reading (see below): more
    # than this is a fault of the path, however slow the machine.
    assert PREFILL_S <= ttft <= PREFILL_S + 0.02
    # What the harness adds is in the budget: without it the truth is left, within 2 ms at p50.
    added = statistics.median(
        sum(value or 0.0 for name, value in budget_terms(client, gateway, "decode").items())
        - (budget_terms(client, gateway, "decode")["prefill"] or 0.0)
        for client, gateway in plain
    )
    assert ttft - added == pytest.approx(PREFILL_S, abs=0.002)
    times = [token_times(client) for client, _ in plain]
    assert statistics.median(t.itl_p50_s or 0.0 for t in times) == pytest.approx(STEP_S, abs=0.002)
    assert statistics.median(t.tpot_s or 0.0 for t in times) == pytest.approx(STEP_S, abs=0.002)


def test_a_delayed_hop_shows_in_the_residual_and_nowhere_else(served: Live, plain: Rows) -> None:
    """Between client and gateway every byte takes 20 ms each way, which no process can time."""
    plain_s = statistics.median(residuals_s(plain))
    for name in ("client", "gateway"):
        os.truncate(served.run.spool_path(served.cell, name), 0)  # the gateway has it open
    with open_link(symmetric("slow hop", 1.25e9, 2 * HOP_S), "relay") as hop:
        address = hop.expose(hop.near, served.testbed.gateway_port)
        rows = replayed(served, address)
    # The connection is open before the planned send, so one way there and one way back is left.
    added_s = statistics.median(residuals_s(rows)) - plain_s
    assert added_s == pytest.approx(2 * HOP_S, abs=0.004)
    terms = [budget_terms(client, gateway, "decode") for client, gateway in rows]
    for name in ("gateway", "prefill_queue", "transfer", "decode_admission", "first_token"):
        assert statistics.median(t[name] or 0.0 for t in terms) < HOP_S / 2
