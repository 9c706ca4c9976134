"""Hardware of a scenario: costs beyond the points, prefill only, and the decode batch of an SLO."""

import json
from pathlib import Path
from typing import Any

import pytest
from live import flat_profile, live, scenario

from harness.core import ScenarioError
from harness.preparation import prepare
from harness.scenario import Scenario, extrapolated_hardware, load_scenario, to_manifest
from harness.scheduling.config import decode_batch, decode_step_s, scheduler_config
from harness.simulation_summary import simulation_document
from harness.utilisation import predict_utilisation

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "scenarios/paper-case-study.toml"
MINIMAX = (
    f'model.architecture="{ROOT}/profiles/models/minimax-m2.5.json"',
    f'hardware.h200.profile="{ROOT}/profiles/minimax-m2.5-8xh200.json"',
    f'hardware.h20.profile="{ROOT}/profiles/operator/minimax-m2.5-8xh200.json"',
)
EXTRAPOLATED = (*MINIMAX, "hardware.h200.extrapolate=end_slope", "load.num_requests=300")


def rising_profile(path: Path, step_s: float, per_request_s: float, max_batch: int) -> Path:
    """A flat prefill, and a decode step of ``step_s`` + ``per_request_s`` for each in the batch."""
    flat_profile(path, 0.05, step_s, max_batch)
    document: dict[str, Any] = json.loads(path.read_text())
    for point in document["decode"]["points"]:
        point["step_s"] = step_s + per_request_s * point["batch"]
    path.write_text(json.dumps(document))
    return path


def rising(folder: Path, *overrides: str) -> Scenario:
    path = rising_profile(folder / "rising.json", 0.01, 0.005, 12)
    both = [f'hardware.{name}.profile="{path}"' for name in ("h20", "h200")]
    return scenario(*both, *overrides)


def test_a_length_outside_the_points_is_refused_and_told_how_to_ask() -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(PAPER, MINIMAX)
    message = str(caught.value)
    for words in ("'prfaas_pd'", "'h200'", "minimax-m2.5-8xh200.json", "1024 to 131072"):
        assert words in message
    assert 'hardware.h200.extrapolate = "end_slope"' in message


def test_an_extrapolation_is_marked_wherever_its_costs_are_used() -> None:
    given = load_scenario(PAPER, EXTRAPOLATED)
    (told,) = extrapolated_hardware(given)
    assert told == (
        "hardware h200: prefill costs are extrapolated (end_slope): kept at those of 1024 tokens "
        "down to 128; the profile minimax-m2.5-8xh200 covers 1024 to 131072"
    )
    assert given.hardware["h200"].extrapolate == "end_slope"
    assert given.hardware["h20"].extrapolate is None
    assert to_manifest(given)["hardware"]["h200"]["profile"]["extrapolate"] == "end_slope"
    prepared = prepare(given, ("first",))
    assert prepared.notes == ("first", told)
    assert told in simulation_document(prepared)["notes"]


def test_longer_prompts_are_marked_too_and_other_hardware_is_not() -> None:
    given = load_scenario(
        PAPER, ["hardware.h20.extrapolate=end_slope", "hardware.h200.extrapolate=end_slope",
                "workload.max_tokens=200000"],
    )  # fmt: skip
    told = extrapolated_hardware(given)
    assert [one.split(":")[0] for one in told] == ["hardware h200", "hardware h20"]
    assert all("continued with the slope at 131072 tokens up to 200000" in one for one in told)
    h20 = given.hardware["h20"].profile
    assert h20.prefill_s(200_000) > 1.5 * h20.prefill_s(131_072)


def test_asked_for_but_not_needed_is_no_extrapolation() -> None:
    assert extrapolated_hardware(load_scenario(PAPER)) == ()
    asked = load_scenario(PAPER, ["hardware.h200.extrapolate=end_slope"])
    assert extrapolated_hardware(asked) == ()


def test_cached_prefixes_shorten_what_is_prefilled() -> None:
    cached = ("prefix.model=share", "prefix.agent_share=50%", "prefix.cached_fraction=90%")
    within = [*MINIMAX, "workload.min_tokens=1024", *cached]
    with pytest.raises(ScenarioError, match="a prompt of 102 tokens"):
        load_scenario(PAPER, within)
    asked = [f"hardware.{name}.extrapolate=end_slope" for name in ("h20", "h200")]
    told = extrapolated_hardware(load_scenario(PAPER, [*within, *asked]))
    assert len(told) == 2
    assert all("down to 102" in one for one in told)


def test_a_deployment_cannot_decode_on_hardware_that_only_prefills() -> None:
    settings = [
        *MINIMAX,
        "workload.min_tokens=1024",
        "deployments.naive_heterogeneous.pd_hardware=h200",
    ]
    with pytest.raises(ScenarioError) as caught:
        load_scenario(PAPER, settings)
    message = str(caught.value)
    for words in ("'naive_heterogeneous'", "'h200'", "minimax-m2.5-8xh200.json", "prefill only"):
        assert words in message


def test_the_paper_decodes_twenty_requests_at_its_slo() -> None:
    given = load_scenario(PAPER)
    for deployment in given.deployments.values():
        assert decode_batch(given, deployment) == 20
        assert decode_step_s(given, deployment) == pytest.approx(0.025)


def test_an_impossible_slo_is_refused_by_name() -> None:
    given = load_scenario(PAPER, ["slo.tpot=20ms"])
    with pytest.raises(ScenarioError, match="Impossible SLO") as caught:
        prepare(given)
    message = str(caught.value)
    for words in ("slo.tpot is 20 ms", "25 ms at batch 1", "'h20'", "prfaas-1t-8xh20.json"):
        assert words in message


@pytest.mark.parametrize(
    ("tpot", "batch"), [("15ms", 1), ("39ms", 5), ("40ms", 6), ("70ms", 12), ("1s", 12)]
)
def test_the_slo_bounds_the_batch_everywhere(tmp_path: Path, tpot: str, batch: int) -> None:
    given = rising(tmp_path, f"slo.tpot={tpot}", "load.num_requests=20")
    deployment = given.deployments["homogeneous_pd"]
    step_s = 0.01 + 0.005 * batch
    assert decode_batch(given, deployment) == batch
    assert decode_step_s(given, deployment) == pytest.approx(step_s)
    config = scheduler_config(given, "homogeneous_pd")
    assert (config.decode_max_batch, config.decode_step_s) == (batch, pytest.approx(step_s))
    schedule = prepare(given).schedule
    window_s = (schedule[-1].planned_s - schedule[0].planned_s) * 20 / 19
    slots = deployment.num_decode * batch
    assert predict_utilisation(given, "homogeneous_pd", schedule).pd_decode == pytest.approx(
        20 * 1023 * step_s / (slots * window_s)
    )


def test_the_simulator_and_a_live_worker_keep_to_that_batch(tmp_path: Path) -> None:
    given = rising(
        tmp_path, "slo.tpot=25ms", "load.num_requests=40", "load.rate_req_per_s=40",
        "workload.output_tokens=100", "deployments.homogeneous_pd.num_decode=1",
    )  # fmt: skip
    assert decode_batch(given, given.deployments["homogeneous_pd"]) == 3
    simulated = prepare(given).simulations["homogeneous_pd"]
    # 40 requests through 3 slots of 99 steps: 14 rounds, of which the last is not full.
    assert simulated.end_s == pytest.approx(14 * 99 * 0.025, rel=0.05)
    with live(given, "homogeneous_pd", tmp_path) as testbed:
        result = testbed.testbed.replay("batch", lambda *_: None, lambda _: None)
        engines = testbed.rows("engines")
    assert result.completed == 40
    running = [row["running"] for row in engines if row["role"] == "decode"]
    assert max(running) == 3


def test_extrapolated_costs_are_served_live(tmp_path: Path) -> None:
    given = load_scenario(
        PAPER,
        [*EXTRAPOLATED, "load.num_requests=20", "workload.mu=5.5", "workload.sigma=0.2",
         "workload.output_tokens=2", "deployments.naive_heterogeneous.num_decode=1"],
    )  # fmt: skip
    with live(given, "naive_heterogeneous", tmp_path) as testbed:
        result = testbed.testbed.replay("short", lambda *_: None, lambda _: None)
        assert result.completed == 20
        rows = testbed.rows("gateway")
    # Every prompt is shorter than the first point, whose time it takes.
    wall_s = given.hardware["h200"].profile.prefill_points[0].prefill_s / given.scale.time
    services_s = [row["prefill"]["service_wall_s"] for row in rows]
    assert services_s == pytest.approx([wall_s] * 20, rel=1e-6)
