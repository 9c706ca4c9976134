"""The prefix pool against a slow one: nothing lost, states exact, nothing used is evicted."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from prefix_pool_reference import ReferencePool

from harness.architecture import load_architecture
from harness.block_keys import block_keys_of_hash_ids
from harness.prefix_pool import PoolDelta, PoolGeometry, PrefixPool
from harness.settings import PrefixCache

ROOT = Path(__file__).parent.parent
BLOCK_TOKENS, BLOCK_BYTES = 4, 10

#: Prompts that share prefixes often; a prompt's blocks are named by small numbers.
PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=10).map(tuple)


def keys_of(contents: tuple[int, ...]) -> tuple[int, ...]:
    """Chained keys of blocks with these contents."""
    return block_keys_of_hash_ids(contents, 512 * len(contents), 512)


class Pools(RuleBasedStateMachine):
    """The same calls to both pools; ``rid`` numbers are those of open leases."""

    leases = Bundle("leases")
    transfers = Bundle("transfers")

    @initialize(
        state_bytes=st.sampled_from([0, 3, 25]),
        block_bytes=st.sampled_from([0, BLOCK_BYTES]),
        checkpoint_blocks=st.integers(1, 3),
        capacity_blocks=st.integers(0, 40),
    )
    def begin(
        self, state_bytes: int, block_bytes: int, checkpoint_blocks: int, capacity_blocks: int
    ) -> None:
        geometry = PoolGeometry(
            BLOCK_TOKENS, block_bytes, state_bytes, checkpoint_blocks * BLOCK_TOKENS
        )
        self.pool = PrefixPool(geometry, capacity_blocks * max(1, block_bytes))
        self.slow = ReferencePool(geometry, capacity_blocks)
        self.count = 0
        self.inserted: set[int] = set()
        self.blocks: set[int] = set()
        self.states: set[int] = set()
        self.seq = 0

    def new(self) -> str:
        self.count += 1
        return str(self.count)

    @rule(target=leases, contents=PROMPTS, tail=st.integers(0, BLOCK_TOKENS - 1))
    def hit(self, contents: tuple[int, ...], tail: int) -> tuple[str, tuple[int, ...]]:
        keys = keys_of(contents)
        max_blocks = (len(keys) * BLOCK_TOKENS + tail - 1) // BLOCK_TOKENS
        tokens = self.pool.match(keys, max_blocks)
        assert tokens == self.slow.match(keys, max_blocks)
        assert tokens < len(keys) * BLOCK_TOKENS + tail or tokens == 0
        assert set(keys[: tokens // BLOCK_TOKENS]) <= self.inserted
        if tokens and self.pool.geometry.has_state:
            assert self.pool.has_state(keys[tokens // BLOCK_TOKENS - 1])
        rid = self.new()
        self.pool.acquire(rid, keys, tokens)
        self.slow.acquire(rid, keys, tokens)
        return rid, keys

    @rule(target=leases, contents=PROMPTS)
    def pin_the_held_run(self, contents: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        keys, rid = keys_of(contents), self.new()
        blocks = self.pool.held_blocks(keys)
        held = [("block", key) in self.slow.released for key in keys]
        assert held == [True] * blocks + [False] * (len(keys) - blocks)
        self.pool.acquire(rid, keys, blocks * BLOCK_TOKENS)
        self.slow.acquire(rid, keys, blocks * BLOCK_TOKENS)
        return rid, keys

    @rule(lease=leases, states=st.booleans(), share=st.floats(0, 1))
    def insert(self, lease: tuple[str, tuple[int, ...]], states: bool, share: float) -> None:
        rid, keys = lease
        if rid not in self.slow.leases:
            return
        tokens = self.tokens_from(rid, keys, share)
        got = self.pool.insert(rid, keys, tokens, states=states)
        assert got == self.slow.insert(rid, keys, tokens, states=states) <= tokens
        self.inserted.update(keys[: got // BLOCK_TOKENS])

    @rule(lease=leases, state=st.booleans(), share=st.floats(0, 1))
    def receive(self, lease: tuple[str, tuple[int, ...]], state: bool, share: float) -> None:
        rid, keys = lease
        if rid not in self.slow.leases:
            return
        tokens = self.tokens_from(rid, keys, share)
        got = self.pool.receive(rid, keys, tokens, state=state)
        assert got == self.slow.receive(rid, keys, tokens, state=state) <= tokens
        self.inserted.update(keys[: got // BLOCK_TOKENS])

    def tokens_from(self, rid: str, keys: tuple[int, ...], share: float) -> int:
        """A length between what the lease has and all of it, with a tail that is not full."""
        held = len(self.slow.leases[rid].keys)
        return round((held + share * (len(keys) - held)) * BLOCK_TOKENS)

    @rule(lease=consumes(leases))
    def release_or_cancel(self, lease: tuple[str, tuple[int, ...]]) -> None:
        for pool in (self.pool, self.slow):
            pool.release(lease[0])
            pool.release(lease[0])  # a cancelled request may end twice

    @rule(target=transfers, nbytes=st.integers(0, 300))
    def open_transfer(self, nbytes: int) -> str:
        rid = self.new()
        assert self.pool.open_transfer(rid, nbytes) == self.slow.open_transfer(rid, nbytes)
        return rid

    @rule(rid=consumes(transfers))
    def close_transfer(self, rid: str) -> None:
        self.pool.close_transfer(rid)
        self.slow.close_transfer(rid)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.slow.clear()

    @rule()
    def take_delta(self) -> None:
        delta = self.pool.take_delta()
        if delta is not None:
            self.apply(delta)
        seq, blocks, states = self.pool.snapshot()
        assert (seq, set(blocks), set(states)) == (self.seq, self.blocks, self.states)
        assert len(blocks) == len(self.blocks)
        assert len(states) == len(self.states)

    def apply(self, delta: PoolDelta) -> None:
        """Strictly: what is added was not there, what is removed was."""
        assert delta.seq == self.seq + 1
        self.seq = delta.seq
        for held, added, removed in (
            (self.blocks, delta.added_blocks, delta.removed_blocks),
            (self.states, delta.added_states, delta.removed_states),
        ):
            assert not held & set(added)
            assert held >= set(removed)
            assert not set(added) & set(removed)
            held.difference_update(removed)
            held.update(added)

    @invariant()
    def both_hold_the_same_and_nothing_is_lost(self) -> None:
        pool, slow = self.pool, self.slow
        _, blocks, states = pool.snapshot()
        held = {("block", key) for key in blocks} | {("state", key) for key in states}
        assert held == set(slow.released)
        assert slow.pinned() <= held, "a used block was evicted"
        assert pool.cached_blocks == slow.used()
        assert pool.pinned_blocks == slow.used(slow.pinned())
        assert pool.transfer_blocks == sum(slow.transfers.values())
        assert 0 <= pool.pinned_blocks <= pool.cached_blocks
        assert pool.free_blocks >= 0
        assert pool.free_blocks + pool.cached_blocks + pool.transfer_blocks == pool.capacity_blocks
        assert pool.busy == bool(slow.leases or slow.transfers)
        assert set(states) <= set(blocks), "a state without its block"


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(contents=st.lists(PROMPTS, min_size=1, max_size=12), capacity=st.integers(1, 30))
def test_a_pool_holds_whole_prefixes_whatever_it_evicts(
    contents: list[tuple[int, ...]], capacity: int
) -> None:
    pool = PrefixPool(PoolGeometry(BLOCK_TOKENS, 1, 2, 8), capacity)
    for number, each in enumerate(contents):
        keys = keys_of(each)
        pool.insert(str(number), keys, BLOCK_TOKENS * len(keys))
        pool.release(str(number))
        blocks = set(pool.snapshot()[1])
        for other in contents:
            held = [key in blocks for key in keys_of(other)]
            assert held == sorted(held, reverse=True)


def test_interior_states_go_first_then_the_end_of_the_chain() -> None:
    pool = PrefixPool(PoolGeometry(BLOCK_TOKENS, 1, 3, 2 * BLOCK_TOKENS), 100)
    keys = keys_of((1, 2, 3, 4, 5, 6))
    assert pool.insert("a", keys, 6 * BLOCK_TOKENS + 1) == 6 * BLOCK_TOKENS
    pool.release("a")
    assert set(pool.snapshot()[2]) == {keys[1], keys[3], keys[5]}
    gone: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    pool.take_delta()
    for free in range(86, 101):
        assert pool.open_transfer(str(free), free)
        pool.close_transfer(str(free))
        if (delta := pool.take_delta()) is not None:
            gone.append((delta.removed_states, delta.removed_blocks))
    states = [key for removed, _ in gone for key in removed]
    assert states == [keys[3], keys[1], keys[5]]
    assert [key for _, removed in gone for key in removed] == list(reversed(keys))
    assert gone[0] == ((keys[3],), ())


def test_what_left_and_came_back_between_two_deltas_has_not_changed() -> None:
    pool = PrefixPool(PoolGeometry(BLOCK_TOKENS, 1, 0, BLOCK_TOKENS), 4)
    one, other = keys_of((1, 2)), keys_of((3, 4, 5))
    pool.insert("a", one, 2 * BLOCK_TOKENS)
    pool.release("a")
    assert pool.take_delta() == PoolDelta(1, one, (), (), ())
    pool.insert("b", other, 3 * BLOCK_TOKENS)  # one[1] is evicted
    pool.release("b")
    pool.insert("c", one, 2 * BLOCK_TOKENS)  # other[2] is evicted
    assert pool.take_delta() == PoolDelta(2, other[:2], (), (), ())
    assert pool.take_delta() is None
    assert pool.snapshot() == (2, (one[0], other[0], other[1], one[1]), ())


def test_a_hot_prefix_outlives_the_cold_chains_that_are_newer() -> None:
    pool = PrefixPool(PoolGeometry(BLOCK_TOKENS, 1, 0, BLOCK_TOKENS), 8)
    hot = keys_of((9, 9, 9))
    pool.insert("hot", hot, 3 * BLOCK_TOKENS)
    pool.release("hot")
    for number in range(20):
        pool.insert(f"cold {number}", keys_of((number, 0)), 2 * BLOCK_TOKENS)
        pool.release(f"cold {number}")
        pool.acquire(f"hit {number}", hot, 3 * BLOCK_TOKENS)
        pool.release(f"hit {number}")
    assert pool.match(hot, 3) == 3 * BLOCK_TOKENS


def test_blocks_that_no_state_could_complete_are_not_kept() -> None:
    pool = PrefixPool(PoolGeometry(BLOCK_TOKENS, 1, 5, BLOCK_TOKENS), 8)
    keys = keys_of(tuple(range(6)))
    assert pool.insert("a", keys, 6 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    assert pool.match(keys, 6) == 3 * BLOCK_TOKENS
    small = PrefixPool(PoolGeometry(BLOCK_TOKENS, 1, 5, BLOCK_TOKENS), 4)
    assert small.insert("a", keys, 6 * BLOCK_TOKENS) == 0
    assert small.cached_blocks == 0


@pytest.mark.parametrize(
    ("model", "growing", "state"),
    [
        ("prfaas-1t", 17_280 * 512, 182_353_920),
        ("qwen3-235b", 98_566_144, 0),
        ("mimo-v2-flash", 11_796_480, 25_559_040),
    ],
)
def test_the_geometry_is_the_models(model: str, growing: int, state: int) -> None:
    architecture = load_architecture(ROOT / f"profiles/models/{model}.json")
    geometry = PoolGeometry.of(architecture, PrefixCache(True, 512, 4096, 2**37))
    assert geometry == PoolGeometry(512, growing, state, 4096)
    assert geometry.has_state == (state > 0)
    long_tokens = 2**20
    assert geometry.state_bytes == architecture.moved_bytes(long_tokens, long_tokens)
    assert geometry.blocks_of(state) == -(-state // growing)
