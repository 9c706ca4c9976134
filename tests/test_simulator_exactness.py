"""The simulator where theory is exact: mean waits, the paper's reference table, saturation.

``python -m benchmarks.simulator_exactness`` has the same cases with a million requests.
"""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator_exactness import (
    NAMES,
    QUEUES,
    REFERENCE,
    SERVICES,
    expected_wait,
    mean_wait,
)
from harness.scenario import load_scenario
from harness.simulator import simulate
from harness.throughput import deployment_model
from harness.workload import build_schedule

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"


@pytest.mark.parametrize("name", QUEUES)
def test_queues_wait_as_theory_says(name: str) -> None:
    """Pollaczek and Khinchine's formula, and Erlang's: within 2 %, or as far as chance goes in a
    run of this length."""
    servers, law = QUEUES[name]
    draw, scv = SERVICES[law]
    services_s = draw(np.random.default_rng(7), 30_000)
    found_s, error_s = mean_wait(servers, services_s, seed=1)
    expected_s = expected_wait(servers, scv)
    assert abs(found_s - expected_s) <= max(0.02 * expected_s, 4 * error_s)


# Those of CV 2 need a million requests each.
@pytest.mark.slow
@pytest.mark.parametrize(("load", "cv"), [(1.27, 1), (1.5, 1), (1.8, 1)])
def test_the_papers_case_is_the_reference_table(load: float, cv: int) -> None:
    scenario = load_scenario(
        PAPER,
        [f"load.rate_req_per_s={load}", f"workload.cv={cv}", "load.num_requests=100000"],
    )
    schedule = build_schedule(scenario.workload, scenario.load)
    tolerance = 0.03 if load < 1.8 else 0.08
    for name, (mean_s, p90_s) in zip(NAMES, REFERENCE[load, cv], strict=True):
        found = simulate(scenario, name, schedule, transfer=False, sink=lambda _rows: None)
        assert found.ttft_s.mean() == pytest.approx(mean_s, rel=tolerance)
        assert np.quantile(found.ttft_s, 0.9) == pytest.approx(p90_s, rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_at_saturation_it_carries_what_the_exact_equations_say(name: str) -> None:
    """Eq. 6 with E[T(l)], the plan fixed: no threshold that follows the queues."""
    sets = ["load.rate_req_per_s=6", "load.num_requests=9000", "scheduling.bandwidth_aware=false"]
    scenario = load_scenario(PAPER, [*sets, "scheduling.max_queue=100000"])
    schedule = build_schedule(scenario.workload, scenario.load)
    expected = deployment_model(scenario, scenario.deployments[name]).lambda_max_exact_req_per_s
    found = simulate(scenario, name, schedule, transfer=False)
    assert found.throughput_req_per_s == pytest.approx(expected, rel=0.03)
