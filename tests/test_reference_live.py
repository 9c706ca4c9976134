"""Real compute end to end: gateway, workers, KV over a shaped link; the tokens of one process."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live import Live, live

from harness.cli import main
from harness.core import ScenarioError
from harness.scenario import Scenario, load_scenario
from harness.testbed.reference import check_reference
from tests.reference_setup import Alone, Tiny

ROOT = Path(__file__).parent.parent
SCENARIO = ROOT / "scenarios/reference-tiny.toml"
OUTPUT = 6
#: On either side of the threshold, below one chunk, at its end, and of several.
LENGTHS = (90, 512, 701, 1300)


def scenario(*overrides: str) -> Scenario:
    return load_scenario(SCENARIO, overrides)


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, ...], list[int]]:
    """Prompts that are nowhere nearly tied, and what one process answers."""
    given = scenario()
    assert given.engine.reference is not None
    alone = Alone(Tiny(given.model.architecture, given.engine.reference))
    prompts = [alone.prompt(tokens, OUTPUT) for tokens in LENGTHS]
    return {prompt: alone.answer(prompt, OUTPUT)[0] for prompt in prompts}


def ask(served: Live, prompt: tuple[int, ...]) -> Any:
    body = {"input_ids": list(prompt), "sampling_params": {"max_new_tokens": OUTPUT}}
    headers = {"Authorization": f"Bearer {served.testbed.gateway_key}"}
    request = urllib.request.Request(
        f"{served.url}/generate", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [
        ("homogeneous_pd", ()),
        ("prfaas_pd", ("transport.connections=1",)),
        ("prfaas_pd", ("transport.connections=8", "transport.layerwise=false")),
        (
            "naive_heterogeneous",
            ("transport.connections=8", 'scheduling.admission="reserve_first"'),
        ),
        ("naive_heterogeneous", ("transport.connections=1", "transport.layerwise=false")),
    ],
)
def test_every_way_of_the_kv_gives_the_same_tokens(
    deployment: str,
    overrides: tuple[str, ...],
    answers: dict[tuple[int, ...], list[int]],
    tmp_path: Path,
) -> None:
    given = scenario(*overrides)
    sizes = sorted(given.model.architecture.kv_bytes(len(one)) for one in answers)
    with live(given, deployment, tmp_path) as served, ThreadPoolExecutor(len(answers)) as clients:
        told = dict(zip(answers, clients.map(lambda one: ask(served, one), answers), strict=True))
    assert {prompt: answer["output_ids"] for prompt, answer in told.items()} == answers
    received = [row["decode"]["kv_wire_bytes_received"] for row in served.rows("gateway")]
    assert sorted(received) == sizes


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("scale.time=2", "'scale.time'"),
        ("scale.bytes=10", "'scale.bytes'"),
        ('serving.decode_steps="full_batch"', "'serving.decode_steps'"),
        ("prefix_cache.enabled=true", "'scheduling.cache_copy'"),
        ("engine.context_tokens=100", "'engine.context_tokens'"),
        ("engine.page_size=64", "'engine.page_size'"),
        ('engine.compute="nowhere.json"', "'engine.compute'"),
        ('engine.model_path="m"', "'engine.compute'"),
        ("engine.prefill_slot=2", "mean 'prefill_slots'"),
    ],
)
def test_what_does_not_go_with_it_is_named(override: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        check_reference(scenario(override))


def test_keys_of_the_reference_engine_are_no_others() -> None:
    path = ROOT / "scenarios/sglang-tiny-dense.toml"
    with pytest.raises(ScenarioError, match=r"'engine\.threads'.*sglang"):
        load_scenario(path, ["engine.threads=2"])


@pytest.mark.torch
@pytest.mark.slow
def test_a_prompt_that_comes_again_is_answered_from_its_prefix(
    answers: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    """Through the gateway, which knows the pools: less is computed, less crosses, the same comes
    out."""
    given = scenario(
        "prefix_cache.enabled=true",
        "scheduling.cache_copy=false",
        "prefix_cache.block_tokens=64",
        "prefix_cache.checkpoint_tokens=128",
    )
    with live(given, "naive_heterogeneous", tmp_path) as served:
        for _ in range(2):
            for prompt, expected in answers.items():
                assert ask(served, prompt)["output_ids"] == expected
    again = served.rows("gateway")[len(answers) :]
    architecture = given.model.architecture
    for row, prompt in zip(again, answers, strict=True):
        held = (len(prompt) - 1) // 64 * 64
        assert row["decode"]["resident_tokens"] == held
        moved = architecture.moved_bytes(len(prompt), held)
        assert row["decode"]["kv_wire_bytes_received"] == moved
        assert row["prefill"]["cached_tokens"] >= held // 128 * 128


@pytest.mark.torch
@pytest.mark.slow
def test_a_bench_runs_three_deployments_that_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The main job's report and JSON. What a busy machine fails of the gates is not looked at;
    that KV or tokens differ would be."""
    flags = ["--set", "load.num_requests=8", "--runs", str(tmp_path), "--json"]
    assert main(["bench", str(SCENARIO), *flags]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert list(told["deployments"]) == ["prfaas_pd", "homogeneous_pd", "naive_heterogeneous"]
    assert [one["num_completed"] for one in told["deployments"].values()] == [8, 8, 8]
    wrong = ("other tokens", "other KV bytes", "other cached tokens", "tokens that were planned")
    assert not [why for why in told["reasons"] if any(words in why for words in wrong)]
    assert (Path(told["run_dir"]) / "report.html").is_file()
