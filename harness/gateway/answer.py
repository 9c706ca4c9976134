"""The answer to one client: streamed as chunks come, or collected and sent whole."""

import asyncio
import time

import xxhash
from aiohttp import web

from harness.gateway.metrics import GatewayMetrics
from harness.surface.generate import SSE_DONE, SSE_HEADERS, GenerateChunk, encode
from harness.surface.openai import Call, render_chunk, render_usage, render_whole

#: A client that reads nothing is not waited for any longer with the news that its request failed.
FAREWELL_S = 1.0


class Answer:
    """Writes the chunks of one request; tokens that were sent already are not sent again.

    ``first_chunk_mono_ns`` is when the first generated token reached the gateway and
    ``first_written_mono_ns`` when it was handed to the client's socket: the budget's "return".
    """

    def __init__(
        self, request: web.Request, call: Call, rid: str, received_ns: int, metrics: GatewayMetrics
    ) -> None:
        self._request = request
        self._call = call
        self._rid = rid
        self._metrics = metrics
        self._last_ns = received_ns
        self._response: web.StreamResponse | None = None
        self._collected: list[GenerateChunk] = []
        self._output_ids: list[int] = []
        self._completed_tokens = 0
        self._is_ending = False
        self.first_chunk_mono_ns: int | None = None
        self.first_written_mono_ns: int | None = None
        self._last: GenerateChunk | None = None

    async def send(self, chunk: GenerateChunk) -> None:
        """Pass on what is new in ``chunk`` (a worker's increment)."""
        arrived_ns = time.monotonic_ns()
        meta = chunk.meta_info
        finished = meta.finish_reason is not None
        if meta.completion_tokens <= self._completed_tokens and not finished:
            return
        self._measure(arrived_ns, meta.completion_tokens - self._completed_tokens)
        self._completed_tokens = max(self._completed_tokens, meta.completion_tokens)
        meta.id = self._rid
        self._output_ids += chunk.output_ids
        self._last = chunk
        if not self._call.body.stream:
            self._collected.append(chunk)
            self._note_first(arrived_ns)
            return
        if self._response is None:
            self._response = web.StreamResponse(headers=SSE_HEADERS)
            await self._response.prepare(self._request)
        await self._response.write(render_chunk(self._call, chunk))
        if self.first_chunk_mono_ns is None:
            await asyncio.sleep(0)  # the event loop writes at the end of a turn
            self._note_first(arrived_ns)

    @property
    def has_begun(self) -> bool:
        """Whether a token has gone, or may have gone, to the client."""
        return self._completed_tokens > 0

    @property
    def output_digest(self) -> str | None:
        """XXH3 of the ids that were answered, by which answers to one prompt are compared."""
        return xxhash.xxh3_64_hexdigest(encode(self._output_ids)) if self._output_ids else None

    def _measure(self, arrived_ns: int, new_tokens: int) -> None:
        """The first token's time since the request came, a later one's since those before it."""
        if new_tokens > 0:
            since_s = (arrived_ns - self._last_ns) / 1e9
            if self._completed_tokens:
                self._metrics.itl_s.observe(since_s / new_tokens)
            else:
                self._metrics.ttft_s.observe(since_s)
            self._last_ns = arrived_ns

    def _note_first(self, arrived_ns: int) -> None:
        if self.first_chunk_mono_ns is None:
            self.first_chunk_mono_ns = arrived_ns
            self.first_written_mono_ns = time.monotonic_ns()

    async def finish(self) -> web.StreamResponse:
        """Close the stream, or answer whole."""
        assert self._last is not None, "a completed request has at least one chunk"
        if self._response is None:
            whole = GenerateChunk(
                text="".join(chunk.text for chunk in self._collected),
                output_ids=[token for chunk in self._collected for token in chunk.output_ids],
                meta_info=self._last.meta_info,
            )
            return web.Response(
                body=render_whole(self._call, whole), content_type="application/json"
            )
        self._is_ending = True
        await self._response.write(render_usage(self._call, self._last) + SSE_DONE)
        await self._response.write_eof()
        return self._response

    async def fail(self, status: int, error: bytes) -> web.StreamResponse:
        """Say that the request failed: by status while nothing was sent, else by an event."""
        if self._response is None:
            return web.Response(status=status, body=error, content_type="application/json")
        try:
            async with asyncio.timeout(FAREWELL_S):
                if self._is_ending:  # its end is written and not taken: nothing may follow
                    raise TimeoutError
                await self._response.write(b"data: " + error + b"\n\n")
                await self._response.write_eof()
        except (TimeoutError, asyncio.CancelledError):
            # Once a wait for the client was cut short, aiohttp ends every other one like that.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._request.transport is not None:
                self._request.transport.abort()
        return self._response
