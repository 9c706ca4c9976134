"""Prompts that become shorter and more frequent: roles convert, the threshold follows."""

import json
from pathlib import Path

import numpy as np
import pytest

from harness.scenario import Scenario, load_scenario
from harness.scenario_change import with_trace
from harness.simulator import Simulation, simulate
from harness.throughput import deployment_model, solve
from harness.workload import LengthDistribution, build_schedule

SCENARIOS = Path(__file__).parent.parent / "scenarios"
SHIFT_S, END_S = 300.0, 1500.0


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Means of 27K and then 8K tokens; the second offers more than the clusters can carry."""
    rows: list[tuple[float, int]] = []
    for begin_s, end_s, mu, rate in ((0.0, SHIFT_S, 9.9, 1.9), (SHIFT_S, END_S, 8.5, 6.0)):
        settings = [f"workload.mu={mu}", f"load.rate_req_per_s={rate}"]
        settings.append(f"load.duration={end_s - begin_s}s")
        law = load_scenario(SCENARIOS / "role-shift.toml", settings)
        schedule = build_schedule(law.workload, law.load)
        rows += [(begin_s + one.planned_s, one.input_tokens) for one in schedule]
    path = tmp_path_factory.mktemp("shift") / "shift.jsonl"
    lines = [
        json.dumps({"timestamp": 1e3 * at_s, "input_length": tokens, "output_length": 1024})
        for at_s, tokens in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def of_trace(trace: Path, *settings: str) -> tuple[Scenario, Simulation]:
    scenario = with_trace(load_scenario(SCENARIOS / "role-shift.toml", settings), trace)
    schedule = build_schedule(scenario.workload, scenario.load)
    return scenario, simulate(scenario, "prfaas_pd", schedule)


def throughput(result: Simulation, start_s: float, end_s: float) -> float:
    """Requests completed a second."""
    ends_s = [row.planned_s + row.e2e_s for row in result.requests if row.e2e_s is not None]
    return sum(start_s <= at_s < end_s for at_s in ends_s) / (end_s - start_s)


def test_roles_convert_and_throughput_ends_at_the_optimum(trace: Path) -> None:
    scenario, result = of_trace(trace)
    lengths = [float(row.input_tokens) for row in result.requests if row.planned_s > SHIFT_S]
    count = len(lengths)
    law = LengthDistribution(np.array(lengths), np.ones(count), 1024.0, np.zeros(count))
    planned = scenario.deployments["prfaas_pd"]
    best = solve(scenario, planned, "exact", law)
    optimum = deployment_model(scenario, best, law).lambda_max_exact_req_per_s
    assert throughput(result, 1150, END_S) > 0.95 * optimum
    assert [one.role for one in result.roles] == ["decode", "decode"]
    assert (best.num_prefill, best.num_decode) == (1, 7)
    # Damped: what is short is looked at for three periods before each.
    assert result.roles[0].at_s > SHIFT_S + 180
    assert result.roles[1].left_s > result.roles[0].at_s + 170
    assert best.threshold_tokens is not None
    assert result.thresholds[-1].threshold_tokens == pytest.approx(best.threshold_tokens, rel=0.3)


def test_without_conversions_it_stays_at_what_the_old_plan_carries(trace: Path) -> None:
    _, result = of_trace(trace, "scheduling.role_conversion=false")
    assert result.roles == ()
    assert throughput(result, 1150, END_S) < 3.0
