"""Keys of a prompt's full blocks: two prompts have key i in common when all of their first i + 1
blocks are equal.

    key_i = xxh3_64(key_{i-1} as 8 bytes, little endian ++ content of block i),  key_{-1} = 0

The content of a block is the canonical JSON text of its ids, digits and commas without white
space. In simulation, where a prompt has no ids, it is the trace's hash ids over the block, 8 bytes
each. Only equality means anything, so that decisions made on either kind agree. A prompt of n
tokens has n // block_tokens keys; at most (n - 1) // block_tokens of them can be hit, since a
prefill computes at least one token.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

#: Tokens that one hash id of a trace stands for, as Mooncake's release has it.
HASH_ID_TOKENS = 512
_COMMA = ord(",")
_START = bytes(8)


def block_keys_of_text(text: bytes, block_tokens: int) -> tuple[int, ...]:
    """Keys of a prompt given as the canonical JSON text of its ids, ``[1,2,3]``."""
    commas = np.flatnonzero(np.frombuffer(text, np.uint8) == _COMMA)
    # A block ends before every block_tokens-th comma, and the last where the array does.
    ends: list[int] = commas[block_tokens - 1 :: block_tokens].tolist()
    if (len(commas) + 1) % block_tokens == 0:
        ends.append(len(text) - 1)
    starts = [1, *(end + 1 for end in ends)]
    view = memoryview(text)
    return _chained(view[start:end] for start, end in zip(starts, ends, strict=False))


def block_keys_of_hash_ids(
    hash_ids: Sequence[int], input_tokens: int, block_tokens: int, index: int = 0
) -> tuple[int, ...]:
    """Keys of a planned prompt by the hash ids of its trace.

    Blocks that reach beyond the hash ids share nothing: their keys count on from one of the
    request's ``index``.
    """
    contents = []
    blocks = input_tokens // block_tokens
    for first in range(0, blocks * block_tokens, block_tokens):
        last = (first + block_tokens - 1) // HASH_ID_TOKENS
        if last >= len(hash_ids):
            break
        over = hash_ids[first // HASH_ID_TOKENS : last + 1]
        contents.append(b"".join(map(_eight_bytes, over)))
    shared = _chained(contents)
    if len(shared) == blocks:
        return shared
    return shared + tuple(own_keys(index, blocks - len(shared), shared[-1] if shared else 0))


def own_keys(index: int, blocks: int, after_key: int = 0) -> range:
    """Keys of the blocks that a request has to itself, by its ``index``, behind one with
    ``after_key``: nobody else has them, so a run of whole numbers does."""
    after = after_key.to_bytes(8, "little")
    start = xxhash.xxh3_64_intdigest(after + b"own" + _eight_bytes(index))
    return range(start, start + blocks)


def _eight_bytes(number: int) -> bytes:
    return (number & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")


def _chained(contents: Iterable[bytes | memoryview]) -> tuple[int, ...]:
    keys = []
    before = _START
    for content in contents:
        key = xxhash.xxh3_64_intdigest(b"".join((before, content)))
        before = key.to_bytes(8, "little")
        keys.append(key)
    return tuple(keys)
