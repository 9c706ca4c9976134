"""Each gate of the verdict fires on the fault it is for, and on nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import (
    PREFILL_S_PER_TOKEN,
    SHAPES,
    TIME_SCALE,
    Built,
    Options,
    build,
    cluster_of,
    kv_bytes,
    read_json,
)

from harness.record.run_directory import DeploymentModel
from harness.record.spool import SimulatedRow
from harness.record.tables import compact, write_simulated
from harness.verdict import Gates, Verdict, judge

ISSUE_KEYS = {
    "num_planned", "num_completed", "num_failed", "num_unsent", "ttft_mean_s", "ttft_p50_s",
    "ttft_p90_s", "ttft_p99_s", "modelled_ttft_mean_s", "modelled_ttft_p90_s",
    "throughput_req_per_s", "kv_bytes_sent", "kv_bytes_cross", "kv_bytes_expected",
    "budget_residual_p95_s", "prefill_utilisation", "send_lag_p99_wall_s",
}  # fmt: skip
FEW = Gates(min_completed=1)
SMALL = Options(num_requests=40)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path, SMALL)


def verdict_of(built: Built, gates: Gates = FEW) -> Verdict:
    compact(built.run)
    verdict = judge(built.run, gates)
    document = read_json(built.run.verdict_path)
    assert document["verdict"] == verdict.verdict
    assert document["reasons"] == list(verdict.reasons)
    return verdict


def the_reason(built: Built, gates: Gates = FEW) -> str:
    """The only reason of the run."""
    verdict = verdict_of(built, gates)
    assert verdict.verdict == "not_supported"
    assert verdict.exit_status == 1
    assert len(verdict.reasons) == 1, verdict.reasons
    return verdict.reasons[0]


def test_a_sound_run_is_supported_and_its_figures_are_known(tmp_path: Path) -> None:
    built = build(tmp_path)
    verdict = verdict_of(built, Gates())
    assert verdict.verdict == "supported"
    assert verdict.reasons == ()
    assert verdict.exit_status == 0
    document = read_json(built.run.verdict_path)
    assert {"run_dir", "verdict", "link_backend", "time_scale", "byte_scale"} <= set(document)
    last_s = built.requests[-1].planned_s
    for name, summary in document["deployments"].items():
        assert set(summary) >= ISSUE_KEYS
        served = built.served[built.cell(name)]
        ttft_s = sorted(each.ttft_s for each in served)
        tokens = [request.input_tokens for request in built.requests]
        crossing = [request for request in built.requests if cluster_of(name, request) == "prfaas"]
        assert summary["num_planned"] == summary["num_completed"] == 320
        assert summary["ttft_mean_s"] == pytest.approx(np.mean(ttft_s))
        assert summary["ttft_p50_s"] == pytest.approx(ttft_s[159])
        assert summary["ttft_p90_s"] == pytest.approx(ttft_s[287])
        assert summary["ttft_p99_s"] is None
        assert "effective samples" in summary["ttft_p99_reason"]
        assert summary["ttft_mean_interval"]["low"] < summary["ttft_mean_s"]
        assert summary["ttft_mean_interval"]["high"] > summary["ttft_mean_s"]
        assert summary["modelled_ttft_mean_s"] == pytest.approx(np.mean(ttft_s) - 0.025)
        assert summary["kv_bytes_expected"] == sum(map(kv_bytes, tokens))
        assert summary["kv_bytes_sent"] == pytest.approx(sum(map(kv_bytes, tokens)), rel=1e-6)
        assert summary["kv_bytes_cross"] == pytest.approx(
            sum(kv_bytes(request.input_tokens) for request in crossing), rel=1e-6
        )
        assert summary["budget_residual_p95_s"] == pytest.approx(0.005)
        assert summary["send_lag_p99_wall_s"] == pytest.approx(0.001)
        assert summary["offload_fraction"] == len(crossing) / 320
        ends_s = [(each.client.end_mono_ns or 0) / 1e9 for each in served]
        whole_s = (max(ends_s) - (built.cell(name).start_mono_ns or 0) / 1e9) * TIME_SCALE
        assert summary["throughput_req_per_s"] == pytest.approx(320 / whole_s)
        assert summary["arrival_rate_req_per_s"] == pytest.approx(319 / last_s)
        assert summary["throughput_steady_req_per_s"] == pytest.approx(319 / last_s, rel=0.1)
        assert summary["budget_residual_over_bound"] == 0.0
        # Every TPOT is the SLO's 25 ms: resolution does not turn them into misses.
        assert summary["goodput_req_per_s"] == summary["throughput_req_per_s"]
        work_s = sum(
            request.input_tokens * PREFILL_S_PER_TOKEN[{"prfaas": "h200", "pd": "h20"}[cluster]]
            for request in built.requests
            for cluster in [cluster_of(name, request)]
        )
        servers = sum(SHAPES[name].values())
        # Work after the last planned send is outside the window, so a little is missing.
        assert 0.95 * work_s / (servers * last_s) < summary["prefill_utilisation"]
        assert summary["prefill_utilisation"] <= work_s / (servers * last_s)
    ratio = document["ratios"]["homogeneous_pd"]
    expected = (
        document["deployments"]["homogeneous_pd"]["ttft_mean_s"]
        / document["deployments"]["prfaas_pd"]["ttft_mean_s"]
    )
    assert ratio["ttft_mean_ratio"] == pytest.approx(expected)
    assert ratio["interval"]["low"] < expected < ratio["interval"]["high"]


def test_repeats_of_the_same_arrivals_add_no_effective_samples(tmp_path: Path) -> None:
    once = verdict_of(build(tmp_path / "a", SMALL)).deployments["prfaas_pd"]
    twice = verdict_of(build(tmp_path / "b", replace(SMALL, repeats=2))).deployments["prfaas_pd"]
    assert twice["num_planned"] == twice["num_completed"] == 80
    assert twice["effective_samples"] == pytest.approx(once["effective_samples"])
    assert twice["ttft_mean_s"] == pytest.approx(once["ttft_mean_s"])
    assert twice["prefill_utilisation"] == pytest.approx(once["prefill_utilisation"])
    assert twice["throughput_req_per_s"] == pytest.approx(once["throughput_req_per_s"])


def test_too_few_requests_for_a_mean(built: Built) -> None:
    verdict = verdict_of(built, Gates())
    assert len(verdict.reasons) == 3
    assert all(
        "40 distinct requests completed; a claim on means takes 300" in r for r in verdict.reasons
    )


def test_repeats_of_the_same_arrivals_are_not_more_requests(tmp_path: Path) -> None:
    built = build(tmp_path, replace(SMALL, repeats=2, deployments=("prfaas_pd",)))
    assert verdict_of(built, Gates(min_completed=40)).reasons == ()
    assert "40 distinct requests completed" in the_reason(built, Gates(min_completed=41))


def test_failures_count_as_infinite_and_name_their_phase(built: Built) -> None:
    clients = built.clients("prfaas_pd")
    failed = [
        replace(row, outcome="failed", failure_phase="stream", failure_message="reset by peer")
        for row in clients[:5]
    ]
    built.rewrite("prfaas_pd", "client", [*failed, *clients[5:]])
    reason = the_reason(built)
    assert "5 of 40 requests failed (5 in stream)" in reason
    assert "the first, 000000: reset by peer" in reason
    summary = verdict_of(built).deployments["prfaas_pd"]
    served = sorted(each.ttft_s for each in built.served[built.cell("prfaas_pd")][5:])
    assert summary["ttft_p50_s"] == pytest.approx(served[19])  # rank 20 of all 40
    assert summary["ttft_p50_success_s"] == pytest.approx(served[17])  # rank 18 of 35
    assert summary["ttft_p90_s"] is None
    assert summary["ttft_p90_reason"] == "5 of 40 requests were not completed"
    assert summary["ttft_mean_interval"]["low"] is None


def test_all_failed_has_no_numbers_and_no_crash(built: Built) -> None:
    rows = [
        replace(
            row, outcome="failed", failure_phase="connect", first_token_mono_ns=None,
            chunk_mono_ns=(), chunk_tokens=(), completion_tokens=None, prompt_tokens=None,
        )
        for row in built.clients("prfaas_pd")
    ]  # fmt: skip
    built.rewrite("prfaas_pd", "client", rows)
    built.rewrite("prfaas_pd", "gateway", [])
    verdict = verdict_of(built)
    summary = verdict.deployments["prfaas_pd"]
    assert summary["num_failed"] == 40
    for key in ("ttft_mean_s", "ttft_p50_s", "modelled_ttft_mean_s", "throughput_req_per_s"):
        assert summary[key] is None
    assert summary["kv_bytes_sent"] == 0
    assert any("40 in connect" in reason for reason in verdict.reasons)


def test_unsent_requests(built: Built) -> None:
    clients = built.clients("prfaas_pd")
    built.rewrite("prfaas_pd", "client", [*clients[:-1], replace(clients[-1], outcome="unsent")])
    assert the_reason(built) == "prfaas_pd: 1 of 40 requests were never sent"


def test_late_load(tmp_path: Path) -> None:
    verdict = verdict_of(build(tmp_path, replace(SMALL, lag_ns=11_000_000)))
    assert len(verdict.reasons) == 3
    assert "send lag p99 11.0 ms of wall time, bound 10 ms" in verdict.reasons[0]
    assert any("send lag takes" in note for note in verdict.notes)


def test_planned_times_other_than_the_schedule(built: Built) -> None:
    rows = [
        replace(row, planned_mono_ns=(row.planned_mono_ns or 0) + 2_000_000)
        for row in built.clients("prfaas_pd")
    ]
    built.rewrite("prfaas_pd", "client", rows)
    assert "planned times differ from the schedule by up to 2.0 ms" in the_reason(built)


def test_residual_beyond_its_bound(tmp_path: Path) -> None:
    verdict = verdict_of(build(tmp_path, replace(SMALL, hops_ns=12_000_000)))
    assert len(verdict.reasons) == 3
    assert "unexplained in" in verdict.reasons[0]
    # A hop within 2 ms is within the bound whatever the TTFT.
    assert verdict_of(build(tmp_path, replace(SMALL, hops_ns=1_900_000))).reasons == ()


def test_residual_bound_allows_one_in_twenty(built: Built) -> None:
    clients = built.clients("prfaas_pd")
    for count, reasons in ((2, 0), (3, 1)):
        late = [
            replace(row, planned_mono_ns=(row.planned_mono_ns or 0) - 900_000_000)
            for row in clients
        ][:count]
        # Planned 0.9 s earlier than sent minus its lag: only the residual and the lag can tell.
        late = [replace(new, sent_mono_ns=(new.planned_mono_ns or 0) + 1_000_000) for new in late]
        built.rewrite("prfaas_pd", "client", [*late, *clients[count:]])
        share = verdict_of(built).deployments["prfaas_pd"]["budget_residual_over_bound"]
        assert share == pytest.approx(count / 40)
        found = [r for r in verdict_of(built).reasons if "unexplained" in r]
        assert len(found) == reasons


def test_an_incomplete_budget_names_the_request(built: Built) -> None:
    gateways = built.gateways("prfaas_pd")
    first = replace(gateways[0], dispatched_mono_ns=None)
    built.rewrite("prfaas_pd", "gateway", [first, *gateways[1:]])
    assert "1 completed requests have an incomplete TTFT budget (000000)" in the_reason(built)


def test_one_wire_byte_too_few_names_the_request(built: Built) -> None:
    gateways = built.gateways("naive_heterogeneous")
    decode = gateways[7].decode
    assert decode is not None
    assert decode.kv_wire_bytes_received is not None
    expected = decode.kv_wire_bytes_received
    gateways[7] = replace(gateways[7], decode=replace(decode, kv_wire_bytes_received=expected - 1))
    built.rewrite("naive_heterogeneous", "gateway", gateways)
    reason = the_reason(built)
    assert reason.startswith("naive_heterogeneous: 1 completed requests moved other KV bytes")
    assert f"000007 received {expected - 1} of {expected} wire bytes" in reason


def test_no_kv_at_all_is_not_taken_for_zero(built: Built) -> None:
    gateways = built.gateways("prfaas_pd")
    decode = gateways[3].decode
    assert decode is not None
    gateways[3] = replace(gateways[3], decode=replace(decode, kv_wire_bytes_received=None))
    built.rewrite("prfaas_pd", "gateway", gateways)
    assert "000003 received none of" in the_reason(built)


def test_cached_tokens_other_than_planned(built: Built) -> None:
    gateways = built.gateways("prfaas_pd")
    decode = gateways[2].decode
    assert decode is not None
    gateways[2] = replace(gateways[2], decode=replace(decode, cached_tokens=64))
    built.rewrite("prfaas_pd", "gateway", gateways)
    assert "found other cached tokens than planned (000002)" in the_reason(built)


def test_completed_with_fewer_tokens_is_not_completed(built: Built) -> None:
    clients = built.clients("prfaas_pd")
    built.rewrite("prfaas_pd", "client", [replace(clients[0], completion_tokens=8), *clients[1:]])
    reason = "prfaas_pd: 1 completed requests do not have the tokens that were planned (000000)"
    assert the_reason(built) == reason


def test_all_tokens_at_one_instant_are_the_clients_fault(built: Built) -> None:
    clients = built.clients("prfaas_pd")
    stalled = replace(clients[1], chunk_mono_ns=(clients[1].first_token_mono_ns or 0,) * 3)
    built.rewrite("prfaas_pd", "client", [clients[0], stalled, *clients[2:]])
    reason = the_reason(built)
    assert "1 completed requests have all tokens at one instant: the client stalled" in reason
    assert "(000001)" in reason


def test_a_late_wake_up_does_not_make_an_instance_busier(built: Built) -> None:
    exact = verdict_of(built).deployments["homogeneous_pd"]
    late = []
    for row in built.gateways("homogeneous_pd"):
        assert row.prefill is not None
        end_ns = (row.prefill.end_mono_ns or 0) + 40_000_000
        late.append(replace(row, prefill=replace(row.prefill, end_mono_ns=end_ns)))
    built.rewrite("homogeneous_pd", "gateway", late)
    found = verdict_of(built).deployments["homogeneous_pd"]
    assert found["prefill_utilisation"] == pytest.approx(exact["prefill_utilisation"])


def test_prefill_off_its_profile_names_hardware_and_bin(built: Built) -> None:
    gateways = built.gateways("homogeneous_pd")
    for number, row in enumerate(gateways):
        prefill = row.prefill
        assert prefill is not None
        assert prefill.start_mono_ns is not None
        assert prefill.end_mono_ns is not None
        if built.requests[number].input_tokens < 4096:
            # Earlier start, shorter queue: TTFT and budget stay what they are.
            longer_ns = round(0.05 * (prefill.end_mono_ns - prefill.start_mono_ns))
            start_ns = prefill.start_mono_ns - longer_ns
            gateways[number] = replace(row, prefill=replace(prefill, start_mono_ns=start_ns))
    built.rewrite("homogeneous_pd", "gateway", gateways)
    reason = the_reason(built)
    assert reason.startswith("homogeneous_pd: measured prefill of h20 at < 4K is +5.0 % off")


def test_ttft_off_its_simulation(built: Built) -> None:
    rows = [
        SimulatedRow(each.client.rid, 0.0, 0.0, 0.0, 0.0, each.ttft_s / 1.11)
        for each in built.served[built.cell("prfaas_pd")]
    ]
    write_simulated(built.run, "prfaas_pd", rows)
    assert "mean TTFT is +11.0 % off the simulation" in the_reason(built)
    write_simulated(built.run, "prfaas_pd", rows[1:])
    assert any("were not simulated (000000)" in r for r in verdict_of(built).reasons)


def test_utilisation_names_the_load_that_fits(built: Built) -> None:
    models = built.run.read_manifest().models
    busy = DeploymentModel(1.2, 1.1, {"pd prefill": 1.16, "decode": 0.4}, 0.819)
    built.change_manifest(models={**models, "homogeneous_pd": busy})
    reason = the_reason(built)
    assert "pd prefill would be used at 1.16" in reason
    # 0.95 / 1.16 = 0.81897; what is proposed must fit, so it is rounded down.
    assert reason.endswith("; `--set workload.rate_scale=0.818` would fit")
    scenario = built.run.read_manifest().scenario
    built.change_manifest(scenario={**scenario, "workload": {"rate_scale": 0.5}})
    assert the_reason(built).endswith("; `--set workload.rate_scale=0.409` would fit")
    # So few requests span too short a window to say how busy a stage is.
    reasons = verdict_of(built, Gates(min_completed=41)).reasons
    assert len(reasons) == 3
    assert not any("capacity" in reason for reason in reasons)


def test_a_run_cut_short_says_why_and_what_it_lost_and_no_more(built: Built) -> None:
    clients = built.clients("prfaas_pd")
    built.rewrite("prfaas_pd", "client", clients[:30])
    built.rewrite("prfaas_pd", "gateway", built.gateways("prfaas_pd")[:32])
    built.change_manifest(status="failed", error="worker-pd died", models={})
    verdict = verdict_of(built, Gates())
    assert verdict.reasons[0] == "the run failed: worker-pd died"
    assert len(verdict.reasons) == 3
    assert "prfaas_pd: 2 of 40 requests failed (2 in lost)" in verdict.reasons[1]
    assert verdict.reasons[2] == "prfaas_pd: 8 of 40 requests were never sent"


def test_a_missed_slo_is_a_note(built: Built) -> None:
    scenario = built.run.read_manifest().scenario
    built.change_manifest(scenario={**scenario, "slo": {"tpot_s": 0.01, "ttft_s": 2.5}})
    verdict = verdict_of(built)
    assert verdict.verdict == "supported"
    notes = [note for note in verdict.notes if "meet the SLO" in note]
    assert len(notes) == 3
    assert (
        "prfaas_pd: 0.0 % of completed requests meet the SLO (TPOT 10 ms, met up to 1 %"
        in (notes[0])
    )
    assert notes[0].endswith("2 ms of wall time over the whole output; TTFT 2.5 s, met without "
                             "tolerance)")  # fmt: skip


def test_without_a_throughput_model_utilisation_is_not_known(built: Built) -> None:
    built.change_manifest(models={})
    reasons = verdict_of(built).reasons
    assert len(reasons) == 3
    assert all("no throughput model" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"status": "interrupted", "error": "Ctrl-C"}, "the run was interrupted: Ctrl-C"),
        ({"status": "failed", "error": "worker died"}, "the run failed: worker died"),
        ({"status": "running"}, "the run did not end"),
        ({"link_failures": ("rate is 40 % low",)}, "link: rate is 40 % low"),
        ({"link_check": None}, "the link was not checked"),
    ],
)
def test_what_the_manifest_says(built: Built, change: dict[str, Any], expected: str) -> None:
    built.change_manifest(**change)
    assert expected in the_reason(built)


def test_notes_do_not_refuse(built: Built) -> None:
    built.change_manifest(link_notes=("delay runs at its floor of 50 us",))
    path = built.run.spool_path(built.cell("prfaas_pd"), "link")
    path.write_bytes(path.read_bytes()[:-9])
    verdict = verdict_of(built)
    assert verdict.verdict == "supported"
    assert "link: delay runs at its floor of 50 us" in verdict.notes
    assert any("link.jsonl ends in the middle of a line" in note for note in verdict.notes)


def test_an_empty_schedule_is_judged(tmp_path: Path) -> None:
    verdict = verdict_of(build(tmp_path, replace(SMALL, num_requests=0)))
    assert verdict.verdict == "not_supported"
    assert "prfaas_pd: no request was planned" in verdict.reasons
    assert verdict.deployments["prfaas_pd"]["num_planned"] == 0
