"""Scenario files that are written: they load again, plan to the same result, and say where from."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenario_files import PAPER, ROOT, TEXT, written

from harness.core import ScenarioError
from harness.planning.plan import plan
from harness.scenario import Scenario, load_scenario, scenario_hash
from harness.scenario_text import PATHS, emit_plan, rebased, toml_text

TABLES = ROOT / "harness" / "scenario_tables"


def emitted(scenario: Scenario, settings: list[str], folder: Path, name: str = "new.toml") -> Path:
    folder.mkdir(exist_ok=True)
    target = folder / name
    emit_plan(plan(scenario), settings, target)
    return target


def test_what_is_emitted_loads_and_plans_to_the_same_result(tmp_path: Path) -> None:
    settings = ["workload.sigma=0.8", 'link.profile="cross_region_near"']
    scenario = load_scenario(PAPER, settings)
    found = plan(scenario)
    target = emitted(scenario, settings, tmp_path / "elsewhere")
    again = load_scenario(target)
    assert again.deployments == {name: one.deployment for name, one in found.solved.items()}
    twice = plan(again)
    assert {n: s.deployment for n, s in twice.solved.items()} == again.deployments
    for name, one in found.solved.items():
        assert twice.solved[name].model == one.model
    # All else is as it was: given the emitted plan, both are one scenario.
    assert again.name == scenario.name
    same = load_scenario(emitted(again, [], tmp_path / "third"))
    assert scenario_hash(same) == scenario_hash(again)


def test_splits_that_a_plan_changes_are_written(tmp_path: Path) -> None:
    # Long outputs: every PD instance decodes and the threshold goes.
    settings = ["workload.output_tokens=8192"]
    scenario = load_scenario(PAPER, settings)
    target = emitted(scenario, settings, tmp_path)
    table = tomllib.loads(target.read_text())["deployments"]["prfaas_pd"]
    solved = plan(scenario).solved["prfaas_pd"].deployment
    assert (table["num_prefill"], table["num_decode"]) == (solved.num_prefill, solved.num_decode)
    assert solved != scenario.deployments["prfaas_pd"]
    assert load_scenario(target).deployments["prfaas_pd"].num_decode == solved.num_decode


def test_comments_say_where_the_costs_are_from(tmp_path: Path) -> None:
    scenario = load_scenario(PAPER)
    lines = emitted(scenario, [], tmp_path).read_text().splitlines()
    head = lines.index("[hardware.h20]")
    assert lines[head - 2].startswith("# prfaas-1t-8xh20: sglang 0.5.9 on 8xH20; prefill points:")
    assert "stand_in" in lines[head - 2]
    carried = plan(scenario).solved["prfaas_pd"].model.lambda_max_req_per_s
    below = lines.index("[deployments.prfaas_pd]")
    assert lines[below - 1].startswith(f"# Modelled: {carried:.4g} req/s with T(E[l])")


def test_measured_profiles_that_are_set_are_named_relative_to_the_new_file(tmp_path: Path) -> None:
    content = json.loads((ROOT / "profiles/prfaas-1t-8xh20.json").read_text())
    for point in content["prefill"]["points"]:
        point["provenance"] = "measured"
    (tmp_path / "measured.json").write_text(json.dumps(content))
    settings = [f'hardware.h20.profile="{tmp_path}/measured.json"']
    target = emitted(load_scenario(PAPER, settings), settings, tmp_path / "plans")
    text = target.read_text()
    assert f'profile = "{tmp_path}/measured.json"' in text
    assert "prefill points: 6 measured" in text
    assert 'architecture = "' in text
    assert not text.partition('architecture = "')[2].startswith("../profiles")


def test_the_command_writes_a_new_file_only(tmp_path: Path) -> None:
    def prfaas(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "harness", "plan", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=ROOT,
        )

    target = tmp_path / "plan.toml"
    done = prfaas(str(PAPER), "--emit-scenario", str(target), "--json", "--set", "workload.cv=2")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert f"scenario: {target}" in done.stderr
    again = load_scenario(target)
    assert again.workload.cv == 2
    found = document["deployments"]["prfaas_pd"]["threshold_tokens"]
    assert again.deployments["prfaas_pd"].threshold_tokens == found
    refused = prfaas(str(PAPER), "--emit-scenario", str(target))
    assert refused.returncode == 2
    assert "exists" in refused.stderr


def test_every_path_of_a_scenario_is_moved_with_the_file() -> None:
    """The tables' own annotations say which keys are paths."""
    keys: set[str] = set()
    for source in TABLES.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.AnnAssign) and "PathText" in ast.unparse(node.annotation):
                assert isinstance(node.target, ast.Name)
                keys.add(node.target.id)
    assert keys == {steps[-1] for steps in PATHS}


def test_paths_mean_the_same_from_another_folder() -> None:
    document = {
        "engine": {"python": "python3", "model_path": "../model"},
        "workload": {"trace": "/data/trace.csv"},
        "hardware": {"a": {"profile": "p.json"}},
    }
    moved = rebased(document, Path("/w/scenarios"), Path("/w/runs/plans"))
    assert moved == {
        "engine": {"python": "python3", "model_path": "../../model"},
        "workload": {"trace": "/data/trace.csv"},
        "hardware": {"a": {"profile": "../../scenarios/p.json"}},
    }


SCALARS = (
    st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(SCALARS, max_size=3)
        | st.lists(st.dictionaries(KEYS, SCALARS, max_size=3), min_size=1, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_toml_that_is_written_is_read_back(document: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(document, {(): ["a comment"]})) == document


def test_a_trace_is_to_be_in_the_scenario(tmp_path: Path) -> None:
    from harness.cli import main

    words = ["plan", str(written(tmp_path, TEXT)), "--trace", "x.csv"]
    assert (
        main([*words, "--emit-scenario", str(tmp_path / "new.toml")]) == ScenarioError.exit_status
    )
    with pytest.raises(SystemExit):
        main(["plan", "--emit-scenario"])
