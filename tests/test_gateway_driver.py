"""The driver on its own, before a worker that says what the test wants."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
from scheduler_setup import config
from test_gateway_connection import Requests, server

from harness.child import Spool
from harness.gateway.cache_watch import follow_caches
from harness.gateway.decision_log import DecisionLog
from harness.gateway.driver import Driver
from harness.gateway.metrics import GatewayMetrics
from harness.gateway.upstream import Upstream
from harness.scheduling import events as ev
from harness.scheduling.scheduler import Scheduler

#: The instance that the scheduler knows is the worker's only one.
NAME = "a"


def driver_of(upstream: Upstream, log: DecisionLog, num_prfaas: int = 0) -> Driver:
    made = config(num_prfaas, 1, 1, threshold_tokens=100 if num_prfaas else None, cache=True)
    first, *rest = made.instances
    named = replace(made, instances=(replace(first, name=NAME), *rest))
    return Driver(lambda: Scheduler(named), upstream, log, GatewayMetrics(), 10.0)


def answer_of(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def test_a_pool_that_does_not_answer_is_asked_until_it_does(tmp_path: Path) -> None:
    pool = msgspec.json.encode({"seq": 9, "blocks": [1, 2, 3], "states": []})

    async def answer(number: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(answer_of(b"not now", 503) if number == 0 else answer_of(pool))

    async def main() -> None:
        with Spool(str(tmp_path / "decisions")) as spool, DecisionLog(spool) as log:
            async with server(answer) as (upstream, heads), driver_of(upstream, log) as driver:
                driver.tell(ev.CacheDelta(NAME, 9, added_blocks=(3,)))  # 8 were missed
                async with asyncio.timeout(10):
                    while driver.scheduler.cached_blocks != 3:
                        await asyncio.sleep(0.01)
                assert [head.split()[1] for head in heads] == [b"/cache_snapshot"] * 2

    asyncio.run(main())


def test_following_pools_outlives_what_is_no_report(tmp_path: Path) -> None:
    lines = (b'{"seq": 1, "x": ' + b"[" * 50_000 + b"\n", b'{"seq": 1, "added_blocks": [5]}\n')

    async def answer(number: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(answer_of(lines[min(number, 1)]))

    async def main() -> None:
        with Spool(str(tmp_path / "decisions")) as spool, DecisionLog(spool) as log:
            async with server(answer) as (upstream, _), driver_of(upstream, log) as driver:
                following = asyncio.create_task(follow_caches(upstream, driver, [NAME]))
                async with asyncio.timeout(10):
                    while driver.scheduler.cached_blocks != 1 and not following.done():
                        await asyncio.sleep(0.01)
                assert not following.done()
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())
