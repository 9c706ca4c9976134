"""Blocks of a decode instance's memory: what the KV of a request takes from admission to its end.

    blocks = ceil(KV bytes of input + output tokens / bytes of a block)

so the last block is counted whole, and the state of layers whose KV does not grow in blocks too.
Admission sets aside the output to come, as an engine does that never takes memory back from a
request that decodes. Blocks are those of the prefix pools (``harness.prefix_pool``).
"""

from dataclasses import dataclass

from harness.architecture import Architecture
from harness.prefix_pool import PoolGeometry, PoolSettings


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """A model's blocks; ``capacity`` of them fit into the memory."""

    architecture: Architecture
    geometry: PoolGeometry
    capacity: int

    @classmethod
    def of(
        cls, architecture: Architecture, settings: PoolSettings, memory_bytes: float
    ) -> "KvBlocks":
        """``settings`` say how many tokens a block has."""
        geometry = PoolGeometry.of(architecture, settings)
        return cls(architecture, geometry, int(memory_bytes // max(1, geometry.block_bytes)))

    def taken(self, tokens: int) -> int:
        """By a request of so many tokens, prompt and output together."""
        return self.geometry.blocks_of(self.architecture.kv_bytes(tokens))
