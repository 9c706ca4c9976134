"""Following the link's samples before a worker that falls silent, as after an outage."""

import asyncio
from pathlib import Path

import msgspec
from test_gateway_connection import Requests, server
from test_gateway_driver import driver_of

from harness.child import Spool
from harness.gateway.config import WorkerAddress
from harness.gateway.decision_log import DecisionLog
from harness.gateway.link_watch import SILENT_S, LinkWatch

LINE = msgspec.json.encode([]) + b"\n"
ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


def test_a_silent_stream_is_asked_for_anew(tmp_path: Path) -> None:
    async def answer(number: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(ENDLESS + LINE if number == 0 else ENDLESS + 3 * LINE)
        await requests.next()  # until the gateway gives the connection up

    async def main() -> None:
        with Spool(str(tmp_path / "d")) as spool, DecisionLog(spool) as log:
            async with server(answer) as (upstream, heads), driver_of(upstream, log, 1) as driver:
                sender = WorkerAddress("a", "prfaas", "prefill", "fast", "127.0.0.1", 1)
                with Spool(str(tmp_path / "link")) as link:
                    watch = LinkWatch(upstream, [sender], driver, link, 10.0, 1000.0)
                    following = asyncio.create_task(watch.follow())
                    async with asyncio.timeout(SILENT_S + 10):
                        while len(heads) < 2:
                            await asyncio.sleep(0.01)
                    assert not following.done()
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
        rows = (tmp_path / "link").read_text().splitlines()
        assert len(rows) >= 1

    asyncio.run(main())
