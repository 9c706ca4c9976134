"""An instance's memory for cached prefixes and KV in transfer, with a queue for who waits for room.

The pool itself (``harness.prefix_pool``) says yes or no. Here a request whose KV does not fit
waits, first come first served, until others have given back enough. A ``Lease`` is what one request
has of one instance's memory: it ends once, whatever became of the request.

Changes leave as numbered deltas. Each call for news closes one delta, so that every follower sees
the same; one that fell behind the last ``LOG_DELTAS`` sees a gap in the numbers and asks for a
snapshot. Bytes are the scenario's: no memory of this size is taken.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import count

from harness.core import EngineError
from harness.prefix_pool import PoolDelta, PoolGeometry, PrefixPool

LOG_DELTAS = 256


class Lease:
    """One request's part of an instance's memory: a transfer, and prefix blocks that it pins."""

    def __init__(self, memory: "Memory", name: str) -> None:
        self._memory = memory
        self._name = name
        self._waiting: asyncio.Future[None] | None = None
        self._ended = False

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def open(self, nbytes: int) -> bool:
        """Room for a transfer at once, or False."""
        self._check_open()
        return self._memory.open(self._name, nbytes)

    async def reserve(self, nbytes: int, deadline_s: float) -> bool:
        """Room for a transfer of ``nbytes``, waited for if need be; whether it was waited for.

        EngineError where it can never fit or does not within ``deadline_s`` of wall time;
        CancelledError where the lease ends meanwhile.
        """
        self._check_open()
        memory = self._memory
        memory.check_size(self._name, nbytes)
        if memory.open(self._name, nbytes):
            return False
        self._waiting = asyncio.get_running_loop().create_future()
        memory.waiting.append((self._name, nbytes, self._waiting))
        try:
            async with asyncio.timeout(deadline_s):
                await self._waiting
        except TimeoutError as error:
            raise EngineError(
                f"memory: no room for {nbytes} bytes of KV within {deadline_s:g} s of wall time; "
                "give prefix_cache.memory more, or lower the load"
            ) from error
        self._check_open()
        return True

    def _check_open(self) -> None:
        """A request that has ended asks for nothing: whoever still works for it is to stop."""
        if self._ended:
            raise asyncio.CancelledError

    def shrink(self, nbytes: int) -> None:
        """The transfer needs no more than ``nbytes`` from now on."""
        self._check_open()
        self._memory.pool.shrink_transfer(self._name, nbytes)

    def acquire(self, keys: Sequence[int], tokens: int) -> None:
        """Pin a held prefix. CancelledError where the lease has ended."""
        self._check_open()
        self._memory.pool.acquire(self._name, keys, tokens)

    def insert(self, keys: Sequence[int], tokens: int) -> None:
        """Keep what was computed, with its states."""
        if not self._ended:
            self._memory.pool.insert(self._name, keys, tokens)

    def fitting(self, keys: Sequence[int], tokens: int) -> int:
        """Of the first ``tokens``, those that ``insert`` would surely keep."""
        return self._memory.pool.fitting(self._name, keys, tokens)

    def receive(self, keys: Sequence[int], tokens: int, *, state: bool) -> None:
        """Keep what came from elsewhere."""
        if not self._ended:
            self._memory.pool.receive(self._name, keys, tokens, state=state)

    def end_transfer(self) -> None:
        """The KV on its way has arrived; the prefix stays pinned."""
        self._memory.pool.close_transfer(self._name)
        self._memory.grant()

    def end(self) -> None:
        """Give everything back; once is enough."""
        if self._ended:
            return
        self._ended = True
        if self._waiting is not None:
            self._waiting.cancel()
        self._memory.pool.close_transfer(self._name)
        self._memory.pool.release(self._name)
        self._memory.grant()


class Memory:
    """The pool of one instance."""

    def __init__(self, name: str, geometry: PoolGeometry, capacity_bytes: float) -> None:
        self.name = name
        self.pool = PrefixPool(geometry, capacity_bytes)
        self.waiting: deque[tuple[str, int, asyncio.Future[None]]] = deque()
        self._numbers = count()
        self._log: deque[PoolDelta] = deque(maxlen=LOG_DELTAS)

    def lease(self) -> Lease:
        """For one request; to be ended."""
        return Lease(self, str(next(self._numbers)))

    def check_size(self, name: str, nbytes: int) -> None:
        """EngineError for KV that is larger than the whole memory, without what waits with it."""
        pool = self.pool
        if pool.geometry.blocks_of(nbytes) + pool.lease_blocks(name) > pool.capacity_blocks:
            raise EngineError(
                f"memory: {nbytes} bytes of KV are more than {self.name} has for all requests; "
                "give prefix_cache.memory more"
            )

    def open(self, name: str, nbytes: int) -> bool:
        """Set room aside, behind whoever waits already."""
        self.grant()
        return not self.waiting and self.pool.open_transfer(name, nbytes)

    def grant(self) -> None:
        """Let in who waits, in order, as far as there is room."""
        while self.waiting:
            name, nbytes, future = self.waiting[0]
            if not future.done():
                if not self.pool.open_transfer(name, nbytes):
                    return
                future.set_result(None)
            self.waiting.popleft()

    def deltas_after(self, seq: int | None) -> list[PoolDelta]:
        """What has changed since ``seq``, as far as it is still known; None: from now on."""
        if (delta := self.pool.take_delta()) is not None:
            self._log.append(delta)
        if seq is None:
            return []
        return [delta for delta in self._log if delta.seq > seq]

    @property
    def seq(self) -> int:
        """The number of the last delta."""
        return self._log[-1].seq if self._log else 0

    def snapshot(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The number of the last delta, which closes now, and all blocks and states."""
        self.deltas_after(None)
        return self.pool.snapshot()
