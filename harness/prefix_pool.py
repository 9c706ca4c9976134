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

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from harness.architecture import Architecture
from harness.prefix_holders import Holders, leading

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
    """What one request pins: a whole prefix, and states; the first of these are dearest."""

    keys: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)


def _by_kind(units: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Keys of the blocks and of the states among units."""
    states = tuple([~unit for unit in units if unit < 0])
    return (tuple([unit for unit in units if unit >= 0]) if states else units), states


class PrefixPool:
    """Metadata of one instance's memory; all operations are amortised O(blocks touched).

    In the tables a block goes by its key and the state at its end by ``~key``, which is negative.
    """

    def __init__(self, geometry: PoolGeometry, capacity_bytes: float) -> None:
        self.geometry = geometry
        self.capacity_blocks = int(capacity_bytes // max(1, geometry.block_bytes))
        self.transfer_blocks = 0
        self.cached_blocks = 0
        self.pinned_blocks = 0
        self._state_blocks = geometry.blocks_of(geometry.state_bytes)
        self._pins: dict[int, int] = {}  # unit -> leases that pin it
        self._evictable: OrderedDict[int, None] = OrderedDict()  # units without pins, oldest first
        self._leases: dict[str, _Lease] = {}
        self._transfers: dict[str, int] = {}  # blocks of each
        self._seq = 0
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._holders: Holders | None = None
        self._bit = 0

    @property
    def free_blocks(self) -> int:
        return self.capacity_blocks - self.cached_blocks - self.transfer_blocks

    @property
    def busy(self) -> bool:
        """Whether a lease or a transfer is open."""
        return bool(self._leases or self._transfers)

    def held_blocks(self, keys: Sequence[int]) -> int:
        """Leading blocks of ``keys`` that are held, with or without a state. O(log n)."""
        return leading(keys, self._pins)

    def join(self, holders: Holders) -> None:
        """Tell ``holders`` of all that is held and what becomes of it."""
        assert self._holders is None, "a pool has one place"
        self._holders, self._bit = holders, holders.new_bit()
        for unit in self._pins:
            holders.add(unit, self._bit)

    def has_state(self, key: int) -> bool:
        """Whether the state at the end of the block is held."""
        return ~key in self._pins

    def match(self, keys: Sequence[int], max_blocks: int) -> int:
        """Tokens of the longest usable prefix, ``max_blocks`` at most. Changes nothing."""
        blocks = min(self.held_blocks(keys), max(0, max_blocks))
        if self.geometry.has_state:
            while blocks and ~keys[blocks - 1] not in self._pins:
                blocks -= 1
        return blocks * self.geometry.block_tokens

    def acquire(self, rid: str, keys: Sequence[int], tokens: int) -> None:
        """Pin the first ``tokens``, all of which are held, and the state there if it is held."""
        assert rid not in self._leases, f"{rid} has a lease already"
        blocks = self._full_blocks(keys, tokens)
        lease = self._leases[rid] = _Lease()
        for key in keys[:blocks]:
            assert key in self._pins, f"{rid} acquires a block that is not held"
            self._pin(key, 1)
            lease.keys.append(key)
        if blocks and ~keys[blocks - 1] in self._pins:
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
        computed_from = len(lease.keys)
        stateful = states and self.geometry.has_state
        cached = self._hold(lease, keys, blocks, self._state_blocks if stateful else 0)
        if stateful and cached > computed_from:
            self._keep_state(lease, keys[cached - 1])
            step = self.geometry.checkpoint_tokens // self.geometry.block_tokens
            for at in range((computed_from // step + 1) * step, cached, step):
                if ~keys[at - 1] not in self._pins:
                    self._keep_state(lease, keys[at - 1])
        return cached * self.geometry.block_tokens

    def receive(self, rid: str, keys: Sequence[int], tokens: int, *, state: bool) -> int:
        """Like ``insert`` for KV that came from elsewhere: all blocks of the first ``tokens`` that
        have room, and with ``state`` the one state that came along, which is of that length."""
        blocks = self._full_blocks(keys, tokens)
        lease = self._lease(rid, keys, blocks)
        cached = self._hold(lease, keys, blocks, 0)
        if state and self.geometry.has_state and blocks and cached == blocks:
            self._keep_state(lease, keys[blocks - 1])
        return cached * self.geometry.block_tokens

    def release(self, rid: str) -> None:
        """Unpin what ``rid`` has pinned; without a lease nothing happens."""
        lease = self._leases.pop(rid, None)
        if lease is None:
            return
        for key in reversed(lease.states):
            self._unpin(~key, self._state_blocks)
        pins, keys = self._pins, lease.keys[::-1]
        free = [key for key in keys if pins[key] == 1]
        if len(free) < len(keys):
            for key in keys:
                pins[key] -= 1
        else:
            pins.update(dict.fromkeys(keys, 0))
        self._evictable.update(dict.fromkeys(free))
        self.pinned_blocks -= len(free)

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
        return len(lease.keys) + len(lease.states) * self._state_blocks

    def clear(self) -> None:
        """Evict everything that nobody has pinned."""
        while self._evictable:
            self._evict()

    def take_delta(self) -> PoolDelta | None:
        """What has changed since the last call, or None when nothing has."""
        if not self._added and not self._removed:
            return None
        self._seq += 1
        added, removed = tuple(self._added), tuple(self._removed)
        self._added.clear()
        self._removed.clear()
        added_blocks, added_states = _by_kind(added)
        removed_blocks, removed_states = _by_kind(removed)
        return PoolDelta(self._seq, added_blocks, removed_blocks, added_states, removed_states)

    def snapshot(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """``seq`` of the last delta, and the keys of all blocks and states held now."""
        blocks = tuple(unit for unit in self._pins if unit >= 0)
        return self._seq, blocks, tuple(~unit for unit in self._pins if unit < 0)

    def _full_blocks(self, keys: Sequence[int], tokens: int) -> int:
        blocks = tokens // self.geometry.block_tokens
        assert 0 <= blocks <= len(keys), f"{tokens} tokens are more than {len(keys)} full blocks"
        return blocks

    @property
    def _room_blocks(self) -> int:
        """What is free, or would be if all that may be evicted were."""
        return self.capacity_blocks - self.transfer_blocks - self.pinned_blocks

    def _lease(self, rid: str, keys: Sequence[int], blocks: int) -> _Lease:
        lease = self._leases.setdefault(rid, _Lease())
        held = len(lease.keys)
        assert held <= blocks, f"{rid} has {held} blocks pinned, more than the {blocks} of now"
        assert not held or lease.keys[-1] == keys[held - 1], f"{rid} goes on with another prompt"
        return lease

    def _hold(self, lease: _Lease, keys: Sequence[int], blocks: int, spare_blocks: int) -> int:
        """Pin the first ``blocks`` of ``keys``, adding those that are not held as far as there is
        room and ``spare_blocks`` more; gives how many."""
        for key in keys[len(lease.keys) : blocks]:
            if key not in self._pins:
                break
            self._pin(key, 1)
            lease.keys.append(key)
        present = len(lease.keys)
        added = min(blocks - present, max(0, self._room_blocks - spare_blocks))
        if added > 0:
            new = keys[present : present + added]
            self._add_blocks(new)
            lease.keys += new
        return present + added

    def _pin_state(self, lease: _Lease, key: int) -> None:
        if key not in lease.states:
            self._pin(~key, self._state_blocks)
            lease.states.append(key)

    def _keep_state(self, lease: _Lease, key: int) -> None:
        """Pin the state at the end of the block; add it where it is not held and there is room."""
        if ~key in self._pins:
            self._pin_state(lease, key)
        elif self._state_blocks <= self._room_blocks:
            self._add(~key, self._state_blocks)
            lease.states.append(key)

    def _pin(self, unit: int, size: int) -> None:
        if not self._pins[unit]:
            del self._evictable[unit]
            self.pinned_blocks += size
        self._pins[unit] += 1

    def _unpin(self, unit: int, size: int) -> None:
        self._pins[unit] -= 1
        if not self._pins[unit]:
            self._evictable[unit] = None
            self.pinned_blocks -= size

    def _add(self, unit: int, size: int) -> None:
        """Hold a new unit, pinned once; the caller knows that there is room."""
        self._make_room(size)
        self._pins[unit] = 1
        if self._holders is not None:
            self._holders.add(unit, self._bit)
        self.cached_blocks += size
        self.pinned_blocks += size
        if unit in self._removed:
            del self._removed[unit]
        else:
            self._added[unit] = None

    def _add_blocks(self, keys: Sequence[int]) -> None:
        """``_add`` of many blocks: the tables are filled at once, which is several times faster."""
        self._make_room(len(keys))
        self._pins.update(dict.fromkeys(keys, 1))
        if self._holders is not None:
            self._holders.add_all(keys, self._bit)
        self.cached_blocks += len(keys)
        self.pinned_blocks += len(keys)
        if self._removed:
            again = [key for key in keys if key in self._removed]
            for key in again:
                del self._removed[key]
            if again:
                known = set(again)
                keys = [key for key in keys if key not in known]
        self._added.update(dict.fromkeys(keys))

    def _make_room(self, blocks: int) -> None:
        missing = blocks - self.free_blocks
        while missing > 0:
            missing -= self._evict()

    def _evict(self) -> int:
        """The blocks that became free."""
        unit, _ = self._evictable.popitem(last=False)
        del self._pins[unit]
        if self._holders is not None:
            self._holders.remove(unit, self._bit)
        size = 1 if unit >= 0 else self._state_blocks
        self.cached_blocks -= size
        if unit in self._added:
            del self._added[unit]
        else:
            self._removed[unit] = None
        return size
