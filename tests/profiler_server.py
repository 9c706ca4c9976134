"""A server of known costs that speaks SGLang's and OpenAI's surface, for tests of the profiler.

One request is prefilled at a time for ``prefill_s(tokens)``; tokens follow every ``step_s``. What
it says of a request can be made wrong.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

LIMIT_TOKENS = 4096


@dataclass
class KnownServer:
    """``told_cached`` and ``told_prompt`` map what is true to what is said; ``fails_above`` refuses
    longer prompts; ``timed`` is whether ``meta_info`` has SGLang's times. ``told`` are settings
    beside its own, ``kv_bytes`` is what its transfer counter adds for a prompt, ``aborts`` why it
    aborts every request. The bootstrap ports of requests are kept."""

    prefill_s: Callable[[int], float] = lambda tokens: 0.004 + tokens * 1e-6
    step_s: float = 0.002
    told_cached: Callable[[int], int | None] = lambda _: 0
    told_prompt: Callable[[int], int] = lambda tokens: tokens
    fails_above: int = LIMIT_TOKENS
    timed: bool = True
    version: str = "0.5.23"
    told: dict[str, Any] = field(default_factory=dict)
    kv_bytes: Callable[[int], int] | None = None
    aborts: str | None = None
    requests: int = 0
    bootstrap_ports: set[int] = field(default_factory=set)
    _kv_bytes: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/get_server_info", self._info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": self.version,
                "context_length": LIMIT_TOKENS,
                "max_total_num_tokens": 40_000,
                "max_running_requests": 4,
                "disable_radix_cache": True,
                "page_size": 1,
                "random_seed": time.monotonic_ns(),
            }
            | self.told
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.kv_bytes is None or not self._kv_bytes:
            return web.Response(text="")
        mib = self._kv_bytes / 2**20
        return web.Response(text=f'sglang:kv_transfer_total_mb_sum{{tp_rank="0"}} {mib!r}\n')

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": LIMIT_TOKENS}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        received_s = time.time()
        if "bootstrap_port" in body:
            self.bootstrap_ports.add(body["bootstrap_port"])
        tokens, output = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]

        def event(total: int, began_s: float, ended_s: float) -> dict[str, Any]:
            meta: dict[str, Any] = {
                "prompt_tokens": self.told_prompt(tokens),
                "completion_tokens": total,
                "cached_tokens": self.told_cached(tokens),
            }
            if self.aborts is not None:
                meta["finish_reason"] = {"type": "abort", "message": self.aborts}
            if self.timed and total == output:
                meta |= {
                    "request_received_ts": received_s,
                    "forward_entry_time": began_s,
                    "prefill_finished_time": ended_s,
                    "request_finished_ts": time.time(),
                }
            return {"text": " x" * total, "output_ids": [7] * total, "meta_info": meta}

        return await self._stream(request, tokens, output, event)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["model"] == "tiny"
        tokens, output = len(body["prompt"]), body["max_tokens"]

        def event(total: int, _began_s: float, _ended_s: float) -> dict[str, Any]:
            usage: dict[str, Any] = {
                "prompt_tokens": self.told_prompt(tokens),
                "completion_tokens": total,
            }
            return {"choices": [{"text": " x"}], "usage": usage}

        return await self._stream(request, tokens, output, event)

    async def _stream(
        self,
        request: web.Request,
        tokens: int,
        output: int,
        event: Callable[[int, float, float], dict[str, Any]],
    ) -> web.StreamResponse:
        self.requests += 1
        if tokens > self.fails_above:
            return web.json_response({"error": "too long"}, status=400)
        async with self._turn:
            began_s = time.time()
            await asyncio.sleep(self.prefill_s(tokens))
            ended_s = time.time()
        if self.kv_bytes is not None:
            self._kv_bytes += self.kv_bytes(tokens)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with contextlib.suppress(ConnectionResetError):  # a batch is stopped when it has been seen
            await response.prepare(request)
            await self._write(
                response, (json.dumps(event(n + 1, began_s, ended_s)) for n in range(output))
            )
        return response

    async def _write(self, response: web.StreamResponse, events: Iterable[str]) -> None:
        due_s = time.monotonic()
        for chunk in events:
            await response.write(f"data: {chunk}\n\n".encode())
            due_s += self.step_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()


@asynccontextmanager
async def serving(server: KnownServer) -> AsyncIterator[str]:
    """The URL that it serves at."""
    runner = web.AppRunner(server.application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
