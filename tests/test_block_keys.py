"""Block keys: equal exactly for equal leading blocks, of the text and of hash ids alike."""

import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from harness.block_keys import HASH_ID_TOKENS, block_keys_of_hash_ids, block_keys_of_text

#: Few values, some of them prefixes of others as text, so that prompts agree often and by halves.
IDS = st.lists(st.sampled_from([0, 1, 11, 2, 163_839]), min_size=1, max_size=40)


def text_of(ids: list[int]) -> bytes:
    return json.dumps(ids, separators=(",", ":")).encode()


def slow_keys(ids: list[int], block_tokens: int) -> tuple[int, ...]:
    keys, before = [], 0
    for first in range(0, len(ids) - block_tokens + 1, block_tokens):
        content = ",".join(map(str, ids[first : first + block_tokens])).encode()
        before = xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + content)
        keys.append(before)
    return tuple(keys)


@given(ids=IDS, block_tokens=st.integers(1, 12))
def test_keys_of_a_text_are_the_chained_hashes_of_its_full_blocks(
    ids: list[int], block_tokens: int
) -> None:
    keys = block_keys_of_text(text_of(ids), block_tokens)
    assert keys == slow_keys(ids, block_tokens)
    assert len(keys) == len(ids) // block_tokens


@given(one=IDS, other=IDS, block_tokens=st.integers(1, 6))
def test_keys_are_equal_as_far_as_the_blocks_are(
    one: list[int], other: list[int], block_tokens: int
) -> None:
    pairs = zip(
        block_keys_of_text(text_of(one), block_tokens),
        block_keys_of_text(text_of(other), block_tokens),
        strict=False,
    )
    for block, (a, b) in enumerate(pairs, start=1):
        assert (a == b) == (one[: block * block_tokens] == other[: block * block_tokens])


def test_no_full_block_no_key() -> None:
    assert block_keys_of_text(b"[1,2,3]", 4) == ()
    assert len(block_keys_of_text(b"[1,2,3,4]", 4)) == 1
    assert block_keys_of_hash_ids((), 511, 512) == ()


@pytest.mark.parametrize("block_tokens", [128, 512, 1024, 700])
def test_hash_ids_stand_for_512_tokens_whatever_the_block(block_tokens: int) -> None:
    ids, others = tuple(range(100, 120)), (*range(100, 110), *range(200, 210))
    tokens = 20 * HASH_ID_TOKENS - 3
    one = block_keys_of_hash_ids(ids, tokens, block_tokens)
    other = block_keys_of_hash_ids(others, tokens, block_tokens)
    assert len(one) == len(other) == tokens // block_tokens
    common = 10 * HASH_ID_TOKENS // block_tokens
    assert [a == b for a, b in zip(one, other, strict=True)] == [
        block < common for block in range(len(one))
    ]


def test_a_request_without_hash_ids_shares_nothing() -> None:
    own = [block_keys_of_hash_ids((), 4096, 512, index) for index in range(50)]
    assert len({key for keys in own for key in keys}) == 50 * 8
    # Blocks beyond the hash ids are the request's own as well.
    one, other = (block_keys_of_hash_ids((1, 2), 4096, 512, index) for index in (1, 2))
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
    assert len(one) == 8
