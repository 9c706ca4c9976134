"""Prompts as token ids of exact length: unique from the first token, or shared as a trace has it.

Ids lie in 10000..99999, so that each is five digits wide and a prompt of n tokens is 6 n - 1 bytes
of JSON whatever it says. All prompts of a run are windows of one pseudo-random text that derives
from the salt; the first ids of each are its own:

    prompt(salt, index, n) = unique(salt, index)[:n] + pool(salt)[offset : offset + n - 4]

The first id steps through all 90,000 values as the index grows, so no two of 90,000 successive
requests share even one token of prefix; the other three derive from SHA-256 of salt and index, so
prompts of different salts share none but by a chance of 1 in 90,000 for each token. The pool is
SHAKE-256 of the salt read as little-endian 32-bit words: the same on every machine, and a longer
pool begins with the shorter one, so that a prompt depends on (salt, index, n) and nothing else.

A request of a trace with hash ids has the blocks that they name, 512 tokens each, and only what
they do not cover is its own. Equal hash ids give equal blocks, others differ in the first four ids:
these are the hash id's digits to the base of 90,000, each shifted by the salt, so that every 64-bit
hash id has its own and salts differ. The rest of a block is a window of the pool:

    block(salt, h) = digits(h + shift(salt)) + pool(salt)[offset(salt, h) : ... + 508]
    offset(salt, h) = the upper 16 bits of (h + start(salt)) * 0x9E3779B97F4A7C15 mod 2^64

No prompt is ever put together: it is told in pieces, which are views of the pool and of the four
ids a block. A request of a million tokens, 6 MB on the wire, holds 50 KB while it is sent.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.block_keys import HASH_ID_TOKENS

FIRST_ID = 10_000
NUM_IDS = 90_000
#: Five digits and a comma.
TOKEN_BYTES = 6
MAX_PROMPT_TOKENS = 1_000_000

UNIQUE_TOKENS = 4
_HEAD_BYTES = UNIQUE_TOKENS * TOKEN_BYTES
#: Windows begin at one of this many places in the pool.
NUM_OFFSETS = 65_536
#: Coprime to 90,000 = 2^4 3^2 5^4, so that its multiples step through every id.
_STEP = 7_919
#: 2^64 over the golden ratio: multiplying by it spreads neighbours over the whole range.
_SPREAD = 0x9E37_79B9_7F4A_7C15
_SIXTY_FOUR_BITS = 0xFFFF_FFFF_FFFF_FFFF
_PLACES = np.array([10_000, 1_000, 100, 10, 1])
#: Ids formatted at a time, which bounds the memory that building a pool takes.
_BLOCK_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as the inside of a JSON array, in parts: each has ids of its own and a window of
    the pool behind them. ``heads`` holds the ids of all parts, ``_HEAD_BYTES`` each."""

    num_tokens: int
    heads: memoryview
    offsets: list[int]
    pool: memoryview

    @property
    def num_bytes(self) -> int:
        return TOKEN_BYTES * self.num_tokens - 1

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the prompt in order, as views."""
        left = self.num_tokens * TOKEN_BYTES
        last = len(self.offsets) - 1
        for at, offset in enumerate(self.offsets):
            num_bytes = left if at == last else HASH_ID_TOKENS * TOKEN_BYTES
            left -= num_bytes
            # Every id has a comma behind it, but for the prompt's last.
            end = num_bytes - (at == last)
            head_at = at * _HEAD_BYTES
            yield self.heads[head_at : head_at + min(_HEAD_BYTES, end)]
            if end > _HEAD_BYTES:
                first = offset * TOKEN_BYTES
                yield self.pool[first : first + end - _HEAD_BYTES]


class PromptPool:
    """The shared text for every prompt of one salt up to ``max_tokens`` long."""

    def __init__(self, salt: str, max_tokens: int) -> None:
        _check_length(max_tokens)
        self._salt = salt
        self._max_tokens = max_tokens
        shared_tokens = max_tokens - UNIQUE_TOKENS
        text = bytearray()
        if shared_tokens > 0:
            for block in _pool_blocks(salt, shared_tokens + NUM_OFFSETS):
                text += ",".join(map(str, block)).encode() + b","
        self._text = memoryview(bytes(text))

    @property
    def num_bytes(self) -> int:
        return len(self._text)

    def text(self, index: int, num_tokens: int, hash_ids: Sequence[int] = ()) -> PromptText:
        """The prompt of request ``index`` for the wire, 6 n - 1 bytes."""
        _check_length(num_tokens)
        assert num_tokens <= self._max_tokens, "the pool is built for the longest prompt"
        named = _named(num_tokens, hash_ids)
        text = b""
        offsets: list[int] = []
        if named:
            heads, offsets = _block_heads(self._salt, named)
            digits = np.full((*heads.shape, TOKEN_BYTES), ord(","), np.uint8)  # (blocks, 4, 6)
            digits[:, :, :-1] = heads[:, :, np.newaxis] // _PLACES % 10 + ord("0")
            text = digits.tobytes()
        if num_tokens > HASH_ID_TOKENS * len(named):
            unique, offset = _unique_ids(self._salt, index)
            text += b"%d,%d,%d,%d," % tuple(unique)
            offsets.append(offset)
        return PromptText(num_tokens, memoryview(text), offsets, self._text)


def prompt_ids(salt: str, index: int, num_tokens: int, hash_ids: Sequence[int] = ()) -> list[int]:
    """The ids of the prompt that ``PromptPool(salt, ...).text(...)`` writes."""
    _check_length(num_tokens)
    named = _named(num_tokens, hash_ids)
    heads: list[list[int]] = []
    offsets: list[int] = []
    if named:
        block_heads, offsets = _block_heads(salt, named)
        heads = block_heads.tolist()
    if num_tokens > HASH_ID_TOKENS * len(named):
        unique, offset = _unique_ids(salt, index)
        heads.append(unique)
        offsets.append(offset)
    last = len(offsets) - 1
    tokens = [HASH_ID_TOKENS] * last + [num_tokens - HASH_ID_TOKENS * last]
    parts = list(zip(offsets, tokens, strict=True))
    pool_tokens = max((start + count for start, count in parts if count > UNIQUE_TOKENS), default=0)
    pool = [token for block in _pool_blocks(salt, pool_tokens) for token in block]
    ids: list[int] = []
    for head, offset, count in zip(heads, offsets, tokens, strict=True):
        ids += head[:count] + pool[offset : offset + max(0, count - UNIQUE_TOKENS)]
    return ids


def _named(num_tokens: int, hash_ids: Sequence[int]) -> Sequence[int]:
    """The hash ids that a prompt of ``num_tokens`` has room for, the last perhaps in part."""
    return hash_ids[: -(-num_tokens // HASH_ID_TOKENS)]


def _block_heads(salt: str, hash_ids: Sequence[int]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """The blocks' own first ids (blocks, 4) and the offset of each block's window."""
    digest = hashlib.sha256(f"{salt}\0blocks".encode()).digest()
    *shifts, start = (
        int.from_bytes(digest[at : at + 6], "little") for at in range(0, 6 * UNIQUE_TOKENS + 6, 6)
    )
    left = np.array([hash_id & _SIXTY_FOUR_BITS for hash_id in hash_ids], np.uint64)
    offsets = (left + np.uint64(start)) * np.uint64(_SPREAD) >> np.uint64(48)
    heads = np.empty((len(hash_ids), UNIQUE_TOKENS), np.int64)
    for at, shift in enumerate(shifts):
        left, digits = np.divmod(left, np.uint64(NUM_IDS))
        heads[:, at] = FIRST_ID + (digits + np.uint64(shift % NUM_IDS)) % np.uint64(NUM_IDS)
    return heads, offsets.tolist()


def _unique_ids(salt: str, index: int) -> tuple[list[int], int]:
    """The request's own first ids and the offset of its window."""
    start = int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little")
    digest = hashlib.sha256(f"{salt}\0{index}".encode()).digest()
    words = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 32, 8)]
    ids = [FIRST_ID + (start + index * _STEP) % NUM_IDS]
    ids += [FIRST_ID + word % NUM_IDS for word in words[1:UNIQUE_TOKENS]]
    return ids, words[0] % NUM_OFFSETS


def _pool_blocks(salt: str, num_tokens: int) -> Iterator[list[int]]:
    words = array("I", hashlib.shake_256(salt.encode()).digest(4 * num_tokens))
    assert words.itemsize == 4
    if sys.byteorder == "big":
        words.byteswap()
    for at in range(0, num_tokens, _BLOCK_TOKENS):
        yield [FIRST_ID + word % NUM_IDS for word in words[at : at + _BLOCK_TOKENS]]


def _check_length(num_tokens: int) -> None:
    if not 1 <= num_tokens <= MAX_PROMPT_TOKENS:
        raise ValueError(f"a prompt has 1 to {MAX_PROMPT_TOKENS} tokens, not {num_tokens}")
