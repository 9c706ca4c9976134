"""Clients that send or take nothing hold neither a place nor the scheduler's estimate for ever."""

import asyncio
import contextlib
import gc
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.web_protocol import RequestHandler
from gateway_setup import Setup, body_of, gateway_over

from harness.core import EngineError, Instance, Route
from harness.gateway.flight import Attempt, Urgent
from harness.scheduling.events import Dispatch

IDS = list(range(20_000, 20_600))
LOCAL = "deployments.prfaas_pd.threshold_tokens=1000000"


@contextlib.asynccontextmanager
async def raw_client(setup: Setup, head: str, body: bytes = b"") -> AsyncIterator[socket.socket]:
    """A connection that has sent so much and has little room for an answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", setup.gateway.port))
        await loop.sock_sendall(client, f"{head}\r\nHost: x\r\n\r\n".encode() + body)
        yield client


def test_a_client_that_reads_nothing_is_let_go_of(tmp_path: Path) -> None:
    body = json.dumps(body_of(IDS, 500_000, "deaf") | {"stream": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nContent-Length: {len(body)}"

    async def main() -> None:
        async with (
            gateway_over(
                tmp_path,
                {"pd": "p0 d0"},
                LOCAL,
                engine={"decode_step_s": 1e-6, "stream_interval_tokens": 2000},
                request_timeout_wall_s=1.0,
            ) as setup,
            raw_client(setup, head, body),
        ):
            await setup.until(lambda state: "deaf" in state["routes"])
            await setup.idle()  # while it is still connected
            row = setup.row("deaf")
            assert (row["outcome"], row["failure_phase"]) == ("failed", "decode")
            assert "no answer within 1 s" in row["failure_message"]

    asyncio.run(main())


def test_nor_is_one_that_stops_reading_before_the_end(tmp_path: Path) -> None:
    body = json.dumps(body_of(IDS, 60, "deaf") | {"stream": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nContent-Length: {len(body)}"

    async def main() -> None:
        async with (
            gateway_over(tmp_path, {"pd": "p0 d0"}, LOCAL, request_timeout_wall_s=1.5) as setup,
            raw_client(setup, head, body) as client,
        ):
            await setup.until(lambda state: state["routes"]["deaf"]["phase"] == "decode")
            (serving,) = (
                one.transport
                for one in gc.get_objects()
                if isinstance(one, RequestHandler)
                and one.transport is not None
                and one.transport.get_extra_info("peername") == client.getsockname()
            )
            serving.write(bytes(8_000_000))  # more than the kernel takes of what is not read
            await setup.idle()
            assert setup.row("deaf")["outcome"] == "failed"
            assert serving.is_closing()

    asyncio.run(main())


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        head = "POST /generate HTTP/1.1\r\nContent-Length: 1000"
        async with (
            gateway_over(tmp_path, {"pd": "p0 d0"}, LOCAL, request_timeout_wall_s=0.5) as setup,
            raw_client(setup, head, b"{") as client,
        ):
            async with asyncio.timeout(10):
                said = await asyncio.get_running_loop().sock_recv(client, 4096)
            assert said.startswith(b"HTTP/1.1 408 ")

    asyncio.run(main())


def test_a_request_that_is_cancelled_as_its_turn_comes_stops() -> None:
    async def main() -> None:
        urgent = Urgent()
        urgent.begin()
        waiting = asyncio.create_task(urgent.none())
        await asyncio.sleep(0)
        urgent.end()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


def test_an_attempt_that_is_lost_does_not_wait_for_its_copy() -> None:
    async def main() -> None:
        prefill, decode = (Instance(role, "pd", role, "x") for role in ("prefill", "decode"))
        attempt = Attempt(
            Dispatch("r", Route(prefill, decode), 1, 1, 0, None, 1.0, 0.0, 1.0, 1.0), Urgent()
        )
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def copy() -> None:
            await never

        asyncio.get_running_loop().call_soon(attempt.lose, EngineError("it went down"))
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match="it went down"):
                await attempt.unless_lost(copy())
        assert never.cancelled()
        attempt.close()

    asyncio.run(main())
