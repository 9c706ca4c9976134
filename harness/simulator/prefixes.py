"""The instances' prefix pools in simulation: what a request pins where, from start to end.

The same pools and the same choice of a hit as a live worker's (``harness.engine.prefixes``). A
request has of its prefill instance's pool the prefix that it starts from and room for what it
computes, then what it computed until that has been sent; of its decode instance's pool room for
what is sent, then what landed until it has been decoded. What is fetched or counted as resident is
pinned at its holder meanwhile. All of it is taken when the prefill begins, or the request waits.
"""

from collections.abc import Callable, Sequence

from harness.block_keys import block_keys_of_hash_ids, own_keys
from harness.core import Request, ScenarioError
from harness.engine.memory import Memory
from harness.engine.prefixes import Hit, Prefixes, Run
from harness.prefix_pool import PoolGeometry
from harness.scenario import Scenario
from harness.schedule import Schedule
from harness.scheduling import events as ev
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.costs import input_tokens
from harness.simulator.records import Live


class Pools:
    """Every instance's pool. ``changed`` is called with the name of a pool that may have."""

    def __init__(
        self,
        scenario: Scenario,
        config: SchedulerConfig,
        schedule: Sequence[Request],
        changed: Callable[[str], None],
    ) -> None:
        self._config = config
        self._changed = changed
        self._schedule = schedule
        architecture = scenario.model.architecture
        geometry = PoolGeometry.of(architecture, scenario.prefix_cache)
        self._block_tokens = geometry.block_tokens
        self._memories = {
            one.name: Memory(one.name, geometry, scenario.prefix_cache.memory_bytes)
            for one in config.instances
        }
        names: dict[str, dict[str, Memory]] = {}
        for one in config.instances:
            names.setdefault(one.cluster, {})[one.name] = self._memories[one.name]
        self._clusters = {
            cluster: Prefixes(memories, architecture, config.fabric_bytes_per_s)
            for cluster, memories in names.items()
        }
        self._cluster_of = {one.name: self._clusters[one.cluster] for one in config.instances}
        self._check_size(int(input_tokens(schedule).max()), geometry)

    def _check_size(self, longest_tokens: int, geometry: PoolGeometry) -> None:
        """A prompt must fit beside the state that it starts from: else it would wait for ever."""
        whole = geometry.blocks_of(self._config.moved_bytes(longest_tokens, 0))
        most = whole + geometry.blocks_of(geometry.state_bytes) + 1
        has = next(iter(self._memories.values())).pool.capacity_blocks
        if most > has:
            raise ScenarioError(
                f"'prefix_cache.memory' holds {has} blocks of {geometry.block_tokens} tokens, but "
                f"a prompt of {longest_tokens} tokens that goes on from a cached one takes {most}; "
                "give it more."
            )

    def keys(self, number: int, tokens: int) -> Sequence[int]:
        """Of the request in this place of the schedule, which has so many tokens."""
        schedule = self._schedule
        if isinstance(schedule, Schedule) and schedule.chains is None:
            return own_keys(int(schedule.indexes[number]), tokens // self._block_tokens)
        request = schedule[number]
        if not request.hash_ids:
            return own_keys(request.index, tokens // self._block_tokens)
        return block_keys_of_hash_ids(request.hash_ids, tokens, self._block_tokens, request.index)

    def begin(self, live: Live, now_s: float) -> bool:
        """Find what there is of the prompt and take what the request needs; False, and nothing is
        taken, while there is no room. Sets what the prefill takes and what has to be sent."""
        rid, keys, tokens = live.rid, live.keys, live.input_tokens
        own, near = self._memories[live.prefill.name], self._memories[live.decode.name]
        prefill_s = self._config.prefill_s[live.prefill.hardware]
        hit = self._cluster_of[live.prefill.name].best_hit(own, keys, tokens, prefill_s)
        run = self._cluster_of[live.decode.name].longest_run(near, keys, tokens)
        self._pin(rid, keys, own, hit, run)
        moved = self._config.moved_bytes
        if not own.pool.open_transfer(rid, moved(tokens, hit.cached_tokens)):
            self._unpin(rid, own, hit, run)
            return False
        if not near.pool.open_transfer(rid, moved(tokens, run.tokens)):
            own.pool.close_transfer(rid)
            self._unpin(rid, own, hit, run)
            return False
        # Room is made by evicting.
        self._changed(own.name)
        self._changed(near.name)
        live.service_s, live.fetch_s = hit.service_s, hit.fetch_s
        live.cached_tokens, live.fetched_tokens = hit.cached_tokens, hit.fetched_tokens
        live.resident_tokens = run.tokens
        fetch_s = self._cluster_of[near.name].fetch_s(run.tokens, run.own_tokens)
        live.resident_s = now_s + fetch_s if run.tokens > run.own_tokens else 0.0
        live.holders = (hit.holder, run.holder if run.tokens else None)
        return True

    def _pin(self, rid: str, keys: Sequence[int], own: Memory, hit: Hit, run: Run) -> None:
        if hit.own_tokens:
            own.pool.acquire(rid, keys, hit.own_tokens)
        if hit.holder is not None:
            hit.holder.pool.acquire(f"{rid}/fetch", keys, hit.cached_tokens)
        if run.tokens:
            run.holder.pool.acquire(f"{rid}/resident", keys, run.tokens)

    def _unpin(self, rid: str, own: Memory, hit: Hit, run: Run) -> None:
        own.pool.release(rid)
        if hit.holder is not None:
            hit.holder.pool.release(f"{rid}/fetch")
        if run.tokens:
            run.holder.pool.release(f"{rid}/resident")

    def fetched(self, live: Live, _now_s: float) -> None:
        """The prefix that lay elsewhere has come; it is kept here too."""
        if live.gone:
            return
        rid, own = live.rid, self._memories[live.prefill.name]
        own.pool.receive(rid, live.keys, live.cached_tokens, state=True)
        self._give_back_fetch(live)
        self._changed(own.name)

    def _give_back_fetch(self, live: Live) -> None:
        holder, resident = live.holders
        if holder is not None:
            holder.pool.release(f"{live.rid}/fetch")
            live.holders = (None, resident)

    def prefilled(self, live: Live) -> None:
        """What was computed is kept; the rest of a block stays until it is sent."""
        rid, tokens = live.rid, live.input_tokens
        pool = self._memories[live.prefill.name].pool
        full = tokens // self._block_tokens * self._block_tokens
        pool.shrink_transfer(rid, self._config.moved_bytes(tokens, full))
        pool.insert(rid, live.keys, tokens)
        self._changed(live.prefill.name)

    def landed(self, live: Live) -> None:
        """All has been sent: the prefill instance keeps only its cache, the decode instance the
        full blocks, with the state where that is one of a block's end."""
        rid, tokens = live.rid, live.input_tokens
        self._leave(live.prefill.name, rid)
        near = self._memories[live.decode.name].pool
        near.close_transfer(rid)
        near.receive(rid, live.keys, tokens, state=tokens % self._block_tokens == 0)
        self._give_back_resident(live)
        self._changed(live.decode.name)

    def _give_back_resident(self, live: Live) -> None:
        fetched, holder = live.holders
        if holder is not None:
            holder.pool.release(f"{live.rid}/resident")
            live.holders = (fetched, None)

    def ended(self, live: Live) -> None:
        """Give back all that the request still has, whatever became of it."""
        if live.landed and live.holders == (None, None):
            # All but its place in the decode instance's cache was given back by then.
            self._memories[live.decode.name].pool.release(live.rid)
            return
        self._give_back_fetch(live)
        self._give_back_resident(live)
        self._leave(live.prefill.name, live.rid)
        self._leave(live.decode.name, live.rid)

    def _leave(self, name: str, rid: str) -> None:
        pool = self._memories[name].pool
        pool.close_transfer(rid)
        pool.release(rid)

    def begin_copy(self, rid: str, keys: Sequence[int], copy: ev.CopyPrefix) -> int | None:
        """Bytes to send so that the destination has the prefix; None where the source no longer
        holds it or the destination has no room, which costs a recompute."""
        source, to = self._memories[copy.source].pool, self._memories[copy.destination].pool
        blocks = copy.tokens // self._block_tokens
        if source.match(keys, blocks) != copy.tokens:
            return None
        held = min(blocks, to.held_blocks(keys)) * self._block_tokens
        nbytes = self._config.moved_bytes(copy.tokens, held)
        name = f"{rid}/copy"
        to.acquire(name, keys, held)
        if not to.open_transfer(name, nbytes):
            to.release(name)
            return None
        source.acquire(name, keys, copy.tokens)
        self._changed(copy.destination)
        return nbytes

    def end_copy(
        self, rid: str, keys: Sequence[int], copy: ev.CopyPrefix, *, arrived: bool
    ) -> None:
        """The copy has arrived, and may be evicted like all else from now on, or it never will."""
        name = f"{rid}/copy"
        self._memories[copy.source].pool.release(name)
        to = self._memories[copy.destination].pool
        to.close_transfer(name)
        if arrived:
            to.receive(name, keys, copy.tokens, state=True)
        to.release(name)
        self._changed(copy.destination)

    def lose(self, name: str) -> None:
        """The instance has died: its pool is empty, whoever had pinned something there."""
        self._memories[name].pool.lose()

    def delta(self, name: str) -> ev.CacheDelta | None:
        """What has changed in a pool since it was last asked for."""
        found = self._memories[name].pool.take_changes()
        if found is None:
            return None
        seq, changes = found
        return ev.CacheDelta(
            name,
            seq,
            (),
            (),
            changes.added_states,
            changes.removed_states,
            changes.added,
            changes.removed,
        )

    def snapshot(self, name: str) -> ev.CacheSnapshot:
        """All that a pool holds, as of its last delta."""
        seq, runs, states = self._memories[name].pool.snapshot_runs()
        return ev.CacheSnapshot(name, seq, (), states, runs)

    def check_nothing_is_left(self) -> None:
        """After the last request nothing is pinned or in transfer, and every block is accounted
        for: emptied, each pool is all free."""
        for name, memory in self._memories.items():
            pool = memory.pool
            assert not pool.busy, f"{name}: a lease or a transfer was never ended"
            assert pool.pinned_blocks == pool.transfer_blocks == 0, f"{name}: blocks are in use"
            assert 0 <= pool.cached_blocks <= pool.capacity_blocks, f"{name}: too many blocks"
            pool.clear()
            assert pool.free_blocks == pool.capacity_blocks, f"{name}: blocks were lost"
