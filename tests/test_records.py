"""Spools joined into tables: sums, scales, crashes and damage, against runs of known numbers."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import BYTE_SCALE, HOPS_NS, TIME_SCALE, Built, Options, build, kv_bytes

from harness.core import BUDGET_TERMS, PrfaasError, ScenarioError
from harness.record.budget import budget_terms, residual_s, token_times
from harness.record.run_directory import RunDirectory
from harness.record.spool import (
    ClientRow,
    DecodeSpan,
    GatewayRow,
    PrefillSpan,
    SpoolError,
    WorkerRow,
    read_rows,
)
from harness.record.tables import (
    COLUMNS,
    TABLES_VERSION,
    compact,
    read_notes,
    read_table,
    schema,
)
from harness.summary import floats

SMALL = Options(num_requests=40)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path, SMALL)


def rows_of(built: Built, deployment: str) -> Any:
    compact(built.run)
    requests = read_table(built.run, "requests")
    return requests[requests["deployment"] == deployment].reset_index(drop=True)


def test_ttft_terms_and_residual_are_those_of_the_run(built: Built) -> None:
    rows = rows_of(built, "prfaas_pd")
    served = built.served[built.cell("prfaas_pd")]
    np.testing.assert_allclose(rows["ttft_s"], [each.ttft_s for each in served], rtol=1e-9)
    np.testing.assert_allclose(
        rows["prefill_queue_s"], [each.queue_ns / 1e9 * TIME_SCALE for each in served], atol=1e-9
    )
    known = {"send_lag": 0.01, "gateway": 0.005, "transfer": 0.03, "decode_admission": 0.02,
             "first_token": 0.0025, "return": 0.0025}  # fmt: skip
    for term, value in known.items():
        np.testing.assert_allclose(rows[f"{term}_s"], value, atol=1e-9)
    np.testing.assert_allclose(rows["residual_s"], HOPS_NS / 1e9 * TIME_SCALE, atol=1e-9)
    total = sum(floats(rows, f"{term}_s") for term in BUDGET_TERMS) + floats(rows, "residual_s")
    np.testing.assert_allclose(total, rows["ttft_s"], rtol=1e-9)


def test_a_delayed_hop_shows_in_the_residual_alone(tmp_path: Path) -> None:
    slow = build(tmp_path, replace(SMALL, hops_ns=HOPS_NS + 7_000_000))
    rows = rows_of(slow, "homogeneous_pd")
    np.testing.assert_allclose(rows["residual_wall_s"], 0.0075, atol=1e-9)
    np.testing.assert_allclose(rows["gateway_s"], 0.005, atol=1e-9)


def test_bytes_are_scaled_back_up_and_compared_with_geometry(built: Built) -> None:
    rows = rows_of(built, "prfaas_pd")
    geometry = [kv_bytes(request.input_tokens) for request in built.requests]
    assert rows["kv_bytes_expected"].tolist() == geometry
    assert (rows["kv_bytes"] - rows["kv_bytes_expected"]).abs().max() <= BYTE_SCALE / 2
    assert (rows["kv_wire_bytes_received"] == rows["kv_wire_bytes_expected"]).all()
    crossing = rows["input_tokens"] > 19_400
    assert (rows["crosses"] == crossing).all()
    assert set(rows["prefill_hardware"][crossing]) == {"h200"}
    assert set(rows["prefill_hardware"][~crossing]) == {"h20"}
    np.testing.assert_allclose(rows["prefill_s"], rows["profile_prefill_s"], atol=2e-8)


def test_token_times_of_coalesced_chunks(built: Built) -> None:
    rows = rows_of(built, "prfaas_pd")
    np.testing.assert_allclose(rows["tpot_s"], 0.025, atol=1e-9)
    np.testing.assert_allclose(rows["itl_p50_s"], 0.025, atol=1e-9)
    np.testing.assert_allclose(rows["chunk_gap_max_s"], 7 * 0.025, atol=1e-9)
    np.testing.assert_allclose(rows["time_to_second_token_s"] - rows["ttft_s"], 0.025, atol=1e-9)
    np.testing.assert_allclose(rows["e2e_s"] - rows["ttft_s"], 8 * 0.025, atol=1e-9)


def test_one_token_has_no_tpot(tmp_path: Path) -> None:
    rows = rows_of(build(tmp_path, replace(SMALL, output_tokens=1)), "prfaas_pd")
    for column in ("tpot_s", "itl_p50_s", "itl_max_s", "time_to_second_token_s"):
        assert rows[column].isna().all()
    assert rows["ttft_s"].notna().all()


def test_every_table_has_its_schema_and_version(built: Built) -> None:
    compact(built.run)
    for name in COLUMNS:
        found = pq.read_schema(built.run.table_path(name))
        assert found.equals(schema(name))
        assert found.metadata[b"prfaas_schema_version"] == b"%d" % TABLES_VERSION
        assert found.metadata[b"prfaas_table"] == name.encode()
    simulated = read_table(built.run, "simulated")
    assert len(simulated) == 3 * 40
    decisions = read_table(built.run, "decisions")
    assert set(decisions["action"]) == {"dispatch"}
    engines = read_table(built.run, "engines")
    np.testing.assert_allclose(engines["busy_s"], 0.5)
    np.testing.assert_allclose(engines["t_s"], 1.0)


def test_link_rate_is_in_scenario_units_and_conserves_bytes(built: Built) -> None:
    rows = rows_of(built, "naive_heterogeneous")
    link = read_table(built.run, "link")
    here = link[(link["deployment"] == "naive_heterogeneous") & (link["kind"] == "link")]
    far = here[here["direction"] == "far_to_near"].sort_values("t_s")
    moved = (far["rate_bytes_per_s"] * far["t_s"].diff()).sum()
    assert moved == pytest.approx(rows["kv_bytes"].sum(), rel=1e-9)
    tcp = link[link["kind"] == "tcp"]
    np.testing.assert_allclose(tcp["rtt_s"], 0.01)
    assert set(tcp["connection"]) == {3}
    assert tcp["rate_bytes_per_s"].isna().all()


def test_a_truncated_last_line_is_counted_and_its_request_is_lost(built: Built) -> None:
    path = built.run.spool_path(built.cell("prfaas_pd"), "client")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    rows = rows_of(built, "prfaas_pd")
    assert read_notes(built.run)["truncated"] == {str(path.relative_to(built.run.path)): 1}
    assert rows["outcome"].value_counts().to_dict() == {"completed": 39, "failed": 1}
    last = rows.iloc[-1]
    assert (last["outcome"], last["failure_phase"]) == ("failed", "lost")
    assert np.isnan(last["ttft_s"])
    assert last["prefill_s"] > 0  # what the gateway knew is kept


@pytest.mark.parametrize("damage", [b'{"rid": 5}\n', b"not json\n", b"\n", b"\xff\xfe\n"])
def test_any_other_bad_line_names_file_and_line(built: Built, damage: bytes) -> None:
    path = built.run.spool_path(built.cell("prfaas_pd"), "gateway")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], damage, *lines[4:]]))
    with pytest.raises(SpoolError, match=r"gateway\.jsonl:5: "):
        compact(built.run)


def test_a_last_line_that_lost_only_its_newline_is_read(built: Built) -> None:
    path = built.run.spool_path(built.cell("prfaas_pd"), "client")
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert (rows_of(built, "prfaas_pd")["outcome"] == "completed").all()
    assert read_notes(built.run)["truncated"] == {}


def test_without_a_client_spool_requests_are_lost_or_unsent(built: Built) -> None:
    cell = built.cell("prfaas_pd")
    built.run.spool_path(cell, "client").unlink()
    built.rewrite("prfaas_pd", "gateway", built.gateways("prfaas_pd")[:15])
    rows = rows_of(built, "prfaas_pd")
    assert rows["outcome"].value_counts().to_dict() == {"unsent": 25, "failed": 15}
    assert read_notes(built.run)["missing"] == [f"spool/{cell.name}/client.jsonl"]


def test_a_missing_gateway_row_leaves_nulls_not_zeros(built: Built) -> None:
    built.rewrite("prfaas_pd", "gateway", built.gateways("prfaas_pd")[1:])
    first = rows_of(built, "prfaas_pd").iloc[0]
    assert first["outcome"] == "completed"
    assert first["ttft_s"] > 0
    for column in ("gateway_s", "prefill_s", "residual_s", "kv_bytes", "profile_prefill_s"):
        assert np.isnan(first[column])
    assert first["kv_bytes_expected"] > 0


def test_a_workers_own_row_fills_what_the_gateway_did_not_learn(built: Built) -> None:
    gateways = built.gateways("prfaas_pd")
    whole = rows_of(built, "prfaas_pd").iloc[0]
    first = gateways[0]
    assert first.prefill_instance is not None
    spans = [WorkerRow(first.rid, first.prefill_instance, prefill=first.prefill)]
    spans_pd = [WorkerRow(first.rid, "pd-d0", decode=first.decode)]
    bare = replace(first, prefill=None, decode=None, prefill_instance=None, decode_instance=None)
    built.rewrite("prfaas_pd", "gateway", [bare, *gateways[1:]])
    built.rewrite("prfaas_pd", "worker-prfaas", spans)
    built.rewrite("prfaas_pd", "worker-pd", spans_pd)
    filled = rows_of(built, "prfaas_pd").iloc[0]
    pd.testing.assert_series_equal(filled, whole)


def test_a_cell_that_never_began_is_all_unsent(built: Built) -> None:
    manifest = built.run.read_manifest()
    cells = tuple(
        replace(cell, start_mono_ns=None) if cell.deployment == "naive_heterogeneous" else cell
        for cell in manifest.deployments
    )
    built.change_manifest(deployments=cells, status="interrupted")
    for name in ("client", "gateway", "link", "engines", "decisions"):
        built.run.spool_path(built.cell("naive_heterogeneous"), name).unlink()
    rows = rows_of(built, "naive_heterogeneous")
    assert len(rows) == 40
    assert (rows["outcome"] == "unsent").all()
    assert read_notes(built.run)["missing"] == []


def test_a_request_outside_the_schedule_or_twice_is_refused(built: Built) -> None:
    clients = built.clients("prfaas_pd")
    built.rewrite("prfaas_pd", "client", [*clients, replace(clients[0], rid="999999")])
    with pytest.raises(SpoolError, match="999999 is not in the schedule"):
        compact(built.run)
    built.rewrite("prfaas_pd", "client", [*clients, clients[0]])
    with pytest.raises(SpoolError, match=r"client\.jsonl:41: request 000000 has a second row"):
        compact(built.run)


def test_a_reserved_slot_is_no_wait_and_no_negative_one() -> None:
    decode = DecodeSpan(0, 900, 100, 950, None, 1, 1, 0, 0.0)
    row = GatewayRow("a", 0, 10, 960, 970, prefill=PrefillSpan(20, 120, 800, 0.0, 0.0, 900, 1),
                     decode=decode)  # fmt: skip
    terms = budget_terms(None, row, "decode")
    assert terms["decode_admission"] == 0.0
    assert terms["first_token"] == pytest.approx(50e-9)


def test_a_forwarded_first_token_has_no_transfer_on_its_path(built: Built) -> None:
    scenario = {**built.run.read_manifest().scenario, "scheduling": {"ttft_source": "prefill"}}
    built.change_manifest(scenario=scenario)
    rows = rows_of(built, "prfaas_pd")
    assert rows["transfer_s"].isna().all()
    expected = rows["ttft_s"] - rows[[f"{term}_s" for term in BUDGET_TERMS]].sum(axis=1)
    np.testing.assert_allclose(rows["residual_s"], expected, atol=1e-9)


def test_residual_needs_every_term() -> None:
    terms: dict[str, float | None] = dict.fromkeys(BUDGET_TERMS, 1.0)
    assert residual_s(8.5, terms, "decode") == pytest.approx(0.5)
    assert residual_s(8.5, {**terms, "gateway": None}, "decode") is None
    assert residual_s(None, terms, "decode") is None


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 5)), min_size=1, max_size=40),
)
def test_token_times_agree_with_a_token_by_token_count(chunks: list[tuple[int, int]]) -> None:
    at_ns = tuple(np.cumsum([gap for gap, _ in chunks]).tolist())
    tokens = tuple(count for _, count in chunks)
    found = token_times(ClientRow("a", 0, "completed", 0, chunk_mono_ns=at_ns, chunk_tokens=tokens))
    stamps = [at for at, count in zip(at_ns, tokens, strict=True) for _ in range(count)]
    if len(stamps) < 2:
        assert found.tpot_s is None
        assert found.second_token_mono_ns is None
        return
    assert found.second_token_mono_ns == stamps[1]
    assert found.tpot_s == pytest.approx((stamps[-1] - stamps[0]) / 1e9 / (len(stamps) - 1))
    assert found.itl_max_s is not None
    assert found.itl_p50_s is not None
    assert 0 <= found.itl_p50_s <= found.itl_max_s <= (found.chunk_gap_max_s or 0.0) + 1e-12


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(1, 60))
def test_a_spool_cut_anywhere_keeps_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, count: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    rows = [WorkerRow(f"{number:06d}", "pd-p0") for number in range(count)]
    content = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    kept = content[: max(0, len(content) - cut)]
    path.write_bytes(kept)
    spool = read_rows(path, WorkerRow)
    whole = kept.count(b"\n")
    assert spool.rows[:whole] == tuple(rows[:whole])
    assert len(spool.rows) + spool.truncated == whole + (not kept.endswith(b"\n") and bool(kept))


class TestRunDirectory:
    def test_names_are_safe_and_do_not_collide(self, tmp_path: Path) -> None:
        now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        first = RunDirectory.create(tmp_path, "../evil name/x", now)
        second = RunDirectory.create(tmp_path, "../evil name/x", now)
        assert first.path.parent == second.path.parent == tmp_path
        assert first.path.name == "20260102T030405Z-evil-name-x"
        assert second.path.name == "20260102T030405Z-evil-name-x-2"

    def test_a_root_that_is_a_file_is_the_users_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ScenarioError, match="run directory"):
            RunDirectory.create(tmp_path / "file", "x", datetime.now(UTC))

    def test_the_manifest_comes_back_as_written(self, built: Built) -> None:
        manifest = built.run.read_manifest()
        built.run.write_manifest(manifest)
        assert built.run.read_manifest() == manifest
        assert list(built.run.path.glob(".*")) == []

    def test_cells_record_when_they_began_and_ended(self, built: Built) -> None:
        manifest = built.run.read_manifest().started("prfaas_pd", 0, 77)
        assert manifest.ended("prfaas_pd", 0, 99).deployments[0].end_mono_ns == 99
        assert manifest.deployments[0].start_mono_ns == 77

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ('"status":', '"statsu":', "unknown key 'statsu'; the nearest valid one is 'status'"),
            ('"schema_version": 1', '"schema_version": 9', "schema_version 9"),
            ('"finished"', '"done"', "done"),
            ("{", "[", "not JSON"),
        ],
    )
    def test_a_wrong_manifest_names_file_and_key(
        self, built: Built, before: str, after: str, message: str
    ) -> None:
        path = built.run.manifest_path
        path.write_text(path.read_text().replace(before, after, 1))
        with pytest.raises(ScenarioError, match=message) as caught:
            built.run.read_manifest()
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"time_scale": 0}, "'time_scale' must be positive"),
            ({"scenario": {"slo": 5}}, "'scenario.slo' must be an object"),
            ({"scenario": {"slo": None}}, "'scenario.slo' must be an object"),
            ({"scenario": {"slo": {"tpot_s": "fast"}}}, "'scenario.slo.tpot_s' must be a number"),
            ({"scenario": {"workload": {"rate_scale": 0}}}, "rate_scale' must be positive"),
            ({"link_check": {"rtt_p50_s": []}}, "'link_check.rtt_p50_s' must be a number"),
            ({"instances": {}}, "'instances' lacks the deployment 'prfaas_pd'"),
            ({"deployments": [{"deployment": "../x", "repeat": 0}]}, "not the name of a"),
            ({"deployments": [{"deployment": "prfaas_pd", "repeat": 0}] * 2}, "repeat twice"),
        ],
    )
    def test_what_no_run_writes_into_a_manifest(
        self, built: Built, change: dict[str, Any], message: str
    ) -> None:
        path = built.run.manifest_path
        document = msgspec.json.decode(path.read_bytes()) | change
        path.write_bytes(msgspec.json.encode(document))
        with pytest.raises(ScenarioError, match=message) as caught:
            built.run.read_manifest()
        assert str(path) in str(caught.value)

    def test_a_directory_that_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(ScenarioError, match="is this a run directory"):
            RunDirectory(tmp_path).read_manifest()

    def test_a_damaged_schedule_names_its_line(self, built: Built) -> None:
        with built.run.schedule_path.open("ab") as file:
            file.write(b'{"rid": "x"}\n')
        with pytest.raises(ScenarioError, match=r"schedule\.jsonl:41"):
            built.run.read_schedule()

    def test_a_table_of_another_version_is_refused(self, built: Built) -> None:
        compact(built.run)
        built.run.table_path("link").rename(built.run.table_path("requests"))
        with pytest.raises(PrfaasError, match="is not a requests table"):
            read_table(built.run, "requests")
