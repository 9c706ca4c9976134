"""Copies of KV between engines: who sends what, the closed form, known models, SGLang's paths."""

from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from harness.architecture import load_architecture, paged_kv_bytes
from harness.attention import Attention, Gqa, Lightning, Linear, Mla, SlidingWindow
from harness.replication import Sharding, copies, counted_bytes, faults, replicated, sends

MODELS = Path(__file__).parents[1] / "profiles" / "models"
CASE = load_architecture(MODELS / "prfaas-1t.json")
MIMO = load_architecture(MODELS / "mimo-v2-flash.json")
KINDS: tuple[Attention, ...] = (
    Mla(512, 64),
    Gqa(1, 128, 128),
    Gqa(4, 192, 128),
    Gqa(8, 128, 128),
    SlidingWindow(8, 192, 128, 128),
    Linear("kda", 32, 128, 128, 4, 12288),
    Lightning(64, 128, 128),
)
TPS = (1, 2, 4, 8, 16)


def held(attention: Attention, ranks: int, rank: int) -> set[int]:
    """Heads of one rank as an engine deals them out: by the first query head that it serves."""
    heads = attention.heads if isinstance(attention, Linear | Lightning) else attention.kv_heads  # type: ignore[union-attr]  # no latent here
    first = rank * heads // ranks
    return set(range(first, max(first + 1, (rank + 1) * heads // ranks)))


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize(("prefill", "decode"), list(product(TPS, TPS)))
def test_every_rank_gets_what_it_holds_and_the_sum_is_the_closed_form(
    attention: Attention, prefill: int, decode: int
) -> None:
    sides = Sharding(prefill), Sharding(decode)
    moved = sends(attention, *sides)
    assert {one.decode_rank for one in moved} == set(range(decode))
    if isinstance(attention, Mla):
        assert [one.heads for one in moved] == [None] * decode
        assert copies(attention, *sides) == decode
        return
    heads = len({head for one in moved for head in one.heads or ()})
    for rank in range(decode):
        got = {head for one in moved if one.decode_rank == rank for head in one.heads or ()}
        assert got == held(attention, decode, rank)
    for one in moved:
        assert set(one.heads or ()) <= held(attention, prefill, one.prefill_rank)
    assert copies(attention, *sides) == Fraction(sum(len(m.heads or ()) for m in moved), heads)


def test_at_tp_8_the_case_study_sends_82_gigabits_a_second_and_not_13() -> None:
    long_tokens, crossing_req_per_s = 45_046, 3.25 * 0.4957
    one = replicated(CASE, long_tokens, Sharding(1), Sharding(1))
    eight = replicated(CASE, long_tokens, Sharding(8), Sharding(8))
    assert one.wire_bytes == one.geometry_bytes == CASE.kv_bytes(long_tokens)
    assert eight.copies == {"kda": 1, "mla": 8}
    # 15 MLA layers x 1,152 B a token eight times, the state of 42 KDA layers once.
    state = 42 * (4_194_304 + 147_456)
    assert eight.wire_bytes == 8 * 17_280 * long_tokens + state
    gbit_per_s = [size * crossing_req_per_s * 8e-9 for size in (one.wire_bytes, eight.wire_bytes)]
    assert gbit_per_s == [pytest.approx(12.4, abs=0.1), pytest.approx(82.6, abs=0.5)]
    # Data-parallel attention is the way out: one rank a group, one copy.
    assert replicated(CASE, long_tokens, Sharding(8), Sharding(8, dp=8)).factor == 1


def test_four_kv_heads_on_eight_ranks_cross_twice_and_in_two_groups_once() -> None:
    whole = replicated(MIMO, 32_768, Sharding(8), Sharding(8))
    assert whole.copies == {"gqa": 2, "sliding_window": 1}
    assert replicated(MIMO, 32_768, Sharding(8, 2), Sharding(8, 2)).factor == 1


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 1000, 45_046])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_unsharded_it_is_the_paged_geometry(tokens: int, page: int) -> None:
    for architecture in (CASE, MIMO):
        geometry = paged_kv_bytes(architecture, tokens, page)
        one = replicated(architecture, tokens, Sharding(), Sharding(), page)
        assert one.wire_bytes == one.geometry_bytes == geometry
        assert counted_bytes(architecture, tokens, Sharding(), Sharding(), page) == geometry


def test_rank_0_counts_what_it_holds() -> None:
    tokens = 4096
    gqa, window = 9 * 4 * 640 * tokens, 39 * 8 * 640 * 128
    assert counted_bytes(MIMO, tokens, Sharding(8), Sharding(8)) == gqa // 4 + window // 8
    mla = load_architecture(MODELS / "deepseek-v3.json")
    assert counted_bytes(mla, tokens, Sharding(8), Sharding(8)) == mla.kv_bytes(tokens)
    assert counted_bytes(mla, tokens, Sharding(2), Sharding(8)) == 4 * mla.kv_bytes(tokens)


def test_a_resident_prefix_is_left_out_of_what_grows() -> None:
    part = replicated(MIMO, 1024, Sharding(8), Sharding(8), 64, resident_tokens=512)
    assert part.geometry_bytes == MIMO.moved_bytes(1024, 512)


def test_paths_that_an_old_version_does_not_have_are_named() -> None:
    eight, four = Sharding(8), Sharding(4)
    assert not list(faults(CASE, eight, eight, "0.5.9"))
    assert not list(faults(CASE, eight, four, "0.5.23"))
    latent = " ".join(faults(CASE, eight, four, "0.5.9"))
    assert "latent of a hybrid" in latent
    assert "q, k and v" in latent
    window = list(faults(MIMO, eight, four, "0.5.9"))
    assert any("sliding window" in one for one in window)
    assert any("4 KV heads" in one for one in window)
    assert list(faults(CASE, Sharding(3), eight, None))


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="neither divides"):
        copies(Mla(512, 64), Sharding(3), Sharding(8))
    with pytest.raises(ValueError, match="cannot share 32 heads"):
        copies(Linear("kda", 32, 128, 128, 4, 12288), Sharding(64), Sharding(64))
    with pytest.raises(ValueError, match="8 ranks cannot form 3 groups"):
        Sharding(8, 3)


def test_a_kind_given_by_its_bytes_has_one_copy_on_one_rank_only() -> None:
    given = replace(MIMO, attention={})
    assert replicated(given, 1000, Sharding(8, 8), Sharding()).factor == 1
    assert counted_bytes(given, 1000, Sharding(), Sharding()) == MIMO.kv_bytes(1000)
    with pytest.raises(ValueError, match="given by its bytes"):
        replicated(given, 1000, Sharding(8), Sharding(8))
