"""How a process that the harness starts is driven: JSON lines in on stdin, out on stdout.

The first line in is its configuration, so that secrets stand in no file and no argument list.
End of file on stdin means that the harness is gone, however it died: the child then stops. Logs go
to stderr. Rows for the run directory are appended to a spool, one write a row, so that a crash
loses at most the row being written.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import uvloop

from harness.core import EngineError, PrfaasError

#: A configuration holds paths, addresses and counts; nothing in it grows with the load.
MAX_LINE_BYTES = 4 * 1024 * 1024

T = TypeVar("T")


def run_child(serve: Coroutine[object, object, None]) -> int:
    """Run a child's service; its failure is told to the harness and becomes the exit status.

    Ctrl-C reaches every process of a terminal; when a child ends is the harness' to decide.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        uvloop.run(serve)
    except PrfaasError as error:
        tell("failed", message=str(error))
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


def settle() -> None:
    """What lives by now lives to the end: no collection shall look at it in mid-run."""
    gc.collect()
    gc.freeze()


async def open_orders() -> asyncio.StreamReader:
    """The process' stdin as a stream of lines."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def read_config(orders: asyncio.StreamReader, kind: type[T]) -> T:
    """The first line as a validated ``kind``; EngineError when there is none or it is wrong."""
    line = await orders.readline()
    if not line:
        raise EngineError("stdin closed before a configuration line came")
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the configuration line is not valid: {error}") from error


async def each_order(orders: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Further lines until end of file."""
    while line := await orders.readline():
        yield msgspec.json.decode(line, type=dict[str, Any])


def tell(event: str, **fields: object) -> None:
    """Write one event to stdout for the harness."""
    sys.stdout.buffer.write(msgspec.json.encode({"event": event, **fields}) + b"\n")
    sys.stdout.buffer.flush()


class Spool:
    """An append-only file of JSON lines; each row is one ``write`` call."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._file = -1

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def write(self, row: Mapping[str, object] | msgspec.Struct) -> None:
        self._append(msgspec.json.encode(row) + b"\n")

    def write_all(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Several rows in one call."""
        self._append(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def _append(self, lines: bytes) -> None:
        """A short write, as a full disk gives, goes on where it stopped or raises OSError."""
        while lines:
            lines = lines[os.write(self._file, lines) :]
