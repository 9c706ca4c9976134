"""A prefill instance that computes: one prompt at a time, first come first served, in chunks.

A prompt's KV stays in its slot until the transport has been told that it arrived, so there are a
few slots; a prompt whose turn comes while all are taken waits. Chunks end at multiples of
``chunk_tokens``: their bounds follow from the prompt alone, and with them every bit of the result.

Layer-wise, growing KV leaves after each layer of each chunk, a window or state after its layer of
the last chunk; otherwise all leaves when the prompt has been computed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.core import EngineError, PrfaasError
from harness.engine.compute import Piece, PrefillJob, begun
from harness.engine.reference.cache import Cache
from harness.engine.reference.lane import Lane
from harness.engine.reference.model import Model
from harness.engine.reference.outbox import Deliver, open_outbox
from harness.engine.reference.prefix_tensors import ClusterTensors, Computed, Prefix
from harness.engine.reference.sampling import greedy
from harness.prefix_pool import PrefixPool
from harness.surface.generate import PrefillSpan


class _DroppedError(Exception):
    """Whoever asked for the prefill has gone."""


@dataclass(eq=False, slots=True)
class _Held:
    """A job's slot, from its turn until its bytes are read no more."""

    slot: int
    computing: bool = True
    given_up: bool = False
    final_ns: dict[int, int] = field(default_factory=dict)
    fetched_tokens: int = 0
    prefix: Prefix = field(default_factory=Prefix)
    computed: Computed = field(default_factory=Computed)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What a prefill may start from: the tensors of the cluster, where states are kept, and the
    planned seconds of (new, cached) tokens, by which the cheapest start is chosen."""

    tensors: ClusterTensors
    checkpoint_tokens: int
    has_state: bool
    prefill_s: Callable[[int, int], float]


class ReferencePrefill:
    """``serve`` is the instance's loop and ends by cancellation; ``close`` then ends its thread."""

    def __init__(
        self,
        name: str,
        model: Model,
        cache: Cache,
        chunk_tokens: int,
        *,
        layerwise: bool,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._name, self._model, self._cache, self._prefixes = name, model, cache, prefixes
        self._chunk_tokens, self._layerwise = chunk_tokens, layerwise
        self._lane = Lane(name)
        self._outbox = open_outbox(cache)
        self._queue: deque[PrefillJob] = deque()
        self._arrived = asyncio.Event()
        self._free = deque(range(len(cache.lengths)))
        self._freed = asyncio.Event()
        self._held: dict[PrefillJob, _Held] = {}
        self.running: PrefillJob | None = None
        self.busy_s = 0.0

    @property
    def queued(self) -> int:
        return len(self._queue)

    def release_shares(
        self,
        tokens: int,  # noqa: ARG002 - nothing is planned
        layer_bytes: Sequence[int],  # noqa: ARG002 - the KV itself says it
    ) -> tuple[float, ...]:
        """Nothing is planned: layers are final when they are computed."""
        return ()

    def close(self) -> None:
        self._lane.close()
        self._outbox.close()

    async def prefill(self, job: PrefillJob) -> PrefillSpan:
        """Serve ``job`` in its turn. Cancelling the caller ends it before the next layer."""
        self._queue.append(job)
        self._arrived.set()
        try:
            return await job.done
        except asyncio.CancelledError:
            if job in self._queue:
                self._queue.remove(job)
            raise

    def keep(self, job: PrefillJob, pool: PrefixPool) -> None:
        """What the pool has taken."""
        assert self._prefixes is not None, "there is a pool"
        own = self._prefixes.tensors.by_instance[self._name]
        own.keep(self._held[job].computed, pool)

    def release(self, job: PrefillJob) -> None:
        """Let the slot go, now or when the thread that still fills it has seen that it may stop."""
        held = self._held.get(job)
        if held is None:
            return
        if held.computing:
            held.given_up = True
        else:
            self._give_back(job)

    def _give_back(self, job: PrefillJob) -> None:
        self._free.append(self._held.pop(job).slot)
        self._freed.set()

    async def serve(self) -> None:
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            while not self._free:
                self._freed.clear()
                await self._freed.wait()
            if self._queue:  # the last one may have left meanwhile
                await self._serve(self._queue.popleft())

    async def _serve(self, job: PrefillJob) -> None:
        self.running = job
        held = self._held[job] = _Held(self._free.popleft())
        try:
            await self._begin(job, held)
            span = await self._run(job, held)
        except PrfaasError as error:  # this request's, not the rest's
            if not job.done.done():
                job.done.set_exception(error)
        except _DroppedError:
            assert job.done.done(), "only who has gone is dropped"
        else:
            if not job.done.done():
                job.done.set_result(span)
        finally:
            self.running = None
            held.computing = False
            if held.given_up:
                self._give_back(job)

    async def _begin(self, job: PrefillJob, held: _Held) -> None:
        """Find what of the prompt need not be computed, and have room for the rest."""
        if self._prefixes is None:
            return
        work = await begun(job, self._prefixes.prefill_s)
        if work is None:
            raise _DroppedError
        held.prefix = self._prefixes.tensors.find(
            self._name, job.keys, work.cached_tokens, state=self._prefixes.has_state
        )
        held.fetched_tokens = work.fetched_tokens

    async def _run(self, job: PrefillJob, held: _Held) -> PrefillSpan:
        ids = job.read_ids()
        self._check(ids)
        loop = asyncio.get_running_loop()

        def emit(piece: Piece) -> None:
            loop.call_soon_threadsafe(job.emit, piece)

        start_ns = time.monotonic_ns()
        job.on_start()
        first_token = await self._lane.run(lambda: self._compute(job, ids, held, emit))
        end_ns = time.monotonic_ns()
        self.busy_s += (end_ns - start_ns) / 1e9
        job.on_token(first_token)
        return PrefillSpan(
            received_mono_ns=job.received_mono_ns,
            start_mono_ns=start_ns,
            end_mono_ns=end_ns,
            service_wall_s=(end_ns - start_ns) / 1e9,
            late_s=0.0,
            kv_acked_mono_ns=None,
            kv_wire_bytes_sent=0,
            cached_tokens=held.prefix.tokens,
            fetched_tokens=held.fetched_tokens,
            layer_final_mono_ns=[held.final_ns[layer] for layer in range(job.num_layers)],
        )

    def _check(self, ids: Sequence[int]) -> None:
        vocabulary = self._model.config.vocab_size
        if max(ids) >= vocabulary:
            raise EngineError(
                f"the prompt has the id {max(ids)}, and {self._model.config.name} has a vocabulary "
                f"of {vocabulary}"
            )

    # In the thread

    def _compute(self, job: PrefillJob, ids: Sequence[int], held: _Held, emit: Deliver) -> int:
        """All chunks of the prompt; the first token."""
        cache, slot, start = self._cache, held.slot, held.prefix.tokens
        cache.clear(slot)
        held.prefix.read_into(cache, slot)
        cache.lengths[slot] = start
        try:
            if self._layerwise and start:
                self._send_growing(held, 0, start, emit)
            for end in self._ends(start, len(ids), job.keys):

                def on_layer(layer: int, start: int = start, end: int = end) -> None:
                    if job.done.cancelled():
                        raise _DroppedError
                    if self._layerwise:
                        self._send(held, layer, start, end, end == len(ids), emit)

                logits = self._model.prefill(ids[start:end], cache, slot, on_layer)
                self._checkpoint(job, held, end)
                start = end
            token = greedy(logits[None])[0]
            if not self._layerwise:
                for layer in range(len(cache.layers)):
                    self._send(held, layer, 0, len(ids), True, emit)
            self._copy_blocks(job, held)
        finally:
            self._outbox.settle()
        return token

    def _ends(self, start: int, tokens: int, keys: Sequence[int]) -> list[int]:
        """Where chunks end: also wherever a state is to be kept."""
        steps = {self._chunk_tokens}
        last = {tokens}
        if self._prefixes is not None:
            steps.add(self._prefixes.checkpoint_tokens)
            last.add(len(keys) * self._prefixes.tensors.block_tokens)
        ends = {end for step in steps for end in range(step, tokens, step)} | last
        return sorted(end for end in ends if end > start)

    def _checkpoint(self, job: PrefillJob, held: _Held, end: int) -> None:
        """Keep the state where a later prompt may go on."""
        if self._prefixes is None or not self._prefixes.has_state:
            return
        block_tokens = self._prefixes.tensors.block_tokens
        blocks, rest = divmod(end, block_tokens)
        if not rest and (blocks == len(job.keys) or not end % self._prefixes.checkpoint_tokens):
            held.computed.add_state(job.keys[blocks - 1], self._cache, held.slot)

    def _copy_blocks(self, job: PrefillJob, held: _Held) -> None:
        """All full blocks with what they began from: the pool decides which are kept."""
        if self._prefixes is None:
            return
        tensors = self._prefixes.tensors
        if held.prefix.state is not None:
            key = job.keys[held.prefix.tokens // tensors.block_tokens - 1]
            held.computed.states[key] = held.prefix.state
        held.computed.add_blocks(job.keys, self._cache, held.slot, tensors.block_tokens)

    def _send_growing(self, held: _Held, start: int, end: int, emit: Deliver) -> None:
        """What a prefix holds is final before anything is computed."""
        for layer, one in enumerate(self._cache.layers):
            if one.grows:
                self._send(held, layer, start, end, False, emit)

    def _send(
        self, held: _Held, layer: int, start: int, end: int, is_last: bool, emit: Deliver
    ) -> None:
        """What tokens ``start`` to ``end`` left in a layer, if it can go by now."""
        cache, slot = self._cache, held.slot
        if cache.layers[layer].grows:
            data = cache.export_kv(slot, layer, start, end)
            first_byte = start * (data.numel() // (end - start))
        elif is_last:
            data, first_byte = cache.export_state(slot, layer), 0
        else:
            return
        held.final_ns[layer] = time.monotonic_ns()
        self._outbox.send(slot, layer, first_byte, data, is_last, emit)
