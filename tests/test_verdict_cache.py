"""The verdict on a run with a prefix cache: what moved is what was not resident, what was cached is
what both ends say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_run import BYTE_SCALE, PREFILL_S_PER_TOKEN, Built, Options, build, kv_bytes
from synthetic_run import kv_wire_bytes as wire_bytes

from harness.record.spool import ExpectedRow, GatewayRow
from harness.record.tables import compact, read_table, write_expected
from harness.verdict import Gates, judge

BLOCK_TOKENS = 512
GROWING = kv_bytes(2) - kv_bytes(1)
Change = Callable[[GatewayRow], GatewayRow]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Every second request of the first deployment found a block cached, and had it resident."""
    built = build(tmp_path, Options(num_requests=40))
    scenario = built.run.read_manifest().scenario | {"prefix_cache": {"enabled": True}}
    built.change_manifest(scenario=scenario)
    write_expected(
        built.run,
        (
            ExpectedRow(
                one.rid,
                kv_bytes(one.input_tokens),
                wire_bytes(one.input_tokens),
                {name: each * one.input_tokens for name, each in PREFILL_S_PER_TOKEN.items()},
                GROWING,
            )
            for one in built.requests
        ),
    )
    for deployment in built.options.deployments:
        rows = []
        for request, row in zip(built.requests, built.gateways(deployment), strict=True):
            hit = request.input_tokens > BLOCK_TOKENS and int(row.rid) % 2 == 0
            rows.append(with_hit(row, BLOCK_TOKENS if hit else 0, request.input_tokens))
        built.rewrite(deployment, "gateway", rows)
    return built


def with_hit(row: GatewayRow, tokens: int, input_tokens: int) -> GatewayRow:
    assert row.prefill is not None
    assert row.decode is not None
    wire = wire_bytes(input_tokens)
    if tokens:
        wire = round((kv_bytes(input_tokens) - tokens * GROWING) / BYTE_SCALE)
    return replace(
        row,
        prefill=replace(row.prefill, cached_tokens=tokens, kv_wire_bytes_sent=wire),
        decode=replace(
            row.decode, cached_tokens=tokens, resident_tokens=tokens, kv_wire_bytes_received=wire
        ),
    )


def change(built: Built, number: int, changed: Change) -> tuple[str, ...]:
    """The run's reasons with one row of the first deployment changed."""
    deployment = built.options.deployments[0]
    request, row = built.requests[number], built.gateways(deployment)[number]
    rows = []
    for one, each in zip(built.requests, built.gateways(deployment), strict=True):
        hit = one.input_tokens > BLOCK_TOKENS and int(each.rid) % 2 == 0
        rows.append(with_hit(each, BLOCK_TOKENS if hit else 0, one.input_tokens))
    rows[number] = changed(with_hit(row, BLOCK_TOKENS, request.input_tokens))
    built.rewrite(deployment, "gateway", rows)
    compact(built.run)
    return judge(built.run, Gates(min_completed=1)).reasons


def test_a_run_with_hits_is_supported(built: Built) -> None:
    compact(built.run)
    assert judge(built.run, Gates(min_completed=1)).reasons == ()
    table = read_table(built.run, "requests")
    hits = table[table["actual_cached_tokens"] > 0]
    assert 0 < len(hits) < len(table)
    # Times of whole prompts say nothing of a prefill that began behind a prefix.
    assert hits["profile_prefill_s"].isna().all()
    assert table[table["actual_cached_tokens"] == 0]["profile_prefill_s"].notna().all()
    assert (hits["kv_wire_bytes_expected"] == hits["kv_wire_bytes_received"]).all()


def test_resident_kv_that_moved_all_the_same_is_seen(built: Built) -> None:
    def moved(row: GatewayRow) -> GatewayRow:
        assert row.decode is not None
        return replace(row, decode=replace(row.decode, resident_tokens=0))

    (reason,) = change(built, 4, moved)
    assert "moved other KV bytes than the model's geometry (000004)" in reason


@pytest.mark.parametrize("said", [0, None])
def test_ends_that_disagree_about_the_prefix_are_seen(built: Built, said: int | None) -> None:
    def disagree(row: GatewayRow) -> GatewayRow:
        assert row.decode is not None
        return replace(row, decode=replace(row.decode, cached_tokens=said))

    (reason,) = change(built, 4, disagree)
    assert "disagree about their cached tokens (000004)" in reason
