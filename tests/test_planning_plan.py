"""``prfaas plan`` as a whole: the paper's case, found and not given, every figure recomputed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.planning.plan import plan
from harness.scenario import Scenario, load_scenario

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "scenarios" / "paper-case-study.toml"
GBIT_BYTES = 1e9 / 8
#: Plans that no paper printed, so that what is found was searched for.
ELSEWHERE = [
    "deployments.prfaas_pd.threshold_tokens=1000",
    "deployments.prfaas_pd.num_prefill=6",
    "deployments.prfaas_pd.num_decode=2",
    "deployments.homogeneous_pd.num_prefill=6",
    "deployments.homogeneous_pd.num_decode=6",
]


def documents(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert (
        main(["plan", str(PAPER), "--profiles", str(ROOT / "profiles"), "--json", *arguments]) == 0
    )
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return plan(load_scenario(PAPER, ELSEWHERE)).document()


def test_the_splits_and_the_threshold_are_found(found: dict[str, Any]) -> None:
    counts = ("num_prfaas", "num_prefill", "num_decode")
    plans = {name: [one[key] for key in counts] for name, one in found["deployments"].items()}
    assert plans == {
        "prfaas_pd": [4, 3, 5],
        "homogeneous_pd": [None, 9, 3],
        "naive_heterogeneous": [4, None, 8],
    }
    prfaas, homogeneous, naive = found["deployments"].values()
    assert prfaas["threshold_tokens"] == pytest.approx(19_400, abs=500)
    assert homogeneous["threshold_tokens"] is None
    assert naive["threshold_tokens"] is None


def test_table_6(found: dict[str, Any]) -> None:
    prfaas, homogeneous, naive = found["deployments"].values()
    assert prfaas["throughput_req_per_s"] == pytest.approx(3.24, rel=0.01)
    assert homogeneous["throughput_req_per_s"] == pytest.approx(2.11, rel=0.01)
    assert naive["throughput_req_per_s"] == pytest.approx(2.45, rel=0.01)
    assert prfaas["ratio"] == pytest.approx(1.54, rel=0.01)
    assert naive["ratio"] == pytest.approx(1.16, rel=0.01)
    assert prfaas["offload_fraction"] == pytest.approx(0.496, abs=0.005)
    assert 12 < prfaas["egress_bytes_per_s"] / GBIT_BYTES < 13.5
    for one, mean_s, p90_s in (
        (prfaas, 2.22, 3.51),
        (homogeneous, 4.44, 9.73),
        (naive, 1.74, 3.51),
    ):
        assert one["service_ttft_mean_s"] == pytest.approx(mean_s, rel=0.04)
        assert one["service_ttft_p90_s"] == pytest.approx(p90_s, rel=0.04)
        # A queue carries less than the formula, and with queueing TTFT is longer.
        assert one["throughput_exact_req_per_s"] < one["throughput_req_per_s"]
        assert one["ttft"]["ttft_mean_s"] > one["service_ttft_mean_s"]
    assert homogeneous["offload_fraction"] is None
    assert homogeneous["egress_bytes_per_s"] is None
    assert naive["theta_pd_prefill_req_per_s"] is None


def test_the_price_ratio_that_makes_15_percent(found: dict[str, Any]) -> None:
    comparisons = {one["deployment"]: one for one in found["equal_cost"]["comparisons"]}
    even = {one["gain"]: one["price_ratio"] for one in comparisons["prfaas_pd"]["break_even"]}
    assert 1.9 < even[0.15] < 2.1
    assert even[0.0] > even[0.15]


def test_other_lengths_change_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    base = documents(capsys)
    short = documents(capsys, "--set", "workload.mu=9.4", "--set", "workload.sigma=1.2")
    for name, one in short["deployments"].items():
        before = base["deployments"][name]
        for key in ("throughput_req_per_s", "throughput_exact_req_per_s", "service_ttft_mean_s"):
            assert one[key] != pytest.approx(before[key], rel=1e-3), (name, key)
        assert one["ttft"]["ttft_mean_s"] != pytest.approx(before["ttft"]["ttft_mean_s"], rel=1e-3)
    for key in ("equal_cost", "attribution", "sensitivity", "sweeps", "curve", "grid"):
        assert short[key] != base[key], key
    assert short["deployments"]["prfaas_pd"]["threshold_tokens"] < 19_000
    # The same lengths written into the scenario give the same document.
    again = plan(load_scenario(PAPER, ["workload.mu=9.4", "workload.sigma=1.2"])).document()
    assert json.loads(json.dumps(again["deployments"])) == short["deployments"]


def test_the_exact_objective_carries_more_on_a_queue(found: dict[str, Any]) -> None:
    exact = plan(load_scenario(PAPER, ELSEWHERE), "exact").document()
    for name, one in exact["deployments"].items():
        before = found["deployments"][name]
        assert one["throughput_exact_req_per_s"] >= before["throughput_exact_req_per_s"] * (
            1 - 1e-9
        )
        optimum = before["exact_optimum"]
        assert one["throughput_exact_req_per_s"] == pytest.approx(
            optimum["throughput_exact_req_per_s"]
        )
    assert exact["deployments"]["prfaas_pd"]["num_prefill"] == 4
    assert any("prefers" in note for note in found["notes"])


def test_the_curve_peaks_at_the_plan(found: dict[str, Any]) -> None:
    curve, prfaas = found["curve"], found["deployments"]["prfaas_pd"]
    best = max(curve["paper_req_per_s"])
    assert best == pytest.approx(prfaas["throughput_req_per_s"])
    at = curve["paper_req_per_s"].index(best)
    assert curve["threshold_tokens"][at] == prfaas["threshold_tokens"]
    assert set(curve["paper_stage"]) <= {"prfaas_prefill", "pd_prefill", "pd_decode", "link"}
    grid = found["grid"]
    row = grid["num_prefill"].index(prfaas["num_prefill"])
    assert grid["lambda_max_req_per_s"][row] == curve["paper_req_per_s"]


def test_what_does_not_apply_is_null_and_says_why() -> None:
    scenario = load_scenario(PAPER)
    alone: Scenario = scenario_without(scenario, "homogeneous_pd")
    document = plan(alone).document()
    assert document["equal_cost"] is None
    assert document["attribution"] is None
    assert document["deployments"]["prfaas_pd"]["ratio"] is None
    notes = " ".join(document["notes"])
    assert "equal_cost is left out" in notes
    assert "attribution is left out" in notes
    only = plan(scenario_without(scenario, "prfaas_pd")).document()
    assert only["curve"] is None
    assert only["sweeps"] is None
    assert "sweeps is left out" in " ".join(only["notes"])


def scenario_without(scenario: Scenario, name: str) -> Scenario:
    from dataclasses import replace

    kept = {key: one for key, one in scenario.deployments.items() if key != name}
    return replace(scenario, deployments=kept)


def test_an_overloaded_rate_has_no_ttft(capsys: pytest.CaptureFixture[str]) -> None:
    document = documents(capsys, "--set", "load.rate_req_per_s=2.2")
    homogeneous = document["deployments"]["homogeneous_pd"]["ttft"]
    assert homogeneous["ttft_mean_s"] is None
    assert homogeneous["unstable_stage"] == "pd_prefill"
    assert document["deployments"]["prfaas_pd"]["ttft"]["ttft_mean_s"] > 0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('slo.tpot="20ms"', "SLO"),
        ("deployments.prfaas_pd.num_decode=0", "num_decode"),
        ("load.rate_req_per_s=0", "rate_req_per_s"),
        ("workload.max_tokens=400000", "covers"),
        ('prefix.agent_share="140%"', "agent_share"),
    ],
)
def test_bad_input_is_refused_by_name(
    setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(PAPER), "--set", setting]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_an_extrapolated_profile_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    document = documents(
        capsys,
        "--set",
        "workload.max_tokens=200000",
        *(
            part
            for name in ("h200", "h20")
            for part in ("--set", f'hardware.{name}.extrapolate="end_slope"')
        ),
    )
    assert any("131072" in warning for warning in document["warnings"])
    assert document["provenance"]["h200"]["extrapolate"] == "end_slope"


def test_json_alone_on_stdout_and_the_report_beside_it(tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    result = subprocess.run(
        [sys.executable, "-m", "harness", "plan", str(PAPER), "--json", "--html", str(html)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    document = json.loads(result.stdout)
    assert document["bandwidth_wall"]["rows"]
    assert str(html) in result.stderr
    assert "<html" in html.read_text()


def test_without_a_folder_of_profiles_the_wall_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(PAPER), "--json", "--profiles", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bandwidth_wall"] is None
    assert any("bandwidth_wall is left out" in note for note in document["notes"])


def test_the_planner_pulls_in_nothing_heavy() -> None:
    code = (
        "import os, sys; from harness.__main__ import start; "
        f"sys.argv = ['prfaas', 'plan', {str(PAPER)!r}, '--json']; start(); "
        "assert len(os.listdir('/proc/self/task')) == 1; "
        "print([m for m in ('torch', 'locust', 'gevent', 'pandas', 'altair', 'scipy.optimize',"
        " 'rich', 'netem.link_file') if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stderr.strip().endswith("[]")
