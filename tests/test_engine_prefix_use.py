"""One request's use of an instance's cache: what it counts on stays until it needs it no more."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.architecture import load_architecture
from harness.block_keys import block_keys_of_hash_ids
from harness.core import EngineError
from harness.engine.decode_end import _Landing
from harness.engine.memory import Lease, Memory
from harness.engine.prefill_end import _Computing
from harness.engine.prefixes import Cache, Prefixes
from harness.prefix_pool import PoolGeometry
from harness.settings import PrefixCache

ROOT = Path(__file__).parent.parent
ARCHITECTURE = load_architecture(ROOT / "profiles/models/prfaas-1t.json")
BLOCK, HELD = 512, 4
TOKENS = 6 * BLOCK + 3
KEYS = block_keys_of_hash_ids(range(6), TOKENS, BLOCK)
GEOMETRY = PoolGeometry.of(ARCHITECTURE, PrefixCache(True, BLOCK, 8 * BLOCK, 0))


def cache_of(capacity_bytes: float) -> Cache:
    memory = Memory("p0", GEOMETRY, capacity_bytes)
    return Cache(memory, Prefixes({"p0": memory}, ARCHITECTURE, 5e10))


def full(cache: Cache) -> Lease:
    """A request that has all of the memory."""
    lease = cache.memory.lease()
    pool = cache.memory.pool
    assert lease.open(pool.capacity_blocks * GEOMETRY.block_bytes)
    return lease


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def leave(lease: Lease) -> None:
    """It ends, and leaves the first blocks of the prompt for whoever comes."""
    lease.shrink(0)
    lease.insert(KEYS, HELD * BLOCK)
    lease.end()


def test_a_prefill_keeps_the_prefix_that_it_found_after_waiting() -> None:
    async def run() -> None:
        cache = cache_of(2.0**31)
        pool = cache.memory.pool
        with ExitStack() as stack:
            computing = _Computing(cache, KEYS, TOKENS, stack, 5.0)
            other = full(cache)
            beginning = asyncio.create_task(computing.begin(lambda new, _: new / 1e4))
            await turn()
            leave(other)
            work = await beginning
            assert work.cached_tokens == HELD * BLOCK
            pool.clear()  # others evict what they may
            assert pool.match(KEYS, len(KEYS)) == HELD * BLOCK
            computing.computed()
            assert pool.match(KEYS, len(KEYS)) == 6 * BLOCK
        assert not pool.busy
        pool.clear()
        assert pool.free_blocks == pool.capacity_blocks

    asyncio.run(run())


def test_what_is_said_to_be_resident_stays_until_the_rest_has_come() -> None:
    async def run() -> None:
        cache = cache_of(2.0**31)
        pool = cache.memory.pool
        with ExitStack() as stack:
            landing = _Landing(cache, KEYS, TOKENS, stack)
            other = full(cache)
            making = asyncio.create_task(landing.make_room(5.0, 1.0))
            await turn()
            leave(other)
            await making
            assert landing.resident_tokens == HELD * BLOCK
            assert landing.fetched_mono_ns == 0
            pool.clear()
            assert pool.held_blocks(KEYS) == HELD
            landing.landed()
            pool.clear()
            assert pool.held_blocks(KEYS) == HELD
            landing.placed()
            assert pool.held_blocks(KEYS) == 6
        assert not pool.busy

    asyncio.run(run())


def test_what_can_never_fit_beside_its_own_prefix_is_refused_at_once() -> None:
    async def run() -> None:
        whole = GEOMETRY.blocks_of(ARCHITECTURE.moved_bytes(TOKENS, 0))
        cache = cache_of(whole * GEOMETRY.block_bytes)
        with cache.memory.lease() as lease:
            lease.insert(KEYS[:1], BLOCK)
        with ExitStack() as stack:
            computing = _Computing(cache, KEYS, TOKENS, stack, 3600.0)
            async with asyncio.timeout(5):
                with pytest.raises(EngineError, match=r"give prefix_cache\.memory more"):
                    await computing.begin(lambda new, _: new / 1e4)
        assert not cache.memory.pool.busy

    asyncio.run(run())
