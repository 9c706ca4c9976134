"""A completion server whose times are known, and which can be hostile: the truth for load tests.

``python truth_server.py --log FILE [--ttft-s X] [--chunk-s Y] [--tokens-per-chunk K]`` binds a free
loopback port, prints it, and ends with its stdin. ``POST /v1/completions`` answers as OpenAI does
with usage in every chunk: the first token X after the request's head arrived, then a chunk each Y.
``POST /hostile/MODE`` misbehaves as MODE says (the functions in HOSTILE), and ``/hostile/by-rid``
as the part of the request's rid before a slash. The log has one
JSON line for each request: what arrived, and the CLOCK_MONOTONIC time of every write.
"""

import argparse
import asyncio
import json
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)
ERROR_BODY = b'{"error":"no capacity ' + b"x" * 5000 + b'"}'


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
        assert self.body is not None
        usage = {
            "prompt_tokens": len(self.body.prompt) if prompt is None else prompt,
            "completion_tokens": completed,
        }
        self.written_mono_ns.append(time.monotonic_ns())
        await self.event(json.dumps({"choices": [{"index": 0, "text": text}], "usage": usage}))

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


async def _started(answer: Answer) -> Body:
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


async def trickled_head(answer: Answer) -> None:
    """A head that never ends, a byte at a time and far below any bound."""
    await answer.read_body()
    for byte in STREAM_HEAD[:-2]:
        await answer.write(bytes([byte]))
        await asyncio.sleep(0.1)


async def giant_chunk(answer: Answer) -> None:
    await _started(answer)
    await answer.write(b"ffffffffff\r\n")
    await answer.reader.read()


async def refuse(answer: Answer) -> None:
    await answer.read_body()
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(ERROR_BODY)
    await answer.write(head + ERROR_BODY)


async def refuse_unread(answer: Answer) -> None:
    await answer.write(
        b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 8\r\nConnection: close\r\n\r\ntoo long"
    )


async def never_read(answer: Answer) -> None:
    answer.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket transport
    await asyncio.sleep(3600)


async def silent(answer: Answer) -> None:
    await answer.read_body()
    await answer.reader.read()


async def silent_after_head(answer: Answer) -> None:
    await _started(answer)
    await answer.reader.read()


async def garbage(answer: Answer) -> None:
    await answer.read_body()
    await answer.write(bytes(range(256)) * 16)


async def endless_header(answer: Answer) -> None:
    await answer.read_body()
    await answer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        await answer.write(b"X-More: " + b"y" * 1000 + b"\r\n")


async def close_before_head(answer: Answer) -> None:
    await answer.read_body()


async def reset_before_head(answer: Answer) -> None:
    await answer.read_body()
    answer.reset()


async def reset_in_stream(answer: Answer) -> None:
    await _started(answer)
    await answer.tokens(1)
    answer.reset()


async def close_before_token(answer: Answer) -> None:
    await _started(answer)


async def close_in_stream(answer: Answer) -> None:
    await _started(answer)
    await answer.tokens(1)
    await answer.tokens(2)


async def no_done(answer: Answer) -> None:
    body = await _started(answer)
    await answer.tokens(body.max_tokens)
    await answer.write(b"0\r\n\r\n")


async def no_tokens(answer: Answer) -> None:
    await _started(answer)
    await answer.finish()


async def no_usage(answer: Answer) -> None:
    await _started(answer)
    await answer.event('{"choices":[{"text":" hi"}]}')
    await answer.finish()


async def only_summary(answer: Answer) -> None:
    body = await _started(answer)
    usage = {"prompt_tokens": len(body.prompt), "completion_tokens": body.max_tokens}
    await answer.event(json.dumps({"choices": [], "usage": usage}))
    await answer.finish()


async def error_event(answer: Answer) -> None:
    await _started(answer)
    await answer.tokens(1)
    await answer.event('{"error":{"message":"KV transfer failed","code":500}}')
    await answer.finish()


async def not_json(answer: Answer) -> None:
    await _started(answer)
    await answer.event('{"choices": [')


async def not_a_stream(answer: Answer) -> None:
    await answer.read_body()
    await answer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n"
        b'{"choices":[]}'
    )


async def too_many_tokens(answer: Answer) -> None:
    await _started(answer)
    completed = 0
    while True:
        completed += 1
        await answer.tokens(completed)


async def too_few_tokens(answer: Answer) -> None:
    await _started(answer)
    await answer.tokens(1)
    await answer.finish()


async def wrong_prompt(answer: Answer) -> None:
    body = await _started(answer)
    await answer.tokens(body.max_tokens, prompt=len(body.prompt) - 1)
    await answer.finish()


async def endless_comments(answer: Answer) -> None:
    await _started(answer)
    while True:
        await answer.write(framed(b": still here\n\n" * 4000))


async def endless_line(answer: Answer) -> None:
    await _started(answer)
    await answer.write(framed(b"data: "))
    while True:
        await answer.write(framed(b"x" * 65536))


async def never_ends(answer: Answer) -> None:
    """Complete but for the end of the message: [DONE] came, the connection stays."""
    body = await _started(answer)
    await answer.tokens(body.max_tokens)
    await answer.event("[DONE]")
    await answer.reader.read()


async def odd_but_right(answer: Answer) -> None:
    """Empty first chunks, comments, CRLF, text of several bytes a character, one byte a write."""
    body = await _started(answer)
    await answer.event('{"choices":[{"text":""}]}')
    usage = {"prompt_tokens": len(body.prompt), "completion_tokens": 0}
    await answer.event(json.dumps({"choices": [{"text": ""}], "usage": usage}))
    await asyncio.sleep(0.05)
    usage["completion_tokens"] = body.max_tokens
    chunk = json.dumps({"choices": [{"text": "日本"}], "usage": usage}, ensure_ascii=False)
    text = f": ping\r\n\r\nid: 7\r\ndata: {chunk}\r\n\r\n".encode()
    answer.written_mono_ns.append(time.monotonic_ns())
    for at in range(len(text)):
        await answer.write(framed(text[at : at + 1]))
        await asyncio.sleep(0)
    await answer.finish()


HOSTILE: dict[str, Callable[[Answer], Awaitable[None]]] = {
    mode.__name__: mode
    for mode in (
        honest,
        trickled_head,
        giant_chunk,
        refuse,
        refuse_unread,
        never_read,
        silent,
        silent_after_head,
        garbage,
        endless_header,
        close_before_head,
        reset_before_head,
        reset_in_stream,
        close_before_token,
        close_in_stream,
        no_done,
        no_tokens,
        no_usage,
        only_summary,
        error_event,
        not_json,
        not_a_stream,
        too_many_tokens,
        too_few_tokens,
        wrong_prompt,
        endless_comments,
        endless_line,
        never_ends,
        odd_but_right,
    )
}


async def serve(options: argparse.Namespace) -> None:
    with options.log.open("ab", buffering=0) as log:

        async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answer = Answer(reader, writer, options)
            with closing(writer):
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    path = await answer.read_head()
                    if path == "/hostile/by-rid":
                        mode = HOSTILE[(await answer.read_body()).rid.partition("/")[0]]
                    elif path.startswith("/hostile/"):
                        mode = HOSTILE[path.removeprefix("/hostile/")]
                    else:
                        mode = honest
                    await mode(answer)
                log.write(answer.log_line())

        server = await asyncio.start_server(answer_one, "127.0.0.1", 0, limit=1 << 20)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        server.close()


@contextmanager
def truth_server(log: Path, **options: float) -> Iterator[int]:
    """The port of a server in a process of its own, ended with the block."""
    argv = [sys.executable, __file__, "--log", str(log)]
    for name, value in options.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    with Popen(argv, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--ttft-s", type=float, default=0.0)
    parser.add_argument("--chunk-s", type=float, default=0.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
