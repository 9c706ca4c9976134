"""T_decode at one point: a visit is one batch of requests that decode together.

All requests of a batch are started at once. They do not begin to decode at once, since they are
prefilled one after another, so steps count only while all run:

    from   the last one's second token and SKIP steps, at least SKIP_WALL_S, more
    to     STEPS steps of the last one, at least STEPS_WALL_S, later, when all are stopped

The value is the last one's time from the first to the last token of the window over the tokens
between: all step together, so one tells for all. Both ends are the first token at or after an
instant: a stall that delivers several tokens at once delays either end alike. The times between
tokens of all requests are kept for the distribution.

The context that a step has is prompt plus generated tokens, meaned over requests and window. It is
met by the prompt's length: those who began earlier have generated some by the time the window
opens, as many as in the batch before, so prompts are that much shorter. A batch whose context is
off by more than CONTEXT_WITHIN, and CONTEXT_TOKENS, is kept and not used.

The least times are for engines whose steps are fast: a window of 32 steps of 2 ms would be as long
as a stall of the machine, and begin in what the prefill left to do.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from harness.core import EngineError
from harness.profiler.estimate import is_warm
from harness.profiler.gpu import Gpus
from harness.profiler.plan import Cell
from harness.profiler.probe import Tokens
from harness.profiler.prompts import Prompt, Prompts
from harness.profiler.samples import Sample
from harness.profiler.target import Target

SKIP, STEPS = 4, 32
SKIP_WALL_S, STEPS_WALL_S = 0.05, 0.25
CONTEXT_WITHIN, CONTEXT_TOKENS = 0.02, 64
#: Tokens that a request may generate while it waits for the others.
MOST_OUTPUT_TOKENS = 16_384
#: Times between tokens that are kept of a batch.
MOST_STEPS = 2_048


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch: wall time between tokens in the window, and how many tokens a request had
    generated in the middle of it, on average."""

    start_mono_ns: int
    end_mono_ns: int
    mean_wall_s: float
    gaps_wall_s: tuple[float, ...]
    generated_tokens: float


class _Together:
    """Watches streams until all have run together for long enough."""

    def __init__(self, count: int, skip: int, steps: int) -> None:
        self.streams = [Tokens(on_token=partial(self._saw, i)) for i in range(count)]
        self.done = asyncio.Event()
        #: Places of the window's first and last token in the last one's stream.
        self.window: tuple[int, int] | None = None
        self._waiting = set(range(count))
        self._skip, self._steps = skip, steps
        self._last = -1
        #: When all ran, and the place of the window's first token.
        self._all_ns = 0
        self._from: int | None = None

    def _saw(self, index: int) -> None:
        stream = self.streams[index]
        if self._waiting:
            if stream.total >= 2:
                self._waiting.discard(index)
                self._last, self._all_ns = index, stream.mono_ns[-1]
            return
        if index != self._last or self.window is not None:
            return
        now_ns, place = stream.mono_ns[-1], len(stream.mono_ns) - 1
        if self._from is None:
            lasted_s = (now_ns - self._all_ns) / 1e9
            if stream.total >= 2 + self._skip and lasted_s >= SKIP_WALL_S:
                self._from = place
            return
        lasted_s = (now_ns - stream.mono_ns[self._from]) / 1e9
        if stream.total >= stream.totals[self._from] + self._steps and lasted_s >= STEPS_WALL_S:
            self.window = (self._from, place)
            self.done.set()

    @property
    def last(self) -> Tokens:
        """The stream that began to decode last."""
        return self.streams[self._last]


async def run_batch(
    target: Target, prompts: Sequence[Prompt], output_tokens: int, steps: int = STEPS
) -> Batch:
    """Run one batch. EngineError where a request failed, or ended before all ran together."""
    together = _Together(len(prompts), SKIP, steps)
    tasks = [
        asyncio.create_task(target.decode(prompt, output_tokens, stream))
        for prompt, stream in zip(prompts, together.streams, strict=True)
    ]
    ready = asyncio.create_task(together.done.wait())
    either: list[asyncio.Task[Any]] = [*tasks, ready]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        if together.window is None:
            raise EngineError(
                f"a request of a batch of {len(prompts)} generated its {output_tokens} tokens "
                "before all ran together: the engine does not run so many at this context"
            )
    finally:
        for one in either:
            one.cancel()
        await asyncio.gather(*either, return_exceptions=True)
    return _batch(together)


def _batch(together: _Together) -> Batch:
    assert together.window is not None
    (first, final), last = together.window, together.last
    low_ns, high_ns = last.mono_ns[first], last.mono_ns[final]
    step_s = (high_ns - low_ns) / 1e9 / (last.totals[final] - last.totals[first])
    gaps: list[float] = []
    generated = []
    for stream in together.streams:
        inside = [i for i, at in enumerate(stream.mono_ns) if low_ns <= at <= high_ns]
        if len(inside) < 2:
            continue
        generated.append((stream.totals[inside[0]] + stream.totals[inside[-1]]) / 2)
        for i in inside[1:]:
            count = stream.totals[i] - stream.totals[i - 1]
            gaps += [(stream.mono_ns[i] - stream.mono_ns[i - 1]) / 1e9 / count] * count
    return Batch(low_ns, high_ns, step_s, tuple(gaps[:MOST_STEPS]), fmean(generated))


class DecodeVisits:
    """Measures decode points of one target in one session."""

    def __init__(
        self,
        target: Target,
        prompts: Prompts,
        gpus: Gpus,
        session: int,
        limit_tokens: int | None,
        steps: int = STEPS,
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._gpus = gpus
        self._session = session
        self._limit_tokens = limit_tokens
        self._steps = steps
        #: Tokens that requests have generated by the middle of the window, by the last batch.
        self._generated: dict[tuple[int, int], float] = {}

    async def __call__(self, cell: Cell, visit: int, *, is_first: bool) -> list[Sample]:
        """The samples of one visit; the first of a session begins with a warm-up."""
        samples: list[Sample] = []
        if is_first:
            warming: list[float] = []
            while not is_warm(warming, group=1):
                sample = await self.run(cell, visit, "warm_up")
                samples.append(sample)
                assert sample.value_s is not None, "a batch that was measured has a step time"
                warming.append(sample.value_s)
        return [*samples, await self.run(cell, visit, None)]

    async def run(self, cell: Cell, visit: int, because: str | None) -> Sample:
        """One batch as a sample."""
        point = (cell.batch, cell.context_tokens)
        ahead = self._generated.get(point, 2 + SKIP + self._steps / 2)
        tokens = round(cell.context_tokens - ahead)
        if tokens < 1:
            raise EngineError(
                f"requests have generated {ahead:.0f} tokens by the time all {cell.batch} run, so "
                f"a context of {cell.context_tokens} cannot be had"
            )
        output_tokens = MOST_OUTPUT_TOKENS
        if self._limit_tokens is not None:
            output_tokens = max(1, min(output_tokens, self._limit_tokens - tokens))
        prompts = [self._prompts.fresh(tokens) for _ in range(cell.batch)]
        unix_s = time.time()
        got = await run_batch(self._target, prompts, output_tokens, self._steps)
        self._generated[point] = got.generated_tokens
        context = tokens + got.generated_tokens
        off = abs(context - cell.context_tokens)
        fault = None
        if off > max(CONTEXT_TOKENS, CONTEXT_WITHIN * cell.context_tokens):
            fault = f"refused: a mean context of {context:.0f} instead of {cell.context_tokens}"
        gpu = self._gpus.between(got.start_mono_ns, got.end_mono_ns)
        scale = self._target.time_scale
        return Sample(
            **asdict(cell),
            session=self._session,
            visit=visit,
            used=because is None and fault is None,
            unused_because=because or fault,
            value_s=got.mean_wall_s * scale,
            mean_context_tokens=context,
            steps_s=tuple(gap * scale for gap in got.gaps_wall_s),
            unix_s=unix_s,
            **({} if gpu is None else asdict(gpu)) | {"mono_ns": got.start_mono_ns},
        )
