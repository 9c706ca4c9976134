"""What the instances of one cluster hold of a prompt, and what it costs to have it elsewhere.

All pools of a cluster lie in one process, so the true hit is looked up and not told. As every pool
holds whole prefixes, the longest run and the longest usable hit of a cluster are each one
instance's. What another instance holds is fetched over the fabric, on planned time:

    fetch_s = moved_bytes(hit, held here) / fabric rate,  without the state if it lies here
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.architecture import Architecture
from harness.block_keys import block_keys_of_text
from harness.engine.memory import Memory
from harness.prefix_holders import Holders
from harness.surface.generate import GenerateBody, prompt_ids_text


class Hit(NamedTuple):
    """The prefix that a prefill starts from. ``own_tokens`` of it lie at the instance itself, the
    rest is fetched from ``holder`` in ``fetch_s`` scenario seconds; times include the fetch."""

    cached_tokens: int
    own_tokens: int
    holder: Memory | None
    fetch_s: float
    service_s: float

    @property
    def fetched_tokens(self) -> int:
        return self.cached_tokens - self.own_tokens


class Run(NamedTuple):
    """The longest run of a prompt's blocks in a cluster, states or not. ``own_tokens`` of it lie at
    the instance that asks, which is the holder where it has them all."""

    holder: Memory
    tokens: int
    own_tokens: int


class Prefixes:
    """The memories of one cluster's instances, by name."""

    def __init__(
        self,
        memories: Mapping[str, Memory],
        architecture: Architecture,
        fabric_bytes_per_s: float,
    ) -> None:
        self.memories = memories
        self.architecture = architecture
        self._fabric_bytes_per_s = fabric_bytes_per_s
        self._places = tuple(memories.values())
        self._holders = Holders()
        for memory in self._places:
            memory.pool.join(self._holders)

    def best_hit(
        self,
        at: Memory,
        keys: Sequence[int],
        tokens: int,
        prefill_s: Callable[[int, int], float],
    ) -> Hit:
        """The cheapest start of a prefill of ``tokens`` at an instance: from its own prefix, or
        from a longer one of the cluster that is fetched first."""
        geometry = at.pool.geometry
        most = max_hit_blocks(tokens, geometry.block_tokens)
        own = at.pool.match(keys, most)
        found = Hit(own, own, None, 0.0, prefill_s(tokens - own, own))
        blocks, place = self._holders.match(keys, most, has_state=geometry.has_state)
        hit, holder = blocks * geometry.block_tokens, self._places[place]
        if hit <= own:
            return found
        held = min(hit, at.pool.held_blocks(keys) * at.pool.geometry.block_tokens)
        fetch_s = self.architecture.moved_bytes(hit, held) / self._fabric_bytes_per_s
        service_s = fetch_s + prefill_s(tokens - hit, hit)
        if service_s >= found.service_s:
            return found
        return Hit(hit, held, holder, fetch_s, service_s)

    def longest_run(self, at: Memory, keys: Sequence[int], tokens: int) -> Run:
        """Who holds most of the KV of a prompt of ``tokens``."""
        block_tokens = at.pool.geometry.block_tokens
        blocks = max_hit_blocks(tokens, block_tokens)
        own = at.pool.held_blocks(keys, blocks)
        most, place = self._holders.longest(keys, blocks)
        holder = self._places[place] if most > own else at
        return Run(holder, most * block_tokens, own * block_tokens)

    def fetch_s(self, tokens: int, held_tokens: int) -> float:
        """Scenario seconds to fetch the growing KV of ``tokens`` but for the first ones."""
        kv_bytes = self.architecture.moved_bytes
        return (kv_bytes(tokens, held_tokens) - kv_bytes(tokens, tokens)) / self._fabric_bytes_per_s


@dataclass(frozen=True, slots=True)
class Cache:
    """An instance's own memory and what its cluster holds."""

    memory: Memory
    prefixes: Prefixes

    def keys(self, body: GenerateBody) -> tuple[int, ...]:
        """Block keys of a body's prompt."""
        return block_keys_of_text(prompt_ids_text(body), self.memory.pool.geometry.block_tokens)


def max_hit_blocks(tokens: int, block_tokens: int) -> int:
    """Blocks of a prompt that may be hit: a prefill computes at least one token."""
    return (tokens - 1) // block_tokens
