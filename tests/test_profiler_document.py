"""What a profile says of raw samples: points, grids, batches, differences; and what GPUs did."""

from pathlib import Path

import pytest

from harness.architecture import load_architecture, paged_kv_bytes
from harness.profiler.document import (
    Findings,
    decode_section,
    interference,
    memory_batches,
    missing,
    overhead,
    prefill_points,
    slo_batches,
    step_quantiles,
)
from harness.profiler.gpu import Gpus, GpuSample, combined, elsewhere
from harness.profiler.kv import counter_faults, kv_rows, moved_by_samples
from harness.profiler.plan import Cell
from harness.profiler.provenance import model_hashes
from harness.profiler.samples import Sample
from harness.profiler.target import sglang_parts
from harness.surface.generate import MetaInfo
from netem.access import own_addresses
from netem.rtnetlink import Rtnetlink
from tests.worker_setup import ARCHITECTURE, ROOT


def rows(cell: Cell, *values_s: float, **more: object) -> list[Sample]:
    given: dict[str, object] = {"outside_s": None, "inside_s": None} | more
    return [
        Sample(
            cell.kind, cell.new_tokens, cell.cached_tokens, cell.batch, cell.context_tokens,
            1, visit, True, None, value, **given,  # type: ignore[arg-type]  # keys of its own
        )
        for visit, value in enumerate(values_s)
    ]  # fmt: skip


def findings(*samples: list[Sample]) -> Findings:
    flat = [one for part in samples for one in part]
    cells = tuple(dict.fromkeys(one.cell for one in flat))
    return Findings.of(cells, flat, 0.02, "test")


def prefill(new: int, cached: int = 0) -> Cell:
    return Cell("prefill", new, cached)


def decode(batch: int, context: int) -> Cell:
    return Cell("decode", batch=batch, context_tokens=context)


def test_a_curve_that_noise_made_fall_is_evened_out_and_says_so() -> None:
    found = findings(
        rows(prefill(128), 1.1, 1.1), rows(prefill(256), 1.0, 1.0), rows(prefill(512), 2.0, 2.0)
    )
    points = prefill_points(found)
    assert [p["prefill_s"] for p in points] == pytest.approx([1.05, 1.05, 2.0])
    assert "evened out" in points[0]["source"]
    assert points[2]["source"] == "test"
    assert points[0]["interval_s"] == pytest.approx([1.1, 1.1])


def test_a_cached_length_with_one_point_is_no_curve() -> None:
    found = findings(
        rows(prefill(128), 1.0), rows(prefill(256), 2.0), rows(prefill(128, 4096), 1.5)
    )
    assert {p["cached_tokens"] for p in prefill_points(found)} == {0}


def test_the_largest_complete_grid_is_kept() -> None:
    cells = [decode(b, c) for b in (1, 4, 8) for c in (128, 512)]
    found = findings(*(rows(cell, 0.02, 0.021) for cell in cells if cell != decode(8, 512)))
    section = decode_section(found, None)
    assert section is not None
    assert {(p["batch"], p["context_tokens"]) for p in section["points"]} == {
        (b, c) for b in (1, 4) for c in (128, 512)
    }
    assert section["max_batch"] == 4
    assert decode_section(findings(rows(decode(1, 128), 0.02)), None) is None
    limited = decode_section(found, 3)
    assert limited is not None
    assert limited["max_batch"] == 3


def test_the_largest_batch_within_the_slo_lies_between_two_measured_ones() -> None:
    found = findings(
        *(rows(decode(b, 128), s) for b, s in ((1, 0.01), (4, 0.02), (8, 0.04))),
        *(rows(decode(b, 512), s) for b, s in ((1, 0.03), (4, 0.05), (8, 0.07))),
    )
    assert [(r.context_tokens, r.max_batch) for r in slo_batches(found, 0.025)] == [
        (128, 5),
        (512, None),
    ]
    assert slo_batches(found, 0.5)[0].max_batch == 8


def test_quantiles_are_of_all_gaps() -> None:
    cell = decode(1, 128)
    found = findings(rows(cell, 0.02, 0.02, steps_s=tuple(n / 1000 for n in range(101))))
    quantiles = step_quantiles(found.samples, cell)
    assert quantiles is not None
    assert (quantiles.p5, quantiles.p50, quantiles.p99) == pytest.approx((0.005, 0.05, 0.099))


def test_outside_less_inside_is_the_sum_of_its_parts() -> None:
    parts = {"prefill": 1.0, "queue": 0.02, "http": 0.03}
    one = rows(prefill(128), 1.0, outside_s=1.05, inside_s=1.0, parts_s=parts)
    (row,) = overhead(findings(one))
    assert row.outside_s - row.inside_s == pytest.approx(sum(row.parts_s.values()))
    assert set(row.parts_s) == {"queue", "http"}
    assert overhead(findings(rows(prefill(128), 1.0, outside_s=1.05))) == []


def test_interference_is_against_the_same_point_without_traffic() -> None:
    quiet, beside = decode(4, 128), Cell("decode_under_ingress", 1024, 0, 4, 128)
    found = findings(rows(quiet, 0.02, 0.02), rows(beside, 0.022, 0.022, egress_bytes_per_s=1e9))
    (row,) = interference(found)
    assert row.ratio == pytest.approx(1.1)
    assert row.kv_bytes_per_s == 1e9
    assert interference(findings(rows(beside, 0.022, egress_bytes_per_s=1e9))) == []


def test_what_is_missing_has_its_reason() -> None:
    cells = (prefill(128), prefill(256), prefill(512))
    found = findings(rows(cells[0], *[1.0, 1.001] * 6), rows(cells[1], 1.0, 2.0))
    reasons = {r.point: r.reason for r in missing(cells, found, {cells[2]: "refused"})}
    assert "prefill 128" not in reasons
    assert "after 2 of 12 visits" in reasons["prefill 256"]
    assert reasons["prefill 512"] == "refused"


def test_moved_bytes_are_held_against_the_geometry() -> None:
    right = sum(ARCHITECTURE.layer_kv_bytes(1024))
    moved, faults = moved_by_samples(
        rows(prefill(1024), 1.0, kv_wire_bytes=right), ARCHITECTURE, 1.0
    )
    assert (moved, faults) == ({1024: right}, ())
    _, faults = moved_by_samples(
        rows(prefill(1024), 1.0, kv_wire_bytes=right - 1), ARCHITECTURE, 1.0
    )
    assert "instead of" in faults[0]
    tiny = load_architecture(ROOT / "profiles/tiny/sglang-tiny-dense.json")
    (row,) = kv_rows(tiny, 64, {100: 0.5}, {100: 65_536.0})
    assert counter_faults(tiny, 64, {100: 65_536.0}, 1) == []
    assert row.geometry_bytes == paged_kv_bytes(tiny, 100, 64) == row.moved_bytes
    assert row.phi_bytes_per_s == 131_072.0


def test_phi_is_by_geometry_where_one_rank_of_several_counted() -> None:
    tiny = load_architecture(ROOT / "profiles/tiny/sglang-tiny-dense.json")
    (row,) = kv_rows(tiny, 64, {100: 0.5}, {100: 32_768.0})
    assert (row.moved_bytes, row.phi_bytes_per_s) == (32_768.0, 131_072.0)
    (note,) = counter_faults(tiny, 64, {100: 32_768.0}, 2)
    assert "counted 32,768 bytes, the geometry has 65,536" in note
    assert "tp 2: by default one rank" in note
    assert "the architecture of the model" in counter_faults(tiny, 64, {100: 1.0}, 1)[0]


def test_the_largest_batch_by_memory_is_of_each_context() -> None:
    cells = (prefill(128), decode(1, 512), decode(4, 512), decode(1, 3000))
    found = memory_batches(cells, 10_000)
    assert [(r.context_tokens, r.max_batch) for r in found] == [(512, 19), (3000, 3)]
    assert memory_batches(cells, None) == []


def test_sglangs_times_explain_the_difference() -> None:
    meta = MetaInfo(
        request_received_ts=100.0,
        forward_entry_time=100.010,
        prefill_finished_time=100.110,
        request_finished_ts=100.115,
    )
    parts = sglang_parts(meta, 0.120)
    assert parts["prefill"] == pytest.approx(0.1)
    assert sum(parts.values()) == pytest.approx(0.120)
    assert parts["http"] == pytest.approx(0.005)
    assert sglang_parts(MetaInfo(), 0.1) == {}


def test_a_model_is_hashed_where_its_files_are(tmp_path: Path) -> None:
    assert model_hashes(None).absent == "the engine does not say which files it serves"
    assert "no folder of a model" in str(model_hashes(str(tmp_path)).absent)
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    found = model_hashes(str(tmp_path))
    assert (found.vocab_size, found.weights_sha256, found.absent) == (512, None, None)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    again = model_hashes(str(tmp_path))
    assert again.weights_sha256 is not None
    assert again.config_sha256 == found.config_sha256


def test_gpu_samples_keep_the_worst() -> None:
    one = GpuSample(1, 1.0e9, 2.0e9, 300.0, 50.0, 10, 0x4)
    two = GpuSample(2, 2.0e9, 2.0e9, 500.0, 70.0, 30, 0x20)
    assert combined([one, two]) == GpuSample(2, 1.5e9, 2.0e9, 400.0, 70.0, 30, 0x24)
    assert combined([]) is None
    with Gpus(wanted=False) as gpus:
        assert gpus.absent == "the engine is emulated"
        assert gpus.between(0, 10**18) is None


def test_gpus_of_this_machine_are_not_those_of_an_engine_elsewhere() -> None:
    assert elsewhere(["http://127.0.0.1:30000", "http://[::1]:30000"]) is None
    with Rtnetlink() as route:
        own = [f"http://{one}:1" for one in own_addresses(route) if one.version == 4]
    assert elsewhere(own) is None
    there = "http://192.0.2.1:30000"  # an address that nobody has (RFC 5737)
    why = elsewhere([own[0], there])
    assert why == "the engine is on another host (192.0.2.1)"
    with Gpus(wanted=False, unwanted_because=why) as gpus:
        assert gpus.absent == why


@pytest.mark.gpu
def test_a_gpu_is_sampled_while_the_profiler_runs() -> None:
    pytest.importorskip("pynvml")
    import time

    with Gpus() as gpus:
        start_ns = time.monotonic_ns()
        deadline_s = time.monotonic() + 30
        while gpus.between(start_ns, time.monotonic_ns()) is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        found = gpus.between(start_ns, time.monotonic_ns())
    assert found is not None
    assert found.sm_clock_hz > 1e8
    assert gpus.names
    assert gpus.driver
