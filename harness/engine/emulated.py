"""Emulated compute: the serving model of prefill and decode instances on planned time.

Prefill serves one request at a time, first come first served, for
``(fetch_s + T_prefill(new, cached)) / time_scale`` of wall time; layer k of L is final at
``start + fetch_s + T (k + 1) / L``, or when the profile's release curve has it.
What is cached, and room for the KV, is found when the request's turn comes. Decode has BS_max
slots; a slot is held for (output_tokens - 1) steps, since prefill computed the first token. Starts
are planned: ``start = max(ready, previous planned end)``, so what a late wake-up costs is recorded
(``late_s``, wall) and does not add up. Compute may be noisy (``harness.engine.noise``); what is
fetched is not.

KV bytes are pseudo-random and of the geometry's size divided by ``byte_scale``. Output tokens are
a function of the prompt, so that a decode instance that did not get the prompt's KV and first
token would answer something else.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from harness.architecture import Architecture, wire_layer_bytes
from harness.core import PrfaasError
from harness.engine.compute import Arrival, Piece, PrefillJob, begun
from harness.engine.noise import Noise
from harness.engine.timeline import Alarm
from harness.kv_blocks import KvBlocks
from harness.prefix_pool import PrefixPool
from harness.profile import Profile
from harness.surface.generate import PrefillSpan

#: Ids that are five digits wide, inside every vocabulary of this size class.
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 10_000, 90_000


def token_at(digest: int, position: int) -> int:
    """The token that the emulated model generates at ``position`` (0 is the first) of a prompt."""
    mixed = xxhash.xxh3_64_intdigest(position.to_bytes(4, "little"), seed=digest)
    return FIRST_TOKEN_ID + mixed % NUM_TOKEN_IDS


class KvBytes:
    """KV payload: windows of one pseudo-random buffer, sized by the model's geometry."""

    def __init__(self, architecture: Architecture, byte_scale: float, seed: int) -> None:
        self._architecture = architecture
        self._byte_scale = byte_scale
        self._random = np.random.default_rng(seed)
        self._buffer = memoryview(b"")

    @property
    def num_layers(self) -> int:
        return len(self._architecture.layers)

    def layer_bytes(self, tokens: int, resident_tokens: int = 0) -> tuple[int, ...]:
        """Wire bytes of each layer that move of a prompt, whose first tokens' growing KV is there
        already."""
        moved = self._architecture.layer_kv_bytes(tokens, resident_tokens)
        return wire_layer_bytes(moved, self._byte_scale)

    def layer(self, size_bytes: int) -> memoryview:
        """The payload of one layer."""
        if len(self._buffer) < size_bytes:
            self._buffer = memoryview(self._random.bytes(size_bytes))
        return self._buffer[:size_bytes]


@dataclass(frozen=True, slots=True)
class EmulatedPlace:
    """A request in a slot of an emulated decode instance."""

    start: Callable[[int, int, Callable[[int], Awaitable[None]], int], Awaitable[float]]
    digest: int
    first_token: int

    async def decode(
        self,
        granted_mono_ns: int,
        output_tokens: int,
        emit: Callable[[int], Awaitable[None]],
        context_tokens: int,
    ) -> float:
        return await self.start(granted_mono_ns, output_tokens, emit, context_tokens)

    def tokens(self, start: int, end: int) -> list[int]:
        tokens = [token_at(self.digest, position) for position in range(start, end)]
        if start == 0:
            tokens[0] = self.first_token
        return tokens

    def keep(self, pool: PrefixPool) -> None:
        """The pool's word is all there is."""

    def drop(self) -> None:
        """There is nothing to give back."""


class EmulatedPrefill:
    """A prefill instance; ``serve`` is its loop and ends by cancellation."""

    def __init__(
        self,
        alarm: Alarm,
        profile: Profile,
        time_scale: float,
        layerwise: bool,
        noise: Noise | None = None,
    ) -> None:
        self._alarm = alarm
        self._noise = noise or Noise()
        self._profile = profile
        self._time_scale = time_scale
        self._layerwise = layerwise
        self._queue: deque[PrefillJob] = deque()
        self._arrived = asyncio.Event()
        self._free_at_ns = 0
        self.running: PrefillJob | None = None
        self.busy_s = 0.0

    @property
    def queued(self) -> int:
        return len(self._queue)

    def release_shares(self, tokens: int, layer_bytes: Sequence[int]) -> tuple[float, ...]:
        """When of its compute each layer is final, by the profile's captured release; empty
        where it has none."""
        return self._profile.release_shares(tokens, layer_bytes)

    async def prefill(self, job: PrefillJob) -> PrefillSpan:
        """Serve ``job`` in its turn. Cancelling the caller takes it out of the queue."""
        self._queue.append(job)
        self._arrived.set()
        try:
            return await job.done
        except asyncio.CancelledError:
            if job in self._queue:
                self._queue.remove(job)
            raise

    def keep(self, job: PrefillJob, pool: PrefixPool) -> None:
        """The pool's word is all there is."""

    def release(self, job: PrefillJob) -> None:
        """Its bytes are nobody's."""

    async def serve(self) -> None:
        while True:
            while not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            job = self._queue.popleft()
            self.running = job
            try:
                span = await self._run(job)
            except PrfaasError as error:  # a length without a cost: this request's, not the rest's
                span = None
                if not job.done.done():
                    job.done.set_exception(error)
            self.running = None
            if span is not None and not job.done.done():
                job.done.set_result(span)

    async def _run(self, job: PrefillJob) -> PrefillSpan | None:
        work = await begun(job, self._profile.prefill_s)
        if work is None:
            return None
        fetch_s = work.fetch_s / self._time_scale
        compute_s = work.service_s / self._time_scale - fetch_s
        service_s = fetch_s + compute_s * self._noise.factor()
        service_ns, fetch_ns = round(service_s * 1e9), round(fetch_s * 1e9)
        start_ns = max(job.ready_mono_ns, self._free_at_ns, work.ready_mono_ns)
        job.on_start()
        job.on_token(token_at(job.digest, 0))
        count = job.num_layers
        final_ns: list[int] = []
        for layer in range(count):
            share = 1.0
            if self._layerwise:
                share = job.shares[layer] if job.shares else (layer + 1) / count
            due_ns = start_ns + fetch_ns + round((service_ns - fetch_ns) * share)
            woke_ns = await self._alarm.until(due_ns)
            if job.done.cancelled():
                # An engine drops an aborted request between two layers.
                self._free_at_ns = woke_ns
                self.busy_s += (woke_ns - start_ns) / 1e9
                return None
            job.emit(Piece(layer))
            final_ns.append(woke_ns)
        self._free_at_ns = start_ns + service_ns
        self.busy_s += service_s
        end_ns = time.monotonic_ns()
        return PrefillSpan(
            received_mono_ns=job.received_mono_ns,
            start_mono_ns=start_ns,
            end_mono_ns=end_ns,
            service_wall_s=service_s,
            late_s=(end_ns - self._free_at_ns) / 1e9,
            kv_acked_mono_ns=None,
            kv_wire_bytes_sent=0,
            cached_tokens=work.cached_tokens,
            fetched_tokens=work.fetched_tokens,
            layer_final_mono_ns=final_ns,
        )


class Slots:
    """A decode instance's BS_max places, granted first come first served on planned time; with
    ``blocks`` a place comes with memory for the tokens of prompt and output."""

    def __init__(self, count: int, blocks: KvBlocks | None = None) -> None:
        self.count = count
        self.running = 0
        self._blocks = blocks
        self._free_blocks = 0 if blocks is None else blocks.capacity
        self._waiting: deque[tuple[int, int, asyncio.Future[int]]] = deque()

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def grant(self, ready_mono_ns: int, tokens: int = 0) -> int:
        """Wait for a place; gives the planned instant at which it was granted."""
        if not self._waiting and self._take(tokens):
            return ready_mono_ns
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        entry = (ready_mono_ns, tokens, place)
        self._waiting.append(entry)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(place.result(), tokens)  # granted and cancelled in the same turn
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._give_on(time.monotonic_ns())
            raise

    def release(self, planned_mono_ns: int, tokens: int = 0) -> None:
        """Give the place back as of the planned end, to the request that waited longest."""
        self.running -= 1
        assert self.running >= 0, "a decode slot was given back twice"
        self._free_blocks += self._needed(tokens)
        self._give_on(planned_mono_ns)

    def _give_on(self, planned_mono_ns: int) -> None:
        """To those that wait, in order, as far as there is room."""
        while self._waiting:
            ready_ns, tokens, place = self._waiting[0]
            if not place.done() and not self._take(tokens):
                return
            self._waiting.popleft()
            if not place.done():
                place.set_result(max(ready_ns, planned_mono_ns))

    def _take(self, tokens: int) -> bool:
        needed = self._needed(tokens)
        if self.running >= self.count or needed > self._free_blocks:
            return False
        self.running += 1
        self._free_blocks -= needed
        return True

    def _needed(self, tokens: int) -> int:
        return 0 if self._blocks is None else self._blocks.taken(tokens)


class EmulatedDecode:
    """A decode instance: slots, and one step time at a full batch, as Eq. 5 of the paper has it."""

    def __init__(
        self,
        alarm: Alarm,
        max_batch: int,
        step_wall_s: float,
        interval_tokens: int,
        noise: Noise | None = None,
        blocks: KvBlocks | None = None,
    ) -> None:
        self._alarm = alarm
        self._step_ns = round(step_wall_s * 1e9)
        self._noise = noise or Noise()
        self._interval_tokens = interval_tokens
        self.slots = Slots(max_batch, blocks)
        self.busy_s = 0.0

    async def until(self, mono_ns: int) -> None:
        """Return at a planned instant."""
        await self._alarm.until(mono_ns)

    def resident(self, keys: Sequence[int], tokens: int) -> None:
        """Nothing lies anywhere."""

    async def place(self, arrival: Arrival) -> EmulatedPlace:
        """What was sent is nobody's, so nothing is kept of it."""
        return EmulatedPlace(self.decode, arrival.digest, arrival.first_token)

    async def decode(
        self,
        granted_mono_ns: int,
        output_tokens: int,
        emit: Callable[[int], Awaitable[None]],
        context_tokens: int = 0,
    ) -> float:
        """Call ``emit(total)`` as tokens come due; gives the worst lateness in wall seconds.

        Tokens 1 and 2 are never held back; later ones leave a stream interval at a time, when the
        last of them is due. The slot is released at the planned end, whatever happens. The step is
        the same for every context.
        """
        steps = np.cumsum(self._noise.factors(output_tokens - 1))  # (output_tokens - 1,)
        after_ns = [0, *np.rint(steps * self._step_ns).astype(np.int64).tolist()]
        end_ns = granted_mono_ns + after_ns[-1]
        late_ns = 0
        try:
            for total in chunk_ends(output_tokens, self._interval_tokens):
                due_ns = granted_mono_ns + after_ns[total - 1]
                late_ns = max(late_ns, await self._alarm.until(due_ns) - due_ns)
                await emit(total)
        except BaseException:
            end_ns = min(end_ns, time.monotonic_ns())
            raise
        finally:
            self.busy_s += (end_ns - granted_mono_ns) / 1e9
            self.slots.release(end_ns, context_tokens + output_tokens)
        return late_ns / 1e9


def chunk_ends(output_tokens: int, interval_tokens: int) -> list[int]:
    """Cumulative token counts at which a stream is written: 1, 2, then every interval, the end."""
    ends = [total for total in (1, 2) if total <= output_tokens]
    ends.extend(range(2 + interval_tokens, output_tokens, interval_tokens))
    if ends[-1] < output_tokens:
        ends.append(output_tokens)
    return ends
