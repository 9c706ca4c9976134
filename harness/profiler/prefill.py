"""T_prefill at one point: a visit is a few requests for one token, one at a time.

Each has a prompt that nobody has sent before. The server's counts must be the plan's: the prompt's
tokens, and the cached ones, 0 or the prefix that was sent just before. A request whose counts
differ measured something else: it is kept with the reason and not used. An engine that does not
count cached tokens is believed for fresh prompts and not for prefixes.
"""

import time
from dataclasses import asdict

from harness.core import EngineError
from harness.profiler.estimate import is_warm
from harness.profiler.gpu import Gpus
from harness.profiler.plan import Cell
from harness.profiler.prompts import Prompts
from harness.profiler.samples import Sample
from harness.profiler.target import Prefilled, Target

#: Requests that are measured in a visit.
REQUESTS = 2
#: A prefix that was evicted is sent again, so often.
TRIES = 3


class PrefillVisits:
    """Measures prefill points of one target in one session."""

    def __init__(
        self, target: Target, prompts: Prompts, gpus: Gpus, session: int, *, from_inside: bool
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._gpus = gpus
        self._session = session
        self._from_inside = from_inside

    async def __call__(self, cell: Cell, visit: int, *, is_first: bool) -> list[Sample]:
        """The samples of one visit; the first of a session begins with a warm-up."""
        samples: list[Sample] = []
        if is_first:
            warming: list[float] = []
            while not is_warm(warming):
                sample = await self._request(cell, visit, "warm_up")
                samples.append(sample)
                assert sample.outside_s is not None, "a request has a time from outside"
                warming.append(sample.outside_s)
        else:
            samples.append(await self._request(cell, visit, "after_change"))
        return samples + [await self._request(cell, visit, None) for _ in range(REQUESTS)]

    async def _request(self, cell: Cell, visit: int, because: str | None) -> Sample:
        start_ns, unix_s = time.monotonic_ns(), time.time()
        got = await self._prefilled(cell)
        fault = self._fault(cell, got)
        value_s = got.inside_s if self._from_inside else got.outside_s
        if value_s is None:
            raise EngineError("the engine stopped telling when it began and ended to prefill")
        gpu = self._gpus.between(start_ns, time.monotonic_ns())
        return Sample(
            **asdict(cell),
            session=self._session,
            visit=visit,
            used=because is None and fault is None,
            unused_because=fault or because,
            value_s=value_s,
            outside_s=got.outside_s,
            inside_s=got.inside_s,
            parts_s=got.parts,
            prompt_tokens=got.prompt_tokens,
            told_cached_tokens=got.cached_tokens,
            kv_wire_bytes=got.kv_wire_bytes,
            resident_tokens=got.resident_tokens,
            unix_s=unix_s,
            **({} if gpu is None else asdict(gpu)) | {"mono_ns": got.sent_mono_ns},
        )

    async def _prefilled(self, cell: Cell) -> Prefilled:
        if not cell.cached_tokens:
            return await self._target.prefill(self._prompts.fresh(cell.new_tokens))
        for _ in range(TRIES):
            prefix = self._prompts.fresh(cell.cached_tokens)
            await self._target.prefill(prefix)
            got = await self._target.prefill(prefix + self._prompts.fresh(cell.new_tokens))
            if got.cached_tokens == cell.cached_tokens:
                break
        return got

    def _fault(self, cell: Cell, got: Prefilled) -> str | None:
        """Why a request does not count."""
        planned = cell.new_tokens + cell.cached_tokens
        if got.prompt_tokens is not None and got.prompt_tokens != planned:
            return f"refused: {got.prompt_tokens} prompt tokens instead of {planned}"
        cached = got.cached_tokens
        if cached is None and cell.cached_tokens:
            return "refused: the engine does not say how many tokens were cached"
        if cached is not None and cached != cell.cached_tokens:
            return f"refused: {cached} cached tokens instead of {cell.cached_tokens}"
        return None
