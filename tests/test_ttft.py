"""TTFT in closed form: the reference table, the simulator, and what must hold at any load."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.deployment import Deployment, PdCluster, PrfaasCluster
from harness.scenario import Scenario, load_scenario
from harness.scenario_change import with_trace
from harness.scheduling.config import decode_step_s, transfer_tail_function
from harness.simulator import SimulatedRequest, simulate
from harness.throughput import deployment_model
from harness.ttft import TtftModel, predict_ttft, ttft_curve
from harness.ttft.accuracy import ON_OFF, OTHERWISE, PROMISED
from harness.workload import LengthDistribution, build_schedule, length_distribution

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "scenarios" / "paper-case-study.toml"
NAMES = ("prfaas_pd", "homogeneous_pd", "naive_heterogeneous")


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


@pytest.fixture(scope="module")
def models(paper: Scenario) -> dict[str, TtftModel]:
    return {name: TtftModel(paper, paper.deployments[name]) for name in NAMES}


#: Mean and P90 TTFT in s by (load req/s, CV): 5 x 200,000 requests through a central queue per
#: pool, the shipped profiles, no transfer time; spread in the last digit, to 0.3 s at 14.5.
REFERENCE = {
    (1.27, 1): ((2.35, 3.73), (4.70, 10.00), (1.87, 3.77)),
    (1.5, 1): ((2.41, 3.89), (5.10, 10.67), (2.04, 4.10)),
    (1.8, 1): ((2.55, 4.22), (7.56, 15.4), (2.51, 5.08)),
    (1.9, 1): ((2.62, 4.37), None, (2.82, 5.71)),
    (1.27, 2): ((2.75, 4.78), (5.79, 12.18), (2.73, 5.63)),
    (1.5, 2): ((2.95, 5.23), (7.20, 15.10), (3.30, 6.83)),
    (1.8, 2): ((3.33, 6.05), (14.5, 30.5), (4.81, 10.19)),
    (1.9, 2): ((3.50, 6.41), None, (5.77, 12.45)),
}


@pytest.mark.parametrize("cell", list(REFERENCE))
def test_the_reference_table_with_queueing(cell: tuple[float, int]) -> None:
    """Also the homogeneous deployment at 90 % of what it carries, of which more is not promised."""
    rate, cv = cell
    scenario = load_scenario(PAPER, [f"workload.cv={cv}"])
    for name, known in zip(NAMES, REFERENCE[cell], strict=True):
        if known is None:
            continue
        found = predict_ttft(scenario, scenario.deployments[name], rate)
        assert found.ttft_mean_s == pytest.approx(known[0], rel=0.015 if cv == 1 else 0.03)
        assert found.ttft_p90_s == pytest.approx(known[1], rel=0.02 if cv == 1 else 0.04)
        assert found.accuracy.promised == (PROMISED[cv] if found.load <= 0.851 else None)


def test_service_alone_is_table_6(models: dict[str, TtftModel]) -> None:
    expected = {
        "prfaas_pd": (2.26, 3.47),
        "homogeneous_pd": (4.51, 9.73),
        "naive_heterogeneous": (1.71, 3.47),
    }
    for name, (mean_s, p90_s) in expected.items():
        found = models[name].predict(1.0)
        assert found.service_ttft_mean_s == pytest.approx(mean_s, abs=0.005)
        assert found.service_ttft_p90_s == pytest.approx(p90_s, abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_without_load_it_is_service_and_transfer(
    paper: Scenario, models: dict[str, TtftModel], name: str
) -> None:
    found = models[name].predict(1e-4)
    assert found.parts is not None
    alone_s = found.service_ttft_mean_s + found.parts.transfer_layerwise_s
    assert found.ttft_mean_s == pytest.approx(alone_s, rel=1e-4)
    for quantile in ("p50", "p90", "p99"):
        loaded, alone = (getattr(found, f"{s}ttft_{quantile}_s") for s in ("", "service_"))
        assert loaded == pytest.approx(alone, rel=0.02)
    assert paper.transport.layerwise


@settings(deadline=None, max_examples=25)
@given(
    st.floats(0.05, 0.97), st.floats(0.05, 0.97), st.sampled_from(NAMES), st.sampled_from((1, 2))
)
def test_more_load_takes_longer(one: float, other: float, name: str, cv: int) -> None:
    scenario = load_scenario(PAPER, [f"workload.cv={cv}"])
    deployment = scenario.deployments[name]
    lengths = length_distribution(scenario, 500)
    most = deployment_model(scenario, deployment, lengths).lambda_max_exact_req_per_s
    model = TtftModel(scenario, deployment, lengths)
    low, high = (model.predict(load * most) for load in sorted((one, other)))
    for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"):
        assert getattr(low, key) <= getattr(high, key) * (1 + 1e-3)
    assert low.ttft_p50_s is not None
    assert low.ttft_p90_s is not None
    assert low.ttft_p99_s is not None
    assert low.ttft_p50_s <= low.ttft_p90_s <= low.ttft_p99_s


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("prfaas_pd", "pd_prefill"),
        ("homogeneous_pd", "pd_prefill"),
        ("naive_heterogeneous", "prfaas_prefill"),
    ],
)
def test_what_no_queue_carries_has_no_ttft(
    paper: Scenario, models: dict[str, TtftModel], name: str, stage: str
) -> None:
    most = deployment_model(paper, paper.deployments[name]).lambda_max_exact_req_per_s
    below, above = models[name].predict(0.999 * most), models[name].predict(1.001 * most)
    assert below.load == pytest.approx(0.999, rel=1e-5)
    assert below.ttft_mean_s is not None
    assert below.unstable_stage is None
    assert above.unstable_stage == stage
    times = (above.ttft_mean_s, above.ttft_p50_s, above.ttft_p90_s, above.ttft_p99_s)
    assert times == (None,) * 4
    assert above.parts is None
    assert above.routes == ()
    assert above.accuracy.note is not None
    assert stage in above.accuracy.note
    assert models[name].mean_s(1.001 * most) is None
    point = models[name].point(1.001 * most)
    assert (point.ttft_mean_s, point.ttft_p90_s) == (None, None)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_add_up(paper: Scenario, models: dict[str, TtftModel], name: str) -> None:
    most = deployment_model(paper, paper.deployments[name]).lambda_max_exact_req_per_s
    found = models[name].predict(0.9 * most)
    rows = [(1.0, found.ttft_mean_s, found.parts)]
    rows += [(route.share, route.ttft_mean_s, route.parts) for route in found.routes]
    for _, mean_s, parts in rows:
        assert parts is not None
        summed_s = (
            parts.prefill_queue_s
            + parts.prefill_s
            + parts.transfer_layerwise_s
            + parts.decode_admission_s
        )
        assert mean_s == pytest.approx(summed_s)
        assert parts.transfer_layerwise_s < parts.transfer_at_end_s
    assert sum(share for share, _, _ in rows[1:]) == pytest.approx(1)
    assert found.ttft_mean_s == pytest.approx(sum(s * m for s, m, _ in rows[1:] if m is not None))
    utilisation = deployment_model(paper, paper.deployments[name]).utilisation(0.9 * most)
    for stage, value in utilisation.by_stage().items():
        assert getattr(found.utilisation, stage) == pytest.approx(value, rel=1e-3)


def test_a_curve_is_its_points(paper: Scenario) -> None:
    deployment = paper.deployments["prfaas_pd"]
    curve = ttft_curve(paper, deployment, [1.0, 2.8, 4.0])
    for point in curve:
        whole = predict_ttft(paper, deployment, point.rate_req_per_s)
        assert point.ttft_mean_s == whole.ttft_mean_s
        assert point.ttft_p90_s == (whole.ttft_p90_s and pytest.approx(whole.ttft_p90_s, rel=1e-3))
        assert point.accuracy == whole.accuracy.note
    assert curve[0].accuracy is None
    assert curve[1].accuracy is not None
    assert curve[2].ttft_mean_s is None


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("rate", [2e8, 12.5e9])
@pytest.mark.parametrize(("tokens", "crosses"), [(4_000, False), (40_000, True)])
def test_exposed_transfer_of_a_request_alone(
    layerwise: bool, rate: float, tokens: int, crosses: bool
) -> None:
    """What the scheduler expects of it, and the way out."""
    scenario = load_scenario(
        PAPER, [f"link.rate='{8 * rate}bit'", f"fabric.rate='{8 * rate}bit'", "link.rtt='40ms'"]
    )
    scenario = replace(scenario, transport=replace(scenario.transport, layerwise=layerwise))
    lengths = LengthDistribution(np.array([float(tokens)]), np.ones(1), 1024.0, np.zeros(1))
    found = predict_ttft(scenario, scenario.deployments["prfaas_pd"], 1e-6, lengths)
    tail_s = transfer_tail_function(
        scenario.model.architecture,
        layerwise=layerwise,
        link_bytes_per_s=rate,
        fabric_bytes_per_s=rate,
        link_delay_s=0.02,
    )
    hop_s = 0.02 if crosses else 0.0
    expected_s = found.service_ttft_mean_s
    expected_s += tail_s(tokens, found.service_ttft_mean_s, crosses) + hop_s
    for time_s in (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p99_s):
        assert time_s == pytest.approx(expected_s, rel=1e-4)
    assert found.routes[0].cluster == ("prfaas" if crosses else "pd")


def ttft_of(rows: tuple[SimulatedRequest, ...]) -> np.ndarray:
    return np.array([row.ttft_s for row in rows])


#: Name, keys, load, tolerance of the mean: some three standard errors of 10,000 requests.
SIMULATED = [
    ("prfaas_pd", [], 0.6, 0.02),
    ("homogeneous_pd", [], 0.7, 0.04),
    ("naive_heterogeneous", [], 0.7, 0.05),
    ("prfaas_pd", ["link.rtt='150ms'", "scheduling.ttft_source='prefill'"], 0.6, 0.02),
    ("prfaas_pd", ["transport.layerwise=false", "link.rate='20gbit'"], 0.6, 0.03),
    ("naive_heterogeneous", ["link.rate='11gbit'"], 0.7, 0.06),
    ("homogeneous_pd", ["scheduling.admission='reserve_first'"], 0.7, 0.05),
]


@pytest.mark.parametrize(("name", "keys", "load", "tolerance"), SIMULATED)
def test_the_simulator_with_transfer_and_decode(
    name: str, keys: list[str], load: float, tolerance: float
) -> None:
    base = load_scenario(PAPER, keys)
    deployment = base.deployments[name]
    rate = load * deployment_model(base, deployment).lambda_max_exact_req_per_s
    run = [f"load.rate_req_per_s={rate}", "load.num_requests=10000", "load.seed=2"]
    scenario = load_scenario(PAPER, keys + run)
    found = predict_ttft(scenario, deployment, rate)
    assert found.parts is not None
    rows = simulate(scenario, name, build_schedule(scenario.workload, scenario.load)).requests
    assert found.ttft_mean_s == pytest.approx(float(ttft_of(rows).mean()), rel=tolerance)
    p90_s = float(np.quantile(ttft_of(rows), 0.9))
    assert found.ttft_p90_s == pytest.approx(p90_s, rel=tolerance + 0.02)
    transfer_s = float(np.mean([row.transfer_s for row in rows]))
    modelled = found.parts.transfer_layerwise_s
    if not scenario.transport.layerwise:
        modelled = found.parts.transfer_at_end_s
    assert modelled == pytest.approx(transfer_s, rel=0.2, abs=1e-3)


def test_where_decode_is_what_limits() -> None:
    """Ten prefill instances and two decode instances, at 90 % of the slots."""
    base = load_scenario(PAPER)
    deployment = replace(base.deployments["homogeneous_pd"], num_prefill=10, num_decode=2)
    slots = deployment.num_decode * 20
    rate = 0.9 * slots / (1023 * decode_step_s(base, deployment))
    scenario = load_scenario(PAPER, [f"load.rate_req_per_s={rate}", "load.num_requests=20000"])
    scenario = replace(scenario, deployments={"tight": deployment})
    found = predict_ttft(scenario, deployment, rate)
    assert found.parts is not None
    assert found.load == pytest.approx(0.9)
    rows = simulate(
        scenario, "tight", build_schedule(scenario.workload, scenario.load), transfer=False
    ).requests
    admission_s = float(np.mean([row.decode_admission_s for row in rows]))
    assert admission_s > 0.8
    # 20,000 requests hold some hundred times the memory of such a queue.
    assert found.parts.decode_admission_s == pytest.approx(admission_s, rel=0.35)
    assert found.accuracy.promised is None
    assert found.accuracy.measured == OTHERWISE["pd_decode"][1.0][0.9]
    assert found.accuracy.note is not None
    assert "pd_decode" in found.accuracy.note


def test_cached_prefixes_cost_and_move_less(paper: Scenario) -> None:
    """T_prefill(new, cached), and the growing KV of the new tokens alone."""
    deployment = paper.deployments["naive_heterogeneous"]
    new, cached = np.array([8_000.0]), np.array([24_000.0])
    found = predict_ttft(
        paper, deployment, 0.5, LengthDistribution(new, np.ones(1), 1024.0, cached)
    )
    whole = predict_ttft(
        paper, deployment, 0.5, LengthDistribution(new + cached, np.ones(1), 1024.0, 0 * cached)
    )
    assert deployment.prfaas_hardware is not None
    profile = paper.hardware[deployment.prfaas_hardware].profile
    assert found.service_ttft_mean_s == pytest.approx(profile.prefill_s(8_000, 24_000))
    assert found.parts is not None
    assert whole.parts is not None
    moved = paper.model.architecture.moved_bytes(32_000, 24_000) / paper.link.rate_bytes_per_s
    hops_s = paper.link.rtt_s
    assert found.parts.transfer_at_end_s == pytest.approx(moved + hops_s, rel=0.1)
    assert found.parts.transfer_at_end_s < whole.parts.transfer_at_end_s


def test_two_clusters_wait_longer_than_one_of_both(paper: Scenario) -> None:
    """Random halves of the requests at two PrfaaS and two PD clusters of half the size."""
    one = Deployment("one", 19_400, 4, 4, 6, "h200", "h20")
    link = paper.link.rate_bytes_per_s
    two = replace(
        one,
        num_prfaas=2,
        num_prefill=2,
        num_decode=3,
        more_prfaas=(PrfaasCluster("h200", 2, link),),
        more_pd=(PdCluster("h20", 2, 3, link),),
    )
    together, apart = (predict_ttft(paper, deployment, 2.0) for deployment in (one, two))
    assert [route.share for route in apart.routes] == pytest.approx(
        [route.share / 2 for route in together.routes for _ in range(2)]
    )
    assert apart.load == pytest.approx(together.load)
    assert apart.service_ttft_mean_s == pytest.approx(together.service_ttft_mean_s)
    assert together.ttft_mean_s is not None
    assert apart.ttft_mean_s is not None
    assert together.ttft_mean_s * 1.05 < apart.ttft_mean_s
    assert apart.accuracy.measured is None
    assert apart.accuracy.note is not None
    assert "several clusters" in apart.accuracy.note


def test_bursts_and_what_is_said_of_them() -> None:
    keys = [
        "workload.arrivals='on_off'",
        "workload.on_duration='10s'",
        "workload.off_duration='30s'",
        "workload.on_rate_multiple=3",
        "load.num_requests=20000",
        "load.rate_req_per_s=1.2",
    ]
    scenario = load_scenario(PAPER, keys)
    deployment = scenario.deployments["naive_heterogeneous"]
    found = predict_ttft(scenario, deployment, 1.2)
    rows = simulate(
        scenario, deployment.name, build_schedule(scenario.workload, scenario.load)
    ).requests
    assert found.ttft_mean_s == pytest.approx(float(ttft_of(rows).mean()), rel=0.15)
    steady = predict_ttft(load_scenario(PAPER), deployment, 1.2)
    assert steady.ttft_mean_s is not None
    assert found.ttft_mean_s is not None
    assert found.ttft_mean_s > 2 * steady.ttft_mean_s
    assert found.accuracy.promised is None
    assert found.accuracy.note is not None
    assert "on-off" in found.accuracy.note
    assert found.accuracy.measured is not None
    assert found.accuracy.measured.mean == max(ON_OFF[0.5].mean, ON_OFF[0.6].mean)


def written_trace(folder: Path) -> Path:
    """Azure's format: 6,000 requests, twice as dense in the middle third."""
    rng = np.random.default_rng(8)
    ticks = np.cumsum(rng.standard_exponential(6_000))
    times_s = np.interp(ticks, np.array([0, 0.25, 0.75, 1]) * ticks[-1], [0, 1000, 2000, 3000])
    tokens = np.clip(np.rint(rng.lognormal(9.9, 0.8, len(ticks))), 200, 100_000).astype(int)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for time_s, length in zip(times_s.tolist(), tokens.tolist(), strict=True):
        minutes, seconds = divmod(time_s, 60)
        hours, minutes = divmod(int(minutes), 60)
        lines.append(f"2024-05-10 {hours:02d}:{minutes:02d}:{seconds:010.7f},{length},{200}")
    path = folder / "drift.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_taken_with_its_own_arrivals(tmp_path: Path, name: str) -> None:
    """A rate that drifts past what the deployment carries; a CV of the gaps knows nothing of it."""
    base = load_scenario(PAPER)
    traced = with_trace(base, written_trace(tmp_path))
    deployment = traced.deployments[name]
    most = deployment_model(traced, deployment).lambda_max_exact_req_per_s
    scale = 0.8 * most / traced.load.rate_req_per_s
    scenario = load_scenario(PAPER, [f"workload.rate_scale={scale}"])
    scenario = with_trace(scenario, tmp_path / "drift.csv")
    found = predict_ttft(scenario, deployment, scenario.load.rate_req_per_s)
    rows = simulate(scenario, name, build_schedule(scenario.workload, scenario.load)).requests
    simulated_s = float(ttft_of(rows).mean())
    assert found.load == pytest.approx(0.8, rel=0.01)
    assert simulated_s > 5 * found.service_ttft_mean_s
    assert found.ttft_mean_s == pytest.approx(simulated_s, rel=0.02)
    p90_s = float(np.quantile(ttft_of(rows), 0.9))
    assert found.ttft_p90_s == pytest.approx(p90_s, rel=0.05)
    assert found.accuracy.promised is None
    assert found.accuracy.note is not None
    assert "trace" in found.accuracy.note


@pytest.mark.parametrize(
    ("settings_given", "said"),
    [
        (
            ["workload.arrivals='on_off'", "workload.on_duration='1000h'",
             "workload.off_duration='1000h'", "workload.on_rate_multiple=1.5"],
            "2 to 300 s",
        ),
        (["link.rate='1gbit'", "load.rate_req_per_s=0.15"], "link used at"),
        (["fabric.rate='300mbit'", "load.rate_req_per_s=0.5"], "fabric"),
        (["deployments.prfaas_pd.num_prfaas=1", "load.rate_req_per_s=0.5"], "1 prefill instances"),
        (["workload.min_tokens=1000", "workload.max_tokens=1000"], "squared coefficient"),
        (["workload.cv=5"], "CV 5"),
    ],
    ids=["slow bursts", "narrow link", "narrow fabric", "one instance", "one length", "cv 5"],
)  # fmt: skip
def test_no_accuracy_is_claimed_where_none_was_measured(
    settings_given: list[str], said: str
) -> None:
    scenario = load_scenario(PAPER, settings_given)
    deployment = scenario.deployments["prfaas_pd"]
    found = predict_ttft(scenario, deployment, scenario.load.rate_req_per_s).accuracy
    assert (found.promised, found.measured) == (None, None)
    assert found.note is not None
    assert found.note.startswith("Accuracy not measured here: ")
    assert said in found.note
    assert "within" not in found.note
