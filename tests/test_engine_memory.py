"""Memory of an instance: who waits for room, what a lease gives back, hits across a cluster."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.architecture import load_architecture
from harness.block_keys import block_keys_of_hash_ids
from harness.core import EngineError
from harness.engine.memory import LOG_DELTAS, Lease, Memory
from harness.engine.prefixes import Prefixes
from harness.prefix_pool import PoolGeometry
from harness.settings import PrefixCache

ROOT = Path(__file__).parent.parent
ARCHITECTURE = load_architecture(ROOT / "profiles/models/prfaas-1t.json")
GEOMETRY = PoolGeometry(4, 1, 2, 8)


def memory_of(capacity_bytes: float) -> Memory:
    return Memory("p0", GEOMETRY, capacity_bytes)


def keys_of(*contents: int) -> tuple[int, ...]:
    return block_keys_of_hash_ids(contents, 512 * len(contents), 512)


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_who_waits_is_let_in_in_order() -> None:
    async def run() -> None:
        memory = memory_of(10)
        first, large, small = (memory.lease() for _ in range(3))
        assert not await first.reserve(6, 5)
        waiting = [
            asyncio.create_task(large.reserve(7, 5)),
            asyncio.create_task(small.reserve(1, 5)),
        ]
        await turn()
        # The small one would fit, and would starve the large one.
        assert [task.done() for task in waiting] == [False, False]
        assert not memory.open("another", 1)
        first.end()
        assert await asyncio.gather(*waiting) == [True, True]
        assert memory.pool.transfer_blocks == 8

    asyncio.run(run())


@pytest.mark.parametrize("how", ["cancel", "end", "timeout"])
def test_who_gives_up_waiting_leaves_the_place_to_the_next(how: str) -> None:
    async def run() -> None:
        memory = memory_of(10)
        first, large, small = (memory.lease() for _ in range(3))
        await first.reserve(6, 5)
        gone = asyncio.create_task(large.reserve(7, 0.05 if how == "timeout" else 5))
        await turn()
        next_one = asyncio.create_task(small.reserve(1, 5))
        await turn()
        if how == "cancel":
            gone.cancel()
        elif how == "end":
            large.end()
        (result,) = await asyncio.gather(gone, return_exceptions=True)
        assert isinstance(result, EngineError if how == "timeout" else asyncio.CancelledError)
        large.end()
        assert await next_one
        assert memory.pool.transfer_blocks == 7
        first.end()
        small.end()
        assert not memory.pool.busy
        assert not memory.waiting

    asyncio.run(run())


def test_a_lease_that_ends_as_it_is_let_in_takes_nothing() -> None:
    async def run() -> None:
        memory = memory_of(10)
        first, second = memory.lease(), memory.lease()
        await first.reserve(6, 5)
        waiting = asyncio.create_task(second.reserve(7, 5))
        await turn()
        first.end()  # the second has its room, and has not been told
        second.end()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        second.insert(keys_of(1, 2), 8)
        second.receive(keys_of(1, 2), 8, state=True)
        assert not memory.pool.busy
        assert memory.pool.free_blocks == 10

    asyncio.run(run())


@settings(deadline=None, max_examples=60)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["reserve", "cancel", "keep", "end"]), st.integers(0, 9)),
        max_size=60,
    ),
    capacity=st.integers(4, 20),
)
def test_nothing_is_lost_whatever_becomes_of_requests(
    actions: list[tuple[str, int]], capacity: int
) -> None:
    async def run() -> None:
        memory = memory_of(capacity)
        leases: list[tuple[Lease, asyncio.Task[bool]]] = []
        for action, number in actions:
            if action == "reserve":
                lease = memory.lease()
                reserving = asyncio.create_task(lease.reserve(min(number, capacity), 60))
                leases.append((lease, reserving))
            elif leases:
                lease, reserving = leases[number % len(leases)]
                if action == "cancel":
                    reserving.cancel()
                elif action == "end":
                    lease.end()
                elif reserving.done() and not reserving.cancelled():
                    keys = keys_of(*range(number % len(leases) % 3, 5))
                    lease.end_transfer()
                    lease.insert(keys, 4 * len(keys))
            await turn()
            pool = memory.pool
            assert pool.free_blocks + pool.cached_blocks + pool.transfer_blocks == capacity
            assert 0 <= pool.pinned_blocks <= pool.cached_blocks
        for lease, _ in leases:
            lease.end()
        await asyncio.gather(*(task for _, task in leases), return_exceptions=True)
        assert not memory.pool.busy
        assert not memory.waiting

    asyncio.run(run())


def test_every_follower_sees_the_same_deltas_and_a_slow_one_sees_a_gap() -> None:
    memory = memory_of(10_000)
    assert memory.deltas_after(None) == []
    for number in range(3):
        with memory.lease() as lease:
            lease.insert(keys_of(number), 4)
        if number != 1:
            assert [delta.seq for delta in memory.deltas_after(0)][-1] == (number + 2) // 2
    assert memory.deltas_after(0) == memory.deltas_after(0)
    assert [delta.seq for delta in memory.deltas_after(1)] == [2]
    seq, blocks, states = memory.snapshot()
    assert (seq, len(blocks), len(states)) == (2, 3, 3)
    for number in range(3, LOG_DELTAS + 9):
        with memory.lease() as lease:
            lease.insert(keys_of(number), 4)
        memory.deltas_after(None)
    assert memory.deltas_after(2)[0].seq > 3


def cluster(fabric_bytes_per_s: float) -> tuple[Prefixes, Memory, Memory]:
    geometry = PoolGeometry.of(ARCHITECTURE, PrefixCache(True, 512, 4096, 0))
    one, other = Memory("p0", geometry, 2**37), Memory("p1", geometry, 2**37)
    memories = {"p0": one, "p1": other}
    return Prefixes(memories, ARCHITECTURE, fabric_bytes_per_s), one, other


def test_a_prefix_is_fetched_where_that_is_cheaper_than_computing_it() -> None:
    keys, tokens = keys_of(*range(16)), 16 * 512 + 3
    for fabric_bytes_per_s, fetched in ((5e10, True), (1e6, False)):
        prefixes, one, other = cluster(fabric_bytes_per_s)
        with other.lease() as lease:
            lease.insert(keys, 16 * 512)
        with one.lease() as lease:
            lease.insert(keys, 8 * 512)
        hit = prefixes.best_hit(one, keys, tokens, lambda new, _cached: new / 1e4)
        run = prefixes.longest_run(one, keys, tokens)
        assert (run.holder, run.tokens, run.own_tokens) == (other, 16 * 512, 8 * 512)
        if fetched:
            assert hit.holder is other
            assert (hit.cached_tokens, hit.own_tokens) == (16 * 512, 8 * 512)
            moved = ARCHITECTURE.moved_bytes(16 * 512, 8 * 512)
            assert hit.fetch_s == moved / fabric_bytes_per_s
            assert hit.service_s == hit.fetch_s + 3 / 1e4
        else:
            assert hit.holder is None
            assert (hit.cached_tokens, hit.own_tokens) == (8 * 512, 8 * 512)
        # At its holder it is simply there, and a prompt that ends with a block computes that.
        assert prefixes.best_hit(other, keys, tokens, lambda new, _: new / 1e4).fetch_s == 0
        at_end = prefixes.best_hit(other, keys, 16 * 512, lambda new, _: new / 1e4)
        assert at_end.cached_tokens == 8 * 512
