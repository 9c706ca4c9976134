"""A server of known truth as a child process: what it is told, and what it says of each request.

The server answers ``POST /v1/completions`` as the gateway does, a token count in every chunk, on a
timeline that is fixed when the last byte of a request was read:

    due(k) = read + ttft_s + k * chunk_s        k = 0 .. the number of chunks - 1

so a client's error is what it says less what the server says of the same request, and the server's
own lateness, ``written - due``, is on record and in nobody's error. All ``*_mono_ns`` are
CLOCK_MONOTONIC, which the processes of one host share. The server is
``harness.load.truth_server``; this module imports neither Locust nor gevent.
"""

import contextlib
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self, TypeVar

import msgspec
from msgspec import Meta

from harness.core import LoadError

#: How long it may take to start and to end, wall time; both are a matter of a second.
PATIENCE_S = 20.0

T = TypeVar("T")


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the server answers: the first line of its stdin. Seconds are wall seconds.

    The first chunk carries one token, each further one ``tokens_per_chunk``, until the request's
    ``max_tokens`` are out. A row for each request is appended to ``log_path``, if there is one.
    """

    ttft_s: Annotated[float, Meta(ge=0, le=3600)]
    chunk_s: Annotated[float, Meta(ge=0, le=3600)]
    tokens_per_chunk: Annotated[int, Meta(ge=1)] = 1
    api_key: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    log_path: str | None = None


class TruthRow(msgspec.Struct, kw_only=True):
    """One request as the server saw it; ``request_id`` is its ``x-request-id`` header.

    ``first_byte_mono_ns`` and ``read_mono_ns``: when its first and its last byte had been read.
    ``written_mono_ns`` are taken right before each chunk was handed to the kernel. ``whole`` is
    false where the client left before its answer was out.
    """

    rid: str | None
    request_id: str | None
    prompt_tokens: int
    output_tokens: int
    first_byte_mono_ns: int
    read_mono_ns: int
    due_mono_ns: list[int]
    written_mono_ns: list[int]
    whole: bool


class Ready(msgspec.Struct, tag_field="event", tag="ready"):
    """It listens."""

    port: int


class Finished(msgspec.Struct, tag_field="event", tag="finished"):
    """Its last line, once stdin is closed; lateness is of all chunks, null if none was written."""

    requests: int
    chunks: int
    late_p50_s: float | None
    late_p99_s: float | None
    late_max_s: float | None
    cpu_s: float


class TruthServer:
    """The child, from the ``ready`` line to the end of the block. LoadError when it cannot be."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self.port = 0
        self.finished: Finished | None = None

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.load.truth_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(msgspec.json.encode(self._truth) + b"\n")
            self.process.stdin.flush()
            self.port = _told(self.process.stdout.readline(), Ready).port
        except BaseException:
            self._kill()
            raise
        return self

    def stop(self) -> Finished:
        """End it, and have what it says of its own lateness. Once."""
        try:
            said, _ = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise LoadError("the known-truth server does not end; it was killed.") from error
        self.finished = _told(said, Finished)
        return self.finished

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self.finished is None:
                self.stop()
        finally:
            self._kill()

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it went first
                pipe.close()


def read_rows(path: Path) -> list[TruthRow]:
    """The server's log; complete once it has ended."""
    decode = msgspec.json.Decoder(TruthRow).decode
    with path.open("rb") as lines:
        return [decode(line) for line in lines]


def _told(line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        said = line.decode("utf-8", "replace").strip()[:300] or "nothing; see stderr"
        raise LoadError(
            f"the known-truth server did not start or end as it should: {said}"
        ) from error
