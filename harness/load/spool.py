"""The client's spool: one JSON line for each planned request, written as soon as it ends.

All ``*_mono_ns`` are CLOCK_MONOTONIC of this host. ``sent_mono_ns`` is taken right before the
request's first byte is handed to the kernel, over a connection that is there by then or could not
be made. Null means that it did not happen; there is no 0 for "missing".
"""

from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from harness.core import Outcome, ScenarioError
from harness.load.completion import FailurePhase


class Row(msgspec.Struct, kw_only=True):
    """One request as the client saw it. ``chunk_tokens`` are the tokens new in each chunk.

    ``sent_again``: the server closed the kept connection on which the request left before a byte of
    a response came, so a new connection carried it; ``sent_mono_ns`` is of the first time.
    """

    rid: str
    index: int
    planned_mono_ns: int | None = None
    sent_mono_ns: int | None = None
    sent_again: bool = False
    first_byte_mono_ns: int | None = None
    first_token_mono_ns: int | None = None
    end_mono_ns: int | None = None
    chunk_mono_ns: list[int] = []
    chunk_tokens: list[int] = []
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    http_status: int | None = None
    outcome: Outcome = "unsent"
    failure_phase: FailurePhase | None = None
    failure_message: str | None = None


class Spool:
    """An append-only JSONL file of rows; each row is in the kernel's hands when append returns."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ScenarioError(f"{path}: cannot write the spool: {error.strerror}.") from error
        if self._file.tell():
            self._file.close()
            raise ScenarioError(
                f"{path}: the spool already has rows; give each run a spool of its own."
            )
        self._encode = msgspec.json.Encoder().encode

    def append(self, row: Row) -> None:
        """Write one line. Raises OSError when the disk refuses it."""
        line = self._encode(row) + b"\n"
        written = self._file.write(line)
        while written < len(line):
            written += self._file.write(line[written:])

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
