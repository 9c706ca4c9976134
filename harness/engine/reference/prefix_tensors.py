"""The tensors behind an instance's prefix pool: KV by block, and states by the length they are of.

The pool (``harness.prefix_pool``) decides what is held; here lies what it decided on. A block's
growing KV is one run of bytes a layer, a state all of the layers that do not grow, after exactly
the tokens of the block at whose end it is. What the pool evicted is dropped when something is next
kept; until then nobody asks for it.

Whoever is to read a prefix takes references at once (``Prefix``), which keep the tensors alive
whatever becomes of the pool: so a prefix can be read from another instance of the process without
holding its memory back.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from harness.core import EngineError
from harness.engine.reference.cache import Cache
from harness.prefix_pool import PrefixPool

#: By layer, [bytes] uint8.
Tensors = dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt: its blocks in order, and the state at its end if one is needed."""

    tokens: int = 0
    blocks: tuple[Tensors, ...] = ()
    state: Tensors | None = None

    def read_into(self, cache: Cache, slot: int) -> None:
        """Write it to an empty slot, whose length is the caller's to set."""
        start = 0
        for block in self.blocks:
            for layer, data in block.items():
                cache.import_kv(slot, layer, start, data)
            start += self.tokens // len(self.blocks)
        if self.state is not None:
            for layer, data in self.state.items():
                cache.import_state(slot, layer, self.tokens, data)


@dataclass(slots=True)
class Computed:
    """What a request leaves that may be kept: of blocks and states by key."""

    blocks: dict[int, Tensors] = field(default_factory=dict)
    states: dict[int, Tensors] = field(default_factory=dict)

    def add_state(self, key: int, cache: Cache, slot: int) -> None:
        """Of all layers that do not grow, as they are now."""
        self.states[key] = {
            layer: cache.export_state(slot, layer)
            for layer, one in enumerate(cache.layers)
            if not one.grows
        }

    def add_blocks(self, keys: Sequence[int], cache: Cache, slot: int, block_tokens: int) -> None:
        """Copies of the growing KV of a slot's first blocks."""
        for index, key in enumerate(keys):
            start = index * block_tokens
            self.blocks[key] = {
                layer: cache.export_kv(slot, layer, start, start + block_tokens).clone()
                for layer, one in enumerate(cache.layers)
                if one.grows
            }


class PrefixTensors:
    """Of one instance; used from the event loop."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blocks: dict[int, Tensors] = {}
        self._states: dict[int, Tensors] = {}

    @property
    def nbytes(self) -> int:
        """What is held."""
        held = [*self._blocks.values(), *self._states.values()]
        return sum(data.numel() for tensors in held for data in tensors.values())

    def keep(self, computed: Computed, pool: PrefixPool) -> None:
        """Of what was computed, that which the pool holds; what it holds no more is dropped."""
        _, blocks, states = pool.snapshot()
        self._blocks = _held(blocks, (self._blocks, computed.blocks))
        self._states = _held(states, (self._states, computed.states))

    def block(self, key: int) -> Tensors | None:
        return self._blocks.get(key)

    def state(self, key: int) -> Tensors | None:
        return self._states.get(key)


def _held(keys: Iterable[int], sources: Sequence[Mapping[int, Tensors]]) -> dict[int, Tensors]:
    found: dict[int, Tensors] = {}
    for key in keys:
        for source in sources:
            if key in source:
                found[key] = source[key]
                break
    return found


@dataclass(frozen=True, slots=True)
class ClusterTensors:
    """All instances of one process, by name; each has the whole of a prefix that its pool holds."""

    block_tokens: int
    by_instance: Mapping[str, PrefixTensors]

    def find(self, at: str, keys: Sequence[int], tokens: int, *, state: bool) -> Prefix:
        """The first ``tokens`` of a prompt, from ``at`` itself as far as it has them. EngineError
        where a pool holds what lies nowhere."""
        if not tokens:
            return Prefix()
        wanted = keys[: tokens // self.block_tokens]
        blocks = tuple(self._one(self._places(at), key, "block") for key in wanted)
        last = self._one(self._places(at), wanted[-1], "state") if state else None
        return Prefix(tokens, blocks, last)

    def _places(self, at: str) -> Iterator[PrefixTensors]:
        yield self.by_instance[at]
        yield from (one for name, one in self.by_instance.items() if name != at)

    @staticmethod
    def _one(places: Iterable[PrefixTensors], key: int, what: str) -> Tensors:
        for place in places:
            found = place.block(key) if what == "block" else place.state(key)
            if found is not None:
                return found
        raise EngineError(f"the {what} {key} of a cached prefix is held, and its tensors are gone")
