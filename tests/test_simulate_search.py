"""``prfaas simulate --lambda-max`` and ``--optimum``: documents, tables and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main

CASE_STUDY = str(Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml")
NAMES = ("prfaas_pd", "homogeneous_pd", "naive_heterogeneous")
HELD = ("--set", "scheduling.bandwidth_aware=false", "--no-transfer", "--cores", "1")


def document(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", CASE_STUDY, "--json", *HELD, *arguments]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_lambda_max_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(
        capfd, "--lambda-max", "--slo-ttft", "6s", "--requests", "300", "--budget", "30000"
    )
    assert found["slo"] == {
        "ttft_s": 6.0, "ttft_quantile": 0.9, "tpot_s": 0.025, "tpot_share": 0.99,
    }  # fmt: skip
    assert tuple(found["deployments"]) == NAMES
    for name, one in found["deployments"].items():
        low, high = one["lambda_max_at_slo_req_per_s"]
        if name == "homogeneous_pd":  # its P90 of T_prefill alone is 9.7 s
            assert (one["ended"], low) == ("unattainable", None)
            assert any(note.startswith(name) for note in found["notes"])
            continue
        assert one["num_requests_simulated"] <= 30_000
        assert 0 < low < one["lambda_max_exact_req_per_s"] * 1.05
        assert low < high
        assert one["saturated_throughput_req_per_s"] > low
        rates = {load["outcome"]: load["rate_req_per_s"] for load in one["loads"]}
        assert rates["meets"] == pytest.approx(low)
        assert one["times_homogeneous_pd"] is None
    assert found["wall_s"] > 0


def test_optimum_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "--optimum", "--load", "1.8", "--requests", "200")
    assert found["rate_req_per_s"] == 1.8
    assert tuple(found["deployments"]) == NAMES
    split = found["deployments"]["prfaas_pd"]
    assert split["formula"]["num_prefill"] + split["formula"]["num_decode"] == 8
    assert split["best"]["num_prefill"] + split["best"]["num_decode"] == 8
    tried = {(one["threshold_tokens"], one["num_prefill"]) for one in split["tried"]}
    assert len(tried) == len(split["tried"])
    assert (split["best"]["threshold_tokens"], split["best"]["num_prefill"]) in tried
    assert found["deployments"]["naive_heterogeneous"]["answer"] == "nothing_to_choose"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--lambda-max", "--slo-ttft", "6s", "--budget", "20000"),
        ("--optimum", "--load", "1.8"),
    ],
)
def test_the_tables_fit_80_columns(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert main(["simulate", CASE_STUDY, *HELD, "--requests", "100", *arguments]) == 0
    said = capfd.readouterr()
    assert max(len(line) for line in said.out.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in said.out
    assert all(name in said.out for name in NAMES)
    assert "\x1b" not in said.err  # no bars where there is no terminal


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lambda-max"], "--slo-ttft"),
        (["--lambda-max", "--slo-ttft", "5"], "--slo-ttft"),
        (["--lambda-max", "--slo-ttft", "0s"], "--slo-ttft"),
        (["--lambda-max", "--slo-ttft", "5s", "--load", "1"], "--load"),
        (["--lambda-max", "--slo-ttft", "5s", "--budget", "0"], "--budget"),
        (["--lambda-max", "--slo-ttft", "5s", "--tolerance", "-1"], "--tolerance"),
        (["--lambda-max", "--slo-ttft", "5s", "--runs", "runs"], "--runs"),
        (["--lambda-max", "--slo-ttft", "5s", "--cores", "0"], "--cores"),
        (["--optimum", "--slo-ttft", "5s"], "--lambda-max"),
        (["--budget", "10"], "--lambda-max"),
        (["--cores", "2"], "--cores"),
        (["--lambda-max", "--slo-ttft", "5s", "--set", "load.concurrency=4"], "concurrency"),
    ],
)
def test_what_does_not_go_together_is_refused(
    capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["simulate", CASE_STUDY, *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("prfaas: ")
    assert said in captured.err


def test_one_search_at_a_time(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["simulate", CASE_STUDY, "--lambda-max", "--optimum"])
    assert left.value.code == 2
    assert "not allowed" in capfd.readouterr().err
