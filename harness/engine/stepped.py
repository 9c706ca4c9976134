"""A decode instance whose requests step together: what continuous batching does.

    step k of the instance lasts T_decode(batch, mean context) x noise / time_scale

where batch is how many requests run in it and context is prompt plus generated tokens. A request
that is admitted in the middle of a step joins the next one. Steps are planned: one begins where the
last was due, so a late wake-up is recorded and does not add up. An instance that was idle begins
with whoever comes.

The paper's formulas hold a slot for a full batch's step time whatever runs beside it
(``emulated.EmulatedDecode``, the default). This one is that of ``serving.decode_steps`` by batch,
whose steps ``harness.simulator.decode_steps`` plans alike, and of a profiler's target.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from harness.core import PrfaasError
from harness.engine.compute import Arrival
from harness.engine.emulated import EmulatedPlace, Slots, chunk_ends
from harness.engine.noise import Noise
from harness.engine.timeline import Alarm
from harness.kv_blocks import KvBlocks
from harness.profile import Profile


class _Member:
    """A request that decodes: its tokens so far, when the last was due, and who waits for more."""

    def __init__(self, context_tokens: int, output_tokens: int, granted_mono_ns: int) -> None:
        self.context_tokens = context_tokens
        self.output_tokens = output_tokens
        self.total = 1
        self.due_ns = granted_mono_ns
        self.stepped = asyncio.Event()
        self.error: PrfaasError | None = None


class SteppedDecode:
    """Slots and one loop of steps; ``serve`` is that loop and ends by cancellation."""

    def __init__(
        self,
        alarm: Alarm,
        profile: Profile,
        max_batch: int,
        time_scale: float,
        interval_tokens: int,
        noise: Noise,
        blocks: KvBlocks | None = None,
    ) -> None:
        self._alarm = alarm
        self._profile = profile
        self._time_scale = time_scale
        self._interval_tokens = interval_tokens
        self._noise = noise
        self._members: list[_Member] = []
        self._arrived = asyncio.Event()
        self.slots = Slots(max_batch, blocks)
        self.busy_s = 0.0

    async def until(self, mono_ns: int) -> None:
        """Return at a planned instant."""
        await self._alarm.until(mono_ns)

    def resident(self, keys: Sequence[int], tokens: int) -> None:
        """As ``EmulatedDecode.resident``."""

    async def place(self, arrival: Arrival) -> EmulatedPlace:
        """As ``EmulatedDecode.place``."""
        return EmulatedPlace(self.decode, arrival.digest, arrival.first_token)

    async def decode(
        self,
        granted_mono_ns: int,
        output_tokens: int,
        emit: Callable[[int], Awaitable[None]],
        context_tokens: int,
    ) -> float:
        """As ``EmulatedDecode.decode``; PrfaasError where the profile has no cost for the batch."""
        member = _Member(context_tokens, output_tokens, granted_mono_ns)
        late_ns = 0
        try:
            ends = chunk_ends(output_tokens, self._interval_tokens)
            if output_tokens > 1:
                self._members.append(member)
                self._arrived.set()
            for total in ends:
                while member.total < total and member.error is None:
                    member.stepped.clear()
                    await member.stepped.wait()
                if member.error is not None:
                    raise member.error
                if total == member.total:
                    late_ns = max(late_ns, self._alarm.now_ns() - member.due_ns)
                await emit(total)
        finally:
            if member in self._members:
                self._members.remove(member)
            end_ns = max(member.due_ns, granted_mono_ns)
            self.slots.release(end_ns, context_tokens + output_tokens)
        return late_ns / 1e9

    async def serve(self) -> None:
        """Step whoever is there."""
        while True:
            while not self._members:
                self._arrived.clear()
                await self._arrived.wait()
            due_ns = self._alarm.now_ns()
            while self._members:
                due_ns = await self._step(due_ns, tuple(self._members))

    async def _step(self, start_ns: int, running: tuple[_Member, ...]) -> int:
        """One step of those who ran when it began; gives when it was due."""
        tokens = sum(member.context_tokens + member.total for member in running)
        try:
            step_s = self._profile.decode_step_s(len(running), tokens / len(running))
        except PrfaasError as error:  # a batch without a cost: those requests', not the loop's
            for member in running:
                member.error = error
                member.stepped.set()
            self._members = [one for one in self._members if one not in running]
            return start_ns
        wall_s = step_s * self._noise.factor() / self._time_scale
        due_ns = start_ns + round(wall_s * 1e9)
        await self._alarm.until(due_ns)
        self.busy_s += wall_s * len(running)
        for member in running:
            member.total += 1
            member.due_ns = due_ns
            member.stepped.set()
            if member.total >= member.output_tokens and member in self._members:
                self._members.remove(member)
        return due_ns
