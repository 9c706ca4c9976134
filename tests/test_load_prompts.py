"""Prompts: exact lengths, the same ids on the wire as in the list, nothing shared in front."""

import json
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.block_keys import block_keys_of_hash_ids, block_keys_of_text
from harness.load.prompts import (
    FIRST_ID,
    MAX_PROMPT_TOKENS,
    NUM_IDS,
    TOKEN_BYTES,
    PromptPool,
    PromptText,
    prompt_ids,
)
from harness.surface.generate import encode

POOL = PromptPool("salt", 3000)


def wire_ids(pool: PromptPool, index: int, num_tokens: int) -> list[int]:
    return ids_of(pool.text(index, num_tokens))


def ids_of(text: PromptText) -> list[int]:
    whole = b"".join(text.pieces())
    assert len(whole) == text.num_bytes == TOKEN_BYTES * text.num_tokens - 1
    ids: list[int] = json.loads(b"[%b]" % whole)
    return ids


@settings(deadline=None, max_examples=40)
@given(index=st.integers(0, 10**9), num_tokens=st.integers(1, 3000))
def test_the_wire_carries_the_ids_of_the_list(index: int, num_tokens: int) -> None:
    ids = wire_ids(POOL, index, num_tokens)
    assert ids == prompt_ids("salt", index, num_tokens)
    assert len(ids) == num_tokens
    assert all(FIRST_ID <= token < FIRST_ID + NUM_IDS for token in ids)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6])
def test_shortest_prompts(num_tokens: int) -> None:
    pool = PromptPool("salt", num_tokens)
    assert wire_ids(pool, 3, num_tokens) == prompt_ids("salt", 3, num_tokens)


def test_the_longest_prompt() -> None:
    pool = PromptPool("salt", MAX_PROMPT_TOKENS)
    assert wire_ids(pool, 5, MAX_PROMPT_TOKENS) == prompt_ids("salt", 5, MAX_PROMPT_TOKENS)
    assert pool.num_bytes < 7 * MAX_PROMPT_TOKENS


def test_a_prompt_does_not_depend_on_the_longest_of_its_run() -> None:
    longer = PromptPool("salt", 9000)
    assert wire_ids(POOL, 11, 3000) == wire_ids(longer, 11, 3000)


def test_no_two_prompts_of_a_run_share_a_first_token() -> None:
    firsts = {prompt_ids("salt", index, 1)[0] for index in range(NUM_IDS)}
    assert len(firsts) == NUM_IDS


def test_salts_share_no_prefix() -> None:
    prefixes = {
        tuple(prompt_ids(f"d-r{salt}", index, 4)) for salt in range(20) for index in range(500)
    }
    assert len(prefixes) == 20 * 500
    assert prompt_ids("a", 0, 500)[4:] != prompt_ids("b", 0, 500)[4:]


def test_windows_begin_in_different_places() -> None:
    bodies = {tuple(prompt_ids("salt", index, 24)[4:]) for index in range(200)}
    assert len(bodies) > 190


HASH_IDS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 2**63 - 1)), min_size=1, max_size=8
).map(tuple)


def block_ids(index: int, num_tokens: int, hash_ids: tuple[int, ...]) -> list[int]:
    return ids_of(POOL.text(index, num_tokens, hash_ids))


@settings(deadline=None, max_examples=25)
@given(index=st.integers(0, 10**9), num_tokens=st.integers(1, 3000), hash_ids=HASH_IDS)
def test_hash_ids_on_the_wire_are_those_of_the_list(
    index: int, num_tokens: int, hash_ids: tuple[int, ...]
) -> None:
    ids = block_ids(index, num_tokens, hash_ids)
    assert ids == prompt_ids("salt", index, num_tokens, hash_ids)
    assert len(ids) == num_tokens
    assert all(FIRST_ID <= token < FIRST_ID + NUM_IDS for token in ids)


@settings(deadline=None, max_examples=40)
@given(one=HASH_IDS, other=HASH_IDS, tokens=st.tuples(*[st.integers(1, 3000)] * 2))
def test_prompts_share_the_blocks_whose_hash_ids_they_share(
    one: tuple[int, ...], other: tuple[int, ...], tokens: tuple[int, int]
) -> None:
    """Block keys of the wire are equal exactly where those of the trace are."""
    pairs = [(1, tokens[0], one), (2, tokens[1], other)]
    for block_tokens in (512, 256):
        live = [block_keys_of_text(encode(block_ids(*pair)), block_tokens) for pair in pairs]
        planned = [
            block_keys_of_hash_ids(hashes, count, block_tokens, index)
            for index, count, hashes in pairs
        ]
        assert [a == b for a, b in zip(*live, strict=False)] == [
            a == b for a, b in zip(*planned, strict=False)
        ]
        assert [len(keys) for keys in live] == [len(keys) for keys in planned]


def test_blocks_of_different_salts_and_hash_ids_differ_at_once() -> None:
    other = PromptPool("other salt", 512)
    assert block_ids(0, 512, (7,)) == block_ids(9, 512, (7,))
    assert len({tuple(block_ids(0, 4, (h,))) for h in [*range(2000), 2**63 - 1]}) == 2001
    assert ids_of(other.text(0, 512, (7,)))[:4] != ids_of(POOL.text(0, 512, (7,)))[:4]


def test_blocks_are_what_the_module_says() -> None:
    """The equations at the module's head, in whole numbers and one token at a time."""
    zero = block_ids(0, 512, (0,))
    for hash_id in (1, 5, 89_999, 90_000, 2**40 + 17, 2**63 - 1):
        ids = block_ids(0, 512, (hash_id,))
        digits = [hash_id // NUM_IDS**place % NUM_IDS for place in range(4)]
        shifted = [
            (first - FIRST_ID + digit) % NUM_IDS for first, digit in zip(zero, digits, strict=False)
        ]
        assert [token - FIRST_ID for token in ids[:4]] == shifted
        assert ids[4:] != zero[4:]


def test_a_long_prompt_is_held_as_views() -> None:
    """Two hundred prompts of 128K tokens that wait to be sent: 157 MB on the wire."""
    pool = PromptPool("salt", 131_072)
    tracemalloc.start()
    waiting = [
        (text := pool.text(index, 131_072, range(index, index + 256)), text.pieces())
        for index in range(200)
    ]
    for _, pieces in waiting:
        next(pieces)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(text.num_bytes for text, _ in waiting) > 157e6
    assert held_bytes < 8e6


@pytest.mark.parametrize("num_tokens", [0, -1, MAX_PROMPT_TOKENS + 1])
def test_other_lengths_are_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match="1 to 1000000"):
        prompt_ids("salt", 0, num_tokens)
    with pytest.raises(ValueError, match="1 to 1000000"):
        POOL.text(0, num_tokens)


def test_the_plain_modules_import_neither_locust_nor_gevent() -> None:
    code = (
        "import sys, harness.load.plan, harness.load.prompts, harness.surface.sse, "
        "harness.load.completion, harness.load.spool\n"
        "sys.exit(any(name.split('.')[0] in ('locust', 'gevent') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
