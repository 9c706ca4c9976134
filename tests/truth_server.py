"""A completion server whose times are known, and which can be hostile: the truth for load tests.

``python truth_server.py --log FILE [--ttft-s X] [--chunk-s Y] [--tokens-per-chunk K]`` binds a free
loopback port, prints it, and ends with its stdin. ``POST /v1/completions`` answers as OpenAI does
with usage in every chunk: the first token X after the request's head arrived, then a chunk each Y.
``POST /hostile/MODE`` misbehaves as MODE says (hostile_modes.py), and ``/hostile/by-rid``
as the part of the request's rid before a slash. The log has one
JSON line for each request: what arrived, and the CLOCK_MONOTONIC time of every write.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen

from hostile_modes import HOSTILE
from truth_answer import Answer, honest


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
