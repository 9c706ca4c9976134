"""What becomes of a scenario: replaced parts, manifest, hash, schema, records."""

import json
import tomllib
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path

import pytest
from scenario_files import PAPER, ROOT, TEXT, refusal, written

from harness.core import ScenarioError
from harness.scenario import (
    json_schema,
    load_scenario,
    scenario_hash,
    to_manifest,
)
from harness.scenario_change import with_plan, with_trace


def test_a_plan_replaces_thresholds_and_splits() -> None:
    s = load_scenario(PAPER)
    planned = with_plan(s, {"prfaas_pd": (12_000, 2, 6), "homogeneous_pd": (None, 8, 4)})
    one = planned.deployments["prfaas_pd"]
    assert (one.threshold_tokens, one.num_prefill, one.num_decode) == (12_000, 2, 6)
    assert planned.deployments["homogeneous_pd"].num_prefill == 8
    assert planned.deployments["naive_heterogeneous"] == s.deployments["naive_heterogeneous"]
    assert s.deployments["prfaas_pd"].threshold_tokens == 19_400
    assert scenario_hash(planned) != scenario_hash(s)
    for plan, words in (
        ({"prfaas": (1, 1, 1)}, "no deployment 'prfaas'"),
        ({"prfaas_pd": (None, 3, 5)}, "both clusters prefill"),
        ({"homogeneous_pd": (5, 9, 3)}, "needs a PrfaaS cluster"),
        ({"homogeneous_pd": (None, 12, 0)}, "at least one decode"),
    ):
        with pytest.raises(ScenarioError, match=words):
            with_plan(s, plan)


def test_a_trace_replaces_workload_and_load(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": %d, "output_length": 50, "hash_ids": [1]}\n'
    path = written(tmp_path, "".join(line % (3000 * i, 900 + i) for i in range(20)), "t.jsonl")
    traced = with_trace(load_scenario(PAPER), path, 30.0)
    assert traced.workload.trace == path
    assert (traced.workload.mu, traced.workload.output_tokens) == (None, 50)
    assert (traced.workload.min_tokens, traced.workload.max_tokens) == (900, 909)
    assert (traced.load.num_requests, traced.load.duration_s, traced.load.seed) == (None, 30.0, 1)
    assert traced.load.rate_req_per_s == pytest.approx(10 / 30)


def test_a_file_may_name_its_trace(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 900, "output_length": 50}\n'
    written(tmp_path, line, "t.jsonl")
    start, end = TEXT.index("[workload]"), TEXT.index("[slo]")
    tables = '[workload]\ntrace = "t.jsonl"\nrate_scale = 2.0\n[load]\nseed = 4\n'
    path = written(tmp_path, TEXT[:start] + tables + TEXT[end:])
    s = load_scenario(path)
    assert s.workload.trace == tmp_path / "t.jsonl"
    assert s.load.rate_req_per_s == pytest.approx(2 / 3)
    assert "'load.rate_req_per_s'" in refusal(path, "load.rate_req_per_s=1")
    assert "'workload.mu'" in refusal(path, "workload.mu=1.0")


def test_the_manifest_is_json_with_units_in_its_names() -> None:
    manifest = to_manifest(load_scenario(PAPER))
    again = json.loads(json.dumps(manifest, allow_nan=False))
    assert again == manifest
    assert again["link"]["far_to_near"]["rate_bytes_per_s"] == 12.5e9
    assert again["slo"] == {"tpot_s": 0.025, "ttft_s": None}
    point = again["hardware"]["h20"]["profile"]["prefill_points"][0]
    assert point["provenance"] == "stand_in"
    assert not [key for key in again["model"]["architecture"] if key.startswith("_")]


def test_the_hash_is_of_contents_not_of_places(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for folder in ("profiles", "profiles/models"):
        (tmp_path / folder).mkdir()
        for source in (ROOT / folder).glob("*.json"):
            written(tmp_path / folder, source.read_text(), source.name)
    moved = written(tmp_path / "s", PAPER.read_text(), PAPER.name)
    expected = scenario_hash(load_scenario(PAPER))
    assert scenario_hash(load_scenario(moved)) == expected
    assert scenario_hash(load_scenario(moved, ["load.seed=2"])) != expected
    profile = tmp_path / "profiles" / "prfaas-1t-8xh20.json"
    profile.write_text(profile.read_text().replace("21.8", "21.9"))
    assert scenario_hash(load_scenario(moved)) != expected


def test_the_schema_knows_every_key_and_refuses_others() -> None:
    schema = json_schema()
    tables = [schema, *schema["$defs"].values()]
    assert all(table["additionalProperties"] is False for table in tables)
    document = tomllib.loads(PAPER.read_text())
    for name, table in document.items():
        if name in ("hardware", "deployments"):
            continue
        reference = schema["properties"][name]["$ref"].rpartition("/")[2]
        assert set(table) <= set(schema["$defs"][reference]["properties"])
    link = schema["$defs"]["LinkTable"]["properties"]
    assert {choice["type"] for choice in link["rtt"]["anyOf"]} == {"string", "null"}
    fabric = schema["$defs"]["FabricTable"]["properties"]["rate"]
    assert (fabric["type"], fabric["default"]) == ("string", "400gbit")
    # What stands under a key describes it, whether it is one of a table or a table.
    assert fabric["description"] == "Rate of the network inside a cluster, per sending instance."
    assert link["per_flow_cap"]["description"] == "What one connection gets at most, each way."
    assert "description" not in link["loss"]


def test_every_record_is_frozen_and_has_slots() -> None:
    s = load_scenario(PAPER)
    records = [getattr(s, field.name) for field in fields(s)]
    records = [s, *(record for record in records if is_dataclass(record))]
    assert len(records) == 18
    for record in records:
        with pytest.raises(FrozenInstanceError):
            setattr(record, fields(record)[0].name, None)
        assert not hasattr(record, "__dict__")
    assert replace(s, name="other") != s
