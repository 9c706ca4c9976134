"""The cache index against sets kept by instance, over reports with gaps, and what a lookup says."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core import EngineError, Instance
from harness.scheduling.cache_index import MAX_PENDING, CacheIndex, Lookup
from harness.scheduling.events import CacheDelta, CacheSnapshot

#: Two clusters, one of them with two instances that prefill and one that decodes.
INSTANCES = (
    Instance("prfaas-p0", "prfaas", "prefill", "fast"),
    Instance("pd-p0", "pd", "prefill", "slow"),
    Instance("pd-p1", "pd", "prefill", "slow"),
    Instance("pd-d0", "pd", "decode", "slow"),
)
NAMES = [one.name for one in INSTANCES]
KEYS = range(1, 9)


@dataclass
class Pool:
    """What one pool held after each report, and which reports the index has been told."""

    history: list[tuple[frozenset[int], frozenset[int]]] = field(
        default_factory=lambda: [(frozenset(), frozenset())]
    )
    reports: list[CacheDelta] = field(default_factory=list)
    known: int | None = 0
    meanwhile: list[int] = field(default_factory=list)

    def change(self, name: str, blocks: frozenset[int], states: frozenset[int]) -> None:
        old_blocks, old_states = self.history[-1]
        self.reports.append(
            CacheDelta(
                name,
                len(self.history),
                tuple(blocks - old_blocks),
                tuple(old_blocks - blocks),
                tuple(states - old_states),
                tuple(old_states - states),
            )
        )
        self.history.append((blocks, states))

    def told(self, seq: int) -> bool:
        """What the index must answer to a report, and what it knows afterwards."""
        if self.known is None:
            self.meanwhile.append(seq)
            return True
        if seq == self.known + 1:
            self.known = seq
            return True
        self.known, self.meanwhile = None, [seq]
        return False

    def shown(self, seq: int) -> bool:
        later, self.known, self.meanwhile = self.meanwhile, seq, []
        if all(self.told(one) for one in later if one > seq):
            return True
        self.meanwhile = []
        return False

    def belief(self) -> tuple[frozenset[int], frozenset[int]]:
        return (frozenset(), frozenset()) if self.known is None else self.history[self.known]


def usable_blocks(keys: list[int], pools: list[Pool], *, has_state: bool) -> int:
    """The longest prefix that these pools hold together, with a state at its end."""
    blocks = frozenset().union(*(pool.belief()[0] for pool in pools))
    states = frozenset().union(*(pool.belief()[1] for pool in pools))
    best = 0
    for length in range(1, len(keys) + 1):
        if keys[length - 1] not in blocks:
            break
        if not has_state or keys[length - 1] in states:
            best = length
    return best


sets = st.frozensets(st.sampled_from(KEYS))
steps = st.one_of(
    st.tuples(st.just("told"), st.sampled_from(NAMES), sets, sets),
    st.tuples(st.just("lost"), st.sampled_from(NAMES), sets, sets),
    st.tuples(st.just("shown"), st.sampled_from(NAMES), st.integers(0, 2), st.none()),
)


def check(index: CacheIndex, pools: dict[str, Pool], keys: list[int], has_state: bool) -> None:
    found = index.lookup(keys, len(keys))
    for cluster, blocks in zip(index.clusters, found.hit_blocks, strict=True):
        mine = [pools[one.name] for one in INSTANCES if one.cluster == cluster]
        assert blocks == usable_blocks(keys, mine, has_state=has_state)
    for name, pool in pools.items():
        own = usable_blocks(keys, [pool], has_state=False)
        bit = index.bit_of[name]
        assert found.held_blocks(bit, len(keys)) == own
        assert found.holders(own, bit) == bit
        assert found.holders(own + 1, bit) == 0
        assert found.last_state(bit, len(keys)) == usable_blocks(keys, [pool], has_state=True)


@settings(max_examples=120)
@given(
    st.lists(steps, max_size=40),
    st.lists(st.lists(st.sampled_from(KEYS), max_size=8), min_size=1, max_size=4),
    st.booleans(),
)
def test_it_knows_what_the_reports_said_and_no_more(
    drawn: list[tuple[str, str, object, object]], asked: list[list[int]], has_state: bool
) -> None:
    index = CacheIndex(INSTANCES, has_state=has_state)
    pools = {name: Pool() for name in NAMES}
    for step, name, one, other in drawn:
        pool = pools[name]
        if step == "shown":
            # The answer to Resync may be some reports older than what has been told meanwhile.
            if pool.known is None:
                assert isinstance(one, int)
                seq = max(0, len(pool.reports) - one)
                blocks, states = pool.history[seq]
                report = CacheSnapshot(name, seq, tuple(blocks), tuple(states))
                assert index.handle(report) == pool.shown(seq)
        else:
            assert isinstance(one, frozenset)
            assert isinstance(other, frozenset)
            pool.change(name, one, other)
            if step == "told":
                assert index.handle(pool.reports[-1]) == pool.told(len(pool.reports))
        for keys in asked:
            check(index, pools, keys, has_state)
    for name in NAMES:
        index.forget(name)
    assert len(index) == 0


def held(index: CacheIndex, name: str, seq: int, *keys: int, states: tuple[int, ...] = ()) -> None:
    assert index.handle(CacheDelta(name, seq, keys, (), states))


def hits(index: CacheIndex, found: Lookup) -> dict[str, int]:
    return dict(zip(index.clusters, found.hit_blocks, strict=True))


def test_blocks_may_lie_apart_and_the_state_counts_at_its_length_only() -> None:
    index = CacheIndex(INSTANCES, has_state=True)
    held(index, "pd-p0", 1, 1, 2)
    held(index, "pd-d0", 1, 3, 4, states=(3,))
    held(index, "prfaas-p0", 1, 1, 2, 3, 4, 5, states=(2, 5, 7))
    found = index.lookup([1, 2, 3, 4, 5, 6, 7], 7)
    assert hits(index, found) == {"prfaas": 5, "pd": 3}
    assert list(index.names(found.holders(4, index.bits_of_cluster["prfaas"]))) == ["prfaas-p0"]
    assert found.holders(3, index.bits_of_cluster["pd"]) == 0
    # One token is always computed: the caller says how many blocks may be hit.
    assert hits(index, index.lookup([1, 2, 3, 4, 5, 6, 7], 4)) == {"prfaas": 2, "pd": 3}
    # Keys are looked up as they are: that they are chained makes a block imply those before it.
    assert hits(index, index.lookup([2, 3], 2)) == {"prfaas": 1, "pd": 2}


def test_reports_from_before_a_snapshot_change_nothing_after_it() -> None:
    index = CacheIndex(INSTANCES, has_state=False)
    assert not index.handle(CacheDelta("pd-p0", 2, (1,)))
    assert index.handle(CacheSnapshot("pd-p0", 4, (1, 2, 3), ()))
    assert index.handle(CacheDelta("pd-p0", 3, (), (3,)))  # still on its way when it was taken
    assert hits(index, index.lookup([1, 2, 3], 3))["pd"] == 3
    assert index.handle(CacheDelta("pd-p0", 5, (), (3,)))
    assert hits(index, index.lookup([1, 2, 3], 3))["pd"] == 2
    assert not index.handle(CacheDelta("pd-p0", 1, (9,)))  # a pool that began anew
    assert len(index) == 0


def test_a_worker_that_was_started_again_is_not_asked_without_end() -> None:
    index = CacheIndex(INSTANCES, has_state=False)
    assert not index.handle(CacheDelta("pd-p0", 57, (1,)))
    assert index.handle(CacheDelta("pd-p0", 58, (2,)))  # and then its process ended
    assert not index.handle(CacheSnapshot("pd-p0", 3, (5,), ()))
    assert index.handle(CacheSnapshot("pd-p0", 3, (5,), ()))
    assert index.handle(CacheDelta("pd-p0", 4, (6,)))
    assert hits(index, index.lookup([5, 6], 2))["pd"] == 2


def test_a_snapshot_that_never_comes_is_asked_for_again_and_memory_is_bounded() -> None:
    index = CacheIndex(INSTANCES, has_state=False)
    index.forget("pd-p1")
    answers = [index.handle(CacheDelta("pd-p1", n, (n,))) for n in range(MAX_PENDING + 1)]
    assert answers == [True] * MAX_PENDING + [False]
    assert len(index) == 0


def test_an_instance_it_was_not_told_of_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"pd-p9.*pd-p1"):
        CacheIndex(INSTANCES, has_state=False).handle(CacheDelta("pd-p9", 1))
