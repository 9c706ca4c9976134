"""Decode instances: slots that are granted first come first served, and decoding in them.

A request that has no slot ``admission_deadline_s`` after it asked for one fails. A slot is held
until (output_tokens - 1) steps after decoding began, prefill having computed the first token. A
step takes the time of a full batch, or of those that run (``harness.simulator.decode_steps``).

With a ``decode_memory`` a slot comes with blocks for prompt and output (``harness.kv_blocks``),
held as long; the first in line waits for both, and those behind it for their turn.
"""

from collections.abc import Callable

from harness.core import Instance
from harness.kv_blocks import KvBlocks
from harness.scenario import Scenario
from harness.scheduling import events as ev
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.agenda import Agenda
from harness.simulator.control import Control
from harness.simulator.decode_steps import SteppingBatch
from harness.simulator.records import DecodeQueue, Live
from harness.simulator.rows import PHASE_CODES
from harness.simulator.usage import Usage

_DEADLINE = "decode_admission"


class DecodeService:
    """The slots of the instances that decode. ``reserved`` is called with a request that was
    granted one before its prefill, ``leave`` with one that ends, the code of the phase that it
    failed in (0: none) and what the scheduler is told."""

    def __init__(
        self,
        scenario: Scenario,
        config: SchedulerConfig,
        agenda: Agenda,
        control: Control,
        usage: Usage,
        reserved: Callable[[Live, float], None],
        leave: Callable[[Live, int, ev.Finished | ev.Failed, float], None],
    ) -> None:
        self._agenda = agenda
        self._tell = control.tell
        self._usage = usage
        self._reserved, self._leave = reserved, leave
        self._decoding = config.decoding
        self._step_s = config.decode_step_s
        #: Of instances on another hardware than the first PD cluster's.
        self._steps_s: dict[str, float] = {}
        self._reserve_first = config.admission == "reserve_first"
        self._deadline_s = config.scheduling.admission_deadline_s
        self._queues: dict[str, DecodeQueue] = {}
        self._profiles = {name: one.profile for name, one in scenario.hardware.items()}
        serving = scenario.serving
        self._by_batch = serving.decode_steps == "by_batch"
        #: The requests that step together, of each instance that does so.
        self._stepping: dict[str, SteppingBatch] = {}
        #: Of instances that are slow: how many times as long everything takes.
        self._slowness: dict[str, float] = {}
        self._blocks: KvBlocks | None = None
        if serving.decode_memory_bytes is not None:
            self._blocks = KvBlocks.of(
                scenario.model.architecture, scenario.prefix_cache, serving.decode_memory_bytes
            )

    def serve(self, one: Instance) -> None:
        """Put an instance into service."""
        own = self._decoding(one.hardware)
        queue = DecodeQueue(own.max_batch)
        if own.step_s != self._step_s:
            self._steps_s[one.name] = own.step_s
        if self._blocks is not None:
            queue.free_blocks = self._blocks.capacity
        self._queues[one.name] = queue
        if self._by_batch:
            profile = self._profiles[one.hardware]
            self._stepping[one.name] = SteppingBatch(self._agenda, profile, self._finish)
            if one.name in self._slowness:
                self._stepping[one.name].slow(self._slowness[one.name], self._agenda.now_s)

    def retire(self, name: str) -> DecodeQueue | None:
        """Take an instance out of service; None where it is none of these."""
        return self._queues.pop(name, None)

    def ask(self, live: Live, now_s: float) -> None:
        """The request asks for a slot."""
        decode = self._queues[live.route.decode.name]
        if self._blocks is not None:
            live.blocks = self._blocks.taken(live.input_tokens + live.output_tokens)
            assert live.blocks <= self._blocks.capacity, "a request that never fits was let in"
        if not decode.queue and decode.fits(live):
            self._grant(decode, live, now_s)
            return
        if live.landed:
            # Where a slot is granted at once its grant says that the KV is there.
            self._tell(ev.TransferDone(live.rid, live.kv_bytes), now_s)
        decode.queue.append(live)
        self._agenda.at(now_s + self._deadline_s, self._give_up, live)

    def _grant(self, decode: DecodeQueue, live: Live, now_s: float) -> None:
        decode.free -= 1
        decode.free_blocks -= live.blocks
        live.has_slot = True
        live.asked_slot_s = now_s
        if self._reserve_first:
            self._reserved(live, now_s)
        else:
            self.begin(live, now_s)

    def begin(self, live: Live, now_s: float) -> None:
        """Decode: the request has its slot and its KV."""
        live.granted_s = now_s
        self._tell(ev.DecodeAdmitted(live.rid), now_s)
        if self._by_batch and live.output_tokens > 1:
            self._stepping[live.route.decode.name].join(live, now_s)
            return
        step_s = self._step_s
        if self._steps_s:
            step_s = self._steps_s.get(live.route.decode.name, step_s)
        if self._slowness:
            step_s *= self._slowness.get(live.route.decode.name, 1.0)
        live.second_s = now_s + step_s
        self._agenda.at(now_s + (live.output_tokens - 1) * step_s, self._finish, live)

    def _finish(self, live: Live, now_s: float) -> None:
        if live.gone:
            return
        self._leave(live, 0, ev.Finished(live.rid), now_s)

    def _give_up(self, live: Live, now_s: float) -> None:
        if live.has_slot or live.gone:
            return
        self._queues[live.decode.name].queue.remove(live)
        self._leave(live, PHASE_CODES[_DEADLINE], ev.Failed(live.rid, _DEADLINE), now_s)

    def release(self, live: Live, now_s: float) -> None:
        """A request that ends gives its slot back."""
        if live.has_slot:
            self._usage.slots_busy_s += now_s - live.asked_slot_s
            decode = self._queues.get(live.route.decode.name)
            if decode is not None:
                decode.free += 1
                decode.free_blocks += live.blocks

    def grant_next(self, live: Live, now_s: float) -> None:
        """What a request that has ended leaves goes to those that have waited longest."""
        decode = self._queues.get(live.route.decode.name)
        if decode is None:
            return  # it died
        while decode.queue and decode.fits(decode.queue[0]):
            self._grant(decode, decode.queue.popleft(), now_s)

    def fail(self, name: str) -> None:
        """An instance is gone; nothing where it is none of these."""
        self._queues.pop(name, None)
        stepping = self._stepping.pop(name, None)
        if stepping is not None:
            stepping.stop()

    def slow(self, name: str, factor: float, now_s: float, /) -> None:
        """What begins at the instance takes ``factor`` times as long from now on."""
        self._slowness[name] = factor
        if name in self._stepping:
            self._stepping[name].slow(factor, now_s)

    def unqueue(self, live: Live) -> None:
        """Nobody waits for a slot with this request any more."""
        decode = self._queues.get(live.route.decode.name)
        if decode is not None and not live.has_slot and live in decode.queue:
            decode.queue.remove(live)

    def drop(self, live: Live, now_s: float) -> None:
        """Its slot is given back when it is cleared; decoding it ends with its instance alone."""
