"""Prefix caches in simulation: what is hit, what moves, and that no block is ever lost."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core import Request, ScenarioError
from harness.scenario import Scenario, load_scenario
from harness.scenario_change import with_trace
from harness.simulator import Simulation, simulate
from harness.workload import build_schedule

SCENARIOS = Path(__file__).parent.parent / "scenarios"
#: The conversation trace of Mooncake's release, where somebody has it, or one of that kind.
TRACE = os.environ.get("PRFAAS_MOONCAKE_TRACE")
BLOCK = 512
#: A further PrfaaS cluster, whose link and the scenario's need not both fit into the PD cluster.
CLUSTER = '[{hardware="h200",num_instances=2,link_rate="20gbit"}]'


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load_scenario(SCENARIOS / "prefix-cache.toml")


def request(number: int, at_s: float, blocks: Sequence[int], tail: int = 1) -> Request:
    """A prompt of whole blocks and ``tail`` tokens more."""
    tokens = BLOCK * len(blocks) + tail
    return Request(f"{number:06d}", number, at_s, tokens, 8, tuple(blocks))


def conversations(
    path: Path, count: int = 150, turns: int = 5, seed: int = 1, gap_s: float = 40.0
) -> None:
    """A trace in Mooncake's format: conversations whose prompts each begin with the last one, all
    with a system prompt of eight blocks in common."""
    rng = np.random.default_rng(seed)
    rows, fresh = [], 1000
    for _ in range(count):
        at_s, prompt = float(rng.uniform(0, 600)), list(range(8))
        for _ in range(turns):
            more = int(rng.integers(2, 24))
            prompt = prompt + list(range(fresh, fresh + more))
            fresh += more
            tokens = BLOCK * len(prompt) - int(rng.integers(0, BLOCK - 1))
            rows.append((at_s, tokens, list(prompt)))
            at_s += float(rng.exponential(gap_s)) + 10
    lines = [
        json.dumps(
            {
                "timestamp": round(1e3 * at_s, 3),
                "input_length": tokens,
                "output_length": 300,
                "hash_ids": prompt,
            }
        )
        for at_s, tokens, prompt in sorted(rows)
    ]
    path.write_text("\n".join(lines) + "\n")


def of_trace(path: Path, *changes: str) -> Simulation:
    given = ["workload.rate_scale=1", "deployments.prfaas_pd.threshold_tokens=9000", *changes]
    base = load_scenario(SCENARIOS / "prefix-cache.toml", given)
    traced = with_trace(base, path, 1200.0 if TRACE else None)
    return simulate(traced, "prfaas_pd", build_schedule(traced.workload, traced.load))


def share(result: Simulation, name: str) -> float:
    """Of all prompt tokens."""
    total = sum(row.input_tokens for row in result.requests)
    return float(sum(getattr(row, name) for row in result.requests) / total)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if TRACE:
        return Path(TRACE)
    path = tmp_path_factory.mktemp("trace") / "conversations.jsonl"
    conversations(path)
    return path


@pytest.fixture(scope="module")
def aware(trace: Path) -> Simulation:
    return of_trace(trace, "scheduling.cache_copy=false")


def test_the_second_of_two_equal_prompts_computes_one_block_and_sends_no_growing_kv(
    scenario: Scenario,
) -> None:
    """Seven of eight blocks: the last one holds the token that is always computed."""
    blocks = range(8)
    rows = simulate(
        scenario, "prfaas_pd", [request(0, 0.0, blocks, 0), request(1, 60.0, blocks, 0)]
    ).requests
    first, second = rows
    assert (first.cached_tokens, first.resident_tokens) == (0, 0)
    # A state lies at the last full block, which is not the seventh: nothing can be started from
    # there but what a checkpoint holds, and the first one is at 4096 tokens.
    assert second.cached_tokens == 0
    assert second.resident_tokens == 7 * BLOCK
    architecture = scenario.model.architecture
    assert second.kv_bytes == architecture.moved_bytes(8 * BLOCK, 7 * BLOCK)
    assert first.kv_bytes == architecture.kv_bytes(8 * BLOCK)


def test_a_prompt_that_goes_on_is_computed_from_where_the_last_one_ended(
    scenario: Scenario,
) -> None:
    profile = scenario.hardware["h20"].profile
    rows = simulate(
        scenario, "prfaas_pd", [request(0, 0.0, range(10), 7), request(1, 60.0, range(12), 7)]
    ).requests
    assert rows[1].cached_tokens == 10 * BLOCK
    assert rows[1].prefill_s is not None
    fetched = 10 * BLOCK if rows[1].fetched_tokens else 0
    moved = scenario.model.architecture.moved_bytes
    fetch_s = moved(fetched, 0) / scenario.fabric.rate_bytes_per_s if fetched else 0.0
    computed_s = profile.prefill_s(2 * BLOCK + 7, 10 * BLOCK)
    assert rows[1].prefill_s == pytest.approx(computed_s + fetch_s)


def test_without_hash_ids_and_with_the_cache_off_nothing_changes() -> None:
    """Prompts that share nothing take the same time to the last bit, but for what is set aside."""
    base = load_scenario(SCENARIOS / "paper-case-study.toml", ["load.num_requests=400"])
    schedule = build_schedule(base.workload, base.load)
    enabled = replace(base, prefix_cache=replace(base.prefix_cache, enabled=True))
    off, on = (simulate(one, "prfaas_pd", schedule) for one in (base, enabled))
    assert [row.ttft_s for row in on.requests] == [row.ttft_s for row in off.requests]
    assert on.crossed_bytes == off.crossed_bytes


def test_a_cache_saves_prefill_and_bytes_and_placement_that_knows_of_it_more_bytes(
    trace: Path, aware: Simulation
) -> None:
    none = of_trace(trace, "prefix_cache.enabled=false")
    blind = of_trace(trace, "scheduling.cache_aware=false")
    assert share(aware, "cached_tokens") > 0.2
    assert share(none, "cached_tokens") == 0
    means = [np.mean([row.ttft_s for row in one.requests]) for one in (aware, none)]
    assert means[0] < 0.9 * means[1]
    assert aware.crossed_bytes < 0.8 * none.crossed_bytes
    assert aware.crossed_bytes < 0.97 * blind.crossed_bytes


def test_where_prefill_is_short_placement_that_knows_of_prefixes_is_faster(trace: Path) -> None:
    load = ["workload.rate_scale=1.8" if TRACE else "workload.rate_scale=3.5"]
    load.append("deployments.prfaas_pd.threshold_tokens=4500")
    blind = of_trace(trace, *load, "scheduling.cache_aware=false")
    for aware in (of_trace(trace, *load), of_trace(trace, *load, "scheduling.cache_copy=false")):
        p90_s, blind_p90_s = (
            np.quantile([row.ttft_s for row in one.requests], 0.9) for one in (aware, blind)
        )
        assert p90_s < 0.9 * blind_p90_s


def test_prefixes_are_copied_while_the_link_has_room(trace: Path, aware: Simulation) -> None:
    copying = of_trace(trace)
    assert copying.copied_bytes > 0
    assert aware.copied_bytes == 0
    assert share(copying, "cached_tokens") > share(aware, "cached_tokens")
    for changed in (
        of_trace(trace, 'link.sharing="fair"'),
        of_trace(trace, 'link.per_flow_cap="1gbit"'),
        of_trace(trace, f"deployments.prfaas_pd.more_prfaas={CLUSTER}"),
    ):
        assert changed.num_completed == len(changed.requests)
        assert 0 < changed.copied_bytes < changed.crossed_bytes
        assert share(changed, "cached_tokens") > share(aware, "cached_tokens")


def test_less_memory_holds_less_and_too_little_is_refused(trace: Path, aware: Simulation) -> None:
    small = of_trace(trace, "prefix_cache.memory='3GiB'", "scheduling.cache_copy=false")
    assert small.num_completed == len(small.requests)
    assert share(small, "cached_tokens") < 0.8 * share(aware, "cached_tokens")
    with pytest.raises(ScenarioError, match=r"'prefix_cache\.memory' holds 30 blocks"):
        of_trace(trace, "prefix_cache.memory='256MiB'")


@settings(max_examples=25)
@given(st.data())
def test_blocks_are_conserved_whatever_arrives(data: st.DataObject) -> None:
    """``Pools.check_nothing_is_left`` is asserted at the end of every simulation."""
    keys = {
        "prefix_cache.memory": ["600MiB", "1GiB"],  # room for one prompt at least
        "scheduling.cache_copy": ["true", "false"],
        "scheduling.admission": ["push_then_admit", "reserve_first"],
        "link.rate": ["1gbit", "100gbit"],
        "link.sharing": ["auto", "fair"],
        "deployments.prfaas_pd.more_prfaas": ["[]", CLUSTER],
    }
    drawn = [f"{key}={data.draw(st.sampled_from(values))}" for key, values in keys.items()]
    fixed = ["scheduling.admission_deadline=20s", "deployments.prfaas_pd.threshold_tokens=3000"]
    base = load_scenario(SCENARIOS / "prefix-cache.toml", [*drawn, *fixed])
    rows = data.draw(
        st.lists(
            st.tuples(st.floats(0, 30), st.integers(0, 3), st.integers(1, 20), st.integers(0, 600)),
            min_size=1,
            max_size=25,
        )
    )
    schedule = [
        request(number, at_s, [100 * family + k for k in range(length)], tail + 1)
        for number, (at_s, family, length, tail) in enumerate(rows)
    ]
    result = simulate(base, "prfaas_pd", schedule)
    for row in result.requests:
        assert 0 <= row.cached_tokens < row.input_tokens
        assert 0 <= row.fetched_tokens <= row.cached_tokens
        assert 0 <= row.resident_tokens < row.input_tokens
    assert result == simulate(base, "prfaas_pd", schedule)
