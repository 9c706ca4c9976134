"""A prefix pool written to be read: everything is recomputed from a list of units and their users.

A unit is ``("block", key)`` or ``("state", key)``. The order of eviction is that of the last
release, one tick a unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.prefix_pool import PoolGeometry

Unit = tuple[str, int]


@dataclass
class Lease:
    keys: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)


class ReferencePool:
    def __init__(self, geometry: PoolGeometry, capacity_blocks: int) -> None:
        self.geometry = geometry
        self.capacity = capacity_blocks
        self.released: dict[Unit, int] = {}  # every unit held, and when it was last released
        self.leases: dict[str, Lease] = {}
        self.transfers: dict[str, int] = {}
        self.clock = 0

    def size(self, unit: Unit) -> int:
        return 1 if unit[0] == "block" else self.geometry.blocks_of(self.geometry.state_bytes)

    def pinned(self) -> set[Unit]:
        return {
            unit
            for lease in self.leases.values()
            for unit in [*(("block", k) for k in lease.keys), *(("state", k) for k in lease.states)]
        }

    def used(self, units: object = None) -> int:
        held = self.released if units is None else units
        return sum(map(self.size, held))  # type: ignore[call-overload]

    def room(self) -> int:
        return self.capacity - sum(self.transfers.values()) - self.used(self.pinned())

    def hold(self, unit: Unit) -> None:
        while self.capacity - sum(self.transfers.values()) - self.used() < self.size(unit):
            self.evict_oldest()
        self.released[unit] = -1

    def evict_oldest(self) -> None:
        idle = set(self.released) - self.pinned()
        del self.released[min(idle, key=lambda unit: self.released[unit])]

    def match(self, keys: Sequence[int], max_blocks: int) -> int:
        found = 0
        for length in range(1, min(len(keys), max_blocks) + 1):
            if any(("block", key) not in self.released for key in keys[:length]):
                break
            if not self.geometry.has_state or ("state", keys[length - 1]) in self.released:
                found = length
        return found * self.geometry.block_tokens

    def acquire(self, rid: str, keys: Sequence[int], tokens: int) -> None:
        blocks = tokens // self.geometry.block_tokens
        lease = self.leases[rid] = Lease(list(keys[:blocks]))
        if blocks and ("state", keys[blocks - 1]) in self.released:
            lease.states.append(keys[blocks - 1])

    def pin_present(self, rid: str, keys: Sequence[int], blocks: int) -> Lease:
        lease = self.leases.setdefault(rid, Lease())
        while len(lease.keys) < blocks and ("block", keys[len(lease.keys)]) in self.released:
            lease.keys.append(keys[len(lease.keys)])
        return lease

    def keep_state(self, lease: Lease, key: int) -> None:
        unit = ("state", key)
        if unit not in self.released:
            if self.room() < self.size(unit):
                return
            self.hold(unit)
        if key not in lease.states:
            lease.states.append(key)

    def insert(self, rid: str, keys: Sequence[int], tokens: int, *, states: bool) -> int:
        blocks = tokens // self.geometry.block_tokens
        computed_from = len(self.leases[rid].keys) if rid in self.leases else 0
        lease = self.pin_present(rid, keys, blocks)
        present = len(lease.keys)
        stateful = states and self.geometry.has_state
        cached = present
        for length in range(blocks, present, -1):
            need = length - present + stateful * self.size(("state", 0))
            if need <= self.room():
                cached = length
                break
        for key in keys[present:cached]:
            self.hold(("block", key))
            lease.keys.append(key)
        if stateful and cached > computed_from:
            self.keep_state(lease, keys[cached - 1])
            for length in range(computed_from + 1, cached):
                at_checkpoint = (
                    length * self.geometry.block_tokens % self.geometry.checkpoint_tokens
                )
                if at_checkpoint == 0 and ("state", keys[length - 1]) not in self.released:
                    self.keep_state(lease, keys[length - 1])
        return cached * self.geometry.block_tokens

    def receive(self, rid: str, keys: Sequence[int], tokens: int, *, state: bool) -> int:
        blocks = tokens // self.geometry.block_tokens
        lease = self.pin_present(rid, keys, blocks)
        while len(lease.keys) < blocks and self.room() >= 1:
            self.hold(("block", keys[len(lease.keys)]))
            lease.keys.append(keys[len(lease.keys)])
        if state and self.geometry.has_state and blocks and len(lease.keys) == blocks:
            self.keep_state(lease, keys[blocks - 1])
        return len(lease.keys) * self.geometry.block_tokens

    def release(self, rid: str) -> None:
        lease = self.leases.pop(rid, None)
        if lease is None:
            return
        units = [("state", k) for k in lease.states[::-1]]
        units += [("block", k) for k in lease.keys[::-1]]
        for unit in units:
            self.clock += 1
            if unit not in self.pinned():
                self.released[unit] = self.clock

    def open_transfer(self, rid: str, nbytes: int) -> bool:
        blocks = self.geometry.blocks_of(nbytes)
        if blocks > self.room():
            return False
        while self.capacity - sum(self.transfers.values()) - self.used() < blocks:
            self.evict_oldest()
        self.transfers[rid] = blocks
        return True

    def close_transfer(self, rid: str) -> None:
        self.transfers.pop(rid, None)

    def clear(self) -> None:
        self.released = {unit: at for unit, at in self.released.items() if unit in self.pinned()}
