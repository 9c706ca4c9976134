"""An instance's hybrid prefix cache: KV blocks and request states in one pool of equal blocks.

What is reused of an earlier prompt is of two kinds. Full-attention KV grows with the prompt: it is
kept in blocks of ``block_tokens``, and any leading run of full blocks can be reused. The state of
linear-attention layers and sliding windows has a fixed size and belongs to one length: it can be
reused at exactly that length. So with a model that has state

    usable hit = the longest i blocks of which all are held and with a state at exactly i

and without, simply the held run. Keys are chained (``harness.block_keys``): a key stands for the
whole prefix up to its block.

Memory is counted in blocks of ``block_bytes``. A state takes ceil(state_bytes / block_bytes) of
them, a transfer (KV on its way, of any length) ceil(bytes / block_bytes) until it is closed:

    capacity = free + cached + transfer,  pinned <= cached                                [blocks]

Whoever computes from, sends or receives blocks pins them under a lease; what nobody has pinned is
evicted, least recently released first. A lease gives back its interior states first (they serve
only prompts that part ways just there), then the state at its end, then its blocks from last to
first. As a lease always pins a whole prefix, this order alone keeps two rules without any search:

    a block is evicted before the blocks in front of it, and a state before its block,

so a pool always holds whole prefixes, and the hit of several pools is the longest of theirs.

Source: the hybrid prefix-cache pool of arXiv 2604.15039, which leaves eviction open.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from harness.architecture import Architecture
from harness.key_runs import Span
from harness.prefix_holders import Holders
from harness.prefix_store import Changes, PrefixStore

#: A prompt whose window of every sliding-window layer is full.
_LONG_TOKENS = 2**31


class PoolSettings(Protocol):
    """The part of the scenario that shapes a pool."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def checkpoint_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Sizes. ``state_bytes`` 0: a model without state; ``block_bytes`` 0: one without growing KV,
    whose blocks are then counted as one byte each. ``checkpoint_tokens`` is a multiple of
    ``block_tokens``: the spacing of the states that a prefill leaves."""

    block_tokens: int
    block_bytes: int
    state_bytes: int
    checkpoint_tokens: int

    def __post_init__(self) -> None:
        assert self.block_tokens >= 1, self
        assert self.block_bytes >= 0, self
        assert self.state_bytes >= 0, self
        assert self.checkpoint_tokens >= 1, self
        assert self.checkpoint_tokens % self.block_tokens == 0, self

    @classmethod
    def of(cls, architecture: Architecture, settings: PoolSettings) -> "PoolGeometry":
        """The sizes of a model. A state is counted with its windows full."""
        state_bytes = architecture.moved_bytes(_LONG_TOKENS, _LONG_TOKENS)
        block_tokens = settings.block_tokens
        growing_bytes = architecture.kv_bytes(_LONG_TOKENS + block_tokens) - architecture.kv_bytes(
            _LONG_TOKENS
        )
        return cls(block_tokens, growing_bytes, state_bytes, settings.checkpoint_tokens)

    @property
    def has_state(self) -> bool:
        return self.state_bytes > 0

    def blocks_of(self, nbytes: int) -> int:
        """Blocks that ``nbytes`` take."""
        return -(-nbytes // max(1, self.block_bytes))


@dataclass(frozen=True, slots=True)
class PoolDelta:
    """Net change since ``seq - 1``: keys of blocks and of states."""

    seq: int
    added_blocks: tuple[int, ...]
    removed_blocks: tuple[int, ...]
    added_states: tuple[int, ...]
    removed_states: tuple[int, ...]


@dataclass(slots=True)
class _Lease:
    """What one request pins: the first blocks of a prompt, and states; the first of these are
    dearest."""

    keys: Sequence[int] = ()
    blocks: int = 0
    states: list[int] = field(default_factory=list)


class PrefixPool:
    """Metadata of one instance's memory; what is done to a prompt costs O(runs of blocks), of which
    a prompt that nobody shares is one (``harness.prefix_store``)."""

    def __init__(self, geometry: PoolGeometry, capacity_bytes: float) -> None:
        self.geometry = geometry
        self.capacity_blocks = int(capacity_bytes // max(1, geometry.block_bytes))
        self.transfer_blocks = 0
        self._state_blocks = geometry.blocks_of(geometry.state_bytes)
        self._block_tokens = geometry.block_tokens
        self._step = geometry.checkpoint_tokens // geometry.block_tokens
        self._stateful = geometry.has_state
        self._store = PrefixStore(self._state_blocks)
        self._leases: dict[str, _Lease] = {}
        self._transfers: dict[str, int] = {}  # blocks of each
        self._seq = 0

    @property
    def cached_blocks(self) -> int:
        return self._store.cached_blocks

    @property
    def pinned_blocks(self) -> int:
        return self._store.pinned_blocks

    @property
    def free_blocks(self) -> int:
        return self.capacity_blocks - self._store.cached_blocks - self.transfer_blocks

    @property
    def busy(self) -> bool:
        """Whether a lease or a transfer is open."""
        return bool(self._leases or self._transfers)

    def held_blocks(self, keys: Sequence[int], most: int | None = None) -> int:
        """Leading blocks of ``keys``, ``most`` at most, that are held, with a state or without."""
        return self._store.held(keys, len(keys) if most is None else min(most, len(keys)))

    def join(self, holders: Holders) -> None:
        """Tell ``holders`` of all that is held and what becomes of it."""
        self._store.join(holders)

    def has_state(self, key: int) -> bool:
        """Whether the state at the end of the block is held."""
        return self._store.has_state(key)

    def match(self, keys: Sequence[int], max_blocks: int) -> int:
        """Tokens of the longest usable prefix, ``max_blocks`` at most. Changes nothing."""
        blocks = self._store.held(keys, min(len(keys), max_blocks))
        if self.geometry.has_state:
            while blocks and not self._store.has_state(keys[blocks - 1]):
                blocks -= 1
        return blocks * self.geometry.block_tokens

    def acquire(self, rid: str, keys: Sequence[int], tokens: int) -> None:
        """Pin the first ``tokens``, all of which are held, and the state there if it is held."""
        assert rid not in self._leases, f"{rid} has a lease already"
        blocks = self._full_blocks(keys, tokens)
        lease = self._leases[rid] = _Lease(keys)
        if blocks:
            lease.blocks = self._store.pin(keys, 0, blocks)
            assert lease.blocks == blocks, f"{rid} acquires a block that is not held"
            if self._store.has_state(keys[blocks - 1]):
                self._pin_state(lease, keys[blocks - 1])

    def insert(self, rid: str, keys: Sequence[int], tokens: int, *, states: bool = True) -> int:
        """Cache and pin the full blocks of the first ``tokens``, which ``rid`` has computed from
        the end of its lease on; gives the tokens cached, fewer where room lacks.

        With ``states`` there will be one at the last block cached and, where room is left, at
        every checkpoint that was passed. Without room for a state no block is added: nobody could
        use it.
        """
        blocks = self._full_blocks(keys, tokens)
        lease = self._lease(rid, keys, blocks)
        computed_from = lease.blocks
        stateful = states and self._stateful
        present = self._hold(lease, keys, blocks, self._state_blocks if stateful else 0)
        cached = lease.blocks
        if stateful and cached > computed_from:
            first = (computed_from // self._step + 1) * self._step
            checkpoints = keys[first - 1 : cached - 1 : self._step]
            if present == computed_from:
                self._add_states(lease, [keys[cached - 1], *checkpoints])
            else:
                # Others have computed some of it meanwhile, maybe with states.
                self._keep_state(lease, keys[cached - 1])
                for key in checkpoints:
                    if not self._store.has_state(key):
                        self._keep_state(lease, key)
        return cached * self._block_tokens

    def fitting(self, rid: str, keys: Sequence[int], tokens: int) -> int:
        """Of the first ``tokens``, those that ``insert`` would surely find room for now."""
        blocks = self._full_blocks(keys, tokens)
        present = self._store.held(keys, blocks)
        lease = self._leases.get(rid, _Lease())
        spare = self._state_blocks if self._stateful else 0
        room = self._room_blocks - (present - lease.blocks) - spare
        return min(blocks, present + max(0, room)) * self._block_tokens

    def receive(self, rid: str, keys: Sequence[int], tokens: int, *, state: bool) -> int:
        """Like ``insert`` for KV that came from elsewhere: all blocks of the first ``tokens`` that
        have room, and with ``state`` the one state that came along, which is of that length."""
        blocks = self._full_blocks(keys, tokens)
        lease = self._lease(rid, keys, blocks)
        self._hold(lease, keys, blocks, 0)
        if state and self.geometry.has_state and blocks and lease.blocks == blocks:
            self._keep_state(lease, keys[blocks - 1])
        return lease.blocks * self.geometry.block_tokens

    def release(self, rid: str) -> None:
        """Unpin what ``rid`` has pinned; without a lease nothing happens."""
        lease = self._leases.pop(rid, None)
        if lease is None:
            return
        if lease.states:
            self._store.unpin_states(lease.states)
        if lease.blocks:
            self._store.unpin(lease.keys, lease.blocks)

    def shrink_transfer(self, rid: str, nbytes: int) -> None:
        """An open transfer needs no more than ``nbytes`` from now on."""
        blocks = self.geometry.blocks_of(nbytes)
        given_back = self._transfers[rid] - blocks
        assert given_back >= 0, f"{rid} needs more, not less"
        self._transfers[rid] = blocks
        self.transfer_blocks -= given_back

    def open_transfer(self, rid: str, nbytes: int) -> bool:
        """Set memory for ``nbytes`` aside; False, and no change, where too much of it is in use."""
        assert rid not in self._transfers, f"{rid} has a transfer open already"
        blocks = self.geometry.blocks_of(nbytes)
        if blocks > self._room_blocks:
            return False
        self._make_room(blocks)
        self._transfers[rid] = blocks
        self.transfer_blocks += blocks
        return True

    def close_transfer(self, rid: str) -> None:
        """Give the memory back; without a transfer nothing happens."""
        self.transfer_blocks -= self._transfers.pop(rid, 0)

    def lease_blocks(self, rid: str) -> int:
        """What ``rid`` has pinned."""
        lease = self._leases.get(rid, _Lease())
        return lease.blocks + len(lease.states) * self._state_blocks

    def clear(self) -> None:
        """Evict everything that nobody has pinned."""
        self._store.clear()

    def take_changes(self) -> tuple[int, Changes] | None:
        """What has changed since the last call or that of ``take_delta``, and its number; None when
        nothing has. By runs: a block may have left and come again in between."""
        found = self._store.take()
        if found is None:
            return None
        self._seq += 1
        return self._seq, found

    def lose(self) -> None:
        """The instance died: all is gone, what was pinned and what was on its way too."""
        for rid in tuple(self._leases):
            self.release(rid)
        for rid in tuple(self._transfers):
            self.close_transfer(rid)
        self.clear()

    def take_delta(self) -> PoolDelta | None:
        """What has changed since the last call, key by key, or None when nothing has."""
        found = self._store.take()
        if found is None:
            return None
        added, removed = _net(_keys_of(found.added), _keys_of(found.removed, backwards=True))
        added_states, removed_states = _net(found.added_states, found.removed_states)
        if not (added or removed or added_states or removed_states):
            return None
        self._seq += 1
        return PoolDelta(self._seq, added, removed, added_states, removed_states)

    def snapshot(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """``seq`` of the last delta, and the keys of all blocks and states held now."""
        return self._seq, tuple(self._store.blocks()), self._store.states()

    def snapshot_runs(self) -> tuple[int, tuple[Span, ...], tuple[int, ...]]:
        """``snapshot`` with the blocks by runs."""
        return self._seq, tuple(self._store.spans()), self._store.states()

    def _full_blocks(self, keys: Sequence[int], tokens: int) -> int:
        blocks = tokens // self._block_tokens
        assert 0 <= blocks <= len(keys), f"{tokens} tokens are more than {len(keys)} full blocks"
        return blocks

    @property
    def _room_blocks(self) -> int:
        """What is free, or would be if all that may be evicted were."""
        return self.capacity_blocks - self.transfer_blocks - self._store.pinned_blocks

    def _lease(self, rid: str, keys: Sequence[int], blocks: int) -> _Lease:
        lease = self._leases.get(rid)
        if lease is None:
            lease = self._leases[rid] = _Lease(keys)
        held = lease.blocks
        assert held <= blocks, f"{rid} has {held} blocks pinned, more than the {blocks} of now"
        assert not held or lease.keys[held - 1] == keys[held - 1], f"{rid} goes on with another"
        lease.keys = keys
        return lease

    def _hold(self, lease: _Lease, keys: Sequence[int], blocks: int, spare_blocks: int) -> int:
        """Pin the first ``blocks`` of ``keys``, adding those that are not held as far as there is
        room and ``spare_blocks`` more; gives how many were held."""
        present = lease.blocks = self._store.pin(keys, lease.blocks, blocks)
        added = min(blocks - present, self._room_blocks - spare_blocks)
        if added > 0:
            self._make_room(added)
            self._store.add(keys, present, present + added)
            lease.blocks += added
        return present

    def _pin_state(self, lease: _Lease, key: int) -> None:
        if key not in lease.states:
            self._store.pin_state(key)
            lease.states.append(key)

    def _keep_state(self, lease: _Lease, key: int) -> None:
        """Pin the state at the end of the block; add it where it is not held and there is room."""
        if self._store.has_state(key):
            self._pin_state(lease, key)
        else:
            self._add_states(lease, [key])

    def _add_states(self, lease: _Lease, keys: list[int]) -> None:
        """Hold states that are not held, the first ones as far as there is room."""
        fitting = self._room_blocks // self._state_blocks
        if fitting < len(keys):
            keys = keys[: max(0, fitting)]
        if keys:
            self._make_room(len(keys) * self._state_blocks)
            self._store.add_states(keys)
            lease.states += keys

    def _make_room(self, blocks: int) -> None:
        store = self._store
        missing = blocks + store.cached_blocks + self.transfer_blocks - self.capacity_blocks
        if missing > 0:
            store.evict(missing)


def _keys_of(spans: Sequence[Span], *, backwards: bool = False) -> list[int]:
    step = -1 if backwards else 1
    return [key for keys, first, end in spans for key in keys[first:end][::step]]


def _net(added: list[int], removed: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Without what is in both."""
    both = set(added).intersection(removed) if added and removed else ()
    if not both:
        return tuple(added), tuple(removed)
    return (
        tuple([key for key in added if key not in both]),
        tuple([key for key in removed if key not in both]),
    )
