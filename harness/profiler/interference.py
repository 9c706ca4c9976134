"""What KV on its way costs who computes: transfers take memory bandwidth and copy engines.

    decode_under_ingress   a batch decodes while other prompts are prefilled and their KV arrives,
                           one after the other without a pause
    prefill_under_egress   prompts are prefilled in turn with others of their length, so that while
                           one is computed the KV of the one before leaves; from inside, since
                           each waits for the other

Each is set against the same point without traffic. Only a disaggregated pair has either. In an
emulated engine they do not disturb each other, so the ratio is 1 within its interval.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from harness.architecture import Architecture
from harness.core import EngineError
from harness.profiler.decode import DecodeVisits
from harness.profiler.plan import Cell
from harness.profiler.prefill import PrefillVisits
from harness.profiler.prompts import Prompts
from harness.profiler.samples import Sample
from harness.profiler.target import Target


class _Traffic:
    """Transfers that were completed."""

    def __init__(self) -> None:
        self.count = 0
        self.error: EngineError | None = None


@asynccontextmanager
async def _transfers(target: Target, prompts: Prompts, tokens: int) -> AsyncIterator[_Traffic]:
    """Prompts of ``tokens`` go through the pair one after the other meanwhile."""
    traffic = _Traffic()

    async def drive() -> None:
        try:
            while True:
                await target.prefill(prompts.fresh(tokens))
                traffic.count += 1
        except EngineError as error:
            traffic.error = error

    task = asyncio.create_task(drive())
    try:
        yield traffic
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class IngressVisits:
    """Decode batches beside arriving KV. The cell's ``new_tokens`` is what the arriving prompts
    have."""

    def __init__(
        self, quiet: DecodeVisits, target: Target, prompts: Prompts, architecture: Architecture
    ) -> None:
        self._quiet, self._target, self._prompts = quiet, target, prompts
        self._architecture = architecture

    async def __call__(self, cell: Cell, visit: int, *, is_first: bool) -> list[Sample]:
        began_s = time.monotonic()
        async with _transfers(self._target, self._prompts, cell.new_tokens) as traffic:
            samples = await self._quiet(cell, visit, is_first=is_first)
            lasted_s = (time.monotonic() - began_s) * self._target.time_scale
        if traffic.error is not None:
            raise traffic.error
        rate = traffic.count * self._architecture.kv_bytes(cell.new_tokens) / lasted_s
        if not traffic.count:  # the batch was over before one prompt had gone through
            reason = "refused: no KV arrived meanwhile"
            samples = [replace(one, used=False, unused_because=reason) for one in samples]
        return [replace(one, egress_bytes_per_s=rate) for one in samples]


class EgressVisits:
    """Prefill of a prompt just behind another of its length."""

    def __init__(
        self, alone: PrefillVisits, target: Target, prompts: Prompts, architecture: Architecture
    ) -> None:
        self._alone, self._target, self._prompts = alone, target, prompts
        self._architecture = architecture

    async def __call__(self, cell: Cell, visit: int, *, is_first: bool) -> list[Sample]:
        async with _transfers(self._target, self._prompts, cell.new_tokens) as traffic:
            samples = await self._alone(cell, visit, is_first=is_first)
        if traffic.error is not None:
            raise traffic.error
        kv_bytes = self._architecture.kv_bytes(cell.new_tokens)
        # Every prefill measured has one before it: as many bytes leave as it makes.
        return [
            replace(one, egress_bytes_per_s=kv_bytes / one.value_s if one.value_s else None)
            for one in samples
        ]
