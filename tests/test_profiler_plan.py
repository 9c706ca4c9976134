"""Which points are measured, and in which order."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core import ScenarioError
from harness.profiler.asked import Settings, asked_cells
from harness.profiler.estimate import PILOT
from harness.profiler.plan import (
    Cell,
    decode_cells,
    doubling,
    order_of_round,
    prefill_cells,
    unfinished,
    visits_left,
)
from harness.profiler.prompts import Prompts
from harness.profiler.target import Info
from tests.worker_setup import ARCHITECTURE, ROOT


def test_lengths_double_up_to_the_limit() -> None:
    assert doubling(128, 1024) == (128, 256, 512, 1024)
    assert doubling(128, 1100) == (128, 256, 512, 1100)
    assert doubling(128, 2000) == (128, 256, 512, 1024, 2000)
    assert doubling(128, 128) == (128,)


@given(st.integers(1, 1000), st.integers(1, 2**20))
def test_doubling_covers_what_it_is_given(low: int, more: int) -> None:
    high = low + more
    lengths = doubling(low, high)
    assert (lengths[0], lengths[-1]) == (low, high)
    assert all(a < b <= 2.5 * a for a, b in pairwise(lengths))


def test_cached_prefixes_stay_inside_the_limit() -> None:
    cells = prefill_cells((128, 1024, 4096), (2048, 4000), 4096)
    assert [c.new_tokens for c in cells if c.cached_tokens == 2048] == [128, 1024]
    assert not [c for c in cells if c.cached_tokens == 4000]  # only one length fits behind it
    assert len([c for c in cells if not c.cached_tokens]) == 3


def test_a_batch_that_memory_does_not_hold_is_left_out_whole() -> None:
    kept, dropped = decode_cells((1, 4, 16), (100, 1000), 8000)
    assert {c.batch for c in kept} == {1, 4}
    assert {c.batch for c in dropped} == {16}
    assert decode_cells((1, 4), (100,), None)[1] == ()


@given(st.integers(0, 1000), st.integers(0, 50))
def test_a_round_has_every_cell_once_in_a_seeded_order(seed: int, number: int) -> None:
    cells = prefill_cells(doubling(128, 8192), (1024,), 8192)
    order = order_of_round(cells, seed, number)
    assert Counter(order) == Counter(cells)
    assert order == order_of_round(tuple(reversed(cells)), seed, number)


def test_rounds_differ_and_no_place_belongs_to_a_cell() -> None:
    cells = prefill_cells((128, 256, 512, 1024), (), 2048)
    firsts = Counter(order_of_round(cells, 1, number)[0] for number in range(400))
    assert all(60 < firsts[cell] < 140 for cell in cells)  # 100 expected, sd 8.7


def test_a_cell_is_finished_when_it_has_what_its_pilot_asked_for() -> None:
    cells = (Cell("prefill", 128), Cell("prefill", 256))
    samples = {cells[0]: [1.0, 1.001] * (PILOT // 2), cells[1]: [1.0] * 3}
    assert unfinished(cells, samples, 0.02) == (cells[1],)
    assert visits_left(cells, samples, 0.02) == PILOT - 3


def info(**changes: object) -> Info:
    base = {
        "engine": "sglang", "version": "1", "flags": {}, "limit_tokens": 8192,
        "capacity_tokens": 20_000, "max_running": 16, "page_tokens": 64, "has_cache": True,
        "model_path": None,
    }  # fmt: skip
    return Info(**(base | changes))  # type: ignore[arg-type]  # the keys are its own


SETTINGS = Settings(ROOT, ARCHITECTURE, "8xH20", 8, 0.02, 60.0, 1)


def test_what_an_engine_says_decides_the_points() -> None:
    asked = asked_cells(SETTINGS, info(), is_pair=True, from_inside=True)
    prefill = [c for c in asked.cells if c.kind == "prefill"]
    assert max(c.new_tokens + c.cached_tokens for c in prefill) <= 8191
    assert {c.cached_tokens % 64 for c in prefill} == {0}
    assert {c.cached_tokens for c in prefill} > {0}
    decode = [c for c in asked.cells if c.kind == "decode"]
    assert max(c.batch for c in decode) == 4  # 20,000 tokens at a context of 4,095
    assert any("memory holds 20,000 tokens" in note for note in asked.notes)
    roomy = asked_cells(SETTINGS, info(capacity_tokens=None), is_pair=True, from_inside=True)
    assert max(c.batch for c in roomy.cells) == 16
    kinds = {c.kind for c in asked.cells}
    assert {"prefill_under_egress", "decode_under_ingress"} <= kinds


def test_a_single_server_without_a_cache_says_what_it_leaves_out() -> None:
    asked = asked_cells(SETTINGS, info(has_cache=False), is_pair=False, from_inside=False)
    assert {c.cached_tokens for c in asked.cells} == {0}
    assert {c.kind for c in asked.cells} == {"prefill", "decode"}
    assert any("keeps no prefix" in note for note in asked.notes)
    assert any("pair" in note for note in asked.notes)


@pytest.mark.parametrize("is_pair", [True, False])
def test_fewer_than_two_lengths_are_refused_at_once(is_pair: bool) -> None:
    for lengths in ((1024,), (1024, 1024), (1024, 9000), (9000, 10_000)):
        asked = replace(SETTINGS, lengths=lengths)
        with pytest.raises(ScenarioError, match=r"--lengths .* two lengths .* 8,191 tokens"):
            asked_cells(asked, info(), is_pair=is_pair, from_inside=True)
    with pytest.raises(ScenarioError, match="up to 1 tokens"):
        asked_cells(SETTINGS, info(limit_tokens=2), is_pair=is_pair, from_inside=True)


def test_what_is_asked_for_and_cannot_be_is_a_note() -> None:
    asked = replace(SETTINGS, lengths=(512, 1024, 9000), cached=(8000,), batches=(1, 2, 64))
    got = asked_cells(asked, info(), is_pair=False, from_inside=True)
    assert {c.new_tokens for c in got.cells if c.kind == "prefill"} == {512, 1024}
    assert "prefill 9,000: not measured, the limit is 8,191 tokens" in got.notes
    assert any(note.startswith("cached prefix 8,000: not measured") for note in got.notes)
    assert any(note.startswith("decode batch 64: not measured") for note in got.notes)


def test_batches_for_want_of_a_known_limit_are_a_note() -> None:
    def notes(**changes: object) -> list[str]:
        got = asked_cells(SETTINGS, info(**changes), is_pair=False, from_inside=True)
        return [note for note in got.notes if note.startswith("decode: batches up to 16")]

    assert len(notes(max_running=None)) == 1
    assert notes(max_running=16) == []


def test_prompts_are_fresh_and_a_salt_repeats_them() -> None:
    prompts = Prompts("a", (1000, 2000))
    one, two = prompts.fresh(50), prompts.fresh(50)
    assert one.text != two.text
    assert Prompts("a", (1000, 2000)).fresh(50) == one
    assert Prompts("b", (1000, 2000)).fresh(50) != one
    both = one + two
    assert both.tokens == 100 == both.text.count(",") + 1
    assert all(1000 <= int(token) < 2000 for token in both.text.split(","))
