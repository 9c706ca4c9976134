"""A decode instance that computes: continuous batching of whoever has a slot.

A request's KV is read from the transport's buffer into its slot; from then on it takes part in each
step. A step is one call of the model over all sequences that run when it begins; who comes in the
middle of it joins the next one. Steps and readings in run one after another in one thread, so the
cache is nobody else's meanwhile.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from harness.core import EngineError, PrfaasError
from harness.engine.compute import Arrival
from harness.engine.emulated import Slots, chunk_ends
from harness.engine.reference.cache import Cache
from harness.engine.reference.lane import Lane
from harness.engine.reference.model import Model
from harness.engine.reference.prefix_tensors import ClusterTensors, Computed, Prefix
from harness.engine.reference.sampling import greedy
from harness.kv_blocks import KvBlocks
from harness.prefix_pool import PrefixPool


class Running:
    """A request in its slot: its tokens so far, and who waits for more."""

    def __init__(
        self, engine: "ReferenceDecode", slot: int, first_token: int, computed: Computed
    ) -> None:
        self._engine, self._computed = engine, computed
        self.slot = slot
        self.generated = [first_token]
        self.wanted = 1
        self.stepped = asyncio.Event()
        self.error: PrfaasError | None = None

    def tokens(self, start: int, end: int) -> list[int]:
        return self.generated[start:end]

    def keep(self, pool: PrefixPool) -> None:
        self._engine.keep(self._computed, pool)
        self._computed = Computed()

    def drop(self) -> None:
        self._engine.forget(self)

    async def decode(
        self,
        granted_mono_ns: int,  # noqa: ARG002 - nothing is planned from it
        output_tokens: int,
        emit: Callable[[int], Awaitable[None]],
        context_tokens: int,
    ) -> float:
        """As ``Placed.decode``; nothing is late, since nothing is planned."""
        self.wanted = output_tokens
        try:
            if output_tokens > 1:
                self._engine.join(self)
            for total in chunk_ends(output_tokens, self._engine.interval_tokens):
                while len(self.generated) < total and self.error is None:
                    self.stepped.clear()
                    await self.stepped.wait()
                if self.error is not None:
                    raise self.error
                await emit(total)
        finally:
            self._engine.forget(self)
            now_ns = time.monotonic_ns()
            self._engine.slots.release(now_ns, context_tokens + output_tokens)
        return 0.0


class ReferenceDecode:
    """``serve`` is the loop of steps and ends by cancellation; ``close`` then ends its thread."""

    def __init__(
        self,
        name: str,
        model: Model,
        cache: Cache,
        interval_tokens: int,
        blocks: KvBlocks | None = None,
        prefixes: ClusterTensors | None = None,
    ) -> None:
        self._name, self._model, self._cache, self._prefixes = name, model, cache, prefixes
        self._lane = Lane(name)
        self._free = deque(range(len(cache.lengths)))
        self._running: list[Running] = []
        self._arrived = asyncio.Event()
        self.interval_tokens = interval_tokens
        self.slots = Slots(len(cache.lengths), blocks)
        self.busy_s = 0.0

    def close(self) -> None:
        self._lane.close()

    async def until(self, mono_ns: int) -> None:
        """Nothing is planned here but the clock's own time."""
        await asyncio.sleep(max(0.0, (mono_ns - time.monotonic_ns()) / 1e9))

    def resident(self, keys: Sequence[int], tokens: int) -> Prefix:
        """References to the blocks, which nothing that is evicted can take away."""
        if self._prefixes is None:
            return Prefix()
        return self._prefixes.find(self._name, keys, tokens, state=False)

    def keep(self, computed: Computed, pool: PrefixPool) -> None:
        """What the pool has taken."""
        assert self._prefixes is not None, "there is a pool"
        self._prefixes.by_instance[self._name].keep(computed, pool)

    async def place(self, arrival: Arrival) -> Running:
        """Read the KV into a slot. EngineError where prompt and output have no room in one."""
        capacity = self._cache.capacity_tokens
        if arrival.tokens + arrival.output_tokens > capacity:
            raise EngineError(
                f"{arrival.tokens} tokens of prompt and {arrival.output_tokens} of output do not "
                f"fit into the engine's context of {capacity} tokens (engine.context_tokens)"
            )
        slot = self._free.popleft()
        try:
            computed = await self._lane.run(lambda: self._read(arrival, slot))
        except BaseException:
            self._free.append(slot)
            raise
        return Running(self, slot, arrival.first_token, computed)

    def join(self, sequence: Running) -> None:
        """Take part in the next step, and those after it, until all tokens are there."""
        self._running.append(sequence)
        self._arrived.set()

    def forget(self, sequence: Running) -> None:
        """The slot is another's from now on. A step that still runs over it ends before whatever
        the next one reads in."""
        if sequence in self._running:
            self._running.remove(sequence)
        self._free.append(sequence.slot)

    async def serve(self) -> None:
        """Step whoever is there."""
        while True:
            while not self._running:
                self._arrived.clear()
                await self._arrived.wait()
            await self._step(tuple(self._running))

    async def _step(self, batch: tuple[Running, ...]) -> None:
        last = [one.generated[-1] for one in batch]
        slots = [one.slot for one in batch]
        start_ns = time.monotonic_ns()
        try:
            tokens = await self._lane.run(
                lambda: greedy(self._model.decode(last, self._cache, slots))
            )
        except PrfaasError as error:  # the batch's, not that of whoever comes after it
            for one in batch:
                one.error = error
                one.stepped.set()
            self._running = [one for one in self._running if one not in batch]
            return
        self.busy_s += (time.monotonic_ns() - start_ns) / 1e9 * len(batch)
        for one, token in zip(batch, tokens, strict=True):
            one.generated.append(token)
            one.stepped.set()
            if len(one.generated) >= one.wanted and one in self._running:
                self._running.remove(one)

    # In the thread

    def _read(self, arrival: Arrival, slot: int) -> Computed:
        """Fill the slot; copies of what may be kept of it."""
        self._cache.clear(slot)
        if isinstance(arrival.resident, Prefix):
            arrival.resident.read_into(self._cache, slot)
        for layer in range(len(self._cache.layers)):
            data = self._received(arrival.got.layer(layer))
            self._cache.import_layer(slot, layer, arrival.tokens, data, arrival.resident_tokens)
        self._cache.lengths[slot] = arrival.tokens
        computed = Computed()
        if self._prefixes is not None and arrival.keys:
            block_tokens = self._prefixes.block_tokens
            computed.add_blocks(arrival.keys, self._cache, slot, block_tokens)
            if len(arrival.keys) * block_tokens == arrival.tokens:
                computed.add_state(arrival.keys[-1], self._cache, slot)
        return computed

    def _received(self, view: memoryview) -> Tensor:
        """A copy, since the transport's buffer is its own again afterwards."""  # [bytes] uint8
        copied = torch.empty(
            len(view), dtype=torch.uint8, pin_memory=self._cache.device.type == "cuda"
        )
        np.copyto(copied.numpy(), np.frombuffer(view, np.uint8))
        return copied
