"""The ways in which the known-truth server (truth_server.py) can misbehave."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable

from truth_answer import STREAM_HEAD, Answer, framed, honest, started

ERROR_BODY = b'{"error":"no capacity ' + b"x" * 5000 + b'"}'


async def trickled_head(answer: Answer) -> None:
    """A head that never ends, a byte at a time and far below any bound."""
    await answer.read_body()
    for byte in STREAM_HEAD[:-2]:
        await answer.write(bytes([byte]))
        await asyncio.sleep(0.1)


async def giant_chunk(answer: Answer) -> None:
    await started(answer)
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
    await started(answer)
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
    await started(answer)
    await answer.tokens(1)
    answer.reset()


async def reset_at_random(answer: Answer) -> None:
    """RST after any byte before [DONE]; where is decided by the rid."""
    body = await answer.read_body()
    parts = [STREAM_HEAD, *(answer.token_bytes(n + 1) for n in range(body.max_tokens))]
    whole = b"".join(parts)
    at = random.Random(body.rid).randrange(len(whole))
    told = sum(len(b"".join(parts[: n + 2])) <= at for n in range(body.max_tokens))
    answer.written_mono_ns += [time.monotonic_ns()] * told
    await answer.write(whole[:at])
    answer.reset()


async def close_before_token(answer: Answer) -> None:
    await started(answer)


async def close_in_stream(answer: Answer) -> None:
    await started(answer)
    await answer.tokens(1)
    await answer.tokens(2)


async def no_done(answer: Answer) -> None:
    body = await started(answer)
    await answer.tokens(body.max_tokens)
    await answer.write(b"0\r\n\r\n")


async def no_tokens(answer: Answer) -> None:
    await started(answer)
    await answer.finish()


async def no_usage(answer: Answer) -> None:
    await started(answer)
    await answer.event('{"choices":[{"text":" hi"}]}')
    await answer.finish()


async def only_summary(answer: Answer) -> None:
    body = await started(answer)
    usage = {"prompt_tokens": len(body.prompt), "completion_tokens": body.max_tokens}
    await answer.event(json.dumps({"choices": [], "usage": usage}))
    await answer.finish()


async def error_event(answer: Answer) -> None:
    await started(answer)
    await answer.tokens(1)
    await answer.event('{"error":{"message":"KV transfer failed","code":500}}')
    await answer.finish()


async def not_json(answer: Answer) -> None:
    await started(answer)
    await answer.event('{"choices": [')


async def not_a_stream(answer: Answer) -> None:
    await answer.read_body()
    await answer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n"
        b'{"choices":[]}'
    )


async def too_many_tokens(answer: Answer) -> None:
    await started(answer)
    completed = 0
    while True:
        completed += 1
        await answer.tokens(completed)


async def too_few_tokens(answer: Answer) -> None:
    await started(answer)
    await answer.tokens(1)
    await answer.finish()


async def wrong_prompt(answer: Answer) -> None:
    body = await started(answer)
    await answer.tokens(body.max_tokens, prompt=len(body.prompt) - 1)
    await answer.finish()


async def endless_comments(answer: Answer) -> None:
    await started(answer)
    while True:
        await answer.write(framed(b": still here\n\n" * 4000))


async def endless_line(answer: Answer) -> None:
    await started(answer)
    await answer.write(framed(b"data: "))
    while True:
        await answer.write(framed(b"x" * 65536))


async def never_ends(answer: Answer) -> None:
    """Complete but for the end of the message: [DONE] came, the connection stays."""
    body = await started(answer)
    await answer.tokens(body.max_tokens)
    await answer.event("[DONE]")
    await answer.reader.read()


async def odd_but_right(answer: Answer) -> None:
    """Empty first chunks, comments, CRLF, text of several bytes a character, one byte a write."""
    body = await started(answer)
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
        reset_at_random,
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
