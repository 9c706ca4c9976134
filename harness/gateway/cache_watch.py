"""What every instance's pool gains and loses, made into the scheduler's ``CacheDelta``.

Each worker streams its pool's changes, one JSON line each, with a number that counts them: a gap,
as after a connection that broke, makes the scheduler ask for a snapshot.
"""

import asyncio
import sys
from collections.abc import Iterable
from contextlib import aclosing

import msgspec

from harness.core import EngineError
from harness.gateway.driver import Driver
from harness.gateway.upstream import Upstream
from harness.scheduling.events import CacheDelta

_RETRY_S = 1.0


class _Line(msgspec.Struct):
    seq: int
    added_blocks: tuple[int, ...] = ()
    removed_blocks: tuple[int, ...] = ()
    added_states: tuple[int, ...] = ()
    removed_states: tuple[int, ...] = ()


_decoder = msgspec.json.Decoder(_Line)


async def follow_caches(upstream: Upstream, driver: Driver, instances: Iterable[str]) -> None:
    """Until cancelled; a worker that does not answer is asked again."""
    async with asyncio.TaskGroup() as following:
        for instance in instances:
            following.create_task(_follow(upstream, driver, instance))


async def _follow(upstream: Upstream, driver: Driver, instance: str) -> None:
    while True:
        try:
            async with aclosing(upstream.follow(instance, "/cache_deltas")) as lines:
                async for line in lines:
                    one = _decoder.decode(line)
                    driver.tell(
                        CacheDelta(
                            instance,
                            one.seq,
                            one.added_blocks,
                            one.removed_blocks,
                            one.added_states,
                            one.removed_states,
                        )
                    )
        except (EngineError, msgspec.MsgspecError, RecursionError) as error:
            print(f"{instance} tells nothing of its pool: {error}", file=sys.stderr)
        await asyncio.sleep(_RETRY_S)
