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
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.block_keys import HASH_ID_TOKENS

FIRST_ID = 10_000
NUM_IDS = 90_000
#: Five digits and a comma.
TOKEN_BYTES = 6
MAX_PROMPT_TOKENS = 1_000_000

UNIQUE_TOKENS = 4
#: Windows begin at one of this many places in the pool.
NUM_OFFSETS = 65_536
#: Coprime to 90,000 = 2^4 3^2 5^4, so that its multiples step through every id.
_STEP = 7_919
#: Ids formatted at a time, which bounds the memory that building a pool takes.
_BLOCK_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as the inside of a JSON array: the unique ids and a window of the shared text; of
    a prompt with hash ids all is in a window of its own."""

    head: bytes
    window: memoryview

    @property
    def num_bytes(self) -> int:
        return len(self.head) + len(self.window)


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
        """The prompt of request ``index`` for the wire; ``head + window`` is 6 n - 1 bytes."""
        _check_length(num_tokens)
        assert num_tokens <= self._max_tokens, "the pool is built for the longest prompt"
        if hash_ids:
            return PromptText(b"", self._blocks(index, num_tokens, hash_ids))
        return self._windowed(*_unique_ids(self._salt, index), num_tokens)

    def _windowed(self, unique: list[int], offset: int, num_tokens: int) -> PromptText:
        head = ",".join(map(str, unique[:num_tokens])).encode()
        shared_tokens = num_tokens - UNIQUE_TOKENS
        if shared_tokens <= 0:
            return PromptText(head, self._text[:0])
        first = offset * TOKEN_BYTES
        window = self._text[first : first + shared_tokens * TOKEN_BYTES - 1]
        return PromptText(head + b",", window)

    def _blocks(self, index: int, num_tokens: int, hash_ids: Sequence[int]) -> memoryview:
        shifts = _shifts(self._salt)
        pieces: list[bytes | memoryview] = []
        for hash_id, tokens in _parts(num_tokens, hash_ids):
            named = (
                _unique_ids(self._salt, index)
                if hash_id is None
                else _block_ids(self._salt, shifts, hash_id)
            )
            text = self._windowed(*named, tokens)
            pieces += [b",", text.head, text.window]
        return memoryview(b"".join(pieces[1:]))


def prompt_ids(salt: str, index: int, num_tokens: int, hash_ids: Sequence[int] = ()) -> list[int]:
    """The ids of the prompt that ``PromptPool(salt, ...).text(...)`` writes."""
    _check_length(num_tokens)
    shifts, own = _shifts(salt), _unique_ids(salt, index)
    pieces = [
        (*(own if hash_id is None else _block_ids(salt, shifts, hash_id)), tokens)
        for hash_id, tokens in _parts(num_tokens, hash_ids)
    ]
    reaching = [offset + tokens for _, offset, tokens in pieces if tokens > UNIQUE_TOKENS]
    pool_tokens = max(reaching, default=0)
    pool = [token for block in _pool_blocks(salt, pool_tokens) for token in block]
    ids: list[int] = []
    for unique, offset, tokens in pieces:
        ids += unique[:tokens] + pool[offset : offset + max(0, tokens - UNIQUE_TOKENS)]
    return ids


def _parts(num_tokens: int, hash_ids: Sequence[int]) -> Iterator[tuple[int | None, int]]:
    """The prompt's hash ids with the tokens of each, and last, under None, the tokens left."""
    left = num_tokens
    for hash_id in hash_ids:
        if left <= 0:
            return
        yield hash_id, min(left, HASH_ID_TOKENS)
        left -= HASH_ID_TOKENS
    if left > 0:
        yield None, left


def _shifts(salt: str) -> list[int]:
    """What the salt adds to each of a block's first ids."""
    digest = hashlib.sha256(f"{salt}\0blocks".encode()).digest()
    return [
        int.from_bytes(digest[8 * at : 8 * at + 8], "little") % NUM_IDS
        for at in range(UNIQUE_TOKENS)
    ]


def _block_ids(salt: str, shifts: list[int], hash_id: int) -> tuple[list[int], int]:
    """The block's own first ids and the offset of its window."""
    digest = hashlib.sha256(f"{salt}\0block {hash_id}".encode()).digest()
    left = hash_id & 0xFFFF_FFFF_FFFF_FFFF
    ids = []
    for shift in shifts:
        left, digit = divmod(left, NUM_IDS)
        ids.append(FIRST_ID + (digit + shift) % NUM_IDS)
    return ids, int.from_bytes(digest[:8], "little") % NUM_OFFSETS


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
