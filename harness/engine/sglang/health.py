"""What a running server says of itself over HTTP: whether it is well, and what it is."""

import asyncio
import contextlib
from typing import Any

import aiohttp

from harness.core import EngineError

#: Of one question; a busy server answers late, one that has no memory left not at all.
TIMEOUT_S = 10.0
POLL_S = 0.25


class Speaker:
    """Asks one server, with its bearer token."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str) -> None:
        self._session, self.url = session, url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def is_well(self) -> bool:
        """Whether ``/health`` says so; false where nobody answers."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            return (await self._get("/health"))[0] == 200
        return False

    async def get_ready(self) -> None:
        """Wait until it is well; the caller bounds the time."""
        while not await self.is_well():
            await asyncio.sleep(POLL_S)

    async def server_info(self) -> dict[str, Any]:
        """``/server_info``, or what it was called before; EngineError where it has neither."""
        for path in ("/server_info", "/get_server_info"):
            try:
                _, body = await self._get(path)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise EngineError(
                    f"the SGLang server at {self.url} did not answer {path}: "
                    f"{error or type(error).__name__}"
                ) from error
            if isinstance(body, dict):
                return body
        raise EngineError(
            f"the server at {self.url} knows no /server_info: it is no SGLang server, or wants "
            "another API key"
        )

    async def metrics(self) -> str:
        """``/metrics``, Prometheus text."""
        async with self._session.get(f"{self.url}/metrics", headers=self._headers) as response:
            return await response.text()

    async def _get(self, path: str) -> tuple[int, object]:
        """Status, and the body of a 200 that is JSON."""
        timeout = aiohttp.ClientTimeout(TIMEOUT_S)
        async with self._session.get(
            self.url + path, headers=self._headers, timeout=timeout
        ) as response:
            is_json = response.status == 200 and "json" in response.content_type
            return response.status, await response.json() if is_json else None


async def watch_health(speaker: Speaker, period_s: float, unhealthy_s: float) -> None:
    """Ends when the server has not been well for ``unhealthy_s``."""
    clock = asyncio.get_running_loop().time
    last_well_s = clock()
    while clock() - last_well_s < unhealthy_s:
        await asyncio.sleep(period_s)
        if await speaker.is_well():
            last_well_s = clock()
