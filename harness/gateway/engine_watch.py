"""What SGLang's servers count: queues, and the KV bytes that went to decode servers.

``sglang:kv_transfer_total_mb`` of a prefill server is a histogram of MiB by request, pages times
the bytes of a page, with whatever state goes along. Its sum is a multiple of 2^-20, so a double
holds it exactly and a difference of two sums is a whole number of bytes. It is of the server, not
of a request, and of what its scheduler handed to the transfer engine, not of what a socket took:
the link's own counters say that. Histograms appear with their first sample; a server of several
ranks has a line a rank, which are summed. 0.5.9 counts no bytes.

Read here by a pattern and not by a parser of the whole, which takes 50 ms for a server's 4,000
lines, in which no request would be served. Source: SGLang 0.5.23,
``observability/metrics_collector.py``, ``disaggregation/common/conn.py``.
"""

import asyncio
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from harness.child import Spool
from harness.core import EngineError
from harness.gateway.config import WorkerAddress
from harness.gateway.upstream import Upstream

#: Wall time between two samples, of some 60 kB each, which of a PrfaaS server cross the link; and
#: for one answer.
PERIOD_S = 5.0
WITHIN_S = 10.0
_MIB = 1 << 20
_LINE = re.compile(
    rb"^sglang:(kv_transfer_total_mb_sum|kv_transfer_total_mb_count|num_queue_reqs"
    rb"|num_running_reqs)\{.*\} ([0-9eE.+-]+)\r?$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Counted:
    """A server's figures; None where it has no such line (yet)."""

    queued: int | None
    running: int | None
    kv_sent_bytes: int | None
    kv_transfers: int | None


def read_counted(exposition: bytes) -> Counted:
    """The figures in a server's ``/metrics``."""
    sums: dict[bytes, float] = {}
    for name, value in _LINE.findall(exposition):
        sums[name] = sums.get(name, 0.0) + float(value)

    def whole(name: bytes, unit: int = 1) -> int | None:
        return round(sums[name] * unit) if name in sums else None

    return Counted(
        queued=whole(b"num_queue_reqs"),
        running=whole(b"num_running_reqs"),
        kv_sent_bytes=whole(b"kv_transfer_total_mb_sum", _MIB),
        kv_transfers=whole(b"kv_transfer_total_mb_count"),
    )


async def ask_counted(upstream: Upstream, instance: str) -> Counted:
    """Ask a server now. EngineError where it does not answer in time."""
    try:
        async with asyncio.timeout(WITHIN_S):
            return read_counted(await upstream.ask(instance, "GET", "/metrics"))
    except TimeoutError as error:
        raise EngineError(f"{instance} did not say its metrics within {WITHIN_S:g} s") from error


class EngineWatch:
    """Async context manager: a row of every server at its start, each period, when asked, and at
    its end if they answer then."""

    def __init__(self, upstream: Upstream, workers: Sequence[WorkerAddress], spool: Spool) -> None:
        self._upstream = upstream
        self._workers = workers
        self._spool = spool
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.count()
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None, "it was entered"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._sample()

    async def count(self) -> None:
        """A row of every server now; EngineError where one does not tell."""
        await asyncio.gather(*(self._take(worker) for worker in self._workers))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._sample()

    async def _sample(self) -> None:
        """One that does not answer leaves no row; its requests say more of it."""
        for told in await asyncio.gather(
            *(self._take(worker) for worker in self._workers), return_exceptions=True
        ):
            if isinstance(told, EngineError):
                print(f"a server says nothing of itself: {told}", file=sys.stderr)
            elif isinstance(told, BaseException):
                raise told

    async def _take(self, worker: WorkerAddress) -> None:
        counted = await ask_counted(self._upstream, worker.name)
        self._spool.write(
            {
                "mono_ns": time.monotonic_ns(),
                "instance": worker.name,
                "role": worker.role,
                "queued": counted.queued,
                "running": counted.running,
                "kv_sent_wire_bytes_total": counted.kv_sent_bytes,
                "kv_transfers_total": counted.kv_transfers,
            }
        )
