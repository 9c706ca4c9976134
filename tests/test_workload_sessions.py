"""Sessions: prompts that grow by turns, share what they should, and come at the rate asked for."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.block_keys import HASH_ID_TOKENS, block_keys_of_hash_ids
from harness.core import Request, ScenarioError
from harness.load.prompts import prompt_ids
from harness.scenario import Scenario, load_scenario
from harness.schedule import Schedule
from harness.ttft.arrivals import workload_stream
from harness.workload import build_schedule, burstiness, length_distribution, schedule_notes
from harness.workload.sessions import session_turns

PAPER = Path(__file__).parents[1] / "scenarios" / "paper-case-study.toml"
TALK = 'workload.sessions={turns=4,think_time="20s",increment_tokens=300}'
AGENT = (
    'workload.sessions={turns=12,think_time="3s",increment_tokens=400,increment_sigma=1.0,'
    "increment_min_tokens=10,increment_max_tokens=8000,shared_tokens=2100}",
    "workload.min_tokens=4000",
    "workload.output_tokens=100",
)


def loaded(*overrides: str) -> tuple[Scenario, Schedule]:
    scenario = load_scenario(PAPER, overrides)
    return scenario, build_schedule(scenario.workload, scenario.load)


def by_session(rows: Schedule, shared: int = 0) -> list[list[Request]]:
    """Turns of each session in order; a session is named by the first block that is its own."""
    found = defaultdict(list)
    for row in rows:
        found[row.hash_ids[shared]].append(row)
    return list(found.values())


def test_a_turns_prompt_begins_with_the_whole_prompt_before_it_and_the_reply() -> None:
    _, rows = loaded(TALK, "load.num_requests=2000", "workload.max_tokens=60000")
    sessions = by_session(rows)
    assert max(map(len, sessions)) > 3
    grown = 0
    for turns in sessions:
        for before, after in pairwise(turns):
            grown += 1
            assert after.planned_s > before.planned_s
            assert after.input_tokens == before.input_tokens + before.output_tokens + 300
            assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids
    assert grown > 1000
    for row in rows:
        assert len(row.hash_ids) == -(-row.input_tokens // HASH_ID_TOKENS)
        assert row.cached_tokens == 0


def test_the_token_ids_themselves_begin_alike_and_no_other_sessions_do() -> None:
    _, rows = loaded(TALK, "workload.max_tokens=4000", "workload.mu=7", "load.num_requests=60")
    turns = max(by_session(rows), key=len)[:3]
    assert len(turns) == 3
    texts = [prompt_ids("salt", r.index, r.input_tokens, r.hash_ids) for r in turns]
    for row, text in zip(turns, texts, strict=True):
        assert len(text) == row.input_tokens
    for before, after in pairwise(texts):
        assert after[: len(before)] == before
    other = next(r for r in rows if r.hash_ids[0] != turns[0].hash_ids[0])
    assert prompt_ids("salt", other.index, other.input_tokens, other.hash_ids)[0] != texts[0][0]


def test_agents_share_whole_blocks_and_nothing_more() -> None:
    _, rows = loaded(*AGENT, "load.num_requests=1500")
    shared = 2100 // HASH_ID_TOKENS
    assert {row.hash_ids[:shared] for row in rows} == {tuple(range(shared))}
    sessions = by_session(rows, shared)
    owned = [set(turns[-1].hash_ids[shared:]) for turns in sessions]
    assert len(set().union(*owned)) == sum(map(len, owned)), "no own block is of two sessions"
    keys = [
        block_keys_of_hash_ids(turns[0].hash_ids, turns[0].input_tokens, 512)[: shared + 1]
        for turns in sessions
    ]
    assert len({key[:shared] for key in keys}) == 1
    assert len(set(keys)) == len(sessions)


@pytest.mark.parametrize("overrides", [(TALK,), AGENT], ids=["talk", "agent"])
def test_the_rate_is_that_of_the_load_from_the_first_second_on(overrides: tuple[str, ...]) -> None:
    scenario, _ = loaded(*overrides)
    counts = np.zeros((40, 4))
    for seed in range(40):
        load = replace(scenario.load, seed=seed, duration_s=400.0, num_requests=None)
        rows = build_schedule(scenario.workload, load)
        counts[seed] = np.histogram(rows.planned_s, bins=4, range=(0, 400))[0]
    for quarter in range(4):
        mean = counts[:, quarter].mean()
        error = counts[:, quarter].std(ddof=1) / 40**0.5
        assert abs(mean - 127) < 4.5 * error + 1.5, (quarter, mean, error)


def test_turns_and_thinking_follow_their_laws() -> None:
    fixed = TALK.replace("turns=4", 'turns=6,turns_law="fixed",think_cv=0')
    _, rows = loaded(fixed, "load.duration=2h", "workload.max_tokens=131072", "workload.mu=8")
    sessions = by_session(rows)
    whole = [s for s in sessions if s[0].planned_s > 200 and s[0].planned_s < 6800]
    assert {len(turns) for turns in whole} == {6}
    gaps = {round(b.planned_s - a.planned_s, 6) for s in sessions for a, b in pairwise(s)}
    assert gaps == {20.0}
    _, rows = loaded(TALK, "load.duration=20h", "workload.mu=8")
    whole = [s for s in by_session(rows) if 2000 < s[0].planned_s < 60_000]
    lengths = np.array([len(turns) for turns in whole])
    assert lengths.mean() == pytest.approx(4, rel=0.03)
    assert (lengths == 1).mean() == pytest.approx(1 / 4, rel=0.06)
    thought = np.array([b.planned_s - a.planned_s for s in whole for a, b in pairwise(s)])
    assert thought.mean() == pytest.approx(20, rel=0.03)
    assert thought.std() == pytest.approx(20, rel=0.05)


def test_sessions_that_a_bound_ends_are_counted_and_the_rate_is_kept() -> None:
    long = TALK.replace("increment_tokens=300", "increment_tokens=9000")
    scenario, rows = loaded(long, "workload.max_tokens=30000", "load.duration=4h")
    assert max(row.input_tokens for row in rows) <= 30_000
    assert len(rows) / 14_400 == pytest.approx(1.27, rel=0.04)
    turns = session_turns(scenario.workload, scenario.load)
    assert 0.4 < turns.cut_sessions / turns.sessions < 1
    (note,) = schedule_notes(scenario.workload, scenario.load)
    assert f"{turns.cut_sessions} of {turns.sessions} sessions" in note
    assert turns.sessions == len(by_session(rows))


def test_a_longer_run_of_sessions_begins_like_a_shorter_one() -> None:
    _, longer = loaded(*AGENT, "load.num_requests=1500")
    _, shorter = loaded(*AGENT, "load.num_requests=400")
    _, bounded = loaded(*AGENT, "load.duration=200s")
    assert longer[:400] == shorter
    assert bounded == [row for row in longer if row.planned_s < 200]


def test_the_planner_takes_sessions_as_the_schedule_has_them() -> None:
    scenario, rows = loaded(TALK)
    found = length_distribution(scenario)
    mean = np.mean([row.input_tokens for row in rows])
    assert (found.lengths * found.weights).sum() == pytest.approx(mean)
    cached = length_distribution(load_scenario(PAPER, [TALK, "prefix.model=trace"]))
    both = cached.lengths + cached.cached_tokens
    assert (both * cached.weights).sum() == pytest.approx(mean)
    assert (cached.cached_tokens * cached.weights).sum() > 0.2 * mean
    stream, _ = workload_stream(scenario)
    assert stream.rate_req_per_s == pytest.approx(1.27, rel=0.2)
    said = burstiness(scenario.workload, scenario.load, rows)
    assert said.intended_cv is None
    assert said.dispersion[0].intended is None
    assert said.dispersion[0].achieved is not None


@settings(max_examples=20, deadline=None)
@given(
    st.floats(1, 30),
    st.floats(0, 40),
    st.floats(0, 4),
    st.integers(1, 4000),
    st.integers(0, 1500),
    st.integers(0, 2**40),
    st.integers(1, 300),
)
def test_any_sessions_give_a_sound_schedule(
    turns: float, think_s: float, cv: float, more: int, shared: int, seed: int, count: int
) -> None:
    table = f"turns={turns},think_time='{think_s:.6f}s',think_cv={cv},increment_tokens={more}"
    _, rows = loaded(
        f"workload.sessions={{{table},shared_tokens={shared}}}", "workload.min_tokens=1600",
        "workload.max_tokens=40000", f"load.seed={seed}", f"load.num_requests={count}",
    )  # fmt: skip
    assert len(rows) == count
    assert (np.diff(rows.planned_s) >= 0).all()
    assert rows.planned_s[0] >= 0
    assert rows.indexes.tolist() == list(range(count))
    assert rows.input_tokens.min() >= 1600
    assert rows.input_tokens.max() <= 40_000
    assert rows.chains is not None
    assert (rows.chains.count * HASH_ID_TOKENS >= rows.input_tokens).all()
    assert ((rows.chains.count - 1) * HASH_ID_TOKENS < rows.input_tokens).all()
    for sessions in by_session(rows, shared // HASH_ID_TOKENS):
        longest = max(sessions, key=lambda one: one.input_tokens).hash_ids
        assert all(one.hash_ids == longest[: len(one.hash_ids)] for one in sessions)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((TALK, "load.concurrency=4"), ["'load.concurrency'", "open loop"]),
        ((TALK.replace("=300", "=300,shared_tokens=9000"),), ["shared_tokens'", "min_tokens"]),
        ((TALK.replace("=300", "=300,increment_sigma=1.0"),), ["increment_min_tokens' is missing"]),
        ((TALK.replace("=300", "=300,increment_max_tokens=9"),), ["increment_max_tokens'"]),
        ((TALK.replace("turns=4", 'turns=4.5,turns_law="fixed"'),), ["turns'", "whole"]),
        ((TALK.replace("turns=4", "turns=0"),), ["turns'"]),
        ((TALK.replace("20s", "8000h"),), ["workload.sessions", "4000000 are made"]),
        ((TALK.replace("turns=4,", ""),), ["'workload.sessions.turns' is missing"]),
        ((TALK.replace("increment_tok", "increment_tk"),), ["did you mean 'increment_tokens'"]),
    ],
)  # fmt: skip
def test_sessions_that_cannot_be_are_refused(overrides: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ScenarioError) as caught:
        loaded(*overrides)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
