"""What every cluster's pools hold, as far as their reports have told: one lookup a block for all.

Each block key has one integer. Its bits say, from the lowest: which instances hold the block, in
which clusters any does, which instances hold a state at its end, in which clusters any does. A
prompt's keys are chained, so the blocks that one cluster holds of it are those up to the first key
whose bit it lacks; they may lie on different instances. A model with states (recurrent or
sliding-window layers) can go on from a block's end only where a state lies, so the usable hit is

    h_c = block_tokens x  max { i : c holds blocks 0 .. i-1  and, with states, a state at i }

What is known is as old as the reports, which each pool numbers. A gap in the numbers means that
something is not known: all of that pool is forgotten until a snapshot of it comes, and what is
reported meanwhile is kept and laid over the snapshot. A hit that is gone in truth costs a
recomputation by the instance, which looks for itself.

Pools that report by runs and not key by key have these bits once a run
(``harness.scheduling.cache_runs``). All of a scheduler's pools report in one way.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from harness.core import EngineError, Instance
from harness.scheduling.cache_runs import CacheRuns, Place
from harness.scheduling.events import CacheDelta, CacheSnapshot

#: Reports kept while a snapshot is awaited; beyond them another one is asked for.
MAX_PENDING = 1024


@dataclass(slots=True)
class _Source:
    """One instance's place in the integers and the last report taken of it."""

    bit: int
    cluster_bit: int
    #: Of all instances of its cluster.
    fellows: int
    place: Place
    seq: int = 0
    awaiting: bool = False
    #: Right after a snapshot reports that it contains already may still be on their way.
    after_snapshot: bool = False
    pending: list[CacheDelta] = field(default_factory=list)


class Lookup:
    """What the clusters hold of one prompt; lengths in blocks. Bits are of ``CacheIndex``."""

    __slots__ = ("_lost", "_states", "depth", "hit_blocks")

    def __init__(
        self,
        hit_blocks: list[int],
        depth: int,
        lost: list[tuple[int, int]],
        states: list[tuple[int, int]],
    ) -> None:
        #: The usable hit of each cluster, in the order of ``CacheIndex.clusters``.
        self.hit_blocks = hit_blocks
        #: Blocks until no cluster had any.
        self.depth = depth
        self._lost = lost
        self._states = states

    def holders(self, blocks: int, among: int) -> int:
        """The instances of ``among`` that hold all of the first ``blocks`` themselves."""
        if blocks > self.depth:
            return 0
        for depth, bits in self._lost:
            if depth >= blocks:
                break
            among &= ~bits
        return among

    def held_blocks(self, bit: int, at_most: int) -> int:
        """Of the first ``at_most`` blocks, how many the one instance or cluster holds from the
        first on."""
        for depth, bits in self._lost:
            if bits & bit:
                return min(depth, at_most)
        return min(self.depth, at_most)

    def state_holders(self, blocks: int, among: int) -> int:
        """The instances of ``among`` with a state at exactly ``blocks``."""
        for depth, bits in self._states:
            if depth == blocks:
                return bits & among
        return 0

    def last_state(self, bit: int, at_most: int) -> int:
        """The longest length up to ``at_most`` that the one instance can go on from by itself."""
        held = self.held_blocks(bit, at_most)
        for depth, bits in reversed(self._states):
            if depth <= held and bits & bit:
                return depth
        return 0


class CacheIndex:
    """Keys of blocks and states by instance; ``lookup`` finds the hits of all clusters at once."""

    def __init__(self, instances: Sequence[Instance], *, has_state: bool) -> None:
        self.has_state = has_state
        self.clusters = tuple(dict.fromkeys(one.cluster for one in instances))
        self.bit_of = {one.name: 1 << n for n, one in enumerate(instances)}
        self.bits_of_cluster = {
            cluster: sum(self.bit_of[one.name] for one in instances if one.cluster == cluster)
            for cluster in self.clusters
        }
        #: Of a prompt of which nobody has anything.
        self.no_hits: Mapping[str, int] = MappingProxyType(dict.fromkeys(self.clusters, 0))
        self._nothing = Lookup([0] * len(self.clusters), 0, [], [])
        self._names = tuple(one.name for one in instances)
        self._cluster_shift = len(instances)
        self._state_shift = len(instances) + len(self.clusters)
        self.bit_of_cluster = {
            cluster: 1 << (self._cluster_shift + n) for n, cluster in enumerate(self.clusters)
        }
        self._every = (1 << self._state_shift) - 1
        self._sources = {
            one.name: _Source(
                self.bit_of[one.name],
                self.bit_of_cluster[one.cluster],
                self.bits_of_cluster[one.cluster],
                Place(
                    self.bit_of[one.name],
                    self.bit_of_cluster[one.cluster],
                    self.bits_of_cluster[one.cluster],
                    self.bit_of[one.name] | self.bit_of_cluster[one.cluster],
                ),
            )
            for one in instances
        }
        self._held: dict[int, int] = {}
        self._runs: CacheRuns | None = None

    def __len__(self) -> int:
        """Keys of which any pool holds a block or a state."""
        return len(self._held) if self._runs is None else len(self._runs)

    def names(self, bits: int) -> Iterator[str]:
        """The instances whose bits are set, lowest first."""
        while bits:
            low = bits & -bits
            yield self._names[low.bit_length() - 1]
            bits ^= low

    def handle(self, event: CacheDelta | CacheSnapshot) -> bool:
        """Take a report. False: one was missed, and a snapshot of the instance is needed."""
        source = self._sources.get(event.instance)
        if source is None:
            raise EngineError(
                f"a cache report of {event.instance!r}, which is not in this deployment; it has "
                f"{', '.join(self._sources)}"
            )
        if isinstance(event, CacheSnapshot):
            return self._lay(source, event)
        if source.awaiting:
            source.pending.append(event)
            if len(source.pending) <= MAX_PENDING:
                return True
            source.pending.clear()
            return False
        if event.seq <= source.seq and source.after_snapshot:
            return True
        if event.seq != source.seq + 1:
            self._forget(source)
            source.pending.append(event)
            return False
        self._apply(source, event)
        return True

    def forget(self, instance: str) -> None:
        """Nothing is known of the instance until a snapshot comes."""
        self._forget(self._sources[instance])

    def lookup(self, keys: Sequence[int], max_blocks: int) -> Lookup:
        """What the clusters hold of the first ``max_blocks`` of a prompt with these keys."""
        held, state_shift, every = self._held, self._state_shift, self._every
        if self._runs is not None:
            if not keys or not self._runs.has(keys[0]):
                return self._nothing
            depth, lost, states = self._runs.follow(keys, min(len(keys), max_blocks), every)
            return Lookup(self._hits(lost, states), depth, lost, states)
        alive, depth = every, 0
        lost = []
        states = []
        for key in keys if len(keys) <= max_blocks else keys[:max_blocks]:
            value = held.get(key, 0)
            still = alive & value
            if still != alive:
                lost.append((depth, alive ^ still))
                alive = still
                if not still:
                    break
            depth += 1
            if value > every:
                states.append((depth, value >> state_shift))
        if alive:
            lost.append((depth, alive))
        return Lookup(self._hits(lost, states), depth, lost, states)

    def _hits(self, lost: list[tuple[int, int]], states: list[tuple[int, int]]) -> list[int]:
        shift, clusters = self._cluster_shift, len(self.clusters)
        hits = [0] * clusters
        if not self.has_state:
            for depth, bits in lost:
                for n in _ones(bits >> shift):
                    hits[n] = depth
            return hits
        # From the longest length back: a cluster's first state at or below what it holds counts.
        open_ = 0
        waiting = len(states) - 1
        for depth, bits in reversed([(0, 0), *lost]):
            while waiting >= 0 and states[waiting][0] > depth:
                at, found = states[waiting]
                for n in _ones((found >> shift) & open_):
                    hits[n] = at
                    open_ ^= 1 << n
                waiting -= 1
            open_ |= bits >> shift
        return hits

    def _lay(self, source: _Source, snapshot: CacheSnapshot) -> bool:
        pending = [delta for delta in source.pending if delta.seq > snapshot.seq]
        self._forget(source)
        if snapshot.runs or self._runs is not None:
            assert not snapshot.blocks, "pools report by runs or key by key"
            self._by_runs().add(source.place, snapshot.runs, snapshot.states)
        else:
            self._add(source, snapshot.blocks, 0)
            self._add(source, snapshot.states, self._state_shift)
        source.seq, source.awaiting, source.after_snapshot = snapshot.seq, False, True
        # A report that is missing between the snapshot and these is found as any other. The next
        # snapshot has them all; kept, those of a worker that was started again meanwhile would be
        # beyond each of its snapshots, and it would be asked without end.
        if all(self.handle(delta) for delta in pending):
            return True
        source.pending.clear()
        return False

    def _by_runs(self) -> CacheRuns:
        assert not self._held, "pools report by runs or key by key"
        if self._runs is None:
            self._runs = CacheRuns()
        return self._runs

    def _apply(self, source: _Source, delta: CacheDelta) -> None:
        source.seq, source.after_snapshot = delta.seq, False
        if delta.added_runs or delta.removed_runs or self._runs is not None:
            assert not delta.added_blocks, "pools report by runs or key by key"
            assert not delta.removed_blocks, "pools report by runs or key by key"
            runs = self._by_runs()
            if delta.removed_runs or delta.removed_states:
                runs.remove(source.place, delta.removed_runs, delta.removed_states)
            if delta.added_runs or delta.added_states:
                runs.add(source.place, delta.added_runs, delta.added_states)
            return
        self._remove(source, delta.removed_blocks, 0)
        self._remove(source, delta.removed_states, self._state_shift)
        self._add(source, delta.added_blocks, 0)
        self._add(source, delta.added_states, self._state_shift)

    def _add(self, source: _Source, keys: Collection[int], shift: int) -> None:
        held, bits = self._held, (source.bit | source.cluster_bit) << shift
        if held.keys().isdisjoint(keys):
            held.update(dict.fromkeys(keys, bits))
            return
        for key in keys:
            held[key] = held.get(key, 0) | bits

    def _remove(self, source: _Source, keys: Iterable[int], shift: int) -> None:
        held, bit, fellows = self._held, source.bit << shift, source.fellows << shift
        cluster_bit = source.cluster_bit << shift
        for key in keys:
            value = held.get(key, 0) & ~bit
            if not value & fellows:
                value &= ~cluster_bit
            if value:
                held[key] = value
            else:
                held.pop(key, None)

    def _forget(self, source: _Source) -> None:
        """Drop all entries of one instance: a walk over everything, which a gap is rare enough
        for; a set of keys for each instance would be kept on every report."""
        if self._runs is not None:
            self._runs.forget(source.place)
        shift = self._state_shift
        bits = source.bit | source.bit << shift
        found = [key for key, value in self._held.items() if value & bits]
        self._remove(source, found, 0)
        self._remove(source, found, shift)
        source.seq, source.awaiting, source.after_snapshot = 0, True, False
        source.pending.clear()


def _ones(bits: int) -> Iterator[int]:
    """The positions of the bits that are set, lowest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
