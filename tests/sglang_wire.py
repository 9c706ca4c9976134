"""A pair of servers that say what SGLang 0.5.23 said of a request, key by key, and compute nothing.

Keys and their order are those of a recorded exchange with two real servers. What goes wrong with
real ones is told by ``Manner``: each is a way in which a decode server may answer without KV.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from harness.core import EngineError
from harness.server import serve_http

PAGE_TOKENS = 64


@dataclass
class Manner:
    """How a pair behaves. ``pd`` False: no PD mode, so that a request is served alone."""

    prefill_pd: bool = True
    decode_pd: bool = True
    #: Bytes a page of KV has; what is not ``counted`` is left out of /metrics.
    page_bytes: int = 32_768
    counted: bool = True
    #: Added to every token that decode tells.
    other_weights: int = 0
    incremental: bool = False
    abort: str | None = None


@dataclass
class Pair:
    """Two servers in this process; ``asked`` are the bodies that came, by role."""

    manner: Manner
    ports: dict[str, int] = field(default_factory=dict)
    asked: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {"prefill": [], "decode": []}
    )
    pages: int = 0
    transfers: int = 0
    _rooms: dict[int, asyncio.Event] = field(default_factory=dict)

    async def generate(self, request: web.Request, role: str) -> web.StreamResponse:
        body = await request.json()
        self.asked[role].append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in [one async for one in self._chunks(body, role)]:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _chunks(self, body: dict[str, Any], role: str) -> AsyncIterator[dict[str, Any]]:
        manner, ids = self.manner, body["input_ids"]
        in_pd = manner.prefill_pd if role == "prefill" else manner.decode_pd
        room = self._rooms.setdefault(body["bootstrap_room"], asyncio.Event())
        if role == "decode" and in_pd:
            room.set()
        elif role == "prefill" and in_pd:
            await room.wait()  # nobody takes the KV: for 300 s nothing is said
            self.pages += -(-len(ids) // PAGE_TOKENS)
            self.transfers += 1
        if manner.abort is not None and role == "decode":
            yield self._chunk(body, [], {"type": "abort", "message": manner.abort}, role)
            return
        total = 1 if role == "prefill" and in_pd else body["sampling_params"]["max_new_tokens"]
        shift = manner.other_weights if role == "decode" else 0
        tokens = [(sum(ids) + 7 * k + shift) % 90_000 for k in range(total)]
        for count in range(1, total + 1):
            finish = {"type": "length", "length": total} if count == total else None
            chunk = self._chunk(body, tokens[:count], finish, role)
            if manner.incremental and role == "decode":
                chunk["output_ids"] = tokens[count - 1 : count]
                chunk["text"] = f" w{tokens[count - 1]}"
            yield chunk

    def _chunk(self, body: dict[str, Any], tokens: list[int], finish: Any, role: str) -> Any:
        now_ts = 1_796_069_165.0  # one instant, so that every difference is known
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": "default",
            "num_retractions": 0,
            "forward_entry_time": now_ts - 0.004,
            "queue_time": 0.0003,
            "reasoning_tokens": 0,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        if role == "prefill" or not self.manner.decode_pd:
            meta["prefill_finished_time"] = now_ts - 0.003
        if finish is not None:
            meta |= {
                "e2e_latency": 0.01,
                "request_received_ts": now_ts - 0.010,
                "request_finished_ts": now_ts - 0.001,
            }
        if len(tokens) == 1 or finish is not None:
            meta["response_sent_to_client_ts"] = now_ts - 0.0005
        return {
            "text": "".join(f" w{token}" for token in tokens),
            "output_ids": tokens,
            "meta_info": meta,
        }

    async def metrics(self, _request: web.Request) -> web.Response:
        labels = 'engine_type="prefill",model_name="/models/{m}",tp_rank="0"'
        lines = [
            f"sglang:num_running_reqs{{{labels}}} 0.0",
            f"sglang:num_queue_reqs{{{labels}}} 1.0",
        ]
        if self.manner.counted and self.transfers:
            mib = self.pages * self.manner.page_bytes / 2**20
            lines += [
                "# TYPE sglang:kv_transfer_total_mb histogram",
                f'sglang:kv_transfer_total_mb_bucket{{{labels},le="1.0"}} 1.0',
                f"sglang:kv_transfer_total_mb_sum{{{labels}}} {mib!r}",
                f"sglang:kv_transfer_total_mb_count{{{labels}}} {self.transfers}.0",
            ]
        return web.Response(text="\n".join(lines) + "\n")


async def _healthy(_request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def pair_of_servers(manner: Manner) -> AsyncIterator[Pair]:
    """Both on loopback, at ``ports``."""
    pair = Pair(manner)
    async with AsyncExitStack() as stack:
        for role in ("prefill", "decode"):
            app = web.Application()

            async def generate(request: web.Request, role: str = role) -> web.StreamResponse:
                return await pair.generate(request, role)

            app.router.add_post("/generate", generate)
            app.router.add_get("/metrics", pair.metrics)
            app.router.add_get("/health", _healthy)
            pair.ports[role] = await serve_http(stack, app, "127.0.0.1", 0, EngineError)
        yield pair
