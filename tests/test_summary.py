"""Goodput, steady window, concurrency and lengths of runs whose figures are known."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic_run import (
    ADMISSION_NS,
    STEP_NS,
    THRESHOLD_TOKENS,
    TIME_SCALE,
    TRANSFER_NS,
    Built,
    Options,
    build,
    read_json,
)

from harness.record.tables import compact, read_table
from harness.statistics import occupancy
from harness.summary import combine_seeds, floats, length_edges
from harness.verdict import judge

NAME = "prfaas_pd"
OPTIONS = Options(num_requests=120, deployments=(NAME, "homogeneous_pd"))


def document_of(built: Built) -> dict[str, Any]:
    compact(built.run)
    judge(built.run)
    document: dict[str, Any] = read_json(built.run.verdict_path)
    return document


def summary_of(built: Built, name: str = NAME) -> dict[str, Any]:
    summary: dict[str, Any] = document_of(built)["deployments"][name]
    return summary


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, dict[str, Any], pd.DataFrame]:
    built = build(tmp_path_factory.mktemp("sound"), OPTIONS)
    document = document_of(built)
    requests = read_table(built.run, "requests")
    return built, document["deployments"][NAME], requests[requests["deployment"] == NAME]


def with_failures(built: Built, count: int) -> None:
    clients = built.clients(NAME)
    failed = [
        replace(row, outcome="failed", failure_phase="stream", failure_message="reset")
        for row in clients[:count]
    ]
    built.rewrite(NAME, "client", [*failed, *clients[count:]])


def with_slo(built: Built, **slo: float | None) -> None:
    scenario = built.run.read_manifest().scenario
    built.change_manifest(scenario={**scenario, "slo": {**scenario["slo"], **slo}})


class TestGoodput:
    def test_both_slos_have_to_be_met_and_failures_count_against(self, tmp_path: Path) -> None:
        built = build(tmp_path, OPTIONS)
        with_failures(built, 6)
        with_slo(built, ttft_s=2.0)
        summary = summary_of(built)
        served = built.served[built.cell(NAME)][6:]
        within = sum(each.ttft_s <= 2.0 for each in served)
        assert 0 < within < 114
        assert summary["slo_share_of_planned"] == pytest.approx(within / 120)
        assert summary["slo_ttft_share_of_planned"] == pytest.approx(within / 120)
        assert summary["slo_attainment"] == pytest.approx(within / 114)
        assert summary["slo_tpot_share_of_planned"] == pytest.approx(114 / 120)
        assert summary["slo_tpot_met"] is False
        whole_s = 114 / summary["throughput_req_per_s"]
        assert summary["goodput_req_per_s"] == pytest.approx(within / whole_s)
        interval = summary["slo_share_interval"]
        assert interval["low"] < within / 120 < interval["high"]
        by_slo = {row["ttft_slo_s"]: row for row in summary["goodput_by_ttft_slo"]}
        assert list(by_slo) == sorted(by_slo)
        assert by_slo[2.0]["goodput_req_per_s"] == summary["goodput_req_per_s"]
        assert by_slo[100.0]["share_of_planned"] == pytest.approx(114 / 120)
        assert by_slo[5.0]["share_of_planned"] == pytest.approx(
            sum(each.ttft_s <= 5.0 for each in served) / 120
        )

    def test_a_slow_tail_of_one_in_a_hundred_still_keeps_the_rule(self, tmp_path: Path) -> None:
        options = replace(OPTIONS, num_requests=100, deployments=(NAME,))
        for slow, met in ((1, True), (2, False)):
            built = build(tmp_path / str(slow), options)
            clients = built.clients(NAME)
            for number in range(slow):
                row = clients[number]
                late = row.chunk_mono_ns[-1] + 100 * STEP_NS
                chunks = (*row.chunk_mono_ns[:-1], late)
                clients[number] = replace(row, chunk_mono_ns=chunks, end_mono_ns=late)
            built.rewrite(NAME, "client", clients)
            summary = summary_of(built)
            assert summary["slo_tpot_share_of_planned"] == pytest.approx(1 - slow / 100)
            assert summary["slo_tpot_met"] is met

    def test_without_a_ttft_slo_its_share_is_not_known(self, sound: Any) -> None:
        _, summary, _ = sound
        assert summary["slo_ttft_share_of_planned"] is None
        assert summary["slo_tpot_met"] is True
        assert summary["slo_share_interval"]["low"] is None
        assert "same outcome" in summary["slo_share_interval"]["reason"]


class TestSteadyWindow:
    def test_it_is_stated_and_its_figures_stand_beside_the_whole_run(self, sound: Any) -> None:
        built, summary, rows = sound
        steady = summary["steady"]
        last_s = built.requests[-1].planned_s
        assert steady["end_s"] == pytest.approx(last_s)
        assert 0.0 <= steady["start_s"] <= last_s / 2
        assert "MSER-5" in steady["rule"]
        inside = rows[(rows["planned_s"] >= steady["start_s"]) & (rows["planned_s"] <= last_s)]
        assert steady["num_requests"] == len(inside)
        assert steady["ttft_mean_s"] == pytest.approx(floats(inside, "ttft_s").mean())
        length_s = last_s - steady["start_s"]
        ends_s = floats(rows, "end_s")
        completions = ((ends_s > steady["start_s"]) & (ends_s <= last_s)).sum()
        assert steady["throughput_req_per_s"] == pytest.approx(completions / length_s)
        assert steady["goodput_req_per_s"] == steady["throughput_req_per_s"]
        assert summary["throughput_steady_req_per_s"] == steady["throughput_req_per_s"]
        level = occupancy(floats(rows, "planned_s"), ends_s, steady["start_s"], last_s)
        assert level is not None
        assert steady["concurrency_mean"]["in_flight"] == pytest.approx(level.mean)

    def test_settled_deployments_share_it(self, tmp_path: Path) -> None:
        document = document_of(build(tmp_path, replace(OPTIONS, repeats=2)))
        one, other = (each["steady"] for each in document["deployments"].values())
        assert (one["start_s"], one["end_s"]) == (other["start_s"], other["end_s"])

    def test_an_overloaded_deployment_has_none_and_the_others_keep_theirs(
        self, tmp_path: Path
    ) -> None:
        crowded = replace(OPTIONS, deployments=(NAME, "homogeneous_pd"), rate_req_per_s=3.6)
        document = document_of(build(tmp_path, replace(crowded, num_requests=400)))
        steady = document["deployments"]["homogeneous_pd"]["steady"]
        assert steady["start_s"] is None
        assert "has not settled" in steady["reason"]
        assert document["deployments"]["homogeneous_pd"]["throughput_steady_req_per_s"] is None

    def test_failures_take_the_mean_and_quantiles_that_they_reach(self, tmp_path: Path) -> None:
        built = build(tmp_path, OPTIONS)
        clients = built.clients(NAME)
        failed = [replace(row, outcome="failed", failure_phase="stream") for row in clients[90:110]]
        built.rewrite(NAME, "client", [*clients[:90], *failed, *clients[110:]])
        steady = summary_of(built)["steady"]
        assert steady["ttft_mean_s"] is None
        assert steady["ttft_p50_s"] is not None
        assert steady["ttft_p90_s"] is None
        assert (
            f"20 of {steady['num_requests']} requests were not completed" in (steady["ttft_reason"])
        )


class TestConcurrency:
    def test_phases_are_the_known_durations_over_the_run(self, sound: Any) -> None:
        built, summary, rows = sound
        level, served = summary["concurrency"], built.served[built.cell(NAME)]
        window_s = floats(rows, "end_s").max()
        assert level["window_s"] == pytest.approx(window_s)
        assert level["requests_without_end"] == 0
        spent_s = {
            "in_flight": floats(rows, "e2e_s").sum(),
            "prefill_queue": sum(each.queue_ns for each in served) / 1e9 * TIME_SCALE,
            "prefill": floats(rows, "prefill_s").sum(),
            "transfer": 120 * TRANSFER_NS / 1e9 * TIME_SCALE,
            "decode_admission": 120 * ADMISSION_NS / 1e9 * TIME_SCALE,
        }
        for phase, total_s in spent_s.items():
            assert level["mean"][phase] == pytest.approx(total_s / window_s), phase
        assert 1 <= level["max"]["prefill"] <= 7
        # Little's law: L = lambda W, from columns of which the level was not made.
        arrival_rate, stay_s = 120 / window_s, floats(rows, "e2e_s").mean()
        assert level["mean"]["in_flight"] == pytest.approx(arrival_rate * stay_s)

    def test_repeats_follow_one_another(self, sound: Any, tmp_path: Path) -> None:
        twice = summary_of(build(tmp_path, replace(OPTIONS, repeats=2)))["concurrency"]
        once = sound[1]["concurrency"]
        assert twice["window_s"] == pytest.approx(2 * once["window_s"])
        assert twice["mean"]["in_flight"] == pytest.approx(once["mean"]["in_flight"])
        assert twice["max"] == once["max"]

    def test_of_phases_that_nobody_tells_the_level_is_null(self, tmp_path: Path) -> None:
        built = build(tmp_path, OPTIONS)
        rows = [replace(row, prefill=None, decode=None) for row in built.gateways(NAME)]
        built.rewrite(NAME, "gateway", rows)
        level = summary_of(built)["concurrency"]
        assert level["mean"]["in_flight"] > 0
        assert level["mean"]["prefill"] is None
        assert level["max"]["decode"] is None

    def test_a_closed_loop_counts_from_the_instants_that_the_client_noted(
        self, tmp_path: Path
    ) -> None:
        built = build(tmp_path, OPTIONS)
        early_ns = 20_000_000  # 0.2 s of scenario time before the schedule's instants
        rows = [
            replace(row, planned_mono_ns=(row.planned_mono_ns or 0) - early_ns)
            for row in built.clients(NAME)
        ]
        built.rewrite(NAME, "client", rows)
        level = summary_of(built)["concurrency"]
        requests = read_table(built.run, "requests")
        stays_s = requests.loc[requests["deployment"] == NAME, "e2e_s"].sum()
        # The first one was planned 0.2 s before the load's start, where nothing is counted.
        assert level["mean"]["in_flight"] * level["window_s"] == pytest.approx(stays_s - 0.2)

    def test_a_request_that_never_ended_is_counted_apart(self, tmp_path: Path) -> None:
        built = build(tmp_path, OPTIONS)
        built.rewrite(NAME, "client", built.clients(NAME)[:-1])
        assert summary_of(built)["concurrency"]["requests_without_end"] == 1


class TestLengths:
    def test_bins_lie_around_the_threshold_and_add_up(self, sound: Any) -> None:
        _, summary, rows = sound
        bins = summary["by_length"]
        assert sum(one["num_planned"] for one in bins) == 120
        edges = length_edges(THRESHOLD_TOKENS)
        assert THRESHOLD_TOKENS in edges
        for one in bins:
            low, high = one["over_tokens"], one["high_tokens"]
            lengths = floats(rows, "input_tokens")
            inside = rows[(lengths > low) & (lengths <= (high or math.inf))]
            assert one["num_planned"] == one["num_completed"] == len(inside)
            ttft_s = np.sort(floats(inside, "ttft_s"))
            assert one["ttft_p50_s"] == ttft_s[math.ceil(len(inside) / 2) - 1]
            if len(inside) < 10:
                assert one["ttft_p90_s"] is None
                assert one["ttft_p90_reason"] == f"{len(inside)} requests; a P90 takes 10"
            assert one["offload_fraction"] == (1.0 if low >= THRESHOLD_TOKENS else 0.0)
            assert one["budget_mean_s"]["prefill"] == pytest.approx(
                floats(inside, "prefill_s").mean()
            )
        assert sum(one["goodput_req_per_s"] for one in bins) == pytest.approx(
            summary["goodput_req_per_s"]
        )

    def test_failures_are_of_their_bin(self, tmp_path: Path) -> None:
        built = build(tmp_path, OPTIONS)
        with_failures(built, 30)
        bins = summary_of(built)["by_length"]
        assert sum(one["num_failed"] for one in bins) == 30
        assert all(one["slo_share_of_planned"] < 1.0 for one in bins if one["num_failed"])
        reached = [one for one in bins if one["num_planned"] >= 10 and one["ttft_p90_s"] is None]
        assert reached
        assert all("not completed" in one["ttft_p90_reason"] for one in reached)

    def test_edges_are_octaves_of_the_threshold(self) -> None:
        assert length_edges(19_400) == (2425, 4850, 9700, 19_400, 38_800, 77_600, 155_200)
        assert length_edges(None)[3] == 16_384
        assert min(length_edges(1)) > 0


def test_gaps_per_token_and_per_chunk_are_two_figures(sound: Any) -> None:
    """Chunks of 1, 1 and 7 tokens, a step of 25 ms a token: gaps of 25 and 175 ms."""
    _, summary, _ = sound
    assert summary["itl_p50_s"] == pytest.approx(0.025)
    assert summary["itl_max_p50_s"] == pytest.approx(0.025)
    assert summary["chunk_gap_p50_s"] == pytest.approx(0.1)
    assert summary["chunk_gap_max_p50_s"] == pytest.approx(0.175)
    assert summary["tokens_per_chunk"] == pytest.approx(3.0)


def test_repeats_are_told_apart_and_said_to_be_of_the_same_arrivals(tmp_path: Path) -> None:
    built = build(tmp_path, replace(OPTIONS, repeats=2))
    repeats = summary_of(built)["repeats"]
    assert repeats["count"] == 2
    assert repeats["ttft_mean_s"][0] == pytest.approx(repeats["ttft_mean_s"][1])
    assert repeats["ttft_mean_interval"]["low"] is not None
    assert "same" in repeats["arrivals"]


def test_with_failures_quantiles_are_compared_and_means_are_not(tmp_path: Path) -> None:
    built = build(tmp_path, OPTIONS)
    with_failures(built, 4)
    ratio = document_of(built)["ratios"]["homogeneous_pd"]
    assert ratio["ttft_mean_ratio"] is None
    assert ratio["interval"]["low"] is None
    assert ratio["ttft_p50_ratio"] > 1.0
    assert ratio["ttft_p50_interval"]["low"] < ratio["ttft_p50_ratio"]


class TestSeeds:
    def test_runs_of_several_seeds_combine(self, tmp_path: Path) -> None:
        documents = [
            document_of(build(tmp_path / str(seed), replace(OPTIONS, seed=seed)))
            for seed in range(3)
        ]
        combined = combine_seeds(documents, [0, 1, 2])
        figure = combined["deployments"][NAME]["ttft_mean_s"]
        means = [one["deployments"][NAME]["ttft_mean_s"] for one in documents]
        assert figure["by_seed"] == means
        assert figure["mean"] == pytest.approx(np.mean(means))
        assert figure["interval"]["low"] < figure["mean"] < figure["interval"]["high"]
        ratio = combined["ratios"]["homogeneous_pd"]
        assert ratio["over"] == NAME
        assert ratio["ttft_mean"]["low"] > 1.0

    def test_the_same_seed_twice_is_refused(self, sound: Any) -> None:
        document = {"deployments": {NAME: sound[1]}}
        with pytest.raises(ValueError, match="same seed"):
            combine_seeds([document, document], [3, 3])
        with pytest.raises(ValueError, match="other deployments"):
            combine_seeds([document, {"deployments": {}}], [3, 4])


def test_a_run_that_was_cut_short_has_no_steady_window(tmp_path: Path) -> None:
    built = build(tmp_path, OPTIONS)
    built.rewrite(NAME, "client", built.clients(NAME)[:70])
    built.change_manifest(status="interrupted", error="Ctrl-C")
    summary = summary_of(built)
    assert summary["steady"]["reason"] == "the run did not end"
    assert summary["steady"]["start_s"] is None
    assert summary["throughput_steady_req_per_s"] is None
    assert summary["slo_share_of_planned"] == pytest.approx(70 / 120)
