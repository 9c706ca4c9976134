"""One answer of the known-truth server (truth_server.py): what came, and what was written when."""

import argparse
import asyncio
import json
import socket
import struct
import time
from dataclasses import dataclass, field

import msgspec

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly the request body of the contract."""

    model: str
    prompt: list[int]
    max_tokens: int
    stream: bool
    stream_options: dict[str, bool]
    temperature: float
    ignore_eos: bool
    rid: str


@dataclass
class Answer:
    """One request on one connection, and what was written when."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    options: argparse.Namespace
    head: bytes = b""
    body: Body | None = None
    received_mono_ns: int = 0
    written_mono_ns: list[int] = field(default_factory=list)

    async def read_head(self) -> str:
        self.head = await self.reader.readuntil(b"\r\n\r\n")
        self.received_mono_ns = time.monotonic_ns()
        return self.head.split(b" ", 2)[1].decode()

    async def read_body(self) -> Body:
        if self.body is not None:
            return self.body
        length = int(self.head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.body = msgspec.json.decode(await self.reader.readexactly(length), type=Body)
        return self.body

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def event(self, data: str) -> None:
        await self.write(framed(f"data: {data}\n\n".encode()))

    async def tokens(self, completed: int, text: str = " ok", prompt: int | None = None) -> None:
        """One chunk that brings the count of generated tokens to ``completed``."""
        self.written_mono_ns.append(time.monotonic_ns())
        await self.write(self.token_bytes(completed, text, prompt))

    def token_bytes(self, completed: int, text: str = " ok", prompt: int | None = None) -> bytes:
        assert self.body is not None
        usage = {
            "prompt_tokens": len(self.body.prompt) if prompt is None else prompt,
            "completion_tokens": completed,
        }
        chunk = json.dumps({"choices": [{"index": 0, "text": text}], "usage": usage})
        return framed(f"data: {chunk}\n\n".encode())

    async def finish(self) -> None:
        await self.event("[DONE]")
        await self.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Close with RST."""
        linger = struct.pack("ii", 1, 0)
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    def log_line(self) -> bytes:
        body = self.body
        line = {
            "rid": body and body.rid,
            "received_mono_ns": self.received_mono_ns,
            "written_mono_ns": self.written_mono_ns,
            "prompt": body and (body.prompt if len(body.prompt) <= 64 else body.prompt[:8]),
            "prompt_tokens": body and len(body.prompt),
            "prompt_sum": body and sum(body.prompt),
            "max_tokens": body and body.max_tokens,
            "head": self.head.decode("latin-1"),
        }
        return msgspec.json.encode(line) + b"\n"


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def sleep_until(mono_ns: int) -> None:
    """To some microseconds: the loop's own timers are up to a millisecond late."""
    left_s = (mono_ns - time.monotonic_ns()) / 1e9
    if left_s > 0.0015:
        await asyncio.sleep(left_s - 0.0015)
    while time.monotonic_ns() < mono_ns:
        await asyncio.sleep(0)


async def started(answer: Answer) -> Body:
    body = await answer.read_body()
    await answer.write(STREAM_HEAD)
    return body


async def honest(answer: Answer) -> None:
    body = await answer.read_body()
    options = answer.options
    await answer.write(STREAM_HEAD)
    due_ns = answer.received_mono_ns + int(options.ttft_s * 1e9)
    completed = 0
    while completed < body.max_tokens:
        completed = min(completed + (options.tokens_per_chunk if completed else 1), body.max_tokens)
        await sleep_until(due_ns)
        await answer.tokens(completed)
        due_ns += int(options.chunk_s * 1e9)
    summary = {
        "choices": [],
        "usage": {"prompt_tokens": len(body.prompt), "completion_tokens": completed},
    }
    await answer.event(json.dumps(summary))
    await answer.finish()
