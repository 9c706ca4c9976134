"""The gateway's side of SGLang's PD protocol: one body to a prefill and to a decode instance."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

import aiohttp
import msgspec

from harness.core import EngineError, Route
from harness.gateway.config import WorkerAddress
from harness.surface.generate import GenerateBody, GenerateChunk, decode_chunk, encode
from harness.surface.sse import SseError, SseParser

#: Of the body, sent together with the head.
HEAD_BYTES = 64


async def _head_first(body: bytes, handed_over: Callable[[], None]) -> AsyncIterator[bytes]:
    """The body in two writes, so that the head leaves in a packet of its own.

    A worker's clock starts when it has the head. In one write with a prompt the head would arrive
    with the last byte of a segmentation-offload packet: half a millisecond later at 1 Gbit/s. The
    event loop writes at the end of a turn, so ``handed_over`` is called in the next one. No process
    would account for either.
    """
    yield body[:HEAD_BYTES]
    await asyncio.sleep(0)
    handed_over()
    yield body[HEAD_BYTES:]


def _nothing() -> None:
    """Nobody wants to know."""


class InstanceUnreachableError(EngineError):
    """Nothing answers at an instance's address."""

    def __init__(self, instance: str, reason: str) -> None:
        super().__init__(f"{instance} is not reachable: {reason}")
        self.instance = instance


class Upstream:
    """The workers behind the gateway."""

    def __init__(
        self, session: aiohttp.ClientSession, workers: Sequence[WorkerAddress], key: str
    ) -> None:
        self._session = session
        self._workers = {worker.name: worker for worker in workers}
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def body(self, body: GenerateBody, route: Route) -> bytes:
        """The body that both halves of ``route`` get: the client's with the pair's bootstrap."""
        prefill = self._workers[route.prefill.name]
        return encode(
            msgspec.structs.replace(
                body,
                stream=True,
                bootstrap_host=prefill.host,
                bootstrap_port=prefill.port,
                bootstrap_room=secrets.randbits(60),
            )
        )

    async def stream(
        self, instance: str, body: bytes, handed_over: Callable[[], None] = _nothing
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Events of ``/generate`` at an instance; EngineError when it fails or breaks off.

        ``handed_over`` is called when the request's head has gone to the socket, connecting
        included: until then its time is the gateway's.
        """
        worker = self._workers[instance]
        url = f"http://{worker.host}:{worker.port}/generate"
        try:
            headers = self._headers | {"Content-Length": str(len(body))}
            async with self._session.post(
                url, data=_head_first(body, handed_over), headers=headers
            ) as answer:
                if answer.status != 200:
                    excerpt = (await answer.text())[:300]
                    raise EngineError(f"{instance} answered {answer.status}: {excerpt}")
                async for chunk in self._events(answer.content):
                    if chunk.error is not None:
                        said = chunk.error
                        message = said.get("message", said) if isinstance(said, dict) else said
                        raise EngineError(f"{instance} failed: {message}")
                    yield chunk
        except aiohttp.ClientConnectorError as error:
            raise InstanceUnreachableError(instance, str(error)) from error
        except (aiohttp.ClientError, SseError) as error:
            raise EngineError(f"the stream of {instance} broke off: {error}") from error

    async def _events(self, content: aiohttp.StreamReader) -> AsyncIterator[GenerateChunk]:
        parser = SseParser()
        done = False
        # Read to the end of the message: a connection left in the middle of one is not used again.
        async for piece in content.iter_any():
            for event in parser.feed(piece):
                if done:
                    raise EngineError("the stream went on after [DONE]")
                done = event.data == "[DONE]"
                if not done:
                    yield decode_chunk(event.data)
        if not done:
            raise EngineError("the stream ended before [DONE]")

    async def canary(self, routes: Sequence[Route], prompt_tokens: int) -> None:
        """A short request through every prefill x decode pair; EngineError names a pair that fails.

        It also opens the KV connections, so that no measured request pays for them.
        """
        by_prefill: dict[str, list[Route]] = {}
        for route in routes:
            by_prefill.setdefault(route.prefill.name, []).append(route)
        async with asyncio.TaskGroup() as group:
            for one in by_prefill.values():
                group.create_task(self._canary(one, prompt_tokens))

    async def _canary(self, routes: Sequence[Route], prompt_tokens: int) -> None:
        ids = msgspec.Raw(encode(list(range(1, prompt_tokens + 1))))
        for route in routes:
            body = GenerateBody(input_ids=ids, rid=f"canary-{route.prefill.name}")
            body.sampling_params.max_new_tokens = 2
            raw = self.body(body, route)
            pair = f"{route.prefill.name} -> {route.decode.name}"
            prefill, decode = await asyncio.gather(
                self._last(route.prefill.name, raw), self._last(route.decode.name, raw)
            )
            sent = prefill.meta_info.prfaas and prefill.meta_info.prfaas.prefill
            got = decode.meta_info.prfaas and decode.meta_info.prfaas.decode
            if not sent or not got or sent.kv_wire_bytes_sent != got.kv_wire_bytes_received:
                raise EngineError(f"canary {pair}: the KV that was sent is not the KV that arrived")
            if decode.meta_info.completion_tokens != 2:
                raise EngineError(f"canary {pair}: 2 tokens were asked for and not answered")

    async def _last(self, instance: str, body: bytes) -> GenerateChunk:
        last: GenerateChunk | None = None
        async with aclosing(self.stream(instance, body)) as chunks:
            async for chunk in chunks:
                last = chunk
        if last is None:
            raise EngineError(f"{instance} answered without a single event")
        return last
