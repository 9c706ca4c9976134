"""The benchmark of the closed form, whose queue is the simulator's, and what is said of it."""

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from harness.scenario import load_scenario
from harness.simulator import simulate
from harness.throughput import deployment_model
from harness.ttft import Ttft, predict_ttft
from harness.ttft.accuracy import GAMMA, PROMISED
from harness.workload import build_schedule

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "scenarios" / "paper-case-study.toml"
BENCHMARK = ROOT / "benchmarks" / "queueing_accuracy.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("queueing_accuracy", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_benchmarks_queue_is_the_simulators(benchmark: ModuleType) -> None:
    """Waits for prefill to the nanosecond; decode nearly, since slots are one pool there."""
    scenario = load_scenario(PAPER, ["load.num_requests=5000", "load.rate_req_per_s=1.8"])
    schedule = build_schedule(scenario.workload, scenario.load)
    tokens = np.array([request.input_tokens for request in schedule], dtype=np.float64)
    times_s = np.array([request.planned_s for request in schedule])
    distinct, place = np.unique(tokens, return_inverse=True)
    for name, deployment in scenario.deployments.items():
        costs = benchmark.costs_of(scenario, deployment, distinct)
        costs = replace(costs, rest_s=np.zeros(len(distinct)))
        outputs = np.full(len(times_s), 1024.0)
        found_s = benchmark.simulated_ttft_s(costs, times_s, place, outputs)
        rows = simulate(scenario, name, schedule, transfer=False).requests
        assert found_s.mean() == pytest.approx(np.mean([row.ttft_s for row in rows]), rel=5e-3)
        waits_s = np.zeros(len(times_s))
        for far in (False, True):
            some = costs.crosses[place] == far
            if some.any():
                waits_s[some] = benchmark.fcfs_waits(
                    times_s[some], costs.prefill_s[place][some], costs.num_prefill[far]
                )
        assert waits_s == pytest.approx(np.array([row.prefill_queue_s for row in rows]), abs=1e-8)


def test_the_benchmark_pays_each_way_of_a_lopsided_link(benchmark: ModuleType) -> None:
    paper = load_scenario(PAPER)
    tokens = np.array([50_000.0])
    deployment = paper.deployments["naive_heterogeneous"]
    before = benchmark.costs_of(paper, deployment, tokens).rest_s
    for way, other in (("near_to_far", "far_to_near"), ("far_to_near", "near_to_far")):
        slow = replace(getattr(paper.link, way), delay_s=0.3)
        link = replace(paper.link, **{way: slow, other: getattr(paper.link, other)})
        after = benchmark.costs_of(replace(paper, link=link), deployment, tokens).rest_s
        assert after - before == pytest.approx(0.3 - 0.0004)


def test_the_benchmarks_arrivals(benchmark: ModuleType) -> None:
    times_s = benchmark.arrivals_s(2.0, None, 3.0, 200_000, 1)
    gaps = np.diff(times_s)
    assert gaps.mean() == pytest.approx(1 / 3, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.02)
    bursts_s = benchmark.arrivals_s(1.0, (2.0, 6.0, 3.0), 3.0, 200_000, 1)
    assert len(bursts_s) / bursts_s[-1] == pytest.approx(3.0, rel=0.03)
    counts = np.bincount(bursts_s.astype(int))
    assert counts.var() / counts.mean() > 3


def test_the_benchmark_prints_one_document() -> None:
    command = [sys.executable, str(BENCHMARK), "--cv", "1", "--on-off", "2,6,3"]
    command += ["--loads", "0.5", "--requests", "3000", "--seeds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    document = json.loads(done.stdout)
    assert len(document["cells"]) == 6
    assert len(document["worst"]) == 2
    for cell in document["cells"]:
        assert math.isfinite(cell["noise"])
        assert abs(cell["error"]["mean"]) < 0.3
        assert ("dispersion_rule" in cell) == (cell["on_off"] is not None)


def test_accuracy_is_what_was_measured() -> None:
    paper = load_scenario(PAPER)
    loads = list(GAMMA[1.0])
    assert all(list(table) == loads for table in GAMMA.values())
    for cv, allowed in PROMISED.items():
        for load, errors in GAMMA[cv].items():
            assert load > 0.85 or errors.mean <= allowed
    deployment = paper.deployments["homogeneous_pd"]
    most = deployment_model(paper, deployment).lambda_max_exact_req_per_s

    def at(load: float, cv: float) -> Ttft:
        scenario = load_scenario(PAPER, [f"workload.cv={cv}"])
        return predict_ttft(scenario, deployment, load * most)

    light = at(0.3, 0.7).accuracy
    assert (light.measured, light.measured_loads) == (GAMMA[1.0][0.5], (0.5, 0.5))
    light = at(0.3, 3.0).accuracy
    assert light.note is not None
    assert "at a load of 30% (the least measured, 50%)" in light.note
    assert at(0.85, 1.0).accuracy == at(0.85, 0.9).accuracy
    inside = at(0.8, 1.9).accuracy
    assert (inside.promised, inside.measured, inside.note) == (0.15, GAMMA[2.0][0.8], None)
    assert at(0.82, 1.0).accuracy.measured_loads == (0.8, 0.85)
    between = at(0.82, 1.0).accuracy.measured
    assert between is not None
    assert between.p99 == max(GAMMA[1.0][0.8].p99, GAMMA[1.0][0.85].p99)
    for load, cv in ((0.88, 1.0), (0.7, 2.5)):
        beyond = at(load, cv).accuracy
        assert beyond.promised is None
        assert beyond.measured is not None
        assert beyond.note is not None
        assert f"{beyond.measured.mean:.1%}" in beyond.note
    for load, cv in ((0.97, 1.0), (0.7, 4.0)):
        nothing = at(load, cv).accuracy
        assert (nothing.promised, nothing.measured) == (None, None)
        assert nothing.note is not None
        assert nothing.note.startswith("Accuracy not measured here")
