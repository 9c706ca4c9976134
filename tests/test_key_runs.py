"""Runs of keys against a table of single keys, and a cache index told by runs against one told key
by key."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.block_keys import block_keys_of_hash_ids, own_keys
from harness.core import Instance
from harness.key_runs import KeyRuns
from harness.prefix_holders import Holders
from harness.prefix_pool import PoolGeometry, PrefixPool
from harness.scheduling.cache_index import CacheIndex
from harness.scheduling.events import CacheDelta, CacheSnapshot

BLOCK_TOKENS = 4
INSTANCES = (
    Instance("prfaas-p0", "prfaas", "prefill", "fast"),
    Instance("pd-p0", "pd", "prefill", "slow"),
    Instance("pd-d0", "pd", "decode", "slow"),
)
#: Prompts that share beginnings of many lengths.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)


def keys_of(contents: tuple[int, ...]) -> tuple[int, ...]:
    return block_keys_of_hash_ids(contents, 512 * len(contents), 512)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2), PROMPTS, st.integers(0, 12)), max_size=40))
def test_runs_say_of_each_block_what_a_table_of_single_keys_says(
    steps: list[tuple[int, tuple[int, ...], int]],
) -> None:
    """Each of three holders has whole prefixes: it takes up more of a prompt, or loses the end of
    one as far as nothing else goes on from there."""
    runs, held = KeyRuns(), [set[int]() for _ in range(3)]
    prompts = [keys_of(contents) for _, contents, _ in steps]
    for (who, _, length), keys in zip(steps, prompts, strict=True):
        mine, bit, have = held[who], 1 << who, sum(key in held[who] for key in keys)
        end = min(length, len(keys))
        if have < end:
            runs.add((keys, have, end), bit)
            mine.update(keys[have:end])
        first = have
        while first > end and not goes_on(keys, first, mine - set(keys[first:]), prompts):
            first -= 1
        if first < have:
            runs.remove((keys, first, have), bit, bit)
            mine.difference_update(keys[first:have])
        for wanted in prompts:
            known = [any(key in one for one in held) for key in wanted]
            blocks = known.index(False) if False in known else len(wanted)
            bits = sum(1 << n for n in range(3) if blocks and wanted[blocks - 1] in held[n])
            assert runs.last(wanted, len(wanted)) == (blocks, bits)
        assert runs.blocks == len(set().union(*held))
    for who in range(3):
        runs.forget(1 << who, 0, 0)
    assert not runs.blocks
    assert not runs.by_first


def goes_on(
    keys: tuple[int, ...], end: int, held: set[int], prompts: list[tuple[int, ...]]
) -> bool:
    """Whether a block is held that comes right after the first ``end`` of a prompt."""
    return any(
        len(other) > end and other[end - 1] == keys[end - 1] and other[end] in held
        for other in prompts
    )


@dataclass
class Told:
    """A pool of which two indexes are told, by runs and key by key; both from twins of one pool,
    as a report is made once."""

    name: str
    by_runs: PrefixPool
    by_keys: PrefixPool
    open: list[str] = field(default_factory=list)

    def both(self) -> tuple[PrefixPool, PrefixPool]:
        return self.by_runs, self.by_keys


def tell(told: Told, runs: CacheIndex, single: CacheIndex) -> None:
    changes, delta = told.by_runs.take_changes(), told.by_keys.take_delta()
    if changes is not None:
        seq, found = changes
        assert runs.handle(
            CacheDelta(
                told.name,
                seq,
                (),
                (),
                found.added_states,
                found.removed_states,
                found.added,
                found.removed,
            )
        )
    if delta is not None:
        assert single.handle(
            CacheDelta(
                told.name,
                delta.seq,
                delta.added_blocks,
                delta.removed_blocks,
                delta.added_states,
                delta.removed_states,
            )
        )


def show(told: Told, runs: CacheIndex, single: CacheIndex) -> None:
    """Forget the instance and take a snapshot of it."""
    for index in (runs, single):
        index.forget(told.name)
    seq, spans, states = told.by_runs.snapshot_runs()
    assert runs.handle(CacheSnapshot(told.name, seq, (), states, spans))
    assert single.handle(CacheSnapshot(told.name, *told.by_keys.snapshot()))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "hit", "release", "tell", "show", "own"]),
            st.integers(0, 2),
            PROMPTS,
        ),
        max_size=60,
    ),
    st.sampled_from([0, 3]),
    st.integers(4, 40),
)
def test_an_index_told_by_runs_knows_what_one_told_key_by_key_knows(
    steps: list[tuple[str, int, tuple[int, ...]]], state_bytes: int, capacity: int
) -> None:
    geometry = PoolGeometry(BLOCK_TOKENS, 1, state_bytes, 2 * BLOCK_TOKENS)
    pools = [
        Told(one.name, PrefixPool(geometry, capacity), PrefixPool(geometry, capacity))
        for one in INSTANCES
    ]
    runs, single = (CacheIndex(INSTANCES, has_state=state_bytes > 0) for _ in range(2))
    prompts = [keys_of(contents) for _, _, contents in steps]
    for number, (action, which, contents) in enumerate(steps):
        told, rid = pools[which], str(number)
        keys: Sequence[int] = keys_of(contents)
        if action == "own":
            keys = own_keys(number, len(contents))
            prompts.append(tuple(keys))
        for pool in told.both():
            if action in ("insert", "own"):
                pool.insert(rid, keys, BLOCK_TOKENS * len(keys))
            elif action == "hit":
                pool.acquire(rid, keys, pool.match(keys, len(keys)))
            elif action == "release" and told.open:
                pool.release(told.open[0])
        if action == "release":
            del told.open[:1]
        elif action in ("insert", "hit", "own"):
            told.open.append(rid)
        elif action == "tell":
            tell(told, runs, single)
        else:
            tell(told, runs, single)
            show(told, runs, single)
        for asked in prompts:
            one, other = (index.lookup(asked, len(asked)) for index in (runs, single))
            assert one.hit_blocks == other.hit_blocks
            assert one.depth == other.depth
            for bit in (*runs.bit_of.values(), *runs.bit_of_cluster.values()):
                assert one.held_blocks(bit, len(asked)) == other.held_blocks(bit, len(asked))
                assert one.last_state(bit, len(asked)) == other.last_state(bit, len(asked))
    for told in pools:
        runs.forget(told.name)
    assert len(runs) == 0


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 2), PROMPTS, st.booleans()), max_size=40),
    st.integers(4, 30),
)
def test_holders_know_the_longest_prefix_of_all_pools(
    steps: list[tuple[int, tuple[int, ...], bool]], capacity: int
) -> None:
    geometry = PoolGeometry(BLOCK_TOKENS, 1, 2, 2 * BLOCK_TOKENS)
    pools = [PrefixPool(geometry, capacity) for _ in range(3)]
    holders = Holders()
    for pool in pools[:2]:
        pool.join(holders)
    for number, (which, contents, kept) in enumerate(steps):
        pools[which].insert(str(number), keys_of(contents), BLOCK_TOKENS * len(contents))
        if not kept:
            pools[which].release(str(number))
        if number == len(steps) // 2:
            pools[2].join(holders)  # what it holds already counts from now on
    if not steps:
        pools[2].join(holders)
    for _, contents, _ in steps:
        keys = keys_of(contents)
        held = [pool.held_blocks(keys) for pool in pools]
        assert holders.longest(keys, len(keys)) == (max(held), held.index(max(held)))
        hits = [pool.match(keys, len(keys)) // BLOCK_TOKENS for pool in pools]
        found, place = holders.match(keys, len(keys), has_state=True)
        assert (found, hits[place]) == (max(hits), max(hits))
